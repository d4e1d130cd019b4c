"""The kinds of state that optimizers keep: what they need is asked for, what they have no use for is refused."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from reshard.errors import KeyMismatchError, NormalizationError
from reshard.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from tests.reshard.state_dict.test_layouts import assert_same
from tests.reshard.state_dict.torch_optimizers import CLASSES, OPTIONS, make, step, takes
from tests.torch_releases import requires

LENIENT = StateDictOptions(strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
DECOUPLED = requires("decoupled_weight_decay" in signature(torch.optim.Adam).parameters, "has no such field")
SPARSE = pytest.mark.not_simulated("it has no sparse tensors")
NOT_THERE = {"SparseAdam": [SPARSE], "Rprop": [pytest.mark.not_simulated("it sets elements by a tensor of the host")]}
OF_THE_HOST = {"Adagrad": {"fused": True}}
"""What torch has for the CPU only."""
ON_THE_HOST = pytest.mark.host_only("torch has this kernel for the CPU only")
KINDS = [
    pytest.param(name, options, marks=ON_THE_HOST if OF_THE_HOST.get(name) == options else NOT_THERE.get(name, []))
    for name in CLASSES
    for options in [{}, *({option: value} for option, values in OPTIONS.get(name, {}).items() for value in values)]
]


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2, bias=takes(name, torch.empty(2)))
        self.b = nn.Linear(3, 2, bias=False)


def warm(name: str, options: Any, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(name)
    optimizer = make(name, model.parameters(), options)
    for _ in range(steps):
        step(optimizer)
    return model, optimizer


def begins_anew(name: str) -> bool:
    """Whether the optimizer steps parameters whose state was taken away."""
    _, optimizer = warm(name, {}, 0)
    optimizer.state.clear()
    try:
        step(optimizer)
    except KeyError:
        return False
    return True


def test_the_options_of_every_optimizer_of_torch_are_known() -> None:
    newer = {"Muon"}  # than torch 2.6
    assert set(CLASSES) == {name for name in OPTIONS if name not in newer or hasattr(torch.optim, name)}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_every_single_key_left_out_is_named_before_anything_changes(name: str, options: Any, flat: bool) -> None:
    saved_from, saver = warm(name, options, 2)
    state = copy.deepcopy(get_optimizer_state_dict(saved_from, saver, options=FLAT if flat else None))
    model, optimizer = warm(name, options, 3)
    if flat:
        keys = [key for key in state if key.startswith("state.")]
    else:
        keys = [(fqn, key) for fqn, values in state["state"].items() for key in values]
    for key in keys:
        given = copy.deepcopy(state)
        fqn = key.removeprefix("state.").rpartition(".")[0] if flat else key[0]
        if flat:
            del given[key]
        else:
            del given["state"][fqn][key[1]]
        before = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        if name == "Muon" and flat:  # this one was all
            with pytest.raises(KeyMismatchError, match=f"Missing optimizer state: {fqn}"):
                set_optimizer_state_dict(model, optimizer, given)
            assert fqn in set_optimizer_state_dict(model, optimizer, given, options=LENIENT).missing
            continue
        if name in ("SGD", "Muon") or (name == "LBFGS" and (key if flat else key[1]).endswith("al")):
            # LBFGS makes it anew; a parameter that has no other state is reported to have none
            report = set_optimizer_state_dict(model, optimizer, given)
            assert name == "LBFGS" or fqn in report.without_state
            step(optimizer)
            continue
        for lenient in (None, LENIENT):
            with pytest.raises(KeyMismatchError, match=f"{fqn}: its state lacks"):
                set_optimizer_state_dict(model, optimizer, given, options=lenient)
            assert_same(get_optimizer_state_dict(model, optimizer), before)


@SPARSE
@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_state_of_one_optimizer_goes_into_another_only_where_it_is_of_its_kind(name: str, options: Any) -> None:
    model, optimizer = warm(name, options, 2)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    state["param_groups"] = [{"params": group["params"]} for group in state["param_groups"]]
    for other in CLASSES:
        if not all(takes(other, p) for p in model.parameters()):
            continue
        if name == "SGD" and other == "Adagrad" and not optimizer.state and not begins_anew(other):
            continue  # with nothing: this torch gives it state only when it is made, and its own load takes that away
        fresh = make(other, model.parameters())
        before = copy.deepcopy(fresh.state_dict())
        refused = ""
        try:
            set_optimizer_state_dict(model, fresh, state)
        except KeyMismatchError as error:
            refused = str(error)
        if refused:
            assert "does not use" in refused or "lacks" in refused
            assert_same(fresh.state_dict(), before)
            continue
        for p, values in fresh.state.items():
            own = optimizer.state[p]
            # torch itself makes a tensor of a step that was a number
            assert_same({**values, "step": float(values.get("step", 0))}, {**own, "step": float(own.get("step", 0))})
        step(fresh)


def test_adams_state_in_sgd_is_refused_or_reported_and_never_left_behind() -> None:
    model, adam = warm("Adam", {})
    state = get_optimizer_state_dict(model, adam)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(KeyMismatchError, match=r"state 'exp_avg' of .*'a.weight', .*, which SGD does not use"):
        set_optimizer_state_dict(model, sgd, state)
    assert sgd.param_groups[0]["lr"] == 0.5
    report = set_optimizer_state_dict(model, sgd, state, options=LENIENT)
    names = [name for name, _ in model.named_parameters()]
    assert set(report.unused) == {f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert not sgd.state


class Own(torch.optim.Optimizer):
    """Of no kind that could be known beforehand."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["memory"] = torch.ones_like(p)


