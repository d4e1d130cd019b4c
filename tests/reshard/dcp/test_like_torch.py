"""What a program that was written for `torch.distributed.checkpoint` relies on, beside the names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as theirs
import torch.distributed.checkpoint.format_utils as their_files
import torch.distributed.checkpoint.state_dict as their_state
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

import reshard
import reshard.dcp as ours
from reshard.errors import FormatError, KeyMismatchError, RankFailedError, StorageError, UnsafeDataError
from tests import gloo
from tests.reshard.dcp import jobs
from tests.same import assert_same
from tests.torch_releases import load_alone, save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TYPED = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by the writer of torch 2.6
FUNCTIONS = ["save", "load", "async_save", "save_state_dict", "load_state_dict"]
FILE_FUNCTIONS = ["dcp_to_torch_save", "torch_save_to_dcp"]
CLASSES = ["FileSystemReader", "FileSystemWriter", "DefaultLoadPlanner", "DefaultSavePlanner"]
FILE_CLASSES = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner"]
STATE = [f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("", "model_", "optimizer_")]
PAIRS = [
    *((getattr(theirs, name), getattr(ours, name)) for name in FUNCTIONS + CLASSES),
    *((getattr(their_files, name), getattr(ours, name)) for name in FILE_FUNCTIONS + FILE_CLASSES),
    *((getattr(their_state, name), getattr(reshard, name)) for name in [*STATE, "StateDictOptions"]),
]


def parameters(call):
    return [(p.name, p.kind, p.default is p.empty) for p in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize(("their", "our"), PAIRS, ids=lambda call: call.__name__)
def test_calls_take_the_same_arguments(their, our):
    names = {name for name, _, _ in parameters(their)}
    assert [p for p in parameters(our) if p[0] in names] == parameters(their)
    for name, method in inspect.getmembers(their, inspect.isfunction) if inspect.isclass(their) else ():
        if name.startswith("_") or not hasattr(our, name):
            continue
        names = [p.name for p in inspect.signature(method).parameters.values() if p.kind != p.VAR_KEYWORD]
        assert [n for n in inspect.signature(getattr(our, name)).parameters if n in names] == names, name


def nest(value):
    return {
        "pair": (torch.full((2,), value), torch.full((3,), value)),
        "mixed": [torch.full((2,), value), 5 * value],
        "by_number": {3: {"x": value}},
        "betas": (value, value),
        "rows": [{"p": [value]}, {"p": [value, value]}],
        "none": None,
        "empty": {"list": [], "dict": {}},
    }


@pytest.mark.parametrize("saver", [ours, theirs, reshard], ids=["ours", "torch", "native"])
@pytest.mark.parametrize("planner", [None, ours.DefaultLoadPlanner], ids=["engine", "planner"])
def test_every_kind_of_container(tmp_path, saver, planner):
    """A tuple of tensors is one object to DCP, and a list of them is not; keys that are ints stay ints."""
    if saver is reshard:
        reshard.save(nest(2.0), tmp_path)
    else:
        (save_alone if saver is theirs else ours.save)(nest(2.0), checkpoint_id=tmp_path)
    target = nest(0.0)

    if planner is not None and saver is reshard:
        del target["pair"]  # two tensors there, one object here: that is for the engine
    reader = None if planner is None else theirs.FileSystemReader(tmp_path) if saver is theirs else None
    reader = reader or ours.FileSystemReader(tmp_path)
    ours.load(target, storage_reader=reader, planner=planner and planner(), no_dist=True)

    assert_same(target, {key: value for key, value in nest(2.0).items() if key in target})


def test_what_torch_2_3_saved_as_one_object(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.checkpoint._version._derived_version", "2_3")
    metadata = save_alone(nest(2.0), checkpoint_id=tmp_path)
    monkeypatch.undo()
    assert "rows" in metadata.state_dict_metadata

    for reader in (ours.FileSystemReader(tmp_path), theirs.FileSystemReader(tmp_path)):
        target = nest(0.0)
        ours.load(target, storage_reader=reader, no_dist=True)
        assert_same(target["rows"], nest(2.0)["rows"])
        assert_same(target["pair"], nest(2.0)["pair"])


def test_every_entry_of_a_dict_is_matched_for_itself(tmp_path):
    """A fresh optimizer's `state` is empty, and nobody saved that: it must not go."""
    model = torch.nn.Linear(2, 2)
    ours.save(
        {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.25), "n": {"a": 1, "c": 3}}, checkpoint_id=tmp_path
    )
    optimizer = torch.optim.AdamW(model.parameters())
    target = {"optimizer": optimizer, "n": {"a": 0, "empty": {}}}

    ours.load(target, checkpoint_id=tmp_path)

    assert optimizer.param_groups[0]["lr"] == 0.25
    assert target["n"] == {"a": 1, "empty": {}}
    with pytest.raises(KeyMismatchError, match=r"n\.b"):
        ours.load({"n": {"a": 0, "b": 0}}, checkpoint_id=tmp_path)


