"""`State`: tensors and other values by dotted key, with the path of each in nested containers."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.errors import FormatError

__all__ = [
    "NUMBERED", "IntKey", "KeyPath", "State", "cached_property", "containers_around", "count_objects",
    "empty_sequences", "is_selected", "key_of", "path_from_json", "path_to_json", "plain_key", "value_path",
]  # fmt: skip


T = TypeVar("T", covariant=True)

NUMBERED = re.compile(r"(?:^|.*\.)state\.\d+\.[^.]+")
"""Keys of optimizer state by parameter number, as in `optimizer.state_dict()`."""


class cached_property(functools.cached_property[T]):
    """A faster `cached_property`: before Python 3.12, that of functools takes a lock."""

    if not TYPE_CHECKING:

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


# A path consists of strings for string keys of dicts, `IntKey`s for int keys, and plain ints for
# positions in lists and tuples. The paths, and the containers that are tuples or empty, suffice to
# rebuild the nested state:
#
#     {"a.b": [x, {5: y}]}   ->   ("a.b", 0): x,  ("a.b", 1, IntKey(5)): y


@dataclass(frozen=True, slots=True)
class IntKey:
    """An int that is a key of a dict, as opposed to a position in a sequence."""

    value: int
    apart: bool = field(default=False, compare=False)
    """True if the dict also has the same number as a string key. `str` then puts the number in brackets."""

    def __str__(self) -> str:
        return f"[{self.value}]" if self.apart else str(self.value)


KeyPath = tuple[str | int | IntKey, ...]


def plain_key(part: str | int | IntKey) -> Any:
    """Return a part of a path as a plain dict key or list position."""
    return part.value if isinstance(part, IntKey) else part


def key_of(path: KeyPath) -> str:
    """Return the dotted key of a path, as in torch.distributed.checkpoint: `"a.b.0"`. Two paths can
    have the same key."""
    try:
        return ".".join(path)  # type: ignore[arg-type]  # nearly always text alone
    except TypeError:
        return ".".join(map(str, path))


def is_selected(key: str, globs: Collection[str]) -> bool:
    """Return True if a glob matches the key, and none that begins with `!` does. If all globs begin
    with `!`, the others match."""
    wanted = [glob for glob in globs if not glob.startswith("!")] or ["*"]
    unwanted = (glob[1:] for glob in globs if glob.startswith("!"))
    return any(fnmatchcase(key, glob) for glob in wanted) and not any(fnmatchcase(key, glob) for glob in unwanted)


_INTS = {"int", "apart"}


def path_to_json(path: KeyPath) -> list[Any]:
    """Return a path as JSON data: strings, ints, and `{"int": 5}` or `{"apart": 5}` for int keys."""
    return [{"apart" if part.apart else "int": part.value} if isinstance(part, IntKey) else part for part in path]


def path_from_json(data: Sequence[Any]) -> KeyPath:
    """Return the path that `path_to_json` wrote. Raises FormatError for other data."""
    if {str, int}.issuperset(map(type, data)):
        return tuple(data)
    parts: list[str | int | IntKey] = []
    for part in data:
        if isinstance(part, str) or type(part) is int:
            parts.append(part)
        elif isinstance(part, dict) and [type(number) for number in part.values()] == [int] and part.keys() <= _INTS:
            parts += [IntKey(number, apart=kind == "apart") for kind, number in part.items()]
        else:
            raise FormatError(f"{part!r} is not a part of a key path: text, an int, or {{'int': n}}")
    return tuple(parts)


@dataclass(frozen=True)
class State(Generic[T]):
    """The contents of a state dict. Tensors are `LiveTensor`s in a live state, `StoredTensor`s in a
    checkpoint, and `TensorLayout`s in the state of all ranks together."""

    tensors: Mapping[str, T]
    """Tensors by dotted key."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """All other values, by key."""
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """The path of each key whose path is not just `(key,)`."""
    containers: Mapping[KeyPath, str] = field(default_factory=dict)
    """Kind of each container that is a tuple, empty, or of another class. See `reshard.live.tree.Flat`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other keys of tied tensors: alias -> key of the tensor."""
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    """Values that differ between ranks on purpose, by key."""

    def path_of(self, key: str) -> KeyPath:
        """Return the path of a key."""
        return self.paths.get(key, (key,))

    def paths_in_order(self) -> dict[str, KeyPath]:
        """Return the path of each key. Keys are in the order in which they were saved, where it is
        recorded."""
        keys = dict.fromkeys((*self.tensors, *self.aliases, *self.objects))
        ordered = [*(key for key in self.paths if key in keys), *(key for key in keys if key not in self.paths)]
        return {key: self.path_of(key) for key in ordered}

    def containers_above(self, paths: Iterable[KeyPath]) -> dict[KeyPath, str]:
        """Return the kinds of the containers at these paths and above them."""
        above = {path[:i] for path in paths for i in range(len(path) + 1)}
        return {path: kind for path, kind in self.containers.items() if path in above}


def count_objects(state: State[Any]) -> int:
    """Return the number of objects. It does not depend on how the state is stored.

    Each entry of a dict counts as one. All plain items of a list together count as one, whether
    stored under one key or under a key each.
    """
    found: set[KeyPath] = set()
    todo: list[tuple[KeyPath, Any]] = []
    for key, value in state.objects.items():
        todo.append((state.path_of(key), value))
        while todo:
            path, value = todo.pop()
            if isinstance(value, dict):
                todo += [((*path, str(key)), item) for key, item in value.items()]
            elif isinstance(value, list | tuple) and value:
                todo += [((*path, i), item) for i, item in enumerate(value)]
            else:
                found.add(value_path(path) if path and type(path[-1]) is int else path)
    empty = empty_sequences(state.containers, state.paths.values()) if state.containers else {}
    return len(found.union(map(value_path, empty.values())))


def containers_around(paths: Iterable[KeyPath]) -> set[KeyPath]:
    """Return the paths of all containers, at any depth, that contain these paths."""
    inner = {path[:-1] for path in paths if path}  # usually far fewer than the paths
    return {path[:i] for path in inner for i in range(len(path) + 1)}


def empty_sequences(
    containers: Mapping[KeyPath, str], leaves: Iterable[KeyPath], *, but: Container[str] = ("dict", "tensor")
) -> dict[str, KeyPath]:
    """Return the paths of empty lists, tuples, and other containers, by key. Omits dicts, because
    some formats do not keep empty ones."""
    kinds = {path: kind.partition(":")[0] for path, kind in containers.items() if path}
    found = [path for path, kind in kinds.items() if kind not in but]
    full = containers_around((*leaves, *kinds)) if found else ()
    return {key_of(path): path for path in found if path not in full}


def value_path(path: KeyPath) -> KeyPath:
    """Return the path of the value that contains this item: a list, with all lists inside it, is
    one value."""
    while path and type(path[-1]) is int:
        path = path[:-1]
    return path
