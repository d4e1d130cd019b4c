"""Tallies: parts of the fingerprints of many tensors, by number, packed so that those of many ranks add up quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reshard.errors import FormatError
from reshard.state.fingerprints.keys import LANES, PRIME
from reshard.state.fingerprints.parts import Partial

__all__ = ["add_tallies", "pack_tally", "unpack_tally"]

_ROW = np.dtype([("number", "<u4"), ("sums", "<u8", LANES), ("count", "<u8")])


def pack_tally(parts: Mapping[int, Partial]) -> bytes:
    """The parts, by the number of their tensor: 28 bytes each."""
    rows = np.zeros(len(parts), _ROW)
    for row, (number, part) in zip(rows, sorted(parts.items())):
        row["number"], row["sums"], row["count"] = number, part.sums, part.count
    return rows.tobytes()


def unpack_tally(packed: bytes) -> dict[int, Partial]:
    """Inverse of `pack_tally`."""
    rows = _rows(packed)
    columns = rows["number"].tolist(), rows["sums"].tolist(), rows["count"].tolist()
    return {number: Partial(tuple(sums), count) for number, sums, count in zip(*columns)}


def add_tallies(packed: Sequence[bytes]) -> bytes:
    """Their sum, packed."""
    parts = [_rows(one) for one in packed]
    ordered = np.sort(np.concatenate([part["number"] for part in parts]))
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    numbers = ordered[is_new]  # as np.unique, which imports numpy.ma
    total = np.zeros(len(numbers), _ROW)
    total["number"] = numbers
    for part in parts:
        at = np.searchsorted(numbers, part["number"])
        total["sums"][at] = (total["sums"][at] + part["sums"]) % PRIME
        total["count"][at] += part["count"]
    return total.tobytes()


def _rows(packed: bytes) -> npt.NDArray[np.void]:
    if len(packed) % _ROW.itemsize:
        raise FormatError(f"a tally has {_ROW.itemsize} bytes for each tensor, got {len(packed)}")
    return np.frombuffer(packed, _ROW)
