"""Proof of save plans: every element of every tensor is written once, by a rank that holds it.

Plans that are derived are proved geometry by geometry: the chunks tile the tensor, every entry's rank holds its chunk,
and the entries of a chunk cut its strip of units from the first to the last. No rank's items are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.geometry.box import Box
from planners.geometry.cover import tiling_fault
from planners.geometry.layout import TensorLayout
from planners.geometry.ownership import Ints
from planners.save.assignment import Assignment, ProductTable
from planners.save.plan import SavePlan, WriteItem

__all__ = ["verify_save"]


def verify_save(plan: SavePlan) -> Report:
    """The proof of a save plan, or all that is wrong."""
    covers = "every element is written exactly once, by a rank that holds it"
    return Report(repr(plan), tuple(_save_findings(plan)), len(plan.layout), covers=covers)


def _save_findings(plan: SavePlan) -> Iterator[Finding]:
    """All that is wrong with a save plan."""
    if plan.explicit:
        yield from _listed_findings(plan)
        return
    times = Counter(fqn for assigned in plan.assignments for fqn in assigned.names)
    yield from (Finding("is not written", fqn) for fqn in plan.layout if fqn not in times)
    yield from (Finding(f"is assigned {count} times", fqn) for fqn, count in times.items() if count > 1)
    for assigned in plan.assignments:
        if assigned.names:
            layout = plan.layout[assigned.names[0]]
            others = [fqn for fqn in assigned.names if plan.layout[fqn].geometry_key != layout.geometry_key]
            yield from (Finding("is assigned with tensors of another geometry", fqn) for fqn in others)
            yield from _assignment_findings(assigned, layout)


def _assignment_findings(assigned: Assignment, layout: TensorLayout) -> Iterator[Finding]:
    yield from _tiling_findings(assigned, layout)
    chunks, counts = assigned.chunks, np.diff(assigned.chunks.indptr)
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    for entry in np.flatnonzero(~_held(assigned, layout, chunk_of)).tolist():
        element = _first(assigned, int(chunk_of[entry]))
        yield from (
            Finding("is written by a rank that does not hold it", f, int(assigned.ranks[entry]), element)
            for f in assigned.names
        )
    begins = np.concatenate(([0], assigned.ends[:-1])) if len(assigned.ends) else assigned.ends
    begins[chunks.indptr[:-1]] = 0
    bad = set(chunk_of[assigned.ends < begins].tolist())
    bad |= set(np.flatnonzero(assigned.ends[chunks.indptr[1:] - 1] != assigned.units * len(assigned.names)).tolist())
    longest = (
        np.take_along_axis(chunks.sizes, assigned.dims[:, None], axis=1)[:, 0] if layout.spec.shape else assigned.units
    )
    bad |= set(np.flatnonzero((assigned.units != 1) & (assigned.units != longest)).tolist())
    for chunk in sorted(bad):
        yield from (Finding("is not written exactly once", f, None, _first(assigned, chunk)) for f in assigned.names)


def _tiling_findings(assigned: Assignment, layout: TensorLayout) -> Iterator[Finding]:
    """The chunks of the assignment are those of the tensor, and tile it."""
    if isinstance(assigned.chunks, ProductTable) and layout.product is not None:
        for d, (own, owners) in enumerate(zip(layout.product.dims, assigned.chunks.owners)):
            wrong = own.uncovered()
            if wrong is not None or not np.array_equal(owners, np.flatnonzero(own.local_sizes)):
                at = 0 if wrong is None else wrong[0]
                element = tuple(at if i == d else 0 for i in range(len(layout.spec.shape)))
                yield from (Finding("is not written exactly once", fqn, None, element) for fqn in assigned.names)
        return
    boxes = [box for chunk in range(len(assigned.units)) for box, _ in assigned.chunks.part(chunk).boxes()]
    fault = tiling_fault([Box.full(layout.spec.shape)], boxes)
    if fault is not None:
        yield from (
            Finding(f"is written {fault.count} times, not once", fqn, None, fault.element) for fqn in assigned.names
        )


def _held(
    assigned: Assignment, layout: TensorLayout, chunk_of: Ints
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether the rank of each entry holds its chunk, as the local tensor that the entry names."""
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


def _first(assigned: Assignment, chunk: int) -> tuple[int, ...]:
    """An element of a chunk."""
    return next(iter(assigned.chunks.part(chunk).boxes()))[0].offsets


def _listed_findings(plan: SavePlan) -> Iterator[Finding]:
    """Every item of every rank, one by one: for plans with items that were listed by hand."""
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
            yield Finding(f"is written {fault.count} times, not once", fqn, None, fault.element)


def _item_fault(item: WriteItem, plan: SavePlan, rank: int) -> str | None:
    """What is wrong with one item by itself, or None."""
    parts, spec = plan.layout.parts(item.fqn, rank), plan.layout[item.fqn].spec
    if item.nbytes != item.box.numel * spec.itemsize:
        return f"claims {item.nbytes} bytes, but {item.box.numel} elements of {spec.dtype} are meant"
    for box, local in parts[item.part].boxes() if 0 <= item.part < len(parts) else ():
        if box.contains(item.box) and item.box.relative_to(box).shift(local.offsets) == item.source:
            return None
    return f"writes {item.box}, which it does not hold there"
