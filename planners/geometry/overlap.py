"""The overlap of two layouts of one tensor; and whether boxes tile a region exactly once."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planners.errors import CoverageError
from planners.geometry.arrays import Ints, distinct, ints, ones, zeros
from planners.geometry.box import Box, Dims, Shape
from planners.geometry.layout import Form, Found, ProductForm, ProductGeometry, local_boxes
from planners.geometry.ownership import Segments, overlap

# Both kinds answer the same question for a wanted rank: which pieces of which saved chunks go
# where. A view of saved tensors is a third kind, see `planners.geometry.views`.


class Piece(NamedTuple):
    """One overlap of a saved chunk with a local tensor of a wanted rank."""

    owner: int
    """The lowest rank that holds the saved chunk."""
    chunk: Box
    """The saved chunk, in global coordinates of the saved tensor."""
    source: Box
    """The overlap in the chunk's coordinates."""
    target: Box
    """The overlap in the wanted local tensor's coordinates."""
    part: int = 0
    """Index of the wanted rank's local tensor."""
    tensor: int = 0
    """Index of the saved tensor, if the wanted one is a view of several."""
    dims: Dims | None = None
    """The order of the dims of `source` in `target`. None: the same order."""


class FilledSlot(NamedTuple):
    """A constant in a local tensor of a wanted rank."""

    part: int
    """Index of the local tensor."""
    box: Box
    """The box, in the coordinates of the local tensor."""
    value: float


class Origin(NamedTuple):
    """Where a box of the wanted tensor comes from."""

    box: Box
    """The box, in global coordinates of the wanted tensor."""
    tensor: int
    source: Box
    """The box, in global coordinates of the saved tensor."""
    dims: Dims | None


