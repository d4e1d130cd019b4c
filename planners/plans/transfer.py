"""Transfer plans: which rank sends which bytes to which, to move a state between layouts of one job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planners.errors import CoverageError, LayoutMismatchError, PlanError
from planners.findings import Finding
from planners.geometry.arrays import Ints, ints, zeros
from planners.geometry.box import Box, Shape, upper_corner
from planners.geometry.layout import BoxesForm, Form, Part, ProductGeometry, StateLayout, check_rank, local_boxes
from planners.geometry.overlap import Sweep
from planners.plans.plan import (
    Plan,
    PlanItems,
    alike,
    arrival_findings,
    check_states,
    global_box,
    listed_findings,
    product_findings,
)
from planners.plans.routing import Route, Traffic, intersection_of, pair_groups, total_traffic

if TYPE_CHECKING:
    import networkx as nx

# Ranks before and after are one numbering: rank 3 before is rank 3 after. The two sides may be the
# same ranks, share some, or share none. What a receiver holds already it copies; every other byte
# that it needs crosses to it once.
#
# Replicas are fed one by one: if k ranks of one host need the same bytes, these cross to the host k
# times. Where that is too much, `planners.plans.relay` makes two plans: a stripe for each
# replica, and then what they lack from one another.


class TransferItem(NamedTuple):
    """One box of elements, from the sender's local tensor to the receiver's."""

    fqn: str
    sender: int
    receiver: int
    """The same as the sender for a copy within a rank."""
    box: Box
    """The elements, in global coordinates."""
    source: Box
    """The same elements, in the coordinates of the sender's local tensor."""
    target: Box
    """The same elements, in the coordinates of the receiver's local tensor."""
    nbytes: int
    """Bytes of the box, as the sender holds it."""
    source_part: int = 0
    """Index of the sender's local tensor of this name."""
    target_part: int = 0
    """Index of the receiver's local tensor of this name."""

    @property
    def part(self) -> int:
        """Index of the receiver's local tensor."""
        return self.target_part

    @property
    def is_local(self) -> bool:
        """True for a copy within a rank."""
        return self.sender == self.receiver

    def __str__(self) -> str:
        return f"{self.fqn}: {self.box}, rank {self.sender} {self.source} -> rank {self.receiver} {self.target}"


class TransferItems(PlanItems[TransferItem]):
    """Items in the order of names, then of the sender's boxes, then of the receiver's elements. Their
    bytes include copies within a rank."""

    __slots__ = ()


