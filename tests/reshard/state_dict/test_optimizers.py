"""Optimizer state by name: any optimizer, any state of it, never stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn

import reshard
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.state_dict import (
    StateDictOptions,
    fqn_map,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.reshard.state_dict import zoo
from tests.same import assert_same

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LENIENT = StateDictOptions(strict=False)


class Lion(torch.optim.Optimizer):
    """One moment, updated by sign; no step counter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": [0.9, 0.99]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(torch.sign(m * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                    m.mul_(0.99).add_(p.grad, alpha=0.01)


class Shampoo(torch.optim.Optimizer):
    """Nested state under integer keys, in shapes that are not the parameter's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "blocks": {"size": 4}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                factors = state.setdefault("factors", {i: torch.eye(n) for i, n in enumerate(p.shape)})
                for i in factors:
                    flat = p.grad.movedim(i, 0).reshape(p.shape[i], -1)
                    factors[i] += flat @ flat.T
                p.sub_(p.grad, alpha=group["lr"])


class Muon(torch.optim.Optimizer):
    """Momentum for matrices only: vectors never get state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "ns_steps": 5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    p.sub_(m.mul_(0.95).add_(p.grad), alpha=group["lr"])


EVERY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
    "lion": Lion,
    "muon": Muon,
    "shampoo": Shampoo,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def frozen(value: Any) -> Any:
    """A deep copy to compare with afterwards."""
    return copy.deepcopy(value)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(kind: str, flat: bool) -> None:
    model = zoo.make(0)
    optimizer = EVERY[kind](model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    model_state, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    model_state, state = frozen((model_state, state))
    other = zoo.make(1)
    other_optimizer = EVERY[kind](other.parameters())
    if flat and kind == "lbfgs":
        step(other, other_optimizer)  # whatever it holds is replaced
    kept = frozen((model_state, state))
    set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=state)
    assert_same((model_state, state), kept)
    assert_same(get_optimizer_state_dict(other, other_optimizer, options=FLAT if flat else None), state)
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    assert_same(other.state_dict(), model.state_dict())
    # the live optimizers went on, the dict did not
    assert_same((model_state, state), kept)


@pytest.mark.parametrize("kind", EVERY)
def test_reading_never_steps_and_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold and warm, with and without gradients."""
    model = zoo.make(0)
    optimizer = EVERY[kind](model.parameters())

    def no_step(*_: Any, **__: Any) -> None:
        raise AssertionError("step() was called")

    for warm in (False, True):
        if warm:
            step(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "step", no_step)
            for grads in (False, True):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter) if grads else None
                before = zoo.snapshot(model, optimizer), frozen(optimizer.state_dict())
                get_state_dict(model, optimizer)
                get_optimizer_state_dict(model, optimizer, options=FLAT)
                assert_same((zoo.snapshot(model, optimizer), optimizer.state_dict()), before)


def test_a_read_before_the_first_update_does_not_change_the_update() -> None:
    ends = []
    for read in (False, True):
        model = zoo.make(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if read:
            get_state_dict(model, optimizer)
        step(model, optimizer)
        ends.append(frozen((model.state_dict(), optimizer.state_dict())))
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_without_gradients_stay_without_state(flat: bool) -> None:
    """Frozen towers, experts without tokens: absent is recorded as absent and restored as absent."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert list(state["state"]) == ["0.weight", "0.bias"]
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]

    given = frozen(get_optimizer_state_dict(model, optimizer, options=FLAT if flat else None))
    for warm in (False, True):
        other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        other_optimizer = torch.optim.AdamW(other.parameters())
        if warm:
            other(torch.ones(2)).sum().backward()
            other_optimizer.step()
        report = set_optimizer_state_dict(other, other_optimizer, given)
        assert report.without_state == ("1.weight", "1.bias")
        assert_same(get_optimizer_state_dict(other, other_optimizer), state)
        other(torch.ones(2)).sum().backward()
        other_optimizer.step()
        assert other_optimizer.state[other[1].weight]["step"] == 1
        assert other_optimizer.state[other[0].weight]["step"] == 2


