"""The common type of all plans, which list what a rank reads, writes, or receives; and `verify`,
the proof. Proofs are exact, cheap enough to be always on, and concrete about problems. If a form is
a product, each dim is proved on its own: if the segments of every dim tile what each owner holds
exactly once and agree on global coordinates, so do their products. Everything else is listed and
swept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.geometry.arrays import Ints, running_sums
from planners.geometry.box import Box, Shape
from planners.geometry.layout import Part, StateLayout, TensorLayout, check_rank
from planners.geometry.overlap import ProductOverlap, tiling_fault
from planners.geometry.ownership import Segments
from planners.notebooks import Pictured
from planners.units import format_some


class PlanItem(Protocol):
    """One box of elements that a plan moves."""

    @property
    def fqn(self) -> str: ...

    @property
    def box(self) -> Box:
        """The elements, in global coordinates of the tensor that they are taken from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box, as it is before."""


class ArrivingItem(PlanItem, Protocol):
    """A move that ends in a local tensor of the rank that it is listed for."""

    @property
    def target(self) -> Box:
        """Where the elements go, in the coordinates of the local tensor."""

    @property
    def part(self) -> int:
        """Which of the rank's local tensors."""


ItemT = TypeVar("ItemT", bound=PlanItem)
ItemsT = TypeVar("ItemsT", bound="PlanItems[Any]")
ArrivingT = TypeVar("ArrivingT", bound=ArrivingItem)


