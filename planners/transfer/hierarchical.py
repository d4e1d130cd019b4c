"""Transfers in two steps: the replicas of one group get a stripe each from outside, and then complete one another.

    direct: every byte to each of 4 replicas        relay: a quarter to each, then all quarters to all

    group 0   a b c d                               group 0   a b c d
               \\ \\ \\ \\  x 4                                    \\ \\ \\ \\
    group 1   4 x abcd                              group 1   a-b-c-d   ->   4 x abcd

Groups are hosts, and the two sides where no rank is on both. What crosses between groups falls by the number of
replicas in a group; each replica still gets each byte once. Both steps are ordinary transfer plans, with a layout of
stripes between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.layout_forms import Form
from planners.geometry.ownership import Ints
from planners.transfer.grouping import pair_groups
from planners.transfer.plan import TransferPlan, plan_transfers
from planners.transfer.stripes import striped

__all__ = ["bytes_between", "bytes_between_hosts", "plan_relay", "rank_groups"]


def plan_relay(
    before: StateLayout,
    after: StateLayout,
    *,
    ranks_per_host: int | None = None,
    allow_cast: bool = False,
    allow_missing: bool = False,
) -> tuple[TransferPlan, ...]:
    """The plans to obey one after the other: one, or two where that moves fewer bytes between groups.

    Groups are the hosts, if `ranks_per_host` says which these are, and then the two sides, if no rank is on both.
    The first plan takes the state from `before` to a layout in which some tensors are striped; these have the dtype
    that they have before, and all others are as `after` wants them. The second moves the striped tensors only.
    Arguments and errors are those of `plan_transfers`.
    """
    direct = plan_transfers(
        before, after, ranks_per_host=ranks_per_host, allow_cast=allow_cast, allow_missing=allow_missing
    )
    groupings = rank_groups(direct)
    between: dict[str, TensorLayout] = {}
    for alike in pair_groups(before, after, direct.names) if groupings else ():
        name = alike.names[0]
        form = _best_form(before[name], after[name], groupings, ranks_per_host)
        if form is not None:
            between |= {fqn: TensorLayout.of(before[fqn].spec, form) for fqn in alike.names}
    if not between:
        return (direct,)
    stage = StateLayout({fqn: between.get(fqn, after[fqn]) for fqn in direct.names}, after.world_size)
    return (
        plan_transfers(before, stage, ranks_per_host=ranks_per_host, allow_cast=allow_cast),
        TransferPlan(stage, after, [fqn for fqn in direct.names if fqn in between], ranks_per_host),
    )


def rank_groups(plan: TransferPlan) -> tuple[Ints, ...]:
    """The groups between which bytes are dear, the dearest first: for each rank of the job, the number of its group.

    By host, where the plan knows hosts; by side, where no rank is on both. () where there is one group only.
    """
    out = []
    if plan.ranks_per_host is not None and plan.ranks_per_host < plan.world_size:
        out.append(np.arange(plan.world_size, dtype=np.int64) // plan.ranks_per_host)
    givers, takers = (_ranks(state[fqn] for fqn in plan.names) for state in (plan.before, plan.after))
    if takers and givers.isdisjoint(takers):
        sides = np.zeros(plan.world_size, dtype=np.int64)
        sides[sorted(takers)] = 1
        out.append(sides)
    return tuple(out)


def bytes_between(plan: TransferPlan, groups: Ints) -> int:
    """Bytes that leave their group. `groups`: for each rank, the number of its group."""
    total = 0
    for sender, receiver, nbytes in plan.traffic_blocks():
        total += int(nbytes[groups[sender] != groups[receiver]].sum())
    return total


def bytes_between_hosts(plan: TransferPlan, ranks_per_host: int) -> int:
    """Bytes that leave their host."""
    return bytes_between(plan, np.arange(plan.world_size, dtype=np.int64) // ranks_per_host)


def _ranks(layouts: Iterable[TensorLayout]) -> set[int]:
    """All ranks that may hold something."""
    forms = {id(layout.form): layout.form for layout in layouts}  # mostly shared objects
    return {rank for form in forms.values() for rank in form.ranks()}


def _best_form(
    before: TensorLayout, after: TensorLayout, groupings: Sequence[Ints], ranks_per_host: int | None
) -> Form | None:
    """The stripes between two layouts of a tensor by which the fewest bytes leave a group; None for no stripes."""
    best, best_bytes = None, _crossing((before, after), groupings, ranks_per_host)
    for groups in groupings:
        form = striped(after, groups)
        if form is not None:
            steps = before, TensorLayout.of(before.spec, form), after
            crossing = _crossing(steps, groupings, ranks_per_host)
            if crossing < best_bytes:
                best, best_bytes = form, crossing
    return best


def _crossing(steps: Sequence[TensorLayout], groupings: Sequence[Ints], ranks_per_host: int | None) -> tuple[int, ...]:
    """Bytes between the groups of each grouping, of all steps together."""
    world, fqn = len(groupings[0]), steps[0].spec.fqn
    states = [StateLayout({fqn: layout}, world) for layout in steps]
    plans = [plan_transfers(*pair, ranks_per_host=ranks_per_host, allow_cast=True) for pair in pairwise(states)]
    return tuple(sum(bytes_between(plan, groups) for plan in plans) for groups in groupings)
