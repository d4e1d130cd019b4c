"""Reads for all ranks of a host: one rank reads each segment into memory that they share."""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from planners.geometry.arrays import Flags, Ints, ints, zeros
from planners.geometry.box import Range
from reshard.errors import DeadlineError, format_ranks
from reshard.execute.host_assignment import (
    TAIL_PAGE_BYTES,
    WHOLE_SHARE,
    FileFootprint,
    OneOrMany,
    ReadFootprint,
    SegmentPart,
    SharedSegments,
    assign_segments,
    compare_segment,
    copy_parts,
    footprint_of,
    has_whole_blocks,
    parts_between,
    parts_by_segment,
    piece_bytes,
    read_segment,
    segment_bytes,
    segment_end,
    touch_cost,
    unchecked_bytes,
)
from reshard.execute.reading import ByteCounts, Copy, Elsewhere, Wanted
from reshard.execute.work_list import COPY, ENTRY, Kind, Memory, WorkList, copy_row
from reshard.live.compiled_kernel import kernel
from reshard.ranks.group import Group
from reshard.ranks.liveness import machine
from reshard.stored.checksums import BlockChecksums
from reshard.stored.source import FileSource, OnBytes

#     rank 0   read segment 0 into its slot | take my part of segments 0, 1 | read segment 2 ...
#     rank 1   read segment 1 into its slot | take my part of segments 1, 0 | read segment 3 ...
#
# So a byte that several ranks need, or a page of which each needs a part, comes from the storage
# once for the host. What is to be done is written down as a `WorkList`, in turns: in each of them
# every rank reads a piece of a segment.


LOCAL_SLOTS = 2
"""Slots of a rank: it fills one while others read the previous one. More if requests take long."""


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    touched: bytes
    touch_cost: float | None
    address: Address


