"""Reading by segments from storages that have no view of their bytes: each byte is asked for once, checked, and copied.

Many requests are under way at a time. Where bytes can be had again for nothing, from a mapped file, checking comes
first, and nothing is written of what is damaged; from an object store that would cost a second transfer of everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from reshard.execute.reading import Copy
from reshard.execute.sharing.pieces import Check, Done, Part, cut, fetch, slot_bytes, take
from reshard.execute.sharing.segments import segment_bytes
from reshard.formats.native.checksums import MAX_EXTRA_SHARE, SMALL_FILE_BYTES
from reshard.formats.stored.source import FileSource

__all__ = ["SoloReading"]

_MAX_READ_SHARE = 1.5
"""A stretch is read as a whole if it has at most so many bytes for each one that is wanted of it."""


@dataclass(frozen=True)
class _Stretch:
    """Bytes [start, stop) of a file, within a segment, that are read at once."""

    source: FileSource
    number: int
    start: int
    stop: int
    parts: list[Part]


@dataclass(frozen=True)
class SoloReading:
    """What is read by segments, and the rest: from storages with views, or strewn too widely."""

    stretches: list[_Stretch]
    rest: list[Copy]

    @classmethod
    def of(cls, copies: Iterable[Copy]) -> SoloReading:
        """Choose by storage and by how much of a segment is wanted."""
        wanted: dict[tuple[FileSource, int], list[Part]] = defaultdict(list)
        rest: list[Copy] = []
        for copy in copies:
            source = copy.place.source
            if isinstance(source, FileSource) and source.view() is None and copy.place.window.numel:
                for number, parts in cut(source, copy):
                    wanted[source, number] += parts
            else:
                rest.append(copy)
        stretches = []
        for (source, number), parts in wanted.items():
            stretch = _stretch(source, number, parts)
            if stretch.stop - stretch.start <= _MAX_READ_SHARE * sum(part.window.nbytes for part in parts):
                stretches.append(stretch)
            else:
                rest += [part.alone(number * segment_bytes(source)) for part in parts]
        return cls(sorted(stretches, key=lambda s: (s.source.label, s.start)), rest)

    def run(self, *, requests: int, piece_bytes: int, check: Check | None, on_bytes: Callable[[int], None]) -> Done:
        """Read, check and copy everything, with `requests`, each with memory for a segment, under way at a time.

        Raises DamagedCheckpointError: targets may be partly written then.
        """
        lock, total = Lock(), Done()

        def work(stretch: _Stretch) -> None:
            done, at = Done(), stretch.start - stretch.number * segment_bytes(stretch.source)
            slot = memoryview(bytearray(slot_bytes(stretch.source)))
            fetch(stretch.source, stretch.start, stretch.stop, slot[at:], check, done)
            taken = take(slot, stretch.parts, piece_bytes)
            with lock:
                total.read += taken
                total.extra += max(0, done.read - taken)
                total.checked += done.checked
            on_bytes(taken)

        if requests == 1 or len(self.stretches) <= 1:
            for stretch in self.stretches:
                work(stretch)
        else:
            with ThreadPoolExecutor(requests, thread_name_prefix="reshard-read") as pool:
                for _ in pool.map(work, self.stretches):
                    pass
        return total


def _stretch(source: FileSource, number: int, parts: list[Part]) -> _Stretch:
    """From the first byte that is wanted to the last; or all of the segment, so that it can be checked, where that is
    hardly more, or the file is small."""
    size = segment_bytes(source)
    base = number * size
    end = min(base + size, source.nbytes)
    start = base + min(part.window.offset for part in parts)
    stop = min(base + max(part.window.stop for part in parts), end)
    room = source.nbytes if source.nbytes <= SMALL_FILE_BYTES else int((stop - start) * MAX_EXTRA_SHARE)
    start = base if start - base <= room else start
    return _Stretch(source, number, start, end if end - stop <= room else stop, parts)
