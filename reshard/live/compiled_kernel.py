"""Finds the compiled kernel, switches it off if wanted, and tests that it computes correctly."""

from __future__ import annotations

import operator
import os
import warnings
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from planners.geometry.arrays import Array, Ints

# Where `reshard-kernels` is installed, its loops in C make fingerprints, with the same sums as
# numpy's, and run the lists of `reshard.execute.work_list`.
#
# It is looked for once. One of another version is not used, and none is with
# `RESHARD_KERNELS=0` in the environment. Before its first use it shows that its sums are right
# where words and numbers are as large as they can be.


_INTERFACE = 2
PRIME = 2**48 - 59
"""The largest prime below 2^48."""
Residues = Ints
"""Elements of the field, 0 <= x < PRIME; the first dim is the lane."""
Ints32 = npt.NDArray[np.int32]


class Kernel(Protocol):
    """The functions of `reshard_kernels` that are called."""

    REGION: np.dtype[Any]
    ENTRY: np.dtype[Any]
    COPY: np.dtype[Any]

    def table(self, numbers: Residues, /) -> Ints32:
        """Return the columns' numbers in the form that the other two functions expect."""

    def fold(self, words: Ints32, columns: Ints32, rows: Residues, /) -> tuple[int, int]:
        """Return the sum over words (rows, columns). Each row is contiguous in memory."""

    def fold_rows(self, words: Ints32, columns: Ints32, /) -> Residues:
        """Return the sum of each row, (LANES, rows)."""

    def run(
        self,
        regions: Array,
        entries: Array,
        copies: Array,
        digests: Array,
        tallies: Array,
        first: int,
        limit_ns: int,
        /,
    ) -> tuple[int, int, int]:
        """Run a list of `reshard.execute.work_list`. Return where it ended, why, and the details."""


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """Return the compiled loops, or None if numpy must be used."""
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
        warnings.warn("reshard_kernels computes wrong sums here and is not used", RuntimeWarning, stacklevel=2)
        return None
    return loop


def is_right(kernel: Kernel) -> bool:
    """Return True if its sums equal those of Python's integers, for the largest words and numbers
    and for some others."""
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
