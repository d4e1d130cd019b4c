"""Load plans: for every rank, which bytes of which saved chunks go where; with proofs and request counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planners.errors import CoverageError, LayoutMismatchError, PlanError, did_you_mean
from planners.findings import Finding, in_groups
from planners.geometry.arrays import Ints, ints, ones, zeros
from planners.geometry.box import Box, Dims, rearranged
from planners.geometry.byte_ranges import ByteRuns, Window
from planners.geometry.layout import Part, StateLayout, TensorSpec, check_rank
from planners.geometry.overlap import Overlap, ProductOverlap, overlap_of
from planners.geometry.ownership import Segments
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

if TYPE_CHECKING:  # imported when there is a view: most plans have none
    from planners.geometry.views import View


class ReadItem(NamedTuple):
    """One box of elements, from a saved chunk to the rank's local tensor."""

    fqn: str
    owner: int
    """Owner of the saved chunk: the lowest rank that holds it, or the chunk id of explicit boxes."""
    chunk: Box
    """The saved chunk, in global coordinates."""
    source: Box
    """The overlap, in the saved chunk's coordinates."""
    target: Box
    """The overlap, in the local tensor's coordinates. Its sizes are the same, unless `dims` changes
    them."""
    nbytes: int
    """Bytes of the overlap, as saved."""
    part: int = 0
    """Index of the rank's local tensor of this FQN. 0 unless the wanted layout has explicit boxes or
    flat ranges."""
    saved_as: str | None = None
    """FQN of the saved tensor, if a view gives it another one."""
    dims: Dims | None = None
    """For each dim of the local tensor, the dim of the chunk that it comes from, or None for a new dim
    of size 1. Other dims of the chunk have size 1. None: the same dims in the same order."""

    @property
    def saved_fqn(self) -> str:
        """FQN of the saved tensor that the chunk belongs to."""
        return self.fqn if self.saved_as is None else self.saved_as

    @property
    def box(self) -> Box:
        """The overlap, in global coordinates of the saved tensor."""
        return Box.of(tuple(map(add, self.source.offsets, self.chunk.offsets)), self.source.sizes)

    def __str__(self) -> str:
        saved = "" if self.saved_as is None else f" of {self.saved_as}"
        turned = "" if self.dims is None else f" with dims {self.dims}"
        where = f"{self.source} of {self.chunk}{saved} by {self.owner}"
        return f"{self.fqn}: {where}{turned} -> {self.target}, {self.nbytes} bytes"


class FillItem(NamedTuple):
    """One box of a local tensor that has a constant value and is not read."""

    fqn: str
    target: Box
    """The box, in the coordinates of the local tensor."""
    value: float
    part: int = 0
    """As in `ReadItem`."""


class ReadItems(PlanItems[ReadItem]):
    """The items of one rank, in the order of names and of local elements."""

    __slots__ = ()


