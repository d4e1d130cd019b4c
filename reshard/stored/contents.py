"""What every reader returns: stored tensors by name, plain objects, and format-specific facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar, cast

from planners.units import format_count
from reshard.errors import CorruptCheckpointError, FormatError, KeyMismatchError, did_you_mean, format_names
from reshard.live import plain_data
from reshard.live.tree import nested
from reshard.state import KeyPath, State, key_of
from reshard.stored.checksums import Checking
from reshard.stored.source import FileSource
from reshard.stored.tensor import StoredTensor

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound="Facts")
Makers = dict[str, Callable[[], Any]]
"""Functions that create values, by key."""
IS_PER_RANK = (
    "it is a per-rank value. reshard.load gives each rank its own, and .contents.per_rank has those of all ranks"
)


@dataclass(eq=False, repr=False)
class LazyMapping(Mapping[K, V], Generic[K, V]):
    """A mapping with known keys. Each value is created once, on first access."""

    _makers: Mapping[K, Callable[[], V]]
    _made: dict[K, V] = field(default_factory=dict)
    per_rank: Collection[str] = ()
    """Keys of per-rank values, which are not in this mapping."""
    where: str = ""
    """Location of the checkpoint, which errors about damage name."""

    def __getitem__(self, name: K) -> V:
        if name not in self._made:
            try:
                self._made[name] = self._makers[name]() if name in self._makers else _no_such(name, self)
            except CorruptCheckpointError as error:
                name_checkpoint(error, self.where)
                raise
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __repr__(self) -> str:
        return f"values of {format_names(self._makers)}"

    def __iter__(self) -> Iterator[K]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def name_checkpoint(error: Exception, url: str) -> None:
    """Add the checkpoint's location to an error that does not name it yet."""
    if isinstance(error, CorruptCheckpointError) and url.rstrip("/") not in str(error):
        error.args = (f"{url}: {error}",)


class PlainValues(dict[str, Any]):
    """Plain values by name."""

    per_rank: Collection[str] = ()

    def __missing__(self, name: str) -> NoReturn:
        _no_such(name, self)


def _no_such(name: Any, known: LazyMapping[Any, Any] | PlainValues) -> NoReturn:
    told = f": {IS_PER_RANK}" if name in known.per_rank else did_you_mean(str(name), map(str, known))
    raise KeyMismatchError(f"there is no {name!r}{told}")


class Facts:
    """Facts of one format. A format that has facts defines a subclass."""

    def problems(self) -> tuple[str, ...]:
        """Return problems of the checkpoint apart from its tensors, such as a missing file of a rank."""
        return ()


NO_FACTS = Facts()


