"""Files of Hugging Face into the stages of a pipeline, under the names of each framework, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard import Stage
from reshard.mapping.families import ready
from tests import gloo

for package in ("transformers", "safetensors"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend

LAYERS = 4
LAYER = re.compile(r"((?:model\.|decoder\.)?layers)\.(\d+)\.")
LAST = ("lm_head.", "output_layer.", "model.norm.", "decoder.final_layernorm.", "norm.")
NAMINGS: list[tuple[str, dict[str, Any]]] = [
    ("transformers", {}),
    ("megatron", {"padded_vocab": 64}),
    ("megatron", {"transformer_engine": True}),
    ("torchtitan", {}),
]
FAMILIES = ("qwen3_tied", "qwen3_moe", "gpt_oss")
LAYOUTS = ("stages", "numbered from 0", "virtual stages", "stages of FSDP2")


def config_of_four_layers(family: str) -> Any:
    from tests.stories.tiny_models import fresh

    config = fresh(family).config
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * LAYERS
    return config


def module_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of these names."""
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.full(shape, 7.0)))
    return root


def stage_of(name: str, stages: int) -> int:
    match = LAYER.match(name)
    if match is None:
        return stages - 1 if name.startswith(LAST) else 0
    return int(match[2]) * stages // LAYERS


def filled(folder: Path, number: int, naming: str, options: dict[str, Any], layout: str) -> list[str]:
    """Fill this rank's stages and save them; the names of tensors with other values."""
    rank, mapping = dist.get_rank(), ready(folder / "hf", "huggingface", naming, **options)
    truth = mapping.apply(reshard.open(folder / "hf"))
    stages, mine = (4, (rank, rank + 2)) if layout == "virtual stages" else (2, (rank,))
    if layout == "stages of FSDP2":
        mine = (rank // 2,)
    modules: list[nn.Module | Stage] = []
    for stage in mine:
        names = [name for name in (*truth, *truth.aliases) if stage_of(name, stages) == stage]
        shapes = {name: tuple(truth[name].shape) for name in names}
        if layout == "numbered from 0":
            first = stage * LAYERS // stages
            local = {LAYER.sub(lambda m: f"{m[1]}.{int(m[2]) - first}.", name): shape for name, shape in shapes.items()}  # noqa: B023
            of_layers = {match[1] for name in names if (match := LAYER.match(name))}
            modules.append(Stage(module_of(local), dict.fromkeys(of_layers, first)))
        else:
            modules.append(module_of(shapes))
    if layout == "stages of FSDP2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        modules = [fully_shard(module, mesh=mesh["fsdp"]) for module in modules]
    state = reshard.get_model_state_dict(modules)
    assert reshard.load(state, folder / "hf", mapping=mapping).ok
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    reshard.save(state, folder / f"ours-{number}")
    return [name for name, tensor in whole.items() if not torch.equal(tensor, truth[name][...])]


def all_filled(folder: Path, layout: str) -> list[str]:
    """The names of tensors that came in wrong, of each family under each naming."""
    return [
        f"{family} {naming}: {name}"
        for family in FAMILIES
        for number, (naming, options) in enumerate(NAMINGS)
        for name in filled(folder / family, number, naming, options, layout)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_come_in_and_go_out(layout: str, tmp_path: Path) -> None:
    """Tied embeddings have a copy in the last stage, and padded ones their padding in both."""
    from tests.stories import tiny_models

    for family in FAMILIES:
        made = type(tiny_models.fresh(family))(config_of_four_layers(family))
        made.save_pretrained(tmp_path / family / "hf")

    assert gloo.run(all_filled, 4 if "FSDP2" in layout else 2, tmp_path, layout) == [[]] * (
        4 if "FSDP2" in layout else 2
    )

    for family in FAMILIES:
        files = tmp_path / family / "hf"
        stored = reshard.open(files)
        for number, (naming, options) in enumerate(NAMINGS):
            saved = reshard.open(tmp_path / family / f"ours-{number}")
            back = ready(files, naming, "huggingface", **options).apply(saved)
            assert sorted([*back, *back.aliases]) == sorted([*stored, *stored.aliases])
            assert all(torch.equal(back[name][...], stored[name][...]) for name in [*stored, *stored.aliases])
