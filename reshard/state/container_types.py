"""Values of classes that plain data have no word for, and what comes back in the type of the live value it replaces.

A checkpoint holds plain data only, and nothing in it says what to construct. Of a named tuple, a member of an enum or
an int of a class of its own it has the class's name; the live value has the class itself:

    live {"at": Point(0, 0), "where": device("cpu")}    saved {"at": Typed("app.Point", (3, 4)), "where": "cpu"}
"""

from __future__ import annotations

import argparse
import copy
import io
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from reshard.errors import FormatError

__all__ = [
    "Typed",
    "class_name",
    "make_sequence",
    "mapping_kind",
    "needs_class",
    "rebuilt",
    "retyped",
    "sequence_kind",
    "typed",
    "unmade",
]

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
"""Plain types, and how a value of a class that extends one becomes plain, past what that class overrides."""


@dataclass(frozen=True)
class Typed:
    """A value of a class that only a live value can bring: what is saved of it."""

    name: str
    """Module and class."""
    value: Any
    """The plain value; of a member of an enum, its name and value."""


def typed(value: Any) -> Typed | None:
    """What can be saved of a value whose class extends a plain type or Enum; None for any other value.

    Raises FormatError, naming the class, for a value with attributes of its own, which would be lost.
    """
    if isinstance(value, Enum):
        return Typed(_name(type(value)), (value.name, value.value))
    base = _base(type(value))
    if base is None or base is type(value):
        return None
    if object.__getstate__(value):
        raise FormatError(
            f"an object of type {_name(type(value))} has attributes of its own, which cannot be stored; turn it into "
            "numbers, text, lists and dicts first"
        )
    return Typed(_name(type(value)), _PLAIN_OF[base](value))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_name(value: Any) -> str:
    """The class of a value as reports name it: without a module where it is a builtin."""
    return _name(type(value)).removeprefix("builtins.")


def _base(cls: type) -> type | None:
    """The plain type that a class is or extends; torch.Size is a value of its own."""
    return None if cls is torch.Size else next((base for base in _PLAIN_OF if issubclass(cls, base)), None)


def sequence_kind(value: Any) -> str | None:
    """What kind of sequence is taken apart: "list", "tuple", "deque" or, with a largest length, "deque:8"; of a class
    that extends one, "tuple:app.P". None for what is none, or has attributes besides its items."""
    cls = type(value)
    if cls is tuple or cls is list:
        return cls.__name__
    if cls is deque:
        return "deque" if value.maxlen is None else f"deque:{value.maxlen}"
    base = _base(cls)
    if (base is not tuple and base is not list) or object.__getstate__(value):
        return None
    return f"{base.__name__}:{_name(cls)}"


def mapping_kind(value: Mapping[Any, Any]) -> str:
    """ "dict"; or, with what a plain dict does not tell, "dict:collections.OrderedDict", and "dict:dict[app.Mode]" for
    keys of a class that is saved as text or numbers. Mappings of this library are dicts to everyone."""
    cls = type(value)
    keys = set(map(type, value)) - {str, int}
    if not keys and (cls is dict or cls.__module__.startswith("reshard.")):
        return "dict"
    return f"dict:{class_name(value)}" + (f"[{','.join(sorted(map(_name, keys)))}]" if keys else "")


def make_sequence(kind: str, items: Iterable[Any]) -> Any:
    """A sequence of a kind that `sequence_kind` tells. Raises FormatError for any other."""
    base, _, rest = kind.partition(":")
    if base == "deque" and (not rest or rest.isdecimal()):
        return deque(items, int(rest) if rest else None)
    if base not in ("list", "tuple"):
        raise FormatError(f"{kind!r} is no kind of container that is known here")
    plain = list(items) if base == "list" else tuple(items)
    return Typed(rest, plain) if rest else plain


