"""Errors of the face: torch's types and key phrases, advice that can be followed, and every failed rank's own error."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import CheckpointException

import reshard
import reshard.dcp as ours
from reshard.dcp.engine import calls
from reshard.errors import (
    CorruptCheckpointError,
    KeyMismatchError,
    LayoutError,
    OptionError,
    RankFailedError,
    StorageError,
)
from tests import gloo
from tests.reshard.dcp import jobs
from tests.samples import sample

ENGINE = "engine", lambda path: {"checkpoint_id": path}
PROTOCOL = "protocol", lambda path: {"storage_reader": theirs.FileSystemReader(path)}
WAYS = [pytest.param(way, id=name) for name, way in (ENGINE, PROTOCOL)]


@pytest.fixture
def saved(tmp_path):
    ours.save({"w": torch.ones(2), "n": {"deep": torch.ones(3)}}, checkpoint_id=tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ours.load({}, chekpoint_id="c"), r"^load\(\) got .* 'chekpoint_id': did you mean 'checkpoint_id'\?$"),
        (lambda: ours.save({}, path="c"), r"^save\(\) got .* argument 'path': it takes state_dict, checkpoint_id, "),
        (
            lambda: ours.async_save(checkpoint_id="c"),
            r"^async_save\(\) was called without state_dict: write async_save",
        ),
        (lambda: ours.save({}, "c"), r"^pass the path by its name: dcp.save\(state_dict, checkpoint_id=path\)$"),
    ],
)
def test_a_wrong_call(call, told):
    with pytest.raises(TypeError, match=told):
        call()


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_key(saved, way):
    with pytest.raises(RuntimeError, match=r"Missing key in checkpoint state_dict(.|\n)*n\.more") as caught:
        ours.load({"w": torch.zeros(2), "n": {"more": torch.zeros(1)}, "v": torch.zeros(1)}, **way(saved))

    assert isinstance(caught.value, KeyMismatchError)
    assert isinstance(caught.value, CheckpointException)
    text = str(caught.value)
    assert "v" in text.split()
    assert "allow_partial_load=True" in text
    assert "strict" not in text
    assert "mapping=" not in text


@pytest.mark.parametrize("way", WAYS)
def test_a_size_that_does_not_fit(saved, way):
    with pytest.raises(ValueError, match="Size mismatch") as caught:
        ours.load({"w": torch.zeros(7)}, **way(saved))

    assert isinstance(caught.value, KeyMismatchError)
    assert isinstance(caught.value, CheckpointException)
    assert "w" in str(caught.value)
    assert "[7]" in str(caught.value)
    assert "[2]" in str(caught.value)
    assert "policy" not in str(caught.value)
    assert "leave them out of the state" in str(caught.value)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_is_not_left_out_for_an_object(saved, way, partial):
    """A partial load leaves out what the checkpoint does not have, and nothing that it has."""
    planner = ours.DefaultLoadPlanner(allow_partial_load=partial)
    with pytest.raises(CheckpointException, match=r"saved as a tensor"):
        ours.load({"w": 7}, planner=planner, **way(saved))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_advised_helps(saved, way):
    target = {"w": torch.zeros(2), "v": torch.zeros(1)}

    ours.load(target, planner=ours.DefaultLoadPlanner(allow_partial_load=True), **way(saved))

    assert (target["w"].tolist(), target["v"].tolist()) == ([1, 1], [0])


def test_a_checkpoint_that_is_there_already(saved):
    with pytest.raises(RuntimeError, match="Checkpoint already exists") as caught:
        ours.save({"w": torch.ones(2)}, storage_writer=ours.FileSystemWriter(saved, overwrite=False))

    assert isinstance(caught.value, StorageError)
    assert isinstance(caught.value, FileExistsError)
    assert isinstance(caught.value, CheckpointException)
    assert str(saved) in str(caught.value)


def test_an_error_travels_with_all_it_has(saved):
    with pytest.raises(CheckpointException) as caught:
        ours.load({"v": torch.ones(2)}, checkpoint_id=saved)

    for again in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)
        ((place, (error, trace)),) = again.failures.items()
        assert (place, type(error)) == (0, KeyMismatchError)
        assert any(frame.name == "load" for frame in trace)


@pytest.mark.gloo
@pytest.mark.parametrize("step", ["create_local_plan", "resolve_data"])
def test_every_rank_has_the_own_error_of_each_rank_that_failed(tmp_path, step):
    for rank, (kinds, failures) in enumerate(gloo.run(jobs.some_ranks_fail, 4, str(tmp_path), step)):
        assert ("ValueError" in kinds) == (rank in (0, 2, 3))
        assert (RankFailedError.__name__ in kinds) == (rank == 1)
        assert failures == {n: ("ValueError", f"rank {n} cannot") for n in (0, 2, 3)}


def test_of_many_errors_the_first_travel_whatever_the_tree():
    told = [({n: b"e%d" % n} if n % 50 else {}, []) for n in range(200)]
    flat = calls._first_ones(told)
    tree = calls._first_ones([calls._first_ones(told[n : n + 7]) for n in range(0, 200, 7)])
    assert tree == flat
    assert list(flat[0]) == list(range(1, 17))
    assert flat[1] == [(17, 49), (51, 99), (101, 149), (151, 199)]


@pytest.mark.gloo
def test_a_rank_whose_error_does_not_travel_is_told_of_in_words(tmp_path):
    for rank, (_, failures) in enumerate(gloo.run(jobs.unpicklable_failure, 2, str(tmp_path))):
        ((place, (kind, text)),) = failures.items()
        assert place == 1
        assert "Stubborn" in (kind if rank == 1 else text)


@pytest.mark.gloo
@pytest.mark.parametrize("torchs", [False, True])
def test_ranks_that_save_to_different_folders_are_refused(tmp_path, torchs):
    for said, written in gloo.run(jobs.each_to_its_own, 2, str(tmp_path), torchs):
        assert f"rank 1 saves to {tmp_path}/1, and rank 0 to {tmp_path}/0: pass the same path" in said
        assert ".metadata" not in written


@pytest.mark.gloo
def test_one_folder_by_two_names_is_one(tmp_path):
    for names in gloo.run(jobs.by_other_names, 2, str(tmp_path)):
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("call", [ours.save, lambda *args, **more: ours.async_save(*args, **more).result()])
def test_a_tensor_on_the_meta_device_is_named(call, tmp_path):
    with pytest.raises(LayoutError, match=r"'m\.w' has no memory: it is on the meta device"):
        call({"m": {"w": torch.ones(2, device="meta"), "v": torch.ones(2)}}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.gloo
def test_loads_tell_of_every_rank_that_misses_a_key(tmp_path):
    ours.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    for kinds, failures in gloo.run(jobs.some_ranks_miss, 3, str(tmp_path)):
        assert "KeyMismatchError" in kinds or "RankFailedError" in kinds
        assert {0, 2} <= failures.keys()
        assert all(kind == "KeyMismatchError" for kind, _ in failures.values())


@pytest.mark.gloo
def test_a_failure_in_the_background_is_every_rank_s(tmp_path):
    for rank, (kinds, failures) in enumerate(gloo.run(jobs.some_ranks_fail_later, 3, str(tmp_path))):
        assert ("ValueError" in kinds) == (rank == 1)
        assert failures == {1: ("ValueError", "rank 1 cannot")}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch says so of one process
@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_call_that_does_not_say_where_is_torch_s_error(verb):
    for dcp in (ours, theirs):
        with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
            getattr(dcp, verb)({"w": torch.ones(2)})


def test_a_path_by_position_is_told_its_name(tmp_path):
    state = {"w": torch.ones(2)}
    for call in (ours.save, ours.load):
        for given in ((state, str(tmp_path)), (tmp_path, state)):
            with pytest.raises(TypeError, match=rf"dcp.{call.__name__}\(state_dict, checkpoint_id=path\)"):
                call(*given)


@pytest.mark.parametrize("shape", [(2, 4), (6, 4), (16,), (1, 4, 4)])
def test_a_torch_save_file_of_other_shapes_is_refused(shape, tmp_path):
    """A smaller target got the first rows."""
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"'w' has shape \[4, 4\] in .*, wanted \["):
        ours.load(
            {"w": torch.zeros(shape)},
            checkpoint_id=tmp_path / "file.pt",
            storage_reader=ours.BroadcastingTorchSaveReader(),
            planner=ours.DynamicMetaLoadPlanner(),
        )


@pytest.mark.parametrize("call", [ours.save, ours.load, ours.async_save])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"planner": 5}, "planner must be one of DCP's or of reshard.dcp, got 5"),
        ({"checkpoint_id": 5}, "a path must be a folder, URL, or Storage, got int"),
        ({}, "`checkpoint_id` must be specified"),
    ],
)
def test_wrong_arguments(call, given, message):
    with pytest.raises(OptionError, match=message) as caught:
        call({"w": torch.zeros(2)}, **given)
    assert type(caught.value).__module__ == "reshard.errors"
    assert type(caught.value).__name__ == "OptionError"


@pytest.mark.parametrize("call", [ours.save, ours.load])
def test_a_model_in_place_of_a_dict(call, tmp_path):
    with pytest.raises(OptionError, match=r"the state must be a dict, such as {'model': model}, got Linear"):
        call(torch.nn.Linear(2, 2), checkpoint_id=tmp_path)


def test_a_path_in_place_of_a_storage(tmp_path):
    with pytest.raises(OptionError, match=r"storage_reader must be one of DCP's or of reshard.dcp, got '"):
        ours.load({"w": torch.zeros(2)}, storage_reader=str(tmp_path))


def test_classes_of_errors_are_public(saved):
    """Tracebacks show `reshard.errors.KeyMismatchError`, which can be caught by that name, also after a pickle."""
    with pytest.raises(ValueError, match="Size mismatch") as caught:
        ours.load({"w": torch.zeros(7)}, checkpoint_id=saved)
    for kind in type(caught.value), type(caught.value.__cause__), type(pickle.loads(pickle.dumps(caught.value))):
        assert f"{kind.__module__}.{kind.__name__}" == "reshard.errors.KeyMismatchError"


def test_a_folder_with_a_native_checkpoint_is_left_alone(tmp_path):
    """With both, it would not open at all."""
    reshard.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(StorageError, match="has a native checkpoint, and reshard does not open a folder with both"):
        ours.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert reshard.open(tmp_path)["w"][...].tolist() == [1.0, 1.0]


def test_a_checkpoint_of_megatron_is_not_mixed_with_what_is_saved(tmp_path):
    """It opened as Megatron's, with the old values of common.pt beside the new tensors."""
    folder = tmp_path / "iter_0000002"
    shutil.copytree(sample("mcore_tp1/ckpt/iter_0000002"), folder)
    before = reshard.open(folder)
    with pytest.raises(StorageError, match=r"iter_0000002 has a checkpoint of the format megatron.*save elsewhere"):
        ours.save({"w": torch.ones(2)}, checkpoint_id=folder)
    assert list(reshard.open(folder)) == list(before)


