"""A canonical state as Megatron-core saves it (`torch_dist`, its optimizer fully reshardable): for the format's writer.

model              <key>                                       whole layers in stacks, see `stacks`
optimizer          optimizer.state.{param, exp_avg, ...}.<key> masters and states in the shape of the parameter
common.pt          param groups, one number of steps, and what stood under "common." beside a model before

What the three kinds of Megatron's optimizers ask for differs in where the groups are and what masters are called. All
of it is written, so that each finds its own: further names of a tensor cost nothing, they are the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.megatron.groups import groups_to_save
from reshard.checkpoint.canonical.megatron.names import is_expert
from reshard.checkpoint.canonical.megatron.stacks import Stacks, extra_state_keys
from reshard.checkpoint.canonical.result import Canonical
from reshard.errors import FormatError
from reshard.formats.frameworks.megatron_writer import ToSave
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.lazy_tensor import LazyTensor
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.tree import unflatten

__all__ = ["megatron_form"]

_MASTER = "fp32_param"
_PARAM = "optimizer.state.param."
_NARROW = ("bfloat16", "float16")
"""Dtypes of parameters that have masters."""
_VERSION = 3.0
"""What newer programs write as `checkpoint_version`; 0, where there is none, means other orders of rows."""

Widen = Callable[[StoredTensor, str], StoredTensor]
"""(a tensor, name) -> the same in float32, under that name."""


def megatron_form(
    found: Canonical, contents: Contents, hints: Mapping[str, Any] | None, widen: Widen, what: str
) -> Contents:
    """`contents`, which normalizes to `found`, with the keys, stacks and common state of Megatron's format.

    Raises FormatError where it cannot hold the state: layers that are missing, an optimizer without param groups, steps
    that differ.
    """
    if not found.model:
        raise FormatError(f"{what}: there is no model in it: Megatron's format has an optimizer only beside its model")
    stacks = Stacks.of({fqn: tensor.spec for fqn, tensor in found.model.items()})
    ties = _ties(found.model)
    tensors, aliases = stacks.put({fqn: t for fqn, t in found.model.items() if fqn not in ties})
    aliases.update((stacks.keys(fqn)[0], stacks.keys(kept)[0]) for fqn, kept in ties.items())
    beside = {path[1:]: key for key, path in contents.paths.items() if path[:1] == ("common",) and len(path) > 1}
    common = unflatten(
        {path: contents.objects[key] for path, key in beside.items() if key in contents.objects},
        {path[1:]: kind for path, kind in contents.containers.items() if path[:1] == ("common",) and len(path) > 1},
    )
    notes: list[str] = []
    if found.state:
        own_experts = _own_experts(found, Hints(hints))
        step = _step(found)
        groups, notes = groups_to_save(found, own_experts)
        _check_groups(found, groups, what)
        more, further = _states(found, stacks, ties, widen)
        tensors.update(more)
        aliases.update(further)
        scaler = common.get("optimizer", {}).get("grad_scaler")
        common["optimizer"] = _optimizer(groups, step, own_experts, scaler)
        common.setdefault("iteration", 0 if step is None else int(step))
    if isinstance(common.get("args"), dict):
        common["args"] = argparse.Namespace(**common["args"])
    common.setdefault("checkpoint_version", _VERSION)
    common.setdefault("iteration", 0)
    common["content_metadata"] = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": stacks.is_numbered,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    used = set(beside.values())
    left = [key for key in contents.objects if key not in used and not key.startswith(("optim.", "model."))]
    return Contents(
        "megatron",
        tensors,
        aliases=aliases,
        facts=ToSave(common, tuple(extra_state_keys(stacks, found.model))),
        warnings=(*contents.warnings, *found.notes, *notes),
        left_out=(*contents.left_out, *contents.per_rank, *left),
    )


def _ties(model: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Names of tensors that are the very same chunks as an earlier one, with the name of that."""
    first: dict[int, str] = {}
    ties = {fqn: first.setdefault(id(t.chunks), fqn) for fqn, t in model.items() if t.chunks != ()}
    return {fqn: kept for fqn, kept in ties.items() if fqn != kept}


