"""Saved checksums of a file's bytes, and which of them were compared."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from planners.geometry.arrays import Flags, Ints, grouped
from planners.geometry.box import Range
from planners.geometry.byte_ranges import ByteRuns, Window
from reshard.errors import CorruptCheckpointError
from reshard.live.compiled_kernel import kernel

#     file      | block 0 | block 1 | block 2 | block 3 |     a read of some bytes checks every block that it touches,
#     a read          [--------------]                        reading the rest of the first and the last one, too
#     checked   [-----------------------------]
#
# All elements are read through a `Source`, which has the `Checksums` of its bytes. Readers get
# verified bytes or an error. If checking is off, or would exceed the limits below, they get
# unverified bytes, which are counted.


MAX_CHECK_MULTIPLE = 2.0
"""A check may read at most this multiple of the requested bytes."""
FREE_CHECK_BYTES = 16 << 20
"""A check may always read this many bytes, even if few are requested."""

EVERY_BLOCK = ""
_LAST_FILE = "whether files with higher numbers are missing"
CRC_OF_RECORDS = "unchecked: whether all files are from the same save, and whether replicas are equal"
NO_CHECKSUMS = "unchecked: the format has no checksums"
"""For reports: what the checksums of a format do not cover. A CRC-32 in a zip archive covers one record."""

CheckTime = Literal["before", "during"]
"""Whether bytes are compared with checksums before targets are filled, or while they are filled."""

_DONE, _COMPARE, _NO_LIMIT_NS = 0, 1, 1 << 60
"""Equal to these constants of `reshard.execute.work_list`."""
_NEAR_BYTES = 64 << 10
"""Runs with smaller gaps are looked up together, in bytes."""


def changed_block(label: str, block: Range) -> str:
    """Return the message for a block of a file that does not match its checksum."""
    return f"{label}: the block of bytes [{block[0]}, {block[1]}) was changed since it was written"


def most_to_check(wanted_bytes: int) -> float:
    """Return how many bytes may be read in order to check `wanted_bytes`."""
    return max(MAX_CHECK_MULTIPLE * wanted_bytes, FREE_CHECK_BYTES)


@dataclass
class Checking:
    """How the bytes of one checkpoint are checked, and how many were. All of its files share it."""

    enabled: bool = True
    """If False, nothing is compared, and all reads count as unchecked."""
    bytes_compared: int = 0
    """Bytes that were compared with checksums, each once, including headers and unrequested parts of blocks."""
    bytes_checked: int = 0
    """Requested bytes of elements whose checksums were compared."""
    bytes_unchecked: int = 0
    """Requested bytes of elements whose checksums were not compared, or that have none."""
    unchecked: str = EVERY_BLOCK
    """What the checksums of the format do not cover, for reports."""
    lost: list[CorruptCheckpointError] | None = None
    """Errors about missing or damaged files. None: the first error is raised."""
    opened: list[Any] = field(default_factory=list, repr=False, compare=False)
    """Versions of the files, in the order in which they were opened. The metadata's file comes
    first if it is separate."""
    _unfinished: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, compared: int = 0, checked: int = 0, unchecked: int = 0) -> None:
        """Add to the numbers of bytes. Thread-safe."""
        with self._lock:
            self.bytes_compared += compared
            self.bytes_checked += checked
            self.bytes_unchecked += unchecked

    @contextmanager
    def off(self, condition: bool = True) -> Iterator[None]:
        """Compare nothing within the block, if the condition is true."""
        was, self.enabled = self.enabled, self.enabled and not condition
        try:
            yield
        finally:
            self.enabled = was

    def leave_number_open(self) -> None:
        """Record that the checkpoint does not say how many files it has."""
        if _LAST_FILE not in self.unchecked:
            before = f"{self.unchecked}, and" if self.unchecked else "unchecked:"
            self.unchecked = f"{before} {_LAST_FILE}"

    def refuse(self, error: CorruptCheckpointError) -> None:
        """Raise an error, or add it to `lost`, so that the rest of the checkpoint can be read."""
        if self.lost is not None:
            self.lost.append(error)
            return
        try:
            raise error
        finally:
            del error

    def confirm(self) -> None:
        """Raise CorruptCheckpointError if a file was rewritten after it was opened."""
        for file in self.opened:
            file.confirm()

    def remember(self, source: Any) -> None:
        """Remember a `FileSource` with bytes that were read but not compared."""
        self._unfinished[id(source)] = source

    def finish(self, wanted_bytes: int | None = None) -> None:
        """Compare everything that was read but not compared yet.

        With `wanted_bytes`, skip files for which this would read more than
        `most_to_check(wanted_bytes)`. Raises CorruptCheckpointError.
        """
        unfinished, self._unfinished = self._unfinished, {}
        for key, source in unfinished.items():
            if wanted_bytes is None or source.owed_bytes <= most_to_check(wanted_bytes):
                source.finish_comparing()
            else:
                self._unfinished[key] = source

    def words(self, nbytes: int, total: int) -> str:
        """Return a phrase about a read of `total` bytes of elements, of which `nbytes` were not
        compared. Returns "" if all bytes were compared and the format's checksums cover everything."""
        if not self.enabled:
            return "unchecked: check=False"
        if self.unchecked == NO_CHECKSUMS or not nbytes:
            return self.unchecked
        share = 100 * nbytes / max(total, nbytes)
        text = f"{max(1, round(share))} % unchecked"
        return f"{text}, {self.unchecked}" if self.unchecked else text


