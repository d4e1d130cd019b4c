"""Copies cut by the segments of files that their elements begin in; and segments, fetched and checked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from planners.geometry.byteruns import Window
from reshard.errors import DamagedCheckpointError
from reshard.execute.reading import Array, Copy, Staged, in_pieces
from reshard.execute.sharing.segments import segment_bytes
from reshard.formats.stored.copying import copy_view
from reshard.formats.stored.source import BytesSource, FileSource
from reshard.formats.stored.tensor import Place

__all__ = ["Check", "Done", "Part", "cut", "fetch", "slot_bytes", "take"]

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


class Part(NamedTuple):
    """What of a copy begins in one segment."""

    window: Window
    """Counted from the start of the segment."""
    out: Array | Staged
    copy: Copy

    def alone(self, segment_start: int) -> Copy:
        """As a copy from its file."""
        window = replace(self.window, offset=self.window.offset + segment_start)
        return Copy(self.copy.item, self.copy.place.with_window(window), self.out)


def cut(source: FileSource, copy: Copy) -> Iterator[tuple[int, list[Part]]]:
    """By number of the segment of `source`, the copy's file: the parts of the copy that begin in it."""
    window, size = copy.place.window, segment_bytes(source)
    first, offset = divmod(window.offset, size)
    for number, parts in enumerate(_cuts(Window(offset, window.sizes, window.strides, window.itemsize), size)):
        if parts:
            yield first + number, [Part(part, copy.out[index], copy) for index, part in parts]


@lru_cache(maxsize=1024)  # tensors of the same shape that lie alike in their segments are cut alike
def _cuts(window: Window, size: int) -> list[list[tuple[Any, Window]]]:
    """By segment of `size` bytes: indices of what begins in it of a window, and where that lies, from its start."""
    out = []
    for start in range(0, window.stop, size):
        parts = [(box, window.crop(box)) for box in window.within(start, start + size)]
        # the dots make it a view, also of a 0-d array
        out.append([((*box.slices, ...), replace(part, offset=part.offset - start)) for box, part in parts])
    return out


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


def take(view: memoryview, parts: Iterable[Part], piece_bytes: int) -> int:
    """Copy what was fetched into its targets; returns the bytes. `piece_bytes`: for what is staged on its way."""
    taken = 0
    for window, out, copy in parts:
        if isinstance(out, Staged):
            here = Place(BytesSource(view), window, copy.place.conjugate)
            for place, piece in in_pieces(Copy(copy.item, here, out), piece_bytes):
                assert isinstance(piece, Staged)
                piece.fill(place, piece_bytes)
        else:
            copy_view(view, window, copy.place.conjugate, out)
        taken += window.nbytes
    return taken