class PlanItems(tuple[ItemT, ...]):
    """The items of one rank."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self)


@runtime_checkable
class Provable(Protocol):
    """A layout or plan: it can be proved correct, or lists what is wrong."""

    covers: ClassVar[str]
    """What is proved if nothing is wrong."""

    @property
    def names(self) -> Sequence[str]:
        """What is checked."""

    def findings(self) -> Iterator[Finding]:
        """Return all problems."""


def verify(subject: object) -> Report:
    """Prove that a layout or plan is correct, or report what is wrong with it. `covers` of the
    report says what was proved. The proof does not show that a layout is the one that you meant:
    `Topology.unsharded_axes` lists axes that shard nothing.

    - A layout is correct if its boxes cover every tensor, each element once per group of replicas.
    - A load plan is correct if every target element is written exactly once. It comes from the saved
      element with the same global coordinates, or from the one that a view maps to it, in a chunk
      that its owner holds. Or it is a constant of a view.
    - A save plan is correct if every element is written exactly once, by a rank that holds it.
    - A transfer plan is correct if every needed element arrives exactly once, from a rank that holds
      it.
    - A schedule is correct if its plan is correct, if in one round no rank sends to two ranks or
      receives from two, if it stays within its budget, and if every byte of the plan is sent once.
    - A copy plan is correct if the bytes of each rank are on `copies + 1` hosts.

    Raises PlanError for a value that is not a layout, plan, or schedule.
    """
    if isinstance(subject, TensorLayout):
        subject = StateLayout({subject.fqn: subject})
    if isinstance(subject, StateLayout):
        covers = "its boxes cover every tensor, each element once per group of replicas"
        return Report(repr(subject), tuple(_layout_findings(subject)), len(subject), covers=covers)
    if isinstance(subject, Provable):
        left = getattr(subject, "missing", ())
        covers = subject.covers + f"; not filled: {format_some([*map(repr, left)], 3)}" * bool(left)
        name = repr(subject) if isinstance(subject, Plan) else str(subject)
        return Report(name, tuple(subject.findings()), len(subject.names), covers=covers)
    raise PlanError(f"verify takes a layout, a plan, or a schedule, got {subject!r:.80}")


def _layout_findings(layout: StateLayout) -> Iterator[Finding]:
    for names in layout.geometries().values():
        wrong = layout_fault(layout[names[0]])
        if wrong is not None:
            yield from alike([wrong], names)


class Plan(ABC, Pictured, Generic[ItemsT]):
    """What every rank reads, writes, or receives. Frozen. Depends on its layouts only. Items are
    computed for the rank that you ask for. A plan whose items were listed explicitly (`with_items`)
    keeps them, and `verify` checks them.
    """

    __slots__ = ("explicit", "names", "world_size")

    _INSTEAD: ClassVar[str] = "plan.verify() proves a plan"
    """What errors say where a checkpoint is expected."""
    kind: ClassVar[Literal["load", "save", "transfer"]]
    verb: ClassVar[str]
    """What a rank does with its bytes."""
    covers: ClassVar[str]
    """What is proved if there are no problems."""
    _MADE_OF: ClassVar[tuple[str, ...]]
    """The constructor's arguments without `explicit`: layouts first, the one that the plan leads to
    last of them."""
    _Listed: type[ItemsT]

    names: tuple[str, ...]
    """The tensors that are read, written, or moved."""
    world_size: int
    """Number of ranks."""
    explicit: dict[int, ItemsT]
    """Explicitly listed items, by rank. They replace the computed ones."""

    def _list(self, names: Iterable[str], world_size: int, explicit: Mapping[int, Iterable[Any]] | None) -> None:
        """Raises PlanError for a rank outside the job."""
        self.names, self.world_size = tuple(names), world_size
        self.explicit = {rank: self._Listed(items) for rank, items in (explicit or {}).items()}
        for rank in self.explicit:
            check_rank(rank, world_size)

    def _made_of(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._MADE_OF}

    @property
    def sides(self) -> dict[str, StateLayout]:
        """The layouts of the plan by their role. The plan leads to the last one."""
        return {name: value for name, value in self._made_of().items() if isinstance(value, StateLayout)}

    def with_items(self: PlanT, items: Mapping[int, Sequence[Any]]) -> PlanT:
        """Return the same plan with the items of the given ranks replaced."""
        return type(self)(**self._made_of() | {"explicit": {**self.explicit, **items}})

    def rank_items(self, rank: int) -> ItemsT:
        """Return what `rank` reads, writes, or receives, listed or computed.

        Raises PlanError for a rank outside the job, and CoverageError if no rank has a needed element.
        """
        check_rank(rank, self.world_size)
        return self.explicit[rank] if rank in self.explicit else self._Listed(self._derived(rank))

    @abstractmethod
    def _derived(self, rank: int) -> Iterable[Any]:
        """Return what the layouts make `rank` do, whatever was listed explicitly."""

    def verify(self) -> Report:
        """Prove the plan, as `reshard.planners.verify(plan)` does. `.ok` of the report is True if it is correct."""
        return verify(self)

    @abstractmethod
    def findings(self) -> Iterator[Finding]:
        """Return all problems."""

    @abstractmethod
    def rank_bytes(self) -> Ints:
        """Return the bytes that each rank reads, writes, or receives from others. Items are not listed."""

    @abstractmethod
    def geometries(self) -> int:
        """Number of groups of tensors that share all planning."""

    @abstractmethod
    def item_counts(self) -> Ints | None:
        """Return the number of items of each rank without listing them; None if it depends on divided chunks."""

    def bytes(self, rank: int) -> int:
        """Return the bytes that `rank` reads, writes, or receives from others."""
        check_rank(rank, self.world_size)
        return int(self.rank_bytes()[rank])

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(self.rank_bytes().tolist())  # which may be more than 64 bits hold

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.explicit == other.explicit and self._made_of() == other._made_of()

    __hash__ = None  # type: ignore[assignment]  # holds mappings of many tensors


PlanT = TypeVar("PlanT", bound=Plan[Any])


def check_states(**sides: object) -> None:
    """Raises PlanError for a side that is not the layout of a state."""
    for side, given in sides.items():
        if not isinstance(given, StateLayout):
            raise PlanError(
                f"{side} must be a StateLayout, such as topology.layout(saved.specs), got {given!r:.80}. reshard.plan "
                "also takes text such as 'fsdp=4'"
            )


# What proofs of several kinds of plans ask.


def alike(findings: Iterable[Finding], names: Collection[str]) -> Iterator[Finding]:
    """Repeat each finding for all of the tensors `names`, which have one geometry."""
    return (replace(finding, fqn=name) for finding in findings for name in names)


def layout_fault(layout: TensorLayout) -> Finding | None:
    """An element that the distinct regions of a layout do not hold exactly once. Of a product each
    dim is proved."""
    shape, product = layout.spec.shape, layout.product
    if product is None:
        fault = tiling_fault([Box.full(shape)], [box for _, box in layout.chunks()])
        return None if fault is None else Finding(str(fault), element=fault.element)
    for d, own in enumerate(product.dims):
        wrong = own.uncovered()
        if wrong is not None:
            at, what = wrong
            return Finding(f"index {at} of dim {d} {what}", element=_along(d, at, shape))
    return None


def product_findings(overlap: ProductOverlap) -> Iterator[Finding]:
    """Yield what is wrong with the tensors of one geometry. Each dim is proved by itself for all ranks."""
    for d, segments in enumerate(overlap.dims):
        wrong = _segments_fault(segments)
        if wrong is not None:
            owner, at, what = wrong
            rank = overlap.wanted.lowest_rank(_along(d, owner, overlap.dims))
            yield Finding(f"index {at} of dim {d} {what}", None, rank, _along(d, at, overlap.dims))


def _along(dim: int, value: int, dims: Sequence[object]) -> Shape:
    """The index that is 0 in all dims but one."""
    return tuple(value if d == dim else 0 for d in range(len(dims)))


def _segments_fault(segments: Segments) -> tuple[int, int, str] | None:
    """(wanted owner, global index, what is wrong) of one dim's table; None if it is right."""
    wanted, saved = segments.wanted, segments.saved
    lengths = segments.stops - segments.starts
    # the rows of an owner must follow one another in its local dim, from 0 to its size
    fresh = np.zeros(len(lengths), dtype=bool)
    fresh[segments.indptr[:-1][np.diff(segments.indptr) > 0]] = True
    due = np.where(fresh, 0, np.concatenate(([0], segments.local_starts[:-1] + lengths[:-1]))[: len(lengths)])
    bad = np.flatnonzero((segments.local_starts != due) | (lengths <= 0))
    if len(bad):
        i = bad[0]
        return int(segments.wanted_owner[i]), int(segments.starts[i]), "is not written exactly once"
    held = np.diff(running_sums(lengths)[segments.indptr])
    short = np.flatnonzero(held != wanted.local_sizes)
    if len(short):
        owner = int(short[0])
        return owner, wanted.intervals(owner)[0][0], "is not written exactly once, with others of its owner"
    # the global index that a local position stands for, by the wanted side's own table
    sizes = running_sums(wanted.local_sizes)
    position = wanted.local_starts + sizes[wanted.owner_of]
    here = segments.local_starts + sizes[segments.wanted_owner]
    row = np.searchsorted(position, here, side="right") - 1
    meant = wanted.starts[row] + (here - position[row])
    wrong = np.flatnonzero((meant != segments.starts) | (segments.stops > wanted.stops[row]))
    if len(wrong):
        i = wrong[0]
        return int(segments.wanted_owner[i]), int(meant[i]), f"is written from index {int(segments.starts[i])}"
    outside = np.flatnonzero(
        (segments.starts < saved.starts[segments.saved_row]) | (segments.stops > saved.stops[segments.saved_row])
    )
    if len(outside):
        i = outside[0]
        return int(segments.wanted_owner[i]), int(segments.starts[i]), "is read from a chunk that does not hold it"
    return None


