"""Which holders of its chunks write the tensors of one geometry: the least loaded first, until loads are level.

Tensors of one geometry have the same chunks with the same holders. Each chunk of all of them is one long strip of
units, laid tensor behind tensor; a unit is a whole chunk, or one row of a large one. The holders of the chunk, least
loaded first, cut the strip among them so that their loads become level:

    loads before   #### ## #            3 tensors     |---a---|---b---|---c---|
    loads after    #### #### ####       holder 2 1 0  |2222222|2222211|1111111|

The assignment is a function of layouts alone and part of the native format: another one needs another format version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout
from planners.geometry.layout_forms import Part, ProductGeometry
from planners.geometry.overlap import Sweep
from planners.geometry.ownership import Ints, distinct

__all__ = ["Assignment", "ChunkTable", "assign"]


class ChunkTable(Protocol):
    """The distinct chunks of a layout, numbered from 0, and who holds them."""

    sizes: Ints
    """Shape of each chunk as a local tensor: (chunks, dims)."""
    indptr: Ints
    """Entries of chunk c are `indptr[c]` to `indptr[c + 1]`."""
    ranks: Ints
    """The rank of each entry, ascending for each chunk."""
    indices: Ints
    """Which of the rank's local tensors the chunk is, for each entry."""

    def part(self, chunk: int) -> Part:
        """The chunk as a local tensor."""

    def meeting(self, box: Box) -> Iterator[int]:
        """The chunks that share an element with `box`."""


class ProductTable:
    """The chunks of a product layout: the combinations of one owner per dim."""

    def __init__(self, product: ProductGeometry) -> None:
        self._product = product
        self.owners = [np.flatnonzero(own.local_sizes) for own in product.dims]
        self.shape = tuple(len(owners) for owners in self.owners)
        base = np.zeros(1, dtype=np.int64)
        for positions, owners in zip(product.dim_positions, self.owners):
            base = (base[:, None] + positions[owners]).reshape(-1)
        index = np.indices(self.shape).reshape(len(self.shape), len(base))
        columns = [own.local_sizes[owners[i]] for own, owners, i in zip(product.dims, self.owners, index)]
        self.sizes = np.stack(columns, axis=1) if columns else np.zeros((len(base), 0), dtype=np.int64)
        holders = np.sort(product.mesh.ranks[base[:, None] + product.replica_positions], axis=1)
        self.ranks = holders.reshape(-1)
        self.indptr = np.arange(len(base) + 1, dtype=np.int64) * holders.shape[1]
        self.indices = np.zeros(len(self.ranks), dtype=np.int64)

    def part(self, chunk: int) -> Part:
        at = np.unravel_index(chunk, self.shape) if self.shape else ()
        return self._product.part([int(owners[i]) for owners, i in zip(self.owners, at)])

    def meeting(self, box: Box) -> Iterator[int]:
        if box.is_empty or 0 in self.shape:
            return
        found = np.zeros(1, dtype=np.int64)
        for (order, starts, stops), own, owners, low, size in zip(
            self._sorted, self._product.dims, self.owners, box.offsets, box.sizes
        ):
            rows = order[np.searchsorted(stops, low, side="right") : np.searchsorted(starts, low + size)]
            here = distinct(np.searchsorted(owners, own.owner_of[rows]))
            found = (found[:, None] * len(owners) + here).reshape(-1)
        yield from found.tolist()

    @cached_property
    def _sorted(self) -> list[tuple[Ints, Ints, Ints]]:
        orders = [np.argsort(own.starts, kind="stable") for own in self._product.dims]
        return [(o, own.starts[o], own.stops[o]) for o, own in zip(orders, self._product.dims)]


