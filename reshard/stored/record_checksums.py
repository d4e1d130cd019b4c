"""CRC-32 of the records of zip archives: computed, combined, and compared with what is read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planners.geometry.arrays import Ints
from planners.geometry.box import Range
from planners.geometry.byte_ranges import Window
from reshard.stored.checksums import Checksums

try:  # the extra `crc32` is many times as fast on CPUs with carry-less multiplication
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["RecordChecksums", "combined", "crc32"]


@dataclass(slots=True)
class _RecordSum:
    stop: int
    look_up: Callable[[], int | None]
    is_right: bool = False
    passed: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, stop, CRC) of bytes that were read so far."""
    found: tuple[int | None] | None = None
    """The CRC that was looked up, in a tuple. None: not looked up yet."""

    def crc(self) -> int | None:
        """Return the CRC that was written with the record, or None if there is none."""
        if self.found is None:
            self.found = (self.look_up(),)
        return self.found[0]


class RecordChecksums(Checksums):
    """CRC-32 of a file's records, which are found while the file is parsed."""

    can_pass = True

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        self._records: dict[int, _RecordSum] = {}

    def add(self, start: int, stop: int, crc: Callable[[], int | None]) -> None:
        """Add a record at [start, stop). `crc` looks up the CRC that was written with it."""
        if start < stop and start not in self._records:
            with self._lock:
                if start not in self._records:
                    self._records[start] = _RecordSum(stop, crc)
                    self._starts.insert(bisect_left(self._starts, start), start)

    def written(self, start: int) -> int | None:
        """Return the CRC that was written with the record at `start`, or None if there is none."""
        return self._records[start].crc() if start in self._records else None

    def _near(self, start: int, stop: int) -> list[int]:
        with self._lock:
            first = max(bisect_right(self._starts, start) - 1, 0)
            near = self._starts[first : bisect_left(self._starts, stop)]
        return [at for at in near if self._records[at].stop > start]

    def pending(self, start: int, stop: int) -> list[Range]:
        records = ((at, self._records[at]) for at in self._near(start, stop))
        return [(at, one.stop) for at, one in records if not one.is_right and one.crc() is not None]

    def has(self, start: int, stop: int) -> bool:
        for at in self._near(start, stop):
            record = self._records[at]
            if at <= start and stop <= record.stop:
                return record.is_right or record.crc() is not None
        return False

    def is_right(self, block: Range, data: Iterable[bytes | memoryview]) -> bool:
        crc = 0
        for piece in data:
            crc = crc32(piece, crc)
        record = self._records[block[0]]
        record.is_right = crc == record.crc()
        return record.is_right

    def wanted(self, ranges: Sequence[Range], windows: Iterable[Window]) -> tuple[Ints, Ints, int]:
        counts: dict[Range, int] = {}
        outside = 0
        runs = [(start, stop, stop - start) for start, stop in ranges]
        runs += [(window.offset, window.stop, window.nbytes) for window in windows]
        for start, stop, nbytes in runs:
            left = nbytes
            for at in self._near(start, stop):
                record = self._records[at]
                if record.crc() is not None:
                    common = min(left, min(stop, record.stop) - max(start, at))
                    counts[at, record.stop] = counts.get((at, record.stop), 0) + common
                    left -= common
            outside += left
        blocks = sorted(counts)
        return (
            np.array(blocks, np.int64).reshape(-1, 2),
            np.array([counts[block] for block in blocks], np.int64),
            outside,
        )

    def note(self, start: int, data: memoryview) -> Range | None:
        stop = start + len(data)
        for at in self._near(start, stop):
            record = self._records[at]
            if record.is_right or at > start or stop > record.stop or record.crc() is None:
                continue
            crc = crc32(data)
            with self._lock:
                _put(record.passed, start, stop, crc)
                if record.passed[0][:2] != (at, record.stop):
                    return None
                ((_, _, found),) = record.passed
                record.passed.clear()
            record.is_right = found == record.crc()
            return None if record.is_right else (at, record.stop)
        return None


def _put(passed: list[tuple[int, int, int]], start: int, stop: int, crc: int) -> None:
    """Insert a run of bytes and its CRC into a sorted list of disjoint runs, and join it with
    adjacent runs. Ignores a run that overlaps another."""
    i = bisect_left(passed, (start,))
    if (i and passed[i - 1][1] > start) or (i < len(passed) and passed[i][0] < stop):
        return
    if i < len(passed) and passed[i][0] == stop:
        _, end, after = passed.pop(i)
        crc, stop = combined(crc, after, end - stop), end
    if i and passed[i - 1][1] == start:
        begin, _, before = passed.pop(i - 1)
        passed.insert(i - 1, (begin, stop, combined(before, crc, stop - start)))
    else:
        passed.insert(i, (start, stop, crc))


# A CRC is the remainder of a polynomial over GF(2). So the CRC of two consecutive runs of bytes
# follows from their CRCs and the length of the second.


_POLYNOMIAL = 0xEDB88320
"""x^32 + x^26 + ... + 1 without x^32. Here, the highest bit is always the coefficient of x^0."""
_ONE = 1 << 31
_BYTE = _ONE >> 8


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    found = 0
    for power in range(32):
        if a & _ONE >> power:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@lru_cache(maxsize=4096)  # the chunks of a checkpoint have few different lengths
def _shift(nbytes: int) -> int:
    """Return x to the power of 8 * `nbytes`, modulo the polynomial."""
    found, square = _ONE, _BYTE
    while nbytes:
        if nbytes & 1:
            found = _product(found, square)
        square = _product(square, square)
        nbytes >>= 1
    return found


def combined(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two consecutive runs of bytes, given their CRCs. The CRC of no bytes is 0."""
    return _product(first, _shift(second_nbytes)) ^ second