def rebuilt(live: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """A tuple of the type of `live` with other items."""
    return tuple(items) if type(live) is tuple else _make(type(live), tuple(items))


def retyped(value: Any, live: Any) -> Any:
    """`value`, or the same in the type of `live` where it is plain data for that type; the inside of containers, too.
    Neither is changed. What stays `Typed` needs a class that is nowhere in `live` (see `unmade`)."""
    if unmade(value) is not None:
        classes: dict[str, type] = {}
        _collect(live, classes)
        value = _resolved(value, classes)
    return _alike(value, live)


def unmade(value: Any) -> str | None:
    """The class of the first value of a nest that is still `Typed`."""
    if isinstance(value, Typed):
        return value.name
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)) and not set(map(type, value)) <= _ATOMS:
        parts = value
    return next((found for part in parts if (found := unmade(part)) is not None), None)


def needs_class(name: str) -> str:
    """What to say of a value of a class that no live value brings."""
    return (
        f"saved as a {name}, which is made only where the target has one: put one there, or leave the key out of what "
        "is loaded"
    )


def _collect(live: Any, out: dict[str, type]) -> None:
    """The classes of a live nest that a saved value may ask for, by name."""
    if isinstance(live, Enum) or _base(type(live)) not in (None, type(live)):
        out.setdefault(_name(type(live)), type(live))
    if isinstance(live, argparse.Namespace | types.SimpleNamespace):
        live = vars(live)
    if isinstance(live, Mapping):
        live = (*live, *live.values())
    if isinstance(live, (list, tuple, set, frozenset, deque)) and not set(map(type, live)) <= _ATOMS:
        for part in live:
            _collect(part, out)


def _resolved(value: Any, classes: Mapping[str, type]) -> Any:
    """The nest with what is `Typed` made, as far as the classes go."""
    if isinstance(value, Typed):
        plain = _resolved(value.value, classes)
        cls = classes.get(value.name)
        made = None if cls is None else _make(cls, plain)
        return Typed(value.name, plain) if made is None else made
    if isinstance(value, dict):
        return {_resolved(key, classes): _resolved(item, classes) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((_resolved(item, classes) for item in value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_resolved(item, classes) for item in value)
    return value


def _make(cls: type, plain: Any) -> Any:
    """A value of a class out of the plain one, past its `__init__`; None if the class makes something else of it."""
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
    """Whether two plain values are the same; of sequences, whether their items are the very same objects."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b))
    return bool(a == b) or (a != a and b != b)


def _alike(value: Any, live: Any) -> Any:
    """`value` in the type of `live`, where that is one of those that plain data stand for."""
    if isinstance(value, bytes) and isinstance(live, io.BytesIO):
        return io.BytesIO(value)
    if isinstance(value, str) and isinstance(live, torch.device | PurePath):
        return type(live)(value)
    if isinstance(value, dict) and isinstance(live, argparse.Namespace | types.SimpleNamespace):
        return type(live)(**_alike(value, vars(live)))
    if isinstance(value, dict) and isinstance(live, Mapping):
        own = {key: key for key in live if type(key) not in (str, int, bool)}  # keys of other classes may be equal
        items = {own.get(k, k): _alike(item, live[k]) if k in live else item for k, item in value.items()}
        return items if type(live) is dict else _mapping(items, live)
    if isinstance(value, _SEQUENCES) and isinstance(live, _SEQUENCES) and len(value) == len(live):
        return _with_items(value, [_alike(a, b) for a, b in zip(value, live)])
    return value


def _with_items(value: Sequence[Any], items: list[Any]) -> Any:
    """The same kind of sequence with other items."""
    if isinstance(value, deque):
        return deque(items, value.maxlen)
    if type(value) is list or type(value) is tuple:
        return type(value)(items)
    made = _make(type(value), tuple(items) if isinstance(value, tuple) else items)
    return value if made is None else made


def _mapping(items: dict[Any, Any], live: Mapping[Any, Any]) -> Any:
    """A mapping of the type of `live`, with all that is its own besides the items: a default, a method that a scheduler
    calls after a load."""
    if isinstance(live, types.MappingProxyType):
        return types.MappingProxyType(items)
    try:
        out: Any = copy.copy(live)
        out.clear()
        out.update(items)
    except (TypeError, AttributeError, ValueError, NotImplementedError):
        return Typed(_name(type(live)), items)
    return out if dict(out) == items else Typed(_name(type(live)), items)