def test_an_optimizer_of_unknown_kind_takes_what_it_is_given_until_it_has_state() -> None:
    model, adam = warm("Adam", {})
    state = copy.deepcopy(get_optimizer_state_dict(model, adam))
    fresh = Own(model.parameters())
    set_optimizer_state_dict(model, fresh, state)
    assert_same(get_optimizer_state_dict(model, fresh)["state"], state["state"])
    stepped = Own(model.parameters())
    stepped.step()
    with pytest.raises(KeyMismatchError, match=r"state 'exp_avg' of .*'a.weight'.*, which Own does not use"):
        set_optimizer_state_dict(model, stepped, state)


def test_state_of_the_whole_is_no_state_of_a_parameter() -> None:
    model, adam = warm("Adam", {})
    fresh = Own(model.parameters())
    fresh.state["whole"] = {"count": torch.zeros(())}  # type: ignore[index]  # as some optimizers do when they are made
    set_optimizer_state_dict(model, fresh, copy.deepcopy(get_optimizer_state_dict(model, adam)))
    assert "exp_avg" in get_optimizer_state_dict(model, fresh)["state"]["a.weight"]


def test_state_that_was_added_to_torchs_own_is_known_where_it_is_held() -> None:
    model, adam = warm("AdamW", {})
    for values in adam.state.values():
        values["shadow"] = torch.ones(2)
    state = copy.deepcopy(get_optimizer_state_dict(model, adam))
    set_optimizer_state_dict(model, adam, state)
    assert_same(get_optimizer_state_dict(model, adam), state)
    with pytest.raises(KeyMismatchError, match=r"'shadow' of .*'a.weight'"):
        set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), state)


def test_an_optimizer_that_steps_as_torchs_does_is_known_by_its_base() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    model, adam = warm("AdamW", {})
    state = copy.deepcopy(get_optimizer_state_dict(model, adam))
    del state["state"]["b.weight"]["exp_avg"]
    with pytest.raises(KeyMismatchError, match=r"b.weight: its state lacks 'exp_avg', which Renamed needs"):
        set_optimizer_state_dict(model, Renamed(model.parameters()), state)


class Tracking(torch.optim.AdamW):
    """Keeps a norm beside the moments, by a method that its user calls."""

    def track(self) -> None:
        for parameter, own in self.state.items():
            own["norm"] = parameter.detach().norm()


@pytest.mark.parametrize("by_hook", [False, True])
def test_state_beside_that_of_a_class_of_torch_goes_into_a_fresh_optimizer(by_hook: bool) -> None:
    def hook(optimizer: Any, *_: Any) -> None:
        Tracking.track(optimizer)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = (torch.optim.AdamW if by_hook else Tracking)(model.parameters())
        if by_hook:
            optimizer.register_step_post_hook(hook)
        return model, optimizer

    model, optimizer = made()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hook(optimizer)
    fresh, other = made()
    set_optimizer_state_dict(fresh, other, get_optimizer_state_dict(model, optimizer))

    assert other.state[fresh.weight]["norm"] == optimizer.state[model.weight]["norm"]
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(KeyMismatchError, match="Unexpected key: state 'momentum_buffer'"):  # of another class of torch
        set_optimizer_state_dict(*made(), get_optimizer_state_dict(model, momentum))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("saved", "live", "theirs", "own"),
    [
        ("SGD", "AdamW", "dampening, momentum, nesterov", "betas"),
        ("SGD", "RMSprop", "dampening, nesterov", "alpha, centered"),
        ("Adam", "Adagrad", "betas", "lr_decay"),
        pytest.param("AdamW", "Adam", "decoupled_weight_decay=True", "decoupled_weight_decay=False", marks=DECOUPLED),
        pytest.param("Adam", "AdamW", "decoupled_weight_decay=False", "decoupled_weight_decay=True", marks=DECOUPLED),
    ],
)
def test_groups_of_another_kind_are_refused(saved: str, live: str, theirs: str, own: str, flat: bool) -> None:
    """SGD's were taken by AdamW, which has state of no parameter then."""
    model, optimizer = warm(saved, {}, 0)
    state = get_optimizer_state_dict(model, optimizer, options=FLAT if flat else None)
    model, optimizer = warm(live, {}, 1 if live == "AdamW" else 0)
    before = copy.deepcopy(optimizer.state_dict())
    words = (
        rf"group 0 of optimizer 0 was saved by another class of optimizer: it has {theirs}, and {live} needs {own}\. "
    )
    with pytest.raises(NormalizationError, match=words):
        set_optimizer_state_dict(model, optimizer, state)
    assert_same(optimizer.state_dict(), before)
    set_optimizer_state_dict(model, optimizer, state, options=LENIENT)


def test_groups_of_a_related_kind_or_another_release_are_taken() -> None:
    """Only fields that tell kinds apart count, and only if some are there and others lack."""
    for saved, live in (("Adam", "RAdam"), ("Adam", "NAdam"), ("AdamW", "RAdam")):
        model, optimizer = warm(saved, {}, 0)
        state = get_optimizer_state_dict(model, optimizer)
        state["param_groups"][0] |= {"initial_lr": 1.0, "momentum": 0.5}
        state["param_groups"][0].pop("maximize")
        set_optimizer_state_dict(*warm(live, {}, 0), state)
