"""Proof of save plans."""

from __future__ import annotations

from collections.abc import Iterator

from planners.box import Box
from planners.cover import tiling_fault
from planners.findings import Finding
from planners.save_plan import SavePlan

__all__ = ["save_findings"]


def save_findings(plan: SavePlan) -> Iterator[Finding]:
    """All that is wrong with a save plan."""
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