class TransferPlan(Plan[TransferItems]):
    """What every rank sends, receives, and copies. Immutable.

    A plan consists of its two layouts. Items are computed for the rank that you ask for. Receivers
    with explicitly listed items (`with_items`) keep them, and `verify` checks them.
    """

    kind, verb, _Listed = "transfer", "receives", TransferItems
    _MADE_OF = ("before", "after", "names", "ranks_per_host")
    covers = "every needed element is delivered exactly once, from a rank that holds it"

    def __init__(
        self,
        before: StateLayout,
        after: StateLayout,
        names: Sequence[str],
        ranks_per_host: int | None = None,
        explicit: Mapping[int, Sequence[TransferItem]] | None = None,
    ) -> None:
        """`names`: the tensors to move, which both sides have. Use `plan_transfers`, which checks that.

        Raises PlanError for a name that one side lacks or that is listed twice, for shapes that
        differ, for explicit items from or to ranks outside the job, and for items that are listed
        for another receiver.
        """
        self.before, self.after, self.ranks_per_host = before, after, ranks_per_host
        self._list(names, max(before.world_size, after.world_size), explicit)
        if ranks_per_host is not None and ranks_per_host < 1:
            raise PlanError(f"ranks_per_host must be >= 1, got {ranks_per_host}")
        if len(set(self.names)) < len(self.names):
            raise PlanError("the names of a transfer list a tensor twice")
        for fqn in self.names:
            if fqn not in before or fqn not in after:
                raise PlanError("a tensor that moves must be in both layouts", fqn=fqn)
            if before[fqn].spec.shape != after[fqn].spec.shape:
                raise LayoutMismatchError("a tensor that moves must have the same shape in both layouts", fqn=fqn)
        for rank, items in self.explicit.items():
            for item in items:
                check_rank(item.sender, self.world_size)
                if item.receiver != rank:
                    raise PlanError(f"an item listed for this rank goes to rank {item.receiver}", rank=rank)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names that only the layout `before` has."""
        moved = set(self.names)
        return tuple(fqn for fqn in self.before if fqn not in moved)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that only the layout `after` has. They are not filled."""
        moved = set(self.names)
        return tuple(fqn for fqn in self.after if fqn not in moved)

    # --- one rank ---

    def items_to(self, rank: int) -> TransferItems:
        """Return what arrives at `rank`, each needed element once, including copies within the rank."""
        return self.rank_items(rank)

    def items_from(self, rank: int) -> TransferItems:
        """Return what `rank` sends to other ranks."""
        check_rank(rank, self.world_size)
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
        """Return all items of all ranks, receiver by receiver, including copies within a rank."""
        for rank in range(self.world_size):
            yield from self.items_to(rank)

    def _derived(self, rank: int) -> Iterable[TransferItem]:
        found: list[tuple[int, TransferItem]] = []
        for route in self.routes:
            for source in route.intersection.sources(rank):
                commons = _commons(route, source, rank)
                for fqn, position, sender in zip(route.group.names, route.group.positions, route.senders(source, rank)):
                    found.extend((position, TransferItem(fqn, sender, rank, *common)) for common in commons)
        found.sort(key=lambda row: row[0])
        return (item for _, item in found)

    def first_items(self, route: Route, rank: int) -> list[TransferItem]:
        """Return what arrives at `rank` of the first tensor of a route's group, ignoring explicitly
        listed items."""
        fqn = route.group.names[0]
        return [
            TransferItem(fqn, route.senders(source, rank)[0], rank, *common)
            for source in route.intersection.sources(rank)
            for common in _commons(route, source, rank)
        ]

    # --- all ranks ---

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Senders and receivers per geometry, the largest first, so that the load stays even."""
        groups = pair_groups(self.before, self.after, self.names)
        heavy = sorted(groups, key=lambda group: (-group.before.spec.nbytes * len(group), group.positions[0]))
        loads, out = zeros(self.world_size), []
        for group in heavy:
            try:
                intersection = intersection_of(group.before.spec.shape, group.before.form, group.after.form)
            except CoverageError as error:
                raise CoverageError("no rank holds it", fqn=group.names[0], rank=error.rank, box=error.box) from None
            route = Route(group, intersection, loads, self.ranks_per_host)
            loads = loads + route.sent_bytes(self.world_size)
            out.append(route)
        self._derived_sent = loads
        return tuple(out)

    def traffic(self) -> Traffic:
        """Return the bytes between every two ranks that exchange any, as columns sorted by sender
        and receiver."""
        return total_traffic(self.traffic_blocks(), self.world_size)

    def traffic_blocks(self) -> Iterator[Traffic]:
        """Yield the parts that `traffic` sums, in bounded memory. Pairs of ranks may occur several times."""
        listed = ints(sorted(self.explicit))
        for route in self.routes:
            for block in route.traffic():
                kept = ~np.isin(block.receiver, listed) if len(listed) else slice(None)
                yield Traffic(*(column[kept] for column in block))
        for items in self.explicit.values():
            rows = [(item.sender, item.receiver, item.nbytes) for item in items if not item.is_local and item.nbytes]
            yield Traffic(*ints(rows).reshape(-1, 3).T)

    def sent_bytes(self) -> Ints:
        """Return the bytes that each rank sends to others. Items are not listed."""
        return self._totals[0]

    def received_bytes(self) -> Ints:
        """Return the bytes that each rank receives from others. Items are not listed."""
        return self._totals[1]

    def local_bytes(self) -> Ints:
        """Return the bytes that each rank copies from its own tensors. Items are not listed."""
        return self._totals[2]

    @property
    def bytes_moved(self) -> int:
        """Bytes sent between ranks: each needed byte once to each receiver that does not hold it."""
        return self.total_bytes

    @cached_property
    def _totals(self) -> tuple[Ints, Ints, Ints]:
        received, local = (zeros(self.world_size) for _ in range(2))
        for route in self.routes:
            nbytes = route.group.before.spec.itemsize * len(route.group)
            here = route.intersection.local_numels(self.world_size) * nbytes
            held = route.group.after.numels() * nbytes
            received[: len(held)] += held
            received -= here
            local += here
        sent = self._derived_sent.copy()
        for rank, items in self.explicit.items():
            for sign, some in ((-1, self._derived(rank)), (1, items)):
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
        """Return a graph with ranks as nodes and one edge per sender, receiver, and name, with its
        `nbytes`.

        The name is the edge's key. This lists all items: for thousands of ranks, use `traffic`.
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

    # --- what reports and proofs ask ---

    def rank_bytes(self) -> Ints:
        return self.received_bytes()

    def geometries(self) -> int:
        return len(self.routes)

    def item_counts(self) -> Ints:
        """Return the number of items to each rank, including copies within a rank."""
        total = zeros(self.world_size)
        for route in self.routes:
            total += route.intersection.counts(self.world_size) * len(route.group)
        for rank, listed in self.explicit.items():
            total[rank] = len(listed)
        return total

    def findings(self) -> Iterator[Finding]:
        """Yield all problems."""
        try:
            routes = self.routes
        except CoverageError as error:
            element = error.box.offsets if error.box is not None else None
            yield Finding("no rank holds this element", error.fqn, error.rank, element)
            return
        for route in routes:
            yield from alike(_route_findings(self, route), route.group.names)
        strange = "is sent, but is not part of the transfer"
        yield from listed_findings(self.explicit, self.names, strange, partial(_tensor_findings, self))
        yield from _conservation(self)

    def __repr__(self) -> str:
        return f"TransferPlan(tensors={len(self.names)}, ranks={self.before.world_size} -> {self.after.world_size})"


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
    """Plan which rank sends what to which, so that ranks with the layout `before` have the layout
    `after`.

    A receiver that already holds an element copies it locally. Other receivers get it from one of its
    holders: from their own host if possible, otherwise from the holders in turn, the least loaded
    first. The result depends only on the arguments, and is the same on every rank. FQNs that only
    `before` has are dropped.

    Args:
        before, after: the layouts.
        ranks_per_host: number of ranks per host: ranks 0 to n - 1 are on the first host, and so on.
            None if hosts do not matter.
        allow_cast: dtypes may differ. Bytes are counted and sent in the dtype of `before`. The caller
            casts.
        allow_missing: FQNs that only `after` has are not filled. The plan lists them as `missing`.

    Raises:
        LayoutMismatchError: shapes or dtypes of tensors differ, or no rank holds a tensor before. The
            error lists all of them.
    """
    check_states(before=before, after=after)
    names = [fqn for fqn in after if fqn in before] if allow_missing else list(after)
    problems: list[str] = []
    for fqn in names:
        wanted, held = after[fqn].spec, before[fqn].spec if fqn in before else None
        if held is None:
            problems.append(f"no rank holds {fqn!r} before")
        elif held.shape != wanted.shape:
            problems.append(f"{fqn!r} has shape {list(held.shape)} before, but {list(wanted.shape)} after")
        elif held.dtype != wanted.dtype and not allow_cast:
            problems.append(f"{fqn!r} is {held.dtype} before, but {wanted.dtype} after (allow_cast permits that)")
    if problems:
        raise LayoutMismatchError("the target layout does not match the source layout: " + "; ".join(problems))
    return TransferPlan(before, after, names, ranks_per_host)


