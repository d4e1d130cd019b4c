"""A list of reads, comparisons, copies, and waits, and its execution by a compiled loop or by numpy.

All of it is planned and proved. An entry names memory by its region, and a place within it:

    READ     bytes of a file into memory
    COMPARE  blocks of memory with their digests
    TAKE     the elements that begin in a stretch of a file, from memory into their places
    WAIT     until counters that other processes raise are high enough
    POST     set a counter, and wake who waits for it
    CALL     something that only Python does

The compiled loop returns every `TURN_S` seconds, so that a failure elsewhere ends it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from operator import mul
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from planners.geometry.arrays import Array, Ints, ints
from planners.geometry.box import Shape
from planners.geometry.byte_ranges import Window
from reshard.errors import ReshardError
from reshard.live.compiled_kernel import Kernel
from reshard.live.dtypes import item_dtype
from reshard.stored.tensor import copy_view

TURN_S = 0.05
MAX_DIMS = 8
"""Most dims of a copy, not counting dims of size 1."""
REGION = np.dtype([("at", "<i8"), ("nbytes", "<i8"), ("writable", "<i8")])
ENTRY = np.dtype([("kind", "<i8"), ("of", "<i8", 7)])
COPY = np.dtype(
    [
        *[(name, "<i8") for name in ("position", "region", "byte", "itemsize", "ndim")],
        *[(name, "<i8", MAX_DIMS) for name in ("sizes", "from", "to")],
    ]
)


class Kind(IntEnum):
    """What an entry does, and the meaning of its numbers."""

    READ = 0
    """File descriptor, position in it, nbytes, region, byte."""
    COMPARE = 1
    """Region, byte, nbytes, bytes of a block, first digest."""
    TAKE = 2
    """Region, byte, nbytes, position in the file of that byte, first copy, one past the last copy, tally."""
    WAIT = 3
    """Region, byte of the first counter, at least this value, how many counters, bytes from one to
    the next."""
    POST = 4
    """Region, byte of the counter, value."""
    CALL = 5
    """None: see `WorkList.call`."""


class Ending(IntEnum):
    """Why a run of entries ended."""

    DONE = 0
    LATER = 1
    """The turn is over. Comes with the counter that is still awaited, or -1."""
    CALLS = 2
    OUTSIDE = 3
    """An entry leaves the memory that it names, or makes no sense: nothing was done that would. Of
    a TAKE, the copies before the one that is wrong are in place."""
    ENDED = 4
    """A file ended early."""
    FAILED = 5
    """The system refused to read. Comes with its errno."""
    CHANGED = 6
    """A block has another digest. Comes with the block's number within the entry."""


class Memory:
    """Numbered regions of memory, which stay as long as this object."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._kept: list[Any] = []

    def add(self, array: Array) -> int:
        """Add the memory from the first byte of an array's elements to the last. Strides are not negative."""
        last = sum((n - 1) * step for n, step in zip(array.shape, array.strides))
        self._kept.append(array)
        self._rows += (_address(array), last + array.itemsize if array.size else 0, array.flags.writeable)
        return len(self._kept) - 1

    def table(self) -> Array:
        """The table in the form that lists use."""
        return ints(self._rows).view(REGION)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def copy_row(window: Window, region: int, out: Array) -> list[int] | None:
    """A row of the table of copies: the elements of a window of a file, which fill `out`, a region.
    None if it has too many dims."""
    dims = [(n, a, b) for n, a, b in zip(window.sizes, window.strides, out.strides) if n != 1]
    if len(dims) > MAX_DIMS:
        return None
    row = [window.offset, region, 0, window.itemsize, len(dims)]
    for column in zip(*dims) if dims else ((), (), ()):
        row += (*column, *(0,) * (MAX_DIMS - len(column)))
    return row


@dataclass
class WorkList:
    """Entries, and the memory and files that they name. `tallies` count the bytes that entries
    copied. `call` has Python functions for entries: for a CALL, its only work, and for others, the
    same work in another way, which is tried if they fail, to report why.
    """

    memory: Memory
    entries: Array
    copies: Array
    digests: npt.NDArray[np.uint64]
    tallies: Ints
    call: Callable[[int], Callable[[], None] | None] = lambda entry: None

    @property
    def tables(self) -> tuple[Array, Array, Array, Array, Array]:
        """The tables in the form that both ways of running use."""
        return self.memory.table(), self.entries, self.copies, self.digests, self.tallies

    def run(self, look: Callable[[tuple[int, int] | None], None], loop: Kernel | None) -> None:
        """Run all entries.

        Args:
            look: called several times a second, with (region, byte) of the counter that is waited
                for just now, or None; may raise to end it.
            loop: the compiled one; None for numpy.

        Raises ReshardError for an entry that is wrong, and what `look` and calls raise.
        """
        run = NumpyRun(*self.tables).run if loop is None else partial(loop.run, *self.tables)
        at = 0
        while at < len(self.entries):
            at, ending, detail = run(at, int(TURN_S * 1e9))
            if ending == Ending.LATER:
                region, byte, _, _, step = self.entries[at]["of"][:5].tolist()
                look(None if detail < 0 else (region, byte + detail * step))
            elif ending != Ending.DONE:
                call = self.call(at) if ending != Ending.OUTSIDE else None
                if call is not None:
                    call()
                if call is None or ending == Ending.CHANGED:
                    raise ReshardError(_failure(self.entries[at], Ending(ending), detail))
                at += 1