def test_names_that_torchs_flat_form_gives_do_not_divide_groups() -> None:
    """It has those of a whole group at each parameter, and the live optimizer has other groups."""
    model = nn.Linear(3, 2)
    names = dict(model.named_parameters())
    one = torch.optim.SGD([*names.items()], momentum=0.9)
    two = torch.optim.SGD([{"params": [item]} for item in names.items()], momentum=0.9)
    for source, target in ((one, two), (two, one)):
        model(torch.ones(1, 3)).sum().backward()
        source.step()
        theirs = torchs.StateDictOptions(flatten_optimizer_state_dict=True)
        before = [group["param_names"] for group in target.param_groups]

        set_optimizer_state_dict(model, target, torchs.get_optimizer_state_dict(model, source, options=theirs))

        assert [group["param_names"] for group in target.param_groups] == before
        assert_same(*(get_optimizer_state_dict(model, each, options=FLAT) for each in (target, source)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("grads", [False, True])
def test_stateless_and_cold_optimizers(momentum: float, grads: bool, flat: bool) -> None:
    """No junk entries, and a dict that is loaded into a cold optimizer arrives whether gradients are set or not."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = frozen(get_optimizer_state_dict(model, optimizer))
    assert (state["state"] == {}) == (momentum == 0.0)
    given = frozen(get_optimizer_state_dict(model, optimizer, options=FLAT if flat else None))
    other = nn.Linear(2, 2)
    cold = torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum)
    if grads:
        other(torch.ones(2)).sum().backward()
    set_optimizer_state_dict(other, cold, given)
    assert_same(get_optimizer_state_dict(other, cold), state)
    assert set(cold.state_dict()["state"]) == (set() if momentum == 0.0 else {0, 1})


def test_group_fields_lost_and_gained() -> None:
    """A field that the dict lacks keeps the live value, one that the optimizer lacks is added; both are reported."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = frozen(get_optimizer_state_dict(model, optimizer))
    del state["param_groups"][0]["betas"]
    state["param_groups"][0]["mine"] = {"x": [1]}
    other = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.6))
    report = set_optimizer_state_dict(model, other, state)
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["mine"]) == (0.5, (0.5, 0.6), {"x": [1]})
    assert report.kept_fields == ("0.0.betas",)
    assert report.added_fields == ("0.0.mine",)
    group["mine"]["x"].append(2)
    assert state["param_groups"][0]["mine"] == {"x": [1]}


def test_fields_keep_the_live_type() -> None:
    model = nn.Linear(2, 2)
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)))
    live = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, live, state)
    assert (type(live.param_groups[0]["lr"]), live.param_groups[0]["lr"]) == (float, 0.25)

    lr = torch.tensor(0.1)
    live = torch.optim.AdamW(model.parameters(), lr=lr)
    state["param_groups"][0].update(lr=0.5, betas=[0.1, 0.2])
    set_optimizer_state_dict(model, live, state)
    assert live.param_groups[0]["lr"] is lr  # a graph may have captured it
    assert lr == 0.5
    assert live.param_groups[0]["betas"] == (0.1, 0.2)


def test_schedulers_resume() -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = make()
    optimizer.step()
    scheduler.step()
    state = frozen(get_optimizer_state_dict(model, optimizer))
    assert state["param_groups"][0]["initial_lr"] == 0.8
    other, other_optimizer, other_scheduler = make()
    set_optimizer_state_dict(other, other_optimizer, state)
    other_scheduler.load_state_dict(scheduler.state_dict())
    for s, o in ((scheduler, optimizer), (other_scheduler, other_optimizer)):
        o.step()
        s.step()
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"] == 0.2


def test_empty_groups_and_groups_in_another_order() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    a, b = list(model["a"].parameters()), list(model["b"].parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [], "lr": 0.5}, {"params": a, "lr": 0.1}, {"params": b, "lr": 0.2, "betas": (0.5, 0.5)}]
    )
    state = frozen(get_optimizer_state_dict(model, optimizer))
    live = torch.optim.AdamW([{"params": b}, {"params": a}, {"params": [], "betas": (0.1, 0.1)}], lr=9.0)
    set_optimizer_state_dict(model, live, state)
    assert [group["lr"] for group in live.param_groups] == [0.2, 0.1, 0.5]
    assert [group["betas"] for group in live.param_groups] == [(0.5, 0.5), (0.9, 0.999), (0.9, 0.999)]
    flat = frozen(get_optimizer_state_dict(model, optimizer, options=FLAT))
    live = torch.optim.AdamW([{"params": a}, {"params": b}, {"params": [], "lr": 7.0}], lr=9.0)
    set_optimizer_state_dict(model, live, flat)
    assert [group["lr"] for group in live.param_groups] == [0.1, 0.2, 7.0]


