"""The intersection of two layouts of one tensor, before and after: the geometry under transfers.

A *source* is a distinct region of the layout before, numbered from 0, with the ranks that hold it. A receiver is a rank
of the layout after. Both kinds of intersection answer alike; the product kind, which is made of the same overlap as
loads are, does so without listing ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from planners.errors import CoverageError
from planners.geometry.box import Box
from planners.geometry.layout_forms import Form, ProductGeometry
from planners.geometry.overlap import ProductOverlap, Sweep, overlap_of
from planners.geometry.ownership import Ints, SegmentRow, Segments

__all__ = ["Block", "Common", "Holders", "Intersection", "ProductIntersection", "SweepIntersection", "intersection_of"]

_BLOCK_DELIVERIES = 1 << 20


class Common(NamedTuple):
    """One box of elements that a source and a receiver have in common."""

    box: Box
    """In global coordinates."""
    source: Box
    """In the coordinates of the holder's local tensor."""
    target: Box
    """In the coordinates of the receiver's local tensor."""
    source_part: int
    """Which of the holder's local tensors."""
    target_part: int
    """Which of the receiver's local tensors."""


class Block(NamedTuple):
    """Deliveries as columns, sorted by source and receiver; no source is divided among blocks."""

    source: Ints
    receiver: Ints
    numel: Ints


class Holders:
    """The ranks that hold each source."""

    def __init__(self, indptr: Ints, ranks: Ints) -> None:
        """Ranks of source s, ascending: `ranks[indptr[s]:indptr[s + 1]]`."""
        self.indptr, self.ranks = indptr, ranks
        self.counts = np.diff(indptr)

    @cached_property
    def source_of(self) -> Ints:
        """The source of each entry of `ranks`."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)

    @cached_property
    def _keys(self) -> Ints:
        return self.source_of << 32 | self.ranks

    def between(self, sources: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Where in `ranks` those holders of each source begin and end that lie in first <= rank < last."""
        base = np.asarray(sources, dtype=np.int64) << 32
        return (
            np.asarray(np.searchsorted(self._keys, base | first), dtype=np.int64),
            np.asarray(np.searchsorted(self._keys, base | last), dtype=np.int64),
        )

    def hold(self, sources: Ints, ranks: Ints) -> npt.NDArray[np.bool_]:
        """Whether each rank holds the source beside it."""
        begin, end = self.between(sources, ranks, ranks + 1)
        return end > begin


class Intersection(Protocol):
    """All that transfers of one geometry ask for."""

    @property
    def holders(self) -> Holders: ...

    @property
    def overlap(self) -> ProductOverlap | None:
        """The tables of all dims, if both sides are products."""

    def sources(self, receiver: int) -> Sequence[int]:
        """Sources that `receiver` needs something of, ascending."""

    def sources_of(self, rank: int) -> Sequence[int]:
        """Sources that `rank` holds, ascending."""

    def receivers(self, source: int) -> Ints:
        """Ranks that need something of `source`, ascending."""

    def commons(self, source: int, receiver: int) -> tuple[Common, ...]:
        """What they have in common, in the order of the receiver's local elements."""

    def blocks(self) -> Iterator[Block]:
        """Every (source, receiver) with the elements between them, those that the receiver holds itself included."""

    def counts(self, world_size: int) -> Ints:
        """How many boxes each rank has in common with sources, its own included."""

    def local_numels(self, world_size: int) -> Ints:
        """Elements that each rank needs and holds itself."""

    def source_numels(self) -> tuple[Ints, int] | None:
        """(elements of each source, how many ranks need each), if that is all that there is to know, else None."""


