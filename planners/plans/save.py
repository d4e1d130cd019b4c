"""Save plans: every distinct chunk is written once, and replicas share the work evenly; with proofs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.findings import Finding
from planners.geometry.arrays import Flags, Ints, distinct, grouped, ints, running_sums, unravel, zeros
from planners.geometry.box import Box, Shape
from planners.geometry.layout import Part, ProductGeometry, StateLayout, TensorLayout, local_boxes
from planners.geometry.overlap import Fault, Sweep, tiling_fault
from planners.plans.plan import Plan, PlanItems, alike, layout_fault

DIVIDE_ABOVE_BYTES = 8 << 20
"""Chunks of at least this many bytes may be divided among the ranks that hold them."""


class WriteItem(NamedTuple):
    """One box of elements that a rank writes."""

    fqn: str
    box: Box
    """The box, in global coordinates. The file stores it as one array."""
    source: Box
    """The same elements, in the coordinates of the rank's local tensor."""
    nbytes: int
    part: int = 0
    """Index of the rank's local tensor of this name."""


class WriteItems(PlanItems[WriteItem]):
    """The items of one rank, by name and then in local order."""

    __slots__ = ()


class SavePlan(Plan[WriteItems]):
    """Which rank writes which chunk, once. Immutable; it depends on the layout alone.

    A plan with explicitly listed items (`with_items`) keeps them, and `verify` checks them.
    """

    __slots__ = ("_place", "_rank_bytes", "assignments", "divide_above_bytes", "layout", "ranks_per_host")

    kind, verb, _Listed = "save", "writes", WriteItems
    _MADE_OF = ("layout", "divide_above_bytes", "ranks_per_host")
    covers = "every element is written exactly once, by a rank that holds it"

    layout: StateLayout
    divide_above_bytes: int
    ranks_per_host: int | None
    assignments: tuple[Assignment, ...]
    """How the tensors of each geometry are assigned."""

    def __init__(
        self,
        layout: StateLayout,
        divide_above_bytes: int = DIVIDE_ABOVE_BYTES,
        ranks_per_host: int | None = None,
        explicit: Mapping[int, Sequence[WriteItem]] | None = None,
    ) -> None:
        if divide_above_bytes < 1 or (ranks_per_host is not None and ranks_per_host < 1):
            raise PlanError(f"limits must be >= 1, got {divide_above_bytes=} and {ranks_per_host=}")
        self.layout, self.divide_above_bytes, self.ranks_per_host = layout, divide_above_bytes, ranks_per_host
        loads = zeros(layout.world_size)
        order, assignments = [], []
        for names in layout.geometries().values():
            first, held = layout[names[0]], np.zeros_like(loads)
            chunks = BoxTable(first) if first.product is None else ProductTable(first.product)
            np.add.at(held, chunks.ranks, np.repeat(chunks.numels, chunks.counts))
            copies = int(held.sum()) // max(first.spec.numel, 1)
            order.append((copies, -int(held.max()) * first.spec.itemsize, names, chunks))
        # first what leaves the least choice of writers, then what is largest: so loads can be evened
        # out later
        for *_, names, chunks in sorted(order, key=lambda row: row[:3]):
            effective = loads if ranks_per_host is None else _effective_loads(loads, ranks_per_host)
            assigned = assign(chunks, tuple(names), layout[names[0]].spec.itemsize, effective, divide_above_bytes)
            unit_bytes = chunks.numels * assigned.itemsize // assigned.units
            units = assigned.ends - assigned.begins
            np.add.at(loads, assigned.ranks, units * np.repeat(unit_bytes, chunks.counts))
            assignments.append(assigned)
        self.assignments = tuple(assignments)
        self._place = {fqn: (assigned, t) for assigned in assignments for t, fqn in enumerate(assigned.names)}
        self._list(layout, layout.world_size, explicit)
        for rank, items in self.explicit.items():
            loads[rank] = items.nbytes
        loads.flags.writeable = False
        self._rank_bytes = loads

    items = Plan[WriteItems].rank_items
    """Return what a rank writes."""

    def _derived(self, rank: int) -> Iterable[WriteItem]:
        out = []
        for assigned in self.assignments:
            for chunk, index, begin, end in assigned.taken(rank):
                units, whole = int(assigned.units[chunk]), None
                for t in range(begin // units, -(-end // units)):
                    first, last = max(begin - t * units, 0), min(end - t * units, units)
                    if (first, last) != (0, units):
                        boxes = list(assigned.boxes(chunk, first, last))
                    else:
                        boxes = whole = whole or list(assigned.boxes(chunk, 0, units))
                    for box, local in boxes:
                        out.append(WriteItem(assigned.names[t], box, local, box.numel * assigned.itemsize, index))
        return sorted(out, key=lambda item: (item.fqn, item.part, item.source))

    def writers(self, fqn: str, chunk: Box) -> tuple[tuple[int, Box], ...]:
        """Return the writers of a chunk: (rank, box in global coordinates). Together, the boxes are
        the chunk.

        `chunk` is one of `layout[fqn].chunks()`, or a box within one. The cost does not depend on
        the number of chunks and ranks. Raises PlanError if no rank holds the chunk.
        """
        found = tuple(self.writers_near(fqn, chunk))
        if not found:
            raise PlanError("no rank holds this chunk", fqn=fqn, box=chunk)
        return found

    def writers_near(self, fqn: str, box: Box) -> Sequence[tuple[int, Box]]:
        """Return (rank, box in global coordinates) of all writes that share an element with `box`."""
        if fqn not in self._place:
            raise PlanError("there is no such tensor in this plan", fqn=fqn)
        assigned, t = self._place[fqn]
        return assigned.writers_near(box, t)

    def rank_bytes(self) -> Ints:
        """Return the bytes that each rank writes. Items are not listed."""
        return self._rank_bytes

    def geometries(self) -> int:
        return len(self.assignments)

    def item_counts(self) -> None:
        return None

    def findings(self) -> Iterator[Finding]:
        """Yield all problems. If no items were listed explicitly, none are computed."""
        if self.explicit:
            yield from _listed_findings(self)
            return
        times = Counter(fqn for assigned in self.assignments for fqn in assigned.names)
        yield from (Finding("is not written", fqn) for fqn in self.layout if fqn not in times)
        yield from (Finding(f"is assigned {count} times", fqn) for fqn, count in times.items() if count > 1)
        for assigned in self.assignments:
            if assigned.names:
                layout = self.layout[assigned.names[0]]
                others = [fqn for fqn in assigned.names if self.layout[fqn].geometry_key != layout.geometry_key]
                yield from (Finding("is assigned with tensors of another geometry", fqn) for fqn in others)
                yield from alike(_assignment_findings(assigned, layout), assigned.names)

    def __repr__(self) -> str:
        return f"SavePlan(tensors={len(self.layout)}, ranks={self.world_size}, bytes={self.total_bytes})"


def plan_writes(
    layout: StateLayout, *, divide_above_bytes: int = DIVIDE_ABOVE_BYTES, ranks_per_host: int | None = None
) -> SavePlan:
    """Plan which rank writes which chunk of `layout`. Each element is written once. The ranks that
    hold the elements write about equal numbers of bytes.

    With `ranks_per_host`, hosts are balanced, too: ranks 0 to ranks_per_host - 1 share the first
    host, and so on. The result depends only on the arguments, and is the same on every rank.

    Raises PlanError if two ranks hold boxes that overlap but are not equal, because neither can then
    be written once.
    """
    return SavePlan(layout, divide_above_bytes, ranks_per_host)


def _effective_loads(loads: Ints, ranks_per_host: int) -> Ints:
    """The loads that count: a rank's own, plus the mean of its host minus that of the least busy host."""
    hosts = np.arange(len(loads)) // ranks_per_host
    by_host = np.bincount(hosts, weights=loads).astype(np.int64) // np.bincount(hosts)
    return ints(loads + (by_host - by_host.min())[hosts])


# Which holders of its chunks write the tensors of one geometry: the least loaded first, until loads
# are level.
#
# Tensors of one geometry have the same chunks with the same holders. Each chunk of all of them is
# one long strip of units, laid tensor behind tensor; a unit is a whole chunk, or one row of a large
# one. The holders of the chunk, least loaded first, divide the strip among them so that their loads
# become level:
#
#     loads before   #### ## #            3 tensors     |---a---|---b---|---c---|
#     loads after    #### #### ####       holder 2 1 0  |2222222|2222211|1111111|
#
# The assignment is a function of layouts alone and part of the native format: another one needs
# another format version.


class ProductTable:
    """The distinct chunks of a product layout, numbered from 0, and who holds them: the
    combinations of one owner per dim."""

    def __init__(self, product: ProductGeometry) -> None:
        self._product = product
        self.owners = product.holding
        self.shape = tuple(len(owners) for owners in self.owners)
        holders = product.holders(self.owners)
        index = np.indices(self.shape).reshape(len(self.shape), len(holders))
        columns = [own.local_sizes[owners[i]] for own, owners, i in zip(product.dims, self.owners, index)]
        self.sizes = np.stack(columns, axis=1) if columns else zeros((len(holders), 0))
        """Shape of each chunk as a local tensor: (chunks, dims)."""
        self.numels = self.sizes.prod(axis=1)
        """Elements of each chunk."""
        self.counts = np.full(len(holders), holders.shape[1])
        """How many ranks hold each chunk."""
        self.ranks = holders.reshape(-1)
        """The rank of each entry, ascending for each chunk."""
        self.indptr = np.arange(len(holders) + 1) * holders.shape[1]
        """Entries of chunk c are `indptr[c]` to `indptr[c + 1]`."""
        self.indices = zeros(len(self.ranks))
        """For each entry, the index of the rank's local tensor that holds the chunk."""

    def part(self, chunk: int) -> Part:
        """The chunk as a local tensor."""
        at = unravel(chunk, self.shape)
        return self._product.part([int(owners[i]) for owners, i in zip(self.owners, at)])

    def meeting(self, box: Box) -> Iterator[int]:
        """The chunks that share an element with `box`."""
        if 0 in box.sizes or 0 in self.shape:
            return
        found = zeros(1)
        for own, owners, start, stop in zip(self._product.dims, self.owners, box.offsets, box.stops):
            here = distinct(np.searchsorted(owners, own.owner_of[own.meeting(start, stop)]))
            found = (found[:, None] * len(owners) + here).reshape(-1)
        yield from found.tolist()


class BoxTable:
    """The chunks of an irregular layout: its distinct boxes. Says the same as a `ProductTable`."""

    def __init__(self, layout: TensorLayout) -> None:
        """Raises PlanError if two boxes overlap without being equal."""
        held = grouped(
            (box, (rank, index))
            for rank in layout.form.ranks()
            for index, box, _ in local_boxes(layout.form, layout.spec.shape, rank)
        )
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
        self.sizes = ints([box.sizes for box in self.boxes]).reshape(len(self.boxes), len(layout.spec.shape))
        self.numels = self.sizes.prod(axis=1)
        self.counts = ints([len(rows) for rows in places])
        self.indptr = running_sums(self.counts)
        self.ranks = ints([rank for rows in places for rank, _ in rows])
        self.indices = ints([index for rows in places for _, index in rows])

    def part(self, chunk: int) -> Part:
        return Part.of_box(self.boxes[chunk])

    def meeting(self, box: Box) -> Iterator[int]:
        yield from (i for i, _, _ in self._sweep.meeting(box))


@dataclass(frozen=True)
class Assignment:
    """Which rank writes which units of the strips of one geometry."""

    names: tuple[str, ...]
    itemsize: int
    chunks: ProductTable | BoxTable
    units: Ints
    """Per chunk: how many units one tensor has: 1, or the size of `dims` if it may be divided."""
    dims: Ints
    """Per chunk: its longest dim."""
    ranks: Ints
    """The rank of each entry, in the order in which the holders of a chunk take from its strip."""
    indices: Ints
    """For each entry, the index of the rank's local tensor."""
    ends: Ints
    """For each entry, one past the last unit that it takes. It begins where the previous entry ends."""
    _near: dict[Box, tuple[int, ...]] = field(default_factory=dict)
    _writers: dict[Box, tuple[tuple[int, Box], ...]] = field(default_factory=dict)
    _boxes: dict[int, tuple[tuple[Box, Box], ...]] = field(default_factory=dict)

    @cached_property
    def begins(self) -> Ints:
        """Per entry: the first unit that it takes."""
        begins = np.concatenate(([0], self.ends))[:-1]
        begins[self.chunks.indptr[:-1]] = 0
        return begins

    def taken(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, local tensor, first unit, one past the last) that `rank` takes of each of its chunks."""
        order, ranks = self._by_rank
        low, high = np.searchsorted(ranks, [rank, rank + 1])
        for entry in order[low:high].tolist():
            chunk = int(np.searchsorted(self.chunks.indptr, entry, side="right")) - 1
            yield chunk, int(self.indices[entry]), int(self.begins[entry]), int(self.ends[entry])

    def takers(self, chunk: int, tensor: int) -> Iterator[tuple[int, int, int]]:
        """(rank, first unit, one past the last) of all that take of the chunk of tensor number
        `tensor`; units are counted from its first."""
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

    def writers_near(self, box: Box, tensor: int) -> tuple[tuple[int, Box], ...]:
        """(rank, region) of all writes of tensor number `tensor` that share an element with `box`.
        Cached where they are the same for all tensors, because each chunk has one holder."""
        if (known := self._writers.get(box)) is not None:
            return known
        if (near := self._near.get(box)) is None:  # tensors of one geometry ask the same
            near = self._near[box] = tuple(self.chunks.meeting(box))
        found = tuple(
            (rank, region)
            for index in near
            for rank, first, last in self.takers(index, tensor)
            for region, _ in self.boxes(index, first, last)
            if region & box is not None
        )
        if len(self.ranks) == len(self.units):
            self._writers[box] = found
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
                some = local.cut(d, start, stop)
                yield some.moved_with(local, box), some

    @cached_property
    def _by_rank(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.ranks, kind="stable")
        return order, self.ranks[order]


def assign(
    chunks: ProductTable | BoxTable, names: tuple[str, ...], itemsize: int, loads: Ints, divide_above_bytes: int
) -> Assignment:
    """Assign the tensors `names`, which all have these chunks, to the holders of the chunks.

    `loads` has, per rank, the bytes that count against it so far.
    """
    listed, counts = isinstance(chunks, BoxTable), chunks.counts
    nbytes = chunks.numels * itemsize
    dims = chunks.sizes.argmax(axis=1) if chunks.sizes.shape[1] else zeros(len(nbytes))
    longest = chunks.sizes.max(axis=1, initial=1)
    units = np.where((nbytes >= divide_above_bytes) & (counts > 1), longest, 1)
    ranks, indices = chunks.ranks.copy(), chunks.indices.copy()
    ends = np.repeat(units * len(names), counts)
    if listed:  # its ranks may hold several chunks, so each must include the cost of those before it
        loads, single = loads.copy(), counts == 1
        np.add.at(loads, chunks.ranks[chunks.indptr[:-1][single]], nbytes[single] * len(names))
    several = np.flatnonzero(counts > 1)
    # all chunks of several holders at once, or one by one if holders are shared
    for rows in several[:, None] if listed else several[None][: len(several)]:
        holders = np.arange(counts[rows[0]])
        entries = chunks.indptr[rows][:, None] + holders
        # from the least to the most loaded; among equal ones, each chunk begins with another rank
        order = np.lexsort(((holders - rows[:, None]) % len(holders), loads[ranks[entries]]), axis=1)
        entries_in_order = np.take_along_axis(entries, order, axis=1)
        ranks[entries], indices[entries] = chunks.ranks[entries_in_order], chunks.indices[entries_in_order]
        unit_bytes = nbytes[rows] // units[rows]
        ends[entries] = _level(loads[ranks[entries]], unit_bytes, units[rows] * len(names))
        if listed:
            begins = np.concatenate((zeros((len(rows), 1)), ends[entries][:, :-1]), axis=1)
            loads[ranks[entries]] += (ends[entries] - begins) * unit_bytes[:, None]
    return Assignment(names, itemsize, chunks, units, dims, ranks, indices, ends)


def _level(loads: Ints, unit_bytes: Ints, units: Ints) -> Ints:
    """Return where each holder's share of a strip ends, so that loads (ascending for each strip)
    become level.

    Shares are whole units: a holder ends up within one unit of the level.
    """
    total = unit_bytes * units
    holders = np.arange(1, loads.shape[1] + 1)
    below = np.cumsum(loads, axis=1)
    filled = total[:, None] + below
    active = np.maximum((filled // holders > loads).sum(axis=1), 1)[:, None]  # the holders below the level
    level, rest = np.divmod(np.take_along_axis(filled, active - 1, axis=1), active)
    poured = holders * level + holders * rest // active - below  # into the first holders together
    ends = (2 * poured + unit_bytes[:, None]) // (2 * unit_bytes[:, None])
    return np.where(holders >= active, units[:, None], np.clip(ends, 0, units[:, None]))


# Proof of save plans: every element of every tensor is written once, by a rank that holds it.
#
# Plans that are derived are proved geometry by geometry: the chunks tile the tensor, every entry's
# rank holds its chunk, and the entries of a chunk divide its strip of units from the first to the
# last. No rank's items are listed.


def _assignment_findings(assigned: Assignment, layout: TensorLayout) -> Iterator[Finding]:
    chunks, product, counts = assigned.chunks, layout.product, assigned.chunks.counts
    if isinstance(chunks, ProductTable) and product is not None:
        wrong = layout_fault(layout)
        owners = zip(chunks.owners, product.dims, strict=True)
        if wrong is not None or not all(np.array_equal(its, np.flatnonzero(own.local_sizes)) for its, own in owners):
            yield Finding("is not written exactly once", element=wrong.element if wrong is not None else None)
    else:
        boxes = [box for chunk in range(len(counts)) for box, _ in chunks.part(chunk).boxes()]
        fault = tiling_fault([Box.full(layout.spec.shape)], boxes)
        if fault is not None:
            yield Finding(_times(fault), element=fault.element)
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    for entry in np.flatnonzero(~_held(assigned, layout, chunk_of)).tolist():
        element = _first(assigned, int(chunk_of[entry]))
        yield Finding("is written by a rank that does not hold it", None, int(assigned.ranks[entry]), element)
    bad = set(chunk_of[assigned.ends < assigned.begins].tolist())
    bad |= set(np.flatnonzero(assigned.ends[chunks.indptr[1:] - 1] != assigned.units * len(assigned.names)).tolist())
    longest = (
        np.take_along_axis(chunks.sizes, assigned.dims[:, None], axis=1)[:, 0] if layout.spec.shape else assigned.units
    )
    bad |= set(np.flatnonzero((assigned.units != 1) & (assigned.units != longest)).tolist())
    for chunk in sorted(bad):
        yield Finding("is not written exactly once", element=_first(assigned, chunk))


def _times(fault: Fault) -> str:
    return f"is written {fault.count} times, not once" if fault.count else "no rank writes it"


def _held(assigned: Assignment, layout: TensorLayout, chunk_of: Ints) -> Flags:
    """Return whether the rank of each entry holds its chunk, as the local tensor that the entry names."""
    product = layout.product
    if isinstance(assigned.chunks, ProductTable) and product is not None:
        held = np.isin(assigned.ranks, product.mesh.ranks) & (assigned.indices == 0)
        positions = product.mesh.positions(assigned.ranks[held])
        index = np.unravel_index(chunk_of[held], assigned.chunks.shape) if assigned.chunks.shape else ()
        same = np.ones(len(positions), dtype=bool)
        for owner, owners, at in zip(product.rank_owners, assigned.chunks.owners, index):
            same &= owner[positions] == owners[at]
        held[held] = same
        return np.asarray(held)
    out = np.zeros(len(assigned.ranks), dtype=bool)
    for entry, (rank, index_, chunk) in enumerate(
        zip(assigned.ranks.tolist(), assigned.indices.tolist(), chunk_of.tolist())
    ):
        try:
            parts = layout.parts(rank)
        except PlanError:
            continue
        mine = [box for box, _ in parts[index_].boxes()] if index_ < len(parts) else []
        out[entry] = mine == [box for box, _ in assigned.chunks.part(chunk).boxes()]
    return out


def _first(assigned: Assignment, chunk: int) -> Shape:
    """An element of a chunk."""
    return next(iter(assigned.chunks.part(chunk).boxes()))[0].offsets


def _listed_findings(plan: SavePlan) -> Iterator[Finding]:
    """Check every item of every rank, one by one: for plans with explicitly listed items."""
    written: dict[str, list[Box]] = {fqn: [] for fqn in plan.layout}
    for rank in range(plan.world_size):
        for item in plan.items(rank):
            if item.fqn not in written:
                yield Finding("is written, but is not part of the state", item.fqn, rank, item.box.offsets)
                continue
            message = _item_fault(item, plan, rank)
            if message is not None:
                yield Finding(message, item.fqn, rank, item.box.offsets)
            written[item.fqn].append(item.box)
    for fqn, boxes in written.items():
        fault = tiling_fault([Box.full(plan.layout[fqn].spec.shape)], boxes)
        if fault is not None:
            yield Finding(_times(fault), fqn, None, fault.element)


def _item_fault(item: WriteItem, plan: SavePlan, rank: int) -> str | None:
    """Return what is wrong with one item by itself, or None."""
    parts, spec = plan.layout.parts(item.fqn, rank), plan.layout[item.fqn].spec
    if item.nbytes != item.box.numel * spec.itemsize:
        return f"says {item.nbytes} bytes, but has {item.box.numel} elements of {spec.dtype}"
    for box, local in parts[item.part].boxes() if 0 <= item.part < len(parts) else ():
        if box.contains(item.box) and item.box.moved_with(box, local) == item.source:
            return None
    return f"writes {item.box}, which it does not hold there"
