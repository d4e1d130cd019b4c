"""Multiply every word by the numbers of its place, and add it all up: two matrix products and a little exact glue.

A tensor of 32-bit words has one axis per dim, and each axis has a vector of secret numbers. The sum is

    sum over r, c of   rows[r] * word[r, c] * columns[c]      modulo PRIME

where c runs over some of the last axes taken together, and r over the others. The inner sums are one float64 matrix
product per digit of `columns`, and float64 is exact here: |word| <= 2^31, |digit| <= 2^11 and at most 2^11 columns keep
every partial sum within 2^53, whatever the order in which the library adds. So is the outer one: the sums are cut in
halves of 27 bits, and 2^26 * 2^11 * 2^16 rows = 2^53.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from reshard.state.fingerprints.keys import (
    BLOCK,
    LANES,
    LIMB_BITS,
    LIMBS,
    PRIME,
    Key,
    Residues,
    multiply,
    products,
    to_limbs,
)

__all__ = ["Axis", "Sums", "Term", "add_sums", "fold", "fold_each", "known", "terms", "tiles"]

Sums = tuple[int, ...]
"""One element of the field per lane."""
Tile = tuple[tuple[int, int], ...]
"""A range of each axis."""


class Term(NamedTuple):
    """The sum over one tile, being computed where the words are: digits that `known` puts together."""

    digits: torch.Tensor
    uses: tuple[torch.Tensor, ...]
    """Memory that may be given up when the digits are known, since another stream than this one may have made it."""


_MAX_COLUMNS = 2048
_MAX_ROWS = 1 << 14
_NARROW = 256  # fewer columns than this do not keep the matrix product busy
_THIN = 32
_MIN_ROWS = 16  # fewer rows than this do not pay for more columns
_HALF_BITS = 27
_CPU_WORDS = 1 << 18  # 2 MiB as float64: of fewer the calls would take a part of the time
_ONE_THREAD = 1 << 18  # multiplications: for no more than these OpenBLAS asks no other threads, which would spin
_DEVICE_WORDS = 1 << 24


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


def add_sums(*sums: Sums) -> Sums:
    """The sums of disjoint parts, in any order."""
    return tuple(sum(lane) % PRIME for lane in zip((0,) * LANES, *sums))


def fold(words: torch.Tensor, axes: Sequence[Axis], key: Key) -> Sums:
    """The sum of word times numbers over an int32 tensor whose dims are `axes`; at least one dim, any strides.

    Extra memory: one chunk as float64 (2 MiB on the CPU, 128 MiB on other devices) and up to 64 MiB of digits,
    kept for the next tensor of the same geometry.
    """
    return add_sums(*(_join(term.digits.tolist()) for term in terms(words, axes, key)))


def fold_each(rows: torch.Tensor, axes: Sequence[Axis], key: Key) -> list[Sums]:
    """`fold` of each of many small tensors that lie alike; int32 on the CPU, (tensors, words in row-major order).

    All axes are columns here, so that one product sums up all of them: for small ones the calls are what takes time.
    """
    total = np.zeros((LANES, len(rows)), np.int64)
    start = 0
    for tile in tiles([axis.size for axis in axes], _MAX_COLUMNS):
        limbs = _limbs(key, tuple(axes), tile, rows.device)
        stop = start + limbs.shape[1]
        digits = (rows[:, start:stop].to(torch.float64) @ limbs.t()).numpy().astype(np.int64)
        worth = np.array([1 << LIMB_BITS * place for place in range(LIMBS)])
        total += multiply(digits.T.reshape(LANES, LIMBS, -1) % PRIME, worth[:, None]).sum(axis=1)
        total %= PRIME
        start = stop
    return list(zip(*total.tolist()))


def known(found: Sequence[Term]) -> list[Sums]:
    """Each sum, as soon as all of them are computed: they come to the host together."""
    rows = torch.stack([term.digits for term in found]).tolist() if found else []
    return [_join(row) for row in rows]


def terms(words: torch.Tensor, axes: Sequence[Axis], key: Key) -> Iterator[Term]:
    """What `fold` adds up. On a device each is asked for, and not waited for."""
    sizes = tuple(words.shape)
    if 0 in sizes:
        return
    first, width = _whole_axes(sizes, _MAX_COLUMNS)
    if first and width < _NARROW and _pays_to_widen(sizes, first, width):
        # take in some of the next axis, or its places within a block
        segments = axes[first - 1].segments()
        if len(segments) > 1 or len(segments[0][2]) > 1:
            for start, stop, replaced in segments:
                part_axes = (*axes[: first - 1], *replaced, *axes[first:])
                part = words.narrow(first - 1, start, stop - start).view([axis.size for axis in part_axes])
                yield from terms(part, part_axes, key)
            return
        if first == len(sizes) or math.prod(sizes[: first - 1]) >= _MIN_ROWS:
            first -= 1
    for columns in tiles(sizes[first:], _MAX_COLUMNS):
        column_limbs = _limbs(key, tuple(axes[first:]), columns, words.device)
        for rows in tiles(sizes[:first], _MAX_ROWS):
            row_limbs = _limbs(key, tuple(axes[:first]), rows, words.device)
            digits = _contract(_cut(words, rows + columns), first, row_limbs, column_limbs)
            yield Term(digits, (row_limbs, column_limbs))


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


def _cut(words: torch.Tensor, tile: Tile) -> torch.Tensor:
    return words[tuple(slice(start, stop) for start, stop in tile)]


@lru_cache(maxsize=64)
def _limbs(key: Key, axes: tuple[Axis, ...], tile: Tile, device: torch.device) -> torch.Tensor:
    """The digits of the products of the axes' numbers over a tile, (LANES * LIMBS, places of the tile), float64."""
    numbers = products([axis.numbers(key, *span) for axis, span in zip(axes, tile)])
    return torch.from_numpy(to_limbs(numbers)).to(device)