# What is wrong with a transfer plan.


def _route_findings(plan: TransferPlan, route: Route) -> Iterator[Finding]:
    yield from _dealing_findings(route)
    overlap = route.intersection.overlap
    if overlap is not None:
        yield from product_findings(overlap)
        yield from _holders_findings(route, overlap.saved)
        return
    for rank in route.group.after.form.ranks():
        if rank not in plan.explicit:
            yield from _tensor_findings(plan, rank, route.group.names[0], plan.first_items(route, rank))


def _holders_findings(route: Route, before: ProductGeometry) -> Iterator[Finding]:
    """The table of holders against the owners of every rank."""
    holders, number = route.intersection.holders, zeros(before.mesh.size)
    for owners, own in zip(before.rank_owners, before.dims):
        number = number * own.owners + owners
    wrong_ranks = holders.ranks[number[before.mesh.positions(holders.ranks)] != holders.source_of]
    for rank in wrong_ranks[:1].tolist():
        yield Finding("sends a box that it does not hold", None, rank)


def _dealing_findings(route: Route) -> Iterator[Finding]:
    """The order in which holders get deliveries must name each of them once."""
    holders = route.intersection.holders
    order = np.lexsort((route.order, holders.source_of))
    wrong = np.flatnonzero(route.order[order] != holders.ranks)
    for place in wrong[:1].tolist():
        yield Finding("sends a box that it does not hold", None, int(route.order[order][place]))


def _tensor_findings(plan: TransferPlan, rank: int, fqn: str, items: Sequence[TransferItem]) -> Iterator[Finding]:
    parts = plan.after.parts(fqn, rank) if rank < plan.after.world_size else ()
    return arrival_findings(rank, parts, items, lambda item: _item_fault(item, plan, parts), {})