@dataclass(frozen=True)
class Contents(State[StoredTensor]):
    """A checkpoint as its format describes it, under the keys as stored.

    Tensors and objects may be created on first access. Objects are plain data. Per-rank values are
    mappings by rank.
    """

    format: str = field(kw_only=True)
    """Name of the format, such as `"dcp"`."""
    facts: Facts = NO_FACTS
    """Further facts of this format: see `details`."""
    fingerprints: Mapping[str, str] | None = None
    """Fingerprints of tensors, if they were saved."""
    warnings: tuple[str, ...] = ()
    """What users should know, such as ignored files and objects that could not be represented."""
    subset: tuple[str, ...] | None = None
    """If the checkpoint is declared to contain only a part of a state: the globs that selected it."""
    keys_are_text: bool = False
    """Whether the format records dict keys only as text, so that `"2"` may have been 2."""
    files: tuple[FileSource, ...] = ()
    """The files that were looked at, if a folder was opened."""
    checking: Checking = field(default_factory=Checking, compare=False)
    """How the bytes of its files are checked, and how many were."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Newer steps of the run by folder name, and why each was not opened. `warnings` contains the
    same sentences."""
    damaged_steps: tuple[str, ...] = ()
    """Steps in `skipped` whose save had finished, so that data was lost."""
    left_out: tuple[str, ...] = ()
    """Keys of the opened checkpoint that are missing here, such as per-rank values under canonical names."""

    def details(self, kind: type[F]) -> F | None:
        """Return the format's facts if they are of this class, else None."""
        return self.facts if isinstance(self.facts, kind) else None

    def known(self, kind: type[F]) -> F:
        """Return the format's facts, which must be of this class."""
        assert isinstance(self.facts, kind)
        return self.facts

    def refuse_incomplete(self) -> None:
        """Raise CorruptCheckpointError if files of ranks are missing. The remaining files can be
        read by their own paths."""
        if problems := self.problems():
            raise CorruptCheckpointError("; ".join(problems))

    def only(self, keys: Container[str]) -> Contents:
        """Return these contents, restricted to tensors and objects with these keys."""

        def chosen(values: Mapping[str, V]) -> Mapping[str, V]:
            return LazyMapping({key: partial(values.__getitem__, key) for key in values if key in keys})

        aliases = {key: target for key, target in self.aliases.items() if key in keys}
        return replace(self, tensors=chosen(self.tensors), objects=chosen(self.objects), aliases=aliases)

    def problems(self) -> list[str]:
        """Return a sentence for each file that is missing or damaged."""
        return [*self.facts.problems(), *map(str, self.checking.lost or ())]

    def own_in_words(self) -> dict[str, str]:
        """Return, by key, how many ranks have each per-rank value."""
        return {key: f"per-rank value, {format_count(len(values), 'rank')}" for key, values in self.per_rank.items()}

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor of a name or alias, or None if there is none."""
        if name in self.tensors:
            return self.tensors[name]
        kept = self.aliases.get(name, "")
        return self.tensors[kept].renamed(name) if kept in self.tensors else None


class ContentsBuilder:
    """Collects contents while a reader finds them. Tensors and objects are functions, called on
    first access."""

    def __init__(self, where: str) -> None:
        """`where` is the location that errors name."""
        self._where = where
        self._tensors: dict[str, Callable[[], StoredTensor]] = {}
        self._objects: Makers = {}
        self._per_rank: dict[str, Callable[[], Mapping[int, Any]]] = {}
        self.paths: dict[str, KeyPath] = {}
        self.containers: dict[KeyPath, str] = {}
        self.aliases: dict[str, str] = {}

    def claim(self, path: KeyPath, key: str = "") -> str:
        """Reserve and return the key for `path`. Raises FormatError if it is taken."""
        key = key or (key_of(path) if path else "tensor")
        if key in self.paths:
            raise FormatError(f"{self._where}: two values have the key {key!r}")
        self.paths[key] = path
        return key

    def add_tensor(self, key: str, make: Callable[[], StoredTensor]) -> None:
        """Add a tensor under a reserved key."""
        self._tensors[key] = make

    def add_object(self, key: str, make: Callable[[], Any]) -> None:
        """Add a plain object under a reserved key."""
        self._objects[key] = make

    def add_per_rank(self, key: str, makers: Mapping[int, Callable[[], Any]]) -> None:
        """Add a per-rank value under a reserved key."""
        self._per_rank[key] = partial(LazyMapping, makers)

    def build(self, name: str, facts: Facts | None = None, **more: Any) -> Contents:
        """Return the contents. `more` are further fields of `Contents`."""
        return Contents(
            LazyMapping(self._tensors), LazyMapping(self._objects, per_rank=self._per_rank), self.paths,
            self.containers, self.aliases, LazyMapping(self._per_rank), format=name, facts=facts or NO_FACTS, **more,
        )  # fmt: skip


def merge(name: str, parts: Iterable[tuple[str, Contents]], facts: Facts | None = None) -> Contents:
    """Return the contents of all parts, with each key prefixed by its section ("" for no prefix).

    Raises FormatError if two parts have the same key.
    """
    found = ContentsBuilder("parts of the checkpoint")
    warnings: list[str] = []
    for section, part in parts:
        front = (section,) if section else ()
        dotted = section + "." if section else ""
        for key in (*part.tensors, *part.objects):
            full = found.claim((*front, *part.path_of(key)), dotted + key)
            if key in part.tensors:
                found.add_tensor(full, partial(_tensor, part, key, full))
            else:
                found.add_object(full, partial(part.objects.__getitem__, key))
        for key, target in part.aliases.items():
            found.aliases[dotted + key] = dotted + target
            found.paths[dotted + key] = (*front, *part.path_of(key))
        found.containers.update({(*front, *path): kind for path, kind in part.containers.items()})
        warnings += part.warnings
    return found.build(name, facts, warnings=tuple(warnings))


def _tensor(part: Contents, key: str, full: str) -> StoredTensor:
    return part.tensors[key].renamed(full)


# Records describe the objects of unknown classes in a pickle, whose code is never run.


_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class _FrozenType(type):
    """The metaclass of records, so that a pickle cannot set attributes of their classes."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")


