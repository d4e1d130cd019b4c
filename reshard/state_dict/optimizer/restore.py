"""Putting optimizer state back: from what was saved, whatever the optimizer holds at the moment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reshard.errors import KeyMismatchError
from reshard.state.tensors import global_shape
from reshard.state.torch_internals import copy_all, loads_itself
from reshard.state_dict.names import where
from reshard.state_dict.optimizer.flat_parameters import joined_pieces
from reshard.state_dict.optimizer.groups import GroupWrite, plan_groups
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.optimizer.saved import SavedOptimizer, read_saved
from reshard.state_dict.options import OptimizerReport, StateDictOptions
from reshard.state_dict.values import like, write

__all__ = ["OptimizerWrites", "apply_optimizers", "plan_optimizers"]


class OptimizerWrites(NamedTuple):
    """All that setting optimizer state will do, checked before anything is touched."""

    state: list[tuple[OptimizedParameter, Mapping[str, Any] | None]]
    """Every parameter of the optimizers; None where it shall have no state."""
    other: list[tuple[int, Any, Any]]
    """(optimizer, key, state) under keys that are no parameter."""
    groups: list[GroupWrite]
    report: OptimizerReport


def plan_optimizers(
    live: LiveOptimizers, given: Mapping[str, Any], options: StateDictOptions, *, outlines: bool = False
) -> OptimizerWrites:
    """Match `given` with the live parameters; touches nothing. `outlines`: its tensors are on the meta device for now,
    so that only names and shapes can be checked.

    Raises KeyMismatchError for parameters that the dict says nothing about and names that the model does not have
    (both only if strict), and for state of a wrong shape; NormalizationError for groups that contradict each other.
    """
    saved = read_saved(given, live)
    state: list[tuple[OptimizedParameter, Mapping[str, Any] | None]] = []
    missing: list[str] = []
    cold: list[str] = []
    for own in live.parameters:
        for one in own:
            values = saved.state.get(one.name)
            if values is None and len(one.names) > 1:
                values = next((saved.state[name] for name in one.names if name in saved.state), None)
            state.append((one, values))
            if values is None:
                listed = any(name in saved.fields for name in one.names)
                if one.parameter.requires_grad or listed:
                    (cold if listed else missing).append(one.name)
    other = [
        (k, key, saved.state[key])
        for k, optimizer in enumerate(live.optimizers)
        for key in _other_keys(optimizer)
        if key in saved.state
    ]
    known = {key for _, key, _ in other}
    names = dict.fromkeys([*saved.state, *saved.fields])
    unexpected = [name for name in names if name not in live.by_name and name not in known]
    strangers = [name for name in unexpected if name not in live.live.by_name]
    faults = _misshapen(state, saved)
    if faults or (options.strict and (missing or strangers)):
        raise KeyMismatchError(_message(live, missing, strangers, faults, options.strict))
    groups = [] if outlines else plan_groups(live, saved)
    report = OptimizerReport(
        missing=tuple(missing),
        cold=tuple(cold),
        unexpected=tuple(unexpected),
        kept_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.kept),
        added_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.added),
    )
    return OptimizerWrites([] if outlines else list(joined_pieces(state)), other, groups, report)


def apply_optimizers(live: LiveOptimizers, writes: OptimizerWrites) -> OptimizerReport:
    """Do what was planned. State keeps the dtype that it was saved with."""
    groups: list[list[Mapping[str, Any]]] = [[] for _ in live.optimizers]
    for group_write in writes.groups:
        groups[group_write.optimizer].append(group_write.fields)
    special = [loads_itself(optimizer) for optimizer in live.optimizers]
    # an optimizer that loads itself is given a dict of its own, the state of the others is written directly
    given: list[dict[Any, Any]] = [{} for _ in live.optimizers]
    copies = _Copies()
    merged = [
        [{**group, **fields} for group, fields in zip(optimizer.param_groups, own)]
        for optimizer, own in zip(live.optimizers, groups)
    ]
    states = [optimizer.state for optimizer in live.optimizers]
    on_device = [[bool(fields.get("fused") or fields.get("capturable")) for fields in own] for own in merged]
    for one, values in writes.state:
        k = one.optimizer
        if not special[k]:
            copies.add(states[k], one.parameter, values, merged[k][one.group], on_device[k][one.group])
        elif values is not None:
            items = values.items()
            given[k][one.id] = {key: _restored(value, None, one.parameter, key, {}) for key, value in items}
    copy_all(copies.targets, copies.values)
    for k, key, values in writes.other:
        (given[k] if special[k] else live.optimizers[k].state)[key] = copy.deepcopy(values)
    for k, optimizer in enumerate(live.optimizers):
        if special[k]:
            optimizer.load_state_dict(_own_dict(live, k, given[k], groups[k]))
            continue
        for group, fields in zip(optimizer.param_groups, groups[k]):
            for field, value in fields.items():
                if isinstance(group.get(field), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[field].copy_(value)
                else:
                    group[field] = value
        # where optimizer classes bring old state to their present form, as on every load
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return writes.report


class _Copies:
    """Writes the state of parameters; what can simply be copied is gathered up, to be copied in one call."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def add(
        self, state: Any, parameter: torch.Tensor, values: Mapping[Any, Any] | None, fields: Any, moves_step: bool
    ) -> None:
        """Give `parameter` the state `values`, or none; `fields` are those of its group, and `moves_step` is whether
        they keep the step on the parameter's device."""
        if values is None:
            state.pop(parameter, None)
            return
        old = state.get(parameter)
        # a dict of the same keys is written in place
        new = old if old is not None and old.keys() == values.keys() else {}
        old = old or {}
        targets, sources, live_value = self.targets, self.values, old.get
        for key, value in values.items():
            live = live_value(key)
            # by far the most common case, and there are many of them
            if (
                type(value) is type(live) is torch.Tensor
                and value.dtype is live.dtype
                and value.is_same_size(live)
                and not (moves_step and key == "step")
            ):
                targets.append(live)
                sources.append(value)
                if new is not old:
                    new[key] = live
            else:
                new[key] = _restored(value, live, parameter, key, fields)
        if new is not old:
            state[parameter] = new


