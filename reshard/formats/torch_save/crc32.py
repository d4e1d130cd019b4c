"""CRC-32 of records without taking it of all their bytes one after another: out of those of their parts.

Parts can be summed on several threads, or not at all: behind each record of a zip archive
stands the CRC that was written with it, and a tensor that is put together from such records takes theirs along.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from planners.geometry.byteruns import Window
from reshard.formats.stored.checksums import combined
from reshard.formats.stored.streaming import Region
from reshard.formats.stored.tensor import Place

__all__ = ["summing", "written_crc"]

_DESCRIPTOR = b"PK\x07\x08"
_LENGTHS = (struct.Struct("<4sIQQ"), struct.Struct("<4sIII"))
"""Of a descriptor: with sizes of 64 bits or of 32."""

_PART_BYTES = 1 << 20
"""What one thread sums at a time."""


def summing(data: memoryview, pool: Executor) -> list[tuple[Future[int], int]]:
    """The parts of some bytes, their CRCs being taken by the threads of a pool, and their lengths."""
    parts = [data[at : at + _PART_BYTES] for at in range(0, data.nbytes, _PART_BYTES)]
    return [(pool.submit(zlib.crc32, part), part.nbytes) for part in parts]


def written_crc(region: Region) -> int | None:
    """CRC-32 of a region's bytes in row-major order, out of those that stand in the files beside its chunks.

    None unless there is one beside each of its chunks, and these follow one another as they are.
    """
    boxes = Window.row_major(0, region.box.sizes, region.stored.itemsize)
    found: list[tuple[int, int, int]] = []
    for chunk, common in region.stored.meeting(region.box):
        run = boxes.crop(common.relative_to(region.box))
        crc = _beside(chunk.place) if common == chunk.box and run.is_contiguous else None
        if crc is None:
            return None
        found.append((run.offset, run.nbytes, crc))
    return _joined(sorted(found), region.nbytes)


def _joined(runs: Sequence[tuple[int, int, int]], nbytes: int) -> int | None:
    """Of (start, length, CRC) in order; None if that leaves something out of `nbytes`, or has it twice."""
    crc = done = 0
    for start, length, one in runs:
        if start != done:
            return None
        crc = combined(crc, one, length)
        done += length
    return crc if done == nbytes else None


def _beside(place: Place) -> int | None:
    """The CRC that stands behind the bytes of a whole record, if reading it is no request of its own."""
    if place.descriptor_at is None or place.conjugate or not place.window.is_contiguous:
        return None
    view = place.source.view()
    if view is None:
        return None
    for form in _LENGTHS:
        data = view[place.descriptor_at : place.descriptor_at + form.size]
        if len(data) == form.size:
            mark, crc, *sizes = form.unpack(data)
            if mark == _DESCRIPTOR and sizes == [place.window.nbytes] * 2:
                return crc or None  # torch writes 0 where it was told to write none
    return None
