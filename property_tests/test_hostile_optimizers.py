"""Hostile optimizer states: what goes in comes out bit for bit, or an error or the report names it.

Random optimizers of torch with random options, dtypes, names, missing keys and memory that states, model and buffers
share in random ways; by get and set into a fresh or a running optimizer, and by save and load.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import reshard
from property_tests.budget import examples
from reshard.errors import KeyMismatchError
from reshard.live.optimizer_state import flatten_optimizer
from reshard.state_dict import StateDictOptions
from reshard.storage.memory import MemoryStorage
from tests.reshard.state_dict.torch_optimizers import CLASSES, OPTIONS, make, step, takes

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Net(nn.Module):
    """Parameters and buffers of many shapes."""

    def __init__(self, matrices_only: bool, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {"a": (3, 2), "b": (3, 2), "c": (1, 4)} | ({} if matrices_only else {"d": (4,), "e": (1,)})
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(
                self,
                name,
                nn.Parameter(torch.linspace(i, i + 1, 12, dtype=dtype)[: torch.Size(shape).numel()].view(shape)),
            )
        self.register_buffer("table", torch.linspace(0, 1, 6, dtype=dtype).view(3, 2))
        self.register_buffer("count", torch.tensor(7.0))


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(CLASSES))
    options = {option: draw(st.sampled_from(values)) for option, values in OPTIONS[name].items() if draw(st.booleans())}
    return {
        "name": name,
        "options": options,
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "named": draw(st.booleans()),
        "groups": draw(st.booleans()),
        "steps": draw(st.integers(1, 2)),
        "cold": draw(st.integers(0, 2)),
        "ties": draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=3)),
        "removed": draw(st.one_of(st.none(), st.integers(0, 40))),
        "running": draw(st.booleans()),
        "live_ties": draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=2)),
        "flat": draw(st.booleans()),
        "with_model": draw(st.booleans()),
    }


def build(case: Any, model: nn.Module) -> torch.optim.Optimizer:
    parameters: list[Any] = list(model.named_parameters() if case["named"] else model.parameters())
    if case["groups"] and case["name"] != "LBFGS":
        parameters = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
    return make(case["name"], parameters, case["options"])


def trained(case: Any, seed: float, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(not takes(case["name"], torch.empty(1)), DTYPES[case["dtype"]])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(seed)
    optimizer = build(case, model)
    cold = tuple(model.parameters())[: case["cold"]] if case["name"] != "LBFGS" else ()
    for _ in range(steps):
        step(optimizer, cold)
    return model, optimizer


def tie(model: nn.Module, optimizer: torch.optim.Optimizer, ties: Any) -> None:
    """Let state share memory with other state, or with the model's parameters and buffers; whole or by a view."""
    places = [(values, key) for values in optimizer.state.values() for key, v in values.items() if dense(v)]
    sources = [values[key] for values, key in places] + [p.detach() for p in model.parameters()] + list(model.buffers())
    for to, source, as_view in ties:
        if not places:
            return
        values, key = places[to % len(places)]
        alike = [
            s for s in sources if s.shape == values[key].shape and s.dtype == values[key].dtype and s is not values[key]
        ]
        if alike:
            chosen = alike[source % len(alike)]
            values[key] = chosen.view(chosen.shape) if as_view else chosen


def dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def bits(value: Any) -> Any:
    """Something equal for the same bits only."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Where each state tensor lies, and the model's."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"model.{name}": t.data_ptr() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for p, values in optimizer.state.items():
        found |= {f"{names[id(p)]}.{key}": v.data_ptr() for key, v in values.items() if dense(v)}
    return found


def partners(where: dict[str, Any]) -> dict[str, set[str]]:
    """Of each state tensor: what shares its memory."""
    return {
        name: {other for other, at in where.items() if at == mine and other != name}
        for name, mine in where.items()
        if not name.startswith("model.")
    }


def remove(state: dict[str, Any], number: int) -> str | None:
    """Leave out one key; which one."""
    keys = [(fqn, key) for fqn, values in state["state"].items() for key in values]
    if not keys:
        return None
    fqn, key = keys[number % len(keys)]
    del state["state"][fqn][key]
    return f"{fqn}.{key}"


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return bits(reshard.get_optimizer_state_dict(model, optimizer))


@settings(max_examples=examples(300, most=10_000))
@given(cases())
def test_states_come_back_bit_for_bit_or_are_named(case: Any) -> None:
    model, optimizer = trained(case, 0.0, case["steps"])
    tie(model, optimizer, case["ties"])
    model_state, state = reshard.get_state_dict(model, optimizer)
    lacking = None
    if case["removed"] is not None:
        state = {**state, "state": {fqn: dict(values) for fqn, values in state["state"].items()}}
        lacking = remove(state, case["removed"])
    wanted = bits(state)
    wanted_model = bits(model_state)
    were = partners(memory(model, optimizer))
    other, fresh = trained(case, 3.0, 1 if case["running"] else 0)
    tie(other, fresh, case["live_ties"])
    before, before_model = states(other, fresh), bits(dict(reshard.get_model_state_dict(other)))
    held = partners(memory(other, fresh))
    if case["flat"] and all(values for values in state["state"].values()):
        whole = reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)
        # which parameters have no state is told by empty dicts
        state = flatten_optimizer(state) | {
            key: value for key, value in whole.items() if isinstance(value, dict) and not value
        }
    refused, report = "", None
    try:
        if case["with_model"]:
            report = reshard.set_state_dict(
                other, fresh, model_state_dict=model_state, optim_state_dict=state
            ).optimizer
        else:
            report = reshard.set_optimizer_state_dict(other, fresh, state)
    except KeyMismatchError as error:
        refused = str(error)
    if refused:
        assert lacking is not None, refused
        assert f"{lacking.rpartition('.')[0]}: its state lacks" in refused
        assert states(other, fresh) == before
        assert bits(dict(reshard.get_model_state_dict(other))) == before_model
        return
    assert report is not None
    found = reshard.get_optimizer_state_dict(other, fresh)
    empty = {fqn for fqn, values in wanted["state"].items() if not values}
    assert empty <= set(report.without_state)
    expected = {fqn: values for fqn, values in wanted["state"].items() if values}
    assert bits(found["state"]) == expected, case
    assert bits(found["param_groups"]) == wanted["param_groups"] or case["groups"] or case["flat"]
    assert bits(dict(reshard.get_model_state_dict(other))) == (wanted_model if case["with_model"] else before_model)
    # the given dict and what it came from are as they were
    assert bits(dict(reshard.get_model_state_dict(model))) == wanted_model
    now = partners(memory(other, fresh))
    for name, others in now.items():
        given_alone = {o for o in were.get(name, set()) if not o.startswith("model.") or case["with_model"]}
        assert others <= given_alone | held.get(name, set()), (case, name, report)
        lost = given_alone - others - {lacking}  # what was left out cannot be shared
        assert not lost or name in report.untied or lost & set(report.untied), (case, name, lost, report)


@settings(max_examples=examples(60, most=10_000))
@given(cases())
def test_states_come_back_from_a_checkpoint(case: Any) -> None:
    model, optimizer = trained(case, 0.0, case["steps"])
    tie(model, optimizer, case["ties"])
    options = FLAT if case["flat"] else None
    model_state, state = reshard.get_state_dict(model, optimizer, options=options)
    if any(not dense(t) for t in flat_tensors(state)):
        return
    wanted, wanted_model = bits(reshard.get_optimizer_state_dict(model, optimizer)), bits(dict(model_state))
    storage = MemoryStorage()
    reshard.save({"model": model_state, "optim": state}, storage)
    other, fresh = trained(case, 3.0, 0)
    held = partners(memory(other, fresh)).keys()  # Adagrad has state from its making on, which a load fills as it lies
    into_model, into = reshard.get_state_dict(other, fresh, options=options)
    whole = {"model": into_model, "optim": into}
    report = reshard.load(whole, storage)
    assert report.ok
    done = reshard.set_state_dict(other, fresh, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    assert bits(dict(reshard.get_model_state_dict(other))) == wanted_model
    found = copy.deepcopy(reshard.get_optimizer_state_dict(other, fresh))
    assert bits(found["state"]) == wanted["state"], case
    assert done.optimizer is not None
    aliases = {key.removeprefix("optim.state.") for both in report.aliases.items() for key in both}
    named = set(done.optimizer.untied) | (aliases & held)
    were, now = partners(memory(model, optimizer)), partners(memory(other, fresh))
    for name, others in were.items():
        assert now[name] == others or name in named or others & named, (case, name, done, report.aliases)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in flat_tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in flat_tensors(item)]
    return []