class Record(metaclass=_FrozenType):
    """An object of an unknown class, as the pickle describes it. It has no behavior.

    Attributes:
        args: positional arguments of its class or function.
        kwargs: keyword arguments.
        state: the argument of its `__setstate__`, usually a dict of attributes.
        entries: items that were set, if it is like a dict.
        elements: items that were appended or added, if it is like a list or set.
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
        # a checkpoint's metadata has several records per tensor, and hardly any has more than a
        # state
        self.kwargs = kwargs or _NO_KEYWORDS
        self.state = None
        self.entries = ()
        self.elements = ()
        return self

    @property
    def name(self) -> str:
        """The class name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def fields(self) -> dict[str, Any]:
        """The object's attributes, as far as its state has them."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if isinstance(k, str)}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self._grown("entries").append((key, value))

    def append(self, item: Any) -> None:
        """Record an element of a list or set."""
        self._grown("elements").append(item)

    add = append

    def extend(self, items: Any) -> None:
        """Record elements of a list."""
        self._grown("elements").extend(items)

    def _grown(self, which: str) -> list[Any]:
        """Return the list of that name, and create it on first use."""
        if not getattr(self, which):
            setattr(self, which, [])
        return cast("list[Any]", getattr(self, which))

    def __repr__(self) -> str:
        if self.path in plain_data.UNSUPPORTED_TENSORS:
            return f"<{plain_data.UNSUPPORTED_TENSORS[self.path]}>"
        return f"<{self.path}, not known here: args {self.args!r:.60}, state {self.state!r:.60}>"


def make_record_type(module: str, name: str) -> type[Record]:
    """Return a new class of records for `module.name`."""
    members = {"__slots__": (), "path": f"{module}.{name}"}
    return cast("type[Record]", _FrozenType(name.rpartition(".")[2] or "object", (Record,), members))


def is_record_type(value: object) -> TypeGuard[type[Record]]:
    """Return True if `value` is a class of records."""
    return isinstance(value, _FrozenType)


def unknown_class(value: Any) -> str | None:
    """Return the class name of the first record in nested values, or None. Only that class's own
    code could restore it."""
    classes = (one if isinstance(one, type) else type(one) for one in nested(value))
    return next((cls.path for cls in classes if issubclass(cls, Record)), None)


def are_equal(a: Any, b: Any) -> bool:
    """Return True if two values of checkpoints are equal.

    Records are equal if their classes and contents are equal and they contain only plain data.
    """
    if plain_data.are_equal(a, b):
        return True
    try:
        x, y = _described(a), _described(b)
        plain_data.encode_plain(x)  # references to tensors may be equal in files that differ
        return plain_data.are_equal(x, y)
    except (FormatError, RecursionError):
        return False


def _described(value: Any) -> Any:
    """Return the value with every record replaced by a dict."""
    if isinstance(value, Record):
        return {
            "class": value.path,
            "args": _described(value.args),
            "kwargs": _described(dict(value.kwargs)),
            "state": _described(value.state),
            "entries": _described([*value.entries]),
            "elements": _described([*value.elements]),
        }
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    return value


# Names of DCP's files, to detect them without importing the reader.


RANK_METADATA = re.compile(r"__(\d+)\.metadata")
DATA_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]+_)?\d+\.distcp")
"""Data files of DCP. The group is the rank. Names that reshard writes have an ID after the rank."""


def has_dcp(names: Iterable[str]) -> bool:
    """Return True if a top-level file belongs to a DCP checkpoint, even to an incomplete one."""
    return any(name == ".metadata" or RANK_METADATA.fullmatch(name) or DATA_FILE.fullmatch(name) for name in names)
