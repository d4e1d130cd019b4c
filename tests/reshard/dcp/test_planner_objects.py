"""Planner objects as other programs pass them: torch's own mean the same as none, and know afterwards what was done."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file
from torch import nn

import reshard
import reshard.dcp as ours
from reshard.dcp import filesystem, state_dict_loader, state_dict_saver
from reshard.errors import KeyMismatchError, LayoutError, UnsafeDataError
from reshard.formats.dcp.writer import versioned
from tests.torch_releases import load_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Plain:
    """Of a class that the restricted reader does not know."""


@pytest.fixture
def protocol(monkeypatch):
    """How often torch's protocol was followed, and with which planner."""
    calls = []
    for module, name in ((state_dict_loader, "run_load"), (state_dict_saver, "run_save")):
        real = getattr(module, name)

        def counted(state, storage, planner, *rest, real=real):
            calls.append(type(planner))
            return real(state, storage, planner, *rest)

        monkeypatch.setattr(module, name, counted)
    return calls


LOADERS = [ours.DefaultLoadPlanner, theirs.DefaultLoadPlanner]
SAVERS = [ours.DefaultSavePlanner, theirs.DefaultSavePlanner]
WHOSE = {"ids": ["ours", "torch"]}


@pytest.mark.parametrize("kind", LOADERS, **WHOSE)
def test_a_load_with_a_default_planner_takes_the_engine(tmp_path, protocol, kind):
    ours.save({"n": {"w": torch.ones(2), "step": 3}}, checkpoint_id=tmp_path)
    protocol.clear()
    target, planner = {"n": {"w": torch.zeros(2), "step": 0}}, kind()

    ours.load(target, checkpoint_id=tmp_path, planner=planner)

    assert protocol == []
    assert (target["n"]["w"].tolist(), target["n"]["step"]) == ([1, 1], 3)
    assert planner.metadata.state_dict_metadata.keys() == {"n.w", "n.step"}
    assert vars(planner.metadata).items() >= versioned("1.0.0").items()
    assert planner.state_dict.keys() == {"n.w", "n.step"}
    assert planner.is_coordinator


@pytest.mark.parametrize("kind", LOADERS, **WHOSE)
def test_a_default_planner_may_say_that_keys_may_be_missing(tmp_path, protocol, kind):
    reshard.save({"w": torch.ones(2)}, tmp_path)
    target = {"w": torch.zeros(2), "v": torch.zeros(1)}

    ours.load(target, checkpoint_id=tmp_path, planner=kind(allow_partial_load=True))

    assert protocol == []
    assert (target["w"].tolist(), target["v"].tolist()) == ([1, 1], [0])


@pytest.mark.parametrize("kind", LOADERS, **WHOSE)
def test_a_planner_that_flattens_nothing(tmp_path, protocol, kind):
    ours.save({"w": torch.ones(2), "n": {"a": 1}}, checkpoint_id=tmp_path, planner=SAVERS[0](flatten_state_dict=False))
    protocol.clear()
    target = {"w": torch.zeros(2), "n": None}

    ours.load(target, checkpoint_id=tmp_path, planner=kind(flatten_state_dict=False))

    assert protocol == [ours.DefaultLoadPlanner]
    assert (target["w"].tolist(), target["n"]) == ([1, 1], {"a": 1})


def test_a_subclass_is_the_callers_own(tmp_path, protocol):
    class Own(theirs.DefaultLoadPlanner):
        def lookup_tensor(self, index):
            self.asked = index.fqn
            return super().lookup_tensor(index)

    ours.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    planner = Own()

    ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner)

    assert protocol[-1] is Own
    assert planner.asked == "w"
    assert target["w"].tolist() == [1, 1]


def test_torch_s_planner_does_not_make_code_of_data(tmp_path):
    ours.save({"o": Plain()}, checkpoint_id=tmp_path)

    with pytest.raises((UnsafeDataError, reshard.ReshardError), match="Plain"):
        ours.load({"o": None}, checkpoint_id=tmp_path, planner=theirs.DefaultLoadPlanner())


@pytest.mark.parametrize("kind", SAVERS, **WHOSE)
def test_a_save_with_a_default_planner_is_planned_by_ours(tmp_path, protocol, kind):
    planner = kind(dedup_save_to_lowest_rank=True)

    metadata = ours.save({"n": {"w": torch.ones(2)}, "step": 3}, checkpoint_id=tmp_path, planner=planner)

    assert protocol == [ours.DefaultSavePlanner]
    assert planner.metadata.state_dict_metadata == metadata.state_dict_metadata
    assert vars(planner.metadata).items() >= versioned("1.0.0").items()
    assert planner.mappings == {"n.w": ("n", "w"), "step": ("step",)}
    assert {item.index.fqn for item in planner.plan.items} == {"n.w", "step"}
    assert planner.dedup_save_to_lowest_rank
    target = {"n": {"w": torch.zeros(2)}, "step": 0}
    load_alone(target, checkpoint_id=tmp_path)
    assert (target["n"]["w"].tolist(), target["step"]) == ([1, 1], 3)


