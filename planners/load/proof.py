"""Proof of load plans: per dim where both sides are products, item by item elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.geometry.box import Box, rearranged
from planners.geometry.cover import tiling_fault
from planners.geometry.layout import StateLayout
from planners.geometry.layout_forms import Part
from planners.geometry.overlap import ProductOverlap
from planners.geometry.ownership import Segments
from planners.load.plan import LoadPlan, ReadItem

__all__ = ["global_box", "product_findings", "tiling_findings", "verify_load"]


def verify_load(plan: LoadPlan) -> Report:
    """The proof of a load plan, or all that is wrong."""
    covers = (
        "every wanted element is read exactly once, from the saved element that it is; this does not say that the "
        "layout is the one you meant"
    )
    return Report(repr(plan), tuple(_load_findings(plan)), len(plan.wanted), covers=covers)


def _load_findings(plan: LoadPlan) -> Iterator[Finding]:
    """All that is wrong with a load plan."""
    unfit = dict(_unfit(plan))
    yield from (Finding(message, fqn) for fqn, message in unfit.items())
    fit = plan
    if unfit:
        rest = {fqn: layout for fqn, layout in plan.wanted.items() if fqn not in unfit}
        fit = LoadPlan(plan.saved, StateLayout(rest), None, plan.views)
    for group in fit.groups():
        yield from _geometry_findings(plan, list(group))
    for rank, items in plan.explicit.items():
        yield from _item_findings(plan, rank, items, [fqn for fqn in plan.wanted if fqn not in unfit])


def _unfit(plan: LoadPlan) -> Iterator[tuple[str, str]]:
    """(wanted name, what is wrong) of tensors whose two sides do not even have the same shape."""
    for fqn, layout in plan.wanted.items():
        view = plan.views.get(fqn)
        if view is not None and view.shape != layout.spec.shape:
            yield fqn, f"is made by a view with shape {view.shape}, but wanted with {layout.spec.shape}"
            continue
        for source in view.sources if view is not None else (layout.spec,):
            saved = plan.saved.get(source.fqn)
            if saved is None:
                yield fqn, "is wanted, but not saved" if view is None else f"takes from {source.fqn!r}, not saved"
                break
            if saved.spec.shape != source.shape:
                yield fqn, f"{source.fqn!r} is saved with shape {saved.spec.shape}, but wanted with {source.shape}"
                break


def _geometry_findings(plan: LoadPlan, names: Sequence[str]) -> Iterator[Finding]:
    """What is wrong with tensors of one geometry: dim by dim if both sides are products, else rank by rank."""
    fqn, overlap = names[0], plan.overlap(names[0])
    if overlap.product is not None:
        yield from product_findings(overlap.product, names)
        return
    for alike in overlap.replicas():
        rank = next((rank for rank in alike.tolist() if rank not in plan.explicit), None)
        if rank is None:
            continue
        try:
            items = plan.tensor_items(fqn, rank)
        except PlanError as error:
            element = error.box.offsets if error.box is not None else None
            yield from (Finding("no saved chunk holds this element", name, rank, element) for name in names)
            continue
        for finding in _tensor_findings(plan, rank, fqn, items):
            yield from (Finding(finding.message, name, rank, finding.element) for name in names)


def product_findings(overlap: ProductOverlap, names: Iterable[str]) -> Iterator[Finding]:
    """What is wrong with the tensors `names` of one geometry, each dim being proved by itself for all ranks."""
    for d, segments in enumerate(overlap.dims):
        wrong = _segments_fault(segments)
        if wrong is not None:
            owner, at, what = wrong
            index = tuple(at if i == d else 0 for i in range(len(overlap.dims)))
            rank = overlap.wanted.lowest_rank([owner if i == d else 0 for i in range(len(overlap.dims))])
            yield from (Finding(f"index {at} of dim {d} {what}", name, rank, index) for name in names)


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


def _item_findings(plan: LoadPlan, rank: int, items: Sequence[ReadItem], judged: Sequence[str]) -> Iterator[Finding]:
    by_name: dict[str, list[ReadItem]] = {fqn: [] for fqn in judged}
    for item in items:
        if item.fqn in by_name:
            by_name[item.fqn].append(item)
        elif item.fqn not in plan.wanted:
            yield Finding("is read, but is not wanted", item.fqn, rank, item.box.offsets)
    for fqn, own in by_name.items():
        yield from _tensor_findings(plan, rank, fqn, own)


def _tensor_findings(plan: LoadPlan, rank: int, fqn: str, items: Sequence[ReadItem]) -> Iterator[Finding]:
    parts, view = plan.wanted.parts(fqn, rank), plan.views.get(fqn)
    written: dict[int, list[Box]] = {}
    for item in items:
        message = _item_fault(item, plan, parts)
        if message is not None:
            yield Finding(message, fqn, rank, item.box.offsets)
        else:
            written.setdefault(item.part, []).append(item.target)
    for slot in plan.overlap(fqn).fills(rank):
        meant = global_box(parts[slot.part], slot.box)
        declared = [fill for fill in view.fills if fill.value == slot.value] if view is not None else []
        if meant is None or not any(fill.target.contains(meant) for fill in declared):
            yield Finding(f"fills {slot.box} of the local tensor, which no view declares", fqn, rank)
        written.setdefault(slot.part, []).append(slot.box)
    yield from tiling_findings(parts, written, fqn, rank)


def tiling_findings(
    parts: Sequence[Part], written: Mapping[int, Sequence[Box]], fqn: str, rank: int
) -> Iterator[Finding]:
    """The local tensors of a rank of which not every element is written exactly once.

    `written`: which local tensor -> boxes in its coordinates.
    """
    for index, part in enumerate(parts):
        fault = tiling_fault([local for _, local in part.boxes()], written.get(index, ()))
        if fault is not None:
            element = global_box(part, Box(fault.element, (1,) * len(fault.element)))
            times = "never" if fault.count == 0 else f"{fault.count} times"
            message = f"is written {times}, at {fault.element} of the local tensor"
            yield Finding(message, fqn, rank, None if element is None else element.offsets)


def _item_fault(item: ReadItem, plan: LoadPlan, parts: Sequence[Part]) -> str | None:
    """What is wrong with one item by itself, or None."""
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
        return f"claims {item.nbytes} bytes, but {item.source.numel} elements of {saved.spec.dtype} are meant"
    if not Box.full(item.chunk.sizes).contains(item.source):
        return f"reads {item.source}, which lies outside its chunk of sizes {item.chunk.sizes}"
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
    """What is wrong with where the elements of `meant`, in global coordinates of the target, come from; or None."""
    identity, names = tuple(range(meant.ndim)), plan.sources(item.fqn)
    found = (meant, item.saved_fqn, item.box, item.dims or identity)
    for box, tensor, source, dims in plan.overlap(item.fqn).origins(meant):
        if found == (box, names[tensor], source, dims or identity):
            return None
    turned = "" if item.dims is None else f" with dims {item.dims}"
    return f"writes to {meant} what is at {item.box} of {item.saved_fqn!r}{turned}, which comes from elsewhere"


def global_box(part: Part, local_box: Box) -> Box | None:
    """A box of the local tensor in global coordinates; None if it is not within one of the part's boxes."""
    for box, local in part.boxes():
        if local.contains(local_box):
            return local_box.relative_to(local).shift(box.offsets)
    return None
