"""An optimizer state dict in one form, whichever way it was given: nested, flat, or by integer ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

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
    flat = _Flat(live)
    flat.read(list(given), list(given.values()))
    for name in flat.singly[id(flat.state)]:
        values = flat.state[name]
        if not any(isinstance(value, dict) for value in values.values()):
            continue
        one = live.by_name.get(name)
        now = live.optimizers[one.optimizer].state.get(one.parameter, {}) if one is not None else {}
        flat.state[name] = {key: _typed_keys(item, now.get(key)) for key, item in values.items()}
    return SavedOptimizer(flat.state, flat.fields, [], frozenset(flat.stateless))


class _Flat:
    """Reads the flat form: key by key, but a parameter with the keys that the one before it had, all at once."""

    def __init__(self, live: LiveOptimizers) -> None:
        self.state: dict[str, dict[Any, Any]] = {}
        self.fields: dict[str, dict[Any, Any]] = {}
        self.stateless: set[str] = set()
        self.singly: dict[int, set[str]] = {id(self.state): set(), id(self.fields): set()}
        """Of both, the parameters of which keys were read one by one; the others have no nested state, and parameters
        of one group share their fields."""
        self._known = live.live.by_name | live.by_name
        self._places: dict[str, dict[Any, Any]] = {}
        """The dict that a key's front leads to, where the front is a known name."""
        self._front: str | None = None
        """Of the key that was read last by itself."""
        self._tails: dict[str, list[str]] = {}
        """By section, the last parts of the keys of one parameter that were read one by one, in their order."""
        self._latest: tuple[list[str], Sequence[Any], dict[Any, Any]] = ([], [], {})
        """Tails and values of fields that were read at once, and the dict of them."""

    def read(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Take all keys apart."""
        at, last = 0, None
        while at < len(keys):
            front, _, tail = keys[at].rpartition(".")
            count = self._row(front, keys, values, at) if front != last else 0
            if not count:
                self._one(keys[at], front, tail, values[at])
            at, last = at + (count or 1), front

    def _row(self, front: str, keys: Sequence[str], values: Sequence[Any], at: int) -> int:
        """Read all keys of a parameter, if they are those that one before it had; how many, or 0."""
        section, _, name = front.partition(".")
        goal, tails = self._goal(section), self._tails.get(section)
        if not tails or name in goal or name not in self._known:
            return 0
        end, dotted = at + len(tails), f"{front}."
        own = values[at:end]
        if keys[at:end] != [dotted + tail for tail in tails] or not _LEAVES.issuperset(map(type, own)):
            return 0
        if goal is self.state:
            goal[name] = dict(zip(tails, own))
            return len(tails)
        known, before, fields = self._latest
        if known is not tails or not (all(map(is_, before, own)) or all(map(_is_alike, before, own))):
            fields = dict(zip(tails, own))
            self._latest = tails, own, fields
        goal[name] = fields
        return len(tails)

    def _one(self, key: str, front: str, tail: str, value: Any) -> None:
        """Read one key."""
        if type(value) is dict and not value and key.removeprefix("state.") in self._known:
            self.stateless.add(key.removeprefix("state."))
            return
        if front != self._front:
            self._front, self._tails[front.partition(".")[0]] = front, []
        self._tails[front.partition(".")[0]].append(tail)
        place = self._places.get(front)
        if place is not None:
            place[tail] = value
            return
        section, name, path = split_flat_key(key, self._known)
        goal = self._goal(section)
        if name not in self.singly[id(goal)]:
            self.singly[id(goal)].add(name)
            goal[name] = dict(goal.get(name, {}))
        inner = goal[name]
        if len(path) == 1:
            self._places[front] = inner
        if section == "param_groups":
            inner[".".join(path)] = value
            return
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value

    def _goal(self, section: str) -> dict[str, dict[Any, Any]]:
        return self.fields if section == "param_groups" else self.state


_LEAVES = frozenset([torch.Tensor, bool, int, float, str, tuple, type(None)])
"""Types of values that are no dicts: of nearly all."""


def _is_alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (bool, int, float, str) and a == b)


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
