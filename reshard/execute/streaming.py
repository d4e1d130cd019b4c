"""Regions of stored tensors as a stream of row-major bytes: one piece at a time, the next ones read ahead meanwhile.

    with stream(regions) as feed:
        for region in regions:
            for piece in feed.take(region):
                out.write(piece.data)

Memory is `DEPTH` pieces of at most `PIECE_BYTES`, however large the tensors are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from planners.box import Box
from planners.overlap import Sweep
from reshard.dtypes import dtype_from_name
from reshard.errors import ReshardError
from reshard.formats.base import StoredTensor
from reshard.formats.copying import copy_place, item_dtype
from reshard.formats.cover import check_cover
from reshard.formats.source import FileSource

__all__ = ["PIECE_BYTES", "Feed", "Piece", "Region", "stream", "windows"]

PIECE_BYTES = 16 << 20
"""The most that is read at once."""
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

    def __init__(self, regions: Iterable[Region]) -> None:
        self._tasks = self._all_windows(regions)
        self._buffers: deque[np.ndarray[Any, Any]] = deque(np.empty(0, np.uint8) for _ in range(DEPTH))
        self._pending: deque[tuple[Box, str, np.ndarray[Any, Any], Future[None]]] = deque()
        self._pool = ThreadPoolExecutor(DEPTH - 1, thread_name_prefix="reshard-stream")
        self._sources: set[FileSource] = set()
        self._read_bytes = 0
        self._last: np.ndarray[Any, Any] | None = None

    @staticmethod
    def _all_windows(regions: Iterable[Region]) -> Iterator[tuple[_Reader, Box]]:
        for region in regions:
            reader = _Reader(region)
            for box in windows(region.box.sizes, region.stored.itemsize):
                yield reader, box.shift(region.box.offsets)

    def take(self, region: Region) -> Iterator[Piece]:
        """The pieces of `region`, which must be the next one. Raises what reading raises."""
        for _ in windows(region.box.sizes, region.stored.itemsize):
            yield self._next()

    def _next(self) -> Piece:
        if self._last is not None:
            self._buffers.append(self._last)
            self._last = None
        while self._buffers and self._submit():
            pass
        if not self._pending:
            raise ReshardError("more pieces were taken of a stream than its regions have")
        box, dtype, buffer, future = self._pending.popleft()
        future.result()
        nbytes = box.numel * dtype_from_name(dtype).itemsize
        self._last = buffer
        return Piece(box, memoryview(buffer[:nbytes]), dtype)  # type: ignore[arg-type]  # numpy's types, before 3.12

    def _submit(self) -> bool:
        task = next(self._tasks, None)
        if task is None:
            return False
        reader, box = task
        stored = reader.stored
        nbytes = box.numel * stored.itemsize
        buffer = self._buffers.popleft()
        if len(buffer) < nbytes:
            buffer = np.empty(max(nbytes, min(2 * len(buffer), PIECE_BYTES)), np.uint8)
        out = buffer[:nbytes].view(item_dtype(stored.itemsize)).reshape(box.sizes)
        self._pending.append((box, stored.spec.dtype, buffer, self._pool.submit(self._read, reader, box, out)))
        return True

    def _read(self, reader: _Reader, box: Box, out: np.ndarray[Any, Any]) -> None:
        self._sources.update(reader.read(box, out))
        self._read_bytes += out.nbytes
        if self._read_bytes >= _RELEASE_BYTES:
            self._read_bytes = 0
            sources, self._sources = self._sources, set()
            for source in sources:
                source.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for source in self._sources:
            source.release()


def stream(regions: Iterable[Region]) -> Feed:
    """The feed of these regions."""
    return Feed(regions)


class _Reader:
    """Reads boxes of one region; knows which chunks meet a box without looking at all of them each time."""

    _MANY = 8

    def __init__(self, region: Region) -> None:
        self.stored = region.stored
        self._region = region
        self._sweep: Sweep | None = None
        self._checked = False

    def read(self, box: Box, out: np.ndarray[Any, Any]) -> set[FileSource]:
        """Fill `out`, an array of the box's sizes; returns the files that were read."""
        if not self._checked:  # twice, if two threads come at once: no harm
            check_cover(self.stored, self._region.box)
            if len(self.stored.chunks) > self._MANY:
                self._sweep = Sweep(enumerate(self.stored.boxes))
            self._checked = True
        sources: set[FileSource] = set()
        for number, common in self._meeting(box):
            chunk = self.stored.chunks[number]
            place = chunk.place
            window = place.window.crop(common.relative_to(chunk.box))
            inner: Any = (*common.relative_to(box).slices, ...)  # an array also where there are no dims
            copy_place(place.with_window(window), out[inner])
            if isinstance(place.source, FileSource):
                sources.add(place.source)
        return sources

    def _meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        if self._sweep is not None:
            yield from ((int(i), common) for i, _, common in self._sweep.meeting(box))
            return
        for number, chunk in enumerate(self.stored.chunks):
            common = chunk.box & box
            if common is not None:
                yield number, common
