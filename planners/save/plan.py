"""Save plans: every distinct chunk is written once, and replicas share the writing evenly. Pure and lazy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.ownership import Ints
from planners.notebooks import Pictured
from planners.save.assignment import Assignment, assign

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


class SavePlan(Pictured):
    """Who writes what, once. Frozen; a function of the layout alone.

    A plan whose items were listed explicitly (`with_items`) keeps them, and `verify` judges them.
    """

    __slots__ = ("_place", "_rank_bytes", "assignments", "divide_above_bytes", "explicit", "layout", "ranks_per_host")

    layout: StateLayout
    divide_above_bytes: int
    ranks_per_host: int | None
    assignments: tuple[Assignment, ...]
    """How the tensors of each geometry are assigned."""
    explicit: dict[int, WriteItems]
    """Items listed by hand, by rank; they stand in for those that would be derived."""

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
        loads = np.zeros(layout.world_size, dtype=np.int64)
        assignments = []
        for names in sorted(layout.geometries().values(), key=lambda names: _freedom(layout[names[0]])):
            assigned = assign(layout[names[0]], tuple(names), _felt(loads, ranks_per_host), divide_above_bytes)
            np.add.at(loads, assigned.ranks, assigned.bytes_by_entry())
            assignments.append(assigned)
        self.assignments = tuple(assignments)
        self._place = {fqn: (assigned, t) for assigned in assignments for t, fqn in enumerate(assigned.names)}
        self.explicit = {rank: WriteItems(items) for rank, items in (explicit or {}).items()}
        for rank, items in self.explicit.items():
            self._check(rank)
            loads[rank] = items.nbytes
        loads.flags.writeable = False
        self._rank_bytes = loads

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.layout.world_size

    def with_items(self, items: Mapping[int, Sequence[WriteItem]]) -> SavePlan:
        """The same plan, but with the items of the given ranks replaced."""
        return SavePlan(self.layout, self.divide_above_bytes, self.ranks_per_host, {**self.explicit, **items})

    def items(self, rank: int) -> WriteItems:
        """What `rank` writes. Raises PlanError for a rank outside the job."""
        self._check(rank)
        if rank in self.explicit:
            return self.explicit[rank]
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
        return WriteItems(sorted(out, key=lambda item: (item.fqn, item.part, item.source)))

    def writers(self, fqn: str, chunk: Box) -> tuple[tuple[int, Box], ...]:
        """Who writes a chunk of a tensor: (rank, region in global coordinates), which together are the chunk.

        `chunk` is one of `layout[fqn].chunks()`, or within one. Found without listing chunks or ranks. Raises
        PlanError if nobody holds it.
        """
        found = tuple(self.writers_near(fqn, chunk))
        if not found:
            raise PlanError("no rank holds this chunk", fqn=fqn, box=chunk)
        return found

    def writers_near(self, fqn: str, box: Box) -> Iterator[tuple[int, Box]]:
        """(rank, region in global coordinates) of all that is written and shares an element with `box`."""
        if fqn not in self._place:
            raise PlanError("there is no such tensor in this plan", fqn=fqn)
        assigned, t = self._place[fqn]
        for index in assigned.near(box):
            for rank, first, last in assigned.takers(index, t):
                for region, _ in assigned.boxes(index, first, last):
                    if region & box is not None:
                        yield rank, region

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
        mine = (self.layout, self.divide_above_bytes, self.ranks_per_host, self.explicit)
        return mine == (other.layout, other.divide_above_bytes, other.ranks_per_host, other.explicit)

    __hash__ = None  # type: ignore[assignment]  # holds a mapping of many tensors

    def __repr__(self) -> str:
        return f"SavePlan({len(self.layout)} tensors, {self.world_size} ranks, {self.total_bytes} bytes)"


def plan_writes(
    layout: StateLayout, *, divide_above_bytes: int = DIVIDE_ABOVE_BYTES, ranks_per_host: int | None = None
) -> SavePlan:
    """Who writes which chunk of `layout`, each element once, evenly in bytes over the ranks that hold it.

    With `ranks_per_host` hosts are kept even too: ranks 0 to ranks_per_host - 1 share the first one, and so on.
    Deterministic: a function of the arguments alone, the same on every rank.

    Raises PlanError if two ranks hold regions that overlap without being equal, since then no rank's whole region
    can be written once.
    """
    return SavePlan(layout, divide_above_bytes, ranks_per_host)


def _freedom(layout: TensorLayout) -> tuple[int, int, str]:
    """Sorts first what leaves the least choice of writers, then what is largest: so loads can be evened out later."""
    held = layout.numels()
    copies = int(held.sum()) // max(layout.spec.numel, 1)
    return copies, -int(held.max()) * layout.spec.itemsize, layout.fqn


def _felt(loads: Ints, ranks_per_host: int | None) -> Ints:
    """The loads that count: a rank's own, and by how much the mean of its host lies above that of the idlest host."""
    if ranks_per_host is None:
        return loads
    hosts = np.arange(len(loads), dtype=np.int64) // ranks_per_host
    by_host = np.bincount(hosts, weights=loads).astype(np.int64) // np.bincount(hosts)
    return np.asarray(loads + (by_host - by_host.min())[hosts], dtype=np.int64)
