"""Plans as text for terminals."""

from __future__ import annotations

from planners.load_plan import LoadPlan
from planners.save_plan import SavePlan
from planners.units import format_bytes

__all__ = ["format_bytes", "format_plan"]


def format_plan(plan: LoadPlan | SavePlan, limit: int | None = 20) -> str:
    """The plan in words: totals, bytes per rank with a bar, and up to `limit` items (None: all) of the first ranks."""
    verb = "reads" if isinstance(plan, LoadPlan) else "writes"
    loads = plan.rank_bytes()
    most = max(int(loads.max()), 1)
    lines = [repr(plan)]
    shown = range(plan.world_size) if limit is None else range(min(plan.world_size, limit))
    for rank in shown:
        bar = "#" * round(30 * int(loads[rank]) / most)
        lines.append(f"  rank {rank:>5} {verb} {format_bytes(int(loads[rank])):>10}  {bar}")
    if len(shown) < plan.world_size:
        mean = format_bytes(float(loads.mean()))
        lines.append(f"  ... {plan.world_size - len(shown)} more ranks; mean {mean}, most {format_bytes(most)}")
    left = limit
    for rank in range(plan.world_size):
        if left is not None and left <= 0:
            break
        items = plan.items(rank)
        if items:
            lines.append(f"  items of rank {rank}:")
        for item in items[: left if left is not None else None]:
            lines.append(f"    {_line(item)}")
        if left is not None:
            if len(items) > left:
                lines.append(f"    ... {len(items) - left} more")
            left -= len(items)
    return "\n".join(lines)


def _line(item: object) -> str:
    box = getattr(item, "chunk", None)
    if box is None:
        return f"{item.fqn} {item.box} <- local {item.source}, {format_bytes(item.nbytes)}"  # type: ignore[attr-defined]
    return (
        f"{item.fqn} {item.target} <- {item.source} of chunk {box} of {item.owner}, "  # type: ignore[attr-defined]
        f"{format_bytes(item.nbytes)}"  # type: ignore[attr-defined]
    )
