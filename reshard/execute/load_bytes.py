"""Brings the bytes of a load: what can be checked before anything is written is, then all of it is read.

For itself, or together with the other ranks of the machine where that touches much less of the storage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.control.group import Group
from reshard.execute.reading import Copy, Workspace, run_copies, spans_by_file
from reshard.formats.native.checksums import check_blocks, segment_check
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.source import FileSource

if TYPE_CHECKING:  # reading by segments is imported by those who do it: several ranks, or from far away
    from reshard.execute.sharing.machine_memory import OwnMemory
    from reshard.execute.sharing.machine_reading import MachineReading
    from reshard.execute.sharing.segment_parts import ByteCounts, Check

__all__ = ["Fetch"]


@dataclass
class Fetch:
    """The copies of one rank, on their way. A context; `check`, `settle` and `read` come in this order.

    Args:
        native: checksums to compare with, or None.
        on_bytes: called with the bytes of each piece that is checked or read; may raise to end it.
        together: the ranks of a machine may read for one another: all ranks of the group say the same, and go through
            all steps.
        room_bytes: the memory that this rank may take; with too little, it reads for itself.
    """

    copies: Sequence[Copy]
    group: Group
    space: Workspace
    native: NativeFacts | None
    together: bool
    room_bytes: int | None = None
    bytes_read: int = 0
    """Of elements, from the data files, by this rank."""
    bytes_read_to_check: int = 0
    """That nobody asked for, only to check what was asked for."""
    bytes_checked: int = 0
    bytes_received: int = 0
    """That other ranks of the machine read for this one."""

    _checked: Mapping[FileSource, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """What was compared with checksums before anything was read into a target: ranges in order."""

    def __post_init__(self) -> None:
        self._own: OwnMemory | None = None
        self._machine: MachineReading | None = None
        if self.together:
            from reshard.execute.sharing.machine_memory import OwnMemory
            from reshard.execute.sharing.machine_reading import slots_for

            slots, slot_bytes = slots_for(self.copies, self.room_bytes)
            party = "checks" if self.native is not None else ""  # who does not check may not read for who does
            self._own = OwnMemory(slots, slot_bytes, party)

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.__exit__()

    def check(self, on_bytes: Callable[[int], None]) -> None:
        """Compare checksums of all blocks that this rank reads whole, if it is the one of its machine to do it.

        Of storages that have no view of their bytes, that is done while reading: see `RemoteReading`.

        Raises DamagedCheckpointError.
        """
        if self._own is not None:
            from reshard.execute.sharing.machine_reading import MachineReading

            self._machine = MachineReading.agree(self.copies, self._own, self.group)
        self._check(on_bytes)

    def _check(self, on_bytes: Callable[[int], None]) -> None:
        if self.native is None:
            return
        spans = spans_by_file(self.copies) if self._machine is None else self._machine.spans_to_check(self.copies)
        self._checked = spans = {source: ranges for source, ranges in spans.items() if source.view() is not None}
        self.bytes_checked, self.bytes_read_to_check = check_blocks(
            self.native, spans, threads=self.space.threads, on_bytes=on_bytes
        )

    def settle(self) -> None:
        """Collective: nobody writes before everybody is sure."""
        if self._machine is None:
            self.group.barrier()
            return
        agreed = self._machine
        self._machine, refused = agreed.confirm(self.group)
        if refused:
            if self._machine is not agreed:  # what another rank was to check while reading it for this one
                self._check(lambda _: self.group.check())
            self.group.barrier()

    def read(self, on_bytes: Callable[[int], None]) -> None:
        """Copy everything into the targets. Raises DamagedCheckpointError for bytes that `check` did not see."""
        check = self._check_rest(segment_check(self.native)) if self.native is not None else None
        alone = self.copies
        if self._machine is not None:
            self._add(self._machine.run(piece_bytes=self.space.piece_bytes, check=check, on_bytes=on_bytes))
            alone = self._machine.rest
        rest = self._read_by_segments(alone, on_bytes)
        self.bytes_read += run_copies(rest, space=self.space, on_bytes=on_bytes)

    def _read_by_segments(self, copies: Sequence[Copy], on_bytes: Callable[[int], None]) -> Sequence[Copy]:
        """Copy what lies in storages that have no view of their bytes, as far as it pays; gives what is left."""
        sources = {copy.place.source for copy in copies if isinstance(copy.place.source, FileSource)}
        if all(source.view() is not None for source in sources):
            return copies
        from reshard.execute.sharing.remote_reading import RemoteReading
        from reshard.execute.sharing.segments import REMOTE_SEGMENT_BYTES

        requests = max(source.storage.requests for source in sources if source.view() is None)
        # half of the memory: the other half is for what is staged
        room = requests * REMOTE_SEGMENT_BYTES if self.room_bytes is None else self.room_bytes // 2
        remote = RemoteReading.of(copies)
        done = remote.run(
            requests=max(1, min(requests, room // REMOTE_SEGMENT_BYTES)),
            request_bytes=min(REMOTE_SEGMENT_BYTES, room),
            piece_bytes=self.space.piece_bytes,
            native=self.native,
            on_bytes=on_bytes,
        )
        self._add(done)
        return remote.rest

    def _check_rest(self, check: Check) -> Check:
        """`check` of what was not checked before."""

        def check_once(source: FileSource, start: int, data: memoryview) -> int:
            ranges = self._checked.get(source, ())
            i = bisect_right(ranges, start, key=lambda bounds: bounds[0]) - 1
            return 0 if i >= 0 and start + len(data) <= ranges[i][1] else check(source, start, data)

        return check_once

    def _add(self, done: ByteCounts) -> None:
        self.bytes_read += done.read
        self.bytes_read_to_check += done.extra
        self.bytes_checked += done.checked
        self.bytes_received += done.received
