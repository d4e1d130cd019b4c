"""Which parts of files the ranks of a host would each read, and which of them one rank reads or checks for all."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from planners.geometry.arrays import Array, Flags, Ints, grouped, zeros
from planners.geometry.byte_ranges import Window
from reshard.errors import CorruptCheckpointError
from reshard.execute.reading import Copy, Staged, in_pieces
from reshard.live.compiled_kernel import kernel
from reshard.stored.checksums import BlockChecksums, add_touched
from reshard.stored.source import BytesSource, FileSource
from reshard.stored.tensor import Extent, copy_view

# Files are divided into segments of equal size. Each rank reports how many bytes of each segment it
# would touch, in units of the storage: a rank that wants one column of every row touches every
# page. From the reports of all ranks on the host, each rank computes the same assignment:
#
#     touched of a segment     rank 0   rank 1   rank 2   rank 3
#     rows -> columns           all      all      all      all    four times: one reads it, all take theirs
#     the same layout           all       -        -        -     once: rank 0 reads it for itself


LOCAL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES, REMOTE_SEGMENT_BYTES = 1 << 20, 2 << 20, 2 << 20
"""Multiples of the block of checksums, so that the reader of a segment can check it. Small segments
distribute few bytes evenly. Large ones cost less to plan, copy, and wait for. Requests to object
stores are larger."""
LARGE_FILE_BYTES = 64 << 20
"""Files of at least this size have large segments."""
CACHED_BYTES = 512 << 10
MIN_SAVED_BYTES = 16 << 20
"""Sharing takes a few milliseconds to set up. If it saves fewer bytes, each rank reads for itself."""
_TAKE_US_PER_MIB = 16.0
_READ_US_PER_MIB = 100.0
_COMPILED_READ_US_PER_MIB = 30.0
"""Cost of a MiB that is read for all ranks, compared with each rank reading it for itself: the
first number for each rank that uses it, the second for the reader. The kernel hashes and copies it
while it is in a cache."""
_MIN_SHARERS = 2
WHOLE_SHARE = 0.98
"""This share of a segment counts as all of it: its first bytes may be a header."""
_SAMPLES = 3


def segment_bytes(source: FileSource) -> int:
    """Return the size of a file's segments. The last one may be shorter."""
    if source.view() is None:
        return REMOTE_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if source.nbytes >= LARGE_FILE_BYTES else LOCAL_SEGMENT_BYTES


def piece_bytes(source: FileSource) -> int:
    """Return how many bytes of a segment are read, compared, and copied at once. Compiled loops
    split it at no cost, into pieces that fit into a cache. Without them, it is one piece."""
    size, blocks = segment_bytes(source), source.checksums
    whole_blocks = blocks is None or (isinstance(blocks, BlockChecksums) and CACHED_BYTES % blocks.block_bytes == 0)
    is_small = source.view() is not None and whole_blocks and kernel() is not None
    return min(CACHED_BYTES, size) if is_small else size


class FileFootprint(msgspec.Struct, frozen=True, array_like=True):
    """How many bytes of each segment of a file a rank would touch if it read for itself."""

    nbytes: int
    segment_bytes: int
    piece_bytes: int
    first: int
    """The first segment that is touched. Numbers begin with this one."""
    touched: bytes
    """Little-endian numbers of 4 bytes."""


ReadFootprint = dict[str, FileFootprint]
"""What a rank would touch of each file, by label."""