class LoadPlan(Plan[ReadItems]):
    """What every rank reads. Immutable.

    A plan consists of two layouts, and of views if wanted tensors are composed of saved ones. Items
    are computed for the rank that you ask for. A plan with explicitly listed items (`with_items`)
    keeps them, and `verify` checks them.
    """

    __slots__ = ("_groups", "_rank_bytes", "saved", "views", "wanted")

    kind, verb, _MADE_OF, _Listed = "load", "reads", ("saved", "wanted", "views"), ReadItems
    covers = "every rank reads each element that it needs exactly once, from the right place"

    saved: StateLayout
    wanted: StateLayout
    views: dict[str, View]
    """Wanted tensors that are composed of saved ones. All others are saved under their own FQN."""

    def __init__(
        self,
        saved: StateLayout,
        wanted: StateLayout,
        explicit: Mapping[int, Sequence[ReadItem]] | None = None,
        views: Mapping[str, View] | None = None,
    ) -> None:
        self.saved, self.wanted = saved, wanted
        self._list(wanted, wanted.world_size, explicit)
        self.views = dict(views or {})
        self._rank_bytes: Ints | None = None
        self._groups: tuple[dict[str, int], ...] | None = None

    def overlap(self, fqn: str) -> Overlap:
        """Return the overlap of the saved and the wanted layout of a tensor. All tensors of the same
        geometry share it."""
        wanted, view = self.wanted[fqn], self.views.get(fqn)
        if view is None:
            return overlap_of(wanted.spec.shape, self.saved[fqn].form, wanted.form)
        return view.overlap([self.saved[source.fqn].form for source in view.sources], wanted.form)

    def sources(self, fqn: str) -> tuple[str, ...]:
        """Return the FQNs of the saved tensors that a wanted tensor is composed of."""
        view = self.views.get(fqn)
        return (fqn,) if view is None else tuple(source.fqn for source in view.sources)

    def geometry_key(self, fqn: str) -> tuple[object, ...]:
        """Return everything that the plan of a tensor depends on, except FQNs. Tensors with equal
        results share one plan."""
        wanted, view = self.wanted[fqn].geometry_key, self.views.get(fqn)
        if view is None:
            return wanted, self.saved[fqn].geometry_key
        return wanted, view.geometry, tuple(self.saved[source.fqn].geometry_key for source in view.sources)

    def saved_itemsize(self, fqn: str) -> int:
        """Return the saved bytes per element of a wanted tensor."""
        view = self.views.get(fqn)
        return self.saved[fqn].spec.itemsize if view is None else view.spec.itemsize

    items = Plan[ReadItems].rank_items
    """Return what a rank reads."""

    def _derived(self, rank: int) -> Iterable[ReadItem]:
        found: list[tuple[int, list[ReadItem]]] = []
        for group in self.groups():
            first = next(iter(group))
            pattern = self.tensor_items(first, rank)
            if not pattern:
                continue
            for fqn, position in group.items():
                if fqn in self.views:
                    names = dict(zip(self.sources(first), self.sources(fqn)))
                    items = [ReadItem(fqn, *item[1:7], names[item.saved_fqn], item.dims) for item in pattern]
                else:
                    items = [ReadItem(fqn, *item[1:]) for item in pattern]
                found.append((position, items))
        found.sort(key=lambda row: row[0])
        return itertools.chain.from_iterable(items for _, items in found)

    def groups(self) -> tuple[dict[str, int], ...]:
        """Return groups of FQNs that share one plan, with their positions among all wanted FQNs.

        Raises LayoutMismatchError if a wanted tensor, or a source of its view, is not saved.
        """
        if self._groups is None:
            groups: dict[tuple[object, ...], dict[str, int]] = {}
            for position, fqn in enumerate(self.wanted):
                try:
                    groups.setdefault(self.geometry_key(fqn), {})[fqn] = position
                except KeyError as error:
                    raise LayoutMismatchError(f"{error} is not saved", fqn=fqn) from None
            self._groups = tuple(groups.values())
        return self._groups

    def tensor_items(self, fqn: str, rank: int) -> list[ReadItem]:
        """Return the items that `rank` reads of one tensor according to the layouts. Ignores explicitly
        listed items."""
        names, itemsize = self.sources(fqn) if fqn in self.views else (None,), self.saved_itemsize(fqn)
        try:
            return [
                ReadItem(fqn, owner, chunk, source, target, source.numel * itemsize, part, names[tensor], dims)
                for owner, chunk, source, target, part, tensor, dims in self.overlap(fqn).pieces(rank)
            ]
        except CoverageError as error:
            raise CoverageError(str(error), fqn=fqn, rank=rank, box=error.box) from None

    def fills(self, rank: int) -> tuple[FillItem, ...]:
        """Return the constants that views put into the local tensors of `rank`, such as padding."""
        check_rank(rank, self.world_size)
        return tuple(
            FillItem(fqn, slot.box, slot.value, slot.part)
            for fqn in self.wanted
            if fqn in self.views
            for slot in self.overlap(fqn).fills(rank)
        )

    def rank_bytes(self) -> Ints:
        """Return the saved bytes that each rank reads, every needed element once. Does not list items."""
        if self._rank_bytes is not None:
            return self._rank_bytes
        total = zeros(self.world_size)
        groups: dict[tuple[object, ...], list[str]] = {}
        for fqn, wanted in self.wanted.items():
            view = self.views.get(fqn)
            if view is None and fqn not in self.saved:
                continue  # nothing to read: verify says so
            filled = view.geometry if view is not None and view.fills else None
            groups.setdefault((wanted.geometry_key, self.saved_itemsize(fqn), filled), []).append(fqn)
        for names in groups.values():
            held, view = self.wanted[names[0]].numels(), self.views.get(names[0])
            if view is not None and view.fills:
                overlap, held = self.overlap(names[0]), held.copy()
                for ranks in overlap.replicas():
                    held[ranks] -= sum(slot.box.numel for slot in overlap.fills(int(ranks[0])))
            total[: len(held)] += held * (self.saved_itemsize(names[0]) * len(names))
        for rank, items in self.explicit.items():
            total[rank] = items.nbytes
        total.flags.writeable = False
        self._rank_bytes = total
        return total

    def geometries(self) -> int:
        return len(self.groups())

    def item_counts(self) -> Ints:
        return count_reads(self).items

    def findings(self) -> Iterator[Finding]:
        """Yield all problems."""
        unfit = dict(_unfit(self.saved, self.wanted, self.views, allow_cast=True))
        yield from (Finding(message, fqn) for fqn, message in unfit.items())
        fit = self
        if unfit:
            rest = {fqn: layout for fqn, layout in self.wanted.items() if fqn not in unfit}
            fit = LoadPlan(self.saved, StateLayout(rest), None, self.views)
        for group in fit.groups():
            first = next(iter(group))
            overlap = self.overlap(first)
            if isinstance(overlap, ProductOverlap):
                yield from alike(product_findings(overlap), group)
            else:
                yield from alike(_rank_findings(self, first, overlap), group)
        if self.explicit:
            yield from listed_findings(
                self.explicit,
                self.names,
                "is read, but is not wanted",
                lambda rank, fqn, items: iter(()) if fqn in unfit else _tensor_findings(self, rank, fqn, items),
            )

    def __repr__(self) -> str:
        ranks = f"{self.saved.world_size} -> {self.world_size}"
        return f"LoadPlan(tensors={len(self.wanted)}, ranks={ranks}, bytes={self.total_bytes})"


