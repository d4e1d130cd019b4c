"""Where the elements of a box are in a file: windows, runs of bytes, and ranges of bytes.

A stored tensor is a set of pairs (box of the tensor, window of a file). A window has an origin, and
a stride in bytes for each dim. So a sub-box, a transposed box, a slice of a stack, and a flat piece
are windows, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, le, mul

from planners.errors import PlanError
from planners.geometry.box import Box, Range, Shape, rearranged


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of `itemsize` bytes: index (i, j, ...) is at `offset + i * strides[0] + j * strides[1] + ...`."""

    offset: int
    """Byte position of the first element."""
    sizes: Shape
    """Number of elements in each dim."""
    strides: Shape
    """Bytes from one index to the next, in each dim; 0 repeats one element."""
    itemsize: int
    """Bytes per element."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.strides):
            raise PlanError(f"a window needs one stride per dim, got sizes {self.sizes} and strides {self.strides}")
        if min(self.offset, self.itemsize - 1, *self.sizes, *self.strides) < 0:
            raise PlanError(f"offset, sizes and strides of a window must be >= 0 and the item size >= 1, got {self}")

    @classmethod
    def row_major(cls, offset: int, sizes: Sequence[int], itemsize: int) -> Window:
        """Return the window of a contiguous array whose first byte is at `offset`."""
        shape = tuple(sizes)
        return cls(offset, shape, _row_major_strides(shape, itemsize), itemsize)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def stop(self) -> int:
        """One past the last byte of any element; `offset` if there is none."""
        if 0 in self.sizes:
            return self.offset
        reach: int = sum(map(mul, self.sizes, self.strides)) - sum(self.strides)
        return self.offset + reach + self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        return self.runs().count == 1

    def crop(self, box: Box) -> Window:
        """Return the window of `box`, which is in this window's own coordinates. Raises PlanError if it is outside."""
        offsets, sizes = box
        empty = 0 in sizes
        if len(sizes) != len(self.sizes) or not (empty or all(map(le, map(add, offsets, sizes), self.sizes))):
            raise PlanError(f"{box} is outside a window of sizes {self.sizes}")
        start = self.offset if empty else self.offset + sum(map(mul, offsets, self.strides))
        return Window(start, sizes, self.strides, self.itemsize)

    def permute(self, dims: Sequence[int]) -> Window:
        """Return the same elements with dim `dims[i]` as the new dim i. Raises PlanError if `dims` is not a
        permutation."""
        if sorted(dims) != list(range(len(self.sizes))):
            raise PlanError(f"{tuple(dims)} is not a permutation of the {len(self.sizes)} dims of a window")
        return Window(
            self.offset, tuple(self.sizes[d] for d in dims), tuple(self.strides[d] for d in dims), self.itemsize
        )

    def rearrange(self, dims: Sequence[int | None]) -> Window:
        """Like `permute`, but None makes a new dim of size 1, and dims of size 1 may be omitted: the `dims` of a
        `ReadItem`. `window.crop(item.source).rearrange(item.dims)` has the dims of `item.target`.

        Raises PlanError if a dim is named twice, or if one of another size is omitted.
        """
        sizes = rearranged(Box.full(self.sizes), tuple(dims)).sizes
        strides = tuple(self.itemsize if d is None else self.strides[d] for d in dims)
        return Window(self.offset, sizes, strides, self.itemsize)

    def within(self, start: int, stop: int) -> list[Box]:
        """Return the elements that begin in bytes [start, stop), as disjoint boxes in this window's
        own coordinates.

        For elements in row-major order, there are at most 2 * ndim - 1 boxes. If ranges partition
        all bytes, each element begins in exactly one of them.
        """
        order = sorted((d for d, n in enumerate(self.sizes) if n > 1), key=lambda d: -self.strides[d])
        reach = [0]  # from the first element to the start of the last, over the dims from a level on
        for d in reversed(order):
            reach.append(reach[-1] + (self.sizes[d] - 1) * self.strides[d])
        reach.reverse()
        found: list[Box] = []

        def cut(level: int, offset: int, box: Box) -> None:
            if start <= offset and offset + reach[level] < stop:
                found.append(box)
            elif level < len(order) and offset < stop and offset + reach[level] >= start:
                d, inner = order[level], reach[level + 1]
                n, stride = self.sizes[d], self.strides[d]
                touched, whole = range(n), range(0)
                if stride:  # else all elements are at the same offset, and none is complete
                    touched = range(
                        max(0, -(-(start - inner - offset) // stride)), min(n, -(-(stop - offset) // stride))
                    )
                    whole = range(
                        max(0, -(-(start - offset) // stride)), min(n, (stop - 1 - inner - offset) // stride + 1)
                    )
                if whole:
                    found.append(box.cut(d, whole.start, whole.stop))
                for i in touched:
                    if i not in whole:
                        cut(level + 1, offset + i * stride, box.cut(d, i, i + 1))

        if self.numel:
            cut(0, self.offset, Box.full(self.sizes))
        return found

    def runs(self) -> ByteRuns:
        """Return the bytes as equal runs, in row-major order of the elements."""
        return ByteRuns(self.offset, *_runs(self.sizes, self.strides, self.itemsize))


@lru_cache(maxsize=1024)  # a state has few shapes
def _row_major_strides(sizes: Shape, itemsize: int) -> Shape:
    strides, step = [], itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1024)
def _runs(sizes: Shape, strides: Shape, itemsize: int) -> tuple[int, Shape, Shape]:
    """Return the bytes of a run, the counts, and the strides."""
    if 0 in sizes:
        return 0, (), ()
    run, kept = itemsize, [(n, s) for n, s in zip(sizes, strides) if n != 1]
    while kept and kept[-1][1] == run:
        run *= kept.pop()[0]
    merged: list[Range] = []
    for n, s in reversed(kept):  # fold dims that continue one another into one
        if merged and merged[-1][0] * merged[-1][1] == s:
            merged[-1] = (merged[-1][0] * n, merged[-1][1])
        else:
            merged.append((n, s))
    merged.reverse()
    return run, tuple(n for n, _ in merged), tuple(s for _, s in merged)


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Equal runs of `run_bytes` bytes at `offset + i * strides[0] + j * strides[1] + ...`, for i <
    counts[0], j < counts[1].
    """

    offset: int
    run_bytes: int
    counts: Shape
    strides: Shape

    @property
    def count(self) -> int:
        """Number of runs; 0 if there are no bytes."""
        return math.prod(self.counts) if self.run_bytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.count * self.run_bytes

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.counts, self.strides)) + self.run_bytes

    def __iter__(self) -> Iterator[Range]:
        """Yield the (start, length) of every run, in order."""
        if not self.run_bytes:
            return
        index = [0] * len(self.counts)
        position = self.offset
        for _ in range(self.count):
            yield position, self.run_bytes
            for d in reversed(range(len(self.counts))):
                index[d] += 1
                position += self.strides[d]
                if index[d] < self.counts[d]:
                    break
                position -= index[d] * self.strides[d]
                index[d] = 0

    def joined(self, max_gap_bytes: int) -> ByteRuns:
        """Return the reads that cover all runs if you also read gaps of at most `max_gap_bytes`.
        Runs are joined from the last dim outward, up to the first dim with wider gaps.
        """
        length, counts, strides = self.run_bytes, self.counts, self.strides
        while counts and 0 <= strides[-1] - length <= max_gap_bytes:
            length += (counts[-1] - 1) * strides[-1]
            counts, strides = counts[:-1], strides[:-1]
        return ByteRuns(self.offset, length, counts, strides)

    def in_order(self) -> ByteRuns:
        """Return the same runs sorted by position, or unchanged if no order of the dims sorts them."""
        dims = sorted(zip(self.strides, self.counts), reverse=True)
        return ByteRuns(self.offset, self.run_bytes, tuple(n for _, n in dims), tuple(s for s, _ in dims))


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order. Those that touch or overlap are joined; empty ones are omitted."""
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        elif stop > start:
            out.append((start, stop))
    return out


def subtract_ranges(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """Return the parts of `ranges` outside of `holes`. Both are in order, and so is the result."""
    out: list[Range] = []
    at = 0
    for start, stop in ranges:
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        i = at
        while i < len(holes) and holes[i][0] < stop:
            if start < holes[i][0]:
                out.append((start, holes[i][0]))
            start = holes[i][1]
            i += 1
        if start < stop:
            out.append((start, stop))
    return out
