"""Folders of accelerate with more in them: several models, parts of each rank, objects that were registered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError, UnsafeDataError
from tests.reshard.formats.compare import check_all
from tests.reshard.formats.writers import DcpWriter, grid
from tests.torch_releases import save_alone

pytestmark = pytest.mark.filterwarnings(
    "ignore:Please use DTensor:FutureWarning", "ignore:torch.distributed is disabled"
)

A, B = torch.arange(12.0).reshape(3, 4), torch.arange(5.0)


def of_ranks(folder: Path, section: str, world: int, make: Callable[[int], Any]) -> None:
    """What `make(rank)` gives, saved by each rank under accelerate's name; a process group exists meanwhile."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            torch.save(make(rank), folder / f"{section}_rank{rank}.bin")
        finally:
            dist.destroy_process_group()


def sharded(whole: torch.Tensor, rank: int, world: int) -> Any:
    """This rank's rows of a ShardedTensor."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    rows, at, shards = whole.chunk(world), 0, []
    for i, part in enumerate(rows):
        shards.append(ShardMetadata([at, *[0] * (whole.ndim - 1)], list(part.shape), f"rank:{i}/cpu"))
        at += part.shape[0]
    mine = [Shard(rows[rank].clone(), shards[rank])] if rank < len(rows) else []
    metadata = ShardedTensorMetadata(shards, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def test_sharded_tensors_of_each_rank_are_joined(tmp_path: Path) -> None:
    """`use_dcp=False` under FSDP1 without a mesh."""
    of_ranks(tmp_path, "pytorch_model_fsdp_0", 2, lambda rank: {"w": sharded(A, rank, 2), "n": torch.tensor(3)})
    of_ranks(tmp_path, "optimizer_0", 2, lambda rank: {"state": {"w": {"m": sharded(A + 1, rank, 2)}}})
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "accelerate"
    check_all(checkpoint, {"model.w": A, "model.n": torch.tensor(3), "optimizer.state.w.m": A + 1})
    assert checkpoint.objects["scheduler.last_epoch"] == 2
    found = checkpoint.normalized()
    assert found["model"]["w"][1:].equal(A[1:])
    assert found["optim"]["state"]["w"]["m"][:, 2].equal(A[:, 2] + 1)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_lost_file_of_a_rank_is_named(tmp_path: Path, lost: int) -> None:
    """Also that of the highest rank, after which the others still count from 0: ShardedTensors know how many saved."""
    of_ranks(tmp_path, "pytorch_model_fsdp_0", 2, lambda rank: {"w": sharded(A, rank, 2)})
    (tmp_path / f"pytorch_model_fsdp_0_rank{lost}.bin").unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"rank {lost} of 2 is missing: pytorch_model_fsdp_0_rank{lost}"):
        open_checkpoint(tmp_path)


def test_torn_folders_and_lost_weights(tmp_path: Path) -> None:
    """What is left of a checkpoint does not open as one without an optimizer, or without weights."""
    for name, key in (("pytorch_model_fsdp_0", "model.w"), ("optimizer_0", "optimizer.state.w.m")):
        DcpWriter({key: grid(A, 2)}).write(tmp_path / "fsdp" / name)
    (tmp_path / "fsdp" / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer_0/: .* no \.metadata, which is written last"):
        open_checkpoint(tmp_path / "fsdp")
    (tmp_path / "trainer").mkdir()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"w": A}, tmp_path / "trainer" / name)
    with pytest.raises(CorruptCheckpointError, match=r"but no weights; looked for model\.safetensors"):
        open_checkpoint(tmp_path / "trainer")
    torch.save({"w": A}, tmp_path / "trainer" / "other.pt")
    with pytest.raises(FormatError, match="no index that lists them"):
        open_checkpoint(tmp_path / "trainer")


def test_local_state_dicts_are_cut_into_parameters(tmp_path: Path) -> None:
    """LOCAL_STATE_DICT of FSDP1, and its optimizer in a folder of DCP; original parameters are views that differ."""
    flat = torch.cat([A.reshape(-1), B, torch.zeros(1)])

    def model(rank: int) -> dict[str, Any]:
        return {"_flat_param": sharded(flat, rank, 2), "w": A.reshape(-1)[9 * rank : 9 + 3 * rank]}

    of_ranks(tmp_path, "pytorch_model_fsdp", 2, model)
    DcpWriter({"optimizer.state.w.m": grid(A, 2)}).write(tmp_path / "optimizer_0")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(NormalizationError, match=r"does not say which parameters.*'param_shapes': \{name"):
        checkpoint.normalized()
    flat_params = {"_flat_param": [("w", A.shape), ("b", B.shape), ("padding", (1,))]}
    found = checkpoint.normalized({"flat_params": flat_params})
    assert sorted(found["model"]) == ["b", "padding", "w"]
    assert found["model"]["w"][1:, 2].equal(A[1:, 2])
    assert found["model"]["b"][...].equal(B)
    assert set(found["optim"]["state"]) == {"w"}


@pytest.mark.parametrize("kind", ["one file", "folders", "ranks"])
def test_several_models_keep_apart(tmp_path: Path, kind: str) -> None:
    """Two models have parameters of one name: each is behind its section, and so are its optimizer's states."""
    states = [{"state": {"w": {"m": value}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]} for value in (A, B)]
    for i, (value, state) in enumerate(zip((A, B), states)):
        if kind == "folders":
            save_alone({"model": {"w": value}}, checkpoint_id=tmp_path / f"pytorch_model_fsdp_{i}")
            save_alone({"optimizer": state}, checkpoint_id=tmp_path / f"optimizer_{i}")
        elif kind == "ranks":
            of_ranks(tmp_path, f"pytorch_model_fsdp_{i}", 2, lambda rank, value=value: {"w": value})  # type: ignore[misc]
            of_ranks(tmp_path, f"optimizer_{i}", 2, lambda rank, state=state: state)  # type: ignore[misc]
        else:
            save_file({"w": value}, tmp_path / f"model{'_1' * i}.safetensors")
            torch.save(state, tmp_path / f"optimizer{'_1' * i}.bin")
    found = open_checkpoint(tmp_path).normalized()
    assert set(found["model"]) == {"model.w", "model_1.w"}
    assert found["model"]["model_1.w"][...].equal(B)
    assert found["optim"]["state"]["model.w"]["m"][...].equal(A)
    assert found["optim"]["state"]["model_1.w"]["m"][...].equal(B)
    assert [group["params"] for group in found["optim"]["param_groups"]] == [["model.w"], ["model_1.w"]]


