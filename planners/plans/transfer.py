"""Transfer plans: which rank sends which bytes to which, to move a state between layouts of one job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from planners.errors import CoverageError, LayoutMismatchError, PlanError
from planners.geometry.box import Box
from planners.geometry.layout import BoxesForm, Form, Intervals, Part, ProductForm, Shape, StateLayout, TensorLayout
from planners.geometry.mesh import Ints, Mesh, Placement, Replicate, Shard
from planners.notebooks import Pictured
from planners.plans.routing import Route, Traffic, intersection_of, pair_groups, total_traffic
from planners.plans.save import SavePlan, plan_writes

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "HeldPlace", "ReadOncePlan", "Repeat", "TransferItem", "TransferItems", "TransferPlan",
    "bytes_between", "bytes_between_hosts", "plan_read_once", "plan_relay", "plan_transfers",
    "rank_groups", "stripe_places", "striped", "want_once",
]  # fmt: skip


# Ranks before and after are one numbering: rank 3 before is rank 3 after. The two sides may be the
# same ranks, share some, or share none. What a receiver holds already it copies; every other byte
# that it needs crosses to it once.
#
# Replicas are fed one by one: if k ranks of one host need the same bytes, these cross to the host k
# times. Where that is too much, `planners.plans.transfer` makes two plans: a stripe for each
# replica, and then what they lack from one another.


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


# Transfers in two steps: the replicas of one group get a stripe each from outside, and then
# complete one another.
#
#     direct: every byte to each of 4 replicas        relay: a quarter to each, then all quarters to all
#
#     group 0   a b c d                               group 0   a b c d
#                \ \ \ \  x 4                                    \ \ \ \
#     group 1   4 x abcd                              group 1   a-b-c-d   ->   4 x abcd
#
# Groups are hosts, and the two sides where no rank is on both. What crosses between groups falls by
# the number of replicas in a group; each replica still gets each byte once. Both steps are ordinary
# transfer plans, with a layout of stripes between them.


def plan_relay(
    before: StateLayout,
    after: StateLayout,
    *,
    ranks_per_host: int | None = None,
    allow_cast: bool = False,
    allow_missing: bool = False,
) -> tuple[TransferPlan, ...]:
    """The plans to obey one after the other: one, or two where that moves fewer bytes between groups.

    Groups are the hosts, if `ranks_per_host` says which these are, and then the two sides, if no rank is on both.
    The first plan takes the state from `before` to a layout in which some tensors are striped; these have the dtype
    that they have before, and all others are as `after` wants them. The second moves the striped tensors only.
    Arguments and errors are those of `plan_transfers`.
    """
    direct = plan_transfers(
        before, after, ranks_per_host=ranks_per_host, allow_cast=allow_cast, allow_missing=allow_missing
    )
    groupings = rank_groups(direct)
    between: dict[str, TensorLayout] = {}
    for alike in pair_groups(before, after, direct.names) if groupings else ():
        name = alike.names[0]
        form = _best_form(before[name], after[name], groupings, ranks_per_host)
        if form is not None:
            between |= {fqn: TensorLayout.of(before[fqn].spec, form) for fqn in alike.names}
    if not between:
        return (direct,)
    stage = StateLayout({fqn: between.get(fqn, after[fqn]) for fqn in direct.names}, after.world_size)
    return (
        plan_transfers(before, stage, ranks_per_host=ranks_per_host, allow_cast=allow_cast),
        TransferPlan(stage, after, [fqn for fqn in direct.names if fqn in between], ranks_per_host),
    )


def rank_groups(plan: TransferPlan) -> tuple[Ints, ...]:
    """The groups between which bytes are dear, the dearest first: for each rank of the job, the number of its group.

    By host, where the plan knows hosts; by side, where no rank is on both. () where there is one group only.
    """
    out = []
    if plan.ranks_per_host is not None and plan.ranks_per_host < plan.world_size:
        out.append(np.arange(plan.world_size, dtype=np.int64) // plan.ranks_per_host)
    givers, takers = (_ranks(state[fqn] for fqn in plan.names) for state in (plan.before, plan.after))
    if takers and givers.isdisjoint(takers):
        sides = np.zeros(plan.world_size, dtype=np.int64)
        sides[sorted(takers)] = 1
        out.append(sides)
    return tuple(out)


def bytes_between(plan: TransferPlan, groups: Ints) -> int:
    """Bytes that leave their group. `groups`: for each rank, the number of its group."""
    total = 0
    for sender, receiver, nbytes in plan.traffic_blocks():
        total += int(nbytes[groups[sender] != groups[receiver]].sum())
    return total


def bytes_between_hosts(plan: TransferPlan, ranks_per_host: int) -> int:
    """Bytes that leave their host."""
    return bytes_between(plan, np.arange(plan.world_size, dtype=np.int64) // ranks_per_host)


def _ranks(layouts: Iterable[TensorLayout]) -> set[int]:
    """All ranks that may hold something."""
    forms = {id(layout.form): layout.form for layout in layouts}  # mostly shared objects
    return {rank for form in forms.values() for rank in form.ranks()}


def _best_form(
    before: TensorLayout, after: TensorLayout, groupings: Sequence[Ints], ranks_per_host: int | None
) -> Form | None:
    """The stripes between two layouts of a tensor by which the fewest bytes leave a group; None for no stripes."""
    best, best_bytes = None, _crossing((before, after), groupings, ranks_per_host)
    for groups in groupings:
        form = striped(after, groups)
        if form is not None:
            steps = before, TensorLayout.of(before.spec, form), after
            crossing = _crossing(steps, groupings, ranks_per_host)
            if crossing < best_bytes:
                best, best_bytes = form, crossing
    return best


def _crossing(steps: Sequence[TensorLayout], groupings: Sequence[Ints], ranks_per_host: int | None) -> tuple[int, ...]:
    """Bytes between the groups of each grouping, of all steps together."""
    world, fqn = len(groupings[0]), steps[0].spec.fqn
    states = [StateLayout({fqn: layout}, world) for layout in steps]
    plans = [plan_transfers(*pair, ranks_per_host=ranks_per_host, allow_cast=True) for pair in pairwise(states)]
    return tuple(sum(bytes_between(plan, groups) for plan in plans) for groups in groupings)


# --- stripes ---


def striped(layout: TensorLayout, groups: Ints) -> Form | None:
    """The form in which the replicas of one group have a stripe each, so that together they have every element once;
    None if no group has replicas. A stripe is a piece of the local tensor, so it needs no memory of its own.

    `groups`: for each rank, the number of its group.
    """
    if not layout.spec.numel:
        return None
    if isinstance(layout.form, ProductForm) and layout.spec.shape:
        return _striped_product(layout, layout.form, groups)
    return _striped_boxes(layout, groups)


def stripe_places(stage: TensorLayout, whole: TensorLayout, rank: int) -> tuple[tuple[int, Box], ...]:
    """Where the local tensors of `stage` lie in those of `whole`: for each, (which one, the box in its coordinates).

    Raises PlanError where one lies in none, or not as one box.
    """
    theirs = whole.parts(rank) if rank < whole.world_size else ()
    mine = stage.parts(rank) if rank < stage.world_size else ()
    return tuple(_place(part, theirs, whole, rank) for part in mine)


def _place(part: Part, theirs: tuple[Part, ...], whole: TensorLayout, rank: int) -> tuple[int, Box]:
    for index, host in enumerate(theirs):
        offsets = [_offset(inner, outer) for inner, outer in zip(part.dims, host.dims, strict=True)]
        known = tuple(offset for offset in offsets if offset is not None)
        if len(known) == len(offsets):
            return index, Box.of(known, part.sizes)
    raise PlanError("a stripe is no box of what it is a stripe of", fqn=whole.spec.fqn, rank=rank)


def _offset(inner: Intervals, outer: Intervals) -> int | None:
    """Where in a local dim of the intervals `outer` the intervals `inner` lie, one behind another; None if nowhere."""
    if not inner:
        return 0
    size, at = sum(stop - start for start, stop in inner), 0
    for start, stop in outer:
        if start <= inner[0][0] < stop:
            first = at + inner[0][0] - start
            return first if _cut(outer, first, first + size) == inner else None
        at += stop - start
    return None


def _cut(intervals: Intervals, low: int, high: int) -> Intervals:
    """The global intervals of local elements `[low, high)`."""
    out, at = [], 0
    for start, stop in intervals:
        begin, end = max(low - at, 0), min(high - at, stop - start)
        if begin < end:
            out.append((start + begin, start + end))
        at += stop - start
    return tuple(out)


def _striped_product(layout: TensorLayout, form: ProductForm, groups: Ints) -> ProductForm | None:
    """The axes of replicas, or the part of them that is within groups, come last and cut the largest local dim."""
    mesh, shape = form.mesh, layout.spec.shape
    where = groups[mesh.ranks].reshape(mesh.shape)
    inner = [
        _common_run(where, axis) if isinstance(placement, Replicate) else 1
        for axis, placement in enumerate(form.placements)
    ]
    if all(size == 1 for size in inner):
        return None
    grid = mesh.ranks.reshape([n for size, run in zip(mesh.shape, inner) for n in (size // run, run)])
    grid = grid.transpose([*range(0, grid.ndim, 2), *range(1, grid.ndim, 2)])
    axes = [(name, size // run) for (name, size), run in zip(mesh.axes, inner)]
    axes += [(_fresh(name, mesh), run) for (name, _), run in zip(mesh.axes, inner)]
    sizes = np.max([part.sizes for rank in mesh.ranks[:1].tolist() for part in form.parts(shape, rank)], axis=0)
    cuts: list[Placement] = [Shard(int(np.argmax(sizes))) if run > 1 else Replicate() for run in inner]
    return ProductForm.make(Mesh(axes, grid.reshape(-1).tolist()), (*form.placements, *cuts))


def _common_run(where: npt.NDArray[np.int64], axis: int) -> int:
    """The most coordinates in a row on an axis that are of one group, wherever a row of so many begins."""
    size = where.shape[axis]
    for run in (n for n in range(size, 1, -1) if size % n == 0):
        rows = np.moveaxis(where, axis, -1).reshape(-1, run)
        if np.all(rows == rows[:, :1]):
            return run
    return 1


def _fresh(name: str, mesh: Mesh) -> str:
    while name in mesh.names:
        name += "_stripe"
    return name


def _striped_boxes(layout: TensorLayout, groups: Ints) -> BoxesForm | None:
    """Each box that several ranks of a group have alike is cut among them."""
    alike: dict[tuple[int, tuple[Box, ...]], list[int]] = {}
    for rank in layout.form.ranks():
        boxes = tuple(box for part in layout.parts(rank) for box, _ in part.boxes())
        alike.setdefault((int(groups[rank]), boxes), []).append(rank)
    if all(len(ranks) == 1 for ranks in alike.values()):
        return None
    out: dict[int, list[Box]] = {}
    for (_, boxes), ranks in alike.items():
        for number, box in enumerate(boxes):
            for place, piece in enumerate(_pieces(box, len(ranks))):
                out.setdefault(ranks[(number + place) % len(ranks)], []).append(piece)
    return BoxesForm.make(out, layout.world_size)


def _pieces(box: Box, count: int) -> list[Box]:
    """A box cut along its largest dim into `count` pieces of nearly one size, or one for each element there."""
    size = max(box.sizes, default=1)
    if size <= 1 or count == 1:
        return [box]
    dim, count = box.sizes.index(size), min(count, size)
    edges = [box.offsets[dim] + size * i // count for i in range(count + 1)]
    return [box.cut(dim, low, high) for low, high in pairwise(edges)]


# Elements that a rank wants several times over, moved once: what remains to be moved, and what to
# copy afterwards.
#
# Each of several forms says what the ranks want of one tensor, such as for two targets made of it,
# or for a target in which it is repeated. What an earlier form brings to a rank, a later one need
# not bring again:
#
#     first form   a b c d . .           moved    a b c d . .
#     second form  . . c d e f           moved    . . . . e f     repeated  c d, from where the first form put them


class HeldPlace(NamedTuple):
    """Elements in what a rank holds by one of the forms."""

    form: int
    """Number of the form, as given."""
    part: int
    """Which local tensor."""
    box: Box
    """In its coordinates."""


class Repeat(NamedTuple):
    """Elements that are in place already, and where they are wanted once more."""

    source: HeldPlace
    target: HeldPlace


@dataclass(frozen=True)
class WantedOnce:
    """The forms without repetitions."""

    forms: tuple[Form, ...]
    """What is to be moved, for each form that was given."""
    places: tuple[Mapping[int, tuple[HeldPlace, ...]] | None, ...]
    """For each form: rank -> where each of its boxes goes in the local tensors of the form that was given; None where
    that form is unchanged."""
    repeats: Mapping[int, tuple[Repeat, ...]]
    """By rank, to be copied in this order when everything has been moved."""


@lru_cache(maxsize=256)
def want_once(shape: Shape, forms: tuple[Form, ...]) -> WantedOnce:
    """What is to be moved of a tensor of which ranks want all of `forms`, so that no rank gets an element twice."""
    near = _near(shape, forms)
    out: list[Form] = list(forms)
    places: list[Mapping[int, tuple[HeldPlace, ...]] | None] = [None] * len(forms)
    moved: dict[tuple[int, int], list[tuple[HeldPlace, Box]]] = {}
    repeats: dict[int, list[Repeat]] = {}
    for number, form in enumerate(forms):
        kept: dict[int, list[tuple[HeldPlace, Box]]] = {}
        repeated = False
        for rank in form.ranks():
            before = [row for other in near[number] for row in moved.get((other, rank), ())]
            rest, again = _new_of(_wanted_pieces(number, form, shape, rank), before)
            kept[rank] = moved[number, rank] = rest
            repeats.setdefault(rank, []).extend(again)
            repeated = repeated or bool(again)
        if repeated:
            out[number] = BoxesForm.make({r: [box for _, box in rows] for r, rows in kept.items()}, form.world_size)
            places[number] = {rank: tuple(place for place, _ in rows) for rank, rows in kept.items()}
    return WantedOnce(tuple(out), tuple(places), {rank: tuple(its) for rank, its in repeats.items() if its})


def _wanted_pieces(number: int, form: Form, shape: Shape, rank: int) -> list[tuple[HeldPlace, Box]]:
    """(where it goes, which elements it is) of all that a rank wants of a form."""
    return [
        (HeldPlace(number, index, local), box)
        for index, part in enumerate(form.parts(shape, rank))
        for box, local in part.boxes()
        if not box.is_empty
    ]


def _new_of(
    wanted: Sequence[tuple[HeldPlace, Box]], before: Iterable[tuple[HeldPlace, Box]]
) -> tuple[list[tuple[HeldPlace, Box]], list[Repeat]]:
    """Of what is wanted, what was not there before, and what was."""
    again: list[Repeat] = []
    rest = list(wanted)
    for there, known in before:
        left: list[tuple[HeldPlace, Box]] = []
        for place, box in rest:
            common = box & known
            if common is None:
                left.append((place, box))
                continue
            again.append(Repeat(_within(there, common, known), _within(place, common, box)))
            left.extend((_within(place, piece, box), piece) for piece in box.difference(common))
        rest = left
    return rest, again


def _within(place: HeldPlace, piece: Box, box: Box) -> HeldPlace:
    """Where a piece of `box` is, which itself is at `place`."""
    return place._replace(box=piece.moved_with(box, place.box))


def _near(shape: Shape, forms: Sequence[Form]) -> list[list[int]]:
    """For each form, the earlier ones of which it may want the same elements: slices of a stack are none."""
    hulls = [_hull(form, shape) for form in forms]
    if not shape:
        return [[i for i in range(number) if hulls[i] is not None] for number in range(len(forms))]
    dim = max(range(len(shape)), key=lambda d: len({hull.offsets[d] for hull in hulls if hull is not None}))
    order = sorted((n for n, h in enumerate(hulls) if h is not None), key=lambda n: hulls[n].offsets[dim])  # type: ignore[union-attr]
    out: list[list[int]] = [[] for _ in forms]
    active: list[int] = []
    for number in order:
        hull = hulls[number]
        assert hull is not None
        active = [n for n in active if hulls[n].stops[dim] > hull.offsets[dim]]  # type: ignore[union-attr]
        for other in active:
            if hulls[other] & hull is not None:  # type: ignore[operator]
                out[max(number, other)].append(min(number, other))
        active.append(number)
    return [sorted(its) for its in out]


def _hull(form: Form, shape: Shape) -> Box | None:
    """The smallest box around all that the ranks want; None for nothing."""
    if not isinstance(form, BoxesForm):
        return Box.full(shape) if 0 not in shape else None
    boxes = [box for _, its in form.boxes for box in its if not box.is_empty]
    if not boxes:
        return None
    low = tuple(map(min, zip(*(box.offsets for box in boxes))))
    high = tuple(map(max, zip(*(box.stops for box in boxes))))
    return Box.of(low, tuple(b - a for a, b in zip(low, high)))


# Reading every needed byte once: which of the ranks that want an element reads it, and how it gets
# to the others.
#
# wanted by 4 ranks, in two replicas:    0 0 1 1      read by     0 2 1 3       then 0 <-> 2 and 1
# <-> 3
#                                        2 2 3 3


class OwnBox(NamedTuple):
    """A box that a rank reads for others, too, in its own local tensors."""

    part: int
    """Which of the local tensors."""
    box: Box
    """In its coordinates."""


@dataclass(frozen=True)
class ReadOncePlan:
    """Who reads what, and who passes it on to whom."""

    wanted: StateLayout
    """Of the tensors that several ranks want the same elements of. All others are read as they are wanted."""
    readers: StateLayout
    """Where each of their elements is read: at exactly one of the ranks that want it, which holds it then."""
    transfers: TransferPlan
    """From there to all others."""
    shares: SavePlan

    def own_boxes(self, rank: int) -> Mapping[str, tuple[OwnBox, ...]]:
        """Where in the local tensors of `rank` its parts of `readers` lie."""
        found: dict[str, list[OwnBox]] = {}
        if rank < self.shares.world_size:
            for item in self.shares.items(rank):
                found.setdefault(item.fqn, []).append(OwnBox(item.part, item.source))
        return {fqn: tuple(boxes) for fqn, boxes in found.items()}


def plan_read_once(wanted: StateLayout, *, ranks_per_host: int | None = None) -> ReadOncePlan:
    """Share the reading of what several ranks want evenly among them, each element once.

    A tensor of which ranks want regions that overlap without being equal is left out: everybody reads its own.
    Lists the regions of all ranks: meant for some thousands of ranks times tensors with replicas.
    """
    common: dict[str, TensorLayout] = {}
    judged: dict[tuple[object, ...], bool] = {}
    for fqn, layout in wanted.items():
        if layout.geometry_key not in judged:
            judged[layout.geometry_key] = _is_shared(layout)
        if judged[layout.geometry_key]:
            common[fqn] = layout
    state = StateLayout(common, wanted.world_size)
    shares = plan_writes(state, ranks_per_host=ranks_per_host)
    boxes: dict[str, dict[int, list[Box]]] = {fqn: {} for fqn in common}
    for rank in range(shares.world_size):
        for item in shares.items(rank):
            boxes[item.fqn].setdefault(rank, []).append(item.box)
    readers = StateLayout(
        {fqn: TensorLayout.from_boxes(common[fqn].spec, its) for fqn, its in boxes.items()}, wanted.world_size
    )
    transfers = plan_transfers(readers, state, ranks_per_host=ranks_per_host)
    return ReadOncePlan(state, readers, transfers, shares)


def _is_shared(layout: TensorLayout) -> bool:
    """Whether elements are wanted by several ranks, in regions that are equal wherever they overlap."""
    chunks = sum(box.numel for _, box in layout.chunks())
    if int(layout.numels().sum()) <= chunks:
        return False
    try:
        plan_writes(StateLayout({layout.fqn: layout}))
    except PlanError:
        return False
    return True
