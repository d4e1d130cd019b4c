"""Which parts of files the ranks of one machine would each read, and which of them one rank reads or checks for all.

Files are cut into segments of equal size. A rank says how many bytes of each its reading touches, in the grain in which
the storage gives them: who wants one column of every row touches every page. From what all ranks of the machine say,
each finds the same answer:

    touched of a segment     rank 0   rank 1   rank 2   rank 3
    rows -> columns           all      all      all      all     four times its size: one reads it, all take their part
    the same layout           all       -        -        -      once: rank 0 reads it for itself
"""

from __future__ import annotations

import itertools
import math
import mmap
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from planners.geometry.byteruns import Window
from reshard.formats.stored.checksums import add_touched
from reshard.formats.stored.source import FileSource

__all__ = [
    "LARGE_FILE_BYTES",
    "LARGE_SEGMENT_BYTES",
    "LOCAL_SEGMENT_BYTES",
    "REMOTE_SEGMENT_BYTES",
    "WHOLE_SHARE",
    "Duties",
    "Segment",
    "TouchedBytes",
    "assign_segments",
    "segment_bytes",
    "touch_us_per_mib",
]

LOCAL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES, REMOTE_SEGMENT_BYTES = 1 << 20, 2 << 20, 2 << 20
"""Multiples of the block of checksums: whoever reads a segment can check it. Small ones are dealt evenly where there
is little to read; of large ones fewer are cut, copied and waited for. An object store is asked for more at once."""
LARGE_FILE_BYTES = 64 << 20
"""Files of at least this size have large segments."""
MIN_SAVED_BYTES = 16 << 20
"""Sharing takes a few milliseconds to set up; with less to save each rank reads for itself."""
READ_US_PER_MIB = 150.0
"""About what it takes to copy a MiB out of the page cache, and to wake those who wait for it."""
_MIN_SHARERS = 2
WHOLE_SHARE = 0.98
"""So much of a segment is all of it: its first bytes may be a header."""
_SAMPLES = 3


def segment_bytes(source: FileSource) -> int:
    """The size of the segments of a file; its last one may be shorter."""
    if source.view() is None:
        return REMOTE_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if source.nbytes >= LARGE_FILE_BYTES else LOCAL_SEGMENT_BYTES


class _File(msgspec.Struct, frozen=True, array_like=True):
    nbytes: int
    segment_bytes: int
    first: int
    """The first segment that is touched; of it and those behind it we have numbers."""
    touched: bytes


