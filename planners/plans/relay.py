"""Two-step transfers: stripes are sent to replicas, and then the replicas complete each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Ints, grouped, zeros
from planners.geometry.box import Box
from planners.geometry.layout import BoxesForm, Form, Intervals, Part, ProductForm, StateLayout, TensorLayout
from planners.geometry.mesh import Mesh, Placement, Replicate, Shard
from planners.plans.routing import pair_groups
from planners.plans.transfer import TransferPlan, plan_transfers

# Transfers in two steps: the replicas of one group get a stripe each from outside, and then
# complete one another.
#
#     direct: every byte to each of 4 replicas        relay: a quarter to each, then all quarters to all
#
#     group 0   a b c d                               group 0   a b c d
#                \ \ \ \  x 4                                    \ \ \ \
#     group 1   4 x abcd                              group 1   a-b-c-d   ->   4 x abcd
#
# Groups are hosts, and the two sides where no rank is on both. What crosses between groups falls by
# the number of replicas in a group; each replica still gets each byte once. Both steps are ordinary
# transfer plans, with a layout of stripes between them.


def plan_relay(
    before: StateLayout,
    after: StateLayout,
    *,
    ranks_per_host: int | None = None,
    allow_cast: bool = False,
    allow_missing: bool = False,
) -> tuple[TransferPlan, ...]:
    """Plan a transfer in one step, or in two steps if that moves fewer bytes between groups.

    Groups are the hosts, if you pass `ranks_per_host`, and the two sides, if no rank is on both. The
    first of two plans moves the state from `before` to a layout in which some tensors are striped over
    replicas. These tensors keep their dtype from `before`. All others are as `after` specifies. The
    second plan moves only the striped tensors. Arguments and errors are those of `plan_transfers`.
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
    """Return the group number of each rank, once for each kind of expensive boundary, the most
    expensive first.

    The groups are hosts, if the plan knows them, and sides, if no rank is on both. Return () if
    there is only one group.
    """
    out = []
    if plan.ranks_per_host is not None and plan.ranks_per_host < plan.world_size:
        out.append(np.arange(plan.world_size) // plan.ranks_per_host)
    givers, takers = (_ranks(state[fqn] for fqn in plan.names) for state in (plan.before, plan.after))
    if takers and givers.isdisjoint(takers):
        sides = zeros(plan.world_size)
        sides[sorted(takers)] = 1
        out.append(sides)
    return tuple(out)


def bytes_between(plan: TransferPlan, groups: Ints) -> int:
    """Return the number of bytes that leave their group. `groups` has the group number of each
    rank.
    """
    total = 0
    for sender, receiver, nbytes in plan.traffic_blocks():
        total += int(nbytes[groups[sender] != groups[receiver]].sum())
    return total


def _ranks(layouts: Iterable[TensorLayout]) -> set[int]:
    """Return all ranks that may hold data."""
    forms = {id(layout.form): layout.form for layout in layouts}  # mostly shared objects
    return {rank for form in forms.values() for rank in form.ranks()}


def _best_form(
    before: TensorLayout, after: TensorLayout, groupings: Sequence[Ints], ranks_per_host: int | None
) -> Form | None:
    """Return the stripes that minimize the bytes that leave a group between two layouts of a
    tensor, or None.
    """
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
    """Return the bytes between groups, summed over all steps, for each grouping."""
    world, fqn = len(groupings[0]), steps[0].spec.fqn
    states = [StateLayout({fqn: layout}, world) for layout in steps]
    plans = [plan_transfers(*pair, ranks_per_host=ranks_per_host, allow_cast=True) for pair in pairwise(states)]
    return tuple(sum(bytes_between(plan, groups) for plan in plans) for groups in groupings)


# --- stripes ---


def striped(layout: TensorLayout, groups: Ints) -> Form | None:
    """Return the layout in which the replicas within a group hold one stripe each and together
    every element once. Return None if no group has replicas. A stripe is a part of the local
    tensor, so it needs no extra memory.

    `groups` has the group number of each rank.
    """
    if not layout.spec.numel:
        return None
    if isinstance(layout.form, ProductForm) and layout.spec.shape:
        return _striped_product(layout, layout.form, groups)
    return _striped_boxes(layout, groups)


def stripe_places(stage: TensorLayout, whole: TensorLayout, rank: int) -> tuple[tuple[int, Box], ...]:
    """For each local tensor of `stage`, return the index of the local tensor of `whole` that
    contains it, and its box there.

    Raises PlanError if a local tensor is in none of them, or is not a single box.
    """
    theirs = whole.parts(rank) if rank < whole.world_size else ()
    mine = stage.parts(rank) if rank < stage.world_size else ()
    return tuple(_place(part, theirs, whole, rank) for part in mine)


def _place(part: Part, theirs: tuple[Part, ...], whole: TensorLayout, rank: int) -> tuple[int, Box]:
    for index, host in enumerate(theirs):
        offsets = [_offset(inner, outer) for inner, outer in zip(part.dims, host.dims, strict=True)]
        known = tuple(offset for offset in offsets if offset is not None)
        if len(known) == len(offsets):
            return index, Box.of(known, part.sizes)
    raise PlanError("a stripe is not one box of its local tensor", fqn=whole.spec.fqn, rank=rank)


def _offset(inner: Intervals, outer: Intervals) -> int | None:
    """Return where the consecutive intervals `inner` start in a local dim of the intervals `outer`,
    or None.
    """
    if not inner:
        return 0
    size, at = sum(stop - start for start, stop in inner), 0
    for start, stop in outer:
        if start <= inner[0][0] < stop:
            first = at + inner[0][0] - start
            return first if _cut(outer, first, first + size) == inner else None
        at += stop - start
    return None


def _cut(intervals: Intervals, low: int, high: int) -> Intervals:
    """Return the global intervals of the local elements `[low, high)`."""
    out, at = [], 0
    for start, stop in intervals:
        begin, end = max(low - at, 0), min(high - at, stop - start)
        if begin < end:
            out.append((start + begin, start + end))
        at += stop - start
    return tuple(out)


def _striped_product(layout: TensorLayout, form: ProductForm, groups: Ints) -> ProductForm | None:
    """Shard the largest local dim over the replica axes, or over their part within groups, after
    all other axes.
    """
    mesh, shape = form.mesh, layout.spec.shape
    where = groups[mesh.ranks].reshape(mesh.shape)
    inner = [
        _common_run(where, axis) if isinstance(placement, Replicate) else 1
        for axis, placement in enumerate(form.placements)
    ]
    if all(size == 1 for size in inner):
        return None
    grid = mesh.ranks.reshape([n for size, run in zip(mesh.shape, inner) for n in (size // run, run)])
    grid = grid.transpose([*range(0, grid.ndim, 2), *range(1, grid.ndim, 2)])
    axes = [(name, size // run) for (name, size), run in zip(mesh.axes, inner)]
    axes += [(_fresh(name, mesh), run) for (name, _), run in zip(mesh.axes, inner)]
    sizes = np.max([part.sizes for rank in mesh.ranks[:1].tolist() for part in form.parts(shape, rank)], axis=0)
    cuts: list[Placement] = [Shard(int(np.argmax(sizes))) if run > 1 else Replicate() for run in inner]
    return ProductForm.make(Mesh(axes, grid.reshape(-1).tolist()), (*form.placements, *cuts))


def _common_run(where: Ints, axis: int) -> int:
    """Return the largest number of consecutive coordinates on an axis that always belong to one
    group.
    """
    size = where.shape[axis]
    for run in (n for n in range(size, 1, -1) if size % n == 0):
        rows = np.moveaxis(where, axis, -1).reshape(-1, run)
        if np.all(rows == rows[:, :1]):
            return run
    return 1


def _fresh(name: str, mesh: Mesh) -> str:
    while name in mesh.names:
        name += "_stripe"
    return name


def _striped_boxes(layout: TensorLayout, groups: Ints) -> BoxesForm | None:
    """Split each box that several ranks of a group hold among these ranks."""
    alike = grouped(((int(groups[rank]), layout.boxes(rank)), rank) for rank in layout.form.ranks())
    if all(len(ranks) == 1 for ranks in alike.values()):
        return None
    out = grouped(
        (ranks[(number + place) % len(ranks)], piece)
        for (_, boxes), ranks in alike.items()
        for number, box in enumerate(boxes)
        for place, piece in enumerate(_pieces(box, len(ranks)))
    )
    return BoxesForm.make(out, layout.world_size)


def _pieces(box: Box, count: int) -> list[Box]:
    """Split a box along its largest dim into `count` nearly equal pieces, or one per index if there
    are fewer.
    """
    size = max(box.sizes, default=1)
    if size <= 1 or count == 1:
        return [box]
    dim, count = box.sizes.index(size), min(count, size)
    edges = [box.offsets[dim] + size * i // count for i in range(count + 1)]
    return [box.cut(dim, low, high) for low, high in pairwise(edges)]
