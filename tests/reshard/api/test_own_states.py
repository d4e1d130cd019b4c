"""Schedulers and gradient scalers take the state of their own class and settings, and of no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import reshard
from reshard.errors import CheckpointError, KeyMismatchError, NormalizationError
from tests.same import same

KINDS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "step then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [KINDS["step"](optimizer), KINDS["cosine"](optimizer)], [3]
    ),
    "cosine then step": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [KINDS["cosine"](optimizer), KINDS["step"](optimizer)], [3]
    ),
}


def state_of(kind: str, *, enabled: bool = True, fill: float = 1.0, steps: int = 0, rate: Any = 0.1) -> dict[str, Any]:
    model = nn.Linear(2, 3)
    nn.init.constant_(model.weight, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = KINDS[kind](optimizer)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step(*([1.0] if kind == "plateau" else []))
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0**fill)
    return {"model": model, "optim": optimizer, "run": {"schedules": [schedule], "scaler": scaler}, "step": steps}


def saved(folder: Path, state: dict[str, Any]) -> reshard.CheckpointManager:
    manager = reshard.CheckpointManager(folder / "run", every=reshard.Every(steps=1))
    manager.save(1, state)
    return manager


def now(state: dict[str, Any]) -> list[Any]:
    """All that a restore can change."""
    parts = [state["run"]["scaler"].state_dict(), state["run"]["schedules"][0].state_dict(), state["step"]]
    model = reshard.get_state_dict(state["model"], state["optim"])
    return [*parts, *({**each} for each in model), state["model"].weight.detach().clone()]


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:The epoch parameter")
def test_only_a_scheduler_of_the_same_class_takes_what_was_saved(kind: str, other: str, tmp_path: Path) -> None:
    before, after = state_of(kind, steps=4), state_of(other, fill=3.0)
    untouched = now(state_of(other, fill=3.0))[-1]
    with saved(tmp_path, before) as manager:
        if kind == other:
            report = manager.restore(after)
            assert report is not None
            assert report.load.ok
            assert same(now(before)[1], now(after)[1])
            return
        with pytest.raises(KeyMismatchError, match=r"fix: run\.schedules\.0: the saved settings have other names"):
            manager.restore(after)
        assert torch.equal(now(after)[-1], untouched)
        assert after["step"] == 0

        report = manager.restore(after, strict={"run.schedules*": "partial"})
        assert report is not None
        assert any(key.startswith("run.schedules.0.") for key in (*report.load.missing, *report.load.unexpected))
        assert not report.load.ok
        assert torch.equal(now(after)[-1], now(before)[-1])


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_disabled_scaler_and_an_enabled_one(was_enabled: bool, tmp_path: Path) -> None:
    """torch's own error would come after the model is filled; the other way round it says nothing."""
    before, after = state_of("step", enabled=was_enabled, steps=2), state_of("step", enabled=not was_enabled, fill=3.0)
    untouched = now(after)
    with saved(tmp_path, before) as manager:
        with pytest.raises(KeyMismatchError, match=r"(?s)run\.scaler\.scale.*run\.scaler: the saved .* enabled="):
            manager.restore(after)
        assert same(now(after), untouched)

        report = manager.restore(after, strict={"run.scaler*": "partial"})
    assert report is not None
    assert not report.load.ok
    assert ("run.scaler.scale" in report.load.missing) is not was_enabled
    assert ("run.scaler.scale" in report.load.unexpected) is was_enabled
    assert same(after["run"]["scaler"].state_dict(), untouched[0])  # keeps its own
    assert torch.equal(now(after)[-1], now(before)[-1])


def test_entries_that_a_release_of_torch_added_or_lost_do_not_matter(tmp_path: Path) -> None:
    before, after = state_of("step", steps=2), state_of("step")
    del before["run"]["schedules"][0]._step_count
    before["run"]["schedules"][0].verbose = False
    with saved(tmp_path, before) as manager:
        report = manager.restore(after)
    assert report is not None
    assert after["run"]["schedules"][0].last_epoch == 2


