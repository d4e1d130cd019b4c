"""Reading the flat form of optimizer state: whole rows of keys at once, or key by key, it means the same."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.errors import ReshardError
from reshard.state_dict.live_model import LiveModel
from reshard.state_dict.optimizer_parameters import LiveOptimizers
from reshard.state_dict.saved_optimizer import SavedOptimizer, read_saved


class Nested(nn.Module):
    """Names that begin with other names, and a parameter that is called as state is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.deep = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})
        self.deep.exp_avg = nn.Parameter(torch.ones(2))


def flat_dict(names: list[str], pick: random.Random) -> dict[str, Any]:
    """Rows mostly alike, with some keys more, fewer, nested, in another order or without any state."""
    flat: dict[str, Any] = {}
    for name in names:
        kind = pick.choice(["usual", "usual", "usual", "more", "fewer", "nested", "turned", "none"])
        keys = {"usual": "step exp_avg", "more": "step exp_avg z", "fewer": "step", "turned": "exp_avg step"}
        for key in keys.get(kind, "" if kind == "none" else "step exp_avg").split():
            flat[f"state.{name}.{key}"] = pick.choice([torch.tensor(1.0), 2, 2.0])
        if kind == "nested":
            flat[f"state.{name}.inner.1"] = pick.randrange(3)
            flat[f"state.{name}.inner.x.y"] = {"z": 1}
        if kind == "none":
            flat[f"state.{name}"] = {}
    rates = pick.choice([[0.1], [0.1, 0.2], [1, 1.0, True], [float("nan"), torch.ones(2)]])
    for name in names:
        flat[f"param_groups.{name}.lr"] = pick.choice(rates)
        flat[f"param_groups.{name}.betas"] = (0.9, pick.choice([0.99, 0.999]))
        if not pick.randrange(6):
            flat[f"param_groups.{name}.odd.one"] = 3
    return flat


def told(saved: SavedOptimizer) -> tuple[Any, ...]:
    def seen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: seen(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(seen, value))
        return (type(value), id(value) if isinstance(value, torch.Tensor) else repr(value))

    return seen(dict(saved.state)), seen(dict(saved.fields)), saved.stateless


@pytest.mark.parametrize("seed", range(60))
def test_the_order_of_keys_says_nothing(seed: int) -> None:
    pick, model = random.Random(seed), Nested()
    live = LiveOptimizers(LiveModel(model), [torch.optim.AdamW(model.parameters())])
    names = [name for name, _ in model.named_parameters()] + ["unknown.w", "unknown.b"]
    pick.shuffle(names)
    flat = flat_dict(names, pick)
    wanted = told(read_saved(flat, live))
    keys = list(flat)
    for _ in range(3):
        pick.shuffle(keys)
        assert told(read_saved({key: flat[key] for key in keys}, live)) == wanted
    # key by key: no two keys of a parameter one after another, and none like the one before it
    keys.sort(key=lambda key: (key.rpartition(".")[2], key))
    assert told(read_saved({key: flat[key] for key in keys}, live)) == wanted


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, "a list 'param_groups' of dicts with 'params'"),
        ({"state": {}, "param_groups": [3]}, "a list 'param_groups' of dicts with 'params'"),
        ({0: {"exp_avg": torch.zeros(2)}}, "or names as keys"),
        ({"state": {"weight": 5}, "param_groups": []}, "weight: its state is a int, expected a dict"),
        ({"state.weight": torch.zeros(2)}, "weight: its state is a Tensor, expected a dict"),
        ({"state.weight.step": torch.zeros(()), "state.weight.step.x": 1}, "'state.weight.step.x' is part of a value"),
        ({"state.weight.odd.²": 1}, "state 'odd' of 1"),
    ],
)
def test_what_is_no_optimizer_state_dict_is_an_error_of_ours(given: Any, told: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ReshardError, match=re.escape(told)):
        reshard.set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), given)