@dataclass(frozen=True)
class ProductIntersection:
    """Both sides are products: one table per dim of the owners that have elements in common."""

    overlap: ProductOverlap

    @property
    def before(self) -> ProductGeometry:
        """The layout that holds the sources."""
        return self.overlap.saved

    @property
    def after(self) -> ProductGeometry:
        """The layout of the receivers."""
        return self.overlap.wanted

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Owners of each dim before: sources are numbered row-major over them."""
        return tuple(own.owners for own in self.before.dims)

    @cached_property
    def holders(self) -> Holders:
        base = _outer_sum(self.before.dim_positions)
        ranks = np.sort(self.before.mesh.ranks[base[:, None] + self.before.replica_positions], axis=1)
        return Holders(np.arange(len(base) + 1, dtype=np.int64) * ranks.shape[1], ranks.reshape(-1))

    @cached_property
    def tables(self) -> tuple[_DimTable, ...]:
        """Per dim: which owners have elements in common."""
        return tuple(_DimTable(segments) for segments in self.overlap.dims)

    def sources(self, receiver: int) -> Sequence[int]:
        if receiver not in self.after.mesh:
            return ()
        found = [table.givers(o) for table, o in zip(self.tables, self.after.owners_of(receiver))]
        return [self._number(combo) for combo in itertools.product(*found)]

    def sources_of(self, rank: int) -> Sequence[int]:
        return (self._number(self.before.owners_of(rank)),) if rank in self.before.mesh else ()

    def receivers(self, source: int) -> Ints:
        found = [
            positions[table.takers(o)]
            for table, positions, o in zip(self.tables, self.after.dim_positions, self._owners(source))
        ]
        base = _outer_sum(found)
        return np.sort(self.after.mesh.ranks[(base[:, None] + self.after.replica_positions).reshape(-1)])

    def commons(self, source: int, receiver: int) -> tuple[Common, ...]:
        owners = zip(self._owners(source), self.after.owners_of(receiver))
        return tuple(_commons([table.rows(s, w) for table, (s, w) in zip(self.tables, owners)]))

    def blocks(self) -> Iterator[Block]:
        source = _outer_sum([table.giver * step for table, step in zip(self.tables, _steps(self.shape))])
        base = _outer_sum([at[table.taker] for table, at in zip(self.tables, self.after.dim_positions)])
        numel = np.ones(1, dtype=np.int64)
        for table in self.tables:
            numel = (numel[:, None] * table.length).reshape(-1)
        order = np.argsort(source, kind="stable")
        source, base, numel = source[order], base[order], numel[order]
        replicas = self.after.replica_positions
        begin = end = 0
        for last in [*(np.flatnonzero(source[1:] != source[:-1]) + 1).tolist(), len(source)]:
            if (last - begin) * len(replicas) > _BLOCK_DELIVERIES and end > begin:
                yield self._block(source[begin:end], base[begin:end], numel[begin:end])
                begin = end
            end = last
        if end > begin:
            yield self._block(source[begin:end], base[begin:end], numel[begin:end])

    def _block(self, source: Ints, base: Ints, numel: Ints) -> Block:
        replicas = self.after.replica_positions
        receiver = self.after.mesh.ranks[(base[:, None] + replicas).reshape(-1)]
        sources, numels = np.repeat(source, len(replicas)), np.repeat(numel, len(replicas))
        order = np.lexsort((receiver, sources))
        return Block(sources[order], receiver[order], numels[order])

    def counts(self, world_size: int) -> Ints:
        numbers = np.ones(self.after.mesh.size, dtype=np.int64)
        for segments, owner in zip(self.overlap.dims, self.after.rank_owners):
            numbers *= np.diff(segments.indptr)[owner]
        out = np.zeros(world_size, dtype=np.int64)
        out[self.after.mesh.ranks] = numbers
        return out

    def local_numels(self, world_size: int) -> Ints:
        out = np.zeros(world_size, dtype=np.int64)
        ranks = np.intersect1d(self.before.mesh.ranks, self.after.mesh.ranks)
        was, will = self.before.mesh.positions(ranks), self.after.mesh.positions(ranks)
        numel = np.ones(len(ranks), dtype=np.int64)
        for d, table in enumerate(self.tables):
            numel *= table.lengths(self.before.rank_owners[d][was], self.after.rank_owners[d][will])
        out[ranks] = numel
        return out

    def source_numels(self) -> tuple[Ints, int]:
        numel = np.ones(1, dtype=np.int64)
        for own, table in zip(self.before.dims, self.tables):
            wanted = np.bincount(table.giver, weights=table.length, minlength=own.owners)
            numel = (numel[:, None] * wanted.astype(np.int64)).reshape(-1)
        return numel, len(self.after.replica_positions)

    def _number(self, owners: Sequence[int]) -> int:
        number = 0
        for owner, size in zip(owners, self.shape):
            number = number * size + owner
        return number

    def _owners(self, source: int) -> tuple[int, ...]:
        out = []
        for size in reversed(self.shape):
            source, owner = divmod(source, size)
            out.append(owner)
        return tuple(reversed(out))


class _DimTable:
    """Which owners of a dim have elements in common, sorted by giver and taker, and how many."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._takers = max(segments.wanted.owners, 1)
        keys, inverse = np.unique(segments.saved_owner * self._takers + segments.wanted_owner, return_inverse=True)
        self._keys = keys
        self.giver, self.taker = np.divmod(keys, self._takers)
        self.length = np.zeros(len(keys), dtype=np.int64)
        np.add.at(self.length, inverse, segments.stops - segments.starts)
        self._from = np.searchsorted(self.giver, np.arange(segments.saved.owners + 1))
        self._by_taker = np.argsort(self.taker, kind="stable")
        self._to = np.searchsorted(self.taker[self._by_taker], np.arange(segments.wanted.owners + 1))
        self._rows: dict[tuple[int, int], list[SegmentRow]] = {}

    def takers(self, giver: int) -> Ints:
        return np.asarray(self.taker[self._from[giver] : self._from[giver + 1]], dtype=np.int64)

    def givers(self, taker: int) -> list[int]:
        rows = self._by_taker[self._to[taker] : self._to[taker + 1]]
        return [int(giver) for giver in self.giver[rows]]

    def lengths(self, givers: Ints, takers: Ints) -> Ints:
        """Elements between each giver and the taker beside it; 0 where they do not meet."""
        if not len(self._keys):
            return np.zeros(len(givers), dtype=np.int64)
        wanted = givers * self._takers + takers
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.asarray(np.where(self._keys[at] == wanted, self.length[at], 0), dtype=np.int64)

    def rows(self, giver: int, taker: int) -> list[SegmentRow]:
        """Their segments, in the order of the taker's local dim."""
        if (giver, taker) not in self._rows:
            fresh: dict[tuple[int, int], list[SegmentRow]] = {}
            for row in self._segments.rows(taker):
                fresh.setdefault((row.saved_owner, taker), []).append(row)
            self._rows |= fresh
        return self._rows[giver, taker]


