"""Multiply every word by the numbers of its place, and add it all up: two matrix products and a little exact glue,
or on the host, where it is installed, a compiled loop (`compiled`).

A tensor of 32-bit words has one axis per dim, and each axis has a vector of secret numbers. The sum is

    sum over r, c of   rows[r] * word[r, c] * columns[c]      modulo PRIME

where c runs over some of the last axes taken together, and r over the others. The inner sums are one float64 matrix
product per digit of `columns`, and float64 is exact here: |word| <= 2^31, |digit| <= 2^11 and at most 2^11 columns keep
every partial sum within 2^53, whatever the order in which the library adds. So is the outer one: the sums are cut in
halves of 27 bits, and 2^26 * 2^11 * 2^16 rows = 2^53.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from reshard.state.fingerprints.compiled import fold_matrix, kernel, table
from reshard.state.fingerprints.keys import (
    LANES,
    LIMB_BITS,
    LIMBS,
    PRIME,
    Key,
    multiply,
    products,
    to_limbs,
)
from reshard.state.fingerprints.tiling import MAX_COLUMNS, Axis, Tile, cut, matrices, tiles

__all__ = ["Sums", "Term", "add_sums", "fold", "fold_each", "known", "terms"]

Sums = tuple[int, ...]
"""One element of the field per lane."""


class Term(NamedTuple):
    """The sum over one tile, being computed where the words are: digits that `known` puts together."""

    digits: torch.Tensor
    uses: tuple[torch.Tensor, ...]
    """Memory that may be given up when the digits are known, since another stream than this one may have made it."""


_HALF_BITS = 27
_CPU_WORDS = 1 << 18  # 2 MiB as float64: of fewer the calls would take a part of the time
_ONE_THREAD = 1 << 18  # multiplications: for no more than these OpenBLAS asks no other threads, which would spin
_DEVICE_WORDS = 1 << 24


def add_sums(*sums: Sums) -> Sums:
    """The sums of disjoint parts, in any order."""
    return tuple(sum(lane) % PRIME for lane in zip((0,) * LANES, *sums))


def fold(words: torch.Tensor, axes: Sequence[Axis], key: Key) -> Sums:
    """The sum of word times numbers over an int32 tensor whose dims are `axes`; at least one dim, any strides.

    Extra memory: one chunk as float64 (2 MiB on the CPU, 128 MiB on other devices; less with the compiled loop) and up
    to 64 MiB of digits, kept for the next tensor of the same geometry.
    """
    if words.device.type == "cpu" and (loop := kernel()) is not None:
        return add_sums(*(sums for matrix in matrices(words, axes) for sums in fold_matrix(loop, matrix, key)))
    return add_sums(*(_join(term.digits.tolist()) for term in terms(words, axes, key)))


def fold_each(rows: torch.Tensor, axes: Sequence[Axis], key: Key) -> list[Sums]:
    """`fold` of each of many small tensors that lie alike; int32 on the CPU, (tensors, words in row-major order).

    All axes are columns here, so that one product sums up all of them: for small ones the calls are what takes time.
    """
    total = np.zeros((LANES, len(rows)), np.int64)
    start, loop = 0, kernel()
    for tile in tiles([axis.size for axis in axes], MAX_COLUMNS):
        stop = start + math.prod(end - begin for begin, end in tile)
        if loop is not None:
            total += loop.fold_rows(rows[:, start:stop].numpy(), table(key, tuple(axes), tile))
        else:
            limbs = _limbs(key, tuple(axes), tile, rows.device)
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
    for matrix in matrices(words, axes):
        column_limbs = _limbs(key, matrix.column_axes, matrix.columns, words.device)
        row_limbs = _limbs(key, matrix.row_axes, matrix.rows, words.device)
        digits = _contract(matrix.words, len(matrix.rows), row_limbs, column_limbs)
        yield Term(digits, (row_limbs, column_limbs))


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
        piece = cut(words, tile)
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
