"""What every format gives: named stored tensors, plain objects, and what it knows beyond these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from reshard.errors import FormatError
from reshard.formats.stored.checksums import Checking
from reshard.formats.stored.source import Files, FileSource
from reshard.formats.stored.tensor import StoredTensor
from reshard.storage.base import Storage

__all__ = ["Contents", "Facts", "Format", "LazyMapping", "merge"]

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound="Facts")


class LazyMapping(Mapping[K, V], Generic[K, V]):
    """A mapping whose keys are known and whose values are made, once, when asked for."""

    def __init__(self, makers: Mapping[K, Callable[[], V]]) -> None:
        self._makers = makers
        self._made: dict[K, V] = {}

    def __getitem__(self, name: K) -> V:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[K]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Facts:
    """What a format knows beyond `Contents`. Each that knows something has a class of its own."""

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the checkpoint beside its tensors, such as a file of a rank that is missing."""
        return ()


@dataclass(frozen=True)
class Contents:
    """A checkpoint as its format tells it, under the keys as stored."""

    format: str
    """Name of the format, such as `"dcp"`."""
    tensors: Mapping[str, StoredTensor]
    """May make a tensor only when asked for it."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Everything that is no tensor, as plain data; may read an object only when asked for it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of stored tensors: tied weights that are stored once."""
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The path of each key in the nested state that was saved, where it is not just the key, see `state.tree`."""
    facts: Facts | None = None
    """What this format knows beyond that, see `facts_of`."""
    fingerprints: Mapping[str, str] | None = None
    """Digests of the tensors' values, where they were saved."""
    warnings: tuple[str, ...] = ()
    """What a reader should know: files that were ignored, objects that could not be represented."""
    containers: Mapping[tuple[Any, ...], str] = field(default_factory=dict)
    """Kinds of containers on those paths that are tuples or empty, or of a class (see `reshard.state.tree.Flat`)."""
    subset: tuple[str, ...] | None = None
    """The globs that chose what was saved, where a checkpoint is declared to be a part of something."""
    files: tuple[FileSource, ...] = ()
    """The files that were looked at, if it was opened from a folder."""
    checking: Checking = field(default_factory=Checking, compare=False)
    """How the bytes of its files are checked, and how many were."""
    per_rank: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Values that are each rank's own, by key and rank: a `StoredTensor` or plain data."""
    left_out: tuple[str, ...] = ()
    """Keys of what was opened that have no place here, such as each rank's own values among canonical names."""

    def facts_of(self, kind: type[F]) -> F | None:
        """What the format knows, if that is of this kind."""
        return self.facts if isinstance(self.facts, kind) else None

    def find(self, name: str) -> StoredTensor | None:
        """The tensor of a name, or of one that is tied to it; None if there is none."""
        if name in self.tensors:
            return self.tensors[name]
        kept = self.aliases.get(name, "")
        return self.tensors[kept].renamed(name) if kept in self.tensors else None


class Format(Protocol):
    """What the reader of a format offers: a module of `reshard.formats`."""

    name: str
    looks_for: str  # the files that mark it, for the message when nothing fits
    checksums: str  # what they leave open: `EVERY_BLOCK`, `CRC_OF_RECORDS` or `NO_CHECKSUMS`

    def detect(self, storage: Storage, names: Mapping[str, int]) -> bool:
        """Whether the files `names` (name to size in bytes) look like this format: cheap, mostly by names."""

    def open(self, files: Files) -> Contents:
        """What the files hold: names, shapes and where the bytes are, but no bytes of tensors.

        Raises FormatError or DamagedCheckpointError, naming the file.
        """


def merge(name: str, parts: Iterable[tuple[str, Contents]], facts: Facts | None = None) -> Contents:
    """The contents of all parts, each under its section ("" for keys as they are).

    Raises FormatError if two parts have the same key.
    """
    tensors: dict[str, Callable[[], StoredTensor]] = {}
    objects: dict[str, Callable[[], Any]] = {}
    aliases: dict[str, str] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    containers: dict[tuple[Any, ...], str] = {}
    warnings: list[str] = []
    for section, part in parts:
        front = (section,) if section else ()
        dotted = section + "." if section else ""
        for key in (*part.tensors, *part.objects):
            full = dotted + key
            if full in tensors or full in objects:
                raise FormatError(f"two parts of the checkpoint have the key {full!r}")
            paths[full] = (*front, *part.paths.get(key, (key,)))
            if key in part.tensors:
                tensors[full] = partial(_tensor, part, key, full)
            else:
                objects[full] = partial(part.objects.__getitem__, key)
        for key, target in part.aliases.items():
            aliases[dotted + key] = dotted + target
            paths[dotted + key] = (*front, *part.paths.get(key, (key,)))
        containers.update({(*front, *path): kind for path, kind in part.containers.items()})
        warnings += part.warnings
    return Contents(
        name, LazyMapping(tensors), LazyMapping(objects), aliases, paths, facts,
        warnings=tuple(warnings), containers=containers,
    )  # fmt: skip


def _tensor(part: Contents, key: str, full: str) -> StoredTensor:
    return part.tensors[key].renamed(full)