@pytest.mark.parametrize("kind", SAVERS, **WHOSE)
def test_a_planner_object_is_used_again_and_in_the_background(tmp_path, kind):
    planner = kind()
    for value in (1.0, 2.0):
        metadata = ours.async_save(
            {"w": torch.full((2,), value)}, checkpoint_id=tmp_path / str(value), planner=planner
        ).result()
        assert planner.metadata.state_dict_metadata == metadata.state_dict_metadata
        ours.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path / str(value))
        assert target["w"].tolist() == [value, value]


class Own(ours.DefaultLoadPlanner):
    """A planner of the caller's own, with which torch's protocol is followed."""


def readers(folder):
    state = {"a": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(2.0), "e": torch.zeros(0, 3)}
    save_file(state, folder / "model.safetensors")
    ours.save(state, checkpoint_id=folder / "dcp")
    torch.save(state, folder / "state.pt")
    yield {"storage_reader": ours.hf_storage.HuggingFaceStorageReader(str(folder))}
    yield {"checkpoint_id": folder / "dcp", "planner": Own()}
    yield {"checkpoint_id": folder / "dcp", "planner": ours.DefaultLoadPlanner(flatten_state_dict=False)}
    broadcasting = ours.BroadcastingTorchSaveReader(folder / "state.pt")
    yield {"storage_reader": broadcasting, "planner": ours.DynamicMetaLoadPlanner()}


def test_targets_on_the_meta_device_get_memory(tmp_path):
    for call in readers(tmp_path):
        param = nn.Parameter(torch.zeros(2, 3, device="meta"), requires_grad=False)
        target = {"a": param, "s": torch.tensor(0.0, device="meta"), "e": torch.zeros(0, 3, device="meta")}

        ours.load(target, **call)

        assert {one.device.type for one in target.values()} == {"cpu"}
        assert target["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert target["s"].item() == 2
        assert isinstance(target["a"], nn.Parameter)


def test_local_shards_without_memory_are_refused(tmp_path):
    """They were left as they were."""
    wrapper = pytest.importorskip("torch.distributed.tensor._shards_wrapper").LocalShardsWrapper
    ours.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path)
    for planner in (None, Own()):
        target = {"w": wrapper([torch.zeros(4, device="meta")], [(0,)])}
        with pytest.raises(LayoutError, match="'w' is on the meta device: give it memory first"):
            ours.load(target, checkpoint_id=tmp_path, planner=planner)


def test_tied_and_nested_targets_on_the_meta_device(tmp_path):
    state = {"n": {"a": torch.ones(2), "b": torch.ones(2)}, "l": [torch.ones(1)]}
    ours.save(state, checkpoint_id=tmp_path)
    tied = torch.zeros(2, device="meta")
    target = {"n": {"a": tied, "b": tied, "c": tied}, "l": [torch.zeros(1, device="meta")]}

    ours.load(target, checkpoint_id=tmp_path, planner=Own(allow_partial_load=True))

    assert target["n"]["a"] is target["n"]["b"]
    assert (target["n"]["a"].tolist(), target["l"][0].tolist()) == ([1, 1], [1])
    assert target["n"]["c"] is tied, "it is not in the checkpoint, and stays as it was"


def test_targets_that_overlap_are_refused(tmp_path):
    ours.save({"a": torch.ones(3), "b": torch.zeros(3)}, checkpoint_id=tmp_path)
    memory = torch.full((5,), 7.0)
    for target in ({"a": memory[:3], "b": memory[2:]}, {"a": memory[:1].expand(3)}):
        with pytest.raises(LayoutError, match=r"overlap in memory|several elements at one"):
            ours.load(target, checkpoint_id=tmp_path, planner=Own())
    assert memory.tolist() == [7] * 5

    ours.load({"a": memory[:3], "b": memory[:3]}, checkpoint_id=tmp_path, planner=Own())  # tied


@pytest.mark.parametrize("value", [5, None, [1], "text"])
def test_a_tensor_for_a_plain_value_is_refused(tmp_path, value):
    ours.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, planner=SAVERS[0](flatten_state_dict=False))
    with pytest.raises(KeyMismatchError, match=r"(?s)a: saved as a tensor, wanted as.*leave them out of the state"):
        ours.load({"a": value}, checkpoint_id=tmp_path, planner=Own(flatten_state_dict=False))


@pytest.mark.parametrize("given", ["path", "writer"])
def test_a_save_in_the_background_stays_where_it_began(tmp_path, monkeypatch, given):
    """Its data and its metadata were in different folders if the working directory changed meanwhile."""
    write, goes_on = filesystem.write_items, threading.Event()

    def late(*args):
        goes_on.wait(30)
        return write(*args)

    monkeypatch.setattr(filesystem, "write_items", late)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    to = {"checkpoint_id": "c"} if given == "path" else {"storage_writer": ours.FileSystemWriter("c")}
    saving = ours.async_save({"w": torch.arange(3.0)}, **to)
    monkeypatch.chdir(tmp_path / "elsewhere")
    goes_on.set()
    saving.result()

    assert not list((tmp_path / "elsewhere").iterdir())
    ours.load(target := {"w": torch.zeros(3)}, checkpoint_id=tmp_path / "c")
    assert target["w"].tolist() == [0, 1, 2]
