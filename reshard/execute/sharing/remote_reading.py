"""Reading from storages that are far away, which give no view of their bytes: by segments, each byte asked for once.

Many requests are under way at a time. Where bytes can be had again for nothing, from a mapped file, checking comes
first, and nothing is written of what is damaged; from an object store that would cost a second transfer of everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from reshard.execute.reading import Copy
from reshard.execute.sharing.segment_parts import (
    TAIL_BYTES,
    ByteCounts,
    SegmentPart,
    copy_parts,
    has_whole_blocks,
    parts_between,
    parts_by_segment,
    read_segment,
    unchecked_bytes,
)
from reshard.execute.sharing.segments import segment_bytes
from reshard.formats.stored.checksums import BlockChecksums
from reshard.formats.stored.source import FileSource

__all__ = ["RemoteReading"]

_MAX_READ_SHARE = 1.5
"""A stretch is read as a whole if it has at most so many bytes for each one that is wanted of it."""


@dataclass(frozen=True)
class _Stretch:
    """Bytes [start, stop) of a file, within a segment, that are read at once."""

    source: FileSource
    number: int
    start: int
    stop: int
    parts: list[SegmentPart]

    def whole_blocks(self) -> _Stretch:
        """The same with all of the blocks that it touches, where the file has checksums of some."""
        if not has_whole_blocks(self.source):
            return self
        assert isinstance(self.source.checksums, BlockChecksums)
        start, stop = self.source.checksums.around(self.start, self.stop)
        return replace(self, start=start, stop=stop)


@dataclass(frozen=True)
class RemoteReading:
    """What is read by segments, and the rest: what lies in storages with views, or is strewn too widely."""

    stretches: list[_Stretch]
    rest: list[Copy]
    is_checked: bool

    @classmethod
    def of(cls, copies: Iterable[Copy], *, is_checked: bool) -> RemoteReading:
        """Choose by storage and by how much of a segment is wanted. What `is_checked` is read in whole blocks."""
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
        on_bytes: Callable[[int], None],
    ) -> ByteCounts:
        """Read, check and copy everything.

        Args:
            requests: under way at a time, each with memory of its own.
            request_bytes: the most that one asks for.
            piece_bytes: memory for what is staged on its way to another dtype or device.
            on_bytes: called with the bytes that were copied out of each request, on any thread.

        Raises DamagedCheckpointError: targets may be partly written then.
        """
        lock, total = Lock(), ByteCounts()

        def work(stretch: _Stretch) -> None:
            source, done, copied = stretch.source, ByteCounts(), 0
            passing = PassingBlocks(source, stretch.start) if self.is_checked else None
            check = None if passing is None else lambda _, __, data: passing.add(data)
            for base, start, stop, parts in _requests(stretch, request_bytes):
                slot = memoryview(bytearray(stop - base + TAIL_BYTES))
                read_segment(source, start, stop, slot[start - base :], check, done)
                taken = copy_parts(slot, parts, piece_bytes)
                del slot  # before there is another one
                on_bytes(taken)
                copied += taken
            with lock:
                total.read += copied
                total.extra += max(0, done.read - copied)
                total.unchecked += unchecked_bytes(stretch.parts, is_checked=self.is_checked)

        if requests == 1 or len(self.stretches) <= 1:
            for stretch in self.stretches:
                work(stretch)
        else:
            with ThreadPoolExecutor(requests, thread_name_prefix="reshard-read") as pool:
                for _ in pool.map(work, self.stretches):
                    pass
        return total


def _requests(stretch: _Stretch, limit: int) -> Iterator[tuple[int, int, int, Iterable[SegmentPart]]]:
    """(byte that windows count from, first byte, one past the last, parts that begin there): all at once, or as much as
    the limit allows."""
    base = stretch.number * segment_bytes(stretch.source)
    if stretch.stop - base <= limit:
        yield base, stretch.start, stretch.stop, stretch.parts
        return
    for start in range(stretch.start, stretch.stop, limit):
        stop = min(start + limit, stretch.stop)
        yield start, start, stop, parts_between(stretch.parts, start - base, stop - base)


def _stretch(source: FileSource, number: int, parts: list[SegmentPart]) -> _Stretch:
    """From the first byte that is wanted to the last."""
    size = segment_bytes(source)
    base = number * size
    start = base + min(part.window.offset for part in parts)
    stop = min(base + max(part.window.stop for part in parts), base + size, source.nbytes)
    return _Stretch(source, number, start, stop, parts)


class PassingBlocks:
    """Compares what is read of a file from byte `start` on, one piece behind another, block by block."""

    def __init__(self, source: FileSource, start: int) -> None:
        self._source, self._at = source, start
        self._begun: list[memoryview] = []
        """The bytes of a block that has begun, copied: their memory is used again."""

    def add(self, data: memoryview) -> int:
        """The next bytes; returns how many bytes were compared. Raises DamagedCheckpointError."""
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
