"""A stored tensor that is indexed like a torch tensor: what is asked for is read, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from reshard.formats.stored.copying import copy_place, empty
from reshard.formats.stored.tensor import Place, StoredTensor, check_cover
from reshard.state.dtypes import dtype_from_name

__all__ = ["LazyTensor", "whole"]

Range = tuple[int, int, int]
"""Start, step and count of the indexes wanted of a dim."""


class LazyTensor:
    """A tensor of a checkpoint. Indexing reads the elements asked for, and no other chunk of it.

    `t[...]` is the whole tensor; ints, slices with positive steps and Ellipsis work as on a torch tensor.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored

    @property
    def name(self) -> str:
        """The key it has in the checkpoint."""
        return self.stored.fqn

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.stored.spec.shape)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.stored.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, as stored."""
        return dtype_from_name(self.stored.spec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.stored.spec.nbytes

    def numel(self) -> int:
        """How many elements."""
        return self.stored.spec.numel

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"len() of the 0-d tensor {self.name!r}")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Reads one slice along dim 0 at a time."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A new contiguous CPU tensor.

        Raises:
            IndexError: an index out of bounds, or too many.
            TypeError: anything but ints, slices and Ellipsis; a step < 1 is a ValueError.
            DamagedCheckpointError: elements that no file holds, or two hold, or bytes that are not there.
        """
        ranges, kept = _normalize(index, self.shape, self.name)
        return _read(self.stored, ranges).reshape([n for (_, _, n), keep in zip(ranges, kept) if keep])

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {list(self.shape)}, {self.stored.spec.dtype})"


def whole(value: Any) -> Any:
    """Lazy tensors read, in dicts, lists and tuples of the same kinds."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole, value))
    return value[...] if isinstance(value, LazyTensor) else value


def _normalize(index: Any, shape: torch.Size, name: str) -> tuple[list[Range], list[bool]]:
    """A range for each dim, and whether the dim stays (an int takes it away)."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"tensor {name!r}: an index can have only one Ellipsis, got {index!r}")
    if len(items) - len(dots) > len(shape):
        raise IndexError(f"tensor {name!r} has {len(shape)} dims, but {len(items) - len(dots)} were indexed")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + len(dots))
    ranges: list[Range] = []
    kept: list[bool] = []
    for d, (item, size) in enumerate(zip(items, shape)):
        if isinstance(item, slice):
            if item.step is not None and operator.index(item.step) < 1:
                raise ValueError(f"tensor {name!r}: the step of a slice must be >= 1, got {item.step} for dim {d}")
            start, stop, step = item.indices(size)
            ranges.append((start, step, len(range(start, stop, step))))
            kept.append(True)
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__") or isinstance(item, torch.Tensor | np.ndarray):
            raise TypeError(f"tensor {name!r}: index it by ints, slices and Ellipsis, not by {type(item).__name__}")
        i = operator.index(item)
        if not -size <= i < size:
            raise IndexError(f"tensor {name!r}: index {i} is out of bounds for dim {d} of size {size}")
        ranges.append((i % size, 1, 1))
        kept.append(False)
    return ranges, kept


def _read(stored: StoredTensor, ranges: list[Range]) -> torch.Tensor:
    """The elements at the cross product of `ranges`."""
    counts = [n for _, _, n in ranges]
    if 0 in counts:
        return empty(counts, stored.spec.dtype)[0]
    region = Box.of(tuple(start for start, _, _ in ranges), tuple((n - 1) * step + 1 for _, step, n in ranges))
    check_cover(stored, region)
    parts: list[tuple[Place, Any]] = []
    for chunk, _ in stored.meeting(region):
        bounds = [_inside(r, o, s) for r, o, s in zip(ranges, chunk.box.offsets, chunk.box.sizes)]
        if any(first >= stop for first, stop in bounds):
            continue  # a stepped slice may jump over a whole chunk
        window = chunk.window
        origins = [start + first * step for (start, step, _), (first, _) in zip(ranges, bounds)]
        part = Window(
            window.offset + sum((i - o) * s for i, o, s in zip(origins, chunk.box.offsets, window.strides)),
            tuple(stop - first for first, stop in bounds),
            tuple(s * step for s, (_, step, _) in zip(window.strides, ranges)),
            window.itemsize,
        )
        index: Any = (*(slice(first, stop) for first, stop in bounds), ...)
        parts.append((chunk.place.with_window(part), index))
        chunk.source.check(part.offset, part.stop)
    # only now, when all that is wanted is known to be there, is it worth its memory
    result, out = empty(counts, stored.spec.dtype)
    for place, index in parts:
        copy_place(place, out[index])
    return result


def _inside(wanted: Range, offset: int, size: int) -> tuple[int, int]:
    """Which of the wanted indexes, counted from 0, lie in [offset, offset + size)."""
    start, step, n = wanted
    return max(-(-(offset - start) // step), 0), min(-(-(offset + size - start) // step), n)