class Overlap(ABC):
    """The pieces of every wanted rank."""

    shape: Shape
    """Shape of the wanted tensor."""
    wanted_form: Form

    @abstractmethod
    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return all pieces of `rank`, by its local tensors. Raises CoverageError, with the region,
        for unsaved elements."""

    def fills(self, rank: int) -> tuple[FilledSlot, ...]:
        """The constants of `rank`."""
        return ()

    def origins(self, box: Box) -> Iterator[Origin]:
        """Yield where the elements of a box of the wanted tensor come from."""
        yield Origin(box, 0, box, None)

    def replicas(self) -> Iterator[Ints]:
        """Group the wanted ranks: ranks in a group are certain to want the same elements."""
        return self.wanted_form.replicas(self.shape)

    def local_boxes(self, rank: int) -> Iterator[tuple[int, Box, Box]]:
        """Return (index of the local tensor, global box, the same box in that tensor's coordinates)
        for everything that `rank` wants."""
        return local_boxes(self.wanted_form, self.shape, rank)


@dataclass(frozen=True)
class ProductOverlap(Overlap):
    """The overlap of two product forms. One table of segments per dim describes it for all ranks."""

    shape: Shape
    wanted_form: ProductForm
    saved: ProductGeometry
    wanted: ProductGeometry
    dims: tuple[Segments, ...]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self.wanted.mesh:
            return ()
        rows = [segments.rows(owner) for segments, owner in zip(self.dims, self.wanted.owners_of(rank))]
        found = []
        for combo in itertools.product(*rows):
            owner = self.saved.lowest_rank(tuple(row.saved_owner for row in combo))
            chunk = Box.of(tuple(row.chunk_start for row in combo), tuple(row.chunk_size for row in combo))
            sizes = tuple(row.size for row in combo)
            source = Box.of(tuple(row.start - row.chunk_start for row in combo), sizes)
            target = Box.of(tuple(row.local_start for row in combo), sizes)
            found.append(Piece(owner, chunk, source, target))
        return tuple(found)


@dataclass(frozen=True)
class SweepOverlap(Overlap):
    """The overlap of two forms, at least one of which is not a product. If saved chunks overlap,
    the first one provides the element."""

    shape: Shape
    saved: Form
    wanted_form: Form

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return tuple(
            Piece(owner, chunk, common.relative_to(chunk), common.moved_with(box, local), index)
            for index, box, local in self.local_boxes(rank)
            for owner, chunk, common in chunks_of(self.shape, self.saved).covering(box)
        )


class Sweep:
    """Boxes sorted along the dim that they divide most, to quickly find those that overlap a given one."""

    def __init__(self, chunks: Iterable[tuple[int, Box]]) -> None:
        """`chunks` gives (owner, box); empty boxes are omitted."""
        table = [(owner, box) for owner, box in chunks if not box.is_empty]
        self.dim, self.chunks = 0, table
        if not table or not table[0][1].ndim:
            return
        lows = ints([box.offsets for _, box in table])
        highs = ints([box.stops for _, box in table])
        self.dim = max(range(lows.shape[1]), key=lambda d: len(distinct(lows[:, d])))
        order = np.lexsort((*lows.T[::-1], lows[:, self.dim]))
        self.chunks = [table[i] for i in order.tolist()]
        self._lows, self._highs = lows[order], highs[order]
        self._reach: Ints = np.maximum.accumulate(self._highs[:, self.dim])

    def meeting(self, box: Box) -> Iterator[Found]:
        """Yield every chunk that shares an element with `box`."""
        if box.is_empty or not self.chunks:
            return
        if not box.ndim:
            yield from ((owner, chunk, box) for owner, chunk in self.chunks)
            return
        low, high = box.offsets[self.dim], box.stops[self.dim]
        first = int(np.searchsorted(self._reach, low, side="right"))
        last = int(np.searchsorted(self._lows[:, self.dim], high, side="left"))
        lows, highs = self._lows[first:last], self._highs[first:last]
        hits = np.flatnonzero(np.all((lows < box.stops) & (highs > box.offsets), axis=1))
        for i in hits.tolist():
            owner, chunk = self.chunks[first + i]
            common = chunk & box
            if common is not None:
                yield owner, chunk, common

    def covering(self, box: Box, prefer: Container[int] = ()) -> list[Found]:
        """Return chunks that together cover `box` exactly once. Where chunks overlap, the first one
        keeps the element, and the others are cropped. Chunks of the owners `prefer` come first.
        Raises CoverageError for a missing region."""
        found = sorted(self.meeting(box), key=lambda row: row[0] not in prefer)
        pieces = [common for _, _, common in found]
        if sum(piece.numel for piece in pieces) == box.numel and tiling_fault([box], pieces) is None:
            return found
        rest, out = [box], []
        for owner, chunk, common in found:
            holes = []
            for hole in rest:
                piece = hole & common
                if piece is None:
                    holes.append(hole)
                else:
                    out.append((owner, chunk, piece))
                    holes.extend(hole - piece)
            rest = holes
        if rest:
            raise CoverageError(f"no saved chunk holds element {rest[0].offsets}", box=rest[0])
        return out


@lru_cache(maxsize=1024)
def chunks_of(shape: Shape, saved: Form) -> ProductGeometry | Sweep:
    """Return the chunks of a form, for use with `covering`. They are sorted once per form."""
    return saved.geometry(shape) if isinstance(saved, ProductForm) else Sweep(saved.chunks(shape))


@lru_cache(maxsize=4096)
def overlap_of(shape: Shape, saved: Form, wanted: Form) -> ProductOverlap | SweepOverlap:
    """Return the overlap of two forms for one shape. It is computed once."""
    if isinstance(saved, ProductForm) and isinstance(wanted, ProductForm):
        left, right = saved.geometry(shape), wanted.geometry(shape)
        dims = tuple(map(overlap, left.dims, right.dims))
        return ProductOverlap(shape, wanted, left, right, dims)
    return SweepOverlap(shape, saved, wanted)


# Do boxes tile a region exactly once? Exact, for any boxes, with a concrete element where they do
# not.


MAX_CELLS = 1 << 22
"""Largest grid that is counted at once. A larger region is split in half."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An element that is not covered exactly once."""

    element: Shape
    """Its index, in the coordinates of the boxes."""
    count: int
    """How many boxes hold it."""
    wanted: int = 1
    """How many should: 0 for an element outside the region."""

    def __str__(self) -> str:
        boxes = f"{self.count or 'no'} box{'es' * (self.count > 1)}"
        return f"element {self.element} is in {boxes}" + ("" if self.wanted else ", but is outside the tensor")


def tiling_fault(region: Sequence[Box], boxes: Sequence[Box]) -> Fault | None:
    """Return None if every element of `region` (disjoint boxes) is in exactly one of `boxes`, and
    no other element is.

    Volumes are not compared, so a gap and an overlap of equal size are both found. The boundaries
    of all boxes form a grid whose cells are counted. A grid that is too large is split in half
    along its longest axis.
    """
    wanted = [box for box in region if not box.is_empty]
    given = [box for box in boxes if not box.is_empty]
    if len(wanted) == 1 and len(given) == 1 and wanted == given:
        return None
    every = wanted + given
    if not every:
        return None
    ndim = every[0].ndim
    if ndim == 0:
        return None if len(wanted) == len(given) else Fault((), len(given), len(wanted))
    lows = ints([box.offsets for box in every])
    highs = ints([box.stops for box in every])
    signs = np.concatenate((np.full(len(wanted), -1), ones(len(given))))
    return _fault(lows, highs, ints(signs))


def _fault(lows: Ints, highs: Ints, signs: Ints) -> Fault | None:
    ndim = lows.shape[1]
    cuts = [distinct(np.concatenate((lows[:, d], highs[:, d]))) for d in range(ndim)]
    cutting = [d for d in range(ndim) if len(cuts[d]) > 2] or [0]
    if len(cutting) < ndim:  # a dim in which all boxes have the same range decides nothing
        fault = _fault(lows[:, cutting], highs[:, cutting], signs)
        found = dict(zip(cutting, fault.element)) if fault else {}
        return fault and replace(fault, element=tuple(found.get(d, int(cut[0])) for d, cut in enumerate(cuts)))
    if math.prod(map(len, cuts)) > MAX_CELLS:
        d = max(range(ndim), key=lambda d: len(cuts[d]))
        middle = cuts[d][len(cuts[d]) // 2]
        for low, high in ((cuts[d][0], middle), (middle, cuts[d][-1])):
            keep = (lows[:, d] < high) & (highs[:, d] > low)
            if keep.any():
                some_lows, some_highs = lows[keep].copy(), highs[keep].copy()
                some_lows[:, d] = np.maximum(some_lows[:, d], low)
                some_highs[:, d] = np.minimum(some_highs[:, d], high)
                fault = _fault(some_lows, some_highs, signs[keep])
                if fault is not None:
                    return fault
        return None
    # +1 or -1 at the corners of every box; the running sum along every dim then counts
    # the boxes over each cell
    balance = _counts(lows, highs, signs, cuts)
    wrong = np.argwhere(balance != 0)
    if not len(wrong):
        return None
    cell = tuple(wrong[0])
    element = tuple(int(cut[i]) for cut, i in zip(cuts, cell))
    inside = np.all((lows <= element) & (highs > element), axis=1)
    return Fault(element, int(np.sum(inside & (signs > 0))), int(np.sum(inside & (signs < 0))))


def _counts(lows: Ints, highs: Ints, signs: Ints, cuts: list[Ints]) -> Ints:
    ndim = lows.shape[1]
    grid = zeros([len(cut) for cut in cuts])
    ends = [[np.searchsorted(cut, side[:, d]) for side in (lows, highs)] for d, cut in enumerate(cuts)]
    for corner in range(1 << ndim):
        at = tuple(ends[d][corner >> d & 1] for d in range(ndim))
        np.add.at(grid, at, signs * (-1) ** corner.bit_count())
    for d in range(ndim):
        grid = np.cumsum(grid, axis=d)
    return grid
