"""The intervals of a dim that each rank owns, and where those of two layouts overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Ints, distinct, ints, running_sums
from planners.geometry.box import Range
from planners.geometry.mesh import BlockShard, Shard, StridedShard

Cut = Shard | StridedShard | BlockShard


@dataclass(frozen=True, eq=False)
class Ownership:
    """Intervals of a dim of `size` elements. Owner k has rows `indptr[k]` to `indptr[k + 1]`, in
    local order.

    No interval is empty, and no two neighbors in local order touch. Owners are numbered in
    row-major order over the axes that shard the dim, in mesh order. A dim that no axis shards has
    one owner, 0.
    """

    size: int
    starts: Ints
    stops: Ints
    indptr: Ints

    @property
    def owners(self) -> int:
        """Number of owners."""
        return len(self.indptr) - 1

    @cached_property
    def owner_of(self) -> Ints:
        """The owner of each interval."""
        return np.repeat(np.arange(self.owners), np.diff(self.indptr))

    @cached_property
    def local_starts(self) -> Ints:
        """Where each interval begins in its owner's local dim."""
        lengths = self.stops - self.starts
        before = running_sums(lengths)
        return ints(before[:-1] - before[self.indptr[self.owner_of]])

    @cached_property
    def local_sizes(self) -> Ints:
        """Number of elements of each owner."""
        before = running_sums(self.stops - self.starts)
        return ints(np.diff(before[self.indptr]))

    def intervals(self, owner: int) -> tuple[Range, ...]:
        """(start, stop) of each interval of `owner`, in local order."""
        rows = slice(self.indptr[owner], self.indptr[owner + 1])
        return tuple(zip(self.starts[rows].tolist(), self.stops[rows].tolist()))

    @cached_property
    def ascending(self) -> tuple[Ints, Ints, Ints]:
        """(row, start, stop) of the intervals, sorted by where they begin in the dim."""
        order = np.argsort(self.starts, kind="stable")
        return order, self.starts[order], self.stops[order]

    def meeting(self, start: int, stop: int) -> Ints:
        """Return the rows of the intervals that share an element with `[start, stop)`, ascending.
        The range must not be empty."""
        rows, starts, stops = self.ascending
        return rows[np.searchsorted(stops, start, side="right") : np.searchsorted(starts, stop)]

    def uncovered(self) -> tuple[int, str] | None:
        """Return an element that is not owned exactly once, and what is wrong with it. None if the
        intervals tile the dim."""
        _, starts, stops = self.ascending
        starts = np.append(starts, self.size)
        reach = np.maximum.accumulate(np.insert(stops, 0, 0))
        wrong = np.flatnonzero(starts != reach)
        if not len(wrong):
            return None
        start, stop = int(starts[wrong[0]]), int(reach[wrong[0]])
        if stop > self.size:
            return self.size, "is outside the tensor"
        return (stop, "has no owner") if stop < start else (start, "has two owners")


@lru_cache(maxsize=4096)
def ownership(size: int, cuts: tuple[tuple[Cut, int], ...]) -> Ownership:
    """Return the ownership of a dim of `size` elements. `cuts` are pairs (placement, axis size),
    applied from left to right.

    Raises PlanError for blocks that do not add up to the dim, or that come after another placement.
    """
    whole = [] if size == 0 else [0]
    own = Ownership(
        size,
        ints(whole),
        ints([size] * len(whole)),
        ints([0, len(whole)]),
    )
    for i, (placement, parts) in enumerate(cuts):
        own = _cut(own, _bounds(own, placement, parts, first=i == 0))
    return own