def _other_keys(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keys of its state that are no parameter: some optimizers keep state of the whole there."""
    keys: list[Any] = list(optimizer.state)
    return [key for key in keys if not isinstance(key, torch.Tensor)]


def _own_dict(live: LiveOptimizers, k: int, state: dict[Any, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the optimizer's own `load_state_dict` takes: integer ids, in the order of its groups."""
    optimizer, packed, ids = live.optimizers[k], [], itertools.count()
    for group, fields in zip(optimizer.param_groups, groups):
        kept = {field: value for field, value in group.items() if field != "params"}
        packed.append({**kept, **fields, "params": [next(ids) for _ in group["params"]]})
    return {"state": state, "param_groups": packed}


def _restored(value: Any, old: Any, parameter: torch.Tensor, key: Any, fields: Mapping[str, Any]) -> Any:
    """One entry of a parameter's state, made anew or, where `old` has its very form, written into `old`."""
    if isinstance(value, torch.Tensor):
        on_device = key == "step" and (fields.get("fused") or fields.get("capturable"))
        if (
            type(old) is type(value)
            and old.dtype == value.dtype
            and old.shape == value.shape
            and (not on_device or old.device == parameter.device)
        ):
            write(value, old)
            return old
        if on_device:
            return value.detach().to(parameter.device, torch.float32, copy=True)
        if not global_shape(value) and (key == "step" or parameter.dim() > 0):
            return value.detach().clone()
        return like(value, parameter)
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {k: _restored(item, known.get(k), parameter, k, fields) for k, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_restored(item, None, parameter, None, fields) for item in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else copy.deepcopy(value)


def _misshapen(state: list[tuple[OptimizedParameter, Mapping[str, Any] | None]], saved: SavedOptimizer) -> list[str]:
    """State tensors that should have the shape of their parameter and do not.

    No schema says which state has that shape; a name counts as such if most parameters' tensors of that name have it.
    """
    misfits: dict[Any, list[str]] = {}
    for one, values in state:
        parameter = one.parameter
        plain = one.piece is None and type(parameter) in (torch.Tensor, torch.nn.Parameter)
        for key, value in values.items() if values else ():
            if plain and type(value) is torch.Tensor and (not value.dim() or value.is_same_size(parameter)):
                continue  # nearly always
            if not isinstance(value, torch.Tensor):
                continue
            shape = global_shape(value)
            if shape and shape != one.shape:
                misfits.setdefault(key, []).append(
                    f"{one.name}: its {key!r} in optimizer {one.optimizer} has shape {shape}, "
                    f"which fits no layout of the parameter's shape {tuple(one.shape)}"
                )
    fits = {
        key: sum(isinstance(v, torch.Tensor) and global_shape(v) == one.shape for one, v in _entries(state, key))
        for key in misfits
    }
    return [line for key, lines in misfits.items() if fits[key] > len(lines) for line in lines]


def _entries(
    state: list[tuple[OptimizedParameter, Mapping[str, Any] | None]], key: Any
) -> list[tuple[OptimizedParameter, Any]]:
    return [(one, values[key]) for one, values in state if values and key in values]


def _message(live: LiveOptimizers, missing: list[str], strangers: list[str], faults: list[str], strict: bool) -> str:
    lines = [f"the optimizer state dict does not fit the optimizers{where()}:"]
    if strict:
        lines += [f"  missing: {name} (optimizer {live.by_name[name].optimizer})" for name in missing]
        lines += [f"  unexpected: {name}, the model has no parameter of this name" for name in strangers]
    lines += [f"  misfit: {fault}" for fault in faults]
    if strict and (missing or strangers):
        lines.append("pass StateDictOptions(strict=False) to set what fits and have the rest reported")
    return "\n".join(lines)