def test_damage_is_told_with_a_call_that_reads_it_anyway(tmp_path):
    path = tmp_path / "c"
    ours.save({"w": torch.zeros(1000)}, checkpoint_id=path)
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-2000] ^= 4
    file.write_bytes(content)

    with pytest.raises(CorruptCheckpointError, match=r"\(reshard\.load\(\.\.\., check=False\) reads it as it is\)"):
        ours.load({"w": torch.ones(1000)}, checkpoint_id=path)
    reshard.load({"w": torch.ones(1000)}, path, check=False)


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        (lambda inner: inner, "call load({'model': state}, checkpoint_id=path)"),
        (lambda inner: {"app": {"model": inner}}, "call load(state['app'], checkpoint_id=path)"),
        (lambda inner: {"net": inner}, "call it 'model'"),
        (lambda inner: {"x": {"model": {"y": inner}}}, None),
    ],
)
def test_a_prefix_too_many_has_a_fix(state, fix, tmp_path):
    inner = {"a": torch.ones(3), "b.c": torch.ones(2)}
    ours.save({"model": inner}, checkpoint_id=tmp_path / "c")
    with pytest.raises(KeyMismatchError) as caught:
        ours.load(state(inner), checkpoint_id=tmp_path / "c")
    fixes = [line for line in str(caught.value).splitlines() if line.startswith(("  fix:", "  or:"))]
    assert fix is None or fixes == [f"  fix: {fix}"]
    assert fixes
    assert "mapping=" not in str(caught.value)
