"""Compiled inner loops for `reshard`, which does the same without them, more slowly. Internal.

One library serves every Python version and every CPU of an architecture: each call detects what the CPU supports.
The interpreter lock is released during a call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["COPY", "ENTRY", "INTERFACE", "REGION", "digest", "fold", "fold_rows", "run", "table"]

INTERFACE = 2
"""Version of this interface. `reshard` only uses the version that it knows."""

_GROUP = 8
_HALF = 1 << 23
_PRIME = 2**48 - 59
_MAX_ROWS, _MAX_COLUMNS = 1 << 17, 1 << 20

_loops = ctypes.CDLL(str(Path(__file__).with_name("_loops.abi3.so")))
_fold = _loops.reshard_fold
_fold.restype = None
_fold.argtypes = [
    ctypes.c_void_p,
    *[ctypes.c_int64] * 3,
    *[ctypes.c_void_p] * 3,
    ctypes.c_int,
]


def table(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the columns' numbers, (2, columns) in [0, 2^48 - 59), in the form for `fold`: (groups of 8 columns, 8, 8).

    Each group begins with 4 rows of digits: for each lane, low, then high. A number, or the number minus 2^48 - 59, is
    low + 2^24 high, both in (-2^23, 2^23]. Then come the numbers as 64-bit integers: 2 rows for each lane.
    """
    near = np.where(numbers > _HALF * 2**24 + _HALF, numbers - _PRIME, numbers)
    low = ((near + _HALF - 1) & (2 * _HALF - 1)) - _HALF + 1
    high = (near - low) >> 24
    columns = numbers.shape[1]
    groups = -(-columns // _GROUP)
    digits, exact = np.zeros((2, 2, groups * _GROUP), np.int32), np.zeros((2, groups * _GROUP), np.int64)
    digits[:, 0, :columns], digits[:, 1, :columns], exact[:, :columns] = low, high, numbers
    found = np.empty((groups, 8, _GROUP), np.int32)
    found[:, :4] = digits.reshape(4, groups, _GROUP).transpose(1, 0, 2)
    found.view(np.int64)[:, 4:] = exact.reshape(2, groups, 2, 4).transpose(1, 0, 2, 3).reshape(groups, 4, 4)
    return found


def fold(
    words: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], *, widest: int = 2
) -> tuple[int, int]:
    """Return the sum of each word times the numbers of its row and column, modulo 2^48 - 59, for both lanes.

    Args:
        words: (rows, columns). Each row is contiguous, at any address.
        columns: the columns' numbers, as `table` returns them.
        rows: the rows' numbers, (2, rows) in [0, 2^48 - 59).
        widest: on x86-64, the widest instruction set to use: 0 for SSE2, 1 for AVX2, 2 for AVX-512.

    Raises:
        ValueError: arrays of other shapes or types, or more than 2^17 rows or 2^20 columns.
    """
    if rows.shape != (2, len(words)) or rows.dtype != np.int64:
        raise ValueError(f"numbers of {len(words)} rows are int64 of shape (2, {len(words)}), got {_kind(rows)}")
    sums = np.empty(2, np.int64)
    numbers = np.ascontiguousarray(rows)  # if it is a copy, it must live until the call ends
    _call(words, columns, numbers, sums, widest)
    return int(sums[0]), int(sums[1])


def fold_rows(
    words: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], *, widest: int = 2
) -> npt.NDArray[np.int64]:
    """Return the sum of each row, (2, rows). Raises ValueError as `fold` does."""
    sums = np.empty((2, len(words)), np.int64)
    _call(words, columns, None, sums, widest)
    return sums