def footprint_of(windows: Iterable[tuple[FileSource, Window]]) -> ReadFootprint:
    """Return the footprint of all reads, by file."""
    files = {}
    for source, its in grouped(windows).items():
        size = segment_bytes(source)
        counts = zeros(-(-source.nbytes // size))
        add_touched(counts, size, its, source.nbytes, max(source.max_gap_bytes, 1))
        used = np.flatnonzero(counts)
        if len(used):
            some = np.minimum(counts[used[0] : used[-1] + 1], size).astype("<u4").tobytes()
            files[source.label] = FileFootprint(source.nbytes, size, piece_bytes(source), int(used[0]), some)
    return files


class SharedSegments(NamedTuple):
    """Segments of a file, in order, each with the rank that reads or checks it for all."""

    label: str
    ranges: Ints
    """(n, 2): first byte, and one past the last."""
    rank: Ints
    """For each segment, the index of that rank on the host."""


class SegmentAssignment(NamedTuple):
    """What each rank does for all ranks of its host, with one row per file."""

    reads: list[SharedSegments]
    """Segments that are read into shared memory. Each rank reads in this order."""
    checks: list[SharedSegments]
    """Segments of which each rank reads a part for itself. They are compared with checksums before
    any rank does."""


def assign_segments(ranks: Sequence[ReadFootprint], touch_cost: float = math.inf) -> SegmentAssignment:
    """Return which rank reads, and which checks, each segment for all. Nothing is read for all if
    that would not pay.

    A segment is read for all if the ranks would touch twice its bytes together. It is checked for
    all if they touch all of it together. Those that touch it take turns.

    Args:
        ranks: those of one host, in an order that all of them know.
        touch_cost: what the function of that name returns; the least of all ranks.
    """
    found: list[tuple[str, FileFootprint, Flags, Flags, Flags]] = []
    touched = read = 0
    for label in sorted({label for rank in ranks for label in rank}):
        theirs = [rank.get(label) for rank in ranks]
        known = [file for file in theirs if file is not None]
        file = known[0]
        if len({(one.nbytes, one.segment_bytes, one.piece_bytes) for one in known}) > 1:
            continue  # it was replaced meanwhile: not all have the same file under this name
        # the bytes touched, by rank and segment
        table = zeros((len(ranks), -(-file.nbytes // file.segment_bytes)))
        for row, its in zip(table, theirs):
            if its is not None:
                counts = np.frombuffer(its.touched, "<u4")
                row[its.first : its.first + len(counts)] = counts
        lengths = np.minimum(file.segment_bytes, file.nbytes - np.arange(table.shape[1]) * file.segment_bytes)
        total, together = table.sum(axis=0), (table > 0).sum(axis=0) >= _MIN_SHARERS
        twice = together & (total >= _MIN_SHARERS * lengths)
        touched, read = touched + int(total[twice].sum()), read + int(lengths[twice].sum())
        found.append((label, file, table > 0, together & (total >= WHOLE_SHARE * lengths), twice))
    pays = touched - read >= MIN_SAVED_BYTES and touched * touch_cost >= read
    work = SegmentAssignment([], [])
    loads = zeros((2, len(ranks)))
    for label, file, touches, whole, twice in found:
        for out, load, chosen in zip(work, loads, (twice & pays, whole & ~(twice & pays))):
            if chosen.any():
                start = np.flatnonzero(chosen) * file.segment_bytes
                ranges = np.stack((start, np.minimum(start + file.segment_bytes, file.nbytes)), axis=1)
                out.append(SharedSegments(label, ranges, _in_turns(touches[:, chosen], load)))
    return work


def _in_turns(touches: Flags, load: Ints) -> Ints:
    """Choose a reader for each of some segments, (ranks, segments). Ranks that touch the same
    segments take turns, starting with the rank that has the fewest. Adds to `load`."""
    who = zeros(touches.shape[1])
    if (touches == touches[:, :1]).all():  # as nearly always
        alike = {b"": list(range(len(who)))}
    else:
        alike = grouped((bytes(key), i) for i, key in enumerate(np.packbits(touches, axis=0).T))
    for its in alike.values():
        sharers = np.flatnonzero(touches[:, its[0]])
        in_turn = sharers[np.argsort(load[sharers], kind="stable")]
        who[its] = in_turn[np.arange(len(its)) % len(in_turn)]
        load += np.bincount(who[its], minlength=len(load))
    return who


def touch_cost(windows: Iterable[tuple[FileSource, Window]]) -> float | None:
    """Return what a rank saves if it does not touch pages of these files, as a share of what it
    costs to read as many bytes for all ranks: None if there is nothing to measure, infinity if the
    storage has no view of its bytes.

    A few segments are tried; the cheapest counts. It depends on the size of the pages: large folios
    of a disk's file system are several times cheaper than the small pages of tmpfs.
    """
    found: list[float] = []
    for source, window in itertools.islice(windows, _SAMPLES):
        start = window.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(LOCAL_SEGMENT_BYTES, source.nbytes - start)
        if source.view() is None:
            return math.inf
        if length and (touch_s := source.touch_s(start, length)) is not None:
            found.append(touch_s * 1e6 / length * (1 << 20))
    if not found:
        return None
    saved = max(min(found) - _TAKE_US_PER_MIB, 0.0)
    return saved / (_READ_US_PER_MIB if kernel() is None else _COMPILED_READ_US_PER_MIB)


# What of a copy begins in which segment of its file; and segments, read and checked as a whole.


TAIL_BYTES, TAIL_PAGE_BYTES = 64, 4096
"""A segment is read this far beyond its end, because an element that begins in it may end there.
Shared memory has a page for that."""

Check = Callable[[FileSource, int, memoryview], int]
"""Compares bytes of a file, from a position, with their checksums, if it has any. Returns the
number of bytes compared. Raises CorruptCheckpointError."""


class SegmentPart(NamedTuple):
    """The elements of a copy that begin in one segment."""

    window: Window
    """Counted from the start of the segment."""
    out: Array | Staged
    copy: Copy

    def as_copy(self, segment_start: int) -> Copy:
        """Return a copy of these elements alone, from the file whose segment begins at byte `segment_start`."""
        window = replace(self.window, offset=self.window.offset + segment_start)
        return Copy(self.copy.place.with_window(window), self.out, self.copy.fqn)


def parts_by_segment(source: FileSource, copy: Copy) -> Iterator[tuple[int, list[SegmentPart]]]:
    """Yield (number of a segment of `source`, the copy's file; the parts of the copy that begin in
    it), ascending."""
    window, size = copy.place.window, segment_bytes(source)
    first, offset = divmod(window.offset, size)
    for number, parts in enumerate(
        _windows_by_segment(Window(offset, window.sizes, window.strides, window.itemsize), size)
    ):
        if parts:
            yield first + number, [SegmentPart(part, copy.out[index], copy) for index, part in parts]


@lru_cache(maxsize=1024)  # tensors of the same shape and position in their segments are split in the same way
def _windows_by_segment(window: Window, size: int) -> list[list[tuple[Any, Window]]]:
    """Return, for each segment of `size` bytes, the indices of the elements that begin in it, and
    their window, counted from the start of the segment."""
    out = []
    for start in range(0, window.stop, size):
        parts = [(box, window.crop(box)) for box in window.within(start, start + size)]
        # the dots make it a view, also of a 0-d array
        out.append([((*box.slices, ...), replace(part, offset=part.offset - start)) for box, part in parts])
    return out


def parts_between(parts: Iterable[SegmentPart], start: int, stop: int) -> Iterator[SegmentPart]:
    """Yield the parts that begin in bytes [start, stop) of their segment, with windows counted
    from `start`."""
    index: Any
    for window, out, copy in parts:
        for box in window.within(start, stop):
            part, index = window.crop(box), (*box.slices, ...)  # the dots make it a view, also of a 0-d array
            yield SegmentPart(replace(part, offset=part.offset - start), out[index], copy)


OneOrMany = TypeVar("OneOrMany", int, Ints)


def segment_end(source: FileSource, stop: OneOrMany) -> OneOrMany:
    """Return how far a piece that ends at byte `stop`, or each of many, is read."""
    return cast("OneOrMany", np.minimum(stop + TAIL_BYTES, source.nbytes))


def read_segment(source: FileSource, start: int, stop: int, slot: memoryview) -> None:
    """Read bytes [start, stop) of a file, and a few more, into `slot`."""
    source.read_directly(start, slot[: segment_end(source, stop) - start])


def compare_segment(source: FileSource, start: int, data: memoryview, check: Check = FileSource.compare_data) -> None:
    """Check bytes of a file, from `start`, that were just read.

    Raises CorruptCheckpointError, which says that targets may be partly written.
    """
    try:
        check(source, start, data)
    except CorruptCheckpointError as error:
        error.args = (f"{error}. Part of the target is already overwritten",)
        raise


def has_whole_blocks(source: FileSource) -> bool:
    """Return whether each checksum of a file covers a block within one segment."""
    blocks = source.checksums
    return isinstance(blocks, BlockChecksums) and segment_bytes(source) % blocks.block_bytes == 0


def unchecked_bytes(parts: Iterable[SegmentPart], *, is_checked: bool) -> int:
    """Return the bytes of segment parts, read from files without a view, that were not compared
    with checksums. Files with a view have counted them before."""
    return sum(
        part.window.nbytes
        for part in parts
        if isinstance(source := part.copy.place.source, FileSource)
        and source.view() is None
        and not (is_checked and has_whole_blocks(source))
    )


def copy_parts(view: memoryview, parts: Iterable[SegmentPart], piece_bytes: int) -> int:
    """Copy the parts of a segment, whose bytes are in `view`, into their targets. Return the number
    of bytes copied.

    `piece_bytes`: for what is staged on its way to another dtype or device.
    """
    copied = 0
    for window, out, copy in parts:
        if isinstance(out, Staged):
            here = Extent(BytesSource(view), window, copy.place.conjugate)
            for place, piece in in_pieces(Copy(here, out), piece_bytes):
                assert isinstance(piece, Staged)
                piece.fill(place, piece_bytes)
        else:
            copy_view(view, window, copy.place.conjugate, out)
        copied += window.nbytes
    return copied
