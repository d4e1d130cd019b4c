"""Plans as text for terminals: a plan at a glance, and the story of one tensor on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from planners.errors import PlanError
from planners.geometry.layout import TensorLayout
from planners.geometry.layout_forms import Part
from planners.geometry.ownership import Ints
from planners.load.plan import LoadPlan, ReadItem
from planners.save.plan import SavePlan, WriteItem
from planners.transfer.plan import TransferItem, TransferPlan
from planners.transfer.rounds import Schedule
from planners.units import format_bytes

__all__ = ["explain", "format_bytes", "format_plan"]

_Plan = LoadPlan | SavePlan | TransferPlan


def format_plan(plan: LoadPlan | SavePlan | TransferPlan | Schedule, limit: int | None = 20) -> str:
    """The plan in words: totals, bytes per rank with a bar, and up to `limit` items (None: all) of the first ranks.

    A schedule is told round by round, up to `limit` of them.
    """
    if isinstance(plan, Schedule):
        return "\n".join(_schedule_lines(plan, limit))
    if isinstance(plan, TransferPlan):
        loads, verb, moved = plan.received_bytes(), "receives", f", {format_bytes(plan.bytes_moved)} cross"
    else:
        loads, verb, moved = plan.rank_bytes(), "reads" if isinstance(plan, LoadPlan) else "writes", ""
    lines = [repr(plan) + moved, *_load_lines(loads, verb, limit)]
    left = limit
    for rank in range(plan.world_size):
        if left is not None and left <= 0:
            break
        items = _items(plan, rank)
        if items:
            lines.append(f"  items of rank {rank}:")
        lines += [f"    {_line(item)}" for item in items[:left]]
        if left is not None:
            if len(items) > left:
                lines.append(f"    ... {len(items) - left} more")
            left -= len(items)
    return "\n".join(lines)


def explain(plan: LoadPlan | SavePlan | TransferPlan, fqn: str, rank: int) -> str:
    """What a plan makes one rank do about one tensor, and why: what it holds or wants, and every item of it.

    Raises PlanError for a name that the plan does not have, or a rank outside the job.
    """
    if isinstance(plan, SavePlan):
        return "\n".join(_explain_save(plan, _known(plan.layout.get(fqn), fqn), rank))
    if isinstance(plan, TransferPlan):
        if fqn not in plan.names:
            raise PlanError("the plan moves no tensor of this name", fqn=fqn)
        return "\n".join(_explain_transfer(plan, fqn, rank))
    return "\n".join(_explain_load(plan, _known(plan.wanted.get(fqn), fqn), rank))


def _load_lines(loads: Ints, verb: str, limit: int | None) -> Iterator[str]:
    most = max(int(loads.max(initial=0)), 1)
    shown = len(loads) if limit is None else min(len(loads), limit)
    for rank in range(shown):
        bar = "#" * round(30 * int(loads[rank]) / most)
        yield f"  rank {rank:>5} {verb} {format_bytes(int(loads[rank])):>10}  {bar}"
    if shown < len(loads):
        mean = format_bytes(float(loads.mean()))
        yield f"  ... {len(loads) - shown} more ranks; mean {mean}, most {format_bytes(most)}"


def _schedule_lines(rounds: Schedule, limit: int | None) -> Iterator[str]:
    yield repr(rounds)
    columns = zip(rounds.round.tolist(), rounds.sender.tolist(), rounds.receiver.tolist(), rounds.sizes.tolist())
    for number, messages in itertools.groupby(columns, key=lambda row: row[0]):
        if limit is not None and number >= limit:
            yield f"  ... {rounds.rounds - limit} more rounds"
            return
        listed = [f"{sender}->{receiver} {format_bytes(size)}" for _, sender, receiver, size in messages]
        more = f", and {len(listed) - 8} more" if limit is not None and len(listed) > 8 else ""
        yield f"  round {number}: {', '.join(listed[: None if limit is None else 8])}{more}"


def _items(plan: _Plan, rank: int) -> Sequence[ReadItem | WriteItem | TransferItem]:
    return plan.items_to(rank) if isinstance(plan, TransferPlan) else plan.items(rank)


def _line(item: ReadItem | WriteItem | TransferItem) -> str:
    size = format_bytes(item.nbytes)
    if isinstance(item, WriteItem):
        return f"{item.fqn} {item.box} <- local {item.source}, {size}"
    if isinstance(item, TransferItem):
        giver = "itself" if item.is_local else f"rank {item.sender}"
        return f"{item.fqn} {item.target} <- {item.source} of {giver}, {size}"
    source = f" of {item.saved_fqn}" if item.saved_fqn != item.fqn else ""
    return f"{item.fqn} {item.target} <- {item.source}{source} of chunk {item.chunk} of {item.owner}, {size}"


# --- one tensor on one rank ---


def _known(layout: TensorLayout | None, fqn: str) -> TensorLayout:
    if layout is None:
        raise PlanError("the plan has no tensor of this name", fqn=fqn)
    return layout


def _explain_load(plan: LoadPlan, layout: TensorLayout, rank: int) -> Iterator[str]:
    fqn = layout.fqn
    view = plan.views.get(fqn)
    yield _head(layout, f"rank {rank} wants", plan.wanted.parts(fqn, rank))
    for source in (fqn,) if view is None else dict.fromkeys(s.fqn for s in view.sources):
        saved = plan.saved[source]
        yield f"  saved{'' if source == fqn else f' as {source}'}: {saved.spec.shape} {saved.spec.dtype}, {saved.form}"
    items = [item for item in plan.items(rank) if item.fqn == fqn]
    yield f"  reads {format_bytes(sum(item.nbytes for item in items))} in {len(items)} items:"
    yield from (f"    {_line(item)}" for item in items)


def _explain_save(plan: SavePlan, layout: TensorLayout, rank: int) -> Iterator[str]:
    fqn = layout.fqn
    yield _head(layout, f"rank {rank} holds", plan.layout.parts(fqn, rank))
    items = [item for item in plan.items(rank) if item.fqn == fqn]
    yield f"  writes {format_bytes(sum(item.nbytes for item in items))} in {len(items)} items:"
    yield from (f"    {_line(item)}" for item in items)
    for box in dict.fromkeys(layout.boxes(rank) if rank < layout.world_size else ()):
        shares = [f"rank {other} {region}" for other, region in plan.writers(fqn, box)]
        yield f"  {box} is written by {', '.join(shares)}"


def _explain_transfer(plan: TransferPlan, fqn: str, rank: int) -> Iterator[str]:
    for layout, verb in ((plan.before[fqn], "holds before"), (plan.after[fqn], "holds after")):
        parts = layout.parts(rank) if rank < layout.world_size else ()
        yield _head(layout, f"rank {rank} {verb}", parts)
    arriving = [item for item in plan.items_to(rank) if item.fqn == fqn]
    leaving = [item for item in plan.items_from(rank) if item.fqn == fqn]
    local = sum(item.nbytes for item in arriving if item.is_local)
    received = sum(item.nbytes for item in arriving) - local
    yield f"  receives {format_bytes(received)} and copies {format_bytes(local)} of its own:"
    yield from (f"    {_line(item)}" for item in arriving)
    yield f"  sends {format_bytes(sum(item.nbytes for item in leaving))}:"
    yield from (f"    {item.box} to rank {item.receiver}, {format_bytes(item.nbytes)}" for item in leaving)


def _head(layout: TensorLayout, who: str, parts: Iterable[Part]) -> str:
    boxes = [str(box) for part in parts for box, _ in part.boxes()]
    spec = layout.spec
    return f"{spec.fqn} {spec.shape} {spec.dtype}, {layout.form}: {who} {', '.join(boxes) or 'nothing of it'}"
