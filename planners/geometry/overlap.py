"""The overlap of two layouts of one tensor: a product of per-dim overlaps, or one general sweep.

Both kinds answer the same question for a wanted rank: which pieces of which saved chunks go where.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from planners.errors import CoverageError
from planners.geometry.box import Box
from planners.geometry.cover import tiling_fault
from planners.geometry.layout_forms import Form, Part, ProductForm, ProductGeometry
from planners.geometry.ownership import Ints, Segments, distinct, overlap

__all__ = ["Overlap", "Piece", "ProductOverlap", "Sweep", "SweepOverlap", "cover", "overlap_of"]


class Piece(NamedTuple):
    """One overlap of a saved chunk with a local tensor of a wanted rank."""

    owner: int
    """The lowest rank that holds the saved chunk."""
    chunk: Box
    """The saved chunk, in global coordinates."""
    source: Box
    """The overlap in the chunk's coordinates."""
    target: Box
    """The overlap in the wanted local tensor's coordinates."""
    part: int
    """Which of the wanted rank's local tensors."""


class Overlap(Protocol):
    """Pieces of every wanted rank."""

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """All pieces of `rank`, in the order of its local elements. Raises CoverageError at a hole."""


@dataclass(frozen=True)
class ProductOverlap:
    """Both sides are products: one table of segments per dim says it all, for all ranks."""

    saved: ProductGeometry
    wanted: ProductGeometry
    dims: tuple[Segments, ...]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self.wanted.mesh:
            return ()
        return self.pieces_of(self.wanted.owners_of(rank))

    def pieces_of(self, owners: tuple[int, ...]) -> tuple[Piece, ...]:
        """Pieces of the wanted part of these owners (one per dim)."""
        return tuple(self._product([_rows(segments, owner) for segments, owner in zip(self.dims, owners)]))

    def _product(self, rows: list[list[_Row]]) -> Iterator[Piece]:
        saved = self.saved
        lowest: dict[tuple[int, ...], int] = {}
        for combo in itertools.product(*rows):
            owners = tuple(row.saved_owner for row in combo)
            rank = lowest.get(owners)
            if rank is None:
                rank = lowest[owners] = saved.lowest_rank(owners)
            sizes = tuple(row.size for row in combo)
            yield Piece(
                rank,
                Box.of(tuple(row.chunk_start for row in combo), tuple(row.chunk_size for row in combo)),
                Box.of(tuple(row.start - row.chunk_start for row in combo), sizes),
                Box.of(tuple(row.local_start for row in combo), sizes),
                0,
            )


class _Row(NamedTuple):
    """One segment of one dim, as plain integers."""

    saved_owner: int
    chunk_start: int
    chunk_size: int
    start: int
    size: int
    local_start: int


def _rows(segments: Segments, owner: int) -> list[_Row]:
    at = slice(segments.indptr[owner], segments.indptr[owner + 1])
    row = segments.saved_row[at]
    chunk_start = segments.saved.starts[row]
    columns = (
        segments.saved.owner_of[row],
        chunk_start,
        segments.saved.stops[row] - chunk_start,
        segments.starts[at],
        segments.stops[at] - segments.starts[at],
        segments.local_starts[at],
    )
    return [_Row(*values) for values in zip(*(column.tolist() for column in columns))]


class Sweep:
    """Boxes sorted along the dim that they cut most, to find quickly those that meet a given one."""

    def __init__(self, chunks: Iterable[tuple[int, Box]]) -> None:
        """`chunks` gives (owner, box); empty boxes are left out."""
        table = [(owner, box) for owner, box in chunks if not box.is_empty]
        self.dim, self.chunks = 0, table
        if not table or not table[0][1].ndim:
            return
        lows = np.array([box.offsets for _, box in table], dtype=np.int64)
        highs = np.array([box.stops for _, box in table], dtype=np.int64)
        self.dim = max(range(lows.shape[1]), key=lambda d: len(distinct(lows[:, d])))
        order = np.lexsort((*lows.T[::-1], lows[:, self.dim]))
        self.chunks = [table[i] for i in order.tolist()]
        self._lows, self._highs = lows[order], highs[order]
        self._reach: Ints = np.maximum.accumulate(self._highs[:, self.dim])

    def meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """(owner, chunk, what it has in common with `box`) of every chunk that shares an element with it."""
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


@dataclass(frozen=True)
class SweepOverlap:
    """At least one side is no product. Where saved chunks overlap one another, the first one gives the element."""

    shape: tuple[int, ...]
    saved: Form
    wanted: Form

    @cached_property
    def _sweep(self) -> Sweep:
        return Sweep(self.saved.chunks(self.shape))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank >= self.wanted.world_size:
            return ()
        return tuple(
            piece
            for index, part in enumerate(self.wanted.parts(self.shape, rank))
            for piece in self._part_pieces(index, part)
        )

    def _part_pieces(self, index: int, part: Part) -> Iterator[Piece]:
        for box, local in part.boxes():
            for owner, chunk, common in cover(box, list(self._sweep.meeting(box))):
                target = common.relative_to(box).shift(local.offsets)
                yield Piece(owner, chunk, common.relative_to(chunk), target, index)


def cover(box: Box, found: list[tuple[int, Box, Box]]) -> list[tuple[int, Box, Box]]:
    """`found`, cut down so that it covers `box` exactly once, earlier ones first. Raises CoverageError at a hole."""
    pieces = [common for _, _, common in found]
    if sum(piece.numel for piece in pieces) == box.numel and tiling_fault([box], pieces) is None:
        return found
    rest, out = [box], []
    for owner, chunk, common in found:
        still = []
        for hole in rest:
            piece = hole & common
            if piece is None:
                still.append(hole)
            else:
                out.append((owner, chunk, piece))
                still.extend(hole - piece)
        rest = still
    if rest:
        raise CoverageError(f"no saved chunk holds element {rest[0].offsets}", box=rest[0])
    return out


@lru_cache(maxsize=4096)
def overlap_of(shape: tuple[int, ...], saved: Form, wanted: Form) -> ProductOverlap | SweepOverlap:
    """The overlap of two forms for one shape; computed once for each."""
    if isinstance(saved, ProductForm) and isinstance(wanted, ProductForm):
        left, right = saved.geometry(shape), wanted.geometry(shape)
        return ProductOverlap(left, right, tuple(overlap(s, w) for s, w in zip(left.dims, right.dims)))
    return SweepOverlap(shape, saved, wanted)
