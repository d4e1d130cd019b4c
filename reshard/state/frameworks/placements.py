"""What DTensor's placements on a mesh can mean: which elements each rank holds. The metadata alone do not tell.

torch cuts and gathers along an axis in the order of that axis's process groups, and these mostly ascend, whatever the
mesh says: on `DeviceMesh("cpu", [1, 0])`, FSDP2, `distribute_tensor` and `full_tensor` give rank 0 the first rows. And
FSDP2 over tensor parallelism cuts the inner axes first, which placements read from left to right do not say:

    7 rows, (_S(0, 2), S(0)) on (dp=3, tp=2)     rank (dp, tp)    0,0   0,1   1,0   1,1   2,0   2,1
    as FSDP2 cuts: tp, then dp                                    0 1   4     2 3   5     -     6
    as `distribute_tensor` cuts: dp, then tp                      0 1   4     2 3   5     6     -

Where rows divide evenly all ways of cutting come to the same; where they do not, only what ranks hold can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from planners.geometry.layout_forms import Form, ProductForm, Shape
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Placement, Replicate, Shard, StridedShard
from reshard.errors import LayoutError

__all__ = ["agreed_form", "fitting", "readings", "same_parts", "several_ways"]


@lru_cache(maxsize=1024)
def readings(
    mesh: Mesh, placements: tuple[Placement, ...], kept: frozenset[int] = frozenset()
) -> tuple[ProductForm, ...]:
    """What tensors of these placements may be, the likeliest first, each once: as FSDP2 cuts what tensor parallelism
    (by `distribute_tensor`) has left, as all cuts are made that a strided shard leaves for later, and as the placements
    say. The shapes of local tensors tell which it is, see `fitting`.

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
    outermost = [
        next(axis for axis, p in enumerate(placements) if isinstance(p, StridedShard) and p.dim == dim)
        for dim in {p.dim for p in placements if isinstance(p, StridedShard)}
    ]
    every = [axis for axis, placement in enumerate(placements) if isinstance(placement, StridedShard)]
    return tuple(dict.fromkeys((_cut_later(literal, outermost), _cut_later(literal, every), literal)))


def fitting(forms: Sequence[ProductForm], shape: tuple[int, ...], held: Mapping[int, Shape]) -> tuple[ProductForm, ...]:
    """Those of `forms` by which the local tensors of some ranks (rank -> shape) have these shapes, in order; of several
    that give every rank the same elements, the last, which says it as the placements do."""
    found: list[ProductForm] = []
    for form in forms:
        if all(_local_shape(form, shape, rank) == sizes for rank, sizes in held.items()):
            alike = next((i for i, other in enumerate(found) if same_parts(form, other, shape)), len(found))
            found[alike : alike + 1] = [form]
    return tuple(found)


def agreed_form(shape: Shape, said: Iterable[Collection[Form]]) -> Form | None:
    """The one form out of what each rank says that a tensor may be; None where no form is possible on all ranks.

    Raises LayoutError, without the tensor's name, where several are that differ in some element.
    """
    parties = list(said)
    found = [form for form in parties[0] if all(form in other for other in parties[1:])]
    if len(found) > 1:
        raise LayoutError(several_ways(shape, found, None))
    return found[0] if found else None


def several_ways(shape: Shape, forms: Sequence[Form], rank: int | None) -> str:
    """Why nobody can say how a tensor of this shape is cut: all these forms fit what `rank` holds, or all ranks."""
    who = "all ranks hold" if rank is None else f"rank {rank} holds, and it cannot tell by itself which it is"
    return (
        f"of shape {shape} may be cut in {len(forms)} ways that fit what {who}: {'; '.join(map(str, forms))}. FSDP2 "
        "cuts what tensor parallelism has left, `distribute_tensor` cuts from left to right, and for uneven pieces "
        "that differs. Pad the dim to a multiple of the ranks that cut it, or redistribute to plain shards first"
    )


@lru_cache(maxsize=4096)
def _local_shape(form: ProductForm, shape: Shape, rank: int) -> Shape:
    return form.parts(shape, rank)[0].sizes


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


def _cut_later(form: ProductForm, axes: Collection[int]) -> ProductForm:
    """The same cuts, but those of the strided shards on `axes` made after as many later cuts as their split factors
    stand for: inner axes first, on a mesh with its axes in that order.

    `(_S(0, 2), S(0))` on (dp, tp=2) becomes `(S(0), S(0))` on (tp=2, dp). A strided shard whose split factor is no such
    product means what it says, and stays.
    """
    mesh, placements = form.mesh, form.placements
    order: list[int] = []  # the axes, in the order in which they cut
    out = list(placements)
    for axis in reversed(range(mesh.ndim)):
        placement, at = placements[axis], 0
        if axis in axes and isinstance(placement, StridedShard):
            pieces = 1
            for place, other in enumerate(order):
                cut = placements[other]
                if not isinstance(cut, Replicate) and cut.dim == placement.dim:
                    pieces *= mesh.shape[other]
                    if pieces == placement.split_factor:
                        at, out[axis] = place + 1, Shard(placement.dim)
                        break
        order.insert(at, axis)
    if order == list(range(mesh.ndim)):
        return form
    return ProductForm.make(mesh.submesh(*(mesh.names[a] for a in order)), tuple(out[a] for a in order))
