"""Checkpoints of torch_checkpointing as we write them: items and lists as one rank of its own saves them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners.geometry.topologies import Topology
from reshard.errors import CheckpointError, CorruptCheckpointError, FormatError, LayoutError
from tests.same import assert_same
from tests.samples import sample
from tests.states import trained

FORMAT = "torch_checkpointing"


def values(path: Path) -> dict[str, Any]:
    """Everything by key, read."""
    opened = reshard.open(path)
    read = {name: opened[name][...] for name in (*opened, *opened.aliases)}
    return {**{name: read[name] for name in sorted(read)}, "objects": dict(sorted(opened.objects.items()))}


def written(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    reshard.save(state, folder / "saved")
    reshard.convert(folder / "saved", folder / "theirs", format=FORMAT, **options)
    return folder / "theirs"


def test_what_torch_checkpointing_wrote_comes_back(tmp_path: Path) -> None:
    """Its own checkpoint of two ranks as one of one rank, under the same keys, also by way of our format."""
    report = reshard.convert(sample("tckpt_fsdp2_w2/ckpt"), tmp_path / "again", format=FORMAT)
    reshard.convert(tmp_path / "again", tmp_path / "ours")

    assert not report.omitted
    assert sorted(report.files) == ["extra_0.pt", "model_0.pt", "optimizer_0.pt"]
    assert reshard.open(tmp_path / "again").format == FORMAT
    for folder in ("again", "ours"):
        assert_same(values(tmp_path / folder), values(sample("tckpt_fsdp2_w2/ckpt")))


def test_the_list_says_what_its_own_says(tmp_path: Path) -> None:
    """But for the mesh, which is of one rank that has all."""
    reshard.convert(sample("tckpt_fsdp2_w2/ckpt"), tmp_path / "again", format=FORMAT)
    theirs, ours = (
        pickle.loads((folder / "metadata.pkl").read_bytes())
        for folder in (sample("tckpt_fsdp2_w2/ckpt"), tmp_path / "again")
    )

    assert (ours["version"], ours["world_size"]) == (theirs["version"], 1)
    assert ours["metadata"].keys() == theirs["metadata"].keys()
    for item, wanted in theirs["metadata"].items():
        found = ours["metadata"][item]
        assert found["rank_to_layout_info"] == {0: None}
        for path, [row] in wanted["nested_path_to_metadata"].items():
            [mine] = found["nested_path_to_metadata"][path]
            changed = {"placements": [{"type": "Replicate"}]}
            changed["mesh_spec"] = {
                "device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None,
            }  # fmt: skip
            sharding = row["sharding_metadata"]
            assert mine == {
                "sharding_metadata": {"type": sharding["type"], "data": {**sharding["data"], **changed}},
                "ranks": (0,),
            }


def test_a_state_of_torch_s_own(tmp_path: Path) -> None:
    """Numbers in tensors, empty ones, tied ones, optimizers by name and by number, plain values, empty containers."""
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"emb.weight": tied, "head.weight": tied, "scale": torch.tensor(2.5), "none": torch.empty(0, 3)},
        "optim": {
            "state": {0: {"step": torch.tensor(4), "exp_avg": torch.ones(2, 3, dtype=torch.bfloat16)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
        "also": {"emb": tied},
        "epoch": 3,
        "nothing": {},
    }
    folder = written(state, tmp_path)

    files = sorted(file.name for file in folder.iterdir())
    assert files == ["also_0.pt", "epoch_0.pt", "metadata.pkl", "model_0.pt", "nothing_0.pt", "optim_0.pt"]
    for item, value in state.items():
        loaded = torch.load(folder / f"{item}_0.pt", weights_only=True)
        assert_same(loaded, value)
    model = torch.load(folder / "model_0.pt", weights_only=True)
    assert model["emb.weight"].data_ptr() == model["head.weight"].data_ptr()
    assert list(pickle.loads((folder / "metadata.pkl").read_bytes())["metadata"]) == ["model", "optim", "also"]
    found, wanted = values(folder), values(tmp_path / "saved")
    assert found.pop("objects")["optim.param_groups.0.betas"] == (0.9, 0.99)
    assert wanted.pop("objects")["epoch"] == 3
    assert_same(found, wanted)
    assert reshard.open(folder).nested()["nothing"] == {}


def test_a_model_alone_is_the_item_model(tmp_path: Path) -> None:
    state = {"layers.0.w": torch.ones(2), "layers.1.w": torch.zeros(3)}
    folder = written(state, tmp_path)

    assert_same(torch.load(folder / "model_0.pt", weights_only=True), state)
    assert list(reshard.open(folder)) == ["model.layers.0.w", "model.layers.1.w"]


def test_canonical_names_and_a_dtype(tmp_path: Path) -> None:
    reshard.save(trained(torch.float32), tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format=FORMAT, model_only=True, dtype="bfloat16")

    found = reshard.open(tmp_path / "theirs").normalized()["model"]
    assert {tensor.dtype for tensor in found.values() if tensor.shape} == {torch.bfloat16}
    assert found.keys() == reshard.open(tmp_path / "saved").normalized()["model"].keys()


def test_what_was_there_is_replaced_when_asked(tmp_path: Path) -> None:
    """Files of more ranks and of other items would be taken for parts of the new one."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("model_1.pt", "old_0.pt"):
        torch.save({"w": torch.ones(1)}, folder / name)
    with pytest.raises(FormatError, match=r"already contains a checkpoint \(model_1\.pt\)"):
        written({"model": {"w": torch.ones(2)}}, tmp_path)
    reshard.convert(tmp_path / "saved", folder, format=FORMAT, overwrite=True)

    assert sorted(file.name for file in folder.iterdir()) == ["metadata.pkl", "model_0.pt"]
    with pytest.raises(FormatError, match=r"already contains a checkpoint \(metadata\.pkl\)"):
        reshard.convert(tmp_path / "saved", folder, format=FORMAT)


