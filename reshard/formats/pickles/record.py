"""What a pickle's objects of unknown classes become when nothing is run: records of what the pickle says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, cast

__all__ = ["Record", "make_record_type", "unknown_class"]


_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class _FrozenType(type):
    """The class of records' classes: a pickle cannot set anything on them."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")


class Record(metaclass=_FrozenType):
    """An object of a class that is not known here, as the pickle describes it. It has no behaviour.

    Attributes:
        args: what its class or function was called with.
        kwargs: the same by keyword.
        state: what its `__setstate__` would have got; usually a dict of its attributes.
        entries: items set on it, if it is a kind of dict.
        elements: items appended to it, if it is a kind of list or set.
    """

    __slots__ = ("args", "elements", "entries", "kwargs", "state")

    path = "object"
    """Dotted name of the class or function."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Any
    entries: Sequence[tuple[Any, Any]]
    elements: Sequence[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        self = object.__new__(cls)
        self.args = args
        # metadata of a checkpoint has several records for each tensor, and hardly any has more than its state
        self.kwargs = kwargs or _NO_KEYWORDS
        self.state = None
        self.entries = ()
        self.elements = ()
        return self

    @property
    def name(self) -> str:
        """The last part of `path`: the class without its module."""
        return self.path.rpartition(".")[2]

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that the object had, as far as its state tells."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if isinstance(k, str)}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self._grown("entries").append((key, value))

    def append(self, item: Any) -> None:
        """An element of a kind of list."""
        self._grown("elements").append(item)

    def extend(self, items: Any) -> None:
        """Elements of a kind of list."""
        self._grown("elements").extend(items)

    def add(self, item: Any) -> None:
        """An element of a kind of set."""
        self._grown("elements").append(item)

    def _grown(self, which: str) -> list[Any]:
        """The list of that name, made when the first thing goes into it."""
        if not getattr(self, which):
            setattr(self, which, [])
        return cast("list[Any]", getattr(self, which))

    def __repr__(self) -> str:
        return f"<{self.path}, not known here: args {self.args!r:.60}, state {self.state!r:.60}>"


def make_record_type(module: str, name: str) -> type[Record]:
    """A class of records that stands for `module.name`."""
    members = {"__slots__": (), "path": f"{module}.{name}"}
    return cast("type[Record]", _FrozenType(name.rpartition(".")[2] or "object", (Record,), members))


def unknown_class(value: Any) -> str | None:
    """The class of the first record in a nest of values, which only its own code could make into what it was."""
    if isinstance(value, Record) or (isinstance(value, type) and issubclass(value, Record)):
        return value.path
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return next((found for part in value if (found := unknown_class(part)) is not None), None)
    return None
