"""The fields that live parameter groups will have, out of those that were saved.

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
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.optimizer.saved import SavedOptimizer
from reshard.state_dict.values import same_value

__all__ = ["GroupWrite", "plan_groups"]


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
    if isinstance(live, (list, tuple)) and isinstance(value, (int, float, str)):
        raise TypeError("one value is no list of values")
    if isinstance(live, float) and isinstance(value, (list, tuple)):
        raise TypeError("a list of values is no number")
    if isinstance(live, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(live, (list, tuple)) and isinstance(value, (list, tuple)):
        items = [_as_live(live[i], item) if i < len(live) else copy.deepcopy(item) for i, item in enumerate(value)]
        return items if isinstance(live, list) else tuple(items)
    return copy.deepcopy(value)


_ABSENT = object()
