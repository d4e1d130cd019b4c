"""An optimizer state dict in one form, whichever way it was given: nested, flat, or by integer ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import NormalizationError
from reshard.state.optimizer_forms import split_flat_key
from reshard.state_dict.optimizer.parameters import LiveOptimizers

__all__ = ["SavedOptimizer", "read_saved"]


@dataclass(frozen=True)
class SavedOptimizer:
    """A given optimizer state dict, by parameter name."""

    state: Mapping[Any, Mapping[str, Any]]
    """State of each parameter that has any."""
    fields: Mapping[str, Mapping[str, Any]]
    """Group fields of each parameter that is in a group; parameters of one group share one object."""
    empty: Sequence[Mapping[str, Any]]
    """Fields of the groups without parameters, in order."""
    stateless: frozenset[str] | None = None
    """Of the flat form, the parameters that it says have no state: any other without state has lost it, if there is
    state at all. None in the other forms, where a parameter that is in a group has the state that is there."""


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
    known = live.live.by_name | live.by_name
    stateless: set[str] = set()
    front: str | None = None
    place: dict[Any, Any] | None = None
    for key, value in given.items():
        if type(value) is dict and not value and key.removeprefix("state.") in known:
            stateless.add(key.removeprefix("state."))
            continue
        last, (front, _, tail) = front, key.rpartition(".")
        if front != last:  # keys of one parameter mostly come together
            place = places.get(front)
        if place is not None:
            place[tail] = value
            continue
        section, name, path = split_flat_key(key, known)
        if len(path) == 1:
            place = places[front] = (fields if section == "param_groups" else state).setdefault(name, {})
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
        now = live.optimizers[one.optimizer].state.get(one.parameter, {}) if one is not None else {}
        state[name] = {key: _typed_keys(item, now.get(key)) for key, item in values.items()}
    return SavedOptimizer(state, fields, [], frozenset(stateless))


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