class BoxTable:
    """The chunks of an irregular layout: its distinct boxes."""

    def __init__(self, layout: TensorLayout) -> None:
        """Raises PlanError if two boxes overlap without being equal."""
        held: dict[Box, list[tuple[int, int]]] = {}
        for rank in layout.form.ranks():
            for index, part in enumerate(layout.parts(rank)):
                for box, _ in part.boxes():
                    held.setdefault(box, []).append((rank, index))
        self.boxes = list(held)
        self._sweep = Sweep(enumerate(self.boxes))
        for i, box in enumerate(self.boxes):
            for j, other, common in self._sweep.meeting(box):
                if i != j:
                    ranks = f"ranks {held[box][0][0]} and {held[other][0][0]}"
                    raise PlanError(
                        f"{ranks} hold {box} and {other}, which overlap but are not equal", fqn=layout.fqn, box=common
                    )
        places = [sorted(rows) for rows in held.values()]
        self.sizes = np.array([box.sizes for box in self.boxes], dtype=np.int64).reshape(
            len(self.boxes), len(layout.spec.shape)
        )
        self.indptr = np.cumsum([0, *(len(rows) for rows in places)], dtype=np.int64)
        self.ranks = np.array([rank for rows in places for rank, _ in rows], dtype=np.int64)
        self.indices = np.array([index for rows in places for _, index in rows], dtype=np.int64)

    def part(self, chunk: int) -> Part:
        return Part.of_box(self.boxes[chunk])

    def meeting(self, box: Box) -> Iterator[int]:
        yield from (i for i, _, _ in self._sweep.meeting(box))