class Whole(theirs.DefaultLoadPlanner):
    """Makes the target of what is saved."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        for key, entry in metadata.state_dict_metadata.items():
            state_dict[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def test_a_planner_may_add_keys(tmp_path):
    ours.save({"a": torch.ones(2), "b": torch.zeros(1)}, checkpoint_id=tmp_path)
    target = {}

    ours.load(target, checkpoint_id=tmp_path, planner=Whole())

    assert target["a"].tolist() == [1, 1]
    assert target["b"].tolist() == [0]


def test_a_torch_file_may_lie_in_the_folder(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    ours.torch_save_to_dcp(tmp_path / "w.pt", tmp_path)
    target = {"w": torch.zeros(2)}

    ours.load(target, checkpoint_id=tmp_path, no_dist=True)

    assert target["w"].tolist() == [1, 1]


def test_a_torch_file_that_is_no_dict_is_refused(tmp_path):
    """It was an AttributeError."""
    torch.save([torch.ones(2)], tmp_path / "w.pt")

    with pytest.raises(FormatError, match="holds no dict"):
        ours.torch_save_to_dcp(tmp_path / "w.pt", tmp_path / "out")


def test_errors_are_also_checkpoint_exceptions(tmp_path):
    ours.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)

    with pytest.raises(CheckpointException) as caught:
        ours.load({"v": torch.ones(2)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value, KeyMismatchError)
    assert isinstance(caught.value, RuntimeError)  # as torch's planner and `Module.load_state_dict` raise
    assert "Missing key" in str(caught.value)
    assert isinstance(caught.value.failures[0][0], KeyMismatchError)
    assert str(copy.copy(caught.value)) == str(caught.value)
    with pytest.raises(CheckpointException):
        ours.async_save({"v": open}, checkpoint_id=tmp_path, planner=Failing()).result()


class Failing(theirs.DefaultSavePlanner):
    def create_local_plan(self):
        raise FileNotFoundError(2, "no such thing", "thing")


def test_errors_of_planners_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        ours.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, planner=Failing())

    assert isinstance(caught.value, CheckpointException)
    assert caught.value.filename == "thing"
    assert str(caught.value) == str(FileNotFoundError(2, "no such thing", "thing"))


@pytest.mark.gloo
def test_failures_name_the_rank(tmp_path):
    for rank, (kind, failures) in enumerate(gloo.run(jobs.one_rank_fails, 3, str(tmp_path))):
        assert kind == ("ValueError" if rank == 1 else RankFailedError.__name__)
        assert failures == [1]


@TYPED
def test_urls_that_only_fsspec_knows(tmp_path):
    pytest.importorskip("fsspec")
    where = f"local://{tmp_path}/c"
    ours.save({"w": torch.ones(2)}, checkpoint_id=where)
    target = {"w": torch.zeros(2)}

    ours.load(target, checkpoint_id=where)

    assert target["w"].tolist() == [1, 1]
    with pytest.raises(StorageError, match="unknown scheme 'nobody'"):
        ours.load(target, checkpoint_id="nobody://x/y")


@pytest.mark.skipif("use_collectives" not in inspect.signature(theirs.save).parameters, reason="a newer torch can")
def test_metadata_of_a_rank_alone(tmp_path):
    save_alone({"w": torch.ones(2), "n": 3}, checkpoint_id=tmp_path, use_collectives=False)
    assert not (tmp_path / ".metadata").exists()

    for reader in (ours.FileSystemReader(tmp_path), theirs.FileSystemReader(tmp_path)):
        target = {"w": torch.zeros(2), "n": 0}
        ours.load(target, storage_reader=reader, no_dist=True)
        assert (target["w"].tolist(), target["n"]) == ([1, 1], 3)


class Stager(AsyncStager):
    """Copies the state at once, or in a future that is done later."""

    def __init__(self, later=None):
        self.later, self.calls, self._synchronize_after_execute = later, [], True

    def stage(self, state_dict):
        self.calls.append("stage")
        if self.later is None:
            return copy.deepcopy(state_dict)
        return self.later

    def synchronize_staging(self):
        self.calls.append("synchronize")

    def close(self):
        self.calls.append("close")


def test_a_stager_of_the_callers_own(tmp_path):
    stager, state = Stager(), {"w": torch.ones(2)}

    ours.async_save(state, checkpoint_id=tmp_path, async_stager=stager, async_checkpointer_type="process").result()

    assert stager.calls == ["stage", "synchronize"]
    ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1, 1]


def test_a_stager_that_is_not_done_yet(tmp_path):
    later: Future[dict[str, torch.Tensor]] = Future()

    answer = ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=Stager(later))
    staged = getattr(answer, "staging_completion", None)  # under torch 2.6 there is one future, of the upload
    saved = answer if staged is None else answer.upload_completion
    assert (staged is None) == (not hasattr(theirs.state_dict_saver, "AsyncSaveResponse"))
    assert not (staged or saved).done()
    assert not saved.done()
    later.set_result({"w": torch.full((2,), 4.0)})

    assert staged is None or staged.result(20) is None
    saved.result(20)
    ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [4, 4]


class StagingWriter(theirs.FileSystemWriter):
    staged = 0

    def stage(self, state_dict):
        self.staged += 1
        return super().stage(state_dict)


@TYPED
def test_a_writer_that_is_a_stager_stages(tmp_path):
    writer = StagingWriter(tmp_path)

    ours.async_save({"w": torch.ones(2)}, storage_writer=writer).result()

    assert writer.staged == 1


class TracksStaging(ours.FileSystemWriter):
    """As programs write it for torch's writer, which is a stager itself."""

    _synchronize_after_execute = True
    synchronized = 0

    def stage(self, state_dict):
        return {key: value + 1 for key, value in super().stage(state_dict).items()}

    def synchronize_staging(self):
        self.synchronized += 1


