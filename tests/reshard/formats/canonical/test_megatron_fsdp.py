"""Megatron-FSDP's `fsdp_dtensor`: what core 0.16.1 hands to torch's DCP, by its source. It runs on CUDA only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from tests.same import same
from tests.torch_releases import save_alone

SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,),
    "decoder.layers.0.mlp.linear_fc1.weight": (12, 4),
}
HYPER = {"lr": 0.1, "betas": (0.9, 0.95), "wd_mult": 1.0}


def of(shift: float) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) + shift for name, shape in SHAPES.items()}


def halved(tensors: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Gated MLPs are saved as two, gate and up."""
    out = {}
    for name, tensor in tensors.items():
        if "linear_fc1" not in name:
            out[prefix + name] = tensor
        elif isinstance(tensor, torch.Tensor):
            out[f"{prefix}{name}_w"], out[f"{prefix}{name}_v"] = tensor.chunk(2)
        else:
            parts = [{k: v.chunk(2)[i] if v.ndim else v for k, v in tensor.items()} for i in (0, 1)]
            out[f"{prefix}{name}_w"], out[f"{prefix}{name}_v"] = parts
    return out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["run", "with metadata.json", "folder"])
def test_names_halves_and_groups(place: str, tmp_path: Path) -> None:
    model, first, second = of(0), of(1), of(2)
    states = {n: {"exp_avg": first[n], "exp_avg_sq": second[n], "step": torch.tensor(3.0)} for n in SHAPES}
    state = {
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": halved(model, prefix="module."),
        "optimizer": {
            "state": halved(states, prefix="module."),
            "param_to_group_meta": {
                f"module.{name}": {**HYPER, "wd_mult": 0.0 if "norm" in name else 1.0} for name in SHAPES
            },
        },
        "opt_param_scheduler": {"num_steps": 5},
    }
    folder = tmp_path / "iter_0000005"
    save_alone(state, checkpoint_id=str(folder))
    if place != "folder":
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    if place == "with metadata.json":
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))

    checkpoint = reshard.open(folder if place == "folder" else tmp_path)
    found = checkpoint.normalized()

    assert checkpoint.format == ("dcp" if place == "folder" else "megatron")
    names = {n: n.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight") for n in SHAPES}
    assert set(found["model"]) == set(found["optim"]["state"]) == set(names.values())
    for name, fqn in names.items():
        assert same(found["model"][fqn][...], model[name])
        mine = found["optim"]["state"][fqn]
        assert same(mine["exp_avg"][...], first[name])
        assert same(mine["exp_avg_sq"][...], second[name])
        assert mine["step"][...].item() == 3
    groups = {group["wd_mult"]: group for group in found["optim"]["param_groups"]}
    assert groups[0.0] == {**HYPER, "wd_mult": 0.0, "params": ["decoder.layers.0.input_layernorm.weight"]}
    assert set(groups[1.0]["params"]) == set(names.values()) - set(groups[0.0]["params"])
