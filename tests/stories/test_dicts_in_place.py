"""A load fills the dicts of the caller, whose variables hold them: also those without tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard import dcp
from reshard.errors import KeyMismatchError, LayoutError


def built(lr: float, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("load", [reshard.load, dcp.load])
@pytest.mark.parametrize("form", ["native", "dcp"])
def test_variables_hold_what_was_loaded(load: Any, form: str, kind: Any, tmp_path: Path) -> None:
    """Of an optimizer without tensors, such as one that made no step, and of a scheduler."""
    model, optimizer, scheduler = built(0.001, kind)
    weights, moments = reshard.get_state_dict(model, optimizer)
    saved = {"model": weights, "optim": moments, "schedule": {**scheduler.state_dict(), "last_epoch": 7}}
    if form == "native":
        reshard.save(saved, tmp_path / "c")
    else:
        dcp.save(saved, checkpoint_id=tmp_path / "c")
    model, optimizer, scheduler = built(0.1, kind)
    weights, moments = reshard.get_state_dict(model, optimizer)
    schedule = scheduler.state_dict()
    if load is reshard.load:
        assert load({"model": weights, "optim": moments, "schedule": schedule}, tmp_path / "c").ok
    else:
        load({"model": weights, "optim": moments, "schedule": schedule}, checkpoint_id=tmp_path / "c")
    reshard.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(schedule)
    assert optimizer.param_groups[0]["lr"] == 0.001
    assert scheduler.last_epoch == 7


def test_nested_dicts_are_filled_in_the_order_and_with_the_keys_that_were_saved(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "d": {"b": 1, "in": {"x": [1, 2]}, "a": 2}, "o": OrderedDict(z=1, y=2)}
    reshard.save({**saved, "f": defaultdict(list, {"k": [1]})}, tmp_path / "c")
    inner: dict[str, Any] = {"gone": 1}
    outer: dict[str, Any] = {"a": 0, "in": inner, "b": 0}
    ordered, factory = OrderedDict(y=0, z=0), defaultdict(list)
    state = {"w": torch.zeros(2), "d": outer, "o": ordered, "f": factory}
    reshard.load(state, tmp_path / "c", strict=False)
    assert (state["d"] is outer, outer["in"] is inner) == (True, True)
    assert list(outer.items()) == [("b", 1), ("in", {"x": [1, 2]}), ("a", 2)]
    assert (state["o"] is ordered, list(ordered.items())) == (True, [("z", 1), ("y", 2)])
    assert (state["f"] is factory, factory["k"], factory["new"]) == (True, [1], [])


def test_a_dict_under_two_keys_takes_the_values_of_one(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "a": {"x": 1}, "b": {"x": 2}}, tmp_path / "c")
    shared = {"x": 0}
    state = {"w": torch.zeros(2), "a": shared, "b": shared}
    assert reshard.load(state, tmp_path / "c").ok
    assert (state["a"], state["b"]) == ({"x": 1}, {"x": 2})
    assert shared == {"x": 1}


def test_a_load_that_is_refused_changes_no_dict(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "d": {"x": 1}}, tmp_path / "c")
    inner = {"x": 0}
    with pytest.raises(reshard.ReshardError):
        reshard.load({"w": torch.zeros(3), "d": inner}, tmp_path / "c")
    reshard.load({"w": torch.zeros(2), "d": inner}, tmp_path / "c", dry_run=True)
    assert inner == {"x": 0}


def test_a_manager_fills_the_dicts_of_a_program(tmp_path: Path) -> None:
    progress = {"step": 0, "epoch": 0}
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
        progress |= {"step": 4, "epoch": 2}
        manager.save(4, {"model": torch.nn.Linear(2, 2), "progress": progress})
    fresh = {"step": 0, "epoch": 0}
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
        assert manager.restore({"model": torch.nn.Linear(2, 2), "progress": fresh}) is not None
    assert fresh == {"step": 4, "epoch": 2}


def test_a_transfer_fills_dicts() -> None:
    options = {"lr": 0.0}
    source = {"w": torch.ones(2), "d": {"lr": 0.5}}
    reshard.redistribute(source, {"w": torch.zeros(2), "d": options})
    assert options == {"lr": 0.5}
    reshard.redistribute(source, {"w": torch.zeros(2), "d": source["d"]})
    assert source["d"] == {"lr": 0.5}


def test_a_tensor_for_a_saved_number_is_filled_in_place(tmp_path: Path) -> None:
    """A module's `num_batches_tracked`, or a counter that a program holds, is not left with its old value."""
    reshard.save({"norm": {"num_batches_tracked": 9}, "scale": 2.5, "again": 2.5, "other": 3}, tmp_path / "c")
    norm, scale = torch.nn.BatchNorm1d(2, affine=False), torch.nn.Parameter(torch.tensor(0.0))
    held = norm.num_batches_tracked
    state = {"norm": {"num_batches_tracked": norm.state_dict()["num_batches_tracked"]}, "scale": scale}
    report = reshard.load(state, tmp_path / "c", strict="subset")
    assert report.ok
    assert set(report.cast) == {"norm.num_batches_tracked", "scale"}
    assert (int(held), scale.item()) == (9, 2.5)
    with torch.inference_mode():
        frozen = torch.tensor(0.0)
    tied = {"scale": frozen, "again": frozen}
    assert reshard.load(tied, tmp_path / "c", strict="subset").ok
    assert frozen.item() == 2.5
    assert reshard.load({"scale": frozen, "new": frozen}, tmp_path / "c", strict="subset").ok
    meta = {"scale": torch.nn.Parameter(torch.empty((), device="meta"))}
    assert reshard.load(meta, tmp_path / "c", strict="subset").ok
    assert isinstance(meta["scale"], torch.nn.Parameter)
    assert meta["scale"].item() == 2.5
    with pytest.raises(KeyMismatchError, match=r"'scale' and 'other' share memory, but .* different values"):
        reshard.load({"scale": frozen, "other": frozen}, tmp_path / "c", strict="subset")
    values = torch.zeros(3)
    reshard.save({"v": torch.ones(3), "first": 4}, tmp_path / "v")
    with pytest.raises(LayoutError, match=r"overlap in memory"):
        reshard.load({"v": values, "first": values[0]}, tmp_path / "v")
    assert not values.any()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_an_empty_container_stays_where_the_target_has_it(kind, tmp_path):
    """Only of values the order is saved. That of the items of an OrderedDict counts when it is compared."""
    saved = kind(warmup={}, decay={"lr": 1}, plugins=[], last=2, rest=())
    reshard.save({"stages": saved}, tmp_path / "c")
    target = {"stages": kind(warmup={}, decay={"lr": 0}, plugins=[], last=0, rest=())}
    assert reshard.load(target, tmp_path / "c").ok
    assert target["stages"] == saved
    assert list(target["stages"]) == list(saved)


def test_values_come_back_in_the_order_in_which_they_were_saved(tmp_path):
    reshard.save({"stages": OrderedDict(a=1, empty={}, b=2)}, tmp_path / "c")
    target = {"stages": OrderedDict(b=0, empty={}, a=0)}
    reshard.load(target, tmp_path / "c")
    assert list(target["stages"]) == ["a", "b", "empty"]
