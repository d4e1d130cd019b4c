"""Reads from storages that give no view of their bytes, by segments: many requests at a time, each byte once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from threading import Lock

from reshard.execute.host_assignment import (
    TAIL_BYTES,
    SegmentPart,
    compare_segment,
    copy_parts,
    has_whole_blocks,
    parts_between,
    parts_by_segment,
    read_segment,
    segment_bytes,
    unchecked_bytes,
)
from reshard.execute.reading import ByteCounts, Copy, on_threads
from reshard.stored.checksums import BlockChecksums
from reshard.stored.source import FileSource, OnBytes

# Reading from remote storage, which gives no view of its bytes: by segments, with each byte
# requested once.
#
# Many requests are in flight at a time. If bytes can be read again at no cost, from a mapped file,
# they are checked first, and damaged data is not written. From an object store, that would transfer
# everything twice.


_MAX_READ_SHARE = 1.5
"""A stretch is read in one request if it has at most this many bytes for each requested one."""


@dataclass(frozen=True)
class _Stretch:
    """Bytes [start, stop) of a file, within a segment, that are read in one request."""

    source: FileSource
    number: int
    start: int
    stop: int
    parts: list[SegmentPart]

    def whole_blocks(self) -> _Stretch:
        """Return the range with all blocks that it touches, if the file has checksums of some."""
        if not has_whole_blocks(self.source):
            return self
        assert isinstance(self.source.checksums, BlockChecksums)
        start, stop = self.source.checksums.around(self.start, self.stop)
        return replace(self, start=start, stop=stop)


@dataclass(frozen=True)
class RemoteReading:
    """What is read by segments, and the rest: data of storages with views, or scattered too widely."""

    stretches: list[_Stretch]
    rest: list[Copy]
    is_checked: bool

    @classmethod
    def of(cls, copies: Iterable[Copy], *, is_checked: bool) -> RemoteReading:
        """Choose by storage and by the requested share of each segment. Checked data is read in full blocks."""
        wanted: dict[tuple[FileSource, int], list[SegmentPart]] = defaultdict(list)
        rest: list[Copy] = []
        for copy in copies:
            source = copy.place.source
            if isinstance(source, FileSource) and source.view() is None and copy.place.window.numel:
                for number, parts in parts_by_segment(source, copy):
                    wanted[source, number] += parts
            else:
                rest.append(copy)
        stretches = []
        for (source, number), parts in wanted.items():
            stretch = _stretch(source, number, parts)
            if stretch.stop - stretch.start <= _MAX_READ_SHARE * sum(part.window.nbytes for part in parts):
                stretches.append(stretch.whole_blocks() if is_checked else stretch)
            else:
                rest += [part.as_copy(number * segment_bytes(source)) for part in parts]
        return cls(sorted(stretches, key=lambda s: (s.source.label, s.start)), rest, is_checked)

    def run(
        self,
        *,
        requests: int,
        request_bytes: int,
        piece_bytes: int,
        on_bytes: OnBytes,
    ) -> ByteCounts:
        """Read, check, and copy everything.

        Args:
            requests: in flight at a time, each with memory of its own.
            request_bytes: the most that one asks for.
            piece_bytes: memory for what is staged on its way to another dtype or device.
            on_bytes: called with the bytes that were copied out of each request, on any thread.

        Raises CorruptCheckpointError: targets may be partly written then.
        """
        lock, total = Lock(), ByteCounts()

        def work(stretch: _Stretch) -> None:
            source, read, copied = stretch.source, 0, 0
            passing = PassingBlocks(source, stretch.start) if self.is_checked else None
            check = None if passing is None else lambda _, __, data: passing.add(data)
            for base, start, stop, parts in _requests(stretch, request_bytes):
                slot = memoryview(bytearray(stop - base + TAIL_BYTES))
                read_segment(source, start, stop, slot[start - base :])
                read += stop - start
                if check is not None:
                    compare_segment(source, start, slot[start - base : stop - base], check)
                taken = copy_parts(slot, parts, piece_bytes)
                del slot  # before there is another one
                on_bytes(taken)
                copied += taken
            unchecked = unchecked_bytes(stretch.parts, is_checked=self.is_checked)
            with lock:
                total.add(ByteCounts(copied, max(0, read - copied), unchecked))

        on_threads(work, self.stretches, requests, "reshard-read")
        return total


def _requests(stretch: _Stretch, limit: int) -> Iterator[tuple[int, int, int, Iterable[SegmentPart]]]:
    """Yield the requests (byte that windows count from, first byte, one past the last, parts that
    begin there), as large as the limit allows."""
    base = stretch.number * segment_bytes(stretch.source)
    if stretch.stop - base <= limit:
        yield base, stretch.start, stretch.stop, stretch.parts
        return
    for start in range(stretch.start, stretch.stop, limit):
        stop = min(start + limit, stretch.stop)
        yield start, start, stop, parts_between(stretch.parts, start - base, stop - base)


def _stretch(source: FileSource, number: int, parts: list[SegmentPart]) -> _Stretch:
    """Return the range from the first requested byte to the last."""
    size = segment_bytes(source)
    base = number * size
    start = base + min(part.window.offset for part in parts)
    stop = min(base + max(part.window.stop for part in parts), base + size, source.nbytes)
    return _Stretch(source, number, start, stop, parts)


class PassingBlocks:
    """Compares consecutive pieces of a file, from byte `start` on, block by block."""

    def __init__(self, source: FileSource, start: int) -> None:
        self._source, self._at = source, start
        self._begun: list[memoryview] = []
        """The bytes of a block that has begun, copied: their memory is used again."""

    def add(self, data: memoryview) -> int:
        """Add the next bytes. Return how many bytes were compared. Raises CorruptCheckpointError."""
        blocks = self._source.checksums
        if not isinstance(blocks, BlockChecksums):
            return 0
        begun = sum(map(len, self._begun))
        whole = memoryview(b"".join((*self._begun, data))) if begun else data
        first, stop = self._at - begun, self._at + len(data)
        compared = self._source.compare_data(first, whole)
        end = stop if stop >= blocks.nbytes else stop // blocks.block_bytes * blocks.block_bytes
        self._begun = [memoryview(bytes(whole[max(end, first) - first :]))] if end < stop else []
        self._at = stop
        return compared
