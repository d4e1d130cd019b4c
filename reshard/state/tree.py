"""Nested containers as flat leaves with typed key paths, and back.

A path says how a leaf is reached: text for a string key of a dict, `IntKey` for an int key, a plain int for a position
in a list or tuple. That, and which containers are tuples or empty, is all it takes to build the same nest again:

    {"a.b": [x, {5: y}]}   ->   ("a.b", 0): x,  ("a.b", 1, IntKey(5)): y
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.errors import FormatError, KeyMismatchError
from reshard.state.container_types import make_sequence, mapping_kind, sequence_kind

__all__ = [
    "MAX_DEPTH",
    "Flat",
    "IntKey",
    "KeyPath",
    "flatten",
    "key_of",
    "other_key_of",
    "path_from_json",
    "path_to_json",
    "unflatten",
]

_MAX_INT_KEY = 1 << 256
MAX_DEPTH = 100
"""Levels of a nest that are taken apart: what is written can then be read with room on the stack, in any program."""


@dataclass(frozen=True, slots=True)
class IntKey:
    """An int that is a key of a dict, as opposed to a position in a sequence."""

    value: int
    apart: bool = field(default=False, compare=False)
    """Whether the dict has the same as text, too: the number is written in brackets then."""

    def __str__(self) -> str:
        return f"[{self.value}]" if self.apart else str(self.value)


KeyPath = tuple[str | int | IntKey, ...]


@dataclass(frozen=True)
class Flat:
    """A nest taken apart. `unflatten(flat.leaves, flat.containers)` builds it again."""

    leaves: dict[KeyPath, Any]
    """Every value that is no container, by path, in order."""
    containers: dict[KeyPath, str] = field(default_factory=dict)
    """"dict" and "list" for the empty ones, which no leaf would tell of; for every other sequence, what
    `reshard.state.container_types.sequence_kind` says of it, and for mappings without tensors, if they are no plain
    dicts, what `mapping_kind` does. Of tensors that are of a class of their own, "tensor:app.Quantized"."""


def key_of(path: KeyPath) -> str:
    """The dotted key of a path, as torch.distributed.checkpoint writes it: `"a.b.0"`. Two paths can share one."""
    return ".".join(map(str, path))


def other_key_of(path: KeyPath) -> str:
    """The dotted key that a path has where its ints have the same text beside them, or, where they have, without."""
    return key_of(tuple(IntKey(part.value, not part.apart) if isinstance(part, IntKey) else part for part in path))


def flatten(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    whole_at: Callable[[KeyPath, Any], bool] | None = None,
) -> Flat:
    """Take dicts (with text or ints as keys), lists, tuples and deques apart; all else is a leaf, also other dicts.

    Args:
        is_leaf: what else is not taken apart.
        whole_at: the same for a container, by its path as well.

    Raises:
        KeyMismatchError: a container that contains itself or is nested too deeply, or two values or containers whose
            dotted keys are the same.
    """
    flat = Flat({})
    _flatten(
        tree, (), flat, _Walk(is_leaf or (lambda value: False), whole_at or (lambda path, value: False), {}, set())
    )
    return flat


def _show(path: KeyPath) -> str:
    return "".join(f"[{p.value if isinstance(p, IntKey) else p!r}]" for p in path)


class _Walk(NamedTuple):
    """Where the taking apart ends, besides at what is no container, and what it has come across."""

    is_leaf: Callable[[Any], bool]
    whole_at: Callable[[KeyPath, Any], bool]
    seen: dict[str, KeyPath]
    """The path of each dotted key, of leaves and containers."""
    above: set[int]

    def see(self, path: KeyPath) -> None:
        """Raises KeyMismatchError for a key that something else has, too."""
        other = self.seen.setdefault(key_of(path), path) if path else path
        if other != path:
            raise KeyMismatchError(
                f"two values of the state have the same key {key_of(path)!r}: {_show(other)} and {_show(path)}; "
                "rename one of them"
            )


def _flatten(value: Any, path: KeyPath, flat: Flat, walk: _Walk) -> bool:
    """Whether there is nothing below that `walk.is_leaf` stops at."""
    walk.see(path)
    is_single = walk.is_leaf(value)
    items = None if is_single else _items(value)
    if items is None or walk.whole_at(path, value):
        flat.leaves[path] = value
        return not is_single
    kind, pairs = items
    if id(value) in walk.above:
        raise KeyMismatchError(f"the container at {_show(path) or 'the top'} contains itself")
    if len(path) >= MAX_DEPTH:
        raise KeyMismatchError(f"the state is nested too deeply, more than {MAX_DEPTH} levels: {_show(path)[:200]}...")
    if kind not in ("dict", "list") or (not pairs and (path or kind == "list")):
        flat.containers[path] = kind
    walk.above.add(id(value))
    is_plain = True
    for key, item in pairs:
        is_plain &= _flatten(item, (*path, key), flat, walk)
    is_odd = kind == "dict" and not (type(value) is dict and _KEYS.issuperset(map(type, value)))
    if is_odd and is_plain and path and (own := mapping_kind(value)) != "dict":
        flat.containers[path] = own
    walk.above.discard(id(value))
    return is_plain


_KEYS = {str, int}


def _items(value: Any) -> tuple[str, list[tuple[str | int | IntKey, Any]]] | None:
    """Kind and items of a container; None for a leaf."""
    if isinstance(value, Mapping):
        parts = _parts_of(value)
        return None if parts is None else ("dict", list(zip(parts, value.values(), strict=True)))
    kind = sequence_kind(value)
    return None if kind is None else (kind, list(enumerate(value)))


def _parts_of(keys: Iterable[Any]) -> list[str | IntKey] | None:
    """A dict's keys as parts of paths; None if one cannot be."""
    parts = [_part_of(key) for key in keys]
    if any(part is None for part in parts):
        return None
    if any(type(part) is IntKey for part in parts):
        texts = {part for part in parts if type(part) is str}
        parts = [IntKey(p.value, True) if isinstance(p, IntKey) and str(p) in texts else p for p in parts]
    return parts  # type: ignore[return-value]  # none is None


