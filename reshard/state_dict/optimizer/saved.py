"""Saved optimizer state in one form, whichever way it was written; and the fields of live groups out of it.

Groups are matched by the names of their parameters, never by their number, so that groups may be split, merged or
reordered, and pipeline stages may each have their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import NormalizationError
from reshard.state_dict.names import where
from reshard.state_dict.optimizer.live import LiveOptimizers, OptimizedParameter
from reshard.state_dict.values import same_value

__all__ = ["GroupWrite", "SavedOptimizer", "plan_groups", "read_saved"]


@dataclass(frozen=True)
class SavedOptimizer:
    """A given optimizer state dict, by parameter name."""

    state: Mapping[Any, Mapping[str, Any]]
    """State of each parameter that has any."""
    fields: Mapping[str, Mapping[str, Any]]
    """Group fields of each parameter that is in a group; parameters of one group share one object."""
    empty: Sequence[Mapping[str, Any]]
    """Fields of the groups without parameters, in order."""


@dataclass(frozen=True)
class GroupWrite:
    """The fields that a live group will have."""

    optimizer: int
    group: int
    fields: Mapping[str, Any]
    kept: tuple[str, ...]
    """Fields that the saved group lacks."""
    added: tuple[str, ...]
    """Fields that the live group lacked."""


def read_saved(given: Mapping[str, Any], live: LiveOptimizers) -> SavedOptimizer:
    """Understand a nested dict, a flat one, or an optimizer's own dict of integer ids (for a single optimizer).

    Raises NormalizationError for anything else.
    """
    if not isinstance(given, Mapping):
        raise NormalizationError(f"an optimizer state dict must be a mapping, got {type(given).__name__}")
    if "param_groups" not in given and "state" not in given:
        return _read_flat(given, live)
    state, groups = given.get("state", {}), given.get("param_groups", [])
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        raise NormalizationError("an optimizer state dict must hold a dict 'state' and a list 'param_groups'")
    by_id = any(isinstance(key, int) for group in groups for key in group["params"])
    names: dict[Any, str] = _names_of_ids(groups, live) if by_id else {}
    fields: dict[str, Mapping[str, Any]] = {}
    empty: list[Mapping[str, Any]] = []
    for group in groups:
        own = {field: value for field, value in group.items() if field not in ("params", "param_names")}
        if not group["params"]:
            empty.append(own)
        for key in group["params"]:
            name = names.get(key, key)
            if name in fields:
                raise NormalizationError(f"parameter {name!r} is in two groups of the given optimizer state dict")
            fields[name] = own
    return SavedOptimizer({names.get(key, key): values for key, values in state.items() if values}, fields, empty)


def plan_groups(live: LiveOptimizers, saved: SavedOptimizer) -> list[GroupWrite]:
    """The fields of every live group; touches nothing.

    Raises NormalizationError if parameters of one live group were saved with different values of a field.
    """
    empties = [
        (k, g)
        for k, one in enumerate(live.optimizers)
        for g, group in enumerate(one.param_groups)
        if not group["params"]
    ]
    # groups without parameters have no name to be matched by; as many as before are taken to be the same ones
    matched = dict(zip(empties, saved.empty)) if len(empties) == len(saved.empty) else {}
    writes = []
    for k, optimizer in enumerate(live.optimizers):
        members: list[list[OptimizedParameter]] = [[] for _ in optimizer.param_groups]
        for one in live.parameters[k]:
            members[one.group].append(one)
        for g, group in enumerate(optimizer.param_groups):
            given = _common(members[g], saved) if members[g] else matched.get((k, g))
            if given is None:
                given = {}
            writes.append(_group_write(k, g, group, given))
    return writes


def _group_write(k: int, g: int, group: Mapping[str, Any], given: Mapping[str, Any]) -> GroupWrite:
    own = [field for field in group if field not in ("params", "param_names")]
    fields = {}
    for field, value in given.items():
        try:
            fields[field] = _as_live(group[field], value) if field in group else copy.deepcopy(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NormalizationError(
                f"field {field!r} of group {g} of optimizer {k}{where()} is {group[field]!r}, "
                f"and cannot become {value!r}"
            ) from error
    kept = tuple(field for field in own if field not in given)
    return GroupWrite(k, g, fields, kept, tuple(field for field in given if field not in group))


def _common(members: Sequence[OptimizedParameter], saved: SavedOptimizer) -> Mapping[str, Any] | None:
    """The fields that all parameters of a group were saved with; None where none was saved."""
    first: tuple[str, Mapping[str, Any]] | None = None
    comparable = False
    for one in members:
        name = one.name
        fields = saved.fields.get(name)
        if fields is None:
            name = next((alias for alias in one.names if alias in saved.fields), "")
            if not name:
                continue
            fields = saved.fields[name]
        if first is None:
            first = name, fields
            comparable = not any(isinstance(value, torch.Tensor) for value in fields.values())
        elif fields is not first[1] and not (comparable and fields == first[1]):
            _agree(first, (name, fields), one)
    return None if first is None else first[1]


def _agree(a: tuple[str, Mapping[str, Any]], b: tuple[str, Mapping[str, Any]], one: OptimizedParameter) -> None:
    for field in a[1].keys() | b[1].keys():
        x, y = a[1].get(field, _ABSENT), b[1].get(field, _ABSENT)
        if x is not y and not same_value(x, y):
            raise NormalizationError(
                f"{a[0]!r} and {b[0]!r} are in one group of optimizer {one.optimizer}{where()}, but were saved with "
                f"different values of {field!r}: {x} and {y}. Give them two groups, or make the values equal"
            )


def _as_live(live: Any, value: Any) -> Any:
    """`value` as the type that the live field has, where that is a matter of form only."""
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor):
            return value.detach().to(live).reshape(live.shape).clone()
        return value.item() if isinstance(live, (bool, int, float)) else value.detach().clone()
    if isinstance(live, torch.Tensor):
        return torch.full_like(live, value)
    if isinstance(live, (int, float)) and isinstance(value, str):
        raise TypeError("text is no number")
    if isinstance(live, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(live, (list, tuple)) and isinstance(value, (list, tuple)):
        items = [_as_live(live[i], item) if i < len(live) else copy.deepcopy(item) for i, item in enumerate(value)]
        return items if isinstance(live, list) else tuple(items)
    return copy.deepcopy(value)


def _names_of_ids(groups: Sequence[Mapping[str, Any]], live: LiveOptimizers) -> dict[Any, str]:
    if len(live.optimizers) != 1:
        raise NormalizationError(
            f"the optimizer state dict names parameters by integer ids, which say nothing about {len(live.optimizers)} "
            "optimizers: give each its own dict, or one by parameter names"
        )
    ids = [key for group in groups for key in group["params"]]
    own = live.by_id[0]
    if len(ids) != len(own):
        raise NormalizationError(
            f"the optimizer state dict lists {len(ids)} parameter ids, but the optimizer has {len(own)} parameters: "
            "ids fit only the optimizer that they come from, see reshard.normalize(state_dict, order=[names])"
        )
    return {key: own[number][0].name for number, key in enumerate(ids)}


def _read_flat(given: Mapping[str, Any], live: LiveOptimizers) -> SavedOptimizer:
    state: dict[str, dict[str, Any]] = {}
    fields: dict[str, dict[str, Any]] = {}
    places: dict[str, dict[Any, Any]] = {}
    """The dict that a key's front leads to, where the front is a known name."""
    for key, value in given.items():
        front, _, tail = key.rpartition(".")
        if front in places:
            places[front][tail] = value
            continue
        section, _, rest = key.partition(".")
        if section not in ("state", "param_groups") or "." not in rest:
            raise NormalizationError(
                f"{key!r} is no key of a flat optimizer state dict: they read state.<fqn>.<name> or "
                "param_groups.<fqn>.<field>"
            )
        name, path = _split(rest, live)
        if len(path) == 1:
            places[front] = (fields if section == "param_groups" else state).setdefault(name, {})
        if section == "param_groups":
            fields.setdefault(name, {})[".".join(path)] = value
            continue
        inner: dict[Any, Any] = state.setdefault(name, {})
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    for name, values in state.items():
        if not any(isinstance(value, dict) for value in values.values()):
            continue
        one = live.by_name.get(name)
        known = live.optimizers[one.optimizer].state.get(one.parameter, {}) if one is not None else {}
        state[name] = {key: _typed_keys(item, known.get(key)) for key, item in values.items()}
    return SavedOptimizer(state, fields, [])


def _split(rest: str, live: LiveOptimizers) -> tuple[str, list[str]]:
    """The longest known name at the front, and the segments behind it; else all but the last segment is the name."""
    head, _, tail = rest.rpartition(".")
    path = [tail]
    name = head
    while name not in live.by_name and name not in live.live.by_name:
        if "." not in name:
            return head, [tail]
        name, _, part = name.rpartition(".")
        path.insert(0, part)
    return name, path


def _typed_keys(value: Any, live: Any) -> Any:
    """Undo what flattening did to integer keys of nested state: keys are typed as in the live state, and where there
    is none, a dict whose keys are all digits had integers."""
    if not isinstance(value, dict):
        return value
    if isinstance(live, dict):
        keys = {str(key): key for key in live}
    elif all(key.isdigit() for key in value):
        keys = {key: int(key) for key in value}
    else:
        keys = {}
    known = live if isinstance(live, dict) else {}
    return {keys.get(key, key): _typed_keys(item, known.get(keys.get(key, key))) for key, item in value.items()}


_ABSENT = object()
