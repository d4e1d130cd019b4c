"""Boxes: rectangular regions of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import add, le, sub
from typing import NamedTuple

from planners.errors import PlanError
from planners.geometry.arrays import Array

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

    A box without dims is the single element of a 0-d tensor. A box with a size of 0 has no
    elements. Boxes are values: they compare, hash, and sort by offsets and then sizes. They
    unpack as pairs: `offsets, sizes = box`.

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
        if 0 in extents_ or (outer == inner and extents == extents_):
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


def upper_corner(boxes: Iterable[Box]) -> Shape:
    """Return the largest stop in each dim: the shape of a tensor that the boxes fill."""
    return tuple(map(max, zip(*(box.stops for box in boxes))))


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


def arrange(array: Array, dims: Dims) -> Array:
    """Return a numpy view of `array` with its dims rearranged."""
    rest = [d for d in range(array.ndim) if d not in dims]
    turned = array.transpose([*(d for d in dims if d is not None), *rest])
    return turned.reshape([1 if d is None else array.shape[d] for d in dims])