def plan_reads(
    saved: StateLayout,
    wanted: StateLayout,
    *,
    allow_cast: bool = False,
    views: Mapping[str, View] | Iterable[View] = (),
) -> LoadPlan:
    """Plan what every rank of `wanted` reads from chunks placed as `saved`. Tensors that only `saved`
    has are not read.

    `views` lists wanted tensors that are composed of saved ones with other FQNs or shapes. Views of
    tensors that are not in `wanted` are not used. The result depends only on the arguments, and is
    the same on every rank.

    Raises:
        LayoutMismatchError: a wanted tensor or a source of a view is not saved, or is saved with
            another shape or dtype. The error lists the first 20. With `allow_cast`, dtypes may
            differ, and the caller casts.
    """
    check_states(saved=saved, wanted=wanted)
    given = views.values() if isinstance(views, Mapping) else views
    used = {view.spec.fqn: view for view in given if view.spec.fqn in wanted}
    problems = [Finding(message, fqn) for fqn, message in _unfit(saved, wanted, used, allow_cast)]
    if problems:
        lines = in_groups(problems)
        lines[20:] = [f"and {len(lines) - 20} more"] * (len(lines) > 20)
        head = f"{len(problems)} of {len(wanted)} target tensors do not match the saved state:"
        listed, reasons = "\n    ".join([head, *lines]), "; ".join(it.message for it in problems)
        if " with shape " in reasons:
            listed += "\n  the shape of each tensor must be the same on both sides"
        if " not saved" in reasons:
            listed += "\n  fix: use the same names on both sides, or leave these out"
        raise LayoutMismatchError(listed)
    return LoadPlan(saved, wanted, views=used)


# What is wrong with a load plan.


