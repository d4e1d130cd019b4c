"""Obeys a load plan: finds the bytes of every item first, and only then copies them into the targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planners.box import Box
from planners.load_plan import ReadItem
from planners.overlap import Sweep
from reshard.errors import DamagedCheckpointError
from reshard.formats.base import Place, StoredChunk, StoredTensor
from reshard.formats.copying import copy_place
from reshard.formats.source import FileSource, Source

__all__ = ["Copy", "find_copies", "run_copies", "spans_by_file"]

Array = npt.NDArray[Any]

PIECE_BYTES = 16 << 20
"""Copies are cut into pieces of about this size, so that threads share a large one."""
_MANY_CHUNKS = 8
_SMALL_RUN_BYTES = 64 << 10


@dataclass(frozen=True)
class Copy:
    """Elements at a place of a file, and the array of equal sizes that they go into."""

    item: ReadItem
    place: Place
    out: Array


class _Finder:
    """The stored chunks that make up a saved chunk, found without looking at all of them each time."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self._sweep = Sweep(enumerate(stored.boxes)) if len(stored.chunks) > _MANY_CHUNKS else None

    def within(self, chunk: Box, box: Box) -> Iterator[tuple[StoredChunk, Box]]:
        """(stored chunk, what it has of `box`) for all that lie in `chunk`."""
        if self._sweep is not None:
            found = ((self.stored.chunks[int(i)], common) for i, _, common in self._sweep.meeting(box))
        else:
            pairs = ((c, c.box & box) for c in self.stored.chunks)
            found = ((c, common) for c, common in pairs if common is not None)
        return ((c, common) for c, common in found if chunk.contains(c.box))


def find_copies(
    items: Sequence[ReadItem], stored: Callable[[str], StoredTensor], target: Callable[[ReadItem], Array]
) -> list[Copy]:
    """Where the bytes of every item are. Touches no target.

    Args:
        stored: the stored tensor of an item's name.
        target: the array of the local tensor that an item goes into.

    Raises DamagedCheckpointError, naming tensor and file, if the bytes of an item are not all there.
    """
    finders: dict[str, _Finder] = {}
    copies: list[Copy] = []
    for item in items:
        finder = finders.get(item.fqn)
        if finder is None:
            finder = finders[item.fqn] = _Finder(stored(item.fqn))
        whole = target(item)
        box, taken = item.box, 0
        used: list[Box] = []
        for chunk, common in finder.within(item.chunk, box):
            if any(common & other is not None for other in used):
                continue  # stored twice; the first one will do
            used.append(common)
            place = chunk.place
            window = place.window.crop(common.relative_to(chunk.box))
            try:
                place.source.check(window.offset, window.stop)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"tensor {item.fqn!r}, {common}: {error}") from None
            at = common.relative_to(box).shift(item.target.offsets)
            copies.append(Copy(item, place.with_window(window), whole[at.slices] if at.ndim else whole))
            taken += common.numel
        if taken != box.numel:
            raise DamagedCheckpointError(
                f"tensor {item.fqn!r}: of {box}, only {taken} of {box.numel} elements are stored"
            )
    return copies


def run_copies(
    copies: Sequence[Copy],
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Copy everything, file by file in order of position, on several threads; returns the bytes that were copied.

    Args:
        threads: at most as many; default: one for each processor, up to 8.
        on_bytes: called with the bytes of each piece that is done, on any thread.
    """
    pieces = [piece for copy in _in_file_order(copies) for piece in _pieces(copy)]

    def work(piece: tuple[Place, Array]) -> int:
        place, out = piece
        copy_place(place, out)
        nbytes = place.window.nbytes
        if on_bytes is not None:
            on_bytes(nbytes)
        return nbytes

    workers = threads or min(8, os.cpu_count() or 1)
    if workers == 1 or len(pieces) <= 1:
        return sum(map(work, pieces))
    with ThreadPoolExecutor(workers, thread_name_prefix="reshard-read") as pool:
        return sum(pool.map(work, pieces, chunksize=max(1, len(pieces) // (workers * 16))))


def _in_file_order(copies: Sequence[Copy]) -> list[Copy]:
    return sorted(copies, key=lambda copy: (copy.place.source.label, copy.place.window.offset))


def _pieces(copy: Copy) -> Iterator[tuple[Place, Array]]:
    """The copy, cut along its longest dim if it is large."""
    window, out = copy.place.window, copy.out
    if window.nbytes <= 2 * PIECE_BYTES or not window.sizes:
        yield copy.place, out
        return
    d = int(np.argmax(window.sizes)) if window.sizes[0] * 4 < max(window.sizes) else 0
    step = max(1, window.sizes[d] * PIECE_BYTES // window.nbytes)
    for start in range(0, window.sizes[d], step):
        size = min(step, window.sizes[d] - start)
        offsets = tuple(start if i == d else 0 for i in range(len(window.sizes)))
        box = Box.of(offsets, tuple(size if i == d else n for i, n in enumerate(window.sizes)))
        yield copy.place.with_window(window.crop(box)), out[box.slices]


def spans_by_file(copies: Iterable[Copy]) -> dict[FileSource, list[tuple[int, int]]]:
    """The byte ranges of each file that are read without gaps, merged and in order. Finely strided reads are left out:
    alone they never cover a block of a checksum."""
    spans: dict[FileSource, list[tuple[int, int]]] = {}
    for copy in copies:
        source: Source = copy.place.source
        runs = copy.place.window.runs()
        if isinstance(source, FileSource) and (runs.count == 1 or runs.run_bytes >= _SMALL_RUN_BYTES):
            spans.setdefault(source, []).extend((start, start + length) for start, length in runs)
    return {source: list(_merged(sorted(ranges))) for source, ranges in spans.items()}


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted ranges with those that touch or overlap put together."""
    begin, end = -1, -1
    for start, stop in ranges:
        if start > end:
            if end > begin:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end > begin:
        yield begin, end
