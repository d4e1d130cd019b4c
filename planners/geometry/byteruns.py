"""`Window`: where the elements of a box lie in a file, and in which runs of bytes they are read.

A stored tensor is a set of pairs (box of the tensor, window of a file). A window is an origin and a stride in bytes
for each dim, so a sub-box, a transposition, a slice of a stack and a flat piece are all windows again, and
whatever is read through them is just strided bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import le, mul

from planners.errors import PlanError
from planners.geometry.box import Box, rearranged

__all__ = ["ByteRuns", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of `itemsize` bytes: index (i, j, ...) lies at `offset + i * strides[0] + j * strides[1] + ...`."""

    offset: int
    """Byte position of the first element."""
    sizes: tuple[int, ...]
    """Extent in each dim, in elements."""
    strides: tuple[int, ...]
    """Bytes from one index to the next, in each dim; 0 repeats one element."""
    itemsize: int
    """Bytes per element."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.strides):
            raise PlanError(f"a window needs one stride per dim, got sizes {self.sizes} and strides {self.strides}")
        if self.offset < 0 or self.itemsize < 1 or min(self.sizes, default=0) < 0 or min(self.strides, default=0) < 0:
            raise PlanError(f"offset, sizes and strides of a window must be >= 0 and the item size >= 1, got {self}")

    @classmethod
    def row_major(cls, offset: int, sizes: Sequence[int], itemsize: int) -> Window:
        """The window of a contiguous array whose first byte is at `offset`."""
        strides, step = [], itemsize
        for size in reversed(sizes):
            strides.append(step)
            step *= max(size, 1)
        return cls(offset, tuple(sizes), tuple(reversed(strides)), itemsize)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.numel * self.itemsize

    @property
    def stop(self) -> int:
        """One past the last byte that any element occupies; `offset` if there is none."""
        if 0 in self.sizes:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides)) + self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.runs().count == 1

    def crop(self, box: Box) -> Window:
        """The window of `box`, given in this window's own coordinates. Raises PlanError if it lies outside."""
        empty = box.is_empty
        if len(box.sizes) != len(self.sizes) or not (empty or all(map(le, box.stops, self.sizes))):
            raise PlanError(f"{box} lies outside a window of sizes {self.sizes}")
        if empty:
            return Window(self.offset, box.sizes, self.strides, self.itemsize)
        start = self.offset + sum(map(mul, box.offsets, self.strides))
        return Window(start, box.sizes, self.strides, self.itemsize)

    def permute(self, dims: Sequence[int]) -> Window:
        """The same elements with dim `dims[i]` as the new dim i. Raises PlanError if `dims` is no permutation."""
        if sorted(dims) != list(range(len(self.sizes))):
            raise PlanError(f"{tuple(dims)} is no permutation of the {len(self.sizes)} dims of a window")
        return Window(
            self.offset, tuple(self.sizes[d] for d in dims), tuple(self.strides[d] for d in dims), self.itemsize
        )

    def rearrange(self, dims: Sequence[int | None]) -> Window:
        """Like `permute`, but None makes a new dim of size 1 and dims of size 1 may be left out: `dims` of a
        `ReadItem`, so that `window.crop(item.source).rearrange(item.dims)` lies like `item.target`.

        Raises PlanError if a dim is named twice, or one of another size is left out.
        """
        sizes = rearranged(Box.full(self.sizes), tuple(dims)).sizes
        strides = tuple(self.itemsize if d is None else self.strides[d] for d in dims)
        return Window(self.offset, sizes, strides, self.itemsize)

    def within(self, start: int, stop: int) -> list[Box]:
        """The elements that begin in bytes [start, stop), as disjoint boxes of this window's own coordinates.

        Of elements in row-major order these are at most 2d-1 boxes; each range of a partition of all bytes gets
        other elements, and together they get every one.
        """
        order = sorted((d for d, n in enumerate(self.sizes) if n > 1), key=lambda d: -self.strides[d])
        reach = [0]  # from the first element to the start of the last, over the dims from a level on
        for d in reversed(order):
            reach.append(reach[-1] + (self.sizes[d] - 1) * self.strides[d])
        reach.reverse()
        found: list[Box] = []

        def cut(level: int, offset: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
            if start <= offset and offset + reach[level] < stop:
                found.append(Box.of(offsets, sizes))
            elif level < len(order) and offset < stop and offset + reach[level] >= start:
                d, inner = order[level], reach[level + 1]
                n, stride = self.sizes[d], self.strides[d]
                touched, whole = range(n), range(0)
                if stride:  # else all lie together, and none of them is whole
                    touched = range(
                        max(0, -(-(start - inner - offset) // stride)), min(n, -(-(stop - offset) // stride))
                    )
                    whole = range(
                        max(0, -(-(start - offset) // stride)), min(n, (stop - 1 - inner - offset) // stride + 1)
                    )
                if whole:
                    found.append(Box.of(_with(offsets, d, whole.start), _with(sizes, d, len(whole))))
                for i in touched:
                    if i not in whole:
                        cut(level + 1, offset + i * stride, _with(offsets, d, i), _with(sizes, d, 1))

        if self.numel:
            cut(0, self.offset, (0,) * len(self.sizes), self.sizes)
        return found

    def runs(self) -> ByteRuns:
        """The bytes as equal runs, in row-major order of the elements."""
        run, sizes, strides = self.itemsize, list(self.sizes), list(self.strides)
        if 0 in sizes:
            return ByteRuns(self.offset, 0, (), ())
        kept = [(n, s) for n, s in zip(sizes, strides) if n != 1]
        while kept and kept[-1][1] == run:
            run *= kept.pop()[0]
        merged: list[tuple[int, int]] = []
        for n, s in reversed(kept):  # fold dims that continue one another into one
            if merged and merged[-1][0] * merged[-1][1] == s:
                merged[-1] = (merged[-1][0] * n, merged[-1][1])
            else:
                merged.append((n, s))
        merged.reverse()
        return ByteRuns(self.offset, run, tuple(n for n, _ in merged), tuple(s for _, s in merged))


def _with(numbers: tuple[int, ...], d: int, value: int) -> tuple[int, ...]:
    return (*numbers[:d], value, *numbers[d + 1 :])


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Runs of `run_bytes` bytes at `offset + i * strides[0] + j * strides[1] + ...`, i < counts[0], j < counts[1]."""

    offset: int
    run_bytes: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many runs; 0 if there is no byte."""
        return math.prod(self.counts) if self.run_bytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes in all runs together."""
        return self.count * self.run_bytes

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.counts, self.strides)) + self.run_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) of every run, in order."""
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

    def coalesced(self, max_gap_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(start, length, needed bytes) of the reads to make if gaps of up to `max_gap_bytes` are read as well.

        Runs are taken in order; a run that starts before the previous one ended begins a new read.
        """
        start = length = needed = -1
        for position, size in self:
            if length >= 0 and 0 <= position - (start + length) <= max_gap_bytes:
                length = position + size - start
                needed += size
            else:
                if length >= 0:
                    yield start, length, needed
                start, length, needed = position, size, size
        if length >= 0:
            yield start, length, needed
