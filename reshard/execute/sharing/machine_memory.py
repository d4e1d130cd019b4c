"""Memory that the ranks of one machine share, and calls by which they wake one another.

Each rank owns a few slots, which it fills and the others take from, and a pipe on which it is called:

    owner    fill slot 0, call "filled"      fill slot 1, call      (all have taken slot 0) fill it again ...
    others       ........ take, call "taken"      ........ take, call

Neither has a name in any file system: the others open them through the owner's entry in /proc, so nothing is left
behind by a process that is killed. That a call goes through the kernel also puts what was written before it in order.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Sequence

import msgspec

from reshard.control.group import Group
from reshard.control.liveness import machine
from reshard.errors import DeadlineError, ReshardError, format_ranks

__all__ = ["Address", "MachineMemory", "OwnMemory"]

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
        self.slots, self.slot_bytes = slots, slot_bytes
        self._files: list[int] = []
        here = machine()
        self.machine = f"{here} {party}" if here else ""
        self.memory = self.pipe = -1
        if self.machine and slots and hasattr(os, "memfd_create"):
            try:
                self.memory = self._keep(os.memfd_create("reshard", os.MFD_CLOEXEC))
                os.ftruncate(self.memory, slots * slot_bytes)
                self.pipe, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._files += [self.pipe, write_end]  # while one is open, the others' ends do not find it closed
            except OSError:
                self.memory = -1  # no more memory or files allowed here: then each reads for itself

    def _keep(self, file: int) -> int:
        self._files.append(file)
        return file

    @property
    def address(self) -> Address:
        """For the other ranks."""
        return Address(self.machine, os.getpid(), self.memory, self.pipe, self.slots, self.slot_bytes)

    def open(self, address: Address, what: int, flags: int) -> int:
        """The file `what` of another process, closed with this."""
        return self._keep(os.open(f"/proc/{address.pid}/fd/{what}", flags | os.O_CLOEXEC))

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
