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
from reshard.execute.segments import SEGMENT_BYTES
from reshard.formats.base import Place
from reshard.formats.copying import copy_view
from reshard.formats.source import BytesSource, FileSource

__all__ = ["SLOT_BYTES", "Check", "Done", "cut", "fetch", "in_file", "take"]

_TAIL_BYTES = 64
"""Beyond its end a segment is read so much further: an element that begins in it may end there."""
SLOT_BYTES = SEGMENT_BYTES + 4096
"""Memory for a segment and its tail."""

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


def cut(copy: Copy) -> Iterator[tuple[int, list[Copy]]]:
    """By number of the segment: the parts of a copy that begin in it, their windows counted from its start."""
    window = copy.place.window
    first, offset = divmod(window.offset, SEGMENT_BYTES)
    for number, parts in enumerate(_cuts(replace(window, offset=offset))):
        if parts:
            yield first + number, [_part(copy, box, part) for box, part in parts]


@lru_cache(maxsize=1024)  # tensors of the same shape that lie alike in their segments are cut alike
def _cuts(window: Window) -> list[list[tuple[Box, Window]]]:
    """By segment: the boxes of a window that begin in it, and where they lie, counted from its start."""
    out = []
    for start in range(0, window.stop, SEGMENT_BYTES):
        parts = [(box, window.crop(box)) for box in window.within(start, start + SEGMENT_BYTES)]
        out.append([(box, replace(part, offset=part.offset - start)) for box, part in parts])
    return out


def _part(copy: Copy, box: Box, window: Window) -> Copy:
    index: Any = (*box.slices, ...)  # the dots make it a view, also of a 0-d array
    return Copy(copy.item, copy.place.with_window(window), copy.out[index])


def in_file(part: Copy, number: int) -> Copy:
    """A part whose window counts from the start of the file again."""
    window = part.place.window
    return replace(part, place=part.place.with_window(replace(window, offset=window.offset + number * SEGMENT_BYTES)))


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
        for place, out in in_pieces(part, piece_bytes):
            if isinstance(out, Staged):
                out.fill(Place(BytesSource(view), place.window, place.conjugate), piece_bytes)
            else:
                copy_view(view, place, out)
        taken += part.place.window.nbytes
    return taken