def test_more_schedulers_than_were_saved(tmp_path: Path) -> None:
    before, after = state_of("step"), state_of("step")
    after["run"]["schedules"].append(KINDS["cosine"](after["optim"]))
    with saved(tmp_path, before) as manager, pytest.raises(KeyMismatchError, match=r"run\.schedules\.1"):
        manager.restore(after)


class Refusing:
    """An object of a user that raises an error of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"size": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"size {state['size']} is none of mine")


def test_an_error_of_an_object_says_what_was_restored_before(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "data": {"own": Refusing()}, "rng": torch.default_generator}
    with (
        saved(tmp_path, state) as manager,
        pytest.raises(
            CheckpointError,
            match=r"'data\.own' could not be restored: ValueError: size 3 is none of mine\nAlready "
            r"overwritten: tensors that the state itself holds, 'model'\. "
            r"Not restored: 'data\.own' and what follows it\. To restore the rest, ",
        ),
    ):
        manager.restore(state)


def test_plain_states_of_schedulers_and_scalers_are_reported(tmp_path: Path) -> None:
    """`load` has only dicts, which it replaces whole: what was lost is in the report."""
    before, after = state_of("step", enabled=False), state_of("cosine")
    reshard.save({key: each.state_dict() for key, each in plain(before).items()}, tmp_path / "c")
    state = {key: each.state_dict() for key, each in plain(after).items()}

    report = reshard.load(state, tmp_path / "c")

    assert not report.ok
    assert {"scaler.scale", "schedule.T_max"} <= set(report.dropped)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {"scaler": state["run"]["scaler"], "schedule": state["run"]["schedules"][0]}


class Tracker:
    """Keeps weights beside the model's, under names that begin as one tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.held: dict[str, Any] = {"best": weight, "last": weight, "pair": (weight, 1)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


@pytest.mark.parametrize("tied", [False, True])
def test_an_object_takes_values_that_differ_though_its_tensors_are_one(tied: bool, tmp_path: Path) -> None:
    """Also one tensor with the model, which keeps its memory. What was saved as one tensor is one again."""
    model, fresh = nn.Linear(2, 3), nn.Linear(2, 3)
    before, after = Tracker(model.weight.detach()), Tracker(fresh.weight.detach())
    before.held["last"] = torch.full((3, 2), 2.0)
    before.held["best"] = before.held["last"] if tied else torch.full((3, 2), 2.0)
    weight, live = fresh.weight, after.held
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
        manager.save(1, {"tracker": before, "model": model})
        report = manager.restore({"tracker": after, "model": fresh})
    assert report is not None
    assert report.load.ok
    assert fresh.weight is weight
    assert torch.equal(weight, model.weight)
    assert same(after.held, before.held)
    assert (after.held["best"] is after.held["last"]) == tied
    assert all(live[key] is not after.held[key] for key in ("best", "last"))
    assert after.held["pair"][0].data_ptr() == weight.data_ptr()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:The epoch parameter")
@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_whose_learning_rate_is_a_tensor_come_back(kind: str, tmp_path: Path) -> None:
    """Those inside a SequentialLR share it at first, and later have one each."""
    rate = torch.tensor(0.1)
    before, after = state_of(kind, steps=4, rate=rate), state_of(kind, rate=rate.clone())
    with saved(tmp_path, before) as manager:
        report = manager.restore(after)
    assert report is not None
    assert report.load.ok
    assert same(now(before)[1], now(after)[1])
    assert torch.equal(*(state["optim"].param_groups[0]["lr"] for state in (before, after)))


def _in_groups(order: str, make: Any) -> dict[str, Any]:
    """Bias and weight, in an order, each with a learning rate of its own."""
    model = nn.Linear(2, 3)
    rates = {"weight": 0.1, "bias": 0.9}
    groups = [{"params": [getattr(model, name)], "lr": rates[name]} for name in order.split()]
    optimizer = torch.optim.SGD(groups)
    return {"schedule": make(optimizer), "model": model, "optim": optimizer}