@dataclass(frozen=True)
class TouchedBytes:
    """How many bytes of each segment of each file a rank would touch if it read for itself."""

    files: Mapping[str, _File]
    """By label; the numbers are little-endian, 4 bytes each."""

    @classmethod
    def of(cls, windows: Iterable[tuple[FileSource, Window]]) -> TouchedBytes:
        """By all that is read of each file."""
        counts: dict[str, tuple[int, int, npt.NDArray[np.int64]]] = {}
        for source, window in windows:
            if source.label not in counts:
                size = segment_bytes(source)
                counts[source.label] = source.nbytes, size, np.zeros(-(-source.nbytes // size), np.int64)
            nbytes, size, all_counts = counts[source.label]
            add_touched(all_counts, size, window, nbytes, max(source.max_gap_bytes, 1))
        files = {}
        for label, (nbytes, size, all_counts) in counts.items():
            used = np.flatnonzero(all_counts)
            if len(used):
                some = np.minimum(all_counts[used[0] : used[-1] + 1], size)
                files[label] = _File(nbytes, size, int(used[0]), some.astype("<u4").tobytes())
        return cls(files)

    def encode(self) -> bytes:
        """For the other ranks; see `decode`. Packed, since all ranks of the job get it, and most numbers are alike."""
        return zlib.compress(msgspec.msgpack.encode(self.files), 1)

    @classmethod
    def decode(cls, data: bytes) -> TouchedBytes:
        """What another rank encoded."""
        return cls(msgspec.msgpack.decode(zlib.decompress(data), type=dict[str, _File]))


class Segment(NamedTuple):
    """Bytes [start, stop) of a file, which one rank reads for all."""

    label: str
    number: int
    start: int
    stop: int


class Duties(NamedTuple):
    """What one rank does for all ranks of its machine."""

    reads: tuple[Segment, ...]
    """What it reads into shared memory, in this order."""
    checks: tuple[Segment, ...]
    """What each rank reads a part of for itself, and this one compares with checksums before any of them does."""


def assign_segments(ranks: Sequence[TouchedBytes], touch_us: float = math.inf) -> tuple[Duties, ...]:
    """Who reads, and who checks, which segments for all; nothing is read for all if that would not pay.

    A segment is read for all if together the ranks would touch twice as many bytes as it has. It is checked for all if
    together they touch all of it, whoever reads it. Those that touch it take turns.

    Args:
        ranks: those of one machine, in an order that all of them know.
        touch_us: what touching a MiB costs a rank that reads for itself, in microseconds; see `touch_us_per_mib`.
    """
    found: list[tuple[str, _File, npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = []
    touched = read = 0
    for label in sorted({label for rank in ranks for label in rank.files}):
        file, *others = (rank.files[label] for rank in ranks if label in rank.files)
        if any((other.nbytes, other.segment_bytes) != (file.nbytes, file.segment_bytes) for other in others):
            continue  # it was replaced meanwhile: not all have the same file under this name
        table = _table(label, ranks)
        lengths = np.minimum(file.segment_bytes, file.nbytes - np.arange(table.shape[1]) * file.segment_bytes)
        total, together = table.sum(axis=0), (table > 0).sum(axis=0) >= _MIN_SHARERS
        twice = together & (total >= _MIN_SHARERS * lengths)
        touched, read = touched + int(total[twice].sum()), read + int(lengths[twice].sum())
        found.append((label, file, table > 0, together & (total >= WHOLE_SHARE * lengths), twice))
    pays = touched - read >= MIN_SAVED_BYTES and touched * touch_us >= read * READ_US_PER_MIB
    reads: list[list[Segment]] = [[] for _ in ranks]
    checks: list[list[Segment]] = [[] for _ in ranks]
    for label, file, touches, whole, twice in found:
        _assign_in_turns(reads, label, file, touches, twice & pays)
        _assign_in_turns(checks, label, file, touches, whole & ~(twice & pays))
    return tuple(Duties(tuple(mine), tuple(own)) for mine, own in zip(reads, checks))


def _assign_in_turns(
    out: list[list[Segment]], label: str, file: _File, touches: npt.NDArray[np.bool_], chosen: npt.NDArray[np.bool_]
) -> None:
    """Give the chosen segments of a file to ranks: those that touch the same ones take turns."""
    groups: dict[bytes, Iterator[int]] = {}
    numbers = np.flatnonzero(chosen)
    for i, who in zip(numbers.tolist(), touches.T[numbers]):
        key = who.tobytes()
        if key not in groups:
            groups[key] = itertools.cycle(sorted(np.flatnonzero(who).tolist(), key=lambda r: len(out[r])))
        start, rank = i * file.segment_bytes, next(groups[key])
        out[rank].append(Segment(label, i, start, min(start + file.segment_bytes, file.nbytes)))


def touch_us_per_mib(windows: Iterable[tuple[FileSource, Window]]) -> float:
    """What it costs to touch a MiB of these files, in microseconds of processor time: nothing if there are none, very
    much where the storage has no view of its bytes.

    Tried on a few segments. It depends on the size of the pages: tmpfs has small ones, a disk's file system with large
    folios is ten times cheaper. What else the machine does is not counted, but may slow it down: the least counts.
    """
    found: list[float] = []
    for source, window in itertools.islice(windows, _SAMPLES):
        start = window.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(LOCAL_SEGMENT_BYTES, source.nbytes - start)
        if source.view() is None:
            return math.inf
        began = time.thread_time()
        if length and source.mapped(start, length) is not None:
            found.append((time.thread_time() - began) * 1e6 / length * (1 << 20))
    return min(found, default=0.0)


def _table(label: str, ranks: Sequence[TouchedBytes]) -> npt.NDArray[np.int64]:
    """Bytes touched by rank and segment."""
    parts = [
        (rank.files[label].first, np.frombuffer(rank.files[label].touched, "<u4")) if label in rank.files else None
        for rank in ranks
    ]
    table = np.zeros((len(ranks), max(first + len(counts) for first, counts in filter(None, parts))), np.int64)
    for row, part in zip(table, parts):
        if part is not None:
            row[part[0] : part[0] + len(part[1])] = part[1]
    return table