def _contract(words: torch.Tensor, first: int, row_limbs: torch.Tensor, column_limbs: torch.Tensor) -> torch.Tensor:
    """The digits of the sum over one tile: axes before `first` are its rows, the others its columns."""
    rows, columns = row_limbs.shape[1], column_limbs.shape[1]
    sums = torch.empty(rows, LANES * LIMBS, dtype=torch.float64, device=words.device)
    chunk, height = _chunk(rows, columns, words.device)
    done = 0
    for tile in tiles(words.shape[:first], height):
        size = math.prod(stop - start for start, stop in tile)
        values = chunk[: size * columns]
        piece = _cut(words, tile)
        values.view(piece.shape).copy_(piece)
        _multiply(values.view(size, columns), column_limbs, sums[done : done + size])
        done += size
    high = torch.round(sums * 2.0**-_HALF_BITS)
    low = sums - high * 2.0**_HALF_BITS
    parts = torch.stack((row_limbs @ low, row_limbs @ high))
    return parts.flatten().to(torch.int64)


def _multiply(values: torch.Tensor, limbs: torch.Tensor, out: torch.Tensor) -> None:
    """values @ limbs.t() into `out`: so thin a product numpy's BLAS does faster, torch's with the threads it has."""
    if values.device.type != "cpu" or torch.get_num_threads() > 1:
        out[...] = values @ limbs.t()
        return
    left, right, made = values.numpy(), limbs.numpy().T, out.numpy()
    step = max(1, _ONE_THREAD // limbs.numel())
    for start in range(0, len(left), step):
        np.matmul(left[start : start + step], right, out=made[start : start + step])


def _chunk(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Memory for some rows of words, and how many those are: fewer where the device is nearly full."""
    height = max(1, (_CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS) // columns)
    while True:
        try:
            return torch.empty(min(height, rows) * columns, dtype=torch.float64, device=device), height
        except torch.OutOfMemoryError:
            if height * columns <= _CPU_WORDS:
                raise
            height = min(height, rows) // 4 or 1


def _join(parts: list[int]) -> Sums:
    """Put digits together again, of all sums[half][lane][row digit][lane][column digit] those of one lane each."""
    return tuple(sum(map(operator.mul, of_lane(parts), _WORTH)) % PRIME for of_lane in _OF_LANE)


_PLACES = [(half, i, j) for half in range(2) for i in range(LIMBS) for j in range(LIMBS)]
_WORTH = [1 << (_HALF_BITS * half + LIMB_BITS * (i + j)) for half, i, j in _PLACES]
_ROWS = LANES * LIMBS
_OF_LANE = [
    operator.itemgetter(*(_ROWS * (_ROWS * half + LIMBS * k + i) + LIMBS * k + j for half, i, j in _PLACES))
    for k in range(LANES)
]
