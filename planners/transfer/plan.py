"""Transfer plans: which rank sends which bytes to which, to move a state between layouts of one job. Pure and lazy.

Ranks before and after are one numbering: rank 3 before is rank 3 after. The two sides may be the same ranks, share
some, or share none. What a receiver holds already it copies; every other byte that it needs crosses to it once.

Replicas are fed one by one: if k ranks of one host need the same bytes, these cross to the host k times. Where that
is too much, `planners.transfer.hierarchical` makes two plans: a stripe for each replica, and then what they lack from
one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planners.errors import CoverageError, LayoutMismatchError, PlanError
from planners.geometry.box import Box
from planners.geometry.layout import StateLayout
from planners.geometry.ownership import Ints
from planners.notebooks import Pictured
from planners.transfer.intersection import intersection_of
from planners.transfer.routing import Route, Traffic, pair_groups, total_traffic

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["TransferItem", "TransferItems", "TransferPlan", "plan_transfers"]


class TransferItem(NamedTuple):
    """One box of elements, from the sender's local tensor to the receiver's."""

    fqn: str
    sender: int
    receiver: int
    """Equal to the sender for a copy within a rank."""
    box: Box
    """The elements, in global coordinates."""
    source: Box
    """The same in the coordinates of the sender's local tensor."""
    target: Box
    """The same in the coordinates of the receiver's local tensor."""
    nbytes: int
    """Bytes of the box, as the sender holds it."""
    source_part: int = 0
    """Which of the sender's local tensors of this name."""
    target_part: int = 0
    """Which of the receiver's local tensors of this name."""

    @property
    def is_local(self) -> bool:
        """Whether nothing crosses."""
        return self.sender == self.receiver

    def __str__(self) -> str:
        return f"{self.fqn}: {self.box}, rank {self.sender} {self.source} -> rank {self.receiver} {self.target}"


class TransferItems(tuple[TransferItem, ...]):
    """Items in the order of names, then of the sender's regions, then of the receiver's local elements."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items, copies within a rank included."""
        return sum(item.nbytes for item in self)


