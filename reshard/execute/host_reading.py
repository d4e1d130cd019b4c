"""Reading for all ranks of a machine: each segment is read by one of them into memory that they share.

    rank 0   read segment 0 into its slot | take my part of segments 0, 1 | read segment 2 ...
    rank 1   read segment 1 into its slot | take my part of segments 1, 0 | read segment 3 ...

So a byte that several ranks need, or a page of which each needs a part, comes from the storage once for the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from planners.box import Box
from planners.byteruns import Window
from reshard.errors import DamagedCheckpointError
from reshard.execute.host import FILLED, TAKEN, Address, Host, Own
from reshard.execute.reading import Copy, Staged, merged, spans_by_file
from reshard.execute.segments import SEGMENT_BYTES, Segment, Touched, share_out
from reshard.formats.base import Place
from reshard.formats.copying import copy_view
from reshard.formats.source import BytesSource, FileSource
from reshard.group import Group

__all__ = ["OWN_BYTES", "HostBytes", "HostReading"]

DEPTH = 2
"""Slots of a rank: one is filled while the others still take from the one before."""
_TAIL_BYTES = 64
"""Beyond its end a segment is read so much further: an element that begins in it may end there."""
_SLOT_BYTES = SEGMENT_BYTES + 4096

OWN_BYTES = DEPTH * _SLOT_BYTES
"""Memory that a rank shares with the others of its machine."""

Check = Callable[[FileSource, int, memoryview], int]


@dataclass
class HostBytes:
    """Bytes that this rank read, those of them that it compared with checksums, and those that others read for it."""

    read: int = 0
    checked: int = 0
    received: int = 0


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    touched: bytes
    address: Address


@dataclass(frozen=True)
class HostReading:
    """What this rank reads for all, what it takes of what others read, and the rest, which it reads for itself."""

    host: Host | None
    """None where each rank reads for itself."""
    rounds: int
    mine: tuple[tuple[FileSource, Segment], ...]
    takes: dict[tuple[int, int], list[Copy]]
    """(reader, its how manieth segment) -> copies, whose windows count from the start of the segment."""
    rest: list[Copy]
    places: list[int]
    """Of the ranks of this machine in the group."""

    @classmethod
    def offer(cls, copies: Sequence[Copy], own: Own, group: Group) -> HostReading:
        """Collective. What it holds may be nothing, if it would not pay or is not possible here: see `confirmed`.

        `own`: this rank's memory; open for as long as what is returned is used.
        """
        shareable = [(copy.place.source, copy) for copy in copies if isinstance(copy.place.source, FileSource)]
        touched = Touched.of((source, copy.place.window) for source, copy in shareable if source.view() is not None)
        hello = _Hello(touched.encode(), own.address)
        hellos = [msgspec.msgpack.decode(data, type=_Hello) for data in group.exchange(msgspec.msgpack.encode(hello))]
        places = [i for i, other in enumerate(hellos) if other.address.machine == own.machine and own.machine]
        lists = share_out([Touched.decode(hellos[i].touched) for i in places])
        if not any(lists):
            return cls(None, 0, (), {}, list(copies), places)
        addresses, ranks = [hellos[i].address for i in places], [group.ranks[i] for i in places]
        try:
            host = Host(own, addresses, ranks, places.index(group.rank), group)
        except OSError:  # a sandbox that does not let one process open what belongs to another
            return cls(None, 0, (), {}, list(copies), places)
        return cls._of(host, copies, {source.label: source for source, _ in shareable}, lists, places)

    def confirmed(self, copies: Sequence[Copy], group: Group) -> HostReading:
        """Collective, and a barrier: itself if all ranks of this machine can take part, else each reads for itself."""
        able = group.exchange(b"1" if self.host is not None else b"")
        return self if all(able[i] for i in self.places) else HostReading(None, 0, (), {}, list(copies), self.places)

    @classmethod
    def _of(
        cls,
        host: Host,
        copies: Iterable[Copy],
        files: dict[str, FileSource],
        lists: Sequence[Sequence[Segment]],
        places: list[int],
    ) -> HostReading:
        by_file: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for reader, segments in enumerate(lists):
            for number, segment in enumerate(segments):
                by_file[segment.label][segment.start // SEGMENT_BYTES] = (reader, number)
        takes: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        rest: list[Copy] = []
        for copy in copies:
            shared = by_file.get(copy.place.source.label) if isinstance(copy.place.source, FileSource) else None
            if shared is None or not copy.place.window.numel:
                rest.append(copy)
            else:
                _split(copy, shared, takes, rest)
        mine = tuple((files[segment.label], segment) for segment in lists[host.place])
        return cls(host, max(map(len, lists)), mine, dict(takes), rest, places)

    def spans_to_check(self, copies: Iterable[Copy]) -> dict[FileSource, list[tuple[int, int]]]:
        """Of what this rank reads without gaps, what it had better compare with checksums before anybody writes: all
        that it reads for itself, and of the segments that are read for all those that it reads."""
        spans = spans_by_file(self.rest)
        whole = spans_by_file(copies)
        for source, segment in self.mine:
            if any(start <= segment.start and segment.stop <= stop for start, stop in whole.get(source, ())):
                spans.setdefault(source, []).append((segment.start, segment.stop))
        return {source: merged(ranges) for source, ranges in spans.items()}

    def run(self, *, piece_bytes: int, check: Check | None, on_bytes: Callable[[int], None]) -> HostBytes:
        """Read and take everything that is shared.

        Args:
            piece_bytes: for what is staged on its way to another dtype or device.
            check: called with a file, a position and the bytes there of each segment that this rank reads; returns how
                many bytes it could compare with checksums.

        Raises DamagedCheckpointError if a segment is damaged: targets may be partly written then.
        """
        done = HostBytes()
        if self.host is None:
            return done
        host, ranks = self.host, len(self.host.memory)
        for number in range(self.rounds):
            if number < len(self.mine):
                host.wait_taken(number - DEPTH + 1)
                self._fill(self._slot(host, host.place, number), number, check, done)
                host.call(FILLED)
            for reader in ((host.place + i) % ranks for i in range(ranks)):
                pieces = self.takes.get((reader, number))
                if pieces:
                    host.wait_filled(reader, number + 1)
                    source = BytesSource(self._slot(host, reader, number), f"what rank {reader} of this machine read")
                    nbytes = _take(source, pieces, piece_bytes)
                    done.received += nbytes if reader != host.place else 0
                    on_bytes(nbytes)
            host.call(TAKEN)
        host.wait_taken(self.rounds)
        return done

    def _fill(self, slot: memoryview, number: int, check: Check | None, done: HostBytes) -> None:
        source, segment = self.mine[number]
        source.read_directly(segment.start, slot[: min(segment.stop + _TAIL_BYTES, source.nbytes) - segment.start])
        done.read += segment.stop - segment.start
        if check is not None:
            try:
                done.checked += check(source, segment.start, slot[: segment.stop - segment.start])
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"{error}. Part of what was to be loaded is overwritten") from None

    @staticmethod
    def _slot(host: Host, reader: int, number: int) -> memoryview:
        start = number % DEPTH * _SLOT_BYTES
        return host.memory[reader][start : start + _SLOT_BYTES]


def _take(source: BytesSource, pieces: Iterable[Copy], piece_bytes: int) -> int:
    taken = 0
    for piece in pieces:
        if isinstance(piece.out, Staged):
            piece.out.fill(Place(source, piece.place.window, piece.place.conjugate), piece_bytes)
        else:
            copy_view(source.view(), piece.place, piece.out)
        taken += piece.place.window.nbytes
    return taken


def _split(
    copy: Copy,
    shared: Mapping[int, tuple[int, int]],
    takes: dict[tuple[int, int], list[Copy]],
    rest: list[Copy],
) -> None:
    """Cut a copy by who reads it."""
    window = copy.place.window
    first, offset = divmod(window.offset, SEGMENT_BYTES)
    mine: list[tuple[Box, Window]] = []
    for number, pieces in _cuts(replace(window, offset=offset)):
        reader = shared.get(first + number)
        for box, part in pieces:
            if reader is not None:
                takes[reader].append(_part(copy, part, box))
            else:
                mine.append((box, replace(part, offset=part.offset + (first + number) * SEGMENT_BYTES)))
    rest += [_part(copy, part, box) for box, part in mine]


@lru_cache(maxsize=1024)  # tensors of the same shape that lie alike in their segments are cut alike
def _cuts(window: Window) -> list[tuple[int, list[tuple[Box, Window]]]]:
    """By segment: the boxes of a window that begin in it, and where they lie, counted from its start."""
    out = []
    for number in range(-(-window.stop // SEGMENT_BYTES)):
        start = number * SEGMENT_BYTES
        parts = [(box, window.crop(box)) for box in window.within(start, start + SEGMENT_BYTES)]
        out.append((number, [(box, replace(part, offset=part.offset - start)) for box, part in parts]))
    return out


def _part(copy: Copy, window: Window, box: Box) -> Copy:
    return Copy(copy.item, copy.place.with_window(window), copy.out[(*box.slices, ...)])