def test_groups_that_contradict_each_other_are_refused() -> None:
    model = nn.Linear(2, 2)
    two = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    one = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(NormalizationError, match=r"'weight' and 'bias' are in one group .* 'lr': 0.1 and 0.2"):
        set_optimizer_state_dict(model, one, get_optimizer_state_dict(model, two))
    assert one.param_groups[0]["lr"] == 0.3


def test_several_optimizers_and_parameters_outside_the_model() -> None:
    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = zoo.make(seed)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        outside = nn.Parameter(torch.full((3,), float(seed)))
        return model, [Muon(matrices), torch.optim.AdamW([*others, outside], lr=0.1)]

    model, optimizers = make(0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
    state = frozen(get_optimizer_state_dict(model, optimizers))
    outside = "outside_model.1.0.6"
    assert set(state["state"]) == {name for name, _ in model.named_parameters()} | {outside}
    assert fqn_map(model, *optimizers)[outside].ids == ((1, 6),)
    other, others = make(1)
    assert set_optimizer_state_dict(other, others, state).outside == (outside,)
    assert_same(get_optimizer_state_dict(other, others), state)
    # a dict of all may be set into one of them
    report = set_optimizer_state_dict(other, others[0], state, options=LENIENT)
    assert outside in report.unexpected


def test_optimizers_that_have_none_of_the_models_parameters_are_refused_and_some_are_named() -> None:
    model = zoo.make(0)
    stale = torch.optim.AdamW(model.parameters())
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))  # as fully_shard and to_empty do
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    for call in (
        lambda: get_optimizer_state_dict(model, stale),
        lambda: get_state_dict(model, [stale]),
        lambda: set_optimizer_state_dict(model, stale, state),
        lambda: fqn_map(model, stale),
    ):
        with pytest.raises(NormalizationError, match=r"AdamW has no parameter of the model.*after wrapping"):
            call()
    fresh = torch.optim.AdamW(model.parameters())
    report = set_optimizer_state_dict(model, [fresh, stale], state, options=LENIENT)
    outside = [f"outside_model.1.0.{i}" for i in range(len(stale.param_groups[0]["params"]))]
    assert list(report.outside) == outside
    assert [name for name in fqn_map(model, fresh, stale) if name.startswith("outside_model")] == outside


@pytest.mark.parametrize("flat", [False, True])
def test_state_without_an_optimizer_is_refused_if_strict(flat: bool) -> None:
    model = nn.Linear(2, 3)
    state = get_optimizer_state_dict(model, torch.optim.SGD(model.parameters()), options=FLAT if flat else None)
    with pytest.raises(KeyMismatchError, match=r"Unexpected key: weight, no optimizer was passed\n") as caught:
        set_state_dict(model, (), model_state_dict={}, optim_state_dict=state)
    assert "pipeline" not in str(caught.value)
    assert set_optimizer_state_dict(model, (), state, options=LENIENT).unexpected == ("weight", "bias")
    assert not set_optimizer_state_dict(model, (), {}).unexpected


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(NormalizationError, match=r"'bias' is in optimizer 0 .* and in optimizer 1 "):
        get_optimizer_state_dict(model, optimizers)
    outside = nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD([*model.parameters(), outside], lr=0.1), torch.optim.SGD([outside], lr=0.1)]
    with pytest.raises(NormalizationError, match=r"'outside_model.1.0.0' is in optimizer 0 .* and in optimizer 1 "):
        get_optimizer_state_dict(model, optimizers)


def test_state_of_another_order_and_layout_in_memory_goes_where_it_belongs() -> None:
    model, optimizer, state = warm_adamw()
    want = copy.deepcopy(state)
    for values in state["state"].values():
        values["exp_avg"] = (
            values["exp_avg"].t().contiguous().t() if values["exp_avg"].dim() == 2 else values["exp_avg"]
        )
    turned = {name: dict(reversed(values.items())) for name, values in state["state"].items()}
    with torch.no_grad():
        for held in optimizer.state.values():
            held["exp_avg"].zero_()
    held = {id(value) for values in optimizer.state.values() for value in values.values()}
    set_optimizer_state_dict(model, optimizer, {**state, "state": turned})
    assert_same(get_optimizer_state_dict(model, optimizer), want)
    assert {id(value) for values in optimizer.state.values() for value in values.values()} == held


