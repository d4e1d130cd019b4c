"""Reads the bytes of a load. All checks that are possible before writing come first.

A rank reads for itself, or the ranks of a host share reads if that touches much less of the
storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.execute.reading import (
    ByteCounts,
    Copy,
    Workspace,
    compare_plan,
    plan_compare,
    run_copies,
    wanted_by_file,
)
from reshard.ranks.group import Group
from reshard.stored.source import FileSource, OnBytes, Source

if TYPE_CHECKING:  # reading by segments is imported by those who do it: several ranks, or from far away
    from reshard.execute.host_reading import HostReading, OwnMemory
    from reshard.execute.in_place import InPlace


@dataclass
class Fetch(AbstractContextManager["Fetch"]):
    """The copies of one rank. A context; call `check`, `settle`, and `read` in this order.

    Args:
        is_checked: whether bytes are compared with their checksums.
        on_bytes: called with the bytes of each piece that is checked or read; may raise to end it.
        together: the ranks of a host may read for one another: all ranks of the group say the same,
            and go through all steps.
        room_bytes: the memory that this rank may take; with too little, it reads for itself.
    """

    copies: Sequence[Copy]
    group: Group
    space: Workspace
    is_checked: bool
    together: bool
    room_bytes: int | None
    in_place: bool
    """True if data may be compared when it is already in the targets."""
    done: ByteCounts = field(default_factory=ByteCounts)

    _own: OwnMemory | None = None
    _host: HostReading | None = None
    _in_place: InPlace | None = None

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.__exit__()

    def check(self, on_bytes: OnBytes) -> None:
        """Compare all blocks that this rank touches and that no other rank of its host compares.
        With `in_place`, blocks that can be compared while they are read are left to `read`. Data of
        storages without views is always compared while it is read: see `RemoteReading`.

        Raises CorruptCheckpointError.
        """
        if self.together:
            from reshard.execute.host_reading import HostReading, OwnMemory, slots_for

            slots, slot_bytes = slots_for(self.copies, self.room_bytes)
            # a rank that does not check, or checks later, may not read for one that checks first
            party = f"checks {self.in_place}" if self.is_checked else ""
            self._own = OwnMemory(slots, slot_bytes, party)
            self._host = HostReading.agree(self.copies, self._own, self.group)
        self._check(on_bytes)

    def _check(self, on_bytes: OnBytes) -> None:
        near = [copy for copy in self.copies if _is_near(copy.place.source)]
        if not self.is_checked:
            self.done.unchecked = sum(copy.place.window.nbytes for copy in near)
            return
        wanted = wanted_by_file(near)
        elsewhere = {} if self._host is None else self._host.compared_elsewhere(wanted, in_place=self.in_place)
        plan = plan_compare(wanted, elsewhere)
        if self.in_place:
            from reshard.execute.in_place import InPlace

            for_itself = self.copies if self._host is None else self._host.rest
            self._in_place = InPlace.out_of(
                plan, for_itself, {source: of.for_others for source, of in elsewhere.items()}
            )
        compare_plan(plan, self.space.threads, on_bytes)
        self.done.extra, self.done.unchecked = plan.extra_bytes, plan.unchecked_bytes

    def settle(self) -> None:
        """Collective: no rank writes before all ranks have finished their checks."""
        if self._host is None:
            self.group.barrier()
            return
        agreed = self._host
        self._host, refused = agreed.confirm(self.group)
        if refused:
            if self._host is not agreed:  # what another rank was to check while reading it for this one
                self._check(lambda _: self.group.check())
            self.group.barrier()

    def read(self, on_bytes: OnBytes) -> None:
        """Copy everything into the targets. Raises CorruptCheckpointError for bytes that `check` did not see."""
        self.group.writes = True
        alone, overwritten = self.copies, set[str]()
        if self._host is not None and self._host.memory is not None:
            run = self._host.run
            self.done.add(run(piece_bytes=self.space.piece_bytes, is_checked=self.is_checked, on_bytes=on_bytes))
            alone = self._host.rest
            overwritten = {copy.fqn for its in self._host.copies.values() for copy in its}
        if self._in_place is not None:
            self.done.read += self._in_place.run(self.space.threads, overwritten, on_bytes)
            done = {id(copy) for copy, _ in self._in_place.copies}
            alone = [copy for copy in alone if id(copy) not in done]
        files = {copy.place.source for copy in alone if isinstance(copy.place.source, FileSource)}
        if far := [file for file in files if file.view() is None]:
            requests = max(file.storage.requests for file in far)
            alone = self._read_by_segments(alone, requests, on_bytes)
        self.done.read += run_copies(
            alone,
            space=self.space,
            compared=lambda source: not self.is_checked or _is_near(source),
            on_bytes=on_bytes,
        )

    def _read_by_segments(self, copies: Sequence[Copy], requests: int, on_bytes: OnBytes) -> Sequence[Copy]:
        """Copy from storages without a view of their bytes, where this pays, with this number of
        `requests` at a time. Return the other copies."""
        from reshard.execute.host_assignment import REMOTE_SEGMENT_BYTES
        from reshard.execute.remote_reading import RemoteReading

        # half of the memory: the other half is for what is staged
        room = requests * REMOTE_SEGMENT_BYTES if self.room_bytes is None else self.room_bytes // 2
        remote = RemoteReading.of(copies, is_checked=self.is_checked)
        done = remote.run(
            requests=max(1, min(requests, room // REMOTE_SEGMENT_BYTES)),
            request_bytes=min(REMOTE_SEGMENT_BYTES, room),
            piece_bytes=self.space.piece_bytes,
            on_bytes=on_bytes,
        )
        self.done.add(done)
        if not self.is_checked:
            self.done.unchecked += sum(
                copy.place.window.nbytes for copy in remote.rest if not _is_near(copy.place.source)
            )
        return remote.rest


def _is_near(source: Source) -> bool:
    """Return True if it is a file with a view."""
    return isinstance(source, FileSource) and source.view() is not None