def test_a_subclass_of_the_writer_stages_in_its_own_way(tmp_path):
    writer, state = TracksStaging(tmp_path), {"w": torch.ones(2)}

    ours.async_save(state, storage_writer=writer).result()

    ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [2, 2]
    assert writer.synchronized == 1


def test_nothing_that_changes_later_is_saved_in_the_background(tmp_path):
    go: Future[None] = Future()
    state = {"w": torch.zeros(2), "array": np.zeros(2), "names": ["a"], "set": {1}}

    future = ours.async_save(state, checkpoint_id=tmp_path, planner=Waiting(go))
    state["w"].fill_(9)
    state["array"][:] = 9
    state["names"].append("b")
    state["set"].add(2)
    go.set_result(None)
    future.result()

    target = {"w": torch.ones(2), "array": None, "names": None, "set": None}
    ours.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == target["array"].tolist() == [0, 0]
    assert (target["names"], target["set"]) == (["a"], {1})


class Waiting(ours.DefaultSavePlanner):
    def __init__(self, go):
        super().__init__()
        self.go = go

    def create_local_plan(self):
        self.go.result(20)
        return super().create_local_plan()


@pytest.mark.gloo
def test_sharded_tensors_in_the_background(tmp_path):
    assert all(gloo.run(jobs.sharded_async, 2, str(tmp_path)))


