"""Arrays of integers: distinct values, outer sums, row-major positions; and pairs grouped by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
K = TypeVar("K")
V = TypeVar("V")

ints: Callable[[npt.ArrayLike], Ints] = partial(np.asarray, dtype=np.int64)
zeros = cast(Callable[[int | Sequence[int]], Ints], partial(np.zeros, dtype=np.int64))
ones = cast(Callable[[int], Ints], partial(np.ones, dtype=np.int64))


def running_sums(values: npt.ArrayLike) -> Ints:
    """Return 0, the first of some numbers, the sum of the first two, ..., the sum of all."""
    return np.concatenate((zeros(1), np.cumsum(values, dtype=np.int64)))


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major position of an index."""
    position = 0
    for i, size in zip(index, shape):
        position = position * size + i
    return position


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index at a row-major position. Inverse of `ravel`."""
    out = []
    for size in reversed(shape):
        position, i = divmod(position, size)
        out.append(i)
    return tuple(reversed(out))


def outer_sum(columns: Iterable[Ints]) -> Ints:
    """Return the sums that take one number from each column, in the order of the product of the columns."""
    out = zeros(1)
    for column in columns:
        out = (out[:, None] + column).reshape(-1)
    return out


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group the values by key, in the given order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def distinct(values: Ints) -> Ints:
    """Return the distinct values of an array of any shape, ascending. It does not use `np.unique`,
    whose first call imports `numpy.ma`: that takes longer than most plans."""
    ordered = np.sort(values, axis=None, kind="stable")
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ints(ordered[new])
