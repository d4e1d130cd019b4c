"""Takes nested containers apart into flat leaves with typed key paths, and puts them together in
the types of the live values."""

from __future__ import annotations

import argparse
import copy
import io
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from reshard.errors import FormatError, KeyMismatchError
from reshard.state import IntKey, KeyPath, key_of, plain_key

_MAX_INT_KEY = 1 << 256
_MOST_ABSENT = 1 << 16
"""If a sequence lacks more items than this, the missing items are dropped, because a checkpoint can
claim any position."""
MAX_DEPTH = 100
"""Supported levels of nesting: any program can then read what is written without exhausting the stack."""


@dataclass(frozen=True)
class Flat:
    """A nest taken apart. `unflatten(flat.leaves, flat.containers)` builds it again."""

    leaves: dict[KeyPath, Any]
    """Every value that is not a container, by path, in order."""
    containers: dict[KeyPath, str] = field(default_factory=dict)
    """"dict" and "list" for empty containers, which have no leaf; for every other sequence,
    what `reshard.live.tree.sequence_kind` says of it, and for mappings without tensors, if they are
    no plain dicts, what `mapping_kind` does. Of tensors that are of a class of their own,
    "tensor:app.Quantized"."""


def other_key_of(path: KeyPath) -> str:
    """Return the other dotted key of a path: with marked ints if it is plain, and plain if its ints
    are marked because a dict has the same keys as text."""
    return key_of(tuple(IntKey(part.value, not part.apart) if isinstance(part, IntKey) else part for part in path))


def flatten(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    whole_at: Callable[[KeyPath, Any], bool] | None = None,
) -> Flat:
    """Take dicts (with text or ints as keys), lists, tuples and deques apart; all else is a leaf,
    also other dicts.

    Args:
        is_leaf: what else is not taken apart.
        whole_at: the same for a container, by its path as well.

    Raises:
        KeyMismatchError: a container that contains itself or is nested too deeply, or two values or
            containers whose dotted keys are the same.
    """
    flat = Flat({})
    _flatten(
        tree, (), flat, _Walk(is_leaf or (lambda value: False), whole_at or (lambda path, value: False), {}, set())
    )
    return flat


def map_leaves(
    change: Callable[[tuple[Any, ...], Any], Any],
    nest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    path: tuple[Any, ...] = (),
) -> Any:
    """Return copies of the dicts, lists, and tuples of a nest, as plain ones, with `change(path,
    leaf)` instead of every leaf. The path has the original keys. Nothing is checked: see `flatten`
    for what can be saved."""
    kind = type(nest)
    if is_leaf is None or not is_leaf(nest):
        if kind is list or kind is tuple:
            return kind([map_leaves(change, item, is_leaf, (*path, i)) for i, item in enumerate(nest)])
        if kind is dict or isinstance(nest, Mapping):
            return {key: map_leaves(change, item, is_leaf, (*path, key)) for key, item in nest.items()}
    return change(path, nest)


def copy_containers(value: Any) -> Any:
    """Return copies of nested dicts, lists, and tuples. The leaves are shared."""
    if isinstance(value, dict) and set(map(type, value.values())) == {torch.Tensor}:
        return dict(value)  # nearly always, and there are many
    return map_leaves(lambda path, leaf: leaf, value)