@dataclass(frozen=True)
class Assignment:
    """Who writes which units of the strips of one geometry."""

    names: tuple[str, ...]
    itemsize: int
    chunks: ChunkTable
    units: Ints
    """Per chunk: how many units one tensor has: 1, or the size of `dims` if it may be divided."""
    dims: Ints
    """Per chunk: its longest dim."""
    ranks: Ints
    """The rank of each entry, in the order in which the holders of a chunk take from its strip."""
    indices: Ints
    """Which of the rank's local tensors, for each entry."""
    ends: Ints
    """Per entry: one past the last unit that it takes; it begins where the one before it ends."""

    def bytes_by_entry(self) -> Ints:
        """Bytes that each entry writes."""
        counts = np.diff(self.chunks.indptr)
        begins = np.concatenate(([0], self.ends[:-1]))
        begins[self.chunks.indptr[:-1]] = 0
        unit_bytes = self.chunks.sizes.prod(axis=1) * self.itemsize // self.units
        return np.asarray((self.ends - begins) * np.repeat(unit_bytes, counts), dtype=np.int64)

    def taken(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, local tensor, first unit, one past the last) that `rank` takes of each of its chunks."""
        order, ranks = self._by_rank
        low, high = np.searchsorted(ranks, [rank, rank + 1])
        for entry in order[low:high].tolist():
            chunk = int(np.searchsorted(self.chunks.indptr, entry, side="right")) - 1
            begin = int(self.ends[entry - 1]) if entry > self.chunks.indptr[chunk] else 0
            yield chunk, int(self.indices[entry]), begin, int(self.ends[entry])

    def takers(self, chunk: int, tensor: int) -> Iterator[tuple[int, int, int]]:
        """(rank, first unit, one past the last) of all that take of the chunk of tensor number `tensor`; units are
        counted from its first."""
        row = slice(int(self.chunks.indptr[chunk]), int(self.chunks.indptr[chunk + 1]))
        units = int(self.units[chunk])
        if row.stop - row.start == 1:  # it has one holder
            yield int(self.ranks[row.start]), 0, units
            return
        ends, ranks, begin = self.ends[row], self.ranks[row], tensor * units
        entry = int(np.searchsorted(ends, begin, side="right"))
        at = begin
        while at < begin + units:
            stop = min(int(ends[entry]), begin + units)
            if stop > at:
                yield int(ranks[entry]), at - begin, stop - begin
            at, entry = stop, entry + 1

    def near(self, box: Box) -> tuple[int, ...]:
        """The chunks that share an element with `box`. Remembered, since tensors of one geometry are asked alike."""
        found = self._near.get(box)
        if found is None:
            found = self._near[box] = tuple(self.chunks.meeting(box))
        return found

    def boxes(self, chunk: int, first: int, last: int) -> Iterator[tuple[Box, Box]]:
        """(global box, the same in the coordinates of the local tensor) of units of a chunk of one tensor."""
        whole = (first, last) == (0, int(self.units[chunk]))
        found = self._boxes.get(chunk)
        if found is None:
            found = self._boxes[chunk] = tuple(self.chunks.part(chunk).boxes())
        for box, local in found:
            if whole:
                yield box, local
                continue
            d = int(self.dims[chunk])
            start, stop = max(first, local.offsets[d]), min(last, local.stops[d])
            if start < stop:
                yield (
                    _cut(box, d, start - local.offsets[d], stop - start),
                    _cut(local, d, start - local.offsets[d], stop - start),
                )

    @cached_property
    def _near(self) -> dict[Box, tuple[int, ...]]:
        return {}

    @cached_property
    def _boxes(self) -> dict[int, tuple[tuple[Box, Box], ...]]:
        return {}

    @cached_property
    def _by_rank(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.ranks, kind="stable")
        return order, self.ranks[order]


def _cut(box: Box, dim: int, skip: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += skip
    sizes[dim] = size
    return Box.of(tuple(offsets), tuple(sizes))


def assign(layout: TensorLayout, names: tuple[str, ...], loads: Ints, divide_above_bytes: int) -> Assignment:
    """Assign the tensors `names`, all placed like `layout`, to the holders of their chunks.

    `loads` has, per rank, the bytes that count against it so far.
    """
    product = layout.product
    chunks: ChunkTable = ProductTable(product) if product is not None else BoxTable(layout)
    nbytes = chunks.sizes.prod(axis=1) * layout.spec.itemsize
    dims = chunks.sizes.argmax(axis=1) if chunks.sizes.shape[1] else np.zeros(len(nbytes), dtype=np.int64)
    longest = chunks.sizes.max(axis=1) if chunks.sizes.shape[1] else np.ones(len(nbytes), dtype=np.int64)
    counts = np.diff(chunks.indptr)
    units = np.where((nbytes >= divide_above_bytes) & (counts > 1), longest, 1)
    ranks, indices = chunks.ranks.copy(), chunks.indices.copy()
    ends = np.repeat(units * len(names), counts)
    if product is None:  # its ranks may hold several chunks, so that each must see what those before it cost
        loads, single = loads.copy(), counts == 1
        np.add.at(loads, chunks.ranks[chunks.indptr[:-1][single]], nbytes[single] * len(names))
    for rows in _batches(counts, shared=product is None):
        entries = chunks.indptr[rows][:, None] + np.arange(counts[rows[0]])
        order = _order(loads[ranks[entries]], rows)
        entries_in_order = np.take_along_axis(entries, order, axis=1)
        ranks[entries], indices[entries] = chunks.ranks[entries_in_order], chunks.indices[entries_in_order]
        unit_bytes = nbytes[rows] // units[rows]
        ends[entries] = _level(loads[ranks[entries]], unit_bytes, units[rows] * len(names))
        if product is None:
            begins = np.concatenate((np.zeros((len(rows), 1), dtype=np.int64), ends[entries][:, :-1]), axis=1)
            loads[ranks[entries]] += (ends[entries] - begins) * unit_bytes[:, None]
    return Assignment(names, layout.spec.itemsize, chunks, units, dims, ranks, indices, ends)


def _batches(counts: Ints, *, shared: bool) -> Iterator[Ints]:
    """Chunks of several holders that can be assigned at once: all of them, or one by one if holders are shared."""
    several = np.flatnonzero(counts > 1)
    if not shared and len(several):
        yield several
    elif shared:
        yield from several[:, None]


def _order(loads: Ints, chunks: Ints) -> Ints:
    """Per chunk, its holders from the least to the most loaded; those that are equal begin elsewhere for each chunk."""
    holders = np.arange(loads.shape[1], dtype=np.int64)
    turned = (holders[None, :] - chunks[:, None]) % loads.shape[1]
    return np.asarray(np.lexsort((turned, loads), axis=1), dtype=np.int64)


def _level(loads: Ints, unit_bytes: Ints, units: Ints) -> Ints:
    """Where each holder's share of a strip ends, so that loads (ascending for each strip) become level.

    Shares are whole units: a holder ends up within one unit of the level.
    """
    total = unit_bytes * units
    holders = np.arange(1, loads.shape[1] + 1, dtype=np.int64)
    below = np.cumsum(loads, axis=1)
    filled = total[:, None] + below
    active = np.maximum((filled // holders > loads).sum(axis=1), 1)[:, None]  # only so many lie below the level
    level, rest = np.divmod(np.take_along_axis(filled, active - 1, axis=1), active)
    poured = holders * level + holders * rest // active - below  # into the first holders together
    ends = (2 * poured + unit_bytes[:, None]) // (2 * unit_bytes[:, None])
    return np.where(holders >= active, units[:, None], np.clip(ends, 0, units[:, None]))
