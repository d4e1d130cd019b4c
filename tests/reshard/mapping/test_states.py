"""Optimizer states, settings, and lists of parameters follow their parameters through a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError
from reshard.mapping import Concat, Drop, Mapping, Rename, Rule, Stack, Transpose, Unstack


def opened(state: Any, path: Path) -> reshard.Checkpoint:
    reshard.save(state, path)
    return reshard.open(path)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def trained(names: list[str], states: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model, and an optimizer that knows its parameters without the section."""
    states = {"exp_avg": numbers(2, 3), "step": torch.tensor([3.0])} if states is None else states
    groups = [{"lr": 0.1, "params": names}]
    model = {name: numbers(2, 3) for name in [*names, "frozen"]}
    return {"model": model, "optim": {"state": {n: states for n in names if states}, "param_groups": groups}}


@pytest.mark.parametrize("states", [None, {}], ids=["states", "list"])
def test_words_stand_for_the_same_of_parameters_and_states(states: dict[str, Any] | None, tmp_path: Path) -> None:
    """A word at the beginning took `model.` for parameters and not for states, so nothing fit together."""
    made = opened(trained(["model.a"], states), tmp_path / "c").mapped(Mapping([Rename("{x+}", "net.{x+}")]))

    names = {f"optim.state.net.model.a.{state}" for state in ("exp_avg", "step") if states is None}
    assert set(made) == {"model.net.model.a", "model.net.frozen"} | names
    assert made.nested()["optim"]["param_groups"][0]["params"] == ["net.model.a"]


@pytest.mark.parametrize("layer", ["layers.{i}", "{l+}"])
def test_states_are_put_together_as_their_parameters(layer: str, tmp_path: Path) -> None:
    checkpoint = opened(trained(["layers.0.q", "layers.0.k"]), tmp_path / "c")

    made = checkpoint.mapped(Mapping([Concat([f"{layer}.q", f"{layer}.k"], f"{layer}.qk", (1, 1))]))

    shapes = {name: tuple(made[name].shape) for name in made}
    parameter, states = "model.layers.0.qk", "optim.state.layers.0.qk"
    frozen = {"model.frozen": (2, 3)}
    assert shapes == frozen | {parameter: (4, 3), f"{states}.exp_avg": (4, 3), f"{states}.step": (1,)}


def test_a_stack_has_as_many_states_as_parameters(tmp_path: Path) -> None:
    """An expert at the end had no states, and the stacks of states were shorter."""
    state = trained([f"l.0.e.{e}.w" for e in range(3)])
    del state["optim"]["state"]["l.0.e.2.w"]
    checkpoint = opened(state, tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=r"l\.0\.e\.2\.w\.exp_avg' is missing"):
        checkpoint.mapped(Mapping([Stack("{l+}.e.{e}.w", "{l+}.w", over="e")]))
    made = checkpoint.mapped(Mapping([Stack("{l+}.e.{e}.w", "{l+}.w", over="e", fill=0)]))
    assert made["optim.state.l.0.w.exp_avg"].shape == made["model.l.0.w"].shape
    back = made.mapped(Mapping([Unstack("{l+}.w", "{l+}.e.{e}.w", over="e")]))
    assert {f"optim.state.l.0.e.{e}.w.step" for e in range(3)} < set(back)


def test_a_state_without_its_parameter_is_not_rearranged(tmp_path: Path) -> None:
    """Whether it has a value for each element of its parameter is unknown."""
    state = trained(["a", "b"])
    del state["model"]["b"]
    checkpoint = opened(state, tmp_path / "c").select(["*", "!*param_groups*"])

    with pytest.raises(KeyMismatchError, match=r"'optim.state.b.exp_avg', but there is no parameter 'b'.*Drop\("):
        checkpoint.mapped(Mapping([Transpose("{n}", "{n}")]))
    drop = Drop("optim.state.b.{state}")
    assert "optim.state.a.exp_avg" in checkpoint.mapped(Mapping([drop, Transpose("{n}", "{n}")]))
    assert "optim.state.c.exp_avg" in checkpoint.mapped(Mapping([Rename("b", "c")]))


NESTED = {"exp_avg": numbers(2, 3), "Q": [numbers(2, 2), numbers(3, 3)], "pre": {"l": numbers(2)}}


@pytest.mark.parametrize(
    ("names", "rule", "new"),
    [
        (["w"], Rename("w", "v"), "v"),
        (["w"], Rename("{n}", "net.{n}"), "net.w"),
        (["a.w"], Rename("{n+}.w", "{n+}.v"), "a.v"),
        (["w"], Rename("model.w", "model.v"), "v"),  # written as the whole key
        (["w"], Rename("model.{x+}", "net.{x+}"), "w"),  # another section
        (["w"], Rename("model.{x+}", "backbone.{x+}"), "backbone.w"),
        (["model.model.w"], Rename("w", "v"), "model.model.v"),
    ],
    ids=str,
)
def test_nested_states_follow(names: list[str], rule: Rule, new: str, tmp_path: Path) -> None:
    """As SOAP's and Shampoo's, which are lists and dicts of tensors."""
    state = trained(names)
    state["optim"]["state"][names[0]] = NESTED

    made = opened(state, tmp_path / "c").mapped(Mapping([rule]))

    of_state = {name.removeprefix("optim.state.") for name in made if name.startswith("optim.")}
    assert of_state == {f"{new}.{state}" for state in ("exp_avg", "Q.0", "Q.1", "pre.l")}
    assert made.nested()["optim"]["param_groups"][0]["params"][0] == new


def test_a_dict_of_names_takes_the_optimizer_along(tmp_path: Path) -> None:
    reshard.save(trained(["w"], NESTED), tmp_path / "c")

    reshard.convert(tmp_path / "c", tmp_path / "d", mapping={"model.v": "model.w"})

    made = reshard.open(tmp_path / "d")
    states = {f"optim.state.v.{state}" for state in ("exp_avg", "Q.0", "Q.1", "pre.l")}
    assert set(made) == {"model.v", "model.frozen"} | states
    assert made.nested()["optim"]["param_groups"][0]["params"] == ["v"]
