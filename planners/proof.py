"""`verify`: is this layout or plan right? Exact, cheap enough to be always on, and concrete about what is wrong.

Where the form is a product, each dim is proved on its own: if the segments of every dim tile what each owner holds
exactly once and agree on global coordinates, so do their products. Everything else is listed and swept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planners.box import Box
from planners.cover import tiling_fault
from planners.errors import PlanError, ProofError
from planners.forms import Part
from planners.layout import StateLayout, TensorLayout
from planners.load_plan import LoadPlan, ReadItem
from planners.overlap import ProductOverlap
from planners.ownership import Segments
from planners.save_plan import SavePlan

__all__ = ["Finding", "Report", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    message: str
    fqn: str | None = None
    rank: int | None = None
    element: tuple[int, ...] | None = None
    """Index of a concrete element, in global coordinates of the tensor where they are known."""

    def __str__(self) -> str:
        where = [f"{self.fqn!r}"] if self.fqn is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"element {self.element}"] if self.element is not None else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found."""

    subject: str
    """What was judged."""
    findings: tuple[Finding, ...]
    """What is wrong; nothing if it is right."""
    tensors: int
    """How many tensors were judged."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def raise_if_failed(self) -> None:
        """Raises ProofError with all findings, if there are any."""
        if self.findings:
            first = self.findings[0]
            lines = "\n".join(f"  {finding}" for finding in self.findings[:50])
            raise ProofError(
                f"{self.subject} is wrong in {len(self.findings)} places:\n{lines}", fqn=first.fqn, rank=first.rank
            )

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{self.subject}: {self.tensors} tensors, {'right' if self.ok else f'{len(self.findings)} findings'}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def verify(subject: StateLayout | TensorLayout | LoadPlan | SavePlan) -> Report:
    """Prove a layout or plan right, or say what is wrong with it.

    A layout is right if its regions tile every tensor, each element once per group of replicas. A load plan is right
    if every wanted element is written exactly once, from the saved element with the same global
    coordinates, out of a chunk that its owner holds. A save plan is right if every element is written exactly once, by
    a rank that holds it.
    """
    if isinstance(subject, TensorLayout):
        subject = StateLayout({subject.fqn: subject})
    if isinstance(subject, StateLayout):
        found = _layout_findings(subject)
        return Report(repr(subject), tuple(found), len(subject))
    if isinstance(subject, LoadPlan):
        return Report(repr(subject), tuple(_load_findings(subject)), len(subject.wanted))
    if isinstance(subject, SavePlan):
        return Report(repr(subject), tuple(_save_findings(subject)), len(subject.layout))
    raise PlanError(f"cannot verify a {type(subject).__name__}: give a layout or a plan")


# layouts


def _layout_findings(layout: StateLayout) -> Iterator[Finding]:
    for names in layout.geometries().values():
        first = layout[names[0]]
        if first.product is not None:
            wrong = _product_fault(first)
        else:
            fault = tiling_fault([Box.full(first.spec.shape)], [box for _, box in first.chunks()])
            wrong = (fault.element, str(fault)) if fault is not None else None
        if wrong is not None:
            yield from (Finding(wrong[1], fqn, None, wrong[0]) for fqn in names)


def _product_fault(layout: TensorLayout) -> tuple[tuple[int, ...], str] | None:
    product = layout.product
    assert product is not None
    for d, own in enumerate(product.dims):
        wrong = own.uncovered()
        if wrong is not None:
            index = [0] * len(layout.spec.shape)
            index[d] = wrong[0]
            return tuple(index), f"index {wrong[0]} of dim {d} {wrong[1]}"
    return None


# load plans


def _load_findings(plan: LoadPlan) -> Iterator[Finding]:
    lacking = [fqn for fqn in plan.wanted if fqn not in plan.saved]
    yield from (Finding("is wanted, but not saved", fqn) for fqn in lacking)
    groups: dict[tuple[object, ...], list[str]] = {}
    for fqn, wanted in plan.wanted.items():
        if fqn not in lacking:
            groups.setdefault((wanted.geometry_key, plan.saved[fqn].geometry_key), []).append(fqn)
    for names in groups.values():
        yield from _geometry_findings(plan, names)
    for rank, items in plan.explicit.items():
        yield from _item_findings(plan, rank, items)


def _geometry_findings(plan: LoadPlan, names: Sequence[str]) -> Iterator[Finding]:
    fqn = names[0]
    saved, wanted = plan.saved[fqn], plan.wanted[fqn]
    if saved.spec.shape != wanted.spec.shape:
        yield Finding(f"is saved with shape {saved.spec.shape}, but wanted with {wanted.spec.shape}", fqn)
        return
    overlap = plan.overlap(fqn)
    if isinstance(overlap, ProductOverlap):
        for d, segments in enumerate(overlap.dims):
            wrong = _segments_fault(segments)
            if wrong is not None:
                owner, at, what = wrong
                index = tuple(at if i == d else 0 for i in range(len(wanted.spec.shape)))
                product = wanted.product
                assert product is not None
                rank = product.lowest_rank([owner if i == d else 0 for i in range(len(product.dims))])
                yield from (Finding(f"index {at} of dim {d} {what}", name, rank, index) for name in names)
        return
    for rank in range(wanted.world_size):
        if rank in plan.explicit:
            continue
        try:
            items = [
                ReadItem(fqn, p.owner, p.chunk, p.source, p.target, p.source.numel * saved.spec.itemsize, p.part)
                for p in overlap.pieces(rank)
            ]
        except PlanError as error:
            element = error.box.offsets if error.box is not None else None
            yield from (Finding("no saved chunk holds this element", name, rank, element) for name in names)
            continue
        for finding in _tensor_findings(plan, rank, fqn, items):
            yield from (Finding(finding.message, name, rank, finding.element) for name in names)


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
    held = np.bincount(segments.wanted_owner, weights=lengths, minlength=wanted.owners).astype(np.int64)
    short = np.flatnonzero(held != wanted.local_sizes)
    if len(short):
        owner = int(short[0])
        return owner, wanted.intervals(owner)[0][0], "is not written exactly once, with others of its owner"
    # the global index that a local position stands for, by the wanted side's own table
    sizes = np.concatenate(([0], np.cumsum(wanted.local_sizes)))
    position = wanted.local_starts + sizes[wanted.owner_of]
    row = np.searchsorted(position, segments.local_starts + sizes[segments.wanted_owner], side="right") - 1
    meant = wanted.starts[row] + (segments.local_starts + sizes[segments.wanted_owner] - position[row])
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


def _item_findings(plan: LoadPlan, rank: int, items: Sequence[ReadItem]) -> Iterator[Finding]:
    by_name: dict[str, list[ReadItem]] = {fqn: [] for fqn in plan.wanted}
    for item in items:
        if item.fqn not in by_name or item.fqn not in plan.saved:
            yield Finding("is read, but is not wanted or not saved", item.fqn, rank, item.box.offsets)
        else:
            by_name[item.fqn].append(item)
    for fqn, own in by_name.items():
        if fqn in plan.saved:
            yield from _tensor_findings(plan, rank, fqn, own)


def _tensor_findings(plan: LoadPlan, rank: int, fqn: str, items: Sequence[ReadItem]) -> Iterator[Finding]:
    parts = plan.wanted.parts(fqn, rank)
    saved = plan.saved[fqn]
    sound: dict[int, list[Box]] = {index: [] for index in range(len(parts))}
    for item in items:
        message = _item_fault(item, saved, parts)
        if message is not None:
            yield Finding(message, fqn, rank, item.box.offsets)
        elif not item.source.is_empty:
            sound[item.part].append(item.target)
    for index, part in enumerate(parts):
        fault = tiling_fault([local for _, local in part.boxes()], sound[index])
        if fault is not None:
            element = _global_index(part, fault.element)
            times = "never" if fault.count == 0 else f"{fault.count} times"
            yield Finding(f"is written {times}, at {fault.element} of the local tensor", fqn, rank, element)


def _item_fault(item: ReadItem, saved: TensorLayout, parts: Sequence[Part]) -> str | None:
    """What is wrong with one item by itself, or None."""
    if item.source.sizes != item.target.sizes:
        return f"reads a box of sizes {item.source.sizes} into one of {item.target.sizes}"
    if item.nbytes != item.source.numel * saved.spec.itemsize:
        return f"claims {item.nbytes} bytes, but {item.source.numel} elements of {saved.spec.dtype} are meant"
    if not Box.full(item.chunk.sizes).contains(item.source):
        return f"reads {item.source}, which lies outside its chunk of sizes {item.chunk.sizes}"
    if not 0 <= item.owner < saved.world_size or not any(box.contains(item.chunk) for box in saved.boxes(item.owner)):
        return f"reads {item.chunk} from {item.owner}, which does not hold it"
    if not 0 <= item.part < len(parts):
        return f"writes local tensor {item.part}, but the rank has {len(parts)}"
    for box, local in parts[item.part].boxes():
        common = local & item.target
        if common is None:
            continue
        if common != item.target:
            return f"writes {item.target}, which goes beyond a piece of the local tensor"
        meant = item.target.relative_to(local).shift(box.offsets)
        if meant != item.box:
            return f"writes to {meant} what is at {item.box}"
        return None
    return None if item.target.is_empty else f"writes {item.target}, which lies outside the local tensor"


def _global_index(part: Part, local_index: tuple[int, ...]) -> tuple[int, ...] | None:
    for box, local in part.boxes():
        here = Box.of(local_index, (1,) * len(local_index))
        if local.contains(here):
            return here.relative_to(local).shift(box.offsets).offsets
    return None


# save plans


def _save_findings(plan: SavePlan) -> Iterator[Finding]:
    written: dict[str, list[Box]] = {fqn: [] for fqn in plan.layout}
    for rank in range(plan.world_size):
        for item in plan.items(rank):
            parts = plan.layout.parts(item.fqn, rank)
            held = [
                local
                for box, local in (parts[item.part].boxes() if item.part < len(parts) else ())
                if box.contains(item.box) and item.box.relative_to(box).shift(local.offsets) == item.source
            ]
            if not held:
                yield Finding(f"writes {item.box}, which it does not hold there", item.fqn, rank, item.box.offsets)
            written[item.fqn].append(item.box)
    for fqn, boxes in written.items():
        fault = tiling_fault([Box.full(plan.layout[fqn].spec.shape)], boxes)
        if fault is not None:
            yield Finding(f"is written {fault.count} times, not once", fqn, None, fault.element)
