"""Sources of bytes: a file of a storage, a compressed item in a file, or memory."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import numpy as np

from planners.geometry.arrays import Ints
from planners.geometry.box import Range
from planners.geometry.byte_ranges import Window
from reshard.errors import RESTORE, CheckpointNotFoundError, CorruptCheckpointError
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import BlockChecksums, Checking, Checksums, changed_block, most_to_check, touched_ranges

OnBytes = Callable[[int], None]
"""Called with the number of bytes processed since the last call.

It may raise an error to end the work, or wait to slow it down."""

DIRECT_BYTES = 1 << 20
"""Runs of at least this many bytes are read by calls to the storage, even if there is a zero-copy
view: one system call is faster than a page fault for every few pages of a new mapping."""


_FINISH_BYTES = 16 << 20
_CONFIRM_S = 0.01
_MADV_POPULATE_READ = 22
"""From Linux 5.14: fill the page tables at once, not page by page on access."""


class Source(ABC):
    """A run of bytes, addressed by the offsets of windows."""

    label: str
    """Its name, for messages."""
    max_gap_bytes: int = 0
    """Reading up to this many bytes that were not requested is cheaper than one more request."""
    direct_bytes: int = DIRECT_BYTES
    """Runs of at least this many bytes are read by a call, shorter ones are copied from the view."""
    _file: mmap.mmap | None = None
    """The mapped file behind the view. Access to pages that were truncated since would kill the process."""
    _opened: _FileVersion | None = None
    """The file's version when it was opened. None if the source is not a file."""
    _key: Hashable = None
    """Equal for sources of a class that have the same bytes. None: equal only to itself."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes."""

    @property
    def overflowed(self) -> int:
        """Number of elements that a cast put out of range so far. Counts some more than once, and
        some in gaps that were not requested."""
        return 0

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return all bytes as a read-only, zero-copy view, or None if there is none."""

    @abstractmethod
    def _fill(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start`. The range was checked before."""

    def compare(self, window: Window) -> None:  # noqa: B027  # noqa: B027  # most sources have no checksums
        """Compare all bytes that a window touches with their checksums, if there are any: see
        `FileSource`.

        Decoded and computed bytes come from bytes that were compared.
        """

    def check(self, start: int, stop: int) -> None:
        """Raise CorruptCheckpointError unless bytes [start, stop) exist."""
        nbytes = self.nbytes
        if self._file is not None and self._file.size() < stop <= nbytes:
            raise CorruptCheckpointError(
                f"{self.label}: it had {nbytes} bytes when it was opened, and has {self._file.size()} now: "
                "another process writes it in place, or it was truncated. Open the checkpoint again once it is complete"
            )
        if not 0 <= start <= stop <= nbytes:
            raise CorruptCheckpointError(
                f"{self.label}: expected bytes [{start}, {stop}), but it has {nbytes} bytes; it was truncated, or "
                "its metadata is wrong"
            )
        if self._opened is not None and time.monotonic() > self._opened.confirmed_until_s:
            self._opened.confirm()

    def refuse(self, error: CorruptCheckpointError) -> None:
        """See `Checking.refuse`."""
        try:
            raise error
        finally:
            del error  # otherwise, a cycle of this frame and the error's traceback would keep files open

    def read_into(self, start: int, buffer: memoryview, *, passing: bool = False) -> None:
        """Fill the writable `buffer` with the bytes from `start`, and compare them with their
        checksums, if there are any.

        `passing`: the neighboring bytes are also read, so that a large block can be compared piece
        by piece.

        Raises CorruptCheckpointError if there are too few bytes or they were changed.
        """
        self.fill(start, buffer)

    def read(self, start: int, length: int, *, elements: bool = False) -> bytes | memoryview:
        """Return `length` bytes from `start`, if possible as a view, compared with their checksums,
        if there are any.

        `elements`: the bytes are elements of tensors, and count as such.

        Raises CorruptCheckpointError if there are too few bytes or they were changed.
        """
        return self.raw(start, length)

    def fill(self, start: int, buffer: memoryview) -> None:
        """Like `read_into`, without checksums, if the caller has already compared the bytes."""
        self.check(start, start + buffer.nbytes)
        if buffer.nbytes:
            self._fill(start, buffer)

    def raw(self, start: int, length: int) -> bytes | memoryview:
        """Like `read`, without checksums, if the caller compares the bytes."""
        self.check(start, start + length)
        view = self.view()
        if view is not None:
            return view[start : start + length]
        buffer = memoryview(bytearray(length))
        if length:
            self._fill(start, buffer)
        return buffer.toreadonly()

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Source) or self._key is None:
            return self is other
        return type(self) is type(other) and self._key == other._key

    def __hash__(self) -> int:
        return id(self) if self._key is None else hash(self._key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r})"


