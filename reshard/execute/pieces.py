"""Copies cut by the segments of files that their elements begin in; and segments, fetched and checked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from planners.box import Box
from planners.byteruns import Window
from reshard.errors import DamagedCheckpointError
from reshard.execute.reading import Copy, Staged, in_pieces
from reshard.execute.segments import segment_bytes
from reshard.formats.base import Place
from reshard.formats.copying import copy_view
from reshard.formats.source import BytesSource, FileSource

__all__ = ["Check", "Done", "cut", "fetch", "in_file", "slot_bytes", "take"]

_TAIL_BYTES = 64
"""Beyond its end a segment is read so much further: an element that begins in it may end there."""

Check = Callable[[FileSource, int, memoryview], int]
"""Compares bytes of a file, from a position on, with checksums, as far as there are some of just such bytes; returns of
how many bytes. Raises DamagedCheckpointError."""


@dataclass
class Done:
    """Bytes that were read of files, how many of these nobody asked for, how many were compared with checksums, and
    how many others read for this rank."""

    read: int = 0
    extra: int = 0
    checked: int = 0
    received: int = 0


def slot_bytes(source: FileSource) -> int:
    """Memory for a segment and its tail: whole pages."""
    return segment_bytes(source) + 4096


def cut(source: FileSource, copy: Copy) -> Iterator[tuple[int, list[Copy]]]:
    """By number of the segment of `source`, the copy's file: the parts of the copy that begin in it, their windows
    counted from its start."""
    window, size = copy.place.window, segment_bytes(source)
    first, offset = divmod(window.offset, size)
    for number, parts in enumerate(_cuts(Window(offset, window.sizes, window.strides, window.itemsize), size)):
        if parts:
            yield first + number, [_part(copy, box, part) for box, part in parts]


@lru_cache(maxsize=1024)  # tensors of the same shape that lie alike in their segments are cut alike
def _cuts(window: Window, size: int) -> list[list[tuple[Box, Window]]]:
    """By segment of `size` bytes: the boxes of a window that begin in it, and where they lie, from its start."""
    out = []
    for start in range(0, window.stop, size):
        parts = [(box, window.crop(box)) for box in window.within(start, start + size)]
        out.append([(box, replace(part, offset=part.offset - start)) for box, part in parts])
    return out


def _part(copy: Copy, box: Box, window: Window) -> Copy:
    index: Any = (*box.slices, ...)  # the dots make it a view, also of a 0-d array
    return Copy(copy.item, copy.place.with_window(window), copy.out[index])


def in_file(source: FileSource, part: Copy, number: int) -> Copy:
    """A part of segment `number`, whose window counts from the start of the file again."""
    window = part.place.window
    start = number * segment_bytes(source)
    return replace(part, place=part.place.with_window(replace(window, offset=window.offset + start)))


def fetch(source: FileSource, start: int, stop: int, slot: memoryview, check: Check | None, done: Done) -> None:
    """Read bytes [start, stop), and a little more, into a slot, and check them.

    Raises DamagedCheckpointError, which says that targets may be partly written.
    """
    source.read_directly(start, slot[: min(stop + _TAIL_BYTES, source.nbytes) - start])
    done.read += stop - start
    if check is not None:
        try:
            done.checked += check(source, start, slot[: stop - start])
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}. Part of what was to be loaded is overwritten already") from None


def take(view: memoryview, parts: Iterable[Copy], piece_bytes: int) -> int:
    """Copy what was fetched into its targets; returns the bytes. `piece_bytes`: for what is staged on its way."""
    taken = 0
    for part in parts:
        if isinstance(part.out, Staged):
            for place, out in in_pieces(part, piece_bytes):
                assert isinstance(out, Staged)
                out.fill(Place(BytesSource(view), place.window, place.conjugate), piece_bytes)
        else:
            copy_view(view, part.place, part.out)
        taken += part.place.window.nbytes
    return taken