def test_files_of_no_item_stay_when_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    """Only files of the old checkpoint are deleted, not all whose names look alike."""
    state = {"model": {"w": torch.ones(2)}}
    folder = written({**state, "old": {"v": torch.ones(3)}}, tmp_path)
    (folder / "eval").mkdir()
    kept = {"best_3.pt", "eval/batch_12.pt", "eval/model_0.pt"}
    for name in (*kept, "old_1.pt"):
        torch.save({"mine": torch.ones(1)}, folder / name)
    reshard.save(state, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", folder, format=FORMAT, overwrite=True)

    there = {str(file.relative_to(folder)) for file in folder.rglob("*.p*")}
    assert there == {*kept, "metadata.pkl", "model_0.pt"}
    assert_same(values(folder), {"model.w": torch.ones(2), "objects": {}})


def test_files_of_no_item_stay_where_the_old_list_is_damaged(tmp_path: Path) -> None:
    folder = written({"model": {"w": torch.ones(2)}}, tmp_path)
    torch.save({"mine": torch.ones(1)}, folder / "best_3.pt")
    (folder / "metadata.pkl").write_bytes(b"damaged")
    reshard.convert(tmp_path / "saved", folder, format=FORMAT, overwrite=True)

    assert sorted(file.name for file in folder.iterdir()) == ["best_3.pt", "metadata.pkl", "model_0.pt"]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a.b": {"w": torch.ones(1)}}, r"'a\.b' would be an item of torch_checkpointing"),
        ({"w": torch.ones(1), "model": {"w": torch.ones(1)}}, "tensors in no section, such as 'w'"),
        ([{"w": torch.ones(1)}], "0 would be an item of torch_checkpointing"),
    ],
)
def test_what_cannot_be_an_item_is_refused(state: Any, told: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "saved.pt")

    with pytest.raises(FormatError, match=told):
        reshard.convert(tmp_path / "saved.pt", tmp_path / "theirs", format=FORMAT)
    assert not (tmp_path / "theirs").exists() or not list((tmp_path / "theirs").glob("*.p*"))


def test_other_refusals(tmp_path: Path) -> None:
    reshard.save({"model": {"w": torch.ones(4)}}, tmp_path / "saved")
    with pytest.raises(LayoutError, match="not sharded by rank"):
        reshard.convert(
            tmp_path / "saved", tmp_path / "theirs", format=FORMAT, onto=Topology.parse("dp=2", {"*": "S(0)"})
        )
    (tmp_path / "theirs").mkdir(exist_ok=True)
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"contains model\.safetensors"):
        reshard.convert(tmp_path / "saved", tmp_path / "theirs", format=FORMAT)


def test_damage_is_seen(tmp_path: Path) -> None:
    """In the source, before anything is published; and afterwards in what was written, by its checksums."""
    folder = written({"model": {"w": torch.arange(4096.0)}, "optim": {"m": torch.ones(7)}}, tmp_path)
    for path in (next((tmp_path / "saved").rglob("*.safetensors")), folder / "model_0.pt"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    with pytest.raises(CorruptCheckpointError):
        reshard.convert(tmp_path / "saved", tmp_path / "again", format=FORMAT)
    assert not (tmp_path / "again" / "metadata.pkl").exists()
    with pytest.raises(CheckpointError):
        reshard.open(folder)["model.w"][...]


@pytest.mark.parametrize("value", [5, torch.ones(2)])
def test_one_value_is_refused(value: Any, tmp_path: Path) -> None:
    """It was a ValueError of Python's."""
    torch.save(value, tmp_path / "a.pt")

    with pytest.raises(FormatError, match="the checkpoint is one value"):
        reshard.convert(tmp_path / "a.pt", tmp_path / "out", format=FORMAT)


def test_files_without_the_tensors_that_the_list_names_are_refused(tmp_path: Path) -> None:
    """Such as those of two items exchanged, or an older save's."""
    folder = written({"model": {"w": torch.ones(4)}, "optim": {"m": torch.ones(7)}}, tmp_path)
    (folder / "model_0.pt").write_bytes((folder / "optim_0.pt").read_bytes())

    said = r"metadata\.pkl: no file of a rank has 1 tensor that it names, such as 'model\.w', expected in model_0\.pt: "
    with pytest.raises(CorruptCheckpointError, match=said):
        reshard.open(folder)
    assert not reshard.verify(folder).ok
