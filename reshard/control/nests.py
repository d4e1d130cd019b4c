"""Whether the nests that ranks were given fit together: one place is the same kind of thing on all ranks that have it.

Ranks may hold other keys of a dict, as pipeline stages do. But a list of plain values is one value: were lists of
different lengths put together key by key, a rank would get back what it never had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from reshard.errors import KeyMismatchError
from reshard.state.tree import KeyPath, key_of, path_from_json

__all__ = ["check_nests"]


class _Place(NamedTuple):
    kind: str
    """"dict", "list", "tuple" or "value"."""
    items: int | None
    """Of a list or tuple of plain values."""

    def __str__(self) -> str:
        return f"a {self.kind}" if self.items is None else f"a {self.kind} of {self.items}"


def check_nests(
    nests: Iterable[tuple[Mapping[str, list[Any]], Iterable[tuple[list[Any], str]], Collection[str]]],
) -> None:
    """Raises KeyMismatchError for a place that is one thing on some ranks and another on others.

    Args:
        nests: of each distinct one: the path of every key, tuples and empty containers by path, and the keys of what is
            no plain value.
    """
    known: dict[KeyPath, _Place] = {}
    for paths, containers, others in nests:
        for path, place in _places(paths, containers, others).items():
            if (first := known.setdefault(path, place)) == place:
                continue
            if first.kind == place.kind and None in (first.items, place.items):
                continue  # tensors on one side: ranks may have some of a list of them
            raise KeyMismatchError(
                f"{key_of(path)!r} is {first} on some ranks and {place} on others. Wrap what is each rank's own in "
                "reshard.PerRank(value), or give it a key per rank"
            )


def _places(
    paths: Mapping[str, list[Any]], containers: Iterable[tuple[list[Any], str]], others: Collection[str]
) -> dict[KeyPath, _Place]:
    kinds: dict[KeyPath, str] = {}
    items: dict[KeyPath, int] = {}
    mixed: set[KeyPath] = set()
    for key, data in paths.items():
        path = path_from_json(data)
        kinds[path], is_other = "value", key in others
        for i in reversed(range(len(path))):
            above, part = path[:i], path[i]
            if type(part) is int:
                items[above] = max(items.get(above, 0), part + 1)
            if above in kinds and (above in mixed or not is_other):
                break  # this one and those above it are known
            kinds[above] = "list" if type(part) is int else "dict"
            if is_other:
                mixed.add(above)
    for data, kind in containers:
        path = path_from_json(data)
        kinds[path] = kind
        if kind != "dict":
            items.setdefault(path, 0)
    return {path: _Place(kind, None if path in mixed else items.get(path)) for path, kind in kinds.items()}
