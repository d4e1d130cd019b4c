"""What DTensor's placements on a mesh can mean: which elements each rank holds. The metadata alone do not tell.

torch cuts and gathers along an axis in the order of that axis's process groups, and these mostly ascend, whatever the
mesh says: on `DeviceMesh("cpu", [1, 0])`, FSDP2, `distribute_tensor` and `full_tensor` give rank 0 the first rows. And
FSDP2 over tensor parallelism cuts the inner axes first, which placements read from left to right do not say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from planners.geometry.layout_forms import ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Placement, Replicate, Shard, StridedShard
from reshard.errors import LayoutError

__all__ = ["readings", "same_parts"]


@lru_cache(maxsize=1024)
def readings(
    mesh: Mesh, placements: tuple[Placement, ...], kept: frozenset[int] = frozenset()
) -> tuple[ProductForm, ProductForm]:
    """What tensors of these placements may be: as FSDP2 over tensor parallelism would cut, then as the placements say.
    Both are the same where nothing can be meant but the latter. The shapes of local tensors tell which it is.

    Args:
        kept: axes whose process groups have their ranks in the order of the mesh. Those of all others ascend.

    Raises LayoutError, without the tensor's name, where the groups would leave elements to no rank.
    """
    grouped = _in_group_order(mesh, placements, kept)
    if grouped is None:
        raise LayoutError(
            "is cut along several axes of a mesh on which the ranks do not ascend: torch cuts in the order of each "
            "axis's process group, which gives some elements to two ranks and others to none. Make the mesh of ranks "
            f"that ascend along every axis; it is {mesh}"
        )
    literal = ProductForm.make(grouped, placements)
    return _right_to_left(literal) or literal, literal


@lru_cache(maxsize=4096)
def same_parts(a: ProductForm, b: ProductForm, shape: tuple[int, ...]) -> bool:
    """Whether both give every rank the same elements in the same order."""
    return a == b or all(a.parts(shape, rank) == b.parts(shape, rank) for rank in a.ranks())


def _in_group_order(mesh: Mesh, placements: Sequence[Placement], kept: Collection[int]) -> Mesh | None:
    """The mesh with each rank at its place in its process groups, along the axes that cut. None where two ranks would
    be at one place, as on `[[0, 3], [2, 1]]`."""
    grid = mesh.ranks.reshape(mesh.shape)
    cut = [a for a, placement in enumerate(placements) if not isinstance(placement, Replicate) and a not in kept]
    if all((np.diff(grid, axis=axis) > 0).all() for axis in cut):
        return mesh
    places = list(np.indices(grid.shape))
    for axis in cut:
        places[axis] = grid.argsort(axis=axis).argsort(axis=axis)
    out = np.full_like(grid, -1)
    out[tuple(places)] = grid
    return None if (out < 0).any() else Mesh(mesh.axes, out.reshape(-1).tolist())


def _right_to_left(form: ProductForm) -> ProductForm | None:
    """The same cuts applied in the order that FSDP2 over TP really takes: inner axes first, on the transposed mesh.

    `(_S(0, 2), S(0))` on (dp, tp=2) becomes `(S(0), S(0))` on (tp=2, dp). None where no strided shard has a split
    factor that is the product of the later axes that cut its dim: then the placements mean what they say.
    """
    mesh, placements = form.mesh, form.placements
    order, out = list(range(mesh.ndim)), list(placements)
    changed = False
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, StridedShard):
            continue
        later = [
            a
            for a in range(axis + 1, mesh.ndim)
            if not isinstance(placements[a], Replicate) and placements[a].dim == placement.dim  # type: ignore[union-attr]
        ]
        if not later or math.prod(mesh.shape[a] for a in later) != placement.split_factor:
            return None
        out[axis] = Shard(placement.dim)
        order.remove(axis)
        order.insert(max(order.index(a) for a in later) + 1, axis)
        changed = True
    if not changed:
        return None
    return ProductForm.make(mesh.submesh(*(mesh.names[a] for a in order)), tuple(out[a] for a in order))