class Flipped:
    """An extension: every byte the other way round."""

    def get_descriptor(self):
        return "stream.flipped/1"

    @staticmethod
    def registry_name():
        return "stream.flipped"

    @classmethod
    def from_descriptor(cls, version):
        return cls()

    def transform_to(self, output):
        return _FlippedOut(output)

    def transform_from(self, source):
        return io.BytesIO(bytes(255 - b for b in source.read(-1)))


class _FlippedOut:
    def __init__(self, output):
        self.output = output

    def write(self, data):
        return self.output.write(bytes(255 - b for b in bytes(data)))

    def flush(self):
        self.output.flush()

    def close(self):
        self.output.close()


def test_extensions_of_the_writer(tmp_path):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    kind = type("Kind", (Flipped, extension.StreamTransformExtension), {})
    writer = ours.FileSystemWriter(tmp_path, _extensions=[kind()])
    ours.save({"w": torch.arange(3.0), "n": 5}, storage_writer=writer)
    registry = extension.ExtensionRegistry()
    registry.register(kind)
    target = {"w": torch.zeros(3), "n": 0}

    load_alone(target, storage_reader=theirs.FileSystemReader(tmp_path, _extension_registry=registry))

    assert (target["w"].tolist(), target["n"]) == ([0, 1, 2], 5)
    with pytest.raises(reshard.ReshardError, match=r"stream\.flipped(.|\n)*_extension_registry"):
        ours.load(target, checkpoint_id=tmp_path)
    empty = ours.FileSystemReader(tmp_path, _extension_registry=extension.ExtensionRegistry())
    with pytest.raises(FormatError, match=r"stream\.flipped"):
        ours.load(target, storage_reader=empty)


