"""Save plans: every distinct chunk is written once, and replicas share the writing evenly. Pure and lazy.

Tensors of one geometry are dealt like cards. Their chunks have the same sizes and the same holders, so tensor t of
the group goes to holder `t mod R` of each chunk, the least loaded holder first. The cards that do not go round, if
they are large, are cut into R slabs, one for each holder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planners.box import Box
from planners.errors import PlanError
from planners.forms import Part, ProductGeometry
from planners.layout import StateLayout, TensorLayout
from planners.overlap import Sweep
from planners.ownership import Ints

__all__ = ["DIVIDE_ABOVE_BYTES", "SavePlan", "WriteItem", "WriteItems", "plan_writes"]

DIVIDE_ABOVE_BYTES = 8 << 20
"""Chunks of at least so many bytes may be divided among the ranks that hold them."""


class WriteItem(NamedTuple):
    """One box of elements that a rank writes."""

    fqn: str
    box: Box
    """The region, in global coordinates: what the file will hold as one array."""
    source: Box
    """The same in the coordinates of the rank's local tensor."""
    nbytes: int
    part: int = 0
    """Which of the rank's local tensors of this name."""


class WriteItems(tuple[WriteItem, ...]):
    """The items of one rank, by name and then in local order."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self)


@dataclass(frozen=True)
class _Deal:
    """How the tensors of one geometry are dealt to the holders of their chunks."""

    names: tuple[str, ...]
    layout: TensorLayout
    holders: tuple[Ints, ...]
    """Per chunk, the ranks that hold it, least loaded first."""
    parts: tuple[tuple[Part, int], ...]
    """Per chunk, what it is: a local tensor, and which of its holders' local tensors."""
    slot: dict[int, list[tuple[int, int]]]
    """rank -> (chunk, position among its holders)"""
    divide_above_bytes: int

    def items(self, rank: int) -> Iterator[WriteItem]:
        for chunk, position in self.slot.get(rank, ()):
            holders = len(self.holders[chunk])
            part, index = self.parts[chunk]
            whole = self._whole(chunk)
            for fqn in self.names[position:whole:holders]:
                yield from self._write(fqn, part, index)
            for fqn in self.names[whole:]:
                yield from self._write(fqn, part, index, (position, holders))

    def writers(self, fqn: str, chunk: int) -> Iterator[tuple[int, Box]]:
        """(rank, box) of all that is written of one chunk of a tensor."""
        holders = self.holders[chunk]
        part, index = self.parts[chunk]
        t = self.names.index(fqn)
        if t < self._whole(chunk):
            yield from ((int(holders[t % len(holders)]), item.box) for item in self._write(fqn, part, index))
        else:
            for position, rank in enumerate(holders.tolist()):
                for item in self._write(fqn, part, index, (position, len(holders))):
                    yield rank, item.box

    def _whole(self, chunk: int) -> int:
        """How many of the tensors are written undivided; the others are cut into a slab for each holder."""
        holders, (part, _) = len(self.holders[chunk]), self.parts[chunk]
        nbytes = part.numel * self.layout.spec.itemsize
        return len(self.names) - (len(self.names) % holders if nbytes >= self.divide_above_bytes else 0)

    def _write(self, fqn: str, part: Part, index: int, slab: tuple[int, int] | None = None) -> Iterator[WriteItem]:
        for box, local in part.boxes():
            if slab is not None:
                box, local = _slab(box, *slab), _slab(local, *slab)
            if not box.is_empty:
                yield WriteItem(fqn, box, local, box.numel * self.layout.spec.itemsize, index)


def _slab(box: Box, position: int, of: int) -> Box:
    """The `position`-th of `of` nearly equal slabs of a box, cut along its longest dim."""
    d = max(range(box.ndim), key=lambda d: box.sizes[d])
    start, stop = box.sizes[d] * position // of, box.sizes[d] * (position + 1) // of
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[d], sizes[d] = offsets[d] + start, stop - start
    return Box.of(tuple(offsets), tuple(sizes))


