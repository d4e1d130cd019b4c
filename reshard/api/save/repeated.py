"""Where ranks meet before a save: they confirm a plan that all of them have, kept from a save like this one, or new.

    rank 0   has a plan for what it holds  A ─┐
    rank 1   has a plan for what it holds  A ─┼─► all have the same: it is obeyed;  any has none, or another: all plan
    rank 2   has a plan for what it holds  A ─┘   out of what was said, and meet once more

A plan is a function of what each rank says of its holdings, names, types, shapes and placements, and of a few options.
A rank takes up what it has kept only if it would say the very same again, and tells the others a digest of what all
ranks had said. So where all tell one digest, all of them hold what they held when it was planned. Values are compared
each time.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from planners.save.plan import SavePlan
from reshard.api.save.job import OwnItem, own_items
from reshard.api.save.options import SaveOptions
from reshard.control.global_layout import settle_forms
from reshard.control.global_state import Census, Holdings, joined_objects, value_table
from reshard.control.group import Group
from reshard.control.pool import Pool, digest_of
from reshard.control.replicas import Table, join, judge, told

__all__ = ["Kept", "Met", "find", "keep", "meet"]

KEPT = 4
"""So many plans a process keeps: of the states that a job saves in turn."""
_lock = threading.Lock()
_kept: OrderedDict[bytes, Kept] = OrderedDict()
"""The latest last."""


@dataclass(frozen=True)
class Kept:
    """What is known from a save before. No tensor, and no value."""

    census: Census
    """Without objects."""
    plan: SavePlan
    """Proved."""
    items: list[OwnItem]
    """Of this rank."""


class Met(NamedTuple):
    """What all ranks know when they have met."""

    census: Census | None
    """Of what all of them hold, if all have the plan for just that; None if any has not."""
    first: bytes
    """What the first rank had for all."""
    pool: bytes
    """Digests of what each said of its holdings: see `Group.parties`."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What one rank, or several, say when they meet."""

    call: bytes
    """A digest of the options; empty where ranks were called with different ones."""
    kept: bytes
    """A digest of what all ranks had said when what this one has kept was planned; empty where any has none, or ranks
    have others."""
    pool: bytes
    """Digests of descriptions of what they hold; nothing where that is known."""
    values: bytes
    """Digests of values that others may have, too."""
    first: bytes
    """What the first rank has for all."""


def find(holdings: Holdings, group: Group, options: SaveOptions) -> Kept | None:
    """What was kept by this rank when it held the very same. It counts only once all have met."""
    if holdings.state.per_rank:
        return None
    with _lock:
        found = _kept.get(key := _key(holdings, group, options))
        if found is not None:
            _kept.move_to_end(key)
    if found is not None:
        settle_forms(holdings.state.tensors, found.census.layout, group.ranks[group.rank])
    return found


def keep(holdings: Holdings, group: Group, options: SaveOptions, census: Census, plan: SavePlan) -> Kept:
    """Keep a plan that is proved. Values that are each rank's own are gathered anew for each save, so with any it is
    for this one alone.

    `census`: without objects.
    """
    kept = Kept(census, plan, own_items(census.layout, plan, group.ranks[group.rank]))
    if not census.per_rank:
        with _lock:
            _kept[_key(holdings, group, options)] = kept
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
    return kept


def _key(holdings: Holdings, group: Group, options: SaveOptions) -> bytes:
    """Of what a plan depends on, as far as this rank knows."""
    said = hashlib.sha256(holdings.said).digest()
    chosen = (options.globs, options.divide_above_bytes)
    return hashlib.sha256(msgspec.msgpack.encode((said, group.rank, group.ranks, chosen))).digest()


def meet(
    holdings: Holdings,
    group: Group,
    options: SaveOptions,
    kept: Kept | None,
    first: bytes,
    *,
    before: Met | None = None,
) -> Met:
    """Collective: whether all ranks have the plan of what they hold, and, if so, what else must be known.

    Args:
        kept: what this rank has found, or planned.
        first: from the first rank.
        before: of the meeting before, after which all have planned anew: what was said there is not said again.

    Raises, alike on every rank, LayoutError for options that differ; KeyMismatchError as `take_census` does.
    """
    table: Table | None = None
    objects: dict[str, bytes] = {}
    if kept is not None and group.world_size > 1:
        table, objects = value_table(
            holdings.state.tensors,
            holdings.objects,
            group,
            kept.census.layout,
            check_replicas=options.check_replicas,
            on_device=kept.census.on_device,
        )
    mine = _Said(
        digest_of(repr(sorted(options.shared().items())).encode()) if before is None else b"",
        b"" if kept is None else kept.census.told,
        Pool.of(digest_of(holdings.said)) if before is None else b"",
        b"" if table is None else told(table, objects),
        first,
    )
    said = msgspec.msgpack.decode(group.merge(msgspec.msgpack.encode(mine), _join, "what is saved"), type=_Said)
    if not said.call and before is None:
        group.same_options("save", options.shared())
    if kept is None or not said.kept:
        return Met(None, said.first, said.pool)
    alike = table is None or judge(table, said.values, group)
    of_all = holdings.objects if alike else joined_objects(holdings.objects, group)
    return Met(replace(kept.census, objects=of_all), said.first, said.pool)


def _join(parts: list[bytes]) -> bytes:
    all_said = [msgspec.msgpack.decode(part, type=_Said) for part in parts]
    calls, kept = ({getattr(said, name) for said in all_said} for name in ("call", "kept"))
    same = len(kept) == 1 and all(said.values for said in all_said)
    joined = _Said(
        calls.pop() if len(calls) == 1 else b"",
        kept.pop() if len(kept) == 1 else b"",
        Pool.join([said.pool for said in all_said]) if all_said[0].pool else b"",
        join([said.values for said in all_said]) if same else b"",
        b"".join(said.first for said in all_said),
    )
    return msgspec.msgpack.encode(joined)
