"""A stored tensor: boxes of it, and for each the window of some bytes that holds it.

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

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.cover import tiling_fault
from planners.geometry.dtypes import itemsize
from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.overlap import Sweep
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.source import Source

__all__ = ["LazyChunks", "Place", "StoredChunk", "StoredTensor", "check_cover"]

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
    descriptor_at: int | None = None
    """Where a zip archive's descriptor of a record stands, if the window has as many bytes as the record, whose first
    ones are its first: with strides of a row-major array it is the record."""

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
        self,
        every: Callable[[], Iterable[StoredChunk]],
        near: Callable[[Box], Iterable[StoredChunk]],
        geometry: Hashable = None,
    ) -> None:
        """`every` lists all chunks; `near` finds at least those that share an element with a box. Where there is a
        `geometry`, all tensors with an equal one are cut into the same boxes."""
        self._every = every
        self.near = near
        self.geometry = geometry

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


def check_cover(tensor: StoredTensor, region: Box | None = None) -> None:
    """Raises DamagedCheckpointError unless the chunks hold every element of `region` (default: all) exactly once."""
    wanted = Box.full(tensor.spec.shape) if region is None else region
    if region is None:  # a stored tensor has no chunk outside itself
        inside = [(chunk, chunk.box) for chunk in tensor.chunks if not chunk.box.is_empty]
    else:
        inside = list(tensor.meeting(wanted))
    boxes = [box for _, box in inside]
    fault = tiling_fault([wanted], boxes)
    if fault is None:
        return
    element = Box.of(fault.element, (1,) * wanted.ndim)
    if fault.count > 1:
        (first, a), (second, b) = [row for row in inside if row[1].contains(element)][:2]
        raise DamagedCheckpointError(
            f"tensor {tensor.fqn!r}: elements {a & b} are stored twice, in {_name(first)} and in {_name(second)}; the "
            "checkpoint does not say which is right"
        )
    raise DamagedCheckpointError(
        f"tensor {tensor.fqn!r} of shape {list(tensor.spec.shape)}: elements {_hole(wanted, boxes, element)} are in no "
        f"file of the checkpoint ({len(tensor.chunks)} chunks are); a file or the part of a rank is missing"
    )


def _hole(region: Box, boxes: Sequence[Box], element: Box) -> Box:
    """A part of `region` around `element` that no box covers."""
    left = region
    for box in boxes:
        left = next((piece for piece in left - box if piece.contains(element)), left)
    return left


def _name(chunk: StoredChunk) -> str:
    where = f" ({chunk.source.label})" if chunk.is_located else ""
    return f"the chunk {chunk.box} of writer {chunk.owner}{where}"