class Checksums(ABC):
    """The checksums of a file's blocks, and which blocks were verified."""

    can_pass = False
    """Whether a block can be compared piece by piece: see `note`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: dict[tuple[Range, ...], int] = {}
        """Bytes of elements that were read but not compared yet, by their blocks."""

    @abstractmethod
    def pending(self, start: int, stop: int) -> list[Range]:
        """Return the blocks that overlap [start, stop) and were not verified yet, in order."""

    def pending_among(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the blocks that overlap any of the ranges and were not verified yet, each once."""
        return list(dict.fromkeys(block for start, stop in ranges for block in self.pending(start, stop)))

    def are_pending(self, blocks: Ints) -> Flags:
        """Return which of the blocks, as (n, 2) starts and stops, were not verified yet."""
        return np.array([bool(self.pending(start, stop)) for start, stop in blocks.tolist()], np.bool_)

    @abstractmethod
    def has(self, start: int, stop: int) -> bool:
        """Return True if blocks with checksums contain all of these bytes."""

    @abstractmethod
    def is_right(self, block: Range, data: Iterable[bytes | memoryview]) -> bool:
        """Return True if the bytes of a block, given in pieces, match its checksum. The block is
        then no longer pending."""

    @abstractmethod
    def wanted(self, ranges: Sequence[Range], windows: Iterable[Window]) -> tuple[Ints, Ints, int]:
        """Return the blocks that reads touch, as (n, 2) starts and stops, the number of wanted
        bytes in each, and the number of wanted bytes outside of blocks.

        Args:
            ranges: byte ranges that are read without gaps, sorted and disjoint.
            windows: what is read with gaps. They overlap neither `ranges` nor each other.
        """

    def defer(self, ranges: Iterable[Range], nbytes: int) -> None:
        """Record that `nbytes` bytes of elements within these ranges were read without a check of
        their blocks."""
        blocks = tuple(self.pending_among(ranges))
        if blocks:
            with self._lock:
                self._owed[blocks] = self._owed.get(blocks, 0) + nbytes

    def deferred(self) -> list[Range]:
        """Return the blocks that were read from but not compared yet."""
        return sorted({block for blocks in list(self._owed) for block in blocks if self.pending(*block)})

    def settle(self) -> int:
        """Return the number of deferred bytes of elements whose blocks have been verified since.
        They are no longer deferred."""
        right = [blocks for blocks in list(self._owed) if not any(self.pending(*block) for block in blocks)]
        with self._lock:
            return sum(self._owed.pop(blocks, 0) for blocks in right)

    def note(self, start: int, data: memoryview) -> Range | None:
        """Add some bytes of a block that is too large for one read. Once it is complete, return the
        block if its checksum does not match; otherwise, mark it as verified and return None."""
        return None