@dataclass(eq=False)
class _FileVersion:
    """The version of a file when it was opened. It does not refer to its `Source`: a reference
    cycle would keep the file open."""

    ask: Callable[[], object]
    label: str
    was: object
    first: _FileVersion | None
    """The version of the file that was opened first, which may contain the metadata."""
    confirmed_until_s: float = 0.0
    """Until this time, `Source.check` skips `confirm`, which would be slow for many small tensors."""

    def confirm(self) -> None:
        """Raise CorruptCheckpointError if this file or the first was rewritten after it was opened."""
        found = self.ask()
        self.was = found if self.was is None else self.was  # some stores report it only in the first response
        if found not in (None, self.was):
            raise CorruptCheckpointError(
                f"{self.label}: it was written again after it was opened, so what is read may come from two saves. "
                "Open the checkpoint again once it is complete"
            )
        now = time.monotonic()
        self.confirmed_until_s = now + _CONFIRM_S
        if self.first is not None and now > self.first.confirmed_until_s:
            self.first.confirm()


class FileSource(Source):
    """An object of a storage. Mapped into memory on first use if the storage supports it.

    `read` and `read_into` return bytes that match their saved checksums, or raise an error; so does
    the view after `compare`. Bytes without checksums, or whose check would read more than
    `most_to_check`, count as unchecked in `checking`.

    `listed` is the size, if known. It saves a request if the storage has no view.
    """

    def __init__(
        self, storage: Storage, name: str, listed: int | None = None, checking: Checking | None = None
    ) -> None:
        self.storage = storage
        self.name = name
        self.checking = Checking() if checking is None else checking
        self.checksums: Checksums | None = None
        """Checksums of its blocks. The format's reader sets them, if the format has checksums."""
        self.label = f"{storage.url.rstrip('/')}/{name}"
        self._key = id(storage), name
        self.max_gap_bytes = storage.max_gap_bytes
        self._view: memoryview | None = None
        self._nbytes: int | None = None
        self._listed = listed
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        if self._nbytes is None:
            self.view()
            assert self._nbytes is not None
        return self._nbytes

    def view(self) -> memoryview | None:
        if self._nbytes is None:
            with self._lock:
                if self._nbytes is None:
                    self._look()
        return self._view

    def _look(self) -> None:
        """Map the file, and determine its length and version."""
        ask = partial(self.storage.version, self.name)
        try:
            self._opened = _FileVersion(ask, self.label, ask(), next(iter(self.checking.opened), None))
            self._view = self.storage.mapped(self.name)
            if self._view is not None:
                self._file = self._view.obj if isinstance(self._view.obj, mmap.mmap) else None
                self._nbytes = len(self._view)
            else:
                self._nbytes = self.storage.size(self.name) if self._listed is None else self._listed
        except CheckpointNotFoundError as error:
            raise _missing(error) from error
        self.checking.opened.append(self._opened)

    def refuse(self, error: CorruptCheckpointError) -> None:
        error.places = error.places or ((self.name, 0, self.nbytes),)
        try:
            self.checking.refuse(error)
        finally:
            del error

    def compare(self, window: Window) -> None:
        """Compare all blocks that a window touches with their checksums.

        Raises CorruptCheckpointError, which names the first changed block and the number of the
        others.
        """
        ranges, wanted = touched_ranges(window), window.nbytes
        sums = self.checksums
        if sums is None or not self.checking.enabled:
            self.checking.add(unchecked=wanted)
            return
        blocks = sums.pending_among(ranges)
        if sum(stop - start for start, stop in blocks) > most_to_check(wanted):
            self._defer(sums, ranges, wanted)
            return
        if blocks:
            self.compare_blocks(blocks)
        has_all = all(sums.has(start, stop) for start, stop in ranges)
        self.checking.add(**{"checked" if has_all else "unchecked": wanted})

    def compare_blocks(self, blocks: Sequence[Range] | Ints) -> None:
        """Read blocks and compare them with their checksums. Raises CorruptCheckpointError if one differs."""
        rows, view = np.asarray(blocks, np.int64).reshape(-1, 2), self.view()
        if view is None or not isinstance(self.checksums, BlockChecksums):
            self._judge([((start, stop), [self.raw(start, stop - start)]) for start, stop in rows.tolist()])
            return
        self.check(0, int(rows.max(initial=0)))
        bad = self.checksums.compare(view, rows)
        self.checking.add(compared=int((rows[:, 1] - rows[:, 0]).sum()))
        if bad:
            self.refuse_changed(bad)

    def _judge(self, blocks: Iterable[tuple[Range, Iterable[bytes | memoryview]]]) -> None:
        """Compare blocks, whose bytes are given in pieces. Raises CorruptCheckpointError if one differs."""
        assert self.checksums is not None
        bad, compared = [], 0
        for block, pieces in blocks:
            compared += block[1] - block[0]
            if not self.checksums.is_right(block, pieces):
                bad.append(block)
        self.checking.add(compared=compared)
        if bad:
            self.refuse_changed(bad)

    def refuse_changed(self, bad: Sequence[Range]) -> NoReturn:
        """Raise CorruptCheckpointError for blocks that do not match their checksums."""
        more = f", and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
        error = CorruptCheckpointError(
            f"{changed_block(self.label, bad[0])}{more}: restore the file, or load another checkpoint "
            "(reshard.load(..., check=False) reads it as it is)"
        )
        error.places = tuple((self.name, start, stop) for start, stop in bad)
        try:
            raise error
        finally:
            del error

    def compare_data(self, start: int, data: memoryview) -> int:
        """Compare the blocks that are completely within `data`, the bytes from `start`. Returns the
        number of their bytes.

        Raises CorruptCheckpointError if one differs.
        """
        if self.checksums is None or not self.checking.enabled:
            return 0
        stop = start + len(data)
        blocks = [(a, b) for a, b in self.checksums.pending(start, stop) if start <= a and b <= stop]
        self._judge((block, [data[block[0] - start : block[1] - start]]) for block in blocks)
        return sum(b - a for a, b in blocks)

    def read_into(self, start: int, buffer: memoryview, *, passing: bool = False) -> None:
        stop = start + buffer.nbytes
        self.check(start, stop)
        blocks = self._blocks_to_compare(start, stop)
        if passing and blocks and self.checksums is not None and self.checksums.can_pass:
            blocks = None if blocks[0][0] < start or blocks[-1][1] > stop else blocks
        if blocks and self.view() is None and (blocks[0][0] < start or blocks[-1][1] > stop):
            buffer[:] = self.read(start, buffer.nbytes, elements=True)  # one request for the complete blocks
            return
        if buffer.nbytes:
            self._fill(start, buffer)
        self._compare_read(start, buffer, blocks, buffer.nbytes)

    def read(self, start: int, length: int, *, elements: bool = False) -> bytes | memoryview:
        stop, wanted = start + length, length if elements else 0
        self.check(start, stop)
        blocks = self._blocks_to_compare(start, stop)
        if self.view() is not None or not blocks:
            data = self.raw(start, length)
            self._compare_read(start, memoryview(data), blocks, wanted)
            return data
        first, last = min(start, blocks[0][0]), max(stop, blocks[-1][1])
        whole = memoryview(self.raw(first, last - first))
        self._compare_read(first, whole, blocks, wanted)
        return whole[start - first : stop - first]

    def _blocks_to_compare(self, start: int, stop: int) -> list[Range] | None:
        """Return the blocks to compare for a read of bytes [start, stop), or None if the read stays
        unchecked."""
        if self.checksums is None or not self.checking.enabled:
            return None
        blocks = self.checksums.pending(start, stop)
        return blocks if sum(b - a for a, b in blocks) <= most_to_check(stop - start) else None

    def _compare_read(self, start: int, data: memoryview, blocks: list[Range] | None, wanted: int) -> None:
        """Compare blocks that overlap `data`, the bytes from `start`. The rest of each block is
        read.

        `wanted`: number of requested bytes of elements.
        """
        stop, sums = start + len(data), self.checksums
        if sums is None or not self.checking.enabled:
            self.checking.add(unchecked=wanted)
            return
        if blocks is None:
            if wanted:
                self._defer(sums, [(start, stop)], wanted)
                if (wrong := sums.note(start, data)) is not None:
                    self.refuse_changed([wrong])
                self._settle(sums)
            return
        rows = []
        for block in blocks:
            pieces: list[bytes | memoryview] = [data[max(block[0] - start, 0) : block[1] - start]]
            if block[0] < start:
                pieces.insert(0, self.raw(block[0], start - block[0]))
            if block[1] > stop:
                pieces.append(self.raw(stop, block[1] - stop))
            rows.append((block, pieces))
        self._judge(rows)
        self.checking.add(**{"checked" if sums.has(start, stop) else "unchecked": wanted})

    def _defer(self, sums: Checksums, ranges: Iterable[Range], nbytes: int) -> None:
        """Count bytes of elements as unchecked for now: `Checking.finish` may check them later."""
        self.checking.add(unchecked=nbytes)
        sums.defer(ranges, nbytes)
        self.checking.remember(self)

    def _settle(self, sums: Checksums) -> None:
        settled = sums.settle()
        self.checking.add(checked=settled, unchecked=-settled)

    @property
    def owed_bytes(self) -> int:
        """Number of bytes that `finish_comparing` would read."""
        return sum(stop - start for start, stop in self.checksums.deferred()) if self.checksums is not None else 0

    def finish_comparing(self) -> None:
        """Compare the blocks that were read from but not compared yet. Raises
        CorruptCheckpointError if one differs."""
        sums = self.checksums
        if sums is None or not self.checking.enabled:
            return

        def pieces(start: int, stop: int) -> Iterator[bytes | memoryview]:
            for at in range(start, stop, _FINISH_BYTES):
                yield self.raw(at, min(_FINISH_BYTES, stop - at))
                self.release()

        self._judge((block, pieces(*block)) for block in sums.deferred())
        self._settle(sums)

    def prefer_view(self) -> None:
        """From now on, copy from the view if there is one, because its pages are mapped."""
        self.direct_bytes = sys.maxsize

    def _fill(self, start: int, buffer: memoryview) -> None:
        view = self.view()
        if view is not None and buffer.nbytes < self.direct_bytes:
            buffer[:] = view[start : start + buffer.nbytes]
        else:
            self.read_directly(start, buffer)

    def read_directly(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` by calls to the storage even if there is a view, so that its pages stay unmapped."""
        self.check(start, start + buffer.nbytes)
        if buffer.nbytes:
            try:
                self.storage.read_into(self.name, start, buffer)
            except CheckpointNotFoundError as error:
                raise _missing(error) from error
            # a view is of a file, whose version may cost a request to a file server
            if self._opened is not None and (self._view is None or time.monotonic() > self._opened.confirmed_until_s):
                self._opened.confirm()

    def release(self) -> None:
        """Unmap the pages that were read. Until then, they count as this process's memory."""
        self.unmap(0, self.nbytes)  # later reads come from the page cache

    def touch_s(self, start: int, length: int) -> float | None:
        """Measure the CPU seconds that touching each page of these bytes takes, as in a copy from
        the view. Unmaps the pages again. Returns None if there is no view or a page cannot be read."""
        self.check(start, start + length)
        view = self.view()
        if view is None or self._file is None:
            return None
        try:  # an unreadable page raises here, but would kill the process if it were touched
            self._advise(_MADV_POPULATE_READ, start, length)
            self._advise(mmap.MADV_DONTNEED, start, length)
            began = time.thread_time()
            view[start : start + length : mmap.PAGESIZE].tobytes()
            self._advise(mmap.MADV_DONTNEED, start, length)
        except OSError:
            return None
        return time.thread_time() - began

    def unmap(self, start: int, length: int) -> None:
        """Unmap the pages that are completely within these bytes."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError):  # then the pages stay until the system reclaims them
            self._advise(mmap.MADV_DONTNEED, first, start + length - first)

    def _advise(self, what: int, start: int, length: int) -> None:
        if self._file is not None and length > 0:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._file.madvise(what, first, start + length - first)


def _missing(error: CheckpointNotFoundError) -> CorruptCheckpointError:
    """Return the error for a file that the checkpoint needs but that does not exist."""
    return CorruptCheckpointError(f"{error}. The checkpoint needs it: {RESTORE}")


@dataclass(eq=False)
class Files:
    """The files of one checkpoint: one `FileSource` per name, so that each file is mapped once, and
    all share one `Checking`."""

    storage: Storage
    listed: Listing = field(default_factory=dict)
    """Known sizes by name, relative to `storage`."""
    checking: Checking = field(default_factory=Checking)
    _sources: dict[str, FileSource] = field(default_factory=dict)

    def __getitem__(self, name: str) -> FileSource:
        source = self._sources.get(name)
        if source is None:
            made = FileSource(self.storage, name, self.listed.get(name), self.checking)
            source = self._sources.setdefault(name, made)
        return source

    def some(self, names: Listing) -> Files:
        """Return the same files, restricted to those listed in `names`."""
        return replace(self, listed=names)


class BytesSource(Source):
    """Bytes in memory, such as constants, padding, and decoded data."""

    def __init__(self, data: bytes | memoryview, label: str = "memory") -> None:
        self.data = data
        self.label = label

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def view(self) -> memoryview:
        return memoryview(self.data)

    def _fill(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.data[start : start + buffer.nbytes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytesSource) and self.data == other.data

    def __hash__(self) -> int:
        return hash((BytesSource, len(self.data), bytes(self.data[:64])))


class DecodedSource(Source):
    """Bytes that exist only after decoding, such as a compressed item of a file or a chunk of an
    array.

    An item can only be decoded completely, and several threads read pieces of it. So the last
    decoded item is kept, and during a load as many items as fit into its memory.
    """

    direct_bytes = sys.maxsize

    class Kept:
        """The decoded items of a checkpoint that are kept, which all of its sources share."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._bytes = self._most_bytes = 0
            self._items: dict[DecodedSource, Future[memoryview]] = {}

        def allow(self, nbytes: int) -> None:
            """From now on, keep up to this many bytes, and always the last item."""
            with self._lock:
                self._most_bytes = nbytes
                self._shrink()

        def get(self, source: DecodedSource) -> memoryview:
            """Return the decoded item, or decode it now. Other callers wait for the result."""
            with self._lock:
                found = self._items.pop(source, None)
                item = self._items[source] = found or Future()  # the most recent is last
            if found is None:
                try:
                    view = memoryview(source.decode())
                except BaseException as error:
                    with self._lock:
                        del self._items[source]
                    item.set_exception(error)
                else:
                    with self._lock:
                        item.set_result(view)
                        self._bytes += view.nbytes
                        self._shrink()
            try:
                return item.result()
            finally:
                del item, found

        def _shrink(self) -> None:
            dropped: list[DecodedSource] = []
            for source, item in self._items.items():
                if self._bytes <= self._most_bytes:
                    break
                if item.done() and len(dropped) < len(self._items) - 1:
                    dropped.append(source)
                    self._bytes -= item.result().nbytes
            for source in dropped:
                del self._items[source]

    def __init__(self, label: str, decode: Callable[[], bytes | memoryview], kept: Kept, key: Hashable) -> None:
        """`key`: equal for items that are decoded from the same bytes in the same way."""
        self.label = label
        self.kept = kept
        self.decode = decode
        self._key = key

    def view(self) -> memoryview:
        return self.kept.get(self)

    @property
    def nbytes(self) -> int:
        return self.view().nbytes

    def _fill(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.view()[start : start + buffer.nbytes]
