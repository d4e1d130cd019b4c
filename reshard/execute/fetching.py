"""Brings the bytes of a load: what can be checked before anything is written is, then all of it is read.

For itself, or together with the other ranks of the machine where that touches much less of the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reshard.execute.host import Own
from reshard.execute.host_reading import OWN_BYTES, HostReading
from reshard.execute.integrity import check_blocks, segment_check
from reshard.execute.reading import Copy, Workspace, run_copies, spans_by_file
from reshard.formats.native import NativeFacts
from reshard.group import Group

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

    def __post_init__(self) -> None:
        room = self.room_bytes is None or self.room_bytes >= 2 * OWN_BYTES
        self._own = Own(OWN_BYTES if self.together and room else 0)
        self._host: HostReading | None = None

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.__exit__()

    def check(self, on_bytes: Callable[[int], None]) -> None:
        """Compare checksums of all blocks that this rank reads whole, if it is the one of its machine to do it.

        Raises DamagedCheckpointError.
        """
        if self.together:
            self._host = HostReading.offer(self.copies, self._own, self.group)
        if self.native is None:
            return
        spans = spans_by_file(self.copies) if self._host is None else self._host.spans_to_check(self.copies)
        self.bytes_checked, self.bytes_read_to_check = check_blocks(
            self.native, spans, threads=self.space.threads, on_bytes=on_bytes
        )

    def settle(self) -> None:
        """Collective: nobody writes before everybody is sure."""
        if self._host is not None:
            self._host = self._host.confirmed(self.copies, self.group)
        else:
            self.group.barrier()

    def read(self, on_bytes: Callable[[int], None]) -> None:
        """Copy everything into the targets. Raises DamagedCheckpointError for bytes that `check` did not see."""
        alone = self.copies
        if self._host is not None:
            check = segment_check(self.native) if self.native is not None else None
            done = self._host.run(piece_bytes=self.space.piece_bytes, check=check, on_bytes=on_bytes)
            self.bytes_read, self.bytes_received = done.read, done.received
            self.bytes_checked = max(self.bytes_checked, done.checked)
            alone = self._host.rest
        self.bytes_read += run_copies(alone, space=self.space, on_bytes=on_bytes)
