"""Boxes: rectangular regions of a tensor, and the positions of their elements in a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, le, mul, sub
from typing import Any, NamedTuple

import numpy.typing as npt

from planners.errors import PlanError

__all__ = [
    "Box", "ByteRuns", "Dims", "Range", "Shape", "Window", "arrange", "flat_boxes", "merge_ranges", "rearranged",
]  # fmt: skip


Shape = tuple[int, ...]
"""A number for each dim: sizes, offsets, strides, or an index."""
Range = tuple[int, int]
"""[start, stop), of bytes or elements."""
Dims = tuple[int | None, ...]
"""For each dim of a target, the source dim that it comes from, or None for a new dim of size 1.
Unlisted source dims must have size 1 and are dropped: `(1, 0)` transposes, `(None, 0)` adds a
leading dim, `(1,)` drops dim 0.
"""


class _BoxFields(NamedTuple):
    """The fields of a `Box`, which checks them."""

    offsets: Shape
    """First index in each dim."""
    sizes: Shape
    """Extent in each dim."""


class Box(_BoxFields):
    """The elements with `offsets[d] <= index[d] < offsets[d] + sizes[d]` for every dim d.

    A box without dims is the single element of a 0-d tensor. A box with a size of 0 has no elements. Boxes are values:
    they compare, hash, and sort by offsets and then sizes. They unpack as pairs: `offsets, sizes = box`.

        >>> Box((0, 4), (2, 4))
        Box[0:2, 4:8]
    """

    __slots__ = ()

    def __new__(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """Raises PlanError if the two differ in length or hold a negative number."""
        offsets_, sizes_ = tuple(map(int, offsets)), tuple(map(int, sizes))
        if len(offsets_) != len(sizes_):
            raise PlanError(f"a box needs one offset and one size per dim, got offsets {offsets_} and sizes {sizes_}")
        if (offsets_ and min(offsets_) < 0) or (sizes_ and min(sizes_) < 0):
            raise PlanError(f"offsets and sizes of a box must be >= 0, got offsets {offsets_} and sizes {sizes_}")
        return cls.of(offsets_, sizes_)

    @classmethod
    def of(cls, offsets: Shape, sizes: Shape) -> Box:
        """Create a box without checks, from tuples that are known to be valid. For inner loops."""
        return tuple.__new__(cls, (offsets, sizes))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a full tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """True if it has no elements."""
        return 0 in self.sizes

    @property
    def stops(self) -> Shape:
        """One past the last index in each dim."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index an array in the same coordinates."""
        return tuple(map(slice, self.offsets, self.stops))

    def intersection(self, other: Box) -> Box | None:
        """Return the common elements in the same coordinates, or None. `b & b` is `b` or None."""
        (begins, extents), (begins_, extents_) = self, other
        if len(extents) != len(extents_):
            raise self._of_other_ndim(other)
        if begins == begins_ and extents == extents_:
            return None if 0 in extents else self
        offsets = tuple(map(max, begins, begins_))
        sizes = tuple(map(sub, map(min, map(add, begins, extents), map(add, begins_, extents_)), offsets))
        return Box.of(offsets, sizes) if min(sizes) > 0 else None

    __and__ = intersection

    def difference(self, other: Box) -> tuple[Box, ...]:
        """Return the elements of this box that are not in `other`, as at most 2*ndim disjoint boxes in the same
        coordinates."""
        common = self.intersection(other)
        if common is None:
            return () if self.is_empty else (self,)
        pieces, rest = [], self
        for d, (start, stop) in enumerate(zip(common.offsets, common.stops)):
            pieces += [rest.cut(d, rest.offsets[d], start), rest.cut(d, stop, rest.stops[d])]
            rest = rest.cut(d, start, stop)
        return tuple(piece for piece in pieces if not piece.is_empty)

    __sub__ = difference

    def cut(self, dim: int, start: int, stop: int) -> Box:
        """Return the box with `[start, stop)` in `dim`, in the same coordinates. The other dims stay the same."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = start, stop - start
        return Box.of(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Return True if every element of `other` is in this box. An empty box is in every box."""
        (outer, extents), (inner, extents_) = self, other
        if len(extents) != len(extents_):
            raise self._of_other_ndim(other)
        if 0 in extents_:
            return True
        return all(map(le, outer, inner)) and all(map(le, map(add, inner, extents_), map(add, outer, extents)))

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by `by` in each dim. Raises PlanError if an offset becomes negative."""
        if len(by) != self.ndim:
            raise PlanError(f"cannot shift a box of {self.ndim} dims by {tuple(by)}")
        return self._at(tuple(map(int, map(add, self.offsets, by))))

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, whose first element becomes the origin.
        `b.relative_to(b)` is `Box.full(b.sizes)`. Raises PlanError if `outer` does not contain
        it."""
        if not outer.contains(self):
            raise PlanError(f"{self} is not within {outer}")
        return self._at(tuple(map(sub, self.offsets, outer.offsets)))

    def moved_with(self, outer: Box, there: Box) -> Box:
        """Return this box, which is inside `outer`, in the coordinates in which `outer` starts at
        the offsets of `there`. `b.moved_with(b, b)` is `b`. Raises PlanError if `outer` does not
        contain it.
        """
        return Box.of(tuple(map(add, self.relative_to(outer).offsets, there.offsets)), self.sizes)

    def _at(self, offsets: Shape) -> Box:
        if min(offsets, default=0) < 0:
            raise PlanError(f"offsets of a box must be >= 0, but {self} would begin at {offsets}")
        return Box.of(offsets, self.sizes)

    def _of_other_ndim(self, other: Box) -> PlanError:
        return PlanError(f"boxes of {self.ndim} and {other.ndim} dims have no common coordinates: {self}, {other}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Box is frozen: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Box is frozen: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"Box[{', '.join(f'{o}:{o + s}' for o, s in zip(self.offsets, self.sizes))}]"


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """The elements `[start, stop)` of the row-major flattening as at most 2*ndim - 1 boxes, in flat order.

    3 x 4, range 2:9:      . . 2 3
                           4 5 6 7
                           8 . . .
    """
    if start >= stop:
        return []
    if not shape:
        return [Box.of((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return [_under(first, box) for box in flat_boxes(shape[1:], head, tail)]
    out: list[Box] = []
    if head:
        out += [_under(first, box) for box in flat_boxes(shape[1:], head, inner)]
        first += 1
    if first < last:
        rest = shape[1:]
        out.append(Box.of((first, *(0,) * len(rest)), (last - first, *rest)))
    if tail:
        out += [_under(last, box) for box in flat_boxes(shape[1:], 0, tail)]
    return out


def _under(index: int, box: Box) -> Box:
    """Return `box`, a box of the inner dims, as a box at `index` of an additional outer dim."""
    return Box.of((index, *box.offsets), (1, *box.sizes))


def rearranged(box: Box, dims: Dims, fqn: str | None = None) -> Box:
    """Return `box` with its dims rearranged. New dims are `0:1`. Raises PlanError if a dim is lost,
    repeated, or unknown.
    """
    named = [d for d in dims if d is not None]
    if len(set(named)) != len(named) or any(not 0 <= d < box.ndim for d in named):
        raise PlanError(f"{dims} does not name distinct dims of {box}", fqn=fqn)
    lost = [d for d in range(box.ndim) if d not in named and box.sizes[d] != 1]
    if lost:
        raise PlanError(f"{dims} leaves out dim {lost[0]} of {box}, which is not of size 1", fqn=fqn)
    return Box.of(
        tuple(0 if d is None else box.offsets[d] for d in dims), tuple(1 if d is None else box.sizes[d] for d in dims)
    )


def arrange(array: npt.NDArray[Any], dims: Dims) -> npt.NDArray[Any]:
    """Return a numpy view of `array` with its dims rearranged."""
    rest = [d for d in range(array.ndim) if d not in dims]
    turned = array.transpose([*(d for d in dims if d is not None), *rest])
    return turned.reshape([1 if d is None else array.shape[d] for d in dims])


# `Window`: where the elements of a box are in a file, and in which runs of bytes they are read.
#
# A stored tensor is a set of pairs (box of the tensor, window of a file). A window is an origin and
# a stride in bytes for each dim, so a sub-box, a transposition, a slice of a stack and a flat piece
# are all windows again, and whatever is read through them is just strided bytes.


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
        if self.offset < 0 or self.itemsize < 1 or min(self.sizes, default=0) < 0 or min(self.strides, default=0) < 0:
            raise PlanError(f"offset, sizes and strides of a window must be >= 0 and the item size >= 1, got {self}")

    @classmethod
    def row_major(cls, offset: int, sizes: Sequence[int], itemsize: int) -> Window:
        """Return the window of a contiguous array whose first byte is at `offset`."""
        strides, step = [], itemsize
        for size in reversed(sizes):
            strides.append(step)
            step *= max(size, 1)
        return cls(offset, tuple(sizes), tuple(reversed(strides)), itemsize)

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
        """Return the elements that begin in bytes [start, stop), as disjoint boxes in this window's own coordinates.

        For elements in row-major order these are at most 2d-1 boxes. The ranges of a partition of all bytes get
        different elements, and together they get all of them.
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
def _runs(sizes: Shape, strides: Shape, itemsize: int) -> tuple[int, Shape, Shape]:
    """Bytes of a run, counts, and strides."""
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