def warm_adamw(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = zoo.make(0).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer, frozen(get_optimizer_state_dict(model, optimizer))


def test_bad_state_is_refused_with_all_names_and_nothing_changed() -> None:
    model, optimizer, good = warm_adamw()
    before = zoo.snapshot(model, optimizer)
    head = "head.weight"
    for change, words in [
        (lambda s: s["state"].update(ghost={"exp_avg": torch.ones(2)}), "Unexpected key: ghost"),
        (lambda s: s["state"][head].update(exp_avg=torch.ones(5, 6)), r"head.weight: its 'exp_avg' .*\(5, 6\)"),
        (lambda s: (s["param_groups"][0]["params"].remove(head), s["state"].pop(head)), "Missing key: head"),
        (lambda s: s["param_groups"][0].update(lr="much"), "field 'lr' of group 0 of optimizer 0 is 0.001"),
        (lambda s: s["param_groups"].append({"lr": 1.0, "params": [head]}), "'head.weight' is in two groups"),
    ]:
        bad = frozen(good)
        change(bad)
        kept = frozen(bad)
        with pytest.raises((KeyMismatchError, NormalizationError), match=words):
            set_optimizer_state_dict(model, optimizer, bad)
        assert_same(bad, kept)
        assert_same(zoo.snapshot(model, optimizer), before)


@pytest.mark.not_simulated("a layer norm in bfloat16 keeps other sums there than torch says beforehand")
def test_state_keeps_the_dtype_it_was_saved_with() -> None:
    _, _, state = warm_adamw(torch.bfloat16)
    model = zoo.make(1)
    optimizer = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, optimizer, state)
    assert_same(get_optimizer_state_dict(model, optimizer), state)
    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.bfloat16


def test_raw_dict_of_integer_ids_fits_the_one_optimizer() -> None:
    model, optimizer, state = warm_adamw()
    other = zoo.make(1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=9.0)
    set_optimizer_state_dict(other, other_optimizer, optimizer.state_dict())
    assert_same(get_optimizer_state_dict(other, other_optimizer), state)
    with pytest.raises(NormalizationError, match="integer ids"):
        set_optimizer_state_dict(model, [optimizer, torch.optim.SGD([torch.ones(1)])], optimizer.state_dict())


@pytest.mark.parametrize("front", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_ids_whose_names_are_there_are_set_by_name(front: str) -> None:
    """By position, the state of one parameter would be that of another. Names may be those of a wrapped model."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    named = [(front + name, parameter) for name, parameter in model.named_parameters()]
    source, target = torch.optim.AdamW(named), torch.optim.AdamW(named[::-1])
    model(torch.ones(1, 2)).square().sum().backward()
    source.step()
    set_optimizer_state_dict(model, target, source.state_dict())
    found, wanted = (get_optimizer_state_dict(model, each)["state"] for each in (target, source))
    assert_same(dict(sorted(found.items())), wanted)


def _named(names: list[str] | None) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer, dict[str, Any]]:
    """Return a model, an optimizer with state, a fresh one, and torch's state dict of the first with `param_names`."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    source, target = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).square().sum().backward()
    source.step()
    given = source.state_dict()
    given["param_groups"][0]["param_names"] = names
    return model, source, target, given


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["0.weight", "0.weight"], NormalizationError, "'0.weight' is in two groups"),
        (["1.weight", "2.weight"], KeyMismatchError, "2.weight"),
        (["module.1.weight", "module.2.weight"], KeyMismatchError, "2.weight"),
    ],
)
def test_names_of_another_model_are_not_set_by_position(names: list[str], kind: type[Exception], words: str) -> None:
    """The second parameter of this model would get the state of a parameter that it does not have."""
    model, _, target, given = _named(names)
    with pytest.raises(kind, match=words):
        set_optimizer_state_dict(model, target, given)
    assert not target.state


@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_names_that_are_not_those_of_the_live_parameters_do_not_count(names: list[str] | None) -> None:
    model, source, target, given = _named(names)
    set_optimizer_state_dict(model, target, given)
    assert_same(*(get_optimizer_state_dict(model, each)["state"] for each in (target, source)))