def _bounds(own: Ownership, placement: Cut, parts: int, *, first: bool) -> Ints:
    """Return boundaries in each owner's local dim, of shape (owners, pieces, parts + 1): part k of
    piece j of owner c is `[bounds[c, j, k], bounds[c, j, k + 1])`."""
    sizes = own.local_sizes
    if isinstance(placement, BlockShard):
        if not first:
            raise PlanError(
                f"{placement} must be the first placement that shards its dim: its blocks are sharded already"
            )
        if sum(placement.blocks) != own.size:
            total = sum(placement.blocks)
            raise PlanError(f"the blocks of {placement} add up to {total}, but the dim has {own.size} elements")
        edges = running_sums(placement.blocks)[None, :]
    else:
        pieces = min(placement.split_factor, max(own.size, 1)) if isinstance(placement, StridedShard) else 1
        step = -(-sizes // pieces)
        edges = np.minimum(np.arange(pieces + 1)[None, :] * step[:, None], sizes[:, None])
    lengths = np.diff(edges, axis=1)
    step = -(-lengths // parts)
    inner = np.minimum(np.arange(parts + 1) * step[..., None], lengths[..., None])
    return ints(edges[:, :-1, None] + inner)


def _cut(own: Ownership, bounds: Ints) -> Ownership:
    """Divide every owner c into owners (c, k), which get the parts k of all its pieces, in order of
    the pieces."""
    owners, pieces, parts = bounds.shape[0], bounds.shape[1], bounds.shape[2] - 1
    base = running_sums(own.local_sizes)  # all local dims, one after another
    ends = np.minimum(bounds[:, :, 1:] + base[:-1, None, None], base[-1])
    begins = bounds[:, :, :-1] + base[:-1, None, None]
    # split the intervals, in the same order, at every boundary
    position = own.local_starts + base[own.owner_of]
    edges = distinct(np.concatenate((begins.reshape(-1), ends.reshape(-1), position, base[-1:])))
    left, right = edges[:-1], edges[1:]
    row = np.searchsorted(position, left, side="right") - 1
    starts = ints(own.starts[row] + (left - position[row]))
    stops = ints(starts + (right - left))
    # which (c, j, k) each little interval fell into; empty parts take none
    filled = np.flatnonzero((ends > begins).reshape(-1))
    piece = filled[np.searchsorted(begins.reshape(-1)[filled], left, side="right") - 1]
    c, rest = np.divmod(piece, pieces * parts)
    j, k = np.divmod(rest, parts)
    owner = c * parts + k
    order = np.lexsort((left, j, owner))
    return _grouped(own.size, starts[order], stops[order], owner[order], owners * parts)


def _grouped(size: int, starts: Ints, stops: Ints, owner: Ints, owners: int) -> Ownership:
    """Make an ownership from rows that are sorted by owner and local order. Neighbors that touch
    become one interval."""
    if len(starts):
        new = np.ones(len(starts), dtype=bool)
        new[1:] = (starts[1:] != stops[:-1]) | (owner[1:] != owner[:-1])
        last = np.append(np.flatnonzero(new)[1:] - 1, len(starts) - 1)
        starts, stops, owner = starts[new], stops[last], owner[new]
    indptr = running_sums(np.bincount(owner, minlength=owners))
    return Ownership(size, starts, stops, indptr)


@dataclass(frozen=True, eq=False)
class Segments:
    """The common refinement of two ownerships of one dim, as rows sorted by wanted owner and its
    local order.

    Row i says that elements `[starts[i], stops[i])` are in interval `saved_row[i]` of the saved
    ownership and begin at `local_starts[i]` in the local dim of wanted owner `wanted_owner[i]`.
    """

    saved: Ownership
    wanted: Ownership
    starts: Ints
    stops: Ints
    saved_row: Ints
    wanted_owner: Ints
    local_starts: Ints
    indptr: Ints
    """Rows of wanted owner k are `indptr[k]` to `indptr[k + 1]`."""

    @property
    def saved_owner(self) -> Ints:
        """The saved owner of each row."""
        return self.saved.owner_of[self.saved_row]

    def rows(self, wanted_owner: int) -> list[SegmentRow]:
        """Return the rows of one wanted owner, in its local order."""
        at, saved = slice(self.indptr[wanted_owner], self.indptr[wanted_owner + 1]), self.saved
        row, start = self.saved_row[at], self.starts[at]
        chunk_start = saved.starts[row]
        columns = (
            saved.owner_of[row],
            chunk_start,
            saved.stops[row] - chunk_start,
            saved.local_starts[row] + start - chunk_start,
            start,
            self.stops[at] - start,
            self.local_starts[at],
        )
        return [*map(SegmentRow, *(column.tolist() for column in columns))]


class SegmentRow(NamedTuple):
    """A row of `Segments`, in elements."""

    saved_owner: int
    chunk_start: int
    """Where the saved interval begins in the dim."""
    chunk_size: int
    saved_local_start: int
    """Where the row's elements begin in the local dim of the saved owner."""
    start: int
    """Where they begin in the dim."""
    size: int
    local_start: int
    """Where they begin in the local dim of the wanted owner."""


def overlap(saved: Ownership, wanted: Ownership) -> Segments:
    """Merge the boundaries of two ownerships of the same dim. Elements that one side lacks appear
    in no row.

    Cost: the intervals of both sides, sorted once.
    """
    if saved.size != wanted.size:
        raise PlanError(f"a dim of {saved.size} elements does not overlap one of {wanted.size}")
    by_saved, s_starts, s_stops = saved.ascending
    by_wanted, w_starts, w_stops = wanted.ascending
    edges = distinct(np.concatenate((s_starts, s_stops, w_starts, w_stops)))
    starts, stops = edges[:-1], edges[1:]
    s_at = np.searchsorted(s_starts, starts, side="right") - 1
    w_at = np.searchsorted(w_starts, starts, side="right") - 1
    if len(s_starts) and len(w_starts):
        held = (s_at >= 0) & (w_at >= 0) & (s_stops[s_at] >= stops) & (w_stops[w_at] >= stops)
    else:
        held = np.zeros(len(starts), dtype=bool)
    starts, stops, s_row, w_row = starts[held], stops[held], by_saved[s_at[held]], by_wanted[w_at[held]]
    order = np.argsort(w_row, kind="stable")  # rows are grouped by owner, in local order; starts ascend within a row
    starts, stops, s_row, w_row = starts[order], stops[order], s_row[order], w_row[order]
    owner = wanted.owner_of[w_row]
    indptr = running_sums(np.bincount(owner, minlength=wanted.owners))
    return Segments(
        saved=saved,
        wanted=wanted,
        starts=starts,
        stops=stops,
        saved_row=s_row,
        wanted_owner=owner,
        local_starts=wanted.local_starts[w_row] + (starts - wanted.starts[w_row]),
        indptr=indptr,
    )
