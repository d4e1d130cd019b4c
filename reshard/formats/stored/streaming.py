"""Regions of stored tensors as a stream of row-major bytes: one piece at a time, the next ones read ahead meanwhile.

    with stream(regions) as feed:
        for region in regions:
            for piece in feed.take(region):
                out.write(piece.data)

Memory is `DEPTH` pieces of at most `PIECE_BYTES`, however large the tensors are. Pieces of files of this machine are
smaller, so that they are still in the processor's cache when they are hashed and written. They are copied and not
mapped: that takes about as long, but goes on beside the writing of the piece before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from reshard.errors import ReshardError
from reshard.formats.stored.copying import copy_place
from reshard.formats.stored.source import FileSource
from reshard.formats.stored.tensor import StoredTensor, check_cover
from reshard.state.dtypes import dtype_from_name
from reshard.state.memory.arrays import item_dtype

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["PIECE_BYTES", "Feed", "Piece", "Region", "stream", "windows"]

PIECE_BYTES = 16 << 20
"""The most that is read at once."""
NEAR_PIECE_BYTES = 2 << 20
"""The same, of a file that is mapped: then a read is a short call, and no request."""
DEPTH = 3
"""Pieces in memory: one that is written, and those that are read meanwhile."""
_RELEASE_BYTES = 64 << 20
"""After so many bytes the mapped pages of the files are given back."""


@dataclass(frozen=True)
class Region:
    """A box of a stored tensor, in the tensor's coordinates."""

    stored: StoredTensor
    box: Box

    @classmethod
    def whole(cls, stored: StoredTensor) -> Region:
        """The whole tensor."""
        return cls(stored, Box.full(stored.spec.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.numel * self.stored.itemsize


@dataclass(frozen=True)
class Piece:
    """Some rows of a region; valid until the next piece is taken."""

    box: Box
    """In the coordinates of the whole tensor."""
    data: memoryview
    """The elements, row-major."""
    dtype: str

    def tensor(self) -> torch.Tensor:
        """The elements as a tensor that shares the piece's memory."""
        raw = torch.frombuffer(self.data, dtype=torch.uint8)
        return raw.view(dtype_from_name(self.dtype)).view(self.box.sizes)


def windows(shape: Sequence[int], itemsize: int, max_bytes: int = PIECE_BYTES) -> Iterator[Box]:
    """Boxes of at most about `max_bytes` that make up `shape`, row-major; none where there is no element."""
    if 0 in shape:
        return
    lead, inner = 0, math.prod(shape) * itemsize
    while lead < len(shape) and inner > max_bytes:
        inner //= shape[lead]
        lead += 1
    if not lead:
        yield Box.full(shape)
        return
    step = max(1, max_bytes // max(inner, 1))
    outer, cut, rest = tuple(shape[: lead - 1]), shape[lead - 1], tuple(shape[lead:])
    for prefix in np.ndindex(*outer):
        for start in range(0, cut, step):
            size = min(step, cut - start)
            yield Box.of((*prefix, start, *(0,) * len(rest)), (*(1,) * len(prefix), size, *rest))


class Feed:
    """The pieces of some regions, in order."""

    def __init__(self, regions: Iterable[Region], seen: Callable[[Region, Piece], None] | None = None) -> None:
        self._seen = seen
        self._tasks = self._all_windows(regions)
        self._buffers: deque[Array] = deque(np.empty(0, np.uint8) for _ in range(DEPTH))
        self._pending: deque[tuple[Box, str, Array, Future[memoryview]]] = deque()
        self._pool = ThreadPoolExecutor(DEPTH - 1, thread_name_prefix="reshard-stream")
        self._sources: set[FileSource] = set()
        self._read_bytes = 0
        self._last: Array | None = None

    @staticmethod
    def _all_windows(regions: Iterable[Region]) -> Iterator[tuple[_Reader, Box]]:
        for region in regions:
            reader = _Reader(region)
            for box in windows(region.box.sizes, region.stored.itemsize, _piece_bytes(region)):
                yield reader, box.shift(region.box.offsets)

    def take(self, region: Region) -> Iterator[Piece]:
        """The pieces of `region`, which must be the next one. Raises what reading raises."""
        for _ in windows(region.box.sizes, region.stored.itemsize, _piece_bytes(region)):
            piece = self._next()
            if self._seen is not None:
                self._seen(region, piece)
            yield piece

    def _next(self) -> Piece:
        if self._last is not None:
            self._buffers.append(self._last)
            self._last = None
        while self._buffers and self._submit():
            pass
        if not self._pending:
            raise ReshardError("more pieces were taken of a stream than its regions have")
        box, dtype, buffer, future = self._pending.popleft()
        data = future.result()
        self._last = buffer
        return Piece(box, data, dtype)

    def _submit(self) -> bool:
        task = next(self._tasks, None)
        if task is None:
            return False
        reader, box = task
        nbytes = box.numel * reader.stored.itemsize
        buffer = self._buffers.popleft()
        if len(buffer) < nbytes:
            buffer = np.empty(max(nbytes, min(2 * len(buffer), PIECE_BYTES)), np.uint8)
        loading = self._pool.submit(self._load, reader, box, buffer[:nbytes])
        self._pending.append((box, reader.stored.spec.dtype, buffer, loading))
        return True

    def _load(self, reader: _Reader, box: Box, buffer: Array) -> memoryview:
        """The bytes of a box; on a thread of the pool."""
        self._sources.update(reader.read(box, buffer.view(item_dtype(reader.stored.itemsize)).reshape(box.sizes)))
        self._read_bytes += buffer.nbytes
        if self._read_bytes >= _RELEASE_BYTES:
            self._read_bytes = 0
            sources, self._sources = self._sources, set()
            for source in sources:
                source.release()
        return memoryview(cast("Any", buffer))  # numpy's types know buffers from 3.12 on

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for source in self._sources:
            source.release()


def stream(regions: Iterable[Region], seen: Callable[[Region, Piece], None] | None = None) -> Feed:
    """The feed of these regions; `seen` is called with each piece that is taken, before it is."""
    return Feed(regions, seen)


def _piece_bytes(region: Region) -> int:
    """How much of a region is read at once. Asks where the first of its chunks is, which has to be known anyway."""
    chunk = next((chunk for chunk, _ in region.stored.meeting(region.box)), None)
    near = chunk is not None and isinstance(chunk.source, FileSource) and chunk.source.view() is not None
    return NEAR_PIECE_BYTES if near else PIECE_BYTES


class _Reader:
    """Reads boxes of one region."""

    def __init__(self, region: Region) -> None:
        self.stored = region.stored
        self._region = region
        self._checked = False

    def _check(self) -> None:
        if not self._checked:  # twice, if two threads come at once: no harm
            check_cover(self.stored, self._region.box)
            self._checked = True

    def read(self, box: Box, out: Array) -> set[FileSource]:
        """Fill `out`, an array of the box's sizes; returns the files that were read."""
        self._check()
        sources: set[FileSource] = set()
        for chunk, common in self.stored.meeting(box):
            place = chunk.place
            window = place.window.crop(common.relative_to(chunk.box))
            for part in _narrow(window):
                inner: Any = (*part.shift(common.relative_to(box).offsets).slices, ...)  # no dims: still an array
                near = window.crop(part)
                copy_place(place.with_window(near), out[inner], passing=True)
                if isinstance(place.source, FileSource):
                    sources.add(place.source)
                    if part.sizes != window.sizes:
                        place.source.unmap(near.offset, near.stop - near.offset)
        return sources


def _narrow(window: Window) -> Iterator[Box]:
    """The window in parts that lie close together: of a mapped file, all pages between count as memory when touched."""
    span = window.stop - window.offset
    dims = [d for d, n in enumerate(window.sizes) if n > 1]
    if span <= PIECE_BYTES or window.is_contiguous or not dims:
        yield Box.full(window.sizes)
        return
    far = max(dims, key=lambda d: window.strides[d])
    step = max(1, PIECE_BYTES // max(window.strides[far], 1))
    for start in range(0, window.sizes[far], step):
        size = min(step, window.sizes[far] - start)
        offsets = tuple(start if d == far else 0 for d in range(len(window.sizes)))
        yield Box.of(offsets, tuple(size if d == far else n for d, n in enumerate(window.sizes)))
