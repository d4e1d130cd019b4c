"""What every format gives: named tensors as sets of (box of the tensor, window of some bytes), and plain objects.

        tensor (6 x 4)            chunk 0: Box[0:3, 0:4]  ->  window of a.distcp, row-major
        +---------+               chunk 1: Box[3:6, 0:4]  ->  window of b.distcp, transposed
        | chunk 0 |
        +---------+               Slices, transpositions, slices of stacks and pieces of flat buffers are
        | chunk 1 |               windows again, so every rearrangement of a checkpoint stays lazy and exact.
        +---------+

Where a chunk's bytes are may take a small read to find out (DCP stores each chunk as an archive of its own), so a chunk
is *located* when its bytes are first asked for, not when the checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, overload

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.dtypes import itemsize
from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.overlap import Sweep
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.source import FileSource, Source
from reshard.storage.base import Storage

__all__ = ["Contents", "Format", "LazyChunks", "LazyMapping", "Place", "StoredChunk", "StoredTensor"]

V = TypeVar("V")

_MANY_CHUNKS = 8
"""With more of them, those that meet a box are searched for in order."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a chunk are: a window in the bytes of a source."""

    source: Source
    window: Window
    conjugate: bool = False
    """Whether the value is the complex conjugate of what is stored (torch stores `x.conj()` as x and a flag);
    `copying.copy_place` sees to it."""

    def with_window(self, window: Window) -> Place:
        """Another window of the same source."""
        return Place(self.source, window, self.conjugate)


class StoredChunk:
    """A box of a tensor, in the tensor's global coordinates, and where its elements are stored.

    `source` and `window` are found on first use; `window.sizes == box.sizes` always.
    """

    __slots__ = ("_locate", "_place", "box", "owner")

    def __init__(self, box: Box, place: Place | Callable[[], Place], owner: int | str = 0) -> None:
        """`place` is the place itself, or a function that finds it; `owner` is the writer's rank or a chunk id.

        Raises DamagedCheckpointError, then or on first use, if the place does not have the box's sizes.
        """
        self.box = box
        self.owner = owner
        self._place: Place | None = None
        self._locate: Callable[[], Place] | None = None
        if isinstance(place, Place):
            self._place = self._checked(place)
        else:
            self._locate = place

    def _checked(self, place: Place) -> Place:
        if place.window.sizes != self.box.sizes:
            raise DamagedCheckpointError(
                f"{place.source.label}: the stored payload has shape {list(place.window.sizes)}, but the checkpoint's "
                f"metadata says {list(self.box.sizes)} for {self.box}; the metadata and the data contradict each other"
            )
        return place

    @property
    def place(self) -> Place:
        """Where the bytes are. Raises DamagedCheckpointError if the file does not hold what the metadata says."""
        if self._place is None:
            assert self._locate is not None
            self._place = self._checked(self._locate())
        return self._place

    @property
    def is_located(self) -> bool:
        """Whether `place` is known already, so that asking for it reads nothing."""
        return self._place is not None

    @property
    def source(self) -> Source:
        """What the window's offsets count in."""
        return self.place.source

    @property
    def window(self) -> Window:
        """Where the elements lie in the source, in the order of the box."""
        return self.place.window

    def derived(self, box: Box, change: Callable[[Window], Window]) -> StoredChunk:
        """A chunk at `box` whose window is `change` of this one's; stays unlocated if this one is."""
        return StoredChunk(box, lambda: (p := self.place).with_window(change(p.window)), self.owner)

    def crop(self, region: Box) -> StoredChunk:
        """The part inside `region`, which lies within the box, in the same global coordinates."""
        inner = region.relative_to(self.box)
        return self if region == self.box else self.derived(region, lambda w: w.crop(inner))

    def shift(self, by: Sequence[int]) -> StoredChunk:
        """The same elements, `by` further on in each dim."""
        return self.derived(self.box.shift(by), lambda w: w)

    def permute(self, dims: Sequence[int]) -> StoredChunk:
        """The same elements of the tensor transposed so that its old dim `dims[i]` is the new dim i."""
        box = Box([self.box.offsets[d] for d in dims], [self.box.sizes[d] for d in dims])
        return self.derived(box, lambda w: w.permute(dims))

    def __repr__(self) -> str:
        return f"StoredChunk({self.box}, {self._place or 'not yet located'}, owner={self.owner!r})"


