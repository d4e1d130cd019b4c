"""Noticing within a second that a process of the same machine is gone, instead of waiting for its deadline.

The ranks of one machine stand in a ring, in the order in which they came, and each watches one other:

    came 1st ◄── 2nd ◄── 3rd ◄── ... ◄── last
        └────────────────────────────────►

So when several die, somebody who lives watches one of them. A process is told from a later one of the same number by
its start time. Machines are told apart by boot and by process namespace, so that nobody looks for a process where it
could not be seen; where the system tells neither, nobody is watched and the deadline has to do.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Gone", "Ring", "is_gone", "machine", "start_of"]


class Gone(NamedTuple):
    """A process that is no more: its rank's place in the group, and where and what it was."""

    place: int
    where: str


class Ring:
    """This process's part in the ring of its machine.

    Args:
        store: shared by the ranks of a group; each rank makes one `Ring` on it.
        place: this rank's place in the group.
    """

    def __init__(self, store: Any, place: int) -> None:
        self._machine = machine()
        self._watched: tuple[int, int, str] | None = None
        self._is_final = False
        if self._machine:
            self._index = store.add(f"machines/{self._machine}", 1) - 1
            pid = os.getpid()
            store.set(self._key(self._index), f"{place} {pid} {start_of(pid)}")

    def look(self, store: Any, *, all_came: bool) -> Gone | None:
        """The watched process, if it is gone. A look at the local system; the store is asked whom to watch.

        `all_came`: every rank of the group has made its `Ring`. Before, the first to come has another one to watch at
        each look; it must look once after, whenever that is, to have the last.
        """
        if not self._machine:
            return None
        if self._watched is None or not self._is_final:
            self._watched = self._find(store)
            self._is_final = self._watched is not None and (all_came or self._index > 0)
        if self._watched is None:
            return None
        place, pid, start = self._watched
        return None if start_of(pid) == start else Gone(place, f"process {pid} on {socket.gethostname()}")

    def _find(self, store: Any) -> tuple[int, int, str] | None:
        # the first to come watches the last, who may be another one when it looks again
        index = self._index - 1 if self._index else store.add(f"machines/{self._machine}", 0) - 1
        if index <= 0 and self._index == 0:
            return None
        found = store.peek(self._key(index))
        if found is None:
            return None
        place, pid, start = found.decode().split(" ")
        return int(place), int(pid), start

    def _key(self, index: int) -> str:
        return f"machines/{self._machine}/{index}"


def machine() -> str:
    """The same text for two processes only if each sees the other in /proc; "" where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot} {namespace}" if start_of(os.getpid()) else ""


def is_gone(pid: int, start: str) -> bool:
    """Whether the process of this machine that started then is no more."""
    now = start_of(pid)
    if now:
        return now != start
    try:
        os.kill(pid, 0)
    except PermissionError:  # where /proc hides what is of other users, as its option hidepid does
        return False
    except (ProcessLookupError, OverflowError):
        pass
    return True  # or dead and not yet buried


def start_of(pid: int) -> str:
    """When the process started, in the kernel's ticks; "" if there is none, or it is dead and not yet buried."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # the second field is the program's name in parentheses, which may hold spaces and parentheses itself
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZXx" else fields[19]
