"""Reading for all ranks of a machine: each segment is read by one of them into memory that they share."""

from __future__ import annotations

import itertools
import mmap
import os
import select
import struct
import time
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import msgspec

from reshard.errors import DeadlineError, ReshardError, format_ranks
from reshard.execute.reading import ByteCounts, Copy, Elsewhere, wanted_by_file
from reshard.execute.segments import (
    TAIL_PAGE_BYTES,
    WHOLE_SHARE,
    Check,
    ReadFootprint,
    Segment,
    SegmentPart,
    assign_segments,
    copy_parts,
    footprint_of,
    parts_by_segment,
    read_segment,
    segment_bytes,
    touch_us_per_mib,
    unchecked_bytes,
)
from reshard.ranks.group import Group
from reshard.ranks.liveness import machine
from reshard.stored.source import FileSource

__all__ = ["Address", "MachineMemory", "MachineReading", "OwnMemory", "slots_for"]


#     rank 0   read segment 0 into its slot | take my part of segments 0, 1 | read segment 2 ...
#     rank 1   read segment 1 into its slot | take my part of segments 1, 0 | read segment 3 ...
#
# So a byte that several ranks need, or a page of which each needs a part, comes from the storage
# once for the machine.


LOCAL_SLOTS = 2
"""Slots of a rank: one is filled while the others still take from that before; more where requests take long."""


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    touched: bytes
    touch_us: float
    address: Address