class TransferPlan(Pictured):
    """What every rank sends, receives and copies. Frozen.

    A plan is its two layouts: items are enumerated for the rank that asks. Receivers whose items were listed
    explicitly (`with_items`) keep them, and `verify` judges them.
    """

    def __init__(
        self,
        before: StateLayout,
        after: StateLayout,
        names: Sequence[str],
        ranks_per_host: int | None = None,
        explicit: Mapping[int, Sequence[TransferItem]] | None = None,
    ) -> None:
        """`names`: what is moved; both sides have it. Use `plan_transfers`, which checks that.

        Raises PlanError for a name that one side lacks, for explicit items from or to ranks outside the job, and for
        items to other receivers than they are listed for.
        """
        self.before, self.after, self.names = before, after, tuple(names)
        self.ranks_per_host = ranks_per_host
        self.explicit = {rank: TransferItems(items) for rank, items in (explicit or {}).items()}
        if ranks_per_host is not None and ranks_per_host < 1:
            raise PlanError(f"ranks_per_host must be >= 1, got {ranks_per_host}")
        for fqn in self.names:
            if fqn not in before or fqn not in after:
                raise PlanError("to be moved a tensor must be in both layouts", fqn=fqn)
        for rank, items in self.explicit.items():
            self._check(rank)
            for item in items:
                self._check(item.sender)
                if item.receiver != rank:
                    raise PlanError(f"an item listed for this rank goes to rank {item.receiver}", rank=rank)

    @property
    def world_size(self) -> int:
        """Ranks of the job: those before and those after, in one numbering."""
        return max(self.before.world_size, self.after.world_size)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names that only the layout before has."""
        moved = set(self.names)
        return tuple(fqn for fqn in self.before if fqn not in moved)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that only the layout after has; nobody fills them."""
        moved = set(self.names)
        return tuple(fqn for fqn in self.after if fqn not in moved)

    def with_items(self, items: Mapping[int, Sequence[TransferItem]]) -> TransferPlan:
        """The same plan, but with the items to the given receivers replaced."""
        return TransferPlan(self.before, self.after, self.names, self.ranks_per_host, {**self.explicit, **items})

    # --- one rank ---

    def items_to(self, rank: int) -> TransferItems:
        """What arrives at `rank`, each wanted element once; copies within the rank included."""
        self._check(rank)
        return self.explicit[rank] if rank in self.explicit else self._derived_to(rank)

    def items_from(self, rank: int) -> TransferItems:
        """What `rank` sends to other ranks."""
        self._check(rank)
        found: list[tuple[int, TransferItem]] = []
        for route in self.routes:
            names, positions = route.group.names, route.group.positions
            for source in route.intersection.sources_of(rank):
                commons: dict[int, list[_Common]] = {}
                for tensor, receiver in route.served(source, rank):
                    if receiver not in self.explicit:
                        if receiver not in commons:
                            commons[receiver] = _commons(route, source, receiver)
                        fqn, position = names[tensor], positions[tensor]
                        found.extend((position, TransferItem(fqn, rank, receiver, *c)) for c in commons[receiver])
        found.sort(key=lambda row: row[0])
        listed = [item for items in self.explicit.values() for item in items if item.sender == rank]
        return TransferItems([*(item for _, item in found), *(item for item in listed if not item.is_local)])

    def items(self) -> Iterator[TransferItem]:
        """All items of all ranks, receiver by receiver, copies within a rank included."""
        for rank in range(self.world_size):
            yield from self.items_to(rank)

    def _derived_to(self, rank: int) -> TransferItems:
        found: list[tuple[int, TransferItem]] = []
        for route in self.routes:
            for source in route.intersection.sources(rank):
                commons = _commons(route, source, rank)
                for fqn, position, sender in zip(route.group.names, route.group.positions, route.senders(source, rank)):
                    found.extend((position, TransferItem(fqn, sender, rank, *common)) for common in commons)
        found.sort(key=lambda row: row[0])
        return TransferItems(item for _, item in found)

    def first_items(self, route: Route, rank: int) -> list[TransferItem]:
        """What arrives at `rank` of the first tensor of a route's group, whatever was listed explicitly."""
        fqn = route.group.names[0]
        return [
            TransferItem(fqn, route.senders(source, rank)[0], rank, *common)
            for source in route.intersection.sources(rank)
            for common in _commons(route, source, rank)
        ]

    # --- all ranks ---

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Who serves whom, one for each geometry, those of the most bytes first: so loads stay even."""
        groups = pair_groups(self.before, self.after, self.names)
        heavy = sorted(groups, key=lambda group: (-group.before.spec.nbytes * len(group), group.positions[0]))
        loads, out = np.zeros(self.world_size, dtype=np.int64), []
        for group in heavy:
            try:
                intersection = intersection_of(group.before.spec.shape, group.before.form, group.after.form)
            except CoverageError as error:
                raise CoverageError("nobody holds it", fqn=group.names[0], rank=error.rank, box=error.box) from None
            route = Route(group, intersection, loads, self.ranks_per_host)
            loads = loads + route.sent_bytes(self.world_size)
            out.append(route)
        self._derived_sent = loads
        return tuple(out)

    def traffic(self) -> Traffic:
        """Bytes between every two ranks that exchange any, as columns sorted by sender and receiver."""
        return total_traffic(self.traffic_blocks(), self.world_size)

    def traffic_blocks(self) -> Iterator[Traffic]:
        """What `traffic` sums, bit by bit and in bounded memory: pairs of ranks may come up several times."""
        listed = np.array(sorted(self.explicit), dtype=np.int64)
        for route in self.routes:
            for block in route.traffic():
                kept = ~np.isin(block.receiver, listed) if len(listed) else slice(None)
                yield Traffic(*(column[kept] for column in block))
        for items in self.explicit.values():
            rows = [(item.sender, item.receiver, item.nbytes) for item in items if not item.is_local and item.nbytes]
            yield Traffic(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def sent_bytes(self) -> Ints:
        """Bytes that each rank sends to others. Items are not enumerated."""
        return self._totals[0]

    def received_bytes(self) -> Ints:
        """Bytes that each rank gets from others. Items are not enumerated."""
        return self._totals[1]

    def local_bytes(self) -> Ints:
        """Bytes that each rank copies from its own tensors. Items are not enumerated."""
        return self._totals[2]

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between ranks: each needed byte once to each receiver that does not hold it."""
        return int(self.received_bytes().sum())

    @cached_property
    def _totals(self) -> tuple[Ints, Ints, Ints]:
        received, local = (np.zeros(self.world_size, dtype=np.int64) for _ in range(2))
        for route in self.routes:
            nbytes = route.group.before.spec.itemsize * len(route.group)
            here = route.intersection.local_numels(self.world_size) * nbytes
            held = route.group.after.numels() * nbytes
            received[: len(held)] += held
            received -= here
            local += here
        sent = self._derived_sent.copy()
        for rank, items in self.explicit.items():
            for sign, some in ((-1, self._derived_to(rank)), (1, items)):
                for item in some:
                    if item.is_local:
                        local[rank] += sign * item.nbytes
                    else:
                        received[rank] += sign * item.nbytes
                        sent[item.sender] += sign * item.nbytes
        for column in (sent, received, local):
            column.flags.writeable = False
        return sent, received, local

    def graph(self) -> nx.MultiDiGraph:
        """The ranks that send or receive as nodes; one edge per sender, receiver and name, with its `nbytes`.

        The name is the edge's key. Enumerates all items: for thousands of ranks use `traffic`.
        """
        import networkx as nx  # a third of the time that `import planners` would take

        graph = nx.MultiDiGraph()
        for item in self.items():
            if item.is_local:
                continue
            if graph.has_edge(item.sender, item.receiver, item.fqn):
                graph.edges[item.sender, item.receiver, item.fqn]["nbytes"] += item.nbytes
            else:
                graph.add_edge(item.sender, item.receiver, item.fqn, nbytes=item.nbytes)
        return graph

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferPlan):
            return NotImplemented
        mine = (self.before, self.after, self.names, self.ranks_per_host, self.explicit)
        return mine == (other.before, other.after, other.names, other.ranks_per_host, other.explicit)

    __hash__ = None  # type: ignore[assignment]  # holds mappings of many tensors

    def __repr__(self) -> str:
        return f"TransferPlan({len(self.names)} tensors, {self.before.world_size} -> {self.after.world_size} ranks)"