def _call(
    words: npt.NDArray[np.int32],
    columns: npt.NDArray[np.int32],
    numbers: npt.NDArray[np.int64] | None,
    sums: npt.NDArray[np.int64],
    widest: int,
) -> None:
    if words.dtype != np.int32 or words.ndim != 2 or (words.shape[1] > 1 and words.strides[1] != words.itemsize):
        raise ValueError(f"words are int32 in rows, each one run of memory, got {_kind(words)}")
    height, width = words.shape
    groups = -(-width // _GROUP)
    if columns.shape != (groups, 8, _GROUP) or columns.dtype != np.int32 or not columns.flags.c_contiguous:
        raise ValueError(f"of {width} columns a table is int32 of shape ({groups}, 8, {_GROUP}), got {_kind(columns)}")
    if height > _MAX_ROWS or width > _MAX_COLUMNS:
        raise ValueError(f"at most {_MAX_ROWS} rows of {_MAX_COLUMNS} words, got {_kind(words)}")
    at = None if numbers is None else numbers.ctypes.data
    _fold(words.ctypes.data, height, words.strides[0], width, columns.ctypes.data, at, sums.ctypes.data, widest)


def _kind(array: npt.NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {array.shape} with strides of {array.strides} bytes"


_hash = _loops.reshard_hash
_hash.restype = ctypes.c_uint64
_hash.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]


def digest(data: npt.NDArray[np.uint8], *, widest: int = 2) -> int:
    """Return the XXH3-64 of the bytes, as `run` computes it.

    Args:
        data: contiguous bytes, at any address.
        widest: on x86-64, the widest instruction set to use: 0 for SSE2, 1 for AVX2, 2 for AVX-512.

    Raises:
        ValueError: an array of another shape or type.
    """
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"bytes are a row of uint8 without gaps, got {_kind(data)}")
    return int(_hash(data.ctypes.data, data.nbytes, widest))


_DIMS = 8
REGION = np.dtype([("at", "<i8"), ("nbytes", "<i8"), ("writable", "<i8")])
"""A memory region: address and size in bytes."""
ENTRY = np.dtype([("kind", "<i8"), ("of", "<i8", 7)])
"""An instruction: see `run.c`."""
COPY = np.dtype(
    [
        *[(name, "<i8") for name in ("position", "region", "byte", "itemsize", "ndim")],
        *[(name, "<i8", _DIMS) for name in ("sizes", "from", "to")],
    ]
)
"""Elements of a file, the first at `position`, and their target in memory. Strides are in bytes."""


class _List(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("regions", "entries", "copies", "digests", "tallies")],
        *[(f"{name}_count", ctypes.c_int64) for name in ("region", "entry", "copy", "digest", "tally")],
    ]


_run = _loops.reshard_run
_run.restype = ctypes.c_int64
_run.argtypes = [ctypes.POINTER(_List), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]


def run(
    regions: npt.NDArray[np.void],
    entries: npt.NDArray[np.void],
    copies: npt.NDArray[np.void],
    digests: npt.NDArray[np.uint64],
    tallies: npt.NDArray[np.int64],
    first: int,
    limit_ns: int,
) -> tuple[int, int, int]:
    """Run entries from `first` on, for at most about `limit_ns`. The caller keeps all memory that they name alive.

    Returns:
        The entry at which it stopped (the number of entries at the end), the reason, and its detail: see `run.c`.

    Raises:
        ValueError: arrays of other types or shapes, or not contiguous.
    """
    tables = (regions, entries, copies, digests, tallies)
    for table, kind in zip(tables, (REGION, ENTRY, COPY, np.dtype("<u8"), np.dtype("<i8")), strict=True):
        if table.dtype != kind or table.ndim != 1 or not table.flags.c_contiguous:
            raise ValueError(f"a table is one row of {kind} without gaps, got {_kind(table)}")
    if not tallies.flags.writeable:
        raise ValueError("tallies are counted in place, and these may not be written to")
    said = np.zeros(2, np.int64)
    given = _List(*[table.ctypes.data for table in tables], *map(len, tables))
    at = _run(ctypes.byref(given), first, limit_ns, said.ctypes.data)
    return at, int(said[0]), int(said[1])