def leaves_of(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[tuple[Any, ...], Any]:
    """Return the leaves that `map_leaves` visits, by path."""
    found: dict[tuple[Any, ...], Any] = {}
    map_leaves(found.__setitem__, nest, is_leaf)
    return found


def _show(path: KeyPath) -> str:
    return "".join(f"[{p.value if isinstance(p, IntKey) else p!r}]" for p in path)


class _Walk(NamedTuple):
    """Where to stop taking containers apart, and what was found so far."""

    is_leaf: Callable[[Any], bool]
    whole_at: Callable[[KeyPath, Any], bool]
    seen: dict[str, KeyPath]
    """The path of each dotted key, of leaves and containers."""
    above: set[int]


def _flatten(value: Any, path: KeyPath, flat: Flat, walk: _Walk) -> bool:
    """Take a value apart. Return True if `walk.is_leaf` stops at nothing below it."""
    other = walk.seen.setdefault(key_of(path), path) if path else path
    if other != path:
        raise KeyMismatchError(
            f"two values of the state have the same key {key_of(path)!r}: {_show(other)} and {_show(path)}; "
            "rename one of them"
        )
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
    """Return the kind and items of a container. None for a leaf."""
    if not isinstance(value, Mapping):
        kind = sequence_kind(value)
        return None if kind is None else (kind, list(enumerate(value)))
    keys = list(value.keys())  # a TensorDict iterates over its batch, and has the length of it
    if {*map(type, keys)} == {str}:  # nearly always
        return "dict", list(zip(keys, value.values(), strict=True))
    parts = [part for key in keys if (part := _part_of(key)) is not None]
    if len(parts) < len(keys):
        return None
    if any(type(part) is IntKey for part in parts):
        texts = {part for part in parts if type(part) is str}
        parts = [IntKey(p.value, True) if isinstance(p, IntKey) and str(p) in texts else p for p in parts]
    return "dict", list(zip(parts, value.values(), strict=True))


def _part_of(key: Any) -> str | IntKey | None:
    """Return a dict's key as part of a path. None if the dict can only be saved as one value. A key
    of a custom class counts as the text or number that it equals."""
    if type(key) is str:
        return key
    if isinstance(key, str):
        plain = str.__str__(key)
        return plain if plain == key and hash(plain) == hash(key) else None
    if isinstance(key, int) and not isinstance(key, bool) and -_MAX_INT_KEY <= key <= _MAX_INT_KEY:
        return IntKey(int.__int__(key))
    return None


def unflatten(leaves: Mapping[KeyPath, Any], containers: Mapping[KeyPath, str] | None = None) -> Any:
    """Return the nest that `flatten` took apart. A sequence of which only some positions are given
    has None at the others before them, unless these are more than can be.

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
    """Return the container at `path`. Creates the containers on the way."""
    node = root
    for i, part in enumerate(path):
        node = node.setdefault(part, {})
        if isinstance(node, _Leaf):
            raise KeyMismatchError(f"{_show(path[: i + 1])} is a value and a container at once")
    return node


def _build(node: Any, path: KeyPath, kinds: Mapping[KeyPath, str]) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    kind = kinds.get(path, "list" if node else "dict")
    # of a sequence, ranks may have other items each, which have text keys then
    if kind.partition(":")[0] in ("dict", "tensor") or any(type(k) is not int for k in node):
        return {plain_key(k): _build(v, (*path, k), kinds) for k, v in node.items()}
    absent, count = _Leaf(None), max(node, default=-1) + 1
    places = range(count) if count - len(node) <= _MOST_ABSENT else sorted(node)
    return make_sequence(kind, [_build(node.get(k, absent), (*path, k), kinds) for k in places])


# Values of classes that plain data have no word for, and what comes back in the type of the live
# value it replaces.
#
# A checkpoint holds plain data only, and nothing in it says what to construct. Of a named tuple, a
# member of an enum or an int of a class of its own it has the class's name; the live value has the
# class itself:
#
#     live {"at": Point(0, 0), "where": device("cpu")}    saved {"at": Typed("app.Point", (3, 4)), "where": "cpu"}


_SEQUENCES = (list, tuple, deque)
_ATOMS = {int, float, str, bool, type(None), complex, bytes}
_PLAIN_OF: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: bytearray.copy,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
}
"""Plain types, and how a value of a derived class becomes plain, ignoring what that class overrides."""


@dataclass(frozen=True)
class CustomValue:
    """What is saved of a value whose class only a live value can provide."""

    name: str
    """Module and class."""
    value: Any
    """The plain value. For a member of an enum, its name and value."""


def typed(value: Any) -> CustomValue | None:
    """Return what can be saved of a value whose class extends a plain type or Enum. None for any
    other value.

    Raises FormatError, naming the class, for a value with attributes, which would be lost.
    """
    if isinstance(value, Enum):
        return CustomValue(_name(type(value)), (value.name, value.value))
    base = _base(type(value))
    if base is None or base is type(value):
        return None
    if object.__getstate__(value):
        raise FormatError(
            f"an object of type {_name(type(value))} has attributes of its own, which cannot be stored; turn it into "
            "numbers, text, lists and dicts first"
        )
    return CustomValue(_name(type(value)), _PLAIN_OF[base](value))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_name(value: Any) -> str:
    """Return the class of a value as reports name it: without a module if it is built in."""
    return _name(type(value)).removeprefix("builtins.")


def _base(cls: type) -> type | None:
    """Return the plain type that a class is or extends. torch.Size counts as a plain type."""
    return None if cls is torch.Size else next((base for base in _PLAIN_OF if issubclass(cls, base)), None)


def sequence_kind(value: Any) -> str | None:
    """Return the kind of a sequence that is taken apart: "list", "tuple", "deque" or, with a
    maximum length, "deque:8"; for a derived class, "tuple:app.P". None for other values, and for
    those that have attributes besides items."""
    cls = type(value)
    if cls is tuple or cls is list:
        return cls.__name__
    if cls is deque:
        return "deque" if value.maxlen is None else f"deque:{value.maxlen}"
    if not isinstance(value, tuple | list) or cls is torch.Size or object.__getstate__(value):
        return None
    base = tuple if isinstance(value, tuple) else list
    return f"{base.__name__}:{_name(cls)}"


def mapping_kind(value: Mapping[Any, Any]) -> str:
    """ "dict"; or, with what a plain dict does not say, "dict:collections.OrderedDict", and
    "dict:dict[app.Mode]" for keys of a class that is saved as text or numbers. Mappings of this
    library are dicts to everyone."""
    cls = type(value)
    keys = set(map(type, value.keys())) - {str, int}
    if not keys and (cls is dict or cls.__module__.startswith("reshard.")):
        return "dict"
    return f"dict:{class_name(value)}" + (f"[{','.join(sorted(map(_name, keys)))}]" if keys else "")


def builtin_kinds(
    containers: Mapping[KeyPath, str], leaves: Collection[KeyPath]
) -> tuple[dict[KeyPath, str], dict[str, tuple[str, str]]]:
    """Return the same containers as dicts, lists, tuples, and plain tensors, which other programs
    read without the original classes. Also return, by key, these classes and their replacements.
    `leaves` are the paths of all values."""
    kinds: dict[KeyPath, str] = {}
    changed_classes: dict[str, tuple[str, str]] = {}
    for path, kind in containers.items():
        base, _, name = kind.partition(":")
        if base == "tensor":
            changed_classes[key_of(path)] = name, "Tensor" if path in leaves else "dict"
        else:
            kinds[path] = "list" if base == "deque" else base
            if kinds[path] != kind:
                changed_classes[key_of(path)] = base if base == "deque" else name, kinds[path]
    return kinds, changed_classes


def make_sequence(kind: str, items: Iterable[Any]) -> Any:
    """Return a sequence of a kind that `sequence_kind` returns. Raises FormatError for any other."""
    base, _, rest = kind.partition(":")
    if base == "deque" and (not rest or rest.isdecimal()):
        return deque(items, int(rest) if rest else None)
    if base not in ("list", "tuple"):
        raise FormatError(f"{kind!r} is not a kind of container that is known here")
    plain = list(items) if base == "list" else tuple(items)
    return CustomValue(rest, plain) if rest else plain


def rebuilt(live: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return a tuple of the type of `live` with other items."""
    return tuple(items) if type(live) is tuple else _make(type(live), tuple(items))


def restore_types(value: Any, live: Any) -> Any:
    """Return `value` in the type of `live`, if it is plain data for that type, including the
    contents of containers. Otherwise, return `value`. Neither is changed. A remaining `CustomValue`
    needs a class that does not occur in `live` (see `unresolved_class`)."""
    if unresolved_class(value) is not None:
        classes: dict[str, type] = {}  # those that a saved value may ask for, by name
        for cls in map(type, nested(live)):
            if issubclass(cls, Enum) or _base(cls) not in (None, cls):
                classes.setdefault(_name(cls), cls)
        value = _resolved(value, classes)
    return _alike(value, live)


def unresolved_class(value: Any) -> str | None:
    """Return the class of the first value of a nest that is still a `CustomValue`."""
    return next((one.name for one in nested(value) if isinstance(one, CustomValue)), None)


def nested(value: Any) -> Iterator[Any]:
    """Yield a value and everything inside it: keys and values of mappings and namespaces, items of
    sequences and sets. Omits plain items if all items are plain."""
    yield value
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        value = (*value.keys(), *value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)) and not set(map(type, value)) <= _ATOMS:
        for part in value:
            yield from nested(part)


