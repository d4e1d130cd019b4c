"""An array of words as matrices of rows and columns, and which numbers belong to their places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from reshard.state.fingerprints.keys import BLOCK, Key, Residues

__all__ = ["MAX_COLUMNS", "Axis", "Matrix", "Tile", "cut", "matrices", "tiles"]

Tile = tuple[tuple[int, int], ...]
"""A range of each axis."""


@dataclass(frozen=True)
class Axis:
    """One axis of an array of words, and which numbers belong to its places.

    `part` says what `intervals` count: "index" the indices of `dim`, "outer" its blocks, "inner" places in a block.
    """

    dim: int
    intervals: tuple[tuple[int, int], ...]
    part: Literal["index", "outer", "inner"] = "index"

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Local position of the first index of each interval, and behind them the size."""
        return np.concatenate(([0], np.cumsum([stop - start for start, stop in self.intervals], dtype=np.int64)))

    @property
    def size(self) -> int:
        """How many places."""
        return int(self.starts[-1])

    def numbers(self, key: Key, start: int, stop: int) -> Residues:
        """The numbers of the local positions `[start, stop)`, (LANES, stop - start)."""
        position = np.arange(start, stop)
        which = np.searchsorted(self.starts, position, side="right") - 1
        index = position - self.starts[which] + np.array([first for first, _ in self.intervals])[which]
        if self.part == "inner":
            return key.inner(self.dim)[:, index]
        return key.outer(self.dim, index) if self.part == "outer" else key.at(self.dim, index)

    def segments(self) -> list[tuple[int, int, tuple[Axis, ...]]]:
        """The axis in pieces `(start, stop, axes)`: whole blocks become two axes, what lies between stays one."""
        if self.part != "index":
            return [(0, self.size, (self,))]
        found: list[tuple[int, int, tuple[Axis, ...]]] = []
        done = 0

        def rest(stop: int) -> None:
            if stop > done:
                found.append((done, stop, (self.cut(done, stop),)))

        for (start, stop), local in zip(self.intervals, self.starts.tolist()):
            first, last = -(-start // BLOCK), stop // BLOCK
            if last > first:
                begin = local + first * BLOCK - start
                rest(begin)
                done = begin + (last - first) * BLOCK
                blocks = Axis(self.dim, ((first, last),), "outer"), Axis(self.dim, ((0, BLOCK),), "inner")
                found.append((begin, done, blocks))
        rest(self.size)
        return found

    def cut(self, start: int, stop: int) -> Axis:
        """The local positions `[start, stop)` as an axis of their own."""
        kept = []
        for (first, last), local in zip(self.intervals, self.starts.tolist()):
            a, b = max(first, first + start - local), min(last, first + stop - local)
            if a < b:
                kept.append((a, b))
        return Axis(self.dim, tuple(kept), self.part)


class Matrix(NamedTuple):
    """One tile of rows and columns: its words, and whose numbers they are multiplied by."""

    words: torch.Tensor
    """With as many dims as there are axes, those of the rows first."""
    row_axes: tuple[Axis, ...]
    rows: Tile
    column_axes: tuple[Axis, ...]
    columns: Tile


MAX_COLUMNS = 2048
"""Of a matrix, whose sums stay exact for so many."""
_MAX_ROWS = 1 << 14
_NARROW = 256  # fewer columns than this do not keep the matrix product busy
_THIN = 32
_MIN_ROWS = 16  # fewer rows than this do not pay for more columns


def matrices(words: torch.Tensor, axes: Sequence[Axis]) -> Iterator[Matrix]:
    """A tensor whose dims are `axes` as matrices, of rows that are as long as pays."""
    sizes = tuple(words.shape)
    if 0 in sizes:
        return
    first, width = _whole_axes(sizes, MAX_COLUMNS)
    if first and width < _NARROW and _pays_to_widen(sizes, first, width):
        # take in some of the next axis, or its places within a block
        segments = axes[first - 1].segments()
        if len(segments) > 1 or len(segments[0][2]) > 1:
            for start, stop, replaced in segments:
                part_axes = (*axes[: first - 1], *replaced, *axes[first:])
                part = words.narrow(first - 1, start, stop - start).view([axis.size for axis in part_axes])
                yield from matrices(part, part_axes)
            return
        if first == len(sizes) or math.prod(sizes[: first - 1]) >= _MIN_ROWS:
            first -= 1
    for columns in tiles(sizes[first:], MAX_COLUMNS):
        for rows in tiles(sizes[:first], _MAX_ROWS):
            yield Matrix(cut(words, rows + columns), tuple(axes[:first]), rows, tuple(axes[first:]), columns)


def _pays_to_widen(sizes: Sequence[int], first: int, width: int) -> bool:
    """Whether columns of more axes take no more numbers than a number for each row does. Of very few columns the sums
    of rows would be as much work as the words."""
    return width < _THIN or math.prod(sizes[:first]) > width * min(sizes[first - 1], BLOCK)


def _whole_axes(sizes: Sequence[int], limit: int) -> tuple[int, int]:
    """(first, n): the axes from `first` on hold n <= `limit` places together, and one more would be too many."""
    product = 1
    for first in range(len(sizes), 0, -1):
        if product * sizes[first - 1] > limit:
            return first, product
        product *= sizes[first - 1]
    return 0, product


def tiles(sizes: Sequence[int], limit: int) -> Iterator[Tile]:
    """Cut axes into tiles of at most `limit` places, each one run of the row-major order, in that order."""
    first, product = _whole_axes(sizes, limit)
    whole = [(0, size) for size in sizes[first:]]
    if not first:
        yield tuple(whole)
        return
    step = limit // product
    cut = [(start, min(start + step, sizes[first - 1])) for start in range(0, sizes[first - 1], step)]
    for leading in itertools.product(*(range(size) for size in sizes[: first - 1])):
        for piece in cut:
            yield (*((i, i + 1) for i in leading), piece, *whole)


def cut(words: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The words of a tile. Nothing is copied."""
    return words[tuple(slice(start, stop) for start, stop in tile)]
