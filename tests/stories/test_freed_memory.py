"""Tensors whose memory was freed, as of a model that is offloaded, are refused by name by every verb."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
import reshard.dcp
from reshard.errors import LayoutError
from tests import gloo

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def freed() -> torch.Tensor:
    tensor = torch.zeros(64, 48)
    tensor.untyped_storage().resize_(0)
    return tensor


def part_of_freed() -> torch.Tensor:
    """Behind another one in a buffer, so that its address is not 0."""
    buffer = torch.zeros(4000)
    part = buffer[900:3972].view(64, 48)
    buffer.untyped_storage().resize_(0)
    return part


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(64, 48)


def functional() -> torch.Tensor:
    """As functionalization passes to the code that it traces: it has a storage, without an address."""
    tensor: torch.Tensor = torch._to_functional_tensor(torch.zeros(64, 48))
    return tensor


KINDS: dict[str, Callable[[], Any]] = {
    "freed": freed,
    "part of freed": part_of_freed,
    "FakeTensor": fake,
    "functional": functional,
}
VERBS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "save": lambda state, path: reshard.save(state, path / "new"),
    "dcp.save": lambda state, path: reshard.dcp.save(state, checkpoint_id=path / "new"),
    "dcp.async_save": lambda state, path: reshard.dcp.async_save(state, checkpoint_id=path / "new").result(),
    "async_save": lambda state, path: reshard.async_save(state, path / "new").result(),
    "load": lambda state, path: reshard.load(state, path / "c"),
    "load with a cast": lambda state, path: reshard.load(state, path / "wide", dtype_policy="cast"),
    "dcp.load": lambda state, path: reshard.dcp.load(state, checkpoint_id=path / "d"),
    "our writer": lambda state, path: dcp.save(
        state, storage_writer=reshard.dcp.FileSystemWriter(path / "new"), no_dist=True
    ),
    "our reader": lambda state, path: dcp.load(
        state, storage_reader=reshard.dcp.FileSystemReader(path / "d"), no_dist=True
    ),
    "fingerprint": lambda state, path: reshard.fingerprint(state),
    "compare": lambda state, path: reshard.compare(path / "c", state),
    "redistribute it": lambda state, path: reshard.redistribute(state, {"a": torch.zeros(2), "x": torch.zeros(64, 48)}),
    "redistribute into it": lambda state, path: reshard.redistribute(
        {"a": torch.ones(2), "x": torch.ones(64, 48)}, state
    ),
    "verify_live": lambda state, path: reshard.verify_live({"a": torch.ones(2), "x": torch.ones(64, 48)}, state),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused(kind: str, verb: str, tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "x": torch.ones(64, 48)}
    reshard.save(saved, tmp_path / "c")
    reshard.save({key: value.double() for key, value in saved.items()}, tmp_path / "wide")
    reshard.dcp.save(saved, checkpoint_id=tmp_path / "d", no_dist=True)
    state = {"a": torch.zeros(2), "x": KINDS[kind]()}

    with pytest.raises(
        (LayoutError, dcp.CheckpointException), match=r"'x' has no memory: .* a FakeTensor, or its storage was freed"
    ):
        VERBS[verb](state, tmp_path)

    assert not [*tmp_path.glob("new/*")]
    assert verb == "our reader" or torch.equal(state["a"], torch.zeros(2))


@pytest.mark.parametrize("verb", ["save", "dcp.save", "load", "dcp.load", "fingerprint"])
def test_tensors_within_vmap_are_refused(verb: str, tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "x": torch.ones(64, 48)}
    reshard.save(saved, tmp_path / "c")
    reshard.dcp.save(saved, checkpoint_id=tmp_path / "d", no_dist=True)

    def refused(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises((LayoutError, dcp.CheckpointException), match=r"'x' has no memory: .* a FakeTensor"):
            VERBS[verb]({"a": torch.zeros(2), "x": x}, tmp_path)
        return x

    torch.func.vmap(refused)(torch.zeros(3, 64, 48))


def _model(*, lacks_memory: bool) -> torch.nn.Module:
    model = torch.nn.Linear(48, 64)
    if lacks_memory:
        model.weight.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize("of", ["the model's", "the given"])
def test_a_model_is_not_set_where_either_has_no_memory(of: str) -> None:
    given = _model(lacks_memory=of == "the given").state_dict()
    with pytest.raises(reshard.errors.KeyMismatchError, match=rf"weight: {of} tensor has no memory: .*freed"):
        reshard.set_model_state_dict(_model(lacks_memory=of == "the model's"), given)


@pytest.mark.parametrize("changed", [False, True])
def test_an_optimizer_gets_new_state_in_place_of_what_was_freed(changed: bool) -> None:
    model = _model(lacks_memory=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 48)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(reshard.get_optimizer_state_dict(model, optimizer))
    optimizer.state[model.weight]["exp_avg"].untyped_storage().resize_(0)
    if changed:
        optimizer.state[model.bias].clear()

    reshard.set_optimizer_state_dict(model, optimizer, saved)

    assert torch.equal(optimizer.state[model.weight]["exp_avg"], saved["state"]["weight"]["exp_avg"])


def test_an_optimizer_is_not_set_to_state_without_memory() -> None:
    model = _model(lacks_memory=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 48)).sum().backward()
    optimizer.step()
    given = copy.deepcopy(reshard.get_optimizer_state_dict(model, optimizer))
    given["state"]["weight"]["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(reshard.errors.KeyMismatchError, match=r"weight: its 'exp_avg' has no memory"):
        reshard.set_optimizer_state_dict(model, optimizer, given)


def _on_one_rank(verb: str, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state = {"a": torch.zeros(2), "x": distribute_tensor(torch.ones(64, 48), mesh, [Shard(0)])}
    if dist.get_rank():
        state["x"].to_local().untyped_storage().resize_(0)
    try:
        VERBS[verb](state, folder)
    except (reshard.ReshardError, dcp.CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("verb", ["save", "async_save", "dcp.save", "load", "dcp.load", "compare", "fingerprint"])
def test_if_one_rank_freed_them_all_ranks_end(verb: str, tmp_path: Path) -> None:
    reshard.save({"a": torch.ones(2), "x": torch.ones(64, 48)}, tmp_path / "c")
    reshard.dcp.save({"a": torch.ones(2), "x": torch.ones(64, 48)}, checkpoint_id=tmp_path / "d", no_dist=True)

    first, second = gloo.run(_on_one_rank, 2, verb, tmp_path)

    assert "'x'" in second
    assert "freed" in second
    assert first != "no error"
