"""A state: tensors, and all else that it holds, by dotted key, and where in a nest of containers each of them is."""

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
"""Keys of an optimizer's state by the number of a parameter, as `optimizer.state_dict()` has them."""


class cached_property(functools.cached_property[T]):
    """A `cached_property` for properties of each tensor: before Python 3.12, that of functools takes a lock."""

    if not TYPE_CHECKING:

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


# A path says how a value is reached: text for a string key of a dict, `IntKey` for an int key, a
# plain int for a position in a list or tuple. That, and which containers are tuples or empty, is
# all it takes to build the same nest again:
#
#     {"a.b": [x, {5: y}]}   ->   ("a.b", 0): x,  ("a.b", 1, IntKey(5)): y


@dataclass(frozen=True, slots=True)
class IntKey:
    """An int that is a key of a dict, as opposed to a position in a sequence."""

    value: int
    apart: bool = field(default=False, compare=False)
    """Whether the dict has the same as text, too: the number is written in brackets then."""

    def __str__(self) -> str:
        return f"[{self.value}]" if self.apart else str(self.value)


KeyPath = tuple[str | int | IntKey, ...]


def plain_key(part: str | int | IntKey) -> Any:
    """The key, or the position, that a part of a path stands for."""
    return part.value if isinstance(part, IntKey) else part


def key_of(path: KeyPath) -> str:
    """The dotted key of a path, as torch.distributed.checkpoint writes it: `"a.b.0"`. Two paths can share one."""
    try:
        return ".".join(path)  # type: ignore[arg-type]  # nearly always text alone
    except TypeError:
        return ".".join(map(str, path))


def is_selected(key: str, globs: Collection[str]) -> bool:
    """Return True if a glob matches a key, and none that begins with `!` does. Without others than those, all match."""
    wanted = [glob for glob in globs if not glob.startswith("!")] or ["*"]
    unwanted = (glob[1:] for glob in globs if glob.startswith("!"))
    return any(fnmatchcase(key, glob) for glob in wanted) and not any(fnmatchcase(key, glob) for glob in unwanted)


_INTS = {"int", "apart"}


def path_to_json(path: KeyPath) -> list[Any]:
    """A path as JSON data: text, ints, and `{"int": 5}` or `{"apart": 5}` for int keys. Inverse of `path_from_json`."""
    return [{"apart" if part.apart else "int": part.value} if isinstance(part, IntKey) else part for part in path]


def path_from_json(data: Sequence[Any]) -> KeyPath:
    """Inverse of `path_to_json`. Raises FormatError for anything else."""
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
    """What a state dict holds, wherever it is: a `LiveTensor` for each tensor of a live one, a
    `StoredTensor` for each of a checkpoint, a `TensorLayout` for each that all ranks hold
    together."""

    tensors: Mapping[str, T]
    """Tensors by dotted key."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Everything that is no tensor, by key."""
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """Where in the nest each key is, where that is not just the key."""
    containers: Mapping[KeyPath, str] = field(default_factory=dict)
    """Kinds of containers that are tuples or empty, or of a class: see `reshard.live.tree.Flat`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that are the same tensor as that of another name: tied weights."""
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    """Values that are each rank's own, by key."""

    def path_of(self, key: str) -> KeyPath:
        """Return where in the nest a key is."""
        return self.paths.get(key, (key,))

    def paths_in_order(self) -> dict[str, KeyPath]:
        """Return where in the nest each key is, in the order in which the state was saved, as far
        as that is recorded."""
        keys = dict.fromkeys((*self.tensors, *self.aliases, *self.objects))
        ordered = [*(key for key in self.paths if key in keys), *(key for key in keys if key not in self.paths)]
        return {key: self.path_of(key) for key in ordered}

    def containers_above(self, paths: Iterable[KeyPath]) -> dict[KeyPath, str]:
        """The kinds of the containers that hold something at these paths, and of those that are there."""
        above = {path[:i] for path in paths for i in range(len(path) + 1)}
        return {path: kind for path, kind in self.containers.items() if path in above}


def count_objects(state: State[Any]) -> int:
    """The number of objects, which is the same for each way to store a state.

    An entry of a dict is one, and so are all plain items of a list together, whether each has a
    key of its own or a value holds them all.
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
    """The paths of the containers that these are in, at any depth."""
    inner = {path[:-1] for path in paths if path}  # far fewer than the paths, mostly
    return {path[:i] for path in inner for i in range(len(path) + 1)}


def empty_sequences(
    containers: Mapping[KeyPath, str], leaves: Iterable[KeyPath], *, but: Container[str] = ("dict", "tensor")
) -> dict[str, KeyPath]:
    """The lists and the like without items, by key. Not the dicts: some formats keep no empty ones."""
    kinds = {path: kind.partition(":")[0] for path, kind in containers.items() if path}
    found = [path for path, kind in kinds.items() if kind not in but]
    full = containers_around((*leaves, *kinds)) if found else ()
    return {key_of(path): path for path in found if path not in full}


def value_path(path: KeyPath) -> KeyPath:
    """Return the path of the value that this is an item of: a list, with all lists in it, is one value."""
    while path and type(path[-1]) is int:
        path = path[:-1]
    return path
