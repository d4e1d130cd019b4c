"""Views of stored tensors, such as slices, stacks, concatenations, and pieces of flat buffers.
Nothing is read."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from planners.geometry.box import Box, Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec, flat_boxes
from reshard.errors import CorruptCheckpointError
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor, is_near, same_bytes

_log = logging.getLogger("reshard")


# A stored tensor is a set of pairs (box, window). The functions here only map boxes to boxes and
# windows to windows. So each result is again a stored tensor, lazy and byte-exact:
#
#     stack [3, 4, 5]  --unstack-->  three of [4, 5]         flat [20]  --unflatten-->  [4, 5]
#     halves [2, 5] + [2, 5]  --concat(dim 0)-->  [4, 5]     rows [6, 5]  --narrow(0, 0, 4)-->  [4, 5]


Piece = tuple[Box, StoredTensor]
"""A box of a tensor, and the stored tensor of the same sizes that fills it."""


def _of_chunks(of: StoredTensor, fqn: str, shape: Sequence[int], chunks: Iterable[StoredChunk]) -> StoredTensor:
    """Return a tensor of these chunks, with the dtype of `of`."""
    return StoredTensor(TensorSpec(fqn, shape, of.spec.dtype), tuple(chunks))


def unstack(tensor: StoredTensor, names: Sequence[str]) -> list[StoredTensor]:
    """Return `tensor[i]` under `names[i]` for every i, such as the layers or experts of a stack.
    Inverse of `stack`."""
    chunks: list[list[StoredChunk]] = [[] for _ in names]
    for chunk in tensor.chunks:
        for at in range(chunk.box.sizes[0]):
            chunks[chunk.box.offsets[0] + at].append(_row(chunk, at))
    return [_of_chunks(tensor, fqn, tensor.spec.shape[1:], of) for fqn, of in zip(names, chunks)]


def _row(chunk: StoredChunk, at: int) -> StoredChunk:
    """Return the elements of a chunk at index `at` of its first dim, without that dim."""

    def change(w: Window) -> Window:
        return Window(w.offset + at * w.strides[0], w.sizes[1:], w.strides[1:], w.itemsize)

    return chunk.derived(Box(chunk.box.offsets[1:], chunk.box.sizes[1:]), change)


def narrow(tensor: StoredTensor, dim: int, start: int, stop: int) -> StoredTensor:
    """Return `tensor[..., start:stop, ...]`, such as the true rows of a padded vocabulary, or one
    half of two joined tensors."""
    region = Box.full(tensor.spec.shape).cut(dim, start, stop)
    back = [-o for o in region.offsets]
    parts = [(chunk, common) for chunk in tensor.chunks if (common := chunk.box & region) is not None]
    return _of_chunks(tensor, tensor.fqn, region.sizes, (chunk.crop(common).shift(back) for chunk, common in parts))


def assemble(fqn: str, shape: Sequence[int], pieces: Iterable[Piece]) -> StoredTensor:
    """Return a tensor of `shape`, assembled from stored tensors that fill boxes of it.

    Raises CorruptCheckpointError if a piece has other sizes than its box, or pieces have different
    dtypes.
    """
    found = list(pieces)
    if not found:
        raise CorruptCheckpointError(f"tensor {fqn!r} of shape {list(shape)}: no file holds any part of it")
    dtypes = sorted({piece.spec.dtype for _, piece in found})
    if len(dtypes) > 1:
        raise CorruptCheckpointError(f"tensor {fqn!r}: its parts have different dtypes: {', '.join(dtypes)}")
    chunks: list[StoredChunk] = []
    for region, piece in found:
        if piece.spec.shape != region.sizes:
            raise CorruptCheckpointError(
                f"tensor {fqn!r}: {piece.fqn!r} has shape {list(piece.spec.shape)}, but {list(region.sizes)} is wanted "
                f"at {region} of {list(shape)}; the files of different ranks do not fit together"
            )
        chunks += [chunk.shift(region.offsets) for chunk in piece.chunks]
    return StoredTensor(TensorSpec(fqn, shape, dtypes[0]), tuple(chunks))


def concat(parts: Sequence[StoredTensor], dim: int, fqn: str) -> StoredTensor:
    """Concatenate tensors along `dim`. Raises CorruptCheckpointError if their other dims differ."""
    first = parts[0].spec.shape if parts else (0,)
    at, pieces = 0, []
    for part in parts:
        shape = part.spec.shape
        whole = (*first[:dim], *shape[dim : dim + 1], *first[dim + 1 :])
        if len(shape) <= dim or shape != whole:
            shapes = " and ".join(str(list(p.spec.shape)) for p in parts)
            raise CorruptCheckpointError(f"tensor {fqn!r}: parts of shapes {shapes} cannot be joined along dim {dim}")
        pieces.append((Box.full(shape).cut(dim, at, at + shape[dim]), part))
        at += shape[dim]
    return assemble(fqn, (*first[:dim], at, *first[dim + 1 :]), pieces)


def stack(parts: Sequence[StoredTensor], fqn: str) -> StoredTensor:
    """Stack tensors along a new dim 0. Raises CorruptCheckpointError if their shapes differ.
    Inverse of `unstack`."""
    shape = parts[0].spec.shape
    pieces = [(Box((i, *(0,) * len(shape)), (1, *shape)), _with_leading_dim(part)) for i, part in enumerate(parts)]
    return assemble(fqn, (len(parts), *shape), pieces)


def _with_leading_dim(tensor: StoredTensor) -> StoredTensor:
    def change(w: Window) -> Window:
        return Window(w.offset, (1, *w.sizes), (0, *w.strides), w.itemsize)

    chunks = (c.derived(Box((0, *c.box.offsets), (1, *c.box.sizes)), change) for c in tensor.chunks)
    return _of_chunks(tensor, tensor.fqn, (1, *tensor.spec.shape), chunks)


class _ChunkCopies(StoredChunk):
    """The first of several chunks that should be equal. They are compared when it is located."""

    __slots__ = ("_chunks", "_drift", "_dtype", "_refuse")

    def __init__(
        self, chunks: Sequence[StoredChunk], dtype: str, refuse: Callable[[str], NoReturn], drift: float
    ) -> None:
        self._chunks, self._dtype, self._refuse, self._drift = chunks, dtype, refuse, drift
        super().__init__(chunks[0].box, self._compared, chunks[0].owner)

    def _compared(self) -> Extent:
        first, *others = (chunk.place for chunk in self._chunks)
        for other in others:
            if same_bytes(first, other, self._dtype):
                continue
            where = f"{first.source.label} and {other.source.label}"
            if not is_near(first, other, self._dtype, self._drift):
                self._refuse(where)
            _log.warning("the ranks' copies in %s differ slightly: the first rank's copy is used", where)
        return first

    def derived(self, box: Box, change: Callable[[Window], Window]) -> StoredChunk:
        chunks = [chunk.derived(box, change) for chunk in self._chunks]
        return chunks[0] if self.is_located else _ChunkCopies(chunks, self._dtype, self._refuse, self._drift)


def copies(
    fqn: str,
    tensors: Sequence[StoredTensor],
    refuse: Callable[[str], NoReturn],
    drift: float = 0.0,
) -> StoredTensor:
    """Return the first of several tensors of one shape and dtype that should be equal.

    They are compared where it is read. `refuse` is called with the files of two that differ by more
    than `drift` times the largest value.
    """
    rows = [[chunk] for chunk in tensors[0].chunks]
    for tensor in tensors[1:]:
        rows = [
            [part.crop(common) for part in (*row, chunk)]
            for row in rows
            for chunk, common in tensor.meeting(row[0].box)
        ]
    first = tensors[0]
    chunks = (_ChunkCopies(row, first.spec.dtype, refuse, drift) for row in rows)
    return _of_chunks(first, fqn, first.spec.shape, chunks)


def unflatten(tensor: StoredTensor, shape: Sequence[int], fqn: str) -> StoredTensor:
    """Return a 1-D tensor as one of `shape`, row-major. Raises CorruptCheckpointError if the number
    of elements differs."""
    if len(tensor.spec.shape) != 1 or tensor.spec.numel != math.prod(shape):
        raise CorruptCheckpointError(
            f"tensor {fqn!r} of shape {list(shape)}: {tensor.fqn!r} should hold its {math.prod(shape)} elements in one "
            f"row, but has shape {list(tensor.spec.shape)}"
        )
    shape = tuple(shape)
    chunks: list[StoredChunk] = []
    for chunk in tensor.chunks:
        chunks += flat_piece(chunk, shape, chunk.box.offsets[0])
    return _of_chunks(tensor, fqn, shape, chunks)


def cut(flat: StoredTensor, start: int, shape: Sequence[int], fqn: str) -> StoredTensor:
    """Return the elements from `start` of a 1-D tensor, which contains several flattened tensors,
    as a tensor of `shape`."""
    return unflatten(narrow(flat, 0, start, start + math.prod(shape)), shape, fqn)


def flat_piece(chunk: StoredChunk, shape: Shape, start: int) -> list[StoredChunk]:
    """Return a 1-D chunk as chunks of `shape`. It contains the elements from `start` of the
    row-major flattened tensor."""
    pieces, at = [], 0
    for box in flat_boxes(shape, start, start + chunk.box.sizes[0]):
        pieces.append(chunk.derived(box, _folded(at, box.sizes)))
        at += box.numel
    return pieces


def _folded(at: int, sizes: Shape) -> Callable[[Window], Window]:
    """Return a function that maps a 1-D window to one of `sizes` that begins at its element `at`."""
    steps = Window.row_major(0, sizes, 1).strides

    def change(w: Window) -> Window:
        stride = w.strides[0]
        return Window(w.offset + at * stride, sizes, tuple(s * stride for s in steps), w.itemsize)

    return change


def ungrid(tensor: StoredTensor, shape: Sequence[int], fqn: str) -> StoredTensor:
    """Return a tensor of `shape` that was split by a grid. It is stored as [cells along dim 0, ...,
    flattened cell].

        4 x 6 in a grid of 2 x 3   ->   stored [2, 3, 4]; the cell [1, 2] is rows 2:4 and columns 4:6

    Raises CorruptCheckpointError if the grid does not divide the shape.
    """
    shape = tuple(shape)
    grid = tensor.spec.shape[:-1]
    whole = len(grid) == len(shape) and all(g > 0 and n % g == 0 for n, g in zip(shape, grid))
    cell = tuple(n // g for n, g in zip(shape, grid)) if whole else ()
    if not whole or tensor.spec.shape[-1] != math.prod(cell):
        raise CorruptCheckpointError(
            f"tensor {fqn!r}: stored as {list(tensor.spec.shape)}, which is not a grid of flattened cells of its shape "
            f"{list(shape)}"
        )
    chunks: list[StoredChunk] = []
    for chunk in tensor.chunks:
        *leading, last = zip(chunk.box.offsets, chunk.box.sizes)
        for at in itertools.product(*(range(start, start + size) for start, size in leading)):
            flat = chunk.crop(Box((*at, last[0]), (*(1,) * len(at), last[1])))
            for _ in at:
                flat = _row(flat, 0)
            corner = [i * n for i, n in zip(at, cell)]
            chunks += [piece.shift(corner) for piece in flat_piece(flat, cell, last[0])]
    return _of_chunks(tensor, fqn, shape, chunks)
