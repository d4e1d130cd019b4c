"""`reshard.dcp` beside torch's own: whole, and with planners and storages exchanged in both directions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import reshard
import reshard.dcp as ours
from reshard.errors import (
    CorruptCheckpointError,
    KeyMismatchError,
    OptionError,
    StorageError,
    UnsafeDataError,
)
from tests import gloo
from tests.reshard.dcp import jobs
from tests.torch_releases import load_alone, save_alone

NAMES = (
    ["save", "load", "async_save", "save_state_dict", "load_state_dict", "Stateful", "StorageReader", "StorageWriter"]
    + ["FileSystemReader", "FileSystemWriter", "LoadPlanner", "LoadPlan", "ReadItem", "SavePlanner", "SavePlan"]
    + ["WriteItem", "DefaultLoadPlanner", "DefaultSavePlanner", "dcp_to_torch_save", "torch_save_to_dcp"]
    + ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner"]
)
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's word without a group


def test_every_promised_name_is_there():
    assert [name for name in NAMES if not hasattr(ours, name)] == []


@pytest.mark.gloo
def test_all_pairings_with_torch(tmp_path):
    for results in gloo.run(jobs.all_pairings, 4, str(tmp_path), timeout_s=240):
        assert [what for what, right in results if not right] == []
        assert len(results) == 3 * 6 * 5


@pytest.mark.gloo
def test_a_strided_shard_alone(tmp_path):
    assert all(gloo.run(jobs.strided, 4, str(tmp_path)))


@pytest.mark.gloo
def test_a_torch_file_into_shards_and_subgroups(tmp_path):
    torch.save({"a": jobs.A}, tmp_path / "a.pt")

    assert all(gloo.run(jobs.torch_file, 3, str(tmp_path / "a.pt")))
    assert all(gloo.run(jobs.subgroup, 3, str(tmp_path / "sub")))


def test_in_one_process_without_a_group(tmp_path):
    state = {"a": {"b": torch.ones(2), "empty": torch.empty(0, 3)}, "list": [torch.zeros(1), {"x": 3}], "n": None}

    metadata = ours.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    target = {"a": {"b": torch.zeros(2), "empty": torch.empty(0, 3)}, "list": [torch.ones(1), {"x": 0}], "n": 1}
    ours.load(target, checkpoint_id=tmp_path / "c", no_dist=True)

    assert target["a"]["b"].tolist() == [1, 1]
    assert target["list"][0].tolist() == [0]
    assert target["list"][1] == {"x": 3}
    assert target["n"] is None
    assert set(metadata.state_dict_metadata) == {"a.b", "a.empty", "list.0", "list.1.x", "n"}


def test_missing_keys_are_all_named_and_extra_ones_are_not_read(tmp_path):
    ours.save({"weight": torch.ones(2), "extra": torch.ones(1), "l.0": torch.ones(1)}, checkpoint_id=tmp_path)

    with pytest.raises(KeyMismatchError) as caught:  # other numbers are other layers, and weight is loaded
        ours.load({"weight": torch.ones(2), "weights": torch.ones(2), "l.1": torch.ones(1)}, checkpoint_id=tmp_path)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(KeyMismatchError) as caught:
        ours.load({"wieght": torch.zeros(2), "more": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert "wieght   (did you mean 'weight'?)" in str(caught.value)
    assert "more" in str(caught.value)
    assert "extra" not in str(caught.value).split("did you mean")[0].split("missing")[0]
    partial = {"weight": torch.zeros(2), "more": torch.zeros(1)}
    ours.load(partial, checkpoint_id=tmp_path, planner=ours.DefaultLoadPlanner(allow_partial_load=True))
    assert partial["weight"].tolist() == [1, 1]


def test_an_overwrite_replaces_the_old_files(tmp_path):
    ours.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    ours.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)

    assert before.isdisjoint({p.name for p in tmp_path.iterdir()} - {".metadata"})
    assert reshard.open(tmp_path)["w"][...].tolist() == [1, 1, 1]
    with pytest.raises(StorageError, match="already exists"):
        ours.save({"w": torch.ones(3)}, storage_writer=ours.FileSystemWriter(tmp_path, overwrite=False))


def test_other_formats_load_too(tmp_path):
    reshard.save({"w": torch.arange(3.0)}, tmp_path / "native")
    target = {"w": torch.zeros(3, dtype=torch.float64)}

    ours.load(target, checkpoint_id=tmp_path / "native")

    assert target["w"].tolist() == [0, 1, 2]


def test_deprecated_names_work_and_say_so(tmp_path):
    with pytest.warns(FutureWarning, match="Please use `save`"):
        ours.save_state_dict({"w": torch.ones(2)}, ours.FileSystemWriter(tmp_path), no_dist=True)
    target = {"w": torch.zeros(2)}
    with pytest.warns(FutureWarning, match="Please use `load`"):
        ours.load_state_dict(target, ours.FileSystemReader(tmp_path), no_dist=True)
    assert target["w"].sum() == 2


@ALONE
def test_torch_save_to_dcp(tmp_path):
    torch.save({"model": {"w": torch.arange(4.0)}, "step": 3}, tmp_path / "x.pt")

    ours.torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "dcp")
    target = {"model": {"w": torch.zeros(4)}, "step": 0}
    load_alone(target, checkpoint_id=tmp_path / "dcp")

    assert target["model"]["w"].tolist() == [0, 1, 2, 3]
    assert target["step"] == 3


class Attack:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/reshard-was-attacked"),))


@ALONE
def test_hostile_metadata_and_items_run_nothing(tmp_path):
    mark = Path("/tmp/reshard-was-attacked")
    mark.unlink(missing_ok=True)
    ours.save({"w": torch.ones(2), "obj": 1}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises((UnsafeDataError, CorruptCheckpointError)):
        ours.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "a")
    save_alone({"obj": Attack()}, checkpoint_id=tmp_path / "b")
    with pytest.raises((UnsafeDataError, CorruptCheckpointError)):
        ours.load({"obj": None}, checkpoint_id=tmp_path / "b")
    assert not mark.exists()


def test_where_is_said_first(tmp_path):
    for call in (ours.save, ours.load, ours.async_save):
        with pytest.raises(OptionError, match="checkpoint_id"):
            call({"w": torch.ones(1)})