class BlockChecksums(Checksums):
    """XXH3-64 of every `block_bytes` bytes of a file."""

    def __init__(self, nbytes: int, block_bytes: int, load: Callable[[], bytes]) -> None:
        """`load` returns the digests, 8 bytes each. It is called when they are first needed."""
        super().__init__()
        self.nbytes, self.block_bytes, self._load = nbytes, block_bytes, load
        self._digests: npt.NDArray[np.uint64] | None = None
        self._seen = bytearray(-(-nbytes // block_bytes))
        """A byte per block: 1 if the block was verified."""

    def pending(self, start: int, stop: int) -> list[Range]:
        size, stop = self.block_bytes, min(stop, self.nbytes)
        first, last = start // size, -(-stop // size)
        if self._seen.find(0, first, last) < 0:
            return []
        return [(i * size, min((i + 1) * size, self.nbytes)) for i in range(first, last) if not self._seen[i]]

    def has(self, start: int, stop: int) -> bool:
        return stop <= self.nbytes

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """The digests of all blocks."""
        if self._digests is None:
            self._digests = np.frombuffer(self._load(), dtype="<u8")
        return self._digests

    def are_pending(self, blocks: Ints) -> Flags:
        return np.asarray(np.frombuffer(self._seen, np.uint8)[blocks[:, 0] // self.block_bytes] == 0)

    def compare(self, view: memoryview, blocks: Ints) -> list[Range]:
        """Compare blocks, as (n, 2) starts and stops, of a mapped file. Return those that do not match."""
        numbers = blocks[:, 0] // self.block_bytes
        if self._are_right(view, blocks, numbers):
            np.frombuffer(self._seen, np.uint8)[numbers] = 1
            return []
        found = [xxhash.xxh3_64_intdigest(view[start:stop]) for start, stop in blocks.tolist()]
        right = np.array(found, np.uint64) == self.digests[numbers]
        np.frombuffer(self._seen, np.uint8)[numbers[right]] = 1
        return list(map(tuple, blocks[~right].tolist()))

    def _are_right(self, view: memoryview, blocks: Ints, numbers: Ints) -> bool:
        """Return True if the compiled kernel is available and all of these blocks match. It
        releases the interpreter lock, so that threads hash in parallel."""
        loop = kernel()
        if loop is None or not len(blocks):
            return False
        data = np.frombuffer(view, np.uint8)
        region = np.array([data.ctypes.data, data.nbytes, 0], np.int64).view(loop.REGION)
        first = np.flatnonzero(np.diff(blocks[:, 0], prepend=blocks[:1, 0]) != self.block_bytes)
        entries = np.zeros((len(first), 8), np.int64)
        entries[:, 0], entries[:, 4] = _COMPARE, self.block_bytes
        entries[:, 2], entries[:, 5] = blocks[first, 0], numbers[first]
        entries[:, 3] = blocks[np.append(first[1:], len(blocks)) - 1, 1] - blocks[first, 0]
        lists = region, entries.reshape(-1).view(loop.ENTRY), np.zeros(0, loop.COPY)
        return loop.run(*lists, self.digests, np.zeros(0, np.int64), 0, _NO_LIMIT_NS)[1] == _DONE

    def any_pending(self, starts: Ints, stops: Ints) -> Flags:
        """Return, for each range [start, stop), whether it overlaps a block that was not verified yet."""
        return ~self.are_among(np.frombuffer(self._seen, np.bool_), starts, stops)

    def are_among(self, chosen: Flags, starts: Ints, stops: Ints) -> Flags:
        """Return, for each range [start, stop), whether all blocks that it overlaps are `chosen`."""
        first, last = starts // self.block_bytes, -(-np.minimum(stops, self.nbytes) // self.block_bytes)
        base = int(first.min(initial=len(chosen)))
        before = np.concatenate(([0], np.cumsum(chosen[base : int(last.max(initial=base))], dtype=np.int64)))
        return np.asarray(before[last - base] - before[first - base] == last - first)

    def within(self, ranges: Ints) -> Flags:
        """Return, for each block, whether one of the ranges, as (n, 2) starts and stops, contains
        it completely."""
        size, count = self.block_bytes, len(self._seen)
        first = -(-ranges[:, 0] // size)
        last = np.where(ranges[:, 1] >= self.nbytes, count, ranges[:, 1] // size)
        steps = np.zeros(count + 1, np.int64)
        np.add.at(steps, first, 1)
        np.add.at(steps, np.maximum(first, last), -1)
        return np.asarray(np.cumsum(steps[:-1]) > 0)

    def bounds(self, chosen: Flags) -> Ints:
        """Return the chosen blocks as (n, 2) starts and stops."""
        starts = np.flatnonzero(chosen) * self.block_bytes
        return np.stack((starts, np.minimum(starts + self.block_bytes, self.nbytes)), axis=1)

    def mark_right(self, ranges: Ints) -> int:
        """Mark all blocks within the ranges, (n, 2), as verified. Return the bytes of those that
        were pending."""
        seen = np.frombuffer(self._seen, np.bool_)
        right = self.within(ranges) & ~seen
        seen |= right
        return int(np.diff(self.bounds(right)).sum())

    def is_right(self, block: Range, data: Iterable[bytes | memoryview]) -> bool:
        first, *others = data
        if others:
            state = xxhash.xxh3_64(first)
            for piece in others:
                state.update(piece)
            digest = state.intdigest()
        else:
            digest = xxhash.xxh3_64_intdigest(first)
        number = block[0] // self.block_bytes
        if digest != int(self.digests[number]):
            return False
        self._seen[number] = 1
        return True

    def around(self, start: int, stop: int) -> Range:
        """Return the byte range of all blocks that overlap [start, stop)."""
        size = self.block_bytes
        return start // size * size, min(-(-stop // size) * size, self.nbytes)

    def inside(self, start: int, stop: int) -> Range:
        """Return the byte range of all blocks that are completely within [start, stop). It may be empty."""
        size = self.block_bytes
        first = -(-start // size) * size
        return first, max(first, stop if stop >= self.nbytes else stop // size * size)

    def wanted(self, ranges: Sequence[Range], windows: Iterable[Window]) -> tuple[Ints, Ints, int]:
        size, count = self.block_bytes, len(self._seen)
        wanted = np.zeros(count + 1, np.int64)
        if ranges:
            bounds = np.array(ranges, np.int64)
            first, last = bounds[:, 0] // size, (bounds[:, 1] - 1) // size
            np.add.at(wanted, first, -(bounds[:, 0] - first * size))
            np.add.at(wanted, last, bounds[:, 1] - (last + 1) * size)
            steps = np.zeros(count + 1, np.int64)
            np.add.at(steps, first, size)
            np.add.at(steps, last + 1, -size)
            wanted += np.cumsum(steps)
        add_touched(wanted[:count], size, windows, self.nbytes, 1)
        touched = wanted[:count] != 0
        return self.bounds(touched), wanted[:count][touched], 0


def touched_ranges(window: Window) -> list[Range]:
    """Return the byte ranges that a window touches, with small gaps filled."""
    runs = window.runs()
    near = runs if runs.count == 1 else runs.in_order().joined(_NEAR_BYTES)
    return [(start, start + size) for start, size in near]


def add_touched(counts: Ints, size: int, windows: Iterable[Window], nbytes: int, grain_bytes: int) -> None:
    """Add to `counts` how many bytes of each block are touched by reads of the windows. The file
    has `nbytes`, and blocks have `size` bytes.

    Runs whose gaps are smaller than the grain touch all bytes between them. Otherwise, each run
    touches complete grains.
    """
    alike = grouped(
        ((it.sizes, it.strides, it.itemsize, it.offset % grain_bytes), it.offset - it.offset % grain_bytes)
        for it in windows
    )
    for (sizes, strides, itemsize, lead), starts in alike.items():
        runs = Window(lead, sizes, strides, itemsize).runs()
        if not runs.count:
            continue
        reach, levels = _levels(runs, grain_bytes)
        step = max(1, _BATCH_BLOCKS // (reach // size + 1))
        for i in range(0, len(starts), step):
            start = np.array(starts[i : i + step], np.int64)[:, None]
            stop = np.minimum(start + reach, nbytes)
            first = start // size
            blocks = first + np.arange(int(((stop - 1) // size - first).max()) + 2)
            at = np.clip(blocks * size, start, stop) - start
            below = np.zeros(at.shape, np.int64)  # touched bytes before each of these positions
            for stride, count, inner, each in reversed(levels):
                items = np.minimum(at // stride, count - 1)
                below += items * each
                at = np.minimum(at - items * stride, inner)
            np.add.at(counts, np.minimum(blocks[:, :-1], len(counts) - 1), np.diff(below + at))


_BATCH_BLOCKS = 1 << 16
"""Number of blocks that are counted at a time."""


def _levels(runs: ByteRuns, grain_bytes: int) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return the bytes from the first grain to the end of the last, and for each dim with gaps,
    inner dims first: stride, count, and the bytes that each item spans and touches."""
    reach, lead, touched = runs.run_bytes, runs.offset, 0
    levels: list[tuple[int, int, int, int]] = []
    for stride, count in sorted(zip(runs.strides, runs.counts)):
        if levels or stride - reach >= grain_bytes:
            if not levels:
                reach = touched = -(-(lead + reach) // grain_bytes) * grain_bytes
            levels.append((stride, count, reach, touched))
            touched *= count
        reach += (count - 1) * stride
    return (reach if levels else -(-(lead + reach) // grain_bytes) * grain_bytes), levels
