"""What of a copy begins in which segment of its file; and segments, read and checked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from planners.geometry.byteruns import Window
from reshard.errors import DamagedCheckpointError
from reshard.execute.reading import Array, Copy, Staged, in_pieces
from reshard.execute.sharing.segments import segment_bytes
from reshard.formats.stored.checksums import BlockChecksums
from reshard.formats.stored.copying import copy_view
from reshard.formats.stored.source import BytesSource, FileSource
from reshard.formats.stored.tensor import Place

__all__ = [
    "TAIL_BYTES",
    "ByteCounts",
    "Check",
    "SegmentPart",
    "copy_parts",
    "has_whole_blocks",
    "parts_between",
    "parts_by_segment",
    "read_segment",
    "slot_bytes",
    "unchecked_bytes",
]

TAIL_BYTES = 64
"""Beyond its end a segment is read so much further: an element that begins in it may end there."""

Check = Callable[[FileSource, int, memoryview], int]
"""Compares bytes of a file, from a position on, with checksums, as far as there are some of just such bytes; returns of
how many bytes. Raises DamagedCheckpointError."""


@dataclass
class ByteCounts:
    """What reading by segments did, in bytes."""

    read: int = 0
    extra: int = 0
    """Of those read: that nobody asked for."""
    unchecked: int = 0
    """Of elements of files without a view: that were not compared with checksums."""
    received: int = 0
    """That other ranks read for this one."""


def slot_bytes(source: FileSource) -> int:
    """Memory for a segment and its tail: whole pages."""
    return segment_bytes(source) + 4096


class SegmentPart(NamedTuple):
    """The elements of a copy that begin in one segment."""

    window: Window
    """Counted from the start of the segment."""
    out: Array | Staged
    copy: Copy

    def as_copy(self, segment_start: int) -> Copy:
        """A copy of these elements alone, from the file whose segment begins at byte `segment_start`."""
        window = replace(self.window, offset=self.window.offset + segment_start)
        return Copy(self.copy.place.with_window(window), self.out)


def parts_by_segment(source: FileSource, copy: Copy) -> Iterator[tuple[int, list[SegmentPart]]]:
    """(number of a segment of `source`, the copy's file; the parts of the copy that begin in it), ascending."""
    window, size = copy.place.window, segment_bytes(source)
    first, offset = divmod(window.offset, size)
    for number, parts in enumerate(
        _windows_by_segment(Window(offset, window.sizes, window.strides, window.itemsize), size)
    ):
        if parts:
            yield first + number, [SegmentPart(part, copy.out[index], copy) for index, part in parts]


@lru_cache(maxsize=1024)  # tensors of the same shape that lie alike in their segments are cut alike
def _windows_by_segment(window: Window, size: int) -> list[list[tuple[Any, Window]]]:
    """For each segment of `size` bytes: the indices of the elements of a window that begin in it, and their window,
    counted from the start of the segment."""
    out = []
    for start in range(0, window.stop, size):
        parts = [(box, window.crop(box)) for box in window.within(start, start + size)]
        # the dots make it a view, also of a 0-d array
        out.append([((*box.slices, ...), replace(part, offset=part.offset - start)) for box, part in parts])
    return out


def parts_between(parts: Iterable[SegmentPart], start: int, stop: int) -> Iterator[SegmentPart]:
    """What of some parts begins in bytes [start, stop) of their segment, with windows counted from `start`."""
    index: Any
    for window, out, copy in parts:
        for box in window.within(start, stop):
            part, index = window.crop(box), (*box.slices, ...)  # the dots make it a view, also of a 0-d array
            yield SegmentPart(replace(part, offset=part.offset - start), out[index], copy)


def read_segment(
    source: FileSource, start: int, stop: int, slot: memoryview, check: Check | None, done: ByteCounts
) -> None:
    """Read bytes [start, stop) of a file, and a little more, into `slot`, and check them; counted in `done`.

    Raises DamagedCheckpointError, which says that targets may be partly written.
    """
    source.read_directly(start, slot[: min(stop + TAIL_BYTES, source.nbytes) - start])
    done.read += stop - start
    if check is not None:
        try:
            check(source, start, slot[: stop - start])
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}. Part of what was to be loaded is overwritten already") from None


def has_whole_blocks(source: FileSource) -> bool:
    """Whether the checksums of a file are those of blocks of which each lies within one segment."""
    blocks = source.checksums
    return isinstance(blocks, BlockChecksums) and segment_bytes(source) % blocks.block_bytes == 0


def unchecked_bytes(parts: Iterable[SegmentPart], *, is_checked: bool) -> int:
    """Of parts of segments that were read from files without a view: those that nobody compared with checksums. Who has
    a view has counted them before."""
    return sum(
        part.window.nbytes
        for part in parts
        if isinstance(source := part.copy.place.source, FileSource)
        and source.view() is None
        and not (is_checked and has_whole_blocks(source))
    )


def copy_parts(view: memoryview, parts: Iterable[SegmentPart], piece_bytes: int) -> int:
    """Copy the parts of a segment, whose bytes are in `view`, into their targets; returns the bytes copied.

    `piece_bytes`: for what is staged on its way to another dtype or device.
    """
    copied = 0
    for window, out, copy in parts:
        if isinstance(out, Staged):
            here = Place(BytesSource(view), window, copy.place.conjugate)
            for place, piece in in_pieces(Copy(here, out), piece_bytes):
                assert isinstance(piece, Staged)
                piece.fill(place, piece_bytes)
        else:
            copy_view(view, window, copy.place.conjugate, out)
        copied += window.nbytes
    return copied