def _commons(rows: list[list[SegmentRow]]) -> Iterator[Common]:
    for combo in itertools.product(*rows):
        sizes = tuple(row.size for row in combo)
        yield Common(
            Box.of(tuple(row.start for row in combo), sizes),
            Box.of(tuple(row.saved_local_start for row in combo), sizes),
            Box.of(tuple(row.local_start for row in combo), sizes),
            0,
            0,
        )


def _outer_sum(columns: Sequence[Ints]) -> Ints:
    out = np.zeros(1, dtype=np.int64)
    for column in columns:
        out = (out[:, None] + column).reshape(-1)
    return out


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


class SweepIntersection:
    """At least one side is no product: every receiver's boxes are swept over all that is held."""

    overlap: ProductOverlap | None = None

    def __init__(self, shape: tuple[int, ...], before: Form, after: Form) -> None:
        """Raises CoverageError (with rank and region) where nobody holds what a receiver needs."""
        self._sources: list[tuple[Box, int, Box]] = []
        self._held: dict[int, list[int]] = {}
        self.holders = self._find_holders(shape, before)
        sweep = Sweep((s, box) for s, (box, _, _) in enumerate(self._sources))
        self._commons: dict[int, dict[int, list[Common]]] = {}
        for rank in after.ranks():
            mine: dict[int, list[Common]] = {}
            own = set(self._held.get(rank, ()))
            for index, part in enumerate(after.parts(shape, rank)):
                for box, local in part.boxes():
                    try:
                        pieces = sweep.covering(box, prefer=own)
                    except CoverageError as error:
                        raise CoverageError("nobody holds what is needed", rank=rank, box=error.box) from None
                    for s, chunk, common in pieces:
                        _, source_part, at = self._sources[s]
                        source = common.relative_to(chunk).shift(at.offsets)
                        target = common.relative_to(box).shift(local.offsets)
                        mine.setdefault(s, []).append(Common(common, source, target, source_part, index))
            if mine:
                self._commons[rank] = mine
        rows = sorted((s, rank) for rank, mine in self._commons.items() for s in mine)
        self._source = np.array([s for s, _ in rows], dtype=np.int64)
        self._receiver = np.array([rank for _, rank in rows], dtype=np.int64)
        numels = [sum(c.box.numel for c in self._commons[rank][s]) for s, rank in rows]
        self._numel = np.array(numels, dtype=np.int64)

    def _find_holders(self, shape: tuple[int, ...], before: Form) -> Holders:
        # ranks are replicas of one source if the same box is at the same place of the same local tensor
        found: dict[tuple[Box, int, Box], list[int]] = {}
        for rank in before.ranks():
            for index, part in enumerate(before.parts(shape, rank)):
                for box, local in part.boxes():
                    found.setdefault((box, index, local), []).append(rank)
        self._sources = list(found)
        for s, ranks in enumerate(found.values()):
            for rank in ranks:
                self._held.setdefault(rank, []).append(s)
        counts = [len(ranks) for ranks in found.values()]
        indptr = np.concatenate(([0], np.cumsum(np.array(counts, dtype=np.int64))))
        flat = [rank for ranks in found.values() for rank in sorted(ranks)]
        return Holders(np.asarray(indptr, dtype=np.int64), np.array(flat, dtype=np.int64))

    def sources(self, receiver: int) -> Sequence[int]:
        return sorted(self._commons.get(receiver, ()))

    def sources_of(self, rank: int) -> Sequence[int]:
        return self._held.get(rank, ())

    def receivers(self, source: int) -> Ints:
        low, high = np.searchsorted(self._source, [source, source + 1])
        return self._receiver[low:high]

    def commons(self, source: int, receiver: int) -> tuple[Common, ...]:
        return tuple(self._commons[receiver][source])

    def blocks(self) -> Iterator[Block]:
        if len(self._source):
            yield Block(self._source, self._receiver, self._numel)

    def counts(self, world_size: int) -> Ints:
        out = np.zeros(world_size, dtype=np.int64)
        for rank, mine in self._commons.items():
            out[rank] = sum(map(len, mine.values()))
        return out

    def local_numels(self, world_size: int) -> Ints:
        out = np.zeros(world_size, dtype=np.int64)
        own = self.holders.hold(self._source, self._receiver)
        np.add.at(out, self._receiver[own], self._numel[own])
        return out

    def source_numels(self) -> None:
        return None


@lru_cache(maxsize=256)
def intersection_of(shape: tuple[int, ...], before: Form, after: Form) -> ProductIntersection | SweepIntersection:
    """The intersection of two forms for one shape; computed once for each."""
    overlap = overlap_of(shape, before, after).product
    return SweepIntersection(shape, before, after) if overlap is None else ProductIntersection(overlap)