@dataclass(frozen=True)
class HostReading:
    """What this rank reads for all ranks, what it copies from other ranks' reads, and what it reads
    for itself."""

    memory: HostSlots | None
    """None if each rank reads for itself."""
    turns: _Turns | None
    """What ranks read for all, including files that this rank does not know."""
    copies: Mapping[FileSource, list[Copy]]
    """What this rank copies from shared reads."""
    rest: list[Copy]
    places: list[int]
    """The numbers of this host's ranks in the group."""
    reads: _Ranges
    """What this rank reads for all."""
    read_for_all: _Ranges
    """What this or another rank reads for all. The rank that reads it checks it."""
    checks: _Ranges
    """What every rank reads for itself, and this rank checks for all."""
    checked_by_others: _Ranges
    """What other ranks check for this rank."""
    fallback: HostReading | None = None
    """The reading without sharing, in case some rank cannot take part."""
    refused: bool = False
    """True if there is something to share, but this process may not open the other ranks' memory."""

    @classmethod
    def agree(cls, copies: Sequence[Copy], own: OwnMemory, group: Group) -> HostReading:
        """Collective: decide which rank reads which segments for all ranks of this host. Each rank
        reads for itself if sharing would not pay or is not possible. The decision counts once
        confirmed.

        Args:
            copies: what this rank is to read.
            own: this rank's memory, open for as long as what is returned is used.
        """
        shareable: list[tuple[FileSource, Copy]] = []
        for copy in copies:
            source = copy.place.source
            # the other ranks of the host see the same file under its name
            if isinstance(source, FileSource) and source.storage.is_common:
                shareable.append((source, copy))
        touched = footprint_of((source, copy.place.window) for source, copy in shareable)
        cost = touch_cost((source, copy.place.window) for source, copy in shareable)
        # compressed, since all ranks of the job get it, and most numbers are equal
        offer = _Offer(zlib.compress(msgspec.msgpack.encode(touched), 1), cost, own.address)
        # a rank whose host is unknown counts as alone on one
        offers = group.exchange_within(own.machine or f"rank {group.rank}", offer)
        places = [*offers] if own.machine else []
        costs = (offers[i].touch_cost for i in places)
        cheapest = min((cost for cost in costs if cost is not None), default=0.0)
        if any(offers[i].address.memory < 0 for i in places):
            cheapest = 0.0  # a rank has no memory to share: each reads for itself, but not each checks everything
        told = [zlib.decompress(offers[i].touched) for i in places]
        footprints = [msgspec.msgpack.decode(one, type=ReadFootprint) for one in told]
        work = assign_segments(footprints, cheapest)
        files = {source.label: source for source, _ in shareable}
        place = places.index(group.rank) if places else 0
        nothing = dict.fromkeys(files.values(), _NONE)
        checks, others = _by_file(files, (*work.reads, *work.checks), place)
        alone = cls(None, None, {}, list(copies), places, nothing, nothing, checks, others)
        if not work.reads:
            return alone
        addresses, ranks = [offers[i].address for i in places], [group.ranks[i] for i in places]
        try:
            memory = HostSlots(own, addresses, ranks, place, group)
        except (
            OSError,
            ValueError,
        ):  # a sandbox does not let it open what belongs to another, or that has gone already
            return replace(alone, refused=True)
        known = {label: file for footprint in footprints for label, file in footprint.items()}
        turns = _Turns.of(work.reads, known, len(places))
        taken, rest = _taken(copies, files, work.reads)
        reads, by_others = _by_file(files, work.reads, place)
        for_all = {source: np.concatenate((reads[source], by_others[source])) for source in reads}
        checks, others = _by_file(files, work.checks, place)
        return cls(memory, turns, taken, rest, places, reads, for_all, checks, others, alone)

    def confirm(self, group: Group) -> tuple[HostReading, bool]:
        """Collective, and a barrier. Return this if all ranks of this host can take part, and
        otherwise a reading in which each reads for itself. Also return whether a rank of any host
        cannot."""
        if not group.merge(self.refused, any, "the agreement to share reads"):
            return self, False
        machine = f"the machine of {self.places[0]}" if self.places else f"{group.rank} alone"
        mine = any(group.exchange_within(machine, self.refused).values())
        return (self.fallback or self) if mine else self, True

    def compared_elsewhere(self, whole: Mapping[FileSource, Wanted], *, in_place: bool) -> dict[FileSource, Elsewhere]:
        """Return what other ranks compare with checksums for this rank, and what this rank compares
        for them before any rank writes: what is assigned to it, and, of the segments that it reads
        for all, those that it wants in full. This excludes data without a view, which is compared
        when it is read, and with `in_place` also what is read for all. `whole`: what this rank
        reads of each file."""
        found = {}
        for source, reads in self.reads.items():
            if source.view() is None:
                continue
            wanted = _NONE
            if len(reads) and source in whole and not in_place:
                here = common_bytes(reads, whole[source].ranges)
                wanted = reads[here >= WHOLE_SHARE * (reads[:, 1] - reads[:, 0])]
            by_others = np.concatenate((self.checked_by_others[source], self.read_for_all[source]))
            found[source] = Elsewhere(by_others, np.concatenate((self.checks[source], wanted)))
        return found

    def run(self, *, piece_bytes: int, is_checked: bool, on_bytes: OnBytes) -> ByteCounts:
        """Read and copy everything that is shared, if there is shared memory.

        Args:
            piece_bytes: size of the pieces that are staged on the way to another dtype or device.
            is_checked: whether what this rank reads is compared with its checksums.
            on_bytes: called with the bytes that were copied, several times a second; raises if
                another rank has failed.

        Raises CorruptCheckpointError if a segment is damaged: targets may be partly written then.
        """
        assert self.memory is not None
        assert self.turns is not None
        return _HostRun(self, self.turns, self.memory, piece_bytes, is_checked, on_bytes).run()


_Ranges = Mapping[FileSource, Ints]
"""Bytes of files, (n, 2)."""
_NONE = zeros((0, 2))


def _by_file(
    files: Mapping[str, FileSource], segments: Iterable[SharedSegments], place: int
) -> tuple[_Ranges, _Ranges]:
    """Return the segments of this rank, at `place`, and those of other ranks, for each file that it knows."""
    mine, others = dict.fromkeys(files.values(), _NONE), dict.fromkeys(files.values(), _NONE)
    for source, its in ((files[its.label], its) for its in segments if its.label in files):
        mine[source] = np.concatenate((mine[source], its.ranges[its.rank == place]))
        others[source] = np.concatenate((others[source], its.ranges[its.rank != place]))
    return mine, others