def _failure(entry: Any, ending: Ending, detail: int) -> str:
    kind, of = Kind(int(entry["kind"])), entry["of"].tolist()
    if ending == Ending.FAILED:
        return f"{kind.name} {of}: {os.strerror(detail)}"
    return f"{kind.name} {of} ended with {ending.name} {detail}: please report this as a bug of reshard"


# The same in numpy.

_SLEEP_S = 2e-4
_LIBC = ctypes.CDLL(None)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
"""The number of Linux's system call, which libc has no name for."""
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_MAX_POSITION = (1 << 63) - 1


class _Landing(NamedTuple):
    """A row of the table of copies, and the array that its elements go into."""

    position: int
    region: int
    itemsize: int
    sizes: Shape
    strides: Shape
    out: Array


class NumpyRun:
    """Does what the compiled loop does. Conversions of its numbers are kept for further calls."""

    def __init__(self, regions: Array, entries: Array, copies: Array, digests: Array, tallies: Array) -> None:
        self.regions, self.tallies = regions.tolist(), tallies
        self.kinds, self.of = entries["kind"].tolist(), entries["of"].tolist()
        self.digests = digests.tolist()
        self.rows = copies.view(np.int64).reshape(-1, COPY.itemsize // 8)
        self.memory = [memoryview((ctypes.c_char * n).from_address(at)).cast("B") for at, n, _ in self.regions]
        self.counters: dict[tuple[int, ...], memoryview] = {}
        self.targets: dict[int, _Landing] = {}
        self.until = 0.0

    def run(self, first: int, limit_ns: int) -> tuple[int, int, int]:
        """Run entries from `first` on, for at most about `limit_ns`. Return where and why it ended,
        and the details."""
        self.until = time.monotonic() + limit_ns / 1e9
        does = {
            Kind.READ: self.read,
            Kind.COMPARE: self.compare,
            Kind.TAKE: self.take,
            Kind.WAIT: self.wait,
            Kind.POST: self.post,
        }
        if first < 0:
            return first, Ending.OUTSIDE, 0
        for i in range(first, len(self.kinds)):
            kind = self.kinds[i]
            if kind == Kind.CALL:
                return i, Ending.CALLS, 0
            if kind not in does:
                return i, Ending.OUTSIDE, 0
            try:
                ending, detail = does[kind](self.of[i])
            except IndexError:
                return i, Ending.OUTSIDE, 0
            if ending != Ending.DONE:
                return i, ending, detail
            if time.monotonic() >= self.until and i + 1 < len(self.kinds):
                return i + 1, Ending.LATER, -1
        return len(self.kinds), Ending.DONE, 0

    def bytes_of(self, region: int, byte: int, nbytes: int, *, writes: bool = False) -> memoryview:
        """Raises IndexError unless a region has these bytes."""
        if not 0 <= region < len(self.regions):
            raise IndexError(region)
        _, size, writable = self.regions[region]
        if not 0 <= byte <= byte + nbytes <= size or nbytes < 0 or (writes and not writable):
            raise IndexError(byte)
        return self.memory[region][byte : byte + nbytes]

    def read(self, of: Sequence[int]) -> tuple[Ending, int]:
        view, done = self.bytes_of(of[3], of[4], of[2], writes=True), 0
        if not 0 <= of[1] <= _MAX_POSITION - of[2]:
            raise IndexError(of[1])
        while done < of[2]:
            try:
                got = os.preadv(of[0], [view[done:]], of[1] + done)
            except OSError as error:
                return Ending.FAILED, error.errno or 0
            if not got:
                return Ending.ENDED, of[1] + done
            done += got
        return Ending.DONE, 0

    def compare(self, of: Sequence[int]) -> tuple[Ending, int]:
        view, block = self.bytes_of(*of[:3]), of[3]
        if block <= 0 or of[4] < 0 or of[4] + -(-len(view) // block) > len(self.digests):
            raise IndexError(of[4])
        for i, start in enumerate(range(0, len(view), block)):
            if xxhash.xxh3_64_intdigest(view[start : start + block]) != self.digests[of[4] + i]:
                return Ending.CHANGED, i
        return Ending.DONE, 0

    def take(self, of: Sequence[int]) -> tuple[Ending, int]:
        region, byte, nbytes, position, first, last, tally = of
        self.bytes_of(region, byte, nbytes)
        if position < 0 or not 0 <= first <= last <= len(self.rows) or not 0 <= tally < len(self.tallies):
            raise IndexError(first)
        copied = 0
        for number in range(first, last):
            target = self.targets.get(number)
            if target is None:
                target = self.targets[number] = self._target(self.rows[number].tolist())
            if target.region == region:
                raise IndexError(region)
            # an element that begins at the last byte ends behind it
            data = self.bytes_of(region, byte, nbytes + target.itemsize - 1)
            copied += _take(target, data, target.position - position, nbytes)
        self.tallies[tally] += copied
        return Ending.DONE, 0

    def _target(self, row: Sequence[int]) -> _Landing:
        """Raises IndexError if the row leaves its region, or makes no sense."""
        position, region, at, itemsize, ndim, *rest = row
        if not 0 <= ndim <= MAX_DIMS or itemsize < 1 or position < 0:
            raise IndexError(ndim)
        sizes, strides, steps = (tuple(rest[i * MAX_DIMS :][:ndim]) for i in range(3))
        if min(sizes, default=1) < 1 or min(strides, default=0) < 0 or min(steps, default=0) < 0:
            raise IndexError(region)
        span = sum((n - 1) * step for n, step in zip(sizes, steps)) + itemsize
        if position + sum((n - 1) * step for n, step in zip(sizes, strides)) > _MAX_POSITION:
            raise IndexError(position)
        memory = self.bytes_of(region, at, span, writes=True)
        out = np.ndarray(sizes, item_dtype(itemsize), memory, 0, steps)
        return _Landing(position, region, itemsize, sizes, strides, out)

    def wait(self, of: Sequence[int]) -> tuple[Ending, int]:
        region, byte, value, count, step = of[:5]
        if count < 1 or step < 0 or byte % 4 or step % 4:
            raise IndexError(byte)
        value &= 0xFFFFFFFF
        counters = self._counters(region, byte, (count - 1) * step + 4)
        for i in range(0, count * step // 4 or 1, step // 4 or 1):
            while True:
                with _BARRIER:
                    seen = counters[i]
                if seen >= value:
                    break
                left_s = self.until - time.monotonic()
                if left_s <= 0:
                    return Ending.LATER, i * 4 // (step or 4)
                _sleep_until_changed(self.regions[region][0] + byte + 4 * i, seen, left_s)
        return Ending.DONE, 0

    def post(self, of: Sequence[int]) -> tuple[Ending, int]:
        if of[1] % 4:
            raise IndexError(of[1])
        counter = self._counters(of[0], of[1], 4, writes=True)
        with _BARRIER:
            counter[0] = of[2] & 0xFFFFFFFF
        if _FUTEX is not None:
            at = ctypes.c_void_p(self.regions[of[0]][0] + of[1])
            _LIBC.syscall(_FUTEX, at, _WAKE, _ALL, None, None, 0)
        return Ending.DONE, 0

    def _counters(self, *where: int, writes: bool = False) -> memoryview:
        if (*where, writes) not in self.counters:
            self.counters[*where, writes] = self.bytes_of(*where, writes=writes).cast("I")
        return self.counters[*where, writes]


def _take(target: _Landing, data: memoryview, start: int, nbytes: int) -> int:
    """Copy the elements of a target, whose first one is at `start` of `data`, that begin in its first `nbytes`."""
    copied = 0
    for index, sizes, offset in _beginning(target.sizes, target.strides, target.itemsize, start, nbytes):
        part = Window(start + offset, sizes, target.strides, target.itemsize)
        copy_view(data, part, False, target.out[index])
        copied += part.nbytes
    return copied


@lru_cache(maxsize=4096)  # tensors of the same shape and position in their stretches are split in the same way
def _beginning(sizes: Shape, strides: Shape, itemsize: int, start: int, nbytes: int) -> list[tuple[Any, Shape, int]]:
    """The elements of a window from byte 0 on that begin in `nbytes` bytes from `-start`: their
    index, their sizes, and where the first of them is in the window."""
    boxes = Window(0, sizes, strides, itemsize).within(-start, nbytes - start)
    # the dots make it a view, also of a 0-d array
    return [((*box.slices, ...), box.sizes, sum(map(mul, box.offsets, strides))) for box in boxes]


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _sleep_until_changed(address: int, seen: int, most_s: float) -> None:
    """Sleep until a waker changes a counter from the value that was seen, or less."""
    if _FUTEX is None:
        time.sleep(min(_SLEEP_S, most_s))
        return
    most = _Timespec(int(most_s), int(most_s % 1 * 1e9))
    _LIBC.syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), ctypes.byref(most), None, 0)


_BARRIER = Lock()
"""Taking it puts what was written before in order, as other processes see it."""