_Common = tuple[Box, Box, Box, int, int, int]


def _commons(route: Route, source: int, receiver: int) -> list[_Common]:
    """The fields of items that are the same for all tensors of the group and all holders of the source."""
    itemsize = route.group.before.spec.itemsize
    return [
        (box, mine, its, box.numel * itemsize, source_part, target_part)
        for box, mine, its, source_part, target_part in route.intersection.commons(source, receiver)
    ]


def plan_transfers(
    before: StateLayout,
    after: StateLayout,
    *,
    ranks_per_host: int | None = None,
    allow_cast: bool = False,
    allow_missing: bool = False,
) -> TransferPlan:
    """Who sends what to whom, so that ranks that hold `before` come to hold `after`.

    A receiver that holds an element copies it. Others get it from one of its holders: on their own host if there is
    one, else from all holders in turn, the least loaded first. Deterministic: a function of the arguments alone, the
    same on every rank. Names that only `before` has are dropped.

    Args:
        ranks_per_host: ranks 0 to n - 1 are on the first host, and so on; None if hosts do not matter.
        allow_cast: dtypes may differ; bytes are counted, and cross, as before. The cast is up to who obeys the plan.
        allow_missing: names that only `after` has are left alone, and are listed as the plan's `missing`.

    Raises:
        LayoutMismatchError: names all tensors whose shapes or dtypes differ, or that nobody holds before.
    """
    names = [fqn for fqn in after if fqn in before] if allow_missing else list(after)
    problems: list[str] = []
    for fqn in names:
        wanted, held = after[fqn].spec, before[fqn].spec if fqn in before else None
        if held is None:
            problems.append(f"nobody holds {fqn!r} before")
        elif held.shape != wanted.shape:
            problems.append(f"{fqn!r} has shape {held.shape} before, but {wanted.shape} after")
        elif held.dtype != wanted.dtype and not allow_cast:
            problems.append(f"{fqn!r} is {held.dtype} before, but {wanted.dtype} after (allow_cast permits that)")
    if problems:
        raise LayoutMismatchError("the layout after does not fit the one before: " + "; ".join(problems))
    return TransferPlan(before, after, names, ranks_per_host)