def _own_experts(found: Canonical, hints: Hints) -> bool:
    """Whether experts have an optimizer of their own, as under expert parallelism."""
    wanted = hints.get("expert_optimizer")
    if wanted is not None:
        return bool(wanted)
    theirs = [group for group in found.groups if "is_expert_parallel" in group]
    return any(g["is_expert_parallel"] for g in theirs) if theirs else any(map(is_expert, found.model))


def _step(found: Canonical) -> float | None:
    """The one number of steps that all parameters have taken; None if none has any."""
    steps = {fqn: _number(states["step"]) for fqn, states in found.state.items() if "step" in states}
    if not steps:
        return None
    first, step = next(iter(steps.items()))
    other = next((fqn for fqn, value in steps.items() if value != step), None)
    if other is not None:
        raise FormatError(
            f"Megatron's format has one number of steps for all parameters, but {first!r} has taken {step:g} and "
            f"{other!r} {steps[other]:g}"
        )
    return step


def _number(value: Any) -> float:
    if not isinstance(value, StoredTensor):
        return float(value)
    return float(LazyTensor(value)[...])


def _check_groups(found: Canonical, groups: list[dict[str, Any]], what: str) -> None:
    if not groups:
        raise FormatError(
            f"{what}: the optimizer's states are there, but no param groups, without which Megatron cannot go on: "
            "convert with model_only, or from a checkpoint that has them"
        )


def _states(
    found: Canonical, stacks: Stacks, ties: Mapping[str, str], widen: Widen
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """States by key, under all names that some optimizer asks for, and masters of all parameters that have states."""
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    trained = {ties.get(fqn, fqn): states for fqn, states in found.state.items() if states}
    named: dict[str, dict[str, StoredTensor]] = {}
    for fqn, states in trained.items():
        for name, value in states.items():
            if name != "step" and isinstance(value, StoredTensor):
                named.setdefault(name, {})[fqn] = value
    same: dict[str, str] = {}
    narrow: list[str] = []
    for fqn in trained:
        tensor = found.model.get(fqn)
        if tensor is None:
            continue
        if tensor.spec.dtype in _NARROW:
            narrow.append(fqn)
            named.setdefault(_MASTER, {}).setdefault(fqn, widen(tensor, f"{_MASTER}.{fqn}"))
        elif _MASTER not in trained[fqn]:
            key, *others = stacks.keys(fqn)
            same.update((f"{_PARAM}{name}", key) for name in (key, *others))
    for name, of in named.items():
        more, further = stacks.put(of, _PARAM if name == _MASTER else f"optimizer.state.{name}.")
        tensors.update(more)
        aliases.update(further)
    for key in {key for fqn in narrow for key in stacks.keys(fqn)}:  # what other optimizers call them
        aliases[f"optimizer.state.{_MASTER}.{key}"] = aliases.get(_PARAM + key, _PARAM + key)
    return tensors, {**aliases, **same}


def _optimizer(groups: list[dict[str, Any]], step: float | None, own_experts: bool, scaler: Any) -> dict[Any, Any]:
    """What `common.pt` has of the optimizer, or of that of experts, too."""

    def one(of: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        state = {} if step is None else {"common_step": torch.tensor(step, device="cpu")}
        counted = [group if step is None else {**group, "step": int(step)} for group in of]
        inner = {"state": dict(state), "param_groups": [dict(group) for group in counted]}
        beside = {} if scaler is None else {"grad_scaler": scaler}
        return {**inner, **beside, "optimizer": inner, "param_state_sharding_type": "fully_reshardable"}

    if not own_experts:
        return one(groups)
    parts = [[g for g in groups if bool(g["is_expert_parallel"]) == experts] for experts in (False, True)]
    return {number: one(of) for number, of in enumerate(parts)}