def needs_class(name: str) -> str:
    """Return what to say of a value of a class that no live value brings."""
    return f"saved as a {name}, which a load restores only if the target has one: put one there, or leave the key out"


def _resolved(value: Any, classes: Mapping[str, type]) -> Any:
    """Return the nest with `CustomValue`s replaced by values, if their classes are known."""
    if isinstance(value, CustomValue):
        plain = _resolved(value.value, classes)
        cls = classes.get(value.name)
        made = None if cls is None else _make(cls, plain)
        return CustomValue(value.name, plain) if made is None else made
    if isinstance(value, dict):
        return {_resolved(key, classes): _resolved(item, classes) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((_resolved(item, classes) for item in value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_resolved(item, classes) for item in value)
    return value


def _make(cls: type, plain: Any) -> Any:
    """Make a value of a class from the plain one, without calling `__init__`. None if the class
    changes the value."""
    try:
        if issubclass(cls, Enum):
            member = cls(plain[1])
            return member if member.name == plain[0] else None
        new: Any = tuple.__new__ if hasattr(cls, "_fields") else cls.__new__
        made = new(cls, plain)
        if isinstance(made, list):
            made[:] = plain
    except (TypeError, ValueError, LookupError):
        return None
    base = _base(cls)
    return made if type(made) is cls and base is not None and _same(_PLAIN_OF[base](made), plain) else None


def _same(a: Any, b: Any) -> bool:
    """Return whether two plain values are the same. For sequences, whether their items are the same
    objects."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b))
    return bool(a == b) or (a != a and b != b)


def _alike(value: Any, live: Any) -> Any:
    """Return `value` in the type of `live`, if that is a type that plain data represents."""
    if isinstance(value, bytes) and isinstance(live, io.BytesIO):
        return io.BytesIO(value)
    if isinstance(value, str) and isinstance(live, torch.device | PurePath):
        return type(live)(value)
    if isinstance(value, dict) and isinstance(live, argparse.Namespace | types.SimpleNamespace):
        return type(live)(**_alike(value, vars(live)))
    if isinstance(value, dict) and isinstance(live, Mapping):
        own = {key: key for key in live if type(key) not in (str, int, bool)}  # keys of other classes may be equal
        items = {
            own.get(k, k): _alike(item, live[k]) if k in live else item for k, item in _in_order(value, live).items()
        }
        return items if type(live) is dict else _mapping(items, live)
    if isinstance(value, _SEQUENCES) and isinstance(live, _SEQUENCES):
        kind = live if type(value) in (list, tuple) and type(live) not in (list, tuple) else value
        if len(value) == len(live):
            return _with_items(kind, [*map(_alike, value, live)], value)
        return value if kind is value else _with_items(kind, [*value], value)
    return value


def _in_order(value: dict[Any, Any], live: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `value` with empty containers, whose positions are not saved, at their positions in
    `live`. Nothing else moves."""
    empty = {key for key, item in value.items() if isinstance(item, (dict, *_SEQUENCES)) and not item}
    order = [key for key in live if key in value] if empty else []
    is_same = [key for key in order if key not in empty] == [key for key in value if key not in empty]
    return {key: value[key] for key in order} if len(order) == len(value) and is_same else value


def _with_items(kind: Sequence[Any], items: list[Any], value: Sequence[Any]) -> Any:
    """Return a sequence like `kind` of these items, or one like `value`, which has the same items,
    if the class of `kind` changes them."""
    if isinstance(kind, deque):
        made: Any = deque(items, kind.maxlen)
        if len(made) == len(items):
            return made
    elif type(kind) not in (list, tuple):
        made = _make(type(kind), tuple(items) if isinstance(kind, tuple) else items)
        if made is not None:
            return made
    return (list if isinstance(value, list) else tuple)(items) if type(value) in (list, tuple) else value


def _mapping(items: dict[Any, Any], live: Mapping[Any, Any]) -> Any:
    """Return a mapping of the type of `live`, with everything else that it has besides items: a
    default, or a method that a scheduler calls after a load."""
    if isinstance(live, types.MappingProxyType):
        return types.MappingProxyType(items)
    try:
        out: Any = copy.copy(live)
        out.clear()
        out.update(items)
    except (TypeError, AttributeError, ValueError, NotImplementedError):
        return CustomValue(_name(type(live)), items)
    return out if dict(out) == items else CustomValue(_name(type(live)), items)
