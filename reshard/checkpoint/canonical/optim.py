"""Optimizers as saved: states by name or by integer id, param groups as lists or one entry per parameter.

state: {fqn: {exp_avg: ...}}    state: {0: {exp_avg: ...}}         "state.w.exp_avg": ...
param_groups: [{lr, params}]    param_groups: [{lr, params: [0]}]  "param_groups.w.lr": ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.sections import Leaf, Tree, resolve, walk
from reshard.errors import NormalizationError
from reshard.formats.stored.copying import read_place
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.optimizer_forms import is_flat_key, split_flat_key

__all__ = ["SavedOptimizer", "name_ids", "read_optimizer", "regroup"]


@dataclass
class SavedOptimizer:
    """One optimizer: states by the name or id under which they were saved, and its groups."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    @property
    def by_id(self) -> bool:
        """Whether parameters have integer ids instead of names."""
        listed = [p for group in self.groups for p in group.get("params", ())]
        return bool(listed or self.state) and all(isinstance(p, int) for p in listed) and all(map(_is_id, self.state))


def _is_id(key: str) -> bool:
    return key.isdigit()


def read_optimizer(tree: Tree) -> SavedOptimizer:
    """What a saved optimizer holds; its plain values are read, its tensors are not."""
    saved = SavedOptimizer()
    by_name: dict[str, dict[str, Any]] = {}
    nested = [key for key in tree if key in ("state", "param_groups")]
    flat = [key for key in tree if is_flat_key(key)]
    if not nested and not flat:
        saved.state = _states(tree)  # the states alone
        return saved
    for key in nested:
        if key == "state" and isinstance(tree[key], dict):
            saved.state = _states(tree[key])
        elif key == "param_groups":
            groups = resolve(tree[key])
            if isinstance(groups, dict):
                by_name = groups if all(isinstance(g, dict) for g in groups.values()) else {}
            else:
                saved.groups = [dict(group) for group in groups]
    for key in flat:
        section, owner, name = split_flat_key(key)
        for path, leaf in walk(tree[key]):
            if section == "state" and not path and leaf.value() == {}:
                continue  # a parameter without state, by name
            target = saved.state if section == "state" else by_name
            target.setdefault(owner, {})[".".join(map(str, (*name, *path)))] = leaf.value()
    if by_name:
        saved.groups = regroup(by_name)
    return saved


def _states(tree: Tree) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for owner, states in tree.items():
        if isinstance(states, Leaf):
            value = states.value()
            if isinstance(value, dict) and not value:
                continue  # a parameter without state yet
            if not isinstance(value, dict):
                raise NormalizationError(
                    f"the optimizer's state {owner!r} is no dict of states: {states.key!r} is a single value"
                )
            out[str(owner)] = value
        else:
            out[str(owner)] = {".".join(map(str, path)): leaf.value() for path, leaf in walk(states)}
    return out


def regroup(by_name: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the parameters whose settings are equal, in order of first appearance.

    How they were grouped when they were saved is not stored, so groups with equal settings become one.
    """
    groups: list[dict[str, Any]] = []
    for name, settings in by_name.items():
        plain = {key: _small(value) for key, value in settings.items()}
        for group in groups:
            if {k: v for k, v in group.items() if k != "params"} == plain:
                group["params"].append(name)
                break
        else:
            groups.append({**plain, "params": [name]})
    return groups


def _small(value: Any) -> Any:
    """A setting that is a tensor of one number, such as a learning rate, as the number; others as they are."""
    if not isinstance(value, StoredTensor) or value.spec.shape or len(value.chunks) != 1:
        return value
    return read_place(value.chunks[0].place, value.spec.dtype).item()


def name_ids(saved: SavedOptimizer, hints: Hints, scope: int | str | None, what: str) -> SavedOptimizer:
    """The optimizer with names for integer ids: those that it stores itself, or those of the hint.

    Raises NormalizationError, asking for the hint, if ids have no names.
    """
    if not saved.by_id:
        return saved
    names = _stored_names(saved) or hints.ids(scope) or (hints.ids() if scope is not None else None)
    used = sorted({int(i) for i in saved.state} | {i for g in saved.groups for i in g.get("params", ())})
    if names is None:
        where = "" if scope is None else f" of {scope!r}"
        example = '["embed.weight", ...]' if scope is None else f'{{{scope!r}: ["embed.weight", ...]}}'
        hints.missing(
            "param_names",
            f"the optimizer{where} of {what} knows its {len(used)} parameters only by integer ids, in the order in "
            "which they were given to it, and the names in that order are not stored",
            example,
        )
    unnamed = [i for i in used if i not in names]
    if unnamed:
        raise NormalizationError(
            f"the hint 'param_names' gives {len(names)} names, but the optimizer of {what} has a parameter of id "
            f"{unnamed[0]} (ids {used[0]} to {used[-1]})"
        )
    state = {names[int(i)]: states for i, states in saved.state.items()}
    if len(state) != len(saved.state):
        raise NormalizationError("the hint 'param_names' gives the same name to several parameters")
    groups = [_with_names(group, lambda i: names[i]) for group in saved.groups]
    return SavedOptimizer(state, groups)


def _stored_names(saved: SavedOptimizer) -> dict[int, str] | None:
    """Names that the groups store beside their ids, as optimizers made of named parameters do."""
    names: dict[int, str] = {}
    for group in saved.groups:
        given = group.get("param_names")
        if not isinstance(given, (list, tuple)) or len(given) != len(group.get("params", ())):
            return None
        names.update(zip(group["params"], map(str, given)))
    return names or None


def _with_names(group: dict[str, Any], rename: Callable[[Any], str]) -> dict[str, Any]:
    out = {key: value for key, value in group.items() if key not in ("param_names", "params")}
    if "params" in group:
        out["params"] = [rename(p) for p in group["params"]]
    return out


def renamed_groups(groups: Iterable[dict[str, Any]], rename: Callable[[str], str]) -> list[dict[str, Any]]:
    """The groups with every parameter's name mapped; names that some optimizers store beside ids are dropped."""
    return [_with_names(group, rename) for group in groups]