class SavePlan:
    """Who writes what, once. Frozen; a function of the layout alone."""

    __slots__ = ("_deal_of", "_deals", "_rank_bytes", "divide_above_bytes", "layout")

    layout: StateLayout
    divide_above_bytes: int

    def __init__(self, layout: StateLayout, divide_above_bytes: int = DIVIDE_ABOVE_BYTES) -> None:
        self.layout, self.divide_above_bytes = layout, divide_above_bytes
        loads = np.zeros(layout.world_size, dtype=np.int64)
        groups = sorted(layout.geometries().values(), key=lambda names: (-_bytes_held(layout[names[0]]), names[0]))
        self._deals = [_deal(layout[names[0]], tuple(names), loads, divide_above_bytes) for names in groups]
        self._deal_of = {fqn: deal for deal in self._deals for fqn in deal.names}
        loads.flags.writeable = False
        self._rank_bytes = loads

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.layout.world_size

    def items(self, rank: int) -> WriteItems:
        """What `rank` writes. Raises PlanError for a rank outside the job."""
        self._check(rank)
        found = [item for deal in self._deals for item in deal.items(rank)]
        return WriteItems(sorted(found, key=lambda item: (item.fqn, item.part, item.source)))

    def writers(self, fqn: str, chunk: Box) -> tuple[tuple[int, Box], ...]:
        """Who writes a chunk of a tensor: (rank, region in global coordinates), which together are the chunk.

        `chunk` is one of `layout[fqn].chunks()`, or within one. Raises PlanError if nobody holds it.
        """
        deal = self._deal_of[fqn]
        for index in self._chunks_meeting(deal, chunk):
            found = [(rank, box) for rank, box in deal.writers(fqn, index) if box & chunk is not None]
            if found:
                return tuple(found)
        raise PlanError("no rank holds this chunk", fqn=fqn, box=chunk)

    def _chunks_meeting(self, deal: _Deal, box: Box) -> Iterator[int]:
        product = deal.layout.product
        if product is None:
            yield from (
                i for i, (part, _) in enumerate(deal.parts) if any(b & box is not None for b, _ in part.boxes())
            )
            return
        owners = []
        for own, start in zip(product.dims, box.offsets):
            row = np.flatnonzero((own.starts <= start) & (own.stops > start))
            owners.append(int(own.owner_of[row[0]]))
        wanted = tuple(owners)
        yield from (i for i, combo in enumerate(product.distinct()) if combo == wanted)

    def rank_bytes(self) -> Ints:
        """Bytes that each rank writes. Items are not enumerated."""
        return self._rank_bytes

    def bytes(self, rank: int) -> int:
        """Bytes that `rank` writes."""
        self._check(rank)
        return int(self._rank_bytes[rank])

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks write together: every element of every tensor once."""
        return int(self._rank_bytes.sum())

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SavePlan):
            return NotImplemented
        return self.layout == other.layout and self.divide_above_bytes == other.divide_above_bytes

    __hash__ = None  # type: ignore[assignment]  # holds a mapping of many tensors

    def __repr__(self) -> str:
        return f"SavePlan({len(self.layout)} tensors, {self.world_size} ranks, {self.total_bytes} bytes)"


def plan_writes(layout: StateLayout, *, divide_above_bytes: int = DIVIDE_ABOVE_BYTES) -> SavePlan:
    """Who writes which chunk of `layout`, each element once, evenly in bytes over the ranks that hold it.

    Deterministic: a function of the arguments alone, the same on every rank.

    Raises PlanError if two ranks hold regions that overlap without being equal, since then no rank's whole region
    can be written once.
    """
    return SavePlan(layout, divide_above_bytes)


def _bytes_held(layout: TensorLayout) -> int:
    return int(layout.numels().max()) * layout.spec.itemsize


def _deal(layout: TensorLayout, names: tuple[str, ...], loads: Ints, divide_above_bytes: int) -> _Deal:
    product = layout.product
    parts, holders = _product_chunks(product) if product is not None else _irregular_chunks(layout)
    slot: dict[int, list[tuple[int, int]]] = {}
    ordered: list[Ints] = []
    for chunk, ranks in enumerate(holders):
        order = ranks[np.argsort(loads[ranks], kind="stable")]
        ordered.append(order)
        for position, rank in enumerate(order.tolist()):
            slot.setdefault(rank, []).append((chunk, position))
    deal = _Deal(names, layout, tuple(ordered), tuple(parts), slot, divide_above_bytes)
    for chunk, order in enumerate(ordered):
        _charge(loads, order, deal, chunk)
    return deal


def _charge(loads: Ints, order: Ints, deal: _Deal, chunk: int) -> None:
    """Add to the load of each holder what it writes of this chunk of all tensors."""
    part, whole, holders = deal.parts[chunk][0], deal._whole(chunk), len(order)
    itemsize = deal.layout.spec.itemsize
    counts = whole // holders + (np.arange(holders) < whole % holders)
    loads[order] += counts * (part.numel * itemsize)
    divided = len(deal.names) - whole
    if divided:
        for box, _ in part.boxes():
            slabs = [_slab(box, position, holders).numel * itemsize for position in range(holders)]
            loads[order] += np.array(slabs, dtype=np.int64) * divided


def _product_chunks(product: ProductGeometry) -> tuple[list[tuple[Part, int]], list[Ints]]:
    parts, holders = [], []
    for owners in product.distinct():
        parts.append((product.part(owners), 0))
        holders.append(np.sort(product.replicas(owners)))
    return parts, holders


def _irregular_chunks(layout: TensorLayout) -> tuple[list[tuple[Part, int]], list[Ints]]:
    held: dict[Box, list[tuple[int, int]]] = {}
    for rank in range(layout.world_size):
        for index, part in enumerate(layout.parts(rank)):
            for box, _ in part.boxes():
                held.setdefault(box, []).append((rank, index))
    sweep = Sweep((i, box) for i, box in enumerate(held))
    for box in held:
        for _, other, common in sweep.meeting(box):
            if other != box:
                ranks = held[box][0][0], held[other][0][0]
                raise PlanError(
                    f"ranks {ranks[0]} and {ranks[1]} hold {box} and {other}, which overlap but are not equal",
                    fqn=layout.fqn,
                    box=common,
                )
    parts, holders = [], []
    for box, places in held.items():
        # a box is the i-th local tensor of one rank and the j-th of another: only ranks that agree share the writing
        index = places[0][1]
        parts.append((Part.of_box(box), index))
        holders.append(np.array([rank for rank, i in places if i == index], dtype=np.int64))
    return parts, holders