@pytest.mark.parametrize("save", [ours.save, theirs.save], ids=["ours", "torch"])
@pytest.mark.parametrize("planner", [None, theirs.DefaultLoadPlanner, Whole], ids=["engine", "default", "own"])
def test_extensions_that_the_caller_registered(tmp_path, save, planner):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    kind = type("Kind", (Flipped, extension.StreamTransformExtension), {})
    writer = (ours if save is ours.save else theirs).FileSystemWriter(tmp_path, _extensions=[kind(), kind()])
    save({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(5), "e": torch.empty(0)}, storage_writer=writer)
    registry = extension.ExtensionRegistry()
    registry.register(kind)
    target = {"w": torch.zeros(2, 3), "n": torch.tensor(0), "e": torch.empty(0)}

    reader = ours.FileSystemReader(tmp_path, _extension_registry=registry)
    ours.load(target, storage_reader=reader, planner=planner and planner())

    assert target["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["n"].item() == 5


def test_a_format_that_nobody_reads_is_refused(tmp_path):
    with pytest.raises(StorageError, match="safetensors"):
        ours.FileSystemWriter(tmp_path, serialization_format="safetensors")


@dataclasses.dataclass
class Config:
    width: int = 1


def test_objects_that_need_code_are_refused_by_name(tmp_path):
    """Before, a record that only describes it would have taken the live object's place."""
    ours.save({"config": Config(), "inside": [Config()], "w": torch.ones(2)}, checkpoint_id=tmp_path)
    target = {"config": Config(5), "inside": [0], "w": torch.zeros(2)}

    with pytest.raises(KeyMismatchError, match=r"config: saved as an object of .*Config"):
        ours.load(target, checkpoint_id=tmp_path)
    with pytest.raises(UnsafeDataError, match=r"config: saved as an object of .*Config"):
        ours.load({"config": None}, checkpoint_id=tmp_path, storage_reader=theirs.FileSystemReader(tmp_path))

    assert target["config"] == Config(5)
    assert target["w"].tolist() == [0, 0]
    reader, planner = theirs.FileSystemReader(tmp_path), theirs.DefaultLoadPlanner()
    ours.load(target, storage_reader=reader, planner=planner)  # who trusts the file can say so
    assert target["config"] == Config(1)


def test_a_writer_is_used_again_without_being_reset(tmp_path):
    """torch resets a writer only where a new place is given."""
    writer = ours.FileSystemWriter(Path(tmp_path))
    for value in (1.0, 2.0, 3.0):
        save_alone({"w": torch.full((2,), value)}, storage_writer=writer)
        ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
        assert target["w"].tolist() == [value, value]


def test_a_storage_given_by_position(tmp_path):
    with pytest.warns(UserWarning, match="storage_writer="):
        ours.save({"w": torch.ones(2)}, ours.FileSystemWriter(tmp_path))
    target = {"w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="storage_reader="):
        ours.load(target, ours.FileSystemReader(tmp_path))

    assert target["w"].tolist() == [1, 1]


def test_metadata_names_the_save_and_the_load(tmp_path):
    writer, reader = ours.FileSystemWriter(tmp_path), ours.FileSystemReader(tmp_path)
    ours.save({"w": torch.ones(2)}, storage_writer=writer)

    meta = reader.read_metadata().storage_meta

    assert (str(meta.checkpoint_id), meta.save_id, meta.load_id) == (str(tmp_path), writer.save_id, reader.load_id)


class SlowWriter(ours.FileSystemWriter):
    """Writes after a while."""

    def write_data(self, plan, planner):
        time.sleep(0.3)
        return super().write_data(plan, planner)


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("shared", ["writer", "place", "planner"])
def test_a_save_waits_for_earlier_ones_that_use_the_same(tmp_path, monkeypatch, shared, in_background):
    """Of a writer or a planner, both would have the place and the state of the later save, and of one place, one save
    would remove the files of the other."""
    first, second = tmp_path / "a", tmp_path / ("a" if shared == "place" else "b")
    monkeypatch.chdir(tmp_path)
    writer, planner = (SlowWriter(first) if shared == "writer" else None), None
    if shared == "planner":
        planner = type("Planner", (ours.DefaultSavePlanner,), {})()

    earlier = ours.async_save(
        {"w": torch.ones(9)}, checkpoint_id=first, storage_writer=writer or SlowWriter(first), planner=planner
    )
    assert not earlier.done()
    call = ours.async_save if in_background else ours.save
    later = call({"w": torch.zeros(9)}, checkpoint_id=second.name, storage_writer=writer, planner=planner)
    if in_background:
        later.result()

    assert earlier.done()
    earlier.result()
    for path, value in {first: 1.0, second: 0.0}.items():
        found = {"w": torch.full((9,), -1.0)}
        ours.load(found, checkpoint_id=path)
        assert found["w"].tolist() == [value] * 9


def test_a_save_does_not_wait_for_others_nor_raise_their_errors(tmp_path):
    class FailingWriter(SlowWriter):
        def finish(self, metadata, results):
            raise RuntimeError("not today")

    earlier = ours.async_save({"w": torch.ones(9)}, storage_writer=FailingWriter(tmp_path / "a"))
    ours.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "b")
    assert not earlier.done()
    ours.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(RuntimeError, match="not today"):
        earlier.result(0)


def test_a_save_waits_for_one_of_the_other_interface(tmp_path):
    earlier = ours.async_save({"w": torch.ones(9)}, storage_writer=SlowWriter(tmp_path))
    with pytest.raises(StorageError, match=r"contains a DCP checkpoint \(\.metadata\)"):
        reshard.save({"w": torch.zeros(9)}, tmp_path)
    assert earlier.done()
