"""Transfers in two steps: the replicas of one host get a stripe each from outside, and then complete one another.

    direct: every byte to each of 4 replicas        relay: a quarter to each, then all quarters to all

    host 0   a b c d                                host 0   a b c d
              \\ \\ \\ \\  x 4                                   \\ \\ \\ \\
    host 1   4 x abcd                               host 1   a-b-c-d   ->   4 x abcd

What crosses between hosts falls by the number of replicas on a host. Both steps are ordinary transfer plans, with a
layout between them in which the axes of those replicas cut a dim that was whole.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from planners.forms import ProductForm
from planners.grouping import pair_groups
from planners.layout import StateLayout, TensorLayout
from planners.placement import Placement, Replicate, Shard
from planners.transfer_plan import TransferPlan, plan_transfers

__all__ = ["bytes_between_hosts", "plan_relay"]


def plan_relay(
    before: StateLayout,
    after: StateLayout,
    *,
    ranks_per_host: int,
    allow_cast: bool = False,
    allow_missing: bool = False,
) -> tuple[TransferPlan, ...]:
    """The plans to obey one after the other: one, or two where that moves fewer bytes between hosts.

    The first takes the state from `before` to a layout in which some tensors are striped; these have the dtype that
    they have before, and all others are as `after` wants them. The second moves the striped tensors only.
    Arguments and errors are those of `plan_transfers`.
    """
    direct = plan_transfers(
        before, after, ranks_per_host=ranks_per_host, allow_cast=allow_cast, allow_missing=allow_missing
    )
    between: dict[str, TensorLayout] = {}
    for group in pair_groups(before, after, direct.names):
        form = _striped(group.after, ranks_per_host)
        if form is None:
            continue
        one = {fqn: before[fqn] for fqn in group.names[:1]}
        striped = {fqn: TensorLayout.of(before[fqn].spec, form) for fqn in group.names}
        steps = (one, {fqn: striped[fqn] for fqn in one}, {fqn: after[fqn] for fqn in one})
        if _crossing(steps, ranks_per_host) < _crossing((steps[0], steps[2]), ranks_per_host):
            between |= striped
    if not between:
        return (direct,)
    stage = StateLayout({fqn: between.get(fqn, after[fqn]) for fqn in direct.names}, after.world_size)
    return (
        plan_transfers(before, stage, ranks_per_host=ranks_per_host, allow_cast=allow_cast),
        TransferPlan(stage, after, [fqn for fqn in direct.names if fqn in between], ranks_per_host),
    )


def bytes_between_hosts(plan: TransferPlan, ranks_per_host: int) -> int:
    """Bytes that leave their host."""
    total = 0
    for sender, receiver, nbytes in plan.traffic_blocks():
        total += int(nbytes[sender // ranks_per_host != receiver // ranks_per_host].sum())
    return total


def _crossing(steps: tuple[dict[str, TensorLayout], ...], ranks_per_host: int) -> int:
    total = 0
    for old, new in pairwise(steps):
        plan = plan_transfers(StateLayout(old), StateLayout(new), ranks_per_host=ranks_per_host, allow_cast=True)
        total += bytes_between_hosts(plan, ranks_per_host)
    return total


def _striped(layout: TensorLayout, ranks_per_host: int) -> ProductForm | None:
    """The form in which replicas on one host have a stripe each; None if there is nothing to stripe."""
    if not isinstance(layout.form, ProductForm) or 0 in layout.spec.shape:
        return None
    mesh, placements = layout.form.mesh, list(layout.form.placements)
    hosts = mesh.ranks.reshape(mesh.shape) // ranks_per_host
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate) or mesh.shape[axis] == 1:
            continue
        if np.all(hosts == np.take(hosts, [0], axis=axis)):
            dim = _whole_dim(layout.spec.shape, placements, mesh.shape[axis])
            if dim is not None:
                placements[axis] = Shard(dim)
    if tuple(placements) == layout.form.placements:
        return None
    return ProductForm.make(mesh, placements)


def _whole_dim(shape: tuple[int, ...], placements: list[Placement], parts: int) -> int | None:
    """The largest dim that no axis cuts and that is long enough to give each of `parts` something."""
    cut = {placement.dim for placement in placements if not isinstance(placement, Replicate)}
    whole = [d for d, size in enumerate(shape) if d not in cut and size >= parts]
    return max(whole, key=lambda d: shape[d], default=None)