class LazyChunks(Sequence[StoredChunk]):
    """Chunks that follow from a rule: a few are found without listing all, and all are listed only when asked for.

    The rule answers for chunks within the tensor that do not overlap.
    """

    def __init__(
        self, every: Callable[[], Iterable[StoredChunk]], near: Callable[[Box], Iterable[StoredChunk]]
    ) -> None:
        """`every` lists all chunks; `near` finds at least those that share an element with a box."""
        self._every = every
        self.near = near

    @cached_property
    def _all(self) -> tuple[StoredChunk, ...]:
        return tuple(self._every())

    @overload
    def __getitem__(self, index: int) -> StoredChunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredChunk]: ...
    def __getitem__(self, index: int | slice) -> StoredChunk | Sequence[StoredChunk]:
        return self._all[index]

    def __iter__(self) -> Iterator[StoredChunk]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: what it is, and the chunks that hold it."""

    spec: TensorSpec
    chunks: Sequence[StoredChunk]
    layout: TensorLayout | None = None
    """The saved mesh and placements, where the format knows them."""

    def __post_init__(self) -> None:
        """Raises DamagedCheckpointError for a chunk that lies outside the tensor."""
        if isinstance(self.chunks, LazyChunks):
            return
        whole = Box.full(self.spec.shape)
        for chunk in self.chunks:
            if chunk.box.ndim != whole.ndim or not _within(chunk.box, whole):
                raise DamagedCheckpointError(
                    f"tensor {self.spec.fqn!r}: a stored chunk at {chunk.box} lies outside the shape "
                    f"{list(self.spec.shape)} that the metadata gives"
                )

    @property
    def fqn(self) -> str:
        """The name under which it is stored."""
        return self.spec.fqn

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.spec.dtype)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The chunks' boxes, in the chunks' order."""
        return tuple(chunk.box for chunk in self.chunks)

    def meeting(self, box: Box) -> Iterator[tuple[StoredChunk, Box]]:
        """The chunks that share elements with `box`, which is in global coordinates, and what they share."""
        if isinstance(self.chunks, LazyChunks):
            near: Iterable[StoredChunk] = self.chunks.near(box)
        elif len(self.chunks) <= _MANY_CHUNKS:
            near = self.chunks
        else:
            near = (self.chunks[int(i)] for i, _, _ in self._sweep.meeting(box))
        for chunk in near:
            common = chunk.box & box
            if common is not None:
                yield chunk, common

    @cached_property
    def _sweep(self) -> Sweep:
        return Sweep(enumerate(self.boxes))

    def renamed(self, fqn: str) -> StoredTensor:
        """The same tensor under another name."""
        spec = TensorSpec(fqn, self.spec.shape, self.spec.dtype)
        layout = None if self.layout is None else TensorLayout.of(spec, self.layout.form)
        return StoredTensor(spec, self.chunks, layout)


def _within(box: Box, whole: Box) -> bool:
    """Whether an empty box, too, starts and ends inside `whole`."""
    return all(stop <= size for stop, size in zip(box.stops, whole.sizes))


class LazyMapping(Mapping[str, V], Generic[V]):
    """A mapping whose names are known and whose values are made, once, when asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], V]]) -> None:
        self._makers = makers
        self._made: dict[str, V] = {}

    def __getitem__(self, name: str) -> V:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


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
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What this format knows beyond that, for `normalized()`: sharding types, versions, parameter shapes ..."""
    fingerprints: Mapping[str, str] | None = None
    """Digests of the tensors' values, where they were saved."""
    warnings: tuple[str, ...] = ()
    """What a reader should know: files that were ignored, objects that could not be represented."""
    containers: Mapping[tuple[Any, ...], str] = field(default_factory=dict)
    """Kinds of containers on those paths that are tuples or empty (see `reshard.state.tree.Flat`)."""
    subset: tuple[str, ...] | None = None
    """The globs that chose what was saved, where a checkpoint is declared to be a part of something."""
    files: tuple[FileSource, ...] = ()
    """The files that were looked at, if it was opened from a folder."""


class Format(Protocol):
    """What the reader of a format offers: a module of `reshard.formats`."""

    name: str
    looks_for: str  # the files that mark it, for the message when nothing fits

    def detect(self, storage: Storage, names: Mapping[str, int]) -> bool:
        """Whether the files `names` (name to size in bytes) look like this format: cheap, mostly by names."""

    def open(self, storage: Storage, names: Mapping[str, int]) -> Contents:
        """The checkpoint. Raises FormatError or DamagedCheckpointError, naming the file."""