class Foreign:
    """An object that only its own program can make again."""


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_registered_objects(tmp_path: Path) -> None:
    """Plain data and tensors are taken apart; anything else waits until it is asked for."""
    save_file({"w": A}, tmp_path / "model.safetensors")
    torch.save({"ema": {3: B}, "decay": 0.9}, tmp_path / "custom_checkpoint_0.pkl")
    torch.save(Foreign(), tmp_path / "custom_checkpoint_1.pkl")
    torch.save({"x": Hostile()}, tmp_path / "custom_checkpoint_2.pkl")
    checkpoint = open_checkpoint(tmp_path)
    check_all(checkpoint, {"model.w": A, "custom_checkpoint_0.ema.3": B})
    assert checkpoint.objects["custom_checkpoint_0.decay"] == 0.9
    assert checkpoint.objects["custom_checkpoint_1"].name == "Foreign"
    assert "custom_checkpoint_2 can only be read by its own program" in checkpoint.warnings[0]
    with pytest.raises(UnsafeDataError, match="system"):
        checkpoint.objects["custom_checkpoint_2"]
    assert set(checkpoint.normalized()["model"]) == {"w"}


def test_a_folder_of_the_trainer_is_a_hugging_face_folder_too(tmp_path: Path) -> None:
    """Tied names and stacked experts, as where the weights are alone; a raw state dict has the names of memory."""
    expert = "model.layers.0.mlp.experts.{}.{}.weight"
    parts = ("gate_proj", "up_proj", "down_proj")
    weights = {expert.format(e, part): torch.full((2, 2), float(e)) for e in range(3) for part in parts}
    save_file({**weights, "model.embed_tokens.weight": A}, tmp_path / "model.safetensors")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    raw = open_checkpoint(tmp_path).normalized()["model"]
    assert set(raw) == {*weights, "model.embed_tokens.weight"}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "accelerate"
    found = checkpoint.normalized()["model"]
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 4, 2)
    assert found["lm_head.weight"][1:].equal(A[1:])
    assert checkpoint.nested()["model"]["lm_head.weight"][...].equal(A)


def test_a_folder_of_the_trainer_with_adapters_only(tmp_path: Path) -> None:
    front = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{front}.lora_A.weight": A, f"{front}.lora_B.weight": B}, tmp_path / "adapter_model.safetensors")
    state = {"state": {0: {"exp_avg": A}, 1: {"exp_avg": B}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save(state, tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    (tmp_path / "adapter_config.json").write_text("{}")
    names = ["model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B.weight"]
    live = [f"base_model.model.{name}".replace(".weight", ".default.weight") for name in names]
    for given in (names, live):
        found = open_checkpoint(tmp_path).normalized({"param_names": given})
        assert list(found["model"]) == names
        assert list(found["optim"]["state"]) == names
        assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": names}]