def _unfit(
    saved: StateLayout, wanted: StateLayout, views: Mapping[str, View], allow_cast: bool
) -> Iterator[tuple[str, str]]:
    """Yield (wanted name, what is wrong) of tensors that are not saved, or with another shape or dtype."""
    hints = min(20, 1 + 100_000 // (len(saved) + 1))  # each compares all names
    for fqn, layout in wanted.items():
        spec, view = layout.spec, views.get(fqn)
        if view is not None and (differs := _difference(view.spec, spec, allow_cast)):
            yield fqn, f"is made by a view {differs}"
        user = "target layout" if view is None else "view"
        for source in (spec,) if view is None else view.sources:
            what, other = "is" if view is None else f"takes from {source.fqn!r}, which is", saved.get(source.fqn)
            if other is None:
                yield fqn, f"{what} not saved{did_you_mean(source.fqn, saved) if hints > 0 else ''}"
                hints -= 1
            elif differs := _difference(other.spec, source, allow_cast and view is None, user):
                yield fqn, f"{what} saved {differs}"


def _difference(given: TensorSpec, meant: TensorSpec, allow_cast: bool, user: str = "target layout") -> str:
    """Return how a tensor differs from the expected one. "" if it does not."""
    if given.shape != meant.shape:
        return f"with shape {list(given.shape)}, but the {user} has {list(meant.shape)}"
    return "" if given.dtype == meant.dtype or allow_cast else f"as {given.dtype}, but the {user} has {meant.dtype}"


def _rank_findings(plan: LoadPlan, fqn: str, overlap: Overlap) -> Iterator[Finding]:
    """Yield what is wrong with tensors of one geometry, rank by rank."""
    for same in overlap.replicas():
        rank = next((rank for rank in same.tolist() if rank not in plan.explicit), None)
        if rank is None:
            continue
        try:
            items = plan.tensor_items(fqn, rank)
        except PlanError as error:
            element = error.box.offsets if error.box is not None else None
            yield Finding("no saved chunk holds this element", None, rank, element)
            continue
        yield from _tensor_findings(plan, rank, fqn, items)


def _tensor_findings(plan: LoadPlan, rank: int, fqn: str, items: Sequence[ReadItem]) -> Iterator[Finding]:
    parts, view = plan.wanted.parts(fqn, rank), plan.views.get(fqn)
    filled: dict[int, list[Box]] = {}
    for slot in plan.overlap(fqn).fills(rank):
        meant = global_box(parts[slot.part], slot.box)
        declared = [fill for fill in view.fills if fill.value == slot.value] if view is not None else []
        if meant is None or not any(fill.target.contains(meant) for fill in declared):
            yield Finding(f"fills {slot.box} of the local tensor, which no view declares", None, rank)
        filled.setdefault(slot.part, []).append(slot.box)
    yield from arrival_findings(rank, parts, items, lambda item: _item_fault(item, plan, parts), filled)


def _item_fault(item: ReadItem, plan: LoadPlan, parts: Sequence[Part]) -> str | None:
    """Return what is wrong with one item by itself, or None."""
    identity = tuple(range(item.source.ndim))
    try:
        sizes = rearranged(item.source, identity if item.dims is None else item.dims).sizes
    except PlanError as error:
        return str(error)
    if sizes != item.target.sizes:
        return f"reads a box of sizes {sizes} into one of {item.target.sizes}"
    saved = plan.saved.get(item.saved_fqn)
    if saved is None:
        return f"reads {item.saved_fqn!r}, which is not saved"
    if item.nbytes != item.source.numel * saved.spec.itemsize:
        return f"says {item.nbytes} bytes, but has {item.source.numel} elements of {saved.spec.dtype}"
    if not Box.full(item.chunk.sizes).contains(item.source):
        return f"reads {item.source}, which is outside its chunk of sizes {item.chunk.sizes}"
    if not 0 <= item.owner < saved.world_size or not any(box.contains(item.chunk) for box in saved.boxes(item.owner)):
        return f"reads {item.chunk} from {item.owner}, which does not hold it"
    if not 0 <= item.part < len(parts):
        return f"writes local tensor {item.part}, but the rank has {len(parts)}"
    if item.target.is_empty:
        return None
    meant = global_box(parts[item.part], item.target)
    if meant is None:
        return f"writes {item.target}, which goes beyond a piece of the local tensor"
    return _origin_fault(item, plan, meant)


def _origin_fault(item: ReadItem, plan: LoadPlan, meant: Box) -> str | None:
    """Return what is wrong with where the elements of `meant`, in global coordinates of the target,
    come from; or None."""
    identity, names = tuple(range(meant.ndim)), plan.sources(item.fqn)
    found = (meant, item.saved_fqn, item.box, item.dims or identity)
    for box, tensor, source, dims in plan.overlap(item.fqn).origins(meant):
        if found == (box, names[tensor], source, dims or identity):
            return None
    turned = "" if item.dims is None else f" with dims {item.dims}"
    return f"writes {item.box} of {item.saved_fqn!r}{turned} to {meant}, which needs other elements"


# How many items and read requests a load plan has for every rank, counted without listing them.
#
# A chunk is stored row-major in one file. An item's elements are runs of bytes in it, and gaps of up to
# a limit between runs are read along with them. Per dim, segments of equal extent in chunks of
# equal extent need the same, so a product plan is counted by kinds of segments, of which there are
# a handful:
#
#     rank's items = product over dims of its segments;    requests = sum over kinds of (items of the kind x runs of
# one)


@dataclass(frozen=True, eq=False)
class ReadCounts:
    """Counts of every rank, each an array over ranks."""

    items: Ints
    requests: Ints
    """Reads after coalescing."""
    read_bytes: Ints
    """Bytes of these reads: those needed and the gaps between them."""


def count_reads(plan: LoadPlan, max_gap_bytes: int = 0) -> ReadCounts:
    """Items, requests and bytes of every rank, if gaps of up to `max_gap_bytes` within an item are
    read as well."""
    total = zeros((3, plan.world_size))
    for group in plan.groups():
        names = list(group)
        overlap = plan.overlap(names[0])
        if isinstance(overlap, ProductOverlap):
            counted = _count_product(overlap, plan.saved_itemsize(names[0]), max_gap_bytes)
            total[:, overlap.wanted.mesh.ranks] += counted * len(names)
            continue
        for same in overlap.replicas():
            counts = _count_items(plan, plan.tensor_items(names[0], int(same[0])), max_gap_bytes)
            total[:, same] += ints(counts)[:, None] * len(names)
    for rank, items in plan.explicit.items():
        total[:, rank] = _count_items(plan, items, max_gap_bytes)
    return ReadCounts(*total)


def _count_items(plan: LoadPlan, items: Sequence[ReadItem], max_gap_bytes: int) -> tuple[int, int, int]:
    reads = [
        _reads(item.source, item.chunk.sizes, plan.saved[item.saved_fqn].spec.itemsize, max_gap_bytes) for item in items
    ]
    return len(items), sum(one.count for one in reads), sum(one.nbytes for one in reads)


def _reads(piece: Box, chunk: Sequence[int], itemsize: int, max_gap_bytes: int) -> ByteRuns:
    """The reads of a box of a chunk that is stored row-major, as the reader makes them."""
    return Window.row_major(0, chunk, itemsize).crop(piece).runs().joined(max_gap_bytes)


def _count_product(overlap: ProductOverlap, itemsize: int, max_gap_bytes: int) -> Ints:
    """(items, requests, bytes) at each position of the wanted mesh, for one tensor."""
    kinds = [_Kinds(segments) for segments in overlap.dims]
    out = zeros((3, overlap.wanted.mesh.size))
    for combo in itertools.product(*(range(len(kind.sizes)) for kind in kinds)):
        items = ones(overlap.wanted.mesh.size)
        for kind, k, owner in zip(kinds, combo, overlap.wanted.rank_owners):
            items *= kind.counts[k, owner]
        pairs = [kind.sizes[k] for kind, k in zip(kinds, combo)]
        reads = _reads(Box.full([p for p, _ in pairs]), [c for _, c in pairs], itemsize, max_gap_bytes)
        out += items * np.array([[1], [reads.count], [reads.nbytes]])
    return out


class _Kinds:
    """Segments of a dim by their extent and that of their chunk: how many of each kind every wanted
    owner has."""

    def __init__(self, segments: Segments) -> None:
        chunk = (segments.saved.stops - segments.saved.starts)[segments.saved_row]
        pairs = np.stack((segments.stops - segments.starts, chunk), axis=1)
        sizes, kind = np.unique(pairs, axis=0, return_inverse=True)
        self.sizes: list[tuple[int, int]] = [(int(p), int(c)) for p, c in sizes]
        self.counts = zeros((len(sizes), segments.wanted.owners))
        np.add.at(self.counts, (kind.reshape(-1), segments.wanted_owner), 1)
