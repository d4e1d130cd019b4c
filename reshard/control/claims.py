"""Claims: small files that say which process is writing something, so that others know whether it may still be.

A process of this machine that no longer exists is dead. One that cannot be seen from here, on another machine, in
another container or before the machine was started anew, is given a day.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from reshard.control.liveness import is_gone, machine, start_of
from reshard.errors import CheckpointNotFoundError
from reshard.storage import Storage

__all__ = ["Claim", "claim", "may_be_alive", "read_claim", "release"]

_FOREIGN_AGE_S = 86_400.0
"""After so long a process that cannot be seen from here is taken for dead."""

_running: set[str] = set()
"""What this process is writing."""


class Claim(msgspec.Struct, frozen=True):
    """Who writes."""

    host: str
    pid: int
    process_start: str
    """Start time of the process in the kernel's ticks: a later process may have the same number."""
    unix_s: float
    machine: str = ""
    """Where the number means this process: containers of one host may have the same name, and numbers of their own."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_seen(self) -> bool:
        """Whether it can be known from here if the process exists."""
        return bool(self.machine) and self.machine == machine()

    def is_running(self, work: str) -> bool:
        """Whether the process is seen from here to exist and, if it is this one, to be at that work."""
        if not self.is_seen() or (self.pid == os.getpid() and work not in _running):
            return False
        return not is_gone(self.pid, self.process_start)


def claim(storage: Storage, name: str, work: str) -> None:
    """Publish under `name` that this process does that work, until `release`. `work` is a text that nobody else has."""
    _running.add(work)
    pid = os.getpid()
    mine = Claim(socket.gethostname(), pid, start_of(pid), time.time(), machine())
    storage.publish(name, msgspec.json.encode(mine))


def release(work: str) -> None:
    """Say that this process does the work no more, even if its claim could not be removed."""
    _running.discard(work)


def read_claim(storage: Storage, name: str) -> Claim | None:
    """The claim of that name; None if there is none that can be read."""
    try:
        return msgspec.json.decode(storage.read(name), type=Claim)
    except (CheckpointNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def may_be_alive(found: Claim | None, work: str) -> bool:
    """Whether somebody may still do the work."""
    if found is None:
        return False
    return found.is_running(work) if found.is_seen() else time.time() - found.unix_s < _FOREIGN_AGE_S
