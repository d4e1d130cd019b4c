"""A slow reference implementation: moves element ids through a plan with numpy, for tests to compare with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planners.geometry.arrays import Array, Ints, zeros
from planners.geometry.box import Box, Shape, arrange
from planners.geometry.layout import StateLayout
from planners.plans.load import LoadPlan
from planners.plans.transfer import TransferPlan

__all__ = ["element_ids", "local_ids", "replay"]

_Locals = dict[str, tuple[Array, ...]]
"""The local tensors of a rank, by name."""


def element_ids(shape: Shape, box: Box | None = None) -> Ints:
    """Row-major number of every element of a tensor of this shape, or of a box of it."""
    box = Box.full(shape) if box is None else box
    ids = zeros(box.sizes)
    step = 1
    for d in reversed(range(len(shape))):
        index = np.arange(box.offsets[d], box.offsets[d] + box.sizes[d]) * step
        ids += index.reshape([-1 if i == d else 1 for i in range(len(shape))])
        step *= shape[d]
    return ids


def local_ids(plan: LoadPlan, fqn: str, rank: int) -> tuple[Ints, ...]:
    """The ids that the wanted layout says should be in each local tensor of `rank`."""
    return _held_ids(plan.wanted, fqn, rank)


def _held_ids(layout: StateLayout, fqn: str, rank: int) -> tuple[Ints, ...]:
    shape, out = layout[fqn].spec.shape, []
    for part in layout.parts(fqn, rank) if rank < layout.world_size else ():
        ids = np.full(part.sizes, -1)
        for box, local in part.boxes():
            ids[local.slices] = element_ids(shape, box)
        out.append(ids)
    return tuple(out)


def _replay_transfers(plan: TransferPlan, rank: int) -> _Locals:
    here = rank < plan.after.world_size
    out: _Locals = {
        fqn: tuple(np.full(part.sizes, -1) for part in (plan.after.parts(fqn, rank) if here else ()))
        for fqn in plan.names
    }
    for item in plan.items_to(rank):
        given = _held_ids(plan.before, item.fqn, item.sender)[item.source_part]
        out[item.fqn][item.target_part][item.target.slices] = given[item.source.slices]
    return out


def replay(plan: LoadPlan | TransferPlan, rank: int, saved: Mapping[str, Array] | None = None) -> _Locals:
    """Return what arrives in the local tensors of `rank`. `saved` contains the full saved tensors, all of one numeric
    kind. Without it, and for transfers, every element is its own row-major index.

    Returns one array per local tensor, by FQN. -1 marks elements that were not written.
    """
    if isinstance(plan, TransferPlan):
        return _replay_transfers(plan, rank)
    dtype = np.result_type(*saved.values()) if saved else np.dtype(np.int64)
    out: _Locals = {
        fqn: tuple(np.full(part.sizes, -1, dtype=dtype) for part in plan.wanted.parts(fqn, rank)) for fqn in plan.wanted
    }
    for item in plan.items(rank):
        name = item.saved_fqn
        chunk = element_ids(plan.saved[name].spec.shape, item.chunk) if not saved else saved[name][item.chunk.slices]
        moved = chunk[item.source.slices]
        out[item.fqn][item.part][item.target.slices] = moved if item.dims is None else arrange(moved, item.dims)
    for fill in plan.fills(rank):
        out[fill.fqn][fill.part][fill.target.slices] = fill.value
    return out
