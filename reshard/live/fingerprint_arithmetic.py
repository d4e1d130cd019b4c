"""The arithmetic of fingerprints: each place has a number, by which its word is multiplied."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch

from planners.geometry.arrays import Array, Floats, Ints, distinct, running_sums, zeros
from planners.geometry.box import Range
from reshard.live.compiled_kernel import PRIME, Ints32, Kernel, Residues, kernel

# Sums over this field do not depend on their order, which is what lets every rank add up its own
# part. The numbers come from SHAKE-256, so any index can be computed directly, and without
# the key they look like random ones.


LANES = 2
"""Number of sums. Each has numbers of its own."""
BLOCK = 2048
"""How many indices share one outer number."""
LIMB_BITS = 12
LIMBS = 4
"""Number of digits of a residue in (-PRIME/2, PRIME/2). A digit has 12 bits and is in [-2048, 2048]."""


@dataclass(frozen=True)
class Key:
    """The key of a family of fingerprints. Only fingerprints with the same key can be compared.

    >>> Key().name, Key(b"our secret").name
    ('', 'b9218aa1')
    """

    secret: bytes = b""
    """Any bytes. Empty for the public key."""

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes):
            raise TypeError(f"a fingerprint key is made of bytes, got {type(self.secret).__name__}")

    @property
    def name(self) -> str:
        """The name of the key in fingerprints: empty for the public key, otherwise 8 hex digits that
        reveal nothing about the secret."""
        return hashlib.shake_256(_prefix(self.secret, b"name")).hexdigest(4) if self.secret else ""

    def inner(self, dim: int) -> Residues:
        """Return the numbers of the BLOCK places within a block of `dim`, (LANES, BLOCK), read-only."""
        return _table(self.secret, b"inner", dim, 0)

    def outer(self, dim: int, blocks: Ints) -> Residues:
        """Return the numbers of these blocks of `dim`, (LANES, len(blocks))."""
        pages = blocks // BLOCK
        numbers = np.empty((LANES, blocks.size), np.int64)
        for page in distinct(pages):
            chosen = pages == page
            numbers[:, chosen] = _table(self.secret, b"outer", dim, int(page))[:, blocks[chosen] % BLOCK]
        return numbers

    def at(self, dim: int, index: Ints) -> Residues:
        """Return the numbers of these indices of `dim`, inner times outer, (LANES, len(index))."""
        return multiply(self.inner(dim)[:, index % BLOCK], self.outer(dim, index // BLOCK))


PUBLIC = Key()
"""The key without a secret. It finds accidental changes. To detect tampering, use a secret key."""


def multiply(a: Residues, b: Residues) -> Residues:
    """Multiply in the field, element by element, with broadcasting.

    The quotient by PRIME is estimated in float64. The error is less than 1, because both factors
    are below 2^48. The remainder is exact, because it is small, and int64 arithmetic is exact
    modulo 2^64.
    """
    quotient = np.floor(a.astype(np.float64) * b.astype(np.float64) / PRIME).astype(np.int64)
    rest: Residues = a * b - quotient * PRIME
    rest += np.where(rest < 0, PRIME, 0)
    rest -= np.where(rest >= PRIME, PRIME, 0)
    return rest


def products(vectors: Sequence[Residues]) -> Residues:
    """Return the products of one number per vector, for all combinations, in row-major order:
    (LANES, product of the lengths)."""
    result = np.ones((LANES, 1), np.int64)
    for vector in vectors:
        result = multiply(result[:, :, None], vector[:, None, :]).reshape(LANES, -1)
    return result


def to_limbs(numbers: Residues) -> Floats:
    """Return the digits of each number, least significant first: (LANES * LIMBS, n), with digit l
    of lane k in row k * LIMBS + l.

    The sum over l of digit l times 2^(12 l) is the number, or the number minus PRIME.
    """
    rest = np.where(numbers > PRIME // 2, numbers - PRIME, numbers)
    digits = np.empty((LANES, LIMBS, numbers.shape[1]), np.float64)
    half = 1 << (LIMB_BITS - 1)
    for place in range(LIMBS - 1):
        digit = ((rest + half) & ((1 << LIMB_BITS) - 1)) - half
        digits[:, place] = digit
        rest = (rest - digit) >> LIMB_BITS
    digits[:, LIMBS - 1] = rest
    return digits.reshape(LANES * LIMBS, -1)


def _prefix(secret: bytes, use: bytes) -> bytes:
    return b"reshard fingerprint 1 " + use + len(secret).to_bytes(8, "little") + secret


@lru_cache(maxsize=256)
def _table(secret: bytes, use: bytes, dim: int, page: int) -> Residues:
    """Return (LANES, BLOCK) numbers, read-only: 16 bytes of the stream for each place, 8 for each
    lane, modulo PRIME."""
    seed = _prefix(secret, use) + dim.to_bytes(4, "little") + page.to_bytes(8, "little")
    stream = hashlib.shake_256(seed).digest(BLOCK * LANES * 8)
    table = (np.frombuffer(stream, "<u8") % np.uint64(PRIME)).astype(np.int64).reshape(BLOCK, LANES).T.copy()
    table.flags.writeable = False
    return table


# An array of words as matrices of rows and columns, and which numbers belong to their places.


Words = TypeVar("Words", torch.Tensor, Array)
Tile = tuple[tuple[int, int], ...]
"""A range of each axis."""


@dataclass(frozen=True)
class Axis:
    """One axis of an array of words, and the numbers of its places.

    `part` says what `intervals` count: "index" the indices of `dim`, "outer" its blocks, "inner"
    places in a block.
    """

    dim: int
    intervals: tuple[Range, ...]
    part: Literal["index", "outer", "inner"] = "index"

    @cached_property
    def starts(self) -> Ints:
        """Local position of the first index of each interval, and the size at the end."""
        return running_sums([stop - start for start, stop in self.intervals])

    @property
    def size(self) -> int:
        """Number of places."""
        return sum(stop - start for start, stop in self.intervals)

    def numbers(self, key: Key, start: int, stop: int) -> Residues:
        """Return the numbers of the local positions `[start, stop)`, (LANES, stop - start)."""
        position = np.arange(start, stop)
        which = np.searchsorted(self.starts, position, side="right") - 1
        index = position - self.starts[which] + np.array([first for first, _ in self.intervals])[which]
        if self.part == "inner":
            return key.inner(self.dim)[:, index]
        return key.outer(self.dim, index) if self.part == "outer" else key.at(self.dim, index)

    def segments(self) -> list[tuple[int, int, Axes]]:
        """Return the axis in pieces `(start, stop, axes)`: complete blocks become two axes, and the
        rest stays one."""
        if self.part != "index":
            return [(0, self.size, (self,))]
        found: list[tuple[int, int, Axes]] = []
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
        """Return the local positions `[start, stop)` as a separate axis."""
        kept = []
        for (first, last), local in zip(self.intervals, self.starts.tolist()):
            a, b = max(first, first + start - local), min(last, first + stop - local)
            if a < b:
                kept.append((a, b))
        return Axis(self.dim, tuple(kept), self.part)


Axes = tuple[Axis, ...]


class Matrix(NamedTuple):
    """One tile of rows and columns: its words, and the axes whose numbers multiply them."""

    words: torch.Tensor
    """One dim per axis, those of the rows first."""
    row_axes: Axes
    rows: Tile
    column_axes: Axes
    columns: Tile


MAX_COLUMNS = 2048
"""The maximum number of columns of a matrix for which sums stay exact."""
_MAX_ROWS = 1 << 14
_NARROW = 256  # fewer columns than this do not keep the matrix product busy
THIN = 32
_MIN_ROWS = 16  # fewer rows than this do not pay for more columns


def matrices(words: torch.Tensor, axes: Sequence[Axis]) -> Iterator[Matrix]:
    """Yield a tensor whose dims are `axes` as matrices, with rows as long as is efficient."""
    sizes = tuple(words.shape)
    if 0 in sizes:
        return
    first, width = _whole_axes(sizes, MAX_COLUMNS)
    if first and width < _NARROW and _is_worth_widening(sizes, first, width):
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


def _is_worth_widening(sizes: Sequence[int], first: int, width: int) -> bool:
    """Return True if adding axes to the columns does not need more numbers than one number per row
    does. With very few columns, the sums of rows would cost as much as the words."""
    return width < THIN or math.prod(sizes[:first]) > width * min(sizes[first - 1], BLOCK)


def _whole_axes(sizes: Sequence[int], limit: int) -> tuple[int, int]:
    """Return (first, n): the axes from `first` on have n <= `limit` places together, and with one
    more axis there would be too many."""
    product = 1
    for first in range(len(sizes), 0, -1):
        if product * sizes[first - 1] > limit:
            return first, product
        product *= sizes[first - 1]
    return 0, product


def tiles(sizes: Sequence[int], limit: int) -> Iterator[Tile]:
    """Split axes into tiles of at most `limit` places. Each is contiguous in row-major order, and
    tiles are in that order."""
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


def cut(words: Words, tile: Tile) -> Words:
    """Return the words of a tile. Nothing is copied."""
    return words[tuple(slice(start, stop) for start, stop in tile)]


# Multiply every word by the numbers of its place, and add it all up: two matrix products and a
# little exact glue, or on the host, where it is installed, a compiled loop.
#
# A tensor of 32-bit words has one axis per dim, and each axis has a vector of secret numbers. The
# sum is
#
#     sum over r, c of   rows[r] * word[r, c] * columns[c]      modulo PRIME
#
# where c runs over some of the last axes taken together, and r over the others. The inner sums are
# one float64 matrix product per digit of `columns`, and float64 is exact here: |word| <= 2^31,
# |digit| <= 2^11 and at most 2^11 columns keep every partial sum within 2^53, whatever the order in
# which the library adds. So is the outer one: the sums are split in halves of 27 bits, and 2^26 *
# 2^11 * 2^16 rows = 2^53.


Sums = tuple[int, ...]
"""One element of the field per lane."""


class Term(NamedTuple):
    """The sum over one tile, which is computed on the device of the words. `known` combines its digits."""

    digits: torch.Tensor
    uses: tuple[torch.Tensor, ...]
    """Memory that may be freed when the digits are known. Another stream may have allocated it."""


_HALF_BITS = 27
CPU_WORDS = 1 << 17  # 1 MiB as float64, which a cache holds: of fewer the calls would take a part of the time
_ONE_THREAD = 1 << 18  # multiplications: for no more than these OpenBLAS asks no other threads, which would spin
DEVICE_WORDS = 1 << 24


def add_sums(*sums: Sums) -> Sums:
    """Add the sums of disjoint parts, in any order."""
    return tuple(sum(lane) % PRIME for lane in zip((0,) * LANES, *sums))


def fold(words: torch.Tensor, axes: Sequence[Axis], key: Key) -> Sums:
    """Return the sum of word times numbers over an int32 tensor whose dims are `axes`: at least one
    dim, with any strides.

    Extra memory: one chunk as float64 (1 MiB on the CPU, 128 MiB on other devices; less with the
    kernel), and up to 128 MiB of digits, which are kept for the next tensor of the same geometry.
    """
    if words.device.type == "cpu" and (loop := kernel()) is not None:
        return add_sums(*(sums for matrix in matrices(words, axes) for sums in fold_matrix(loop, matrix, key)))
    return add_sums(*(_join(term.digits.tolist()) for term in terms(words, axes, key)))


def fold_each(rows: torch.Tensor, axes: Sequence[Axis], key: Key) -> list[Sums]:
    """Return `fold` of each of many small int32 CPU tensors of one layout, given as (tensors, words
    in row-major order).

    All axes are columns here, so that one product sums all tensors: for small ones, calls take most
    of the time.
    """
    total = zeros((LANES, len(rows)))
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
    """Return all sums as soon as they are computed. They are copied to the host together."""
    rows = torch.stack([term.digits for term in found]).tolist() if found else []
    return [_join(row) for row in rows]


def terms(words: torch.Tensor, axes: Sequence[Axis], key: Key) -> Iterator[Term]:
    """Yield the terms of `fold`. On a device, each is only submitted, not waited for."""
    for matrix in matrices(words, axes):
        column_limbs = _limbs(key, matrix.column_axes, matrix.columns, words.device)
        row_limbs = _limbs(key, matrix.row_axes, matrix.rows, words.device)
        digits = _contract(matrix.words, len(matrix.rows), row_limbs, column_limbs)
        yield Term(digits, (row_limbs, column_limbs))


_KEPT_BYTES = 128 << 20
_KEPT = 512
_kept: dict[tuple[Key, Axes, Tile, torch.device], torch.Tensor] = {}
"""Digits, by what they belong to, most recently used last."""
_lock = Lock()


def _limbs(key: Key, axes: Axes, tile: Tile, device: torch.device) -> torch.Tensor:
    """Return the digits of the products of the axes' numbers over a tile, (LANES * LIMBS, places of
    the tile), float64."""
    place = key, axes, tile, device
    with _lock:
        found = _kept.pop(place, None)
        if found is not None:
            _kept[place] = found
            return found
    found = torch.from_numpy(to_limbs(_products(key, axes, tile))).to(device)
    with _lock:
        _kept[place] = found
        excess = sum(digits.nbytes for digits in _kept.values()) - _KEPT_BYTES
        while excess > 0 or len(_kept) > _KEPT:
            excess -= _kept.pop(next(iter(_kept))).nbytes
    return found


def _products(key: Key, axes: Axes, tile: Tile) -> Residues:
    return products([axis.numbers(key, *span) for axis, span in zip(axes, tile)])


def _contract(words: torch.Tensor, first: int, row_limbs: torch.Tensor, column_limbs: torch.Tensor) -> torch.Tensor:
    """Return the digits of the sum over one tile. Axes before `first` are its rows, the others its
    columns."""
    rows, columns = row_limbs.shape[1], column_limbs.shape[1]
    if words.device.type == "cpu" and torch.get_num_threads() == 1:
        sums = torch.empty(rows, LANES * LIMBS, dtype=torch.float64, device="cpu")
        _multiply(words.numpy(), first, column_limbs.numpy().T, sums.numpy())
    else:
        (chunk, height), found = _chunk(rows, columns, words.device), []
        for tile in tiles(words.shape[:first], height):
            piece = cut(words, tile)
            values = chunk[: piece.numel()]
            values.view(piece.shape).copy_(piece)
            found.append(values.view(-1, columns) @ column_limbs.t())
        sums = torch.cat(found)
    high = torch.round(sums * 2.0**-_HALF_BITS)
    low = sums - high * 2.0**_HALF_BITS
    return torch.stack((row_limbs @ low, row_limbs @ high)).flatten().to(torch.int64)


def _multiply(words: Array, first: int, limbs: Array, out: Array) -> None:
    """Compute words @ limbs into `out`, in one thread: numpy's BLAS multiplies such thin matrices
    faster than torch's."""
    columns, room, done = len(limbs), np.empty(CPU_WORDS), 0
    step = _ONE_THREAD // limbs.size * columns  # at least a row: there are no more than MAX_COLUMNS
    for tile in tiles(words.shape[:first], CPU_WORDS // columns):
        piece = cut(words, tile)
        values = room[: piece.size]
        np.copyto(values.reshape(piece.shape), piece)
        for start in range(0, piece.size, step):
            rows = values[start : start + step].reshape(-1, columns)
            np.matmul(rows, limbs, out=out[done : done + len(rows)])
            done += len(rows)


def _chunk(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return memory for some rows of words, and the number of rows, which is smaller if the device
    is nearly full."""
    height = max(1, (CPU_WORDS if device.type == "cpu" else DEVICE_WORDS) // columns)
    while True:
        try:
            return torch.empty(min(height, rows) * columns, dtype=torch.float64, device=device), height
        except torch.OutOfMemoryError:
            if height * columns <= CPU_WORDS:
                raise
            height = min(height, rows) // 4 or 1


def _join(parts: list[int]) -> Sums:
    """Combine digits: from all sums[half][lane][row digit][lane][column digit], those of one lane each."""
    return tuple(sum(map(operator.mul, of_lane(parts), _WORTH)) % PRIME for of_lane in _OF_LANE)


_PLACES = [(half, i, j) for half in range(2) for i in range(LIMBS) for j in range(LIMBS)]
_WORTH = [1 << (_HALF_BITS * half + LIMB_BITS * (i + j)) for half, i, j in _PLACES]
_ROWS = LANES * LIMBS
_OF_LANE = [
    operator.itemgetter(*(_ROWS * (_ROWS * half + LIMBS * k + i) + LIMBS * k + j for half, i, j in _PLACES))
    for k in range(LANES)
]


_COPY_WORDS = 1 << 17  # 512 KiB, which stay in a cache
THREAD_WORDS = 1 << 20
"""Minimum number of words per thread: for fewer, starting a thread takes longer than it saves."""


def fold_matrix(kernel: Kernel, matrix: Matrix, key: Key) -> list[tuple[int, int]]:
    """Return sums that add up to that over the words: in place, on torch's threads, if each row is
    contiguous, and otherwise from copies."""
    columns = table(key, matrix.column_axes, matrix.columns)
    numbers = _row_numbers(key, matrix.row_axes, matrix.rows)
    height, words = numbers.shape[1], matrix.words
    width = words.numel() // height
    try:
        rows = words.view(height, width)
    except RuntimeError:  # no one step leads from row to row, or from column to column
        return _fold_copies(kernel, words, width, columns, numbers)
    if width > 1 and rows.stride(1) != 1:
        return _fold_copies(kernel, words, width, columns, numbers)
    data = rows.numpy()
    threads = min(height, torch.get_num_threads(), words.numel() // THREAD_WORDS)
    if threads <= 1:
        return [kernel.fold(data, columns, numbers)]
    spans = list(itertools.pairwise(height * i // threads for i in range(threads + 1)))
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-fingerprint") as pool:
        return list(pool.map(lambda span: kernel.fold(data[slice(*span)], columns, numbers[:, slice(*span)]), spans))


def _fold_copies(
    kernel: Kernel, words: torch.Tensor, width: int, columns: Ints32, numbers: Residues
) -> list[tuple[int, int]]:
    """Process some rows at a time, in one buffer."""
    leading = next(d for d in range(words.ndim + 1) if math.prod(words.shape[d:]) == width)
    step = max(1, _COPY_WORDS // width)
    room = torch.empty(min(step, numbers.shape[1]) * width, dtype=torch.int32, device="cpu")
    found, done = [], 0
    for tile in tiles(words.shape[:leading], step):
        piece = cut(words, tile)
        values = room[: piece.numel()]
        values.view(piece.shape).copy_(piece)
        rows = values.view(-1, width).numpy()
        found.append(kernel.fold(rows, columns, numbers[:, done : done + len(rows)]))
        done += len(rows)
    return found


@lru_cache(maxsize=64)
def table(key: Key, axes: Axes, tile: Tile) -> Ints32:
    """Return the products of the axes' numbers over a tile of columns, in the form for the kernel.
    There must be a kernel."""
    loop = kernel()
    assert loop is not None
    return loop.table(_products(key, axes, tile))


@lru_cache(maxsize=64)
def _row_numbers(key: Key, axes: Axes, tile: Tile) -> Residues:
    return np.ascontiguousarray(_products(key, axes, tile))