def _taken(
    copies: Iterable[Copy], files: Mapping[str, FileSource], segments: Iterable[SharedSegments]
) -> tuple[dict[FileSource, list[Copy]], list[Copy]]:
    """Return the copies from segments that are read for all, and the other copies."""
    is_shared: dict[str, Flags] = {}
    for label, ranges, _ in segments:
        if label in files:
            size = segment_bytes(files[label])
            is_shared[label] = np.zeros(-(-files[label].nbytes // size), np.bool_)
            is_shared[label][ranges[:, 0] // size] = True
    taken: dict[FileSource, list[Copy]] = defaultdict(list)
    rest: list[Copy] = []
    for copy in copies:
        source, window = copy.place.source, copy.place.window
        if not isinstance(source, FileSource) or source.label not in is_shared or not window.numel:
            rest.append(copy)
            continue
        shared, size = is_shared[source.label], segment_bytes(source)
        if not shared[window.offset // size : -(-window.stop // size)].all():
            for number, parts in parts_by_segment(source, copy):
                rest += [part.as_copy(number * size) for part in parts if not shared[number]]
        taken[source].append(copy)
    return taken, rest


def common_bytes(segments: Ints, ranges: Sequence[Range]) -> Ints:
    """Return how many bytes each segment, (n, 2), shares with `ranges`, sorted and disjoint."""
    starts, stops = ints([(0, 0), *ranges]).T
    last = np.searchsorted(starts, segments, "right") - 1
    below = np.cumsum(stops - starts)[last] - np.maximum(stops[last] - segments, 0)
    return np.asarray(below[:, 1] - below[:, 0])


class _SlotFiller(AbstractContextManager["_SlotFiller"]):
    """Fills this rank's slots if the storage provides no file: ahead, on threads, if requests take long."""

    def __init__(
        self, turns: int, read: Callable[[int], None], memory: HostSlots, watch: Callable[[int], None]
    ) -> None:
        self._turns, self._read, self._memory, self._watch = turns, read, memory, watch
        ahead = memory.slots > LOCAL_SLOTS and turns > 1
        self._pool = ThreadPoolExecutor(memory.slots, thread_name_prefix="reshard-read") if ahead else None
        self._under_way: deque[Future[None]] = deque()
        self._next = 0

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def fill(self, turn: int) -> None:
        """Wait until the slot of this turn is filled. All ranks have finished with its previous contents."""
        if self._pool is None:
            self._read(turn)
            return
        while self._next < min(self._turns, self._memory.taken() + self._memory.slots):
            self._under_way.append(self._pool.submit(self._read, self._next))
            self._next += 1
        future = self._under_way.popleft()
        while not wait([future], timeout=0.05).done:
            self._watch(0)
        try:
            future.result()
        finally:
            del future


# What one rank does for all and takes for itself, written down turn by turn.


class _Turns(NamedTuple):
    """The pieces of segments that ranks read for all. Ranks take turns, one piece per turn."""

    labels: list[str]
    begins: Ints
    """Where the pieces of each rank begin, and where those of the last rank end."""
    reader: Ints
    turn: Ints
    file: Ints
    """The number of its label."""
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, segments: Sequence[SharedSegments], files: Mapping[str, FileFootprint], ranks: int) -> _Turns:
        """Make the turns. `files`: as the ranks of the host number them."""
        rank = np.concatenate([its.rank for its in segments])
        order = np.argsort(rank, kind="stable")
        file = np.repeat(np.arange(len(segments)), [len(its.rank) for its in segments])[order]
        size = ints([files[its.label].piece_bytes for its in segments])[file]
        start, stop = np.concatenate([its.ranges for its in segments])[order].T
        pieces = -(-(stop - start) // size)
        of = np.repeat(np.arange(len(order)), pieces)
        start = start[of] + (np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of]) * size[of]
        reader = rank[order][of]
        begins = np.searchsorted(reader, np.arange(ranks + 1))
        turn = np.arange(len(of)) - begins[reader]
        stop = np.minimum(start + size[of], stop[of])
        return cls([its.label for its in segments], begins, reader, turn, file[of], start, stop)

    def between(self, first: int, last: int, reader: int | None = None) -> Ints:
        """Return the indices of the pieces of turns [first, last), of one reader or of all."""
        some = (self.turn >= first) & (self.turn < last)
        return np.flatnonzero(some if reader is None else some & (self.reader == reader))

    def by_file(self, pieces: Ints, files: Mapping[str, FileSource]) -> Iterator[tuple[FileSource, Ints]]:
        """Yield each known file, and which of some pieces belong to it."""
        for number, label in enumerate(self.labels):
            here = np.flatnonzero(self.file[pieces] == number)
            if len(here) and label in files:
                yield files[label], here


_READ, _COMPARE, _BY_HAND = 1, 2, 2
"""Columns of a turn. The last one counts from the first column for a rank that is read from."""
_MOST_ENTRIES = 1 << 15
"""Most entries of one list. The next list is made when this one is done."""
_OWN, _RECEIVED = 0, 2
"""Counters. The second of each pair counts bytes that were not compared with checksums."""


class _HostRun:
    """One run of a `HostReading`."""

    def __init__(
        self,
        reading: HostReading,
        turns: _Turns,
        memory: HostSlots,
        piece_bytes: int,
        is_checked: bool,
        on_bytes: OnBytes,
    ) -> None:
        self._turns, self._memory, self._place = turns, memory, memory.place
        self._files = {source.label: source for source in (*reading.copies, *reading.reads)}
        self._is_checked, self._piece_bytes, self._on_bytes = is_checked, piece_bytes, on_bytes
        self._regions = Memory()
        for slots in memory.slots_of:
            self._regions.add(slots)
        self._tallies = zeros(4)
        self._told = 0
        self._find_copies(reading.copies)

    def _find_copies(self, copies: Mapping[FileSource, list[Copy]]) -> None:
        """Build the table of copies, by file and position, and the list of those that only Python can do."""
        rows: list[int] = []
        self._in_file: dict[str, tuple[int, Ints, Ints]] = {}
        """Label -> the first row, the first byte of each row, and the highest end of the rows up to each one."""
        self._by_hand: dict[str, dict[int, list[SegmentPart]]] = defaultdict(lambda: defaultdict(list))
        """Label -> number of the segment -> its parts."""
        for source, its in copies.items():
            bounds, first = [], len(rows) // (COPY.itemsize // 8)
            for copy in sorted(its, key=lambda copy: copy.place.window.offset):
                row = None
                if isinstance(copy.out, np.ndarray) and not copy.place.conjugate:
                    row = copy_row(copy.place.window, self._regions.add(copy.out), copy.out)
                if row is None:
                    for number, parts in parts_by_segment(source, copy):
                        self._by_hand[source.label][number] += parts
                else:
                    rows += row
                    bounds.append((copy.place.window.offset, copy.place.window.stop))
            starts, stops = ints(bounds).reshape(-1, 2).T
            self._in_file[source.label] = first, starts, np.maximum.accumulate(stops)
        self._copies = ints(rows).view(COPY)

    def run(self) -> ByteCounts:
        turns, ranks = self._turns, len(self._turns.begins) - 1
        rounds = int(np.diff(turns.begins).max())
        step = max(1, _MOST_ENTRIES // (3 * ranks + 5))
        mine = turns.between(0, rounds, self._place)
        done = ByteCounts(read=int((turns.stop[mine] - turns.start[mine]).sum()))
        with _SlotFiller(len(mine), self._read_and_compare, self._memory, self._on_bytes) as filler:
            for first in range(0, rounds, step):
                with ExitStack() as open_files:
                    last = min(first + step, rounds)
                    self._list(first, last, filler, open_files).run(self._look, kernel())
                self._mark_right(first, last)
                self._look(None)
        done.received = int(self._tallies[_RECEIVED : _RECEIVED + 2].sum())
        done.unchecked = int(self._tallies[_OWN + 1] + self._tallies[_RECEIVED + 1])
        return done

    def _look(self, awaited: tuple[int, int] | None) -> None:
        """Report what was copied since the last look. Raise if a rank failed or the time is over."""
        copied = int(self._tallies.sum())
        self._on_bytes(copied - self._told)
        self._told = copied
        self._memory.look(awaited)

    def _list(self, first: int, last: int, filler: _SlotFiller, open_files: ExitStack) -> WorkList:
        """List the turns [first, last).

        wait until my slot is free | read | compare | publish
        for each rank, nearest first: wait for its slot, copy my part | publish
        """
        ranks, memory = len(self._turns.begins) - 1, self._memory
        is_end = last > int(self._turns.turn.max())
        kinds = np.full((last - first + is_end, 5 + 3 * ranks), -1)
        of = zeros((*kinds.shape, 7))
        digests = self._read_entries(first, last, kinds, of, open_files)
        self._take_entries(first, last, kinds, of)
        kinds[: last - first, -1] = Kind.POST
        of[: last - first, -1, 0], of[: last - first, -1, 1] = memory.counter(TAKEN, self._place)
        of[: last - first, -1, 2] = np.arange(first, last) + 1
        if is_end:  # no rank leaves before all are done
            kinds[-1, 0], of[-1, 0, :5] = Kind.WAIT, (*memory.counter(TAKEN, 0), last, ranks, memory.step)
        used = np.flatnonzero(kinds >= 0)
        entries = np.zeros(len(used), ENTRY)
        entries["kind"], entries["of"] = kinds.reshape(-1)[used], of.reshape(-1, 7)[used]

        def call(entry: int) -> Callable[[], None] | None:
            row, column = divmod(int(used[entry]), kinds.shape[1])
            if kinds[row, column] == Kind.READ:
                return partial(self._read, first + row)
            return self._call(first + row, column, filler)

        return WorkList(self._regions, entries, self._copies, digests, self._tallies, call)

    def _call(self, turn: int, column: int, filler: _SlotFiller) -> Callable[[], None] | None:
        """Run the Python part of a column of a turn."""
        if column == _READ:
            return partial(filler.fill, turn)
        if column == _COMPARE:
            return partial(self._compare, turn)
        i, part = divmod(column - 4, 3)
        reader = (self._place + i) % (len(self._turns.begins) - 1)
        return partial(self._take_by_hand, reader, turn) if part == _BY_HAND else None

    def _read_entries(
        self,
        first: int,
        last: int,
        kinds: Ints,
        of: Ints,
        open_files: ExitStack,
    ) -> npt.NDArray[np.uint64]:
        """Add the reads of this rank for all, in the first columns, and return the expected digests."""
        turns, memory, digests = self._turns, self._memory, [np.zeros(0, np.uint64)]
        mine = turns.between(first, last, self._place)
        turn, rows = turns.turn[mine], len(mine)
        slots = memory.slot_at(self._place, turn)
        late = np.flatnonzero(turn >= memory.slots)
        kinds[late, 0] = Kind.WAIT
        of[late, 0, :5] = (*memory.counter(TAKEN, 0), 0, len(turns.begins) - 1, memory.step)
        of[late, 0, 2] = turn[late] + 1 - memory.slots
        for source, here in turns.by_file(mine, self._files):
            start, stop, slot = turns.start[mine[here]], turns.stop[mine[here]], slots[here]
            file = source.storage.descriptor(source.name)
            kinds[here, _READ] = Kind.CALL
            if file is None:
                continue  # it is compared when it is read
            open_files.callback(os.close, file)
            kinds[here, _READ] = Kind.READ
            reads = np.broadcast_arrays(file, start, segment_end(source, stop) - start, self._place, slot)
            of[here, _READ, :5] = np.transpose(reads)
            sums = source.checksums if self._is_checked else None
            if isinstance(sums, BlockChecksums) and has_whole_blocks(source):
                to_do = sums.any_pending(start, stop)
                kinds[here[to_do], _COMPARE] = Kind.COMPARE
                number = sum(map(len, digests)) + start // sums.block_bytes
                blocks = np.broadcast_arrays(self._place, slot, stop - start, sums.block_bytes, number)
                of[here, _COMPARE, :5] = np.transpose(blocks)
                digests.append(sums.digests)
            elif sums is not None:
                kinds[here, _COMPARE] = Kind.CALL
        kinds[:rows, 3] = Kind.POST
        of[:rows, 3, :2], of[:rows, 3, 2] = memory.counter(FILLED, self._place), turn + 1
        return np.concatenate(digests)

    def _take_entries(self, first: int, last: int, kinds: Ints, of: Ints) -> None:
        """Add what this rank copies from each rank's reads, in three columns for each: wait,
        copy, and what only Python can do."""
        turns, memory = self._turns, self._memory
        pieces = turns.between(first, last)
        reader, turn, start, stop = (column[pieces] for column in (turns.reader, turns.turn, turns.start, turns.stop))
        row, column = turn - first, 4 + 3 * ((reader - self._place) % (len(turns.begins) - 1))
        where = np.stack((reader, memory.slot_at(reader, turn), stop - start, start))
        tally = np.where(reader == self._place, _OWN, _RECEIVED)
        for source, here in turns.by_file(pieces, self._files):
            if source.label not in self._in_file:
                continue
            copy, starts, stops = self._in_file[source.label]
            low, high = np.searchsorted(stops, start[here], "right"), np.searchsorted(starts, stop[here], "left")
            some = low < high
            at = here[some]
            known = source.view() is not None or (self._is_checked and has_whole_blocks(source))
            taken = (copy + low[some], copy + high[some], tally[at] + (not known))
            kinds[row[at], column[at] + 1] = Kind.TAKE
            of[row[at], column[at] + 1] = np.stack((*where[:, at], *taken), axis=1)
            by_hand = here[np.isin(start[here] // segment_bytes(source), [*self._by_hand[source.label]])]
            kinds[row[by_hand], column[by_hand] + _BY_HAND] = Kind.CALL
        wanted = (kinds[row, column + 1] >= 0) | (kinds[row, column + 2] >= 0)
        row, column, reader, turn = row[wanted], column[wanted], reader[wanted], turn[wanted]
        kinds[row, column] = Kind.WAIT
        of[row, column, 1], of[row, column, 2], of[row, column, 3] = memory.counter(FILLED, reader)[1], turn + 1, 1

    # What Python does, and what it tries again where the loop could not.

    def _piece(self, reader: int, turn: int) -> tuple[FileSource, int, int, memoryview]:
        """Return the file and byte range that `reader` reads in this turn, and its slot."""
        turns = self._turns
        number = int(turns.begins[reader]) + turn
        source = self._files[turns.labels[turns.file[number]]]
        return source, int(turns.start[number]), int(turns.stop[number]), self._memory.slot(reader, turn)

    def _read(self, turn: int) -> None:
        source, start, stop, slot = self._piece(self._place, turn)
        read_segment(source, start, stop, slot)

    def _compare(self, turn: int) -> None:
        source, start, stop, slot = self._piece(self._place, turn)
        compare_segment(source, start, slot[: stop - start])

    def _read_and_compare(self, turn: int) -> None:
        self._read(turn)
        if self._is_checked:
            self._compare(turn)

    def _mark_right(self, first: int, last: int) -> None:
        """Mark the blocks that the loop has compared."""
        mine = self._turns.between(first, last, self._place)
        for source, here in self._turns.by_file(mine, self._files):
            sums, pieces = source.checksums, mine[here]
            if self._is_checked and isinstance(sums, BlockChecksums) and has_whole_blocks(source):
                right = sums.mark_right(np.stack((self._turns.start[pieces], self._turns.stop[pieces]), axis=1))
                source.checking.add(compared=right)

    def _take_by_hand(self, reader: int, turn: int) -> None:
        source, start, stop, slot = self._piece(reader, turn)
        number, within = divmod(start, segment_bytes(source))
        parts = list(parts_between(self._by_hand[source.label][number], within, within + stop - start))
        copied = copy_parts(slot, parts, self._piece_bytes)
        unchecked = unchecked_bytes(parts, is_checked=self._is_checked)
        tally = _OWN if reader == self._place else _RECEIVED
        self._tallies[tally : tally + 2] += copied - unchecked, unchecked


def slots_for(copies: Iterable[Copy], room_bytes: int | None) -> tuple[int, int]:
    """Return the number and size of the slots that this rank shares with the others on its host:
    one for each request that storage should have in flight, or fewer to fit into half of its
    memory. None if there would be fewer than two."""
    sources = {copy.place.source for copy in copies if isinstance(copy.place.source, FileSource)}
    nbytes = max((piece_bytes(source) + TAIL_PAGE_BYTES for source in sources), default=mmap.PAGESIZE)
    slots = max((source.storage.requests for source in sources if source.view() is None), default=LOCAL_SLOTS)
    if room_bytes is not None:
        slots = min(slots, room_bytes // (2 * nbytes))
    return slots if slots >= LOCAL_SLOTS else 0, nbytes


# Memory that the ranks of one host share.
#
# Each rank owns a few slots, which it fills and the others take from. How many it has filled and how
# many it has taken from is counted where all see it: in the memory of the first of them.
#
#     owner    fill slot 0, filled = 1      fill slot 1, 2      (all have taken from slot 0) fill it again ...
#     others       ........ take, taken = 1      ........ take, 2
#
# Memory has no name in any file system: the others open it through the owner's entry in /proc, so
# nothing is left behind by a process that is killed.


FILLED, TAKEN = 0, 1
_COUNTER_STEP = 64
"""Bytes from one counter to the next, so that ranks share no cache line."""
_COUNTER_BYTES = 1 << 20
"""Space for the counters of 8,192 ranks. Pages that are not written take no memory."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where other ranks find a rank's memory. -1 if it has none."""

    machine: str
    pid: int
    memory: int
    slots: int
    slot_bytes: int


class OwnMemory(AbstractContextManager["OwnMemory"]):
    """This rank's memory. As a context manager, it closes the memory at the end."""

    def __init__(self, slots: int, slot_bytes: int, party: str = "") -> None:
        """Memory is allocated when it is first written to. With 0 slots, there is none, and nothing
        is read for others. Only ranks of the same `party` share."""
        self.slots = slots
        self._files: list[int] = []
        here = machine()
        self.machine = f"{here} {party}" if here else ""
        self.memory = -1
        if self.machine and slots and hasattr(os, "memfd_create"):
            try:
                self.memory = os.memfd_create("reshard", os.MFD_CLOEXEC)
                self._files.append(self.memory)
                os.ftruncate(self.memory, _COUNTER_BYTES + slots * slot_bytes)
            except OSError:
                self.memory = -1  # no more memory or files allowed here: then each reads for itself
        self.address = Address(self.machine, os.getpid(), self.memory, slots, slot_bytes)
        """The address for other ranks."""

    def open(self, address: Address) -> int:
        """Open the memory of another process. It is closed together with this one."""
        self._files.append(os.open(f"/proc/{address.pid}/fd/{address.memory}", os.O_RDWR | os.O_CLOEXEC))
        return self._files[-1]

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class HostSlots:
    """The slots of all ranks of this host, by place, and counters of the slots that each rank has
    filled and finished. An address is (index of the memory, byte in it)."""

    step = 2 * _COUNTER_STEP
    """Bytes from a counter to the same counter of the next rank."""

    def __init__(
        self, own: OwnMemory, addresses: Sequence[Address], ranks: Sequence[int], place: int, group: Group
    ) -> None:
        """Args:
            addresses: of the ranks of this host, in an order that all of them know.
            ranks: what messages call them.
            place: the position of this rank among them.

        Raises OSError if this process may not open another one's memory.
        """
        self.place = place
        self._group = group
        self._ranks = tuple(ranks)
        self.slots_of: list[npt.NDArray[np.uint8]] = []
        """The complete shared memory of each rank: counters and slots."""
        for i, address in enumerate(addresses):
            file = own.memory if i == place else own.open(address)
            nbytes = _COUNTER_BYTES + address.slots * address.slot_bytes
            self.slots_of.append(np.frombuffer(mmap.mmap(file, nbytes), np.uint8))
        self._slots, self._slot_bytes = ints([(each.slots, each.slot_bytes) for each in addresses]).T
        self.slots = own.slots
        """This rank's slots. Other ranks may have another number or size of slots."""
        taken = _COUNTER_STEP * TAKEN
        self._taken = self.slots_of[0][taken : taken + self.step * len(addresses)].view(np.uint32)[:: self.step // 4]

    def counter(self, what: int, place: OneOrMany) -> tuple[int, OneOrMany]:
        """Return the address of a counter of a rank, or of several: how many slots it has `FILLED`,
        or how many turns it has finished."""
        return 0, self.step * place + _COUNTER_STEP * what

    def slot_at(self, place: int | Ints, turn: int | Ints) -> Ints:
        """Return the byte of its memory at which a rank fills in a turn, or for each of several
        turns: one of its few slots."""
        return np.asarray(_COUNTER_BYTES + turn % self._slots[place] * self._slot_bytes[place])

    def slot(self, place: int, turn: int) -> memoryview:
        """Return the memory that a rank fills in its turn."""
        start = int(self.slot_at(place, turn))
        return self.slots_of[place].data[start : start + int(self._slot_bytes[place])]

    def taken(self) -> int:
        """The number of turns that all ranks have finished."""
        return int(self._taken.min())

    def look(self, awaited: tuple[int, int] | None) -> None:
        """Check whether to continue. `awaited`: the counter that this rank waits for.

        Raises the failure of another rank, or DeadlineError.
        """
        self._group.check()
        if awaited is not None and time.monotonic() > self._group.deadline:
            place = awaited[1] // self.step
            raise DeadlineError(
                f"timed out: ranks of this host still wait for data that {format_ranks([self._ranks[place]])} "
                "reads for them. Find out where that rank hangs"
            )
