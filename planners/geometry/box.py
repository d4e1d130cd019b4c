"""`Box`: an axis-aligned region of a tensor, half-open in every dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import add, le, sub
from typing import Any

import numpy.typing as npt

from planners.errors import PlanError

__all__ = ["Box", "Dims", "arrange", "flat_boxes", "rearranged"]

Dims = tuple[int | None, ...]
"""For each dim of a target, the source dim that it follows, or None for a new dim of size 1. Source dims that are not
named are of size 1 and are left out: `(1, 0)` transposes, `(None, 0)` puts a dim in front, `(1,)` drops dim 0."""


class Box:
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` for every dim d.

    A box of no dims is the single element of a 0-d tensor; a box with a size of 0 holds no element.
    Boxes are values: equal, hashable, ordered by offsets and then sizes.

        >>> Box((0, 4), (2, 4))
        Box[0:2, 4:8]
    """

    __slots__ = ("offsets", "sizes")

    offsets: tuple[int, ...]
    """First index in each dim."""
    sizes: tuple[int, ...]
    """Extent in each dim."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises PlanError if the two differ in length or hold a negative number."""
        offsets_, sizes_ = tuple(map(int, offsets)), tuple(map(int, sizes))
        if len(offsets_) != len(sizes_):
            raise PlanError(f"a box needs one offset and one size per dim, got offsets {offsets_} and sizes {sizes_}")
        if (offsets_ and min(offsets_) < 0) or (sizes_ and min(sizes_) < 0):
            raise PlanError(f"offsets and sizes of a box must be >= 0, got offsets {offsets_} and sizes {sizes_}")
        object.__setattr__(self, "offsets", offsets_)
        object.__setattr__(self, "sizes", sizes_)

    @classmethod
    def of(cls, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        """A box from tuples that are known to be right: no checks, for inner loops."""
        box = object.__new__(cls)
        object.__setattr__(box, "offsets", offsets)
        object.__setattr__(box, "sizes", sizes)
        return box

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """The whole of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no element."""
        return 0 in self.sizes

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        """For indexing an array whose coordinates are the box's own."""
        return tuple(map(slice, self.offsets, self.stops))

    def intersection(self, other: Box) -> Box | None:
        """The elements in both, in the coordinates of both; None where there is none. `b & b` is `b` or None."""
        self._same_ndim(other)
        if self.offsets == other.offsets and self.sizes == other.sizes:
            return None if self.is_empty else self
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.stops, other.stops), offsets))
        return Box.of(offsets, sizes) if min(sizes) > 0 else None

    __and__ = intersection

    def difference(self, other: Box) -> tuple[Box, ...]:
        """The elements of this box that are not in `other`, as at most 2*ndim disjoint boxes, same coordinates."""
        common = self.intersection(other)
        if common is None:
            return () if self.is_empty else (self,)
        pieces: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for d in range(self.ndim):
            before = common.offsets[d] - offsets[d]
            after = offsets[d] + sizes[d] - common.stops[d]
            for start, size in ((offsets[d], before), (common.stops[d], after)):
                if size:
                    pieces.append(Box.of((*offsets[:d], start, *offsets[d + 1 :]), (*sizes[:d], size, *sizes[d + 1 :])))
            offsets[d], sizes[d] = common.offsets[d], common.sizes[d]
        return tuple(pieces)

    __sub__ = difference

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box; an empty box is in every box."""
        self._same_ndim(other)
        if other.is_empty:
            return True
        return all(map(le, self.offsets, other.offsets)) and all(map(le, other.stops, self.stops))

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by `by` in each dim. Raises PlanError if that leads below 0."""
        if len(by) != self.ndim:
            raise PlanError(f"cannot shift a box of {self.ndim} dims by {tuple(by)}")
        return self._at(tuple(map(int, map(add, self.offsets, by))))

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of `outer`, whose first element becomes the origin; `b.relative_to(b)` is
        `Box.full(b.sizes)`. Raises PlanError if `outer` does not contain it."""
        if not outer.contains(self):
            raise PlanError(f"{self} does not lie within {outer}")
        return self._at(tuple(map(sub, self.offsets, outer.offsets)))

    def _at(self, offsets: tuple[int, ...]) -> Box:
        if min(offsets, default=0) < 0:
            raise PlanError(f"offsets of a box must be >= 0, but {self} would begin at {offsets}")
        return Box.of(offsets, self.sizes)

    def _same_ndim(self, other: Box) -> None:
        if len(self.sizes) != len(other.sizes):
            raise PlanError(f"boxes of {self.ndim} and {other.ndim} dims have no common coordinates: {self}, {other}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Box is frozen: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Box is frozen: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.offsets == other.offsets and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash((self.offsets, self.sizes))

    def __lt__(self, other: Box) -> bool:
        return (self.offsets, self.sizes) < (other.offsets, other.sizes)

    def __le__(self, other: Box) -> bool:
        return (self.offsets, self.sizes) <= (other.offsets, other.sizes)

    def __gt__(self, other: Box) -> bool:
        return other < self

    def __ge__(self, other: Box) -> bool:
        return other <= self

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Offsets, then sizes: `offsets, sizes = box`."""
        return iter((self.offsets, self.sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return Box, (self.offsets, self.sizes)

    def __repr__(self) -> str:
        return f"Box[{', '.join(f'{o}:{o + s}' for o, s in zip(self.offsets, self.sizes))}]"


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
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
    """`box` of the inner dims as a box at `index` of an outer dim."""
    return Box.of((index, *box.offsets), (1, *box.sizes))


def rearranged(box: Box, dims: Dims, fqn: str | None = None) -> Box:
    """`box` with its dims rearranged; new dims are `0:1`. Raises PlanError if a dim is lost, named twice or unknown."""
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
    """A numpy view of `array` with its dims rearranged."""
    rest = [d for d in range(array.ndim) if d not in dims]
    turned = array.transpose([*(d for d in dims if d is not None), *rest])
    return turned.reshape([1 if d is None else array.shape[d] for d in dims])
