"""Do boxes tile a region exactly once? Pure geometry over the boxes of stored chunks, with an example where not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planners.box import Box
from reshard.errors import DamagedCheckpointError
from reshard.formats.base import StoredChunk, StoredTensor

__all__ = ["check_cover", "find_hole", "find_overlap"]

_MAX_CELLS = 1 << 24


def find_hole(region: Box, boxes: Sequence[Box]) -> Box | None:
    """A part of `region` that no box covers, or None; in the coordinates of all."""
    if region.is_empty:
        return None
    left = [region]
    for box in boxes:
        left = [piece for part in left for piece in part - box]
        if not left:
            return None
    return min(left)


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int, Box] | None:
    """Two boxes (by index) that share elements, and what they share; or None."""
    full = [i for i, box in enumerate(boxes) if not box.is_empty]
    if len(full) < 2:
        return None
    if boxes[full[0]].ndim == 0:
        return full[0], full[1], boxes[full[0]]
    cells = _count_cells([boxes[i] for i in full])
    if cells is not None and (cells <= 1).all():
        return None
    return _sweep(boxes, full)


def _count_cells(boxes: list[Box]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None:
    """How often each cell of the grid of all cuts is covered; None if that grid is too large to count."""
    starts = np.array([box.offsets for box in boxes], dtype=np.int64)
    stops = starts + np.array([box.sizes for box in boxes], dtype=np.int64)
    cuts = [np.unique(np.concatenate([starts[:, d], stops[:, d]])) for d in range(starts.shape[1])]
    shape = [len(c) for c in cuts]
    if np.prod(shape, dtype=np.float64) > _MAX_CELLS:
        return None
    lower = np.stack([np.searchsorted(c, starts[:, d]) for d, c in enumerate(cuts)], axis=1)
    upper = np.stack([np.searchsorted(c, stops[:, d]) for d, c in enumerate(cuts)], axis=1)
    # +1 and -1 at the corners of every box; summing along each dim fills the boxes in
    counts = np.zeros(shape, dtype=np.int32)
    for corner in np.ndindex(*(2,) * len(shape)):
        at = np.where(np.array(corner) == 1, upper, lower)
        np.add.at(counts, tuple(at.T), (-1) ** sum(corner))
    for d in range(len(shape)):
        np.cumsum(counts, axis=d, out=counts)
    return counts


def _sweep(boxes: Sequence[Box], full: list[int]) -> tuple[int, int, Box] | None:
    """Compare each box with those that begin before it ends along the dim with the most distinct starts."""
    dim = max(range(boxes[full[0]].ndim), key=lambda d: len({boxes[i].offsets[d] for i in full}))
    active: list[int] = []
    for i in sorted(full, key=lambda i: boxes[i].offsets[dim]):
        start = boxes[i].offsets[dim]
        active = [j for j in active if boxes[j].stops[dim] > start]
        for j in active:
            common = boxes[i] & boxes[j]
            if common is not None:
                return min(i, j), max(i, j), common
        active.append(i)
    return None


def check_cover(tensor: StoredTensor, region: Box | None = None) -> None:
    """Raises DamagedCheckpointError unless the chunks hold every element of `region` (default: all) exactly once."""
    wanted = Box.full(tensor.spec.shape) if region is None else region
    if region is None:  # a stored tensor has no chunk outside itself
        inside = [(chunk, chunk.box) for chunk in tensor.chunks if not chunk.box.is_empty]
    else:
        inside = list(tensor.meeting(wanted))
    boxes = [box for _, box in inside]
    overlap = find_overlap(boxes)
    if overlap is not None:
        first, second, common = overlap
        raise DamagedCheckpointError(
            f"tensor {tensor.fqn!r}: elements {common} are stored twice, in {_name(inside[first][0])} and in "
            f"{_name(inside[second][0])}; the checkpoint does not say which is right"
        )
    if sum(box.numel for box in boxes) == wanted.numel:
        return
    raise DamagedCheckpointError(
        f"tensor {tensor.fqn!r} of shape {list(tensor.spec.shape)}: elements {find_hole(wanted, boxes)} are in no file "
        f"of the checkpoint ({len(tensor.chunks)} chunks are); a file or the part of a rank is missing"
    )


def _name(chunk: StoredChunk) -> str:
    where = f" ({chunk.source.label})" if chunk.is_located else ""
    return f"the chunk {chunk.box} of writer {chunk.owner}{where}"