def listed_findings(
    explicit: Mapping[int, Iterable[ItemT]],
    names: Iterable[str],
    stranger: str,
    judge: Callable[[int, str, list[ItemT]], Iterator[Finding]],
) -> Iterator[Finding]:
    """Yield what is wrong with items that were listed by hand: `stranger`, of those of other
    tensors than `names`, and what `judge` says of all items of one rank and name."""
    for rank, items in explicit.items():
        found: dict[str, list[ItemT]] = {fqn: [] for fqn in names}
        for item in items:
            if item.fqn in found:
                found[item.fqn].append(item)
            else:
                yield Finding(stranger, item.fqn, rank, item.box.offsets)
        for fqn, own in found.items():
            yield from alike(judge(rank, fqn, own), [fqn])


def arrival_findings(
    rank: int,
    parts: Sequence[Part],
    items: Iterable[ArrivingT],
    fault: Callable[[ArrivingT], str | None],
    written: Mapping[int, Sequence[Box]],
) -> Iterator[Finding]:
    """Yield what is wrong with all items of one tensor and rank: each by itself, and that every
    element of the local tensors is written exactly once.

    `fault` says what is wrong with one item; `written` is what else is written: local tensor ->
    boxes in it.
    """
    filled = {index: list(boxes) for index, boxes in written.items()}
    for item in items:
        message = fault(item)
        if message is not None:
            yield Finding(message, None, rank, item.box.offsets)
        else:
            filled.setdefault(item.part, []).append(item.target)
    for index, part in enumerate(parts):
        wrong = tiling_fault([local for _, local in part.boxes()], filled.get(index, ()))
        if wrong is not None:
            element = global_box(part, Box(wrong.element, (1,) * len(wrong.element)))
            times = "never" if wrong.count == 0 else f"{wrong.count} times"
            message = f"is written {times}, at {wrong.element} of the local tensor"
            yield Finding(message, None, rank, None if element is None else element.offsets)


def global_box(part: Part, local_box: Box) -> Box | None:
    """A box of the local tensor in global coordinates; None if it is not within one of the part's boxes."""
    for box, local in part.boxes():
        if local.contains(local_box):
            return local_box.moved_with(local, box)
    return None
