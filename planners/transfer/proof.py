"""Proof of transfer plans and of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planners.errors import CoverageError
from planners.findings import Finding, Report
from planners.geometry.box import Box
from planners.geometry.layout_forms import Part, ProductGeometry
from planners.geometry.ownership import Ints
from planners.load.proof import global_box, product_findings, tiling_findings
from planners.transfer.plan import TransferItem, TransferPlan
from planners.transfer.rounds import Schedule, slack_bytes
from planners.transfer.routing import Route

__all__ = ["verify_schedule", "verify_transfer"]


def verify_transfer(plan: TransferPlan) -> Report:
    """The proof of a transfer plan, or all that is wrong."""
    covers = (
        "every needed element is delivered exactly once, from a rank that holds it; this does not say that the layout "
        "is the one you meant"
    )
    return Report(repr(plan), tuple(_transfer_findings(plan)), len(plan.names), covers=covers)


def _transfer_findings(plan: TransferPlan) -> Iterator[Finding]:
    """All that is wrong with a transfer plan."""
    try:
        routes = plan.routes
    except CoverageError as error:
        element = error.box.offsets if error.box is not None else None
        yield Finding("nobody holds this element", error.fqn, error.rank, element)
        return
    for route in routes:
        yield from _dealing_findings(route)
        if route.intersection.overlap is not None:
            yield from product_findings(route.intersection.overlap, route.group.names)
            yield from _holders_findings(route, route.intersection.overlap.saved)
        else:
            yield from _swept_findings(plan, route)
    for rank, items in plan.explicit.items():
        yield from _item_findings(plan, rank, items)
    yield from _conservation(plan)


def _holders_findings(route: Route, before: ProductGeometry) -> Iterator[Finding]:
    """The table of holders against the owners of every rank."""
    holders, number = route.intersection.holders, np.zeros(before.mesh.size, dtype=np.int64)
    for owners, own in zip(before.rank_owners, before.dims):
        number = number * own.owners + owners
    wrong_ranks = holders.ranks[number[before.mesh.positions(holders.ranks)] != holders.source_of]
    for rank in wrong_ranks[:1].tolist():
        yield from (Finding("sends a region that it does not hold", fqn, rank) for fqn in route.group.names)


def _dealing_findings(route: Route) -> Iterator[Finding]:
    """The order in which holders are dealt deliveries must name each of them once."""
    holders = route.intersection.holders
    order = np.lexsort((route.order, holders.source_of))
    wrong = np.flatnonzero(route.order[order] != holders.ranks)
    for place in wrong[:1].tolist():
        rank = int(route.order[order][place])
        yield from (Finding("sends a region that it does not hold", fqn, rank) for fqn in route.group.names)


def _swept_findings(plan: TransferPlan, route: Route) -> Iterator[Finding]:
    fqn = route.group.names[0]
    for rank in route.group.after.form.ranks():
        if rank not in plan.explicit:
            for finding in _tensor_findings(plan, rank, fqn, plan.first_items(route, rank)):
                yield from (Finding(finding.message, name, rank, finding.element) for name in route.group.names)


def _item_findings(plan: TransferPlan, rank: int, items: Sequence[TransferItem]) -> Iterator[Finding]:
    by_name: dict[str, list[TransferItem]] = {fqn: [] for fqn in plan.names}
    for item in items:
        if item.fqn in by_name:
            by_name[item.fqn].append(item)
        else:
            yield Finding("is sent, but is not to be moved", item.fqn, rank, item.box.offsets)
    for fqn, own in by_name.items():
        yield from _tensor_findings(plan, rank, fqn, own)


def _tensor_findings(plan: TransferPlan, rank: int, fqn: str, items: Sequence[TransferItem]) -> Iterator[Finding]:
    parts = plan.after.parts(fqn, rank) if rank < plan.after.world_size else ()
    written: dict[int, list[Box]] = {}
    for item in items:
        message = _item_fault(item, plan, parts)
        if message is not None:
            yield Finding(message, fqn, rank, item.box.offsets)
        else:
            written.setdefault(item.target_part, []).append(item.target)
    yield from tiling_findings(parts, written, fqn, rank)


def _item_fault(item: TransferItem, plan: TransferPlan, parts: Sequence[Part]) -> str | None:
    """What is wrong with one item by itself, or None."""
    itemsize = plan.before[item.fqn].spec.itemsize
    if item.nbytes != item.box.numel * itemsize:
        return f"claims {item.nbytes} bytes, but {item.box.numel} elements of {itemsize} bytes are meant"
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


# schedules


def verify_schedule(rounds: Schedule) -> Report:
    """The proof of a schedule and of its plan, or all that is wrong."""
    covers = "its plan is right, every byte of it travels once, and each round keeps to its budget and pairs of ranks"
    return Report(repr(rounds), tuple(_schedule_findings(rounds)), len(rounds.plan.names), covers=covers)


def _schedule_findings(rounds: Schedule) -> Iterator[Finding]:
    """All that is wrong with a schedule, its plan included."""
    yield from _transfer_findings(rounds.plan)
    number, sender, receiver = rounds.columns()[:3]
    if not len(number):
        if rounds.plan.bytes_moved:
            yield Finding(f"no message carries the {rounds.plan.bytes_moved} bytes")
        return
    world = rounds.plan.world_size
    outside = np.flatnonzero((number < 0) | (sender < 0) | (sender >= world) | (receiver < 0) | (receiver >= world))
    if len(outside):
        yield Finding(f"message {int(outside[0])} is in no round, or of a rank outside the job")
        return
    for column, verb in ((sender, "sends to"), (receiver, "receives from")):
        keys, count = np.unique(number * world + column, return_counts=True)
        for key in keys[count > 1][:1].tolist():
            yield Finding(f"{verb} several ranks in round {key // world}", None, key % world)
    limit = rounds.max_inflight_bytes - 2 * slack_bytes(rounds.max_inflight_bytes)
    most = rounds.inflight_bytes()
    for rank in np.flatnonzero(most > limit)[:1].tolist():
        yield Finding(f"has {int(most[rank])} bytes in flight, but {limit} are allowed", None, rank)
    yield from _stream_findings(rounds, np.lexsort((number, rounds.start, receiver, sender)))


def _stream_findings(rounds: Schedule, order: Ints) -> Iterator[Finding]:
    """Every stream must be cut from 0 to its end, without a gap, and its pieces travel in order."""
    number, sender, receiver, start, stop = (column[order] for column in rounds.columns())
    fresh = np.concatenate(([True], (sender[1:] != sender[:-1]) | (receiver[1:] != receiver[:-1])))
    due = np.where(fresh, 0, np.concatenate(([0], stop[:-1])))
    for i in np.flatnonzero((start != due) | (stop <= start))[:1].tolist():
        what = f"bytes {int(start[i])} to {int(stop[i])} to rank {int(receiver[i])} follow byte {int(due[i])}"
        yield Finding(what, None, int(sender[i]))
    for i in np.flatnonzero(~fresh & (number <= np.concatenate(([0], number[:-1]))))[:1].tolist():
        yield Finding(f"bytes to rank {int(receiver[i])} travel out of order", None, int(sender[i]))
    traffic = rounds.plan.traffic()
    last = np.append(np.flatnonzero(fresh)[1:] - 1, len(order) - 1)
    found = dict(zip((sender[last] << 32 | receiver[last]).tolist(), stop[last].tolist()))
    wanted = dict(zip((traffic.sender << 32 | traffic.receiver).tolist(), traffic.nbytes.tolist()))
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key, 0) != wanted.get(key, 0):
            what = f"{found.get(key, 0)} bytes to rank {key & 0xFFFFFFFF} are scheduled, not {wanted.get(key, 0)}"
            yield Finding(what, None, key >> 32)
            return
