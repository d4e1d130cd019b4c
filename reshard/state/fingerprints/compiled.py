"""The inner loop in C, where `reshard-kernels` is installed: the same sums as numpy's, in integers.

It is looked for once. One of another version is left out, and so is all of it with `RESHARD_KERNELS=0` in the
environment. Before its first use it shows that its sums are right where words and numbers are as large as they can be.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from reshard.state.fingerprints.keys import PRIME, Key, Residues, products
from reshard.state.fingerprints.tiling import Axis, Matrix, Tile, cut, tiles

__all__ = ["Kernel", "fold_matrix", "kernel", "table"]

_INTERFACE = 1
_COPY_WORDS = 1 << 17  # 512 KiB, which stay in a cache
_THREAD_WORDS = 1 << 20
"""Of fewer, another thread would take longer to start."""


class Kernel(Protocol):
    """What of `reshard_kernels` is called."""

    def table(self, numbers: Residues, /) -> npt.NDArray[np.int32]:
        """Columns' numbers, as the other two want them."""

    def fold(self, words: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], rows: Residues, /) -> tuple[int, int]:
        """The sum over words (rows, columns), each row one run of memory."""

    def fold_rows(self, words: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], /) -> Residues:
        """The sum of each row by itself, (LANES, rows)."""


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The compiled loops, or None where numpy has to do."""
    if os.environ.get("RESHARD_KERNELS") == "0":
        return None
    try:
        import reshard_kernels as found
    except (ImportError, OSError):  # OSError: its library is for another machine
        return None
    if getattr(found, "INTERFACE", None) != _INTERFACE:
        return None
    loop = cast(Kernel, found)
    if not is_right(loop):
        warnings.warn("reshard_kernels computes wrong sums here and is left out", RuntimeWarning, stacklevel=2)
        return None
    return loop


def fold_matrix(kernel: Kernel, matrix: Matrix, key: Key) -> list[tuple[int, int]]:
    """Sums that add up to that over the words: where they lie, on torch's threads, if each row is a run of memory;
    else of copies."""
    columns = table(key, matrix.column_axes, matrix.columns)
    numbers = _row_numbers(key, matrix.row_axes, matrix.rows)
    height, words = numbers.shape[1], matrix.words
    width = words.numel() // height
    try:
        rows = words.view(height, width)
    except RuntimeError:  # no one step leads from row to row, or from column to column
        return _fold_copies(kernel, words, width, columns, numbers)
    if width > 1 and rows.stride(1) != 1:
        return _fold_copies(kernel, words, width, columns, numbers)
    data = rows.numpy()
    threads = min(height, torch.get_num_threads(), words.numel() // _THREAD_WORDS)
    if threads <= 1:
        return [kernel.fold(data, columns, numbers)]
    spans = list(itertools.pairwise(height * i // threads for i in range(threads + 1)))
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-fingerprint") as pool:
        return list(pool.map(lambda span: kernel.fold(data[slice(*span)], columns, numbers[:, slice(*span)]), spans))


def _fold_copies(
    kernel: Kernel, words: torch.Tensor, width: int, columns: npt.NDArray[np.int32], numbers: Residues
) -> list[tuple[int, int]]:
    """Some rows at a time, in one buffer."""
    leading = next(d for d in range(words.ndim + 1) if math.prod(words.shape[d:]) == width)
    step = max(1, _COPY_WORDS // width)
    room = torch.empty(min(step, numbers.shape[1]) * width, dtype=torch.int32, device="cpu")
    found, done = [], 0
    for tile in tiles(words.shape[:leading], step):
        piece = cut(words, tile)
        values = room[: piece.numel()]
        values.view(piece.shape).copy_(piece)
        rows = values.view(-1, width).numpy()
        found.append(kernel.fold(rows, columns, numbers[:, done : done + len(rows)]))
        done += len(rows)
    return found


@lru_cache(maxsize=64)
def table(key: Key, axes: tuple[Axis, ...], tile: Tile) -> npt.NDArray[np.int32]:
    """The products of the axes' numbers over a tile of columns, as the kernel wants them. There must be one."""
    loop = kernel()
    assert loop is not None
    return loop.table(products([axis.numbers(key, *span) for axis, span in zip(axes, tile)]))


@lru_cache(maxsize=64)
def _row_numbers(key: Key, axes: tuple[Axis, ...], tile: Tile) -> Residues:
    return np.ascontiguousarray(products([axis.numbers(key, *span) for axis, span in zip(axes, tile)]))


def is_right(kernel: Kernel) -> bool:
    """Whether its sums are those of Python's integers, for the largest words and numbers and for some between."""
    width = 1037  # two strips and what is left of a third
    ramp = np.arange(width)
    words = np.stack([0 * ramp - 2**31, ramp - 2**31, 2**31 - 1 - 3 * ramp, ramp * 4052037 - 2**31, 5 - ramp])
    largest = 2**47 + 2**23  # as both of its digits are
    columns = np.stack([0 * ramp + largest, (ramp * 271828182845 + PRIME // 2) % PRIME])
    rows = np.array([[PRIME - 1, 0, 1, PRIME // 2, largest], [3, PRIME - 2, largest + 1, 2**24, 5]])
    inner = [[sum(map(operator.mul, row, lane)) for row in words.tolist()] for lane in columns.tolist()]
    sums = tuple(sum(map(operator.mul, *pair)) % PRIME for pair in zip(rows.tolist(), inner, strict=True))
    data, digits = words.astype(np.int32), kernel.table(columns)
    each = kernel.fold_rows(data, digits).tolist()
    return kernel.fold(data, digits, rows) == sums and each == [[value % PRIME for value in lane] for lane in inner]
