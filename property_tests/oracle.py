"""Slow, obvious truths: which elements a rank owns, one Python list at a time. Shares no code with `planners`."""

from __future__ import annotations

import itertools

import numpy as np

from planners import BlockShard, Replicate, StridedShard, TensorLayout


def chunk(items, parts):
    """`torch.chunk` on a list: pieces of ceil(n / parts), then empty ones."""
    step = -(-len(items) // parts)
    return [items[k * step : (k + 1) * step] for k in range(parts)]


def cut(items, placement, parts):
    """What each coordinate of an axis of size `parts` takes of `items`."""
    if isinstance(placement, BlockShard):
        pieces, at = [], 0
        for size in placement.blocks:
            pieces.append(items[at : at + size])
            at += size
    elif isinstance(placement, StridedShard):
        pieces = chunk(items, placement.split_factor)
    else:
        pieces = [items]
    return [[x for piece in pieces for x in chunk(piece, parts)[k]] for k in range(parts)]


def owned_indexes(shape, mesh, placements, rank):
    """Per dim, the global indexes that `rank` owns, in local order."""
    dims = [list(range(n)) for n in shape]
    for placement, size, coordinate in zip(placements, mesh.shape, mesh.coordinate(rank)):
        if not isinstance(placement, Replicate):
            dims[placement.dim] = cut(dims[placement.dim], placement, size)[coordinate]
    return dims


def local_arrays(layout: TensorLayout, rank: int):
    """The row-major element numbers in each local tensor of `rank`."""
    shape = layout.spec.shape
    ids = np.arange(layout.spec.numel).reshape(shape)
    if layout.mesh is not None:
        if rank not in layout.mesh:
            return []
        return [ids[np.ix_(*owned_indexes(shape, layout.mesh, layout.placements, rank))] if shape else ids]
    if hasattr(layout.form, "ranges"):
        flat = ids.reshape(-1)
        return [flat[start:stop] for r, start, stop in layout.form.ranges if r == rank]
    return [ids[box.slices] for r, its in layout.form.boxes if r == rank for box in its]


def elements(layout, rank):
    """All element numbers that `rank` owns."""
    return list(itertools.chain.from_iterable(array.reshape(-1).tolist() for array in local_arrays(layout, rank)))
