"""Copies the elements of a window into an array, reading little more than those elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from reshard.errors import CheckpointError
from reshard.formats.stored.source import Source
from reshard.formats.stored.tensor import Place
from reshard.state.dtypes import dtype_from_name
from reshard.state.memory.arrays import item_dtype

__all__ = ["MAX_BUFFER_BYTES", "copy_place", "copy_view", "empty", "read_place"]

Array = npt.NDArray[Any]

MAX_BUFFER_BYTES = 16 << 20
"""The largest piece of a file that is read at once where the storage has no zero-copy view."""


def empty(shape: Sequence[int], dtype: str) -> tuple[torch.Tensor, Array]:
    """A new contiguous tensor with undefined elements, and the same memory as an array that `copy_place` can fill.

    Raises CheckpointError if there is no memory for it.
    """
    torch_dtype = dtype_from_name(dtype)
    try:
        out = np.empty(shape, item_dtype(torch_dtype.itemsize))
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * torch_dtype.itemsize
        raise CheckpointError(f"no memory for {nbytes} bytes of shape {list(shape)}: read it in slices") from error
    return torch.from_numpy(out.reshape(-1).view(np.uint8)).view(torch_dtype).view(list(shape)), out


def read_place(place: Place, dtype: str) -> torch.Tensor:
    """All elements at `place` as a new contiguous tensor. Raises what `copy_place` raises."""
    tensor, out = empty(place.window.sizes, dtype)
    copy_place(place, out)
    return tensor


def copy_place(
    place: Place, out: Array, buffer_bytes: int = MAX_BUFFER_BYTES, *, compared: bool = False, passing: bool = False
) -> None:
    """Copy the elements at `place` into `out`, an array of `item_dtype(window.itemsize)` and of the window's sizes.

    `out` may be strided. What is stored as the conjugate of its value is conjugated on the way. Where the storage has
    no view of its bytes, at most `buffer_bytes` are read at once beside `out`.

    Bytes are compared with their checksums where there are any, unless the caller has `compared` them already. Where
    all of a tensor is `passing` by, a large record is compared piece by piece.

    Raises:
        DamagedCheckpointError: if the source ends before the window does, or was changed; `out` is undefined then.
        StorageError: if the storage fails.
    """
    if place.window.numel:
        place.source.check(place.window.offset, place.window.stop)
        _Transfer(place.source, place.source.view(), buffer_bytes, compared, passing).run(place.window, out)
        if place.conjugate:
            _conjugate(out)


def copy_view(view: memoryview, window: Window, conjugate: bool, out: Array) -> None:
    """Like `copy_place` where the bytes that the window counts in are at hand, and known to be enough."""
    if window.numel:
        _copy(view, window, out)
        if conjugate:
            _conjugate(out)


def _conjugate(out: Array) -> None:
    """Negate the imaginary parts: the upper half of each element, whose sign is its highest bit."""
    half = np.dtype(f"<u{out.dtype.itemsize // 2}")
    parts = out.view(np.dtype([("real", half), ("imag", half)]))
    parts["imag"] ^= half.type(1 << (half.itemsize * 8 - 1))


@dataclass(frozen=True, slots=True)
class _Transfer:
    source: Source
    view: memoryview | None
    """Asked for once: what is decoded may not be kept."""
    buffer_bytes: int
    compared: bool
    passing: bool

    def run(self, window: Window, out: Array) -> None:
        """Long runs are read straight into their place; short ones are copied from a view, or read with some
        neighbours."""
        source, view, runs = self.source, self.view, window.runs()
        long = runs.run_bytes >= source.direct_bytes
        if runs.count == 1 and out.flags.c_contiguous and (long or view is None):
            self._read_run(window.offset, memoryview(cast("Any", out.reshape(-1).view(np.uint8))))
        elif long and window.sizes[0] > 1 and out.strides[-1] == window.itemsize:
            row = window.crop(Box.of((0,) * len(window.sizes), (1, *window.sizes[1:])))
            for i in range(window.sizes[0]):
                here = Window(row.offset + i * row.strides[0], row.sizes, row.strides, row.itemsize)
                self.run(here, out[i : i + 1])
        elif view is not None:
            if not self.compared:
                source.compare(window)
            _copy(view, window, out)
        else:
            self._read(window, out)

    def _read_run(self, offset: int, target: memoryview) -> None:
        """Piece by piece; pieces end where blocks of checksums do."""
        read_into = self.source.fill if self.compared else partial(self.source.read_into, passing=self.passing)
        start = 0
        while start < len(target):
            stop = min((offset + start) // MAX_BUFFER_BYTES * MAX_BUFFER_BYTES + MAX_BUFFER_BYTES - offset, len(target))
            read_into(offset + start, target[start:stop])
            start = stop

    def _read(self, window: Window, out: Array) -> None:
        """Read the span of the window at once if little of it is unneeded, else part by part along the widest dim."""
        span = window.stop - window.offset
        runs = window.runs()
        gap = self.source.max_gap_bytes
        if span <= self.buffer_bytes and span - runs.nbytes <= gap * max(runs.count - 1, 0):
            read = self.source.raw if self.compared else partial(self.source.read, elements=True)
            data = read(window.offset, span)
            _copy(memoryview(data), Window(0, window.sizes, window.strides, window.itemsize), out)
            return
        # a dim of size 1 does not separate anything, so there is one larger: a span of one element is one run
        dim = max((d for d, n in enumerate(window.sizes) if n > 1), key=lambda d: window.strides[d])
        stride, size = window.strides[dim], window.sizes[dim]
        rest = (*window.sizes[:dim], 1, *window.sizes[dim + 1 :])
        one = Window(window.offset, rest, window.strides, window.itemsize)
        inner = one.stop - one.offset
        step = 1
        if 0 <= stride - inner <= gap:  # neighbours are close enough to be read together
            step = min(max(self.buffer_bytes // max(stride, 1), 1), max(size - 1, 1))
        for start in range(0, size, step):
            n = min(step, size - start)
            part = Window(
                window.offset + start * stride,
                (*window.sizes[:dim], n, *window.sizes[dim + 1 :]),
                window.strides,
                window.itemsize,
            )
            index = (slice(None),) * dim + (slice(start, start + n),)
            self.run(part, out[index])


def _copy(view: memoryview, window: Window, out: Array) -> None:
    """Copy from bytes at hand. A last dim without gaps on both sides is copied as bytes, which numpy does by memcpy."""
    itemsize, sizes, strides = window.itemsize, window.sizes, window.strides
    if sizes and strides[-1] == itemsize and out.strides[-1] == itemsize:
        source = np.ndarray((*sizes[:-1], sizes[-1] * itemsize), np.uint8, view, window.offset, (*strides[:-1], 1))
        target = out.view(np.uint8) if out.dtype != np.uint8 else out
        np.copyto(target, source)
        return
    np.copyto(out, np.ndarray(sizes, out.dtype, view, window.offset, strides))