def _rates(state: dict[str, Any]) -> dict[int, float]:
    return {group["params"][0].ndim: group["lr"] for group in state["optim"].param_groups}


BY_POSITION = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch] * 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 8),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [BY_POSITION["lambda"](optimizer), BY_POSITION["cosine"](optimizer)], [3]
    ),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:The epoch parameter")
@pytest.mark.parametrize("make", BY_POSITION.values(), ids=BY_POSITION)
def test_rates_follow_groups_that_come_in_another_order(make: Any, tmp_path: Path) -> None:
    """The scheduler has one at each position, and groups are found by their parameters."""
    before, after = _in_groups("weight bias", make), _in_groups("bias weight", make)
    before["schedule"].step()
    with saved(tmp_path, before) as manager:
        manager.restore(after)
        for _ in range(4):
            assert _rates(after) == pytest.approx(_rates(before))
            for state in (before, after):
                state["schedule"].step()


def test_a_scheduler_of_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    """torch takes it, and fails at the next step."""
    two = _in_groups("bias weight", KINDS["exponential"])
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    one = {"schedule": KINDS["exponential"](optimizer), "model": model, "optim": optimizer}
    untouched = two["model"].weight.detach().clone()
    refused = pytest.raises(KeyMismatchError, match=r"base_lrs: saved for 1 param group, but the optimizer has 2")
    with saved(tmp_path, one) as manager, refused:
        manager.restore(two, strict=False)
    assert torch.equal(two["model"].weight, untouched)


def test_a_parameter_that_no_saved_group_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, target = nn.Linear(2, 3), nn.Linear(2, 3)
    untouched = target.weight.detach().clone()
    reshard.save({"model": model, "optim": torch.optim.AdamW([model.weight])}, tmp_path / "c")
    state = {"model": target, "optim": torch.optim.AdamW(target.parameters())}
    with pytest.raises(KeyMismatchError, match=r"Missing key: bias \(optimizer 0\)"):
        reshard.load(state, tmp_path / "c")
    assert torch.equal(target.weight, untouched)

    target.new = nn.Linear(1, 1)  # then the keys of the model are told first
    state["optim"].add_param_group({"params": target.new.parameters()})
    with pytest.raises(KeyMismatchError, match=r"(?s)2 missing from the checkpoint.*model\.new\.weight"):
        reshard.load(state, tmp_path / "c")
    assert "model.new.bias" in reshard.load(state, tmp_path / "c", dry_run=True).missing
    of_model = ("model.new.weight", "model.new.bias")
    of_optimizer = ("optim.state.bias", "optim.state.new.weight", "optim.state.new.bias")
    assert reshard.load(state, tmp_path / "c", strict=False).missing == (*of_model, *of_optimizer)
    assert torch.equal(target.weight, model.weight)


@pytest.mark.parametrize("other", ["kind", "values"])
def test_groups_are_refused_before_anything_is_written_also_without_state(other: str, tmp_path: Path) -> None:
    model, target = nn.Linear(2, 3), nn.Linear(2, 3)
    untouched = target.weight.detach().clone()
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    parts = [{"params": [target.weight]}, {"params": [target.bias]}]
    its = torch.optim.SGD(parts, momentum=0.9) if other == "kind" else torch.optim.AdamW(target.parameters())
    before = {"run": {"optim": torch.optim.AdamW(groups)}, "model": model}
    with saved(tmp_path, before) as manager, pytest.raises(NormalizationError) as caught:
        manager.restore({"run": {"optim": its}, "model": target})
    assert ("leave this optimizer out" if other == "kind" else "different values of 'weight_decay'") in str(
        caught.value
    )
    assert torch.equal(target.weight, untouched)
