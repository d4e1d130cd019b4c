"""Folders of per-rank files, and folders made of several formats."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from planners.geometry.mesh import Mesh, Shard, StridedShard
from reshard.api.verify import verify
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError
from tests.reshard.formats.compare import check_all
from tests.reshard.formats.writers import DcpWriter, copy_saved_as, grid
from tests.same import same
from tests.samples import sample, truth
from tests.torch_releases import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's remark on saving alone

A = torch.arange(12.0).reshape(3, 4)


def model_files(folder: Path) -> Path:
    """Copies of the files that verl writes of a model, one of each of four ranks."""
    for file in sample("pt_dtensor_2x2/ckpt").glob("model_*"):
        shutil.copy(file, folder)
    return folder


def test_dtensors_on_a_two_axis_mesh(tmp_path: Path) -> None:
    """FSDP over TP, written by torch 2.13: the parts are put together by mesh and placements, strided ones too."""
    wanted = truth("pt_dtensor_2x2")["model"]

    checkpoint = open_checkpoint(model_files(tmp_path))

    check_all(checkpoint, {f"model.{key}": value for key, value in wanted.items()})
    layout = checkpoint["model.layers.0.attention.wq.weight"].stored.layout
    assert layout is not None
    assert layout.mesh == Mesh({"dp": 2, "tp": 2})
    assert layout.placements == (StridedShard(0, 2), Shard(0))
    norm = checkpoint.layout["model.norm.weight"]
    assert norm.mesh == Mesh({"dp": 2}, ranks=[0, 2]) or norm.mesh is None


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    model_files(tmp_path)
    (tmp_path / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank 2 of 4 is missing: model_world_size_4_rank_2\.pt"):
        open_checkpoint(tmp_path)


def test_a_missing_last_rank_is_known_by_the_mesh(tmp_path: Path) -> None:
    """Names that do not say how many ranks there were: DTensors do."""
    for rank in range(3):
        shutil.copy(
            sample(f"pt_dtensor_2x2/ckpt/model_world_size_4_rank_{rank}.pt"), tmp_path / f"model_rank_{rank}.pt"
        )
    with pytest.raises(CorruptCheckpointError, match=r"rank 3 of 4 is missing: model_rank_3\.pt"):
        open_checkpoint(tmp_path)


def test_torch_checkpointing_says_who_saved(tmp_path: Path) -> None:
    """Its metadata has the items of tensors and the number of ranks, and is believed in no more than that."""
    metadata = {"metadata": {"model": {}}, "world_size": 2, "version": "2.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    for rank in range(2):
        torch.save({"w": A}, tmp_path / f"model_{rank}.pt")
    torch.save({"x": 1}, tmp_path / "extra_0.pt")
    opened = open_checkpoint(tmp_path)
    assert opened.format == "torch_checkpointing"
    check_all(opened, {"model.w": A})
    torch.save({"w": A + 1}, tmp_path / "model_2.pt")
    left = open_checkpoint(tmp_path)
    check_all(left, {"model.w": A})
    assert left.warnings == ("extra: files of 1 of 2 ranks", "not opened: model_2.pt")
    assert "whether items that metadata.pkl does not list have all their files" in str(verify(tmp_path))
    (tmp_path / "model_1.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank 1 of 2 is missing: model_1\.pt"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_0.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"metadata\.pkl names 'model', but there is no file model_0\.pt"):
        open_checkpoint(tmp_path)
    for text in (b"", pickle.dumps(metadata)[:-5], pickle.dumps([1])):
        (tmp_path / "metadata.pkl").write_bytes(text)
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.pkl"):
            open_checkpoint(tmp_path)


def test_parts_of_the_wrong_rank_are_seen(tmp_path: Path) -> None:
    """Two files exchanged: shapes, or elements stored twice and missing, tell."""
    model_files(tmp_path)
    copy_saved_as(tmp_path / "model_world_size_4_rank_0.pt", tmp_path / "model_world_size_4_rank_3.pt")
    with pytest.raises(CorruptCheckpointError, match=r"local tensor of .* has shape .* should hold"):
        open_checkpoint(tmp_path).problems() and open_checkpoint(tmp_path)["model.tok_embeddings.weight"][...]


def ranks(folder: Path, *values: Any, name: str = "model_world_size_{world}_rank_{rank}.pt") -> Path:
    for rank, value in enumerate(values):
        torch.save(value, folder / name.format(world=len(values), rank=rank))
    return folder


def test_plain_values_of_several_ranks(tmp_path: Path) -> None:
    """Equal ones are one value; those that differ are all kept, under their ranks; nothing is lost silently."""
    same_on_all = {"w": A, "epoch": 3, "nan": torch.tensor(float("nan"))}
    checkpoint = open_checkpoint(
        ranks(
            tmp_path,
            {**same_on_all, "rng": torch.tensor([0]), "r": 0},
            {**same_on_all, "rng": torch.tensor([1]), "r": 1},
        )
    )

    assert sorted(checkpoint) == ["model.nan", "model.rng.rank_0", "model.rng.rank_1", "model.w"]
    assert dict(checkpoint.objects) == {"model.epoch": 3, "model.r.rank_0": 0, "model.r.rank_1": 1}
    assert same(checkpoint["model.w"][1:], A[1:])
    assert same(checkpoint["model.rng.rank_1"][...], torch.tensor([1]))


@pytest.mark.parametrize("has_crc", [True, False])
def test_large_plain_tensors_are_one_only_if_all_ranks_have_the_same(has_crc: bool, tmp_path: Path) -> None:
    """Such as the parts of a tensor that each rank saved as a plain one."""
    large = torch.arange(30_000.0)
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_crc)
    try:
        values = [{"same": large, "turned": large.view(100, 300), "part": large + rank} for rank in range(2)]
        values[1]["turned"] = large.view(100, 300).T.contiguous().T
        ranks(tmp_path, *values)
    finally:
        torch.serialization.set_crc32_options(crc32)

    opened = open_checkpoint(tmp_path)

    assert sorted(opened) == ["model.part.rank_0", "model.part.rank_1", "model.same", "model.turned"]
    assert same(opened["model.part.rank_1"][...], large + 1)
    assert same(opened["model.turned"][...], large.view(100, 300))


@pytest.mark.parametrize("kind", [list, tuple])
def test_items_of_a_sequence_that_differ(kind: type, tmp_path: Path) -> None:
    """As states of random generators do: an item that differs is a dict of what each rank has."""
    ranks(tmp_path, *({"rng": kind([torch.tensor([rank]), A])} for rank in range(2)))

    rng = open_checkpoint(tmp_path).nested()["model"]["rng"]

    assert (type(rng), list(rng[0])) == (kind, ["rank_0", "rank_1"])
    assert rng[0]["rank_1"][...].tolist() == [1]
    assert same(rng[1][...], A)


@pytest.mark.parametrize(("first", "second"), [(8, 16), (16, 8), (2, 4)])
def test_parts_of_two_saves_are_not_mixed(tmp_path: Path, first: int, second: int) -> None:
    """As a run leaves them that goes on with another number of ranks: by names, 16 comes before 8."""
    ranks(tmp_path, *({"rng": torch.tensor([rank])} for rank in range(first)))
    ranks(tmp_path, *({"rng": torch.tensor([rank])} for rank in range(second)))
    with pytest.raises(FormatError, match=r"are of the same rank, so there are parts of two saves"):
        open_checkpoint(tmp_path)


def test_sections_and_other_files(tmp_path: Path) -> None:
    ranks(tmp_path, {"w": A}, {"w": A})
    ranks(tmp_path, {"state": {0: A}}, {"state": {0: A}}, name="optim_world_size_{world}_rank_{rank}.pt")
    torch.save({"x": 1}, tmp_path / "other.pt")

    checkpoint = open_checkpoint(tmp_path)

    check_all(checkpoint, {"model.w": A, "optim.state.0": A})
    assert checkpoint.warnings == ("not opened: other.pt",)
    assert list(checkpoint.nested()["optim"]["state"]) == [0]


def test_accelerate_with_one_file_of_weights(tmp_path: Path) -> None:
    """Each file is a section; an object of a foreign class is read only when asked for."""
    save_file({"w": A}, tmp_path / "model.safetensors")
    torch.save({"state": {0: {"m": A}}, "param_groups": [{"lr": 0.1}]}, tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "training_args.bin")
    (tmp_path / "config.json").write_text("{}")

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.format == "accelerate"
    check_all(checkpoint, {"model.w": A, "optimizer.state.0.m": A})
    assert checkpoint.objects["scheduler.last_epoch"] == 2
    assert checkpoint.nested()["optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert checkpoint.objects["training_args"].name == "Linear"


def test_accelerate_with_indexed_weights(tmp_path: Path) -> None:
    weight_map = {}
    for i, key in enumerate("ab", start=1):
        weight_map[key] = f"model-0000{i}-of-00002.safetensors"
        save_file({key: A}, tmp_path / weight_map[key])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"s": 1}, tmp_path / "scheduler.pt")

    check_all(open_checkpoint(tmp_path), {"model.a": A, "model.b": A})

    torch.save({"w": A}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"has the weights twice, in model.safetensors and pytorch_model.bin"):
        open_checkpoint(tmp_path)


def test_accelerate_with_folders_of_dcp(tmp_path: Path) -> None:
    DcpWriter({"model.w": grid(A, 2)}).write(tmp_path / "pytorch_model_fsdp_0")
    DcpWriter({"optimizer.state.w.m": grid(A, 3)}, {"optimizer.lr": 0.5}).write(tmp_path / "optimizer_0")
    DcpWriter({"optimizer.state.w.m": grid(A, 1)}).write(tmp_path / "optimizer_1")

    checkpoint = open_checkpoint(tmp_path)

    check_all(checkpoint, {"model.w": A, "optimizer.state.w.m": A, "optimizer_1.optimizer.state.w.m": A})
    assert checkpoint.objects["optimizer.lr"] == 0.5


def test_lightning(tmp_path: Path) -> None:
    DcpWriter({"model.net.w": grid(A, 2)}).write(tmp_path)
    torch.save({"epoch": 4, "pytorch-lightning_version": "2", "hparams": {"x": torch.ones(2)}}, tmp_path / "meta.pt")

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.format == "lightning"
    check_all(checkpoint, {"model.net.w": A, "hparams.x": torch.ones(2)})
    assert checkpoint.objects["epoch"] == 4
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"no \.metadata, which is written last"):
        open_checkpoint(tmp_path)


def test_what_fabric_saves_has_no_attribute_to_take(tmp_path: Path) -> None:
    """It is a model itself, and not a training module that holds one: `net` is a part of it."""
    save_alone({"model": {"net": {"w": A}}}, checkpoint_id=tmp_path)
    torch.save({"steps": 4}, tmp_path / "meta.pt")
    assert set(open_checkpoint(tmp_path).normalized()["model"]) == {"net.w"}
    torch.save({"steps": 4, "pytorch-lightning_version": "2.6"}, tmp_path / "meta.pt")
    assert set(open_checkpoint(tmp_path).normalized()["model"]) == {"w"}


def test_two_parts_with_one_key(tmp_path: Path) -> None:
    DcpWriter({"epoch": grid(A, 2)}).write(tmp_path)
    torch.save({"epoch": 4}, tmp_path / "meta.pt")
    with pytest.raises(FormatError, match="parts of the checkpoint: two values have the key 'epoch'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["lora_rank_8.pt", "checkpoint_rank0.pt"])
def test_a_file_that_is_only_called_as_a_rank_s_opens_by_its_path(tmp_path: Path, name: str) -> None:
    """A rank may be that of an adapter: what has no parts of tensors is a file of its own, with its own keys."""
    torch.save({"model": {"w": A}}, tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    assert checkpoint.format == "torch_save"
    check_all(checkpoint, {"model.w": A})


def test_a_part_that_is_opened_by_its_path_still_needs_the_others(tmp_path: Path) -> None:
    model_files(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"rank 0 of 4 is missing: model_world_size_4_rank_0\.pt"):
        open_checkpoint(tmp_path / "model_world_size_4_rank_2.pt")
