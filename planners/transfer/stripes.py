"""Stripes: what each of several replicas gets, so that together they get every element once.

    replicas of one group      a stripe each
    rank 4  a b c d            rank 4  a b . .
    rank 5  a b c d            rank 5  . . c d

A stripe is a piece of the local tensor that it is a stripe of, so it needs no memory of its own.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout
from planners.geometry.layout_forms import BoxesForm, Form, Intervals, Part, ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.ownership import Ints
from planners.geometry.placement import Placement, Replicate, Shard

__all__ = ["stripe_places", "striped"]


def striped(layout: TensorLayout, groups: Ints) -> Form | None:
    """The form in which the replicas of one group have a stripe each; None if no group has replicas.

    `groups`: for each rank, the number of its group.
    """
    if not layout.spec.numel:
        return None
    if isinstance(layout.form, ProductForm) and layout.spec.shape:
        return _striped_product(layout, layout.form, groups)
    return _striped_boxes(layout, groups)


def stripe_places(stage: TensorLayout, whole: TensorLayout, rank: int) -> tuple[tuple[int, Box], ...]:
    """Where the local tensors of `stage` lie in those of `whole`: for each, (which one, the box in its coordinates).

    Raises PlanError where one lies in none, or not as one box.
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
    raise PlanError("a stripe is no box of what it is a stripe of", fqn=whole.spec.fqn, rank=rank)


def _offset(inner: Intervals, outer: Intervals) -> int | None:
    """Where in a local dim of the intervals `outer` the intervals `inner` lie, one behind another; None if nowhere."""
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
    """The global intervals of local elements `[low, high)`."""
    out, at = [], 0
    for start, stop in intervals:
        begin, end = max(low - at, 0), min(high - at, stop - start)
        if begin < end:
            out.append((start + begin, start + end))
        at += stop - start
    return tuple(out)


def _striped_product(layout: TensorLayout, form: ProductForm, groups: Ints) -> ProductForm | None:
    """The axes of replicas, or the part of them that is within groups, come last and cut the largest local dim."""
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


def _common_run(where: npt.NDArray[np.int64], axis: int) -> int:
    """The most coordinates in a row on an axis that are of one group, wherever a row of so many begins."""
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
    """Each box that several ranks of a group have alike is cut among them."""
    alike: dict[tuple[int, tuple[Box, ...]], list[int]] = {}
    for rank in layout.form.ranks():
        boxes = tuple(box for part in layout.parts(rank) for box, _ in part.boxes())
        alike.setdefault((int(groups[rank]), boxes), []).append(rank)
    if all(len(ranks) == 1 for ranks in alike.values()):
        return None
    out: dict[int, list[Box]] = {}
    for (_, boxes), ranks in alike.items():
        for number, box in enumerate(boxes):
            for place, piece in enumerate(_pieces(box, len(ranks))):
                out.setdefault(ranks[(number + place) % len(ranks)], []).append(piece)
    return BoxesForm.make(out, layout.world_size)


def _pieces(box: Box, count: int) -> list[Box]:
    """A box cut along its largest dim into `count` pieces of nearly one size, or one for each element there."""
    size = max(box.sizes, default=1)
    if size <= 1 or count == 1:
        return [box]
    dim, count = box.sizes.index(size), min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    return [
        Box.of(
            tuple(o + low * (d == dim) for d, o in enumerate(box.offsets)),
            tuple(high - low if d == dim else s for d, s in enumerate(box.sizes)),
        )
        for low, high in pairwise(edges)
    ]