def _item_fault(item: TransferItem, plan: TransferPlan, parts: Sequence[Part]) -> str | None:
    """Return what is wrong with one item by itself, or None."""
    itemsize = plan.before[item.fqn].spec.itemsize
    if item.nbytes != item.box.numel * itemsize:
        return f"says {item.nbytes} bytes, but has {item.box.numel} elements of {itemsize} bytes"
    given = plan.before.parts(item.fqn, item.sender) if item.sender < plan.before.world_size else ()
    for side, at, local, its in (
        ("sender", item.source_part, item.source, given),
        ("receiver", item.target_part, item.target, parts),
    ):
        if not 0 <= at < len(its):
            return f"is at local tensor {at} of the {side}, which has {len(its)}"
        if local.sizes != item.box.sizes:
            return f"is a box of sizes {item.box.sizes}, but of {local.sizes} at the {side}"
        if item.box.is_empty:
            continue
        meant = global_box(its[at], local)
        if meant is None:
            return f"is {local} at the {side}, which goes beyond a piece of its local tensor"
        if meant != item.box:
            return f"is {item.box}, but the {side}'s {local} is {meant}"
    return None


def _conservation(plan: TransferPlan) -> Iterator[Finding]:
    sent, received = int(plan.sent_bytes().sum()), int(plan.received_bytes().sum())
    if sent != received:
        yield Finding(f"the ranks send {sent} bytes, but receive {received}")
    for column, what in (
        (plan.sent_bytes(), "sends"),
        (plan.received_bytes(), "receives"),
        (plan.local_bytes(), "copies"),
    ):
        for rank in np.flatnonzero(column < 0)[:1].tolist():
            yield Finding(f"{what} {int(column[rank])} bytes", None, rank)


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
    """Elements that a rank holds, in one of the forms."""

    form: int
    """Number of the form, as given."""
    part: int
    """Index of the local tensor."""
    box: Box
    """The box, in the coordinates of the local tensor."""


HeldBox = tuple[HeldPlace, Box]
"""What a rank holds, and which box of the tensor that is."""


class Repeat(NamedTuple):
    """Elements that are in place already, and where they are also wanted."""

    source: HeldPlace
    target: HeldPlace


@dataclass(frozen=True)
class WantedOnce:
    """The forms without repetitions."""

    forms: tuple[Form, ...]
    """What is to be moved, for each form that was given."""
    places: tuple[Mapping[int, tuple[HeldPlace, ...]] | None, ...]
    """For each form, rank -> where each of its boxes goes in the local tensors of the original
    form. None if the form is unchanged."""
    repeats: Mapping[int, tuple[Repeat, ...]]
    """Copies for each rank to make, in this order, after everything has been moved."""


@lru_cache(maxsize=256)
def want_once(shape: Shape, forms: tuple[Form, ...]) -> WantedOnce:
    """Return what must be moved of a tensor of which ranks want all of `forms`, so that no rank
    gets an element twice."""
    near = _near(shape, forms)
    out: list[Form] = list(forms)
    places: list[Mapping[int, tuple[HeldPlace, ...]] | None] = [None] * len(forms)
    moved: dict[tuple[int, int], list[HeldBox]] = {}
    repeats: dict[int, list[Repeat]] = {}
    for number, form in enumerate(forms):
        kept: dict[int, list[HeldBox]] = {}
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


def _wanted_pieces(number: int, form: Form, shape: Shape, rank: int) -> list[HeldBox]:
    """(where it goes, which elements it is) of all that a rank wants of a form."""
    return [
        (HeldPlace(number, index, local), box)
        for index, box, local in local_boxes(form, shape, rank)
        if not box.is_empty
    ]


def _new_of(wanted: Sequence[HeldBox], before: Iterable[HeldBox]) -> tuple[list[HeldBox], list[Repeat]]:
    """Divide what is wanted into what is new, and what was there before."""
    again: list[Repeat] = []
    rest = list(wanted)
    for there, known in before:
        left: list[HeldBox] = []
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
    """Return where a piece of `box` is, which itself is at `place`."""
    return place._replace(box=piece.moved_with(box, place.box))


def _near(shape: Shape, forms: Sequence[Form]) -> list[list[int]]:
    """Return, for each form, the earlier forms that may want the same elements. Slices of a stack
    never do."""
    hulls = [_hull(form, shape) for form in forms]
    sweep = Sweep((number, hull) for number, hull in enumerate(hulls) if hull is not None)
    found = [() if hull is None else sweep.meeting(hull) for hull in hulls]
    return [sorted(other for other, _, _ in its if other < number) for number, its in enumerate(found)]


def _hull(form: Form, shape: Shape) -> Box | None:
    """The smallest box around all that the ranks want; None for nothing."""
    if not isinstance(form, BoxesForm):
        return Box.full(shape) if 0 not in shape else None
    boxes = [box for _, its in form.boxes for box in its if not box.is_empty]
    if not boxes:
        return None
    low = tuple(map(min, zip(*(box.offsets for box in boxes))))
    return Box.of(low, tuple(b - a for a, b in zip(low, upper_corner(boxes))))