@dataclass(frozen=True)
class MachineReading:
    """What this rank reads for all, what it copies of what others read, and the rest, which it reads for itself."""

    memory: MachineMemory | None
    """None where each rank reads for itself."""
    rounds: int
    """In each of which every rank fills at most one slot."""
    reads: tuple[tuple[FileSource, Segment], ...]
    parts: dict[tuple[int, int], list[SegmentPart]]
    """(place of the reader, round) -> what this rank copies out of the segment that is read then."""
    rest: list[Copy]
    places: list[int]
    """Of the ranks of this machine in the group."""
    checks: tuple[tuple[FileSource, Segment], ...] = ()
    """What every rank reads for itself, and this one checks for all."""
    checked_by_others: Mapping[FileSource, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """What others check for this one, segment by segment."""
    read_for_all: Mapping[FileSource, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """What this or another rank reads for all, segment by segment; who reads it checks it."""
    fallback: MachineReading | None = None
    """Where each reads for itself, for the case that some rank cannot take part."""
    refused: bool = False
    """Whether there is something to share, but this process may not open what belongs to the others."""

    @classmethod
    def agree(cls, copies: Sequence[Copy], own: OwnMemory, group: Group) -> MachineReading:
        """Collective: who reads which segments for all ranks of this machine, found alike by each of them.

        It may be that each reads for itself, where sharing would not pay or is not possible here; and it counts only
        once it is confirmed.

        Args:
            copies: what this rank is to read.
            own: this rank's memory, open for as long as what is returned is used.
        """
        shareable = [(source, copy) for copy in copies if (source := _common(copy)) is not None]
        touched = footprint_of((source, copy.place.window) for source, copy in shareable)
        cost = touch_us_per_mib((source, copy.place.window) for source, copy in shareable)
        # packed, since all ranks of the job get it, and most numbers are alike
        offer = _Offer(zlib.compress(msgspec.msgpack.encode(touched), 1), cost, own.address)
        # who knows no machine of its own is alone in one
        offers = group.exchange_within(own.machine or f"rank {group.rank}", offer)
        places = [*offers] if own.machine else []
        touch_us = min((offers[i].touch_us for i in places if offers[i].touch_us), default=0.0)
        if any(offers[i].address.memory < 0 for i in places):
            touch_us = 0.0  # a rank has no memory to share: each reads for itself, but not each checks everything
        told = [zlib.decompress(offers[i].touched) for i in places]
        assignments = assign_segments([msgspec.msgpack.decode(one, type=ReadFootprint) for one in told], touch_us)
        files = {source.label: source for source, _ in shareable}
        place = places.index(group.rank) if places else 0
        alone = cls(None, 0, (), {}, list(copies), places)
        alone = alone._with_checks(place, files, [(*one.reads, *one.checks) for one in assignments])
        if not any(one.reads for one in assignments):
            return alone
        addresses, ranks = [offers[i].address for i in places], [group.ranks[i] for i in places]
        try:
            memory = MachineMemory(own, addresses, ranks, place, group)
        except OSError:  # a sandbox that does not let one process open what belongs to another
            return replace(alone, refused=True)
        shared = cls._shared(memory, copies, files, [one.reads for one in assignments], places)
        return replace(shared._with_checks(place, files, [one.checks for one in assignments]), fallback=alone)

    def _with_checks(
        self, place: int, files: Mapping[str, FileSource], lists: Sequence[Sequence[Segment]]
    ) -> MachineReading:
        """The same, where the rank at each place checks a list of segments for all."""
        checks: list[tuple[FileSource, Segment]] = []
        others: dict[FileSource, list[tuple[int, int]]] = defaultdict(list)
        for i, segments in enumerate(lists):
            for source, segment in ((files[s.label], s) for s in segments if s.label in files):
                if i == place:
                    checks.append((source, segment))
                else:
                    others[source].append((segment.start, segment.stop))
        return replace(self, checks=tuple(checks), checked_by_others=others)

    def confirm(self, group: Group) -> tuple[MachineReading, bool]:
        """Collective, and a barrier: itself if all ranks of this machine can take part, else each reads for itself;
        and whether a rank of any machine cannot, which all ranks are told alike."""
        if not group.merge(self.refused, any, "whether all ranks can read for one another"):
            return self, False
        machine = f"the machine of {self.places[0]}" if self.places else f"{group.rank} alone"
        mine = any(group.exchange_within(machine, self.refused).values())
        return (self.fallback or self) if mine else self, True

    @classmethod
    def _shared(
        cls,
        memory: MachineMemory,
        copies: Iterable[Copy],
        files: dict[str, FileSource],
        lists: Sequence[Sequence[Segment]],
        places: list[int],
    ) -> MachineReading:
        by_file: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for reader, segments in enumerate(lists):
            for turn, segment in enumerate(segments):
                by_file[segment.label][segment.number] = (reader, turn)
        wanted: dict[tuple[int, int], list[SegmentPart]] = defaultdict(list)
        rest: list[Copy] = []
        for copy in copies:
            source = _common(copy)
            shared = by_file.get(source.label) if source is not None else None
            if source is None or shared is None or not copy.place.window.numel:
                rest.append(copy)
                continue
            for number, parts in parts_by_segment(source, copy):
                if number in shared:
                    wanted[shared[number]] += parts
                else:
                    rest += [part.as_copy(number * segment_bytes(source)) for part in parts]
        mine = tuple((files[segment.label], segment) for segment in lists[memory.place])
        by_all: dict[FileSource, list[tuple[int, int]]] = defaultdict(list)
        for segment in itertools.chain.from_iterable(lists):
            if segment.label in files:
                by_all[files[segment.label]].append((segment.start, segment.stop))
        return cls(memory, max(map(len, lists)), mine, dict(wanted), rest, places, read_for_all=by_all)

    def compared_elsewhere(self, copies: Iterable[Copy]) -> dict[FileSource, Elsewhere]:
        """What others compare with checksums for this rank, and what it had better compare for them before anybody
        writes: what is assigned to it, and of the segments that it reads for all those that it wants whole. Of files
        that have a view: what is far away is compared when it is read."""
        found: dict[FileSource, Elsewhere] = {}
        for by_others in (self.checked_by_others, self.read_for_all):
            for source, ranges in by_others.items():
                of = found.setdefault(source, Elsewhere())
                of.by_others = sorted((*of.by_others, *ranges))
        whole = wanted_by_file(copies)
        for source, segment in (*self.checks, *self.reads):
            ranges = whole[source].ranges if source in whole else ()
            is_duty = (source, segment) in self.checks
            if is_duty or _common_bytes(segment, ranges) >= WHOLE_SHARE * (segment.stop - segment.start):
                of = found.setdefault(source, Elsewhere())
                of.for_others = (*of.for_others, (segment.start, segment.stop))
        return {source: of for source, of in found.items() if source.view() is not None}

    def run(self, *, piece_bytes: int, check: Check | None, on_bytes: Callable[[int], None]) -> ByteCounts:
        """Read and copy everything that is shared.

        Args:
            piece_bytes: for what is staged on its way to another dtype or device.
            check: for each segment that this rank reads.
            on_bytes: called with the bytes of each round; raises if another rank has failed.

        Raises DamagedCheckpointError if a segment is damaged: targets may be partly written then.
        """
        done = ByteCounts()
        if self.memory is None:
            return done
        memory, ranks = self.memory, len(self.memory.memory)
        nearest_first = [(memory.place + i) % ranks for i in range(ranks)]
        with _SlotFiller(self.reads, memory, check, done, on_bytes) as filler:
            for turn in range(self.rounds):
                if turn < len(self.reads):
                    filler.fill(turn)
                    memory.call(FILLED)
                taken = 0
                wanted = [reader for reader in nearest_first if (reader, turn) in self.parts]
                while wanted:  # whoever is ready comes first: another may have no processor just now
                    ready = memory.wait_filled(wanted, turn + 1)
                    wanted = [reader for reader in wanted if reader not in ready]
                    for reader in ready:
                        parts = self.parts[reader, turn]
                        nbytes = copy_parts(memory.slot(reader, turn), parts, piece_bytes)
                        done.unchecked += unchecked_bytes(parts, is_checked=check is not None)
                        done.received += nbytes if reader != memory.place else 0
                        taken += nbytes
                on_bytes(taken)
                if turn + 1 >= len(self.reads):  # else the call of the next slot says so
                    memory.call(TAKEN)
            memory.wait_taken(self.rounds)
        return done


def _common(copy: Copy) -> FileSource | None:
    """The file of a copy, if the other ranks of the machine see the same one under its name."""
    source = copy.place.source
    return source if isinstance(source, FileSource) and source.storage.is_common else None


def _common_bytes(segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
    """Of a segment, and ranges in order."""
    first = bisect_right(ranges, segment.start, key=lambda bounds: bounds[1])
    near = itertools.takewhile(lambda bounds: bounds[0] < segment.stop, itertools.islice(ranges, first, None))
    return sum(min(stop, segment.stop) - max(start, segment.start) for start, stop in near)


class _SlotFiller:
    """Fills this rank's slots: at once where the storage answers at once, else ahead, on threads."""

    def __init__(
        self,
        reads: Sequence[tuple[FileSource, Segment]],
        memory: MachineMemory,
        check: Check | None,
        done: ByteCounts,
        watch: Callable[[int], None],
    ) -> None:
        self._reads, self._memory, self._check, self._done, self._watch = reads, memory, check, done, watch
        ahead = memory.slots > LOCAL_SLOTS and len(reads) > 1
        self._pool = ThreadPoolExecutor(memory.slots, thread_name_prefix="reshard-read") if ahead else None
        self._under_way: deque[Future[int]] = deque()
        self._next = 0

    def __enter__(self) -> _SlotFiller:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def fill(self, turn: int) -> None:
        """Until the slot of this turn is filled."""
        self._memory.wait_taken(turn + 1 - self._memory.slots)
        if self._pool is None:
            self._done.read += self._read(turn)
            return
        while self._next < min(len(self._reads), self._memory.taken() + self._memory.slots):
            self._under_way.append(self._pool.submit(self._read, self._next))
            self._next += 1
        future = self._under_way.popleft()
        while not wait([future], timeout=0.05).done:
            self._watch(0)
        self._done.read += future.result()

    def _read(self, turn: int) -> int:
        source, segment = self._reads[turn]
        slot = self._memory.slot(self._memory.place, turn)
        return read_segment(source, segment.start, segment.stop, slot, self._check)


def slots_for(copies: Iterable[Copy], room_bytes: int | None) -> tuple[int, int]:
    """How many slots this rank shares with the others of its machine, and of how many bytes: as many as there had
    better be requests to where it reads, or as half of its memory holds; none if that is for fewer than two."""
    sources = {copy.place.source for copy in copies if isinstance(copy.place.source, FileSource)}
    nbytes = max((segment_bytes(source) + TAIL_PAGE_BYTES for source in sources), default=mmap.PAGESIZE)
    slots = max((source.storage.requests for source in sources if source.view() is None), default=LOCAL_SLOTS)
    if room_bytes is not None:
        slots = min(slots, room_bytes // (2 * nbytes))
    return slots if slots >= LOCAL_SLOTS else 0, nbytes


# Memory that the ranks of one machine share, and calls by which they wake one another.
#
# Each rank owns a few slots, which it fills and the others take from, and a pipe on which it is
# called:
#
#     owner    fill slot 0, call "filled"      fill slot 1, call      (all have taken slot 0) fill it again ...
#     others       ........ take, call "taken"      ........ take, call
#
# Neither has a name in any file system: the others open them through the owner's entry in /proc, so
# nothing is left behind by a process that is killed. That a call goes through the kernel also puts
# what was written before it in order.


FILLED, TAKEN = 0, 1
_CALL = struct.Struct("<BH")
_LOOK_S = 0.05
"""How often a rank that waits looks whether another has failed."""
_VERDICT_S = 5.0
"""After the pipe of another rank broke: how long to wait for news of why."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where the others find a rank's memory and pipe, which are -1 if it has none."""

    machine: str
    pid: int
    memory: int
    pipe: int
    slots: int
    slot_bytes: int


class OwnMemory:
    """This rank's memory and the end of its pipe that it reads. A context: leaving it closes them."""

    def __init__(self, slots: int, slot_bytes: int, party: str = "") -> None:
        """Of the memory none is taken before it is written to; with 0 slots there is none, and nothing is read for
        others. Only ranks of the same `party` have to do with one another."""
        self.slots = slots
        self._files: list[int] = []
        here = machine()
        self.machine = f"{here} {party}" if here else ""
        self.memory = self.pipe = -1
        if self.machine and slots and hasattr(os, "memfd_create"):
            try:
                self.memory = os.memfd_create("reshard", os.MFD_CLOEXEC)
                self._files.append(self.memory)
                os.ftruncate(self.memory, slots * slot_bytes)
                self.pipe, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._files += [self.pipe, write_end]  # while one is open, the others' ends do not find it closed
            except OSError:
                self.memory = -1  # no more memory or files allowed here: then each reads for itself
        self.address = Address(self.machine, os.getpid(), self.memory, self.pipe, slots, slot_bytes)
        """For the other ranks."""

    def open(self, address: Address, what: int, flags: int) -> int:
        """The file `what` of another process, closed with this."""
        self._files.append(os.open(f"/proc/{address.pid}/fd/{what}", flags | os.O_CLOEXEC))
        return self._files[-1]

    def __enter__(self) -> OwnMemory:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class MachineMemory:
    """The slots of all ranks of this machine, and what is known of who has filled and taken how many."""

    def __init__(
        self, own: OwnMemory, addresses: Sequence[Address], ranks: Sequence[int], place: int, group: Group
    ) -> None:
        """`addresses`: of the ranks of this machine, in an order that all know; `ranks`: what messages call them;
        `place`: where among them this rank is.

        Raises OSError if this process may not open what belongs to another one.
        """
        self.place = place
        self._group = group
        self._ranks = tuple(ranks)
        self._pipe = own.pipe
        self._ends = [
            -1 if i == place else own.open(address, address.pipe, os.O_WRONLY | os.O_NONBLOCK)
            for i, address in enumerate(addresses)
        ]
        self.memory: list[memoryview] = []
        for i, address in enumerate(addresses):
            file = own.memory if i == place else own.open(address, address.memory, os.O_RDWR)
            self.memory.append(memoryview(mmap.mmap(file, address.slots * address.slot_bytes)))
        self._sizes = [(address.slots, address.slot_bytes) for address in addresses]
        self.slots = own.slots
        """Of this rank; others may have more or fewer, or larger ones."""
        self._calls = ([0] * len(addresses), [0] * len(addresses))
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def call(self, what: int) -> None:
        """Tell all others that this rank has filled its next slot, or taken from all slots of the next round.

        Who has filled slot n has taken from all slots of the rounds before n: that need not be told.
        """
        message = _CALL.pack(what, self.place)
        self._heard(what, self.place)
        for place, end in enumerate(self._ends):
            if place != self.place:
                self._send(place, end, message)

    def _send(self, place: int, end: int, message: bytes) -> None:
        while True:
            try:
                os.write(end, message)
                return
            except BlockingIOError:  # far ahead of a rank that has much to read: it will listen, and so must we
                self._hear([place])
            except BrokenPipeError as error:
                self._lost(error)

    def slot(self, place: int, turn: int) -> memoryview:
        """The memory that a rank fills in its turn, again and again one of its few slots."""
        slots, slot_bytes = self._sizes[place]
        start = turn % slots * slot_bytes
        return self.memory[place][start : start + slot_bytes]

    def taken(self) -> int:
        """How many rounds all ranks are known to be through."""
        return min(self._calls[TAKEN])

    def wait_filled(self, places: Sequence[int], count: int) -> list[int]:
        """Until one of some ranks, or more, has filled `count` slots: which ones.

        Raises the failure of another rank, or DeadlineError.
        """
        calls = self._calls[FILLED]
        while not (ready := [place for place in places if calls[place] >= count]):
            self._hear(places)
        return ready

    def wait_taken(self, count: int) -> None:
        """Until all ranks are through `count` rounds. Raises as `wait_filled`."""
        calls = self._calls[TAKEN]
        while min(calls) < count:
            self._hear([place for place, taken in enumerate(calls) if taken < count])

    def _hear(self, awaited: Sequence[int]) -> None:
        if not self._poll.poll(_LOOK_S * 1000):
            self._group.check()
            if time.monotonic() > self._group.deadline:
                ranks = format_ranks(self._ranks[place] for place in awaited)
                raise DeadlineError(
                    f"the time is over, and ranks of this machine still wait for what {ranks} read for them: "
                    "look at what these hang in"
                )
            return
        for what, place in _CALL.iter_unpack(os.read(self._pipe, _CALL.size * 1024)):
            self._heard(what, place)

    def _heard(self, what: int, place: int) -> None:
        self._calls[what][place] += 1
        if what == FILLED:
            self._calls[TAKEN][place] = max(self._calls[TAKEN][place], self._calls[FILLED][place] - 1)

    def _lost(self, error: OSError) -> None:
        until = time.monotonic() + _VERDICT_S
        while time.monotonic() < until:  # what another rank failed with says more than a pipe that broke
            self._group.check()
            time.sleep(_LOOK_S)
        raise ReshardError(f"another rank of this machine stopped reading its share: {error}") from error
