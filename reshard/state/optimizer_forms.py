"""The forms in which the state of an optimizer is saved: told apart by their keys, and the flat one written and read.

    nested  {"state": {"w": {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    by ids  {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    flat    {"state.w.exp_avg": ..., "param_groups.w.lr": 0.1}

Groups may be a list, or a dict by position, as which a checkpoint has its lists.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from reshard.errors import NormalizationError

__all__ = ["FlatKey", "flatten", "is_flat", "is_flat_key", "is_nested", "owner_of", "split_flat_key"]

_FRONTS = ("state.", "param_groups.")


def is_nested(tree: Mapping[Any, Any]) -> bool:
    """Whether this is one optimizer, by names or by ids: a dict of states, and groups that list parameters."""
    groups = tree.get("param_groups")
    if isinstance(groups, Mapping):
        groups = list(groups.values())
    return (
        isinstance(tree.get("state"), Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )


def is_flat_key(key: Any) -> bool:
    """Whether the key is one of the flat form."""
    return isinstance(key, str) and key.startswith(_FRONTS)


def is_flat(keys: Iterable[Any]) -> bool:
    """Whether these are all keys of an optimizer's flat form."""
    given = list(keys)
    return bool(given) and all(map(is_flat_key, given))


def owner_of(name: str, known: Container[str]) -> str | None:
    """The parameter whose name, and a dot, `name` begins with; the longest of `known` if there are several."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None


class FlatKey(NamedTuple):
    """A key of the flat form, taken apart."""

    section: str
    """"state" or "param_groups"."""
    owner: str
    """Name of the parameter."""
    path: tuple[str, ...]
    """Where in the parameter's state, or which field of its group."""


def split_flat_key(key: str, known: Container[str] = ()) -> FlatKey:
    """The parts of a key. The parameter's name and its state's may both have dots, so `known` names decide; of an
    unknown parameter the last segment is the state's name.

    Raises NormalizationError for a key that is none of the flat form.
    """
    section, _, rest = key.partition(".")
    if not is_flat_key(key) or "." not in rest:
        raise NormalizationError(
            f"{key!r} is no key of a flat optimizer state dict: they read state.<fqn>.<name> or "
            "param_groups.<fqn>.<field>"
        )
    owner = owner_of(rest, known)
    if owner is None:
        owner = rest.rpartition(".")[0]
        return FlatKey(section, owner, (rest[len(owner) + 1 :],))
    return FlatKey(section, owner, tuple(rest[len(owner) + 1 :].split(".")))


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form of a nested one. Every parameter carries the fields of its group, so that dicts of pipeline stages
    have no key in common. Empty groups leave no trace, and keys of nested state become text."""
    flat: dict[str, Any] = {}
    for name, values in state_dict["state"].items():
        prefix = f"state.{name}."
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict):
                _flatten_into(flat, f"{prefix}{key}", value)
            else:
                flat[f"{prefix}{key}"] = value
    for group in state_dict["param_groups"]:
        fields = [(f".{field}", value) for field, value in group.items() if field != "params"]
        for name in group["params"]:
            front = f"param_groups.{name}"
            for tail, value in fields:
                flat[front + tail] = value
    return flat


def _flatten_into(flat: dict[str, Any], prefix: str, value: Any) -> None:
    if not isinstance(value, dict):
        flat[prefix] = value
        return
    for key, item in value.items():
        _flatten_into(flat, f"{prefix}.{key}", item)