def test_optimizers_with_their_own_load_are_asked() -> None:
    model, optimizer, state = warm_adamw()
    heard = []
    other = zoo.make(1)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other_optimizer.register_load_state_dict_pre_hook(lambda _, given: heard.append(sorted(given["state"])))
    set_optimizer_state_dict(other, other_optimizer, state)
    assert heard == [list(range(len(list(other.parameters()))))]
    assert_same(get_optimizer_state_dict(other, other_optimizer), state)
    del model, optimizer


def test_unfreezing_later_adds_parameters_without_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = frozen(get_optimizer_state_dict(model, optimizer))
    model[1].requires_grad_(True)
    bigger = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyMismatchError, match=r"Missing key: 1\.weight"):
        set_optimizer_state_dict(model, bigger, state)
    report = set_optimizer_state_dict(model, bigger, state, options=LENIENT)
    assert report.missing == ("1.weight", "1.bias")
    assert set(get_optimizer_state_dict(model, bigger)["state"]) == {"0.weight", "0.bias"}


def test_tied_parameter_is_found_under_any_of_its_names() -> None:
    model = zoo.make(0, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = frozen(get_optimizer_state_dict(model, optimizer))
    assert "head.weight" not in state["state"]
    renamed = frozen(state)
    renamed["state"]["head.weight"] = renamed["state"].pop("embed.weight")
    names = renamed["param_groups"][0]["params"]
    names[names.index("embed.weight")] = "head.weight"
    other = zoo.make(1, tied=True)
    other_optimizer = torch.optim.AdamW(other.parameters())
    set_optimizer_state_dict(other, other_optimizer, renamed)
    assert_same(get_optimizer_state_dict(other, other_optimizer), state)
    set_model_state_dict(other, get_model_state_dict(model))


def test_state_that_a_flat_dict_has_lost_is_told_from_state_that_never_was(tmp_path: Path) -> None:
    """One parameter has no gradient; all of another's state is taken out."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[2](model[0](torch.ones(2))).sum().backward()
    optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert flat["state.1.weight"] == {}
    reshard.save({"optim": flat}, tmp_path)

    fresh = torch.optim.AdamW(model.parameters())
    target = {"optim": get_optimizer_state_dict(model, fresh, options=FLAT)}
    reshard.load(target, tmp_path)
    report = set_optimizer_state_dict(model, fresh, target["optim"])
    assert (report.without_state, report.missing) == (("1.weight", "1.bias"), ())
    assert_same(get_optimizer_state_dict(model, fresh), get_optimizer_state_dict(model, optimizer))
    assert set(reshard.open(tmp_path).normalized()["optim"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}

    lost = {key: value for key, value in flat.items() if not key.startswith("state.2.weight.")}
    with pytest.raises(KeyMismatchError, match=r"Missing optimizer state: 2\.weight; an empty dict under"):
        set_optimizer_state_dict(model, fresh, lost)
    assert fresh.state[model[2].weight]
    report = set_optimizer_state_dict(model, fresh, lost, options=LENIENT)
    assert (report.without_state, report.missing) == (("1.weight", "1.bias"), ("2.weight",))
    assert model[2].weight not in fresh.state

    # state that the live optimizer lacks, and the checkpoint has, comes with a load
    part = {"optim": get_optimizer_state_dict(model, fresh, options=FLAT)}
    reshard.load(part, tmp_path)
    set_optimizer_state_dict(model, fresh, part["optim"])
    now, before = (get_optimizer_state_dict(model, each)["state"] for each in (fresh, optimizer))
    assert_same({name: now[name] for name in before}, before)
    assert len(now) == len(before)


def test_a_flat_dict_without_any_state_says_that_there_was_none() -> None:
    model = nn.Linear(2, 2)
    fresh, optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    flat = get_optimizer_state_dict(model, fresh, options=FLAT)
    assert not [key for key in flat if key.startswith("state.")]
    model(torch.ones(2)).sum().backward()
    optimizer.step()

    assert set_optimizer_state_dict(model, optimizer, flat).without_state == ("weight", "bias")
    assert not optimizer.state


def test_parameters_in_place_of_optimizers_are_named():
    model = nn.Linear(2, 2)

    with pytest.raises(NormalizationError, match=r"a list of optimizers, got a list with Parameter$"):
        reshard.get_optimizer_state_dict(model, list(model.parameters()))