def _part_of(key: Any) -> str | IntKey | None:
    """A dict's key in a path; None for one that can only be saved with the dict as one value. One of a class of its own
    counts as the text or number that it is equal to."""
    if type(key) is str:
        return key
    if isinstance(key, str):
        plain = str.__str__(key)
        return plain if plain == key and hash(plain) == hash(key) else None
    if isinstance(key, int) and not isinstance(key, bool) and -_MAX_INT_KEY <= key <= _MAX_INT_KEY:
        return IntKey(int.__int__(key))
    return None


def unflatten(leaves: Mapping[KeyPath, Any], containers: Mapping[KeyPath, str] | None = None) -> Any:
    """The nest that `flatten` took apart. A sequence of which only some positions are given becomes shorter, in order.

    Raises KeyMismatchError if one path leads through another's leaf.
    """
    kinds = containers or {}
    if () in leaves:
        if len(leaves) > 1:
            raise KeyMismatchError("the top of a nest cannot be a value and a container at once")
        return leaves[()]
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        parent = _descend(root, path[:-1])
        if path[-1] in parent:
            raise KeyMismatchError(f"{_show(path)} is a value and a container at once, or is given twice")
        parent[path[-1]] = _Leaf(value)
    for path, kind in kinds.items():
        if not kind.startswith("tensor:"):
            _descend(root, path)
    try:
        return _build(root, (), kinds)
    except RecursionError:
        raise KeyMismatchError("the state is nested too deeply to be built again") from None


class _Leaf:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _descend(root: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
    """The container at `path`, made on the way down."""
    node = root
    for i, part in enumerate(path):
        node = node.setdefault(part, {})
        if isinstance(node, _Leaf):
            raise KeyMismatchError(f"{_show(path[: i + 1])} is a value and a container at once")
    return node


def _build(node: Any, path: KeyPath, kinds: Mapping[KeyPath, str]) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    kind = kinds.get(path, "list" if node and all(type(k) is int for k in node) else "dict")
    if kind.partition(":")[0] in ("dict", "tensor"):
        return {k.value if isinstance(k, IntKey) else k: _build(v, (*path, k), kinds) for k, v in node.items()}
    return make_sequence(kind, [_build(node[k], (*path, k), kinds) for k in sorted(node)])


_INTS = {"int", "apart"}


def path_to_json(path: KeyPath) -> list[Any]:
    """A path as JSON data: text, ints, and `{"int": 5}` or `{"apart": 5}` for int keys. Inverse of `path_from_json`."""
    return [{"apart" if part.apart else "int": part.value} if isinstance(part, IntKey) else part for part in path]


def path_from_json(data: Sequence[Any]) -> KeyPath:
    """Inverse of `path_to_json`. Raises FormatError for anything else."""
    parts: list[str | int | IntKey] = []
    for part in data:
        if isinstance(part, str) or type(part) is int:
            parts.append(part)
        elif isinstance(part, dict) and [type(number) for number in part.values()] == [int] and part.keys() <= _INTS:
            parts += [IntKey(number, apart=kind == "apart") for kind, number in part.items()]
        else:
            raise FormatError(f"{part!r} is no part of a key path: text, an int, or {{'int': n}}")
    return tuple(parts)
