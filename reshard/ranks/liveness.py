"""Which processes are alive, and which process writes what."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.storage.base import Storage

_log = logging.getLogger("reshard")


# The ranks of one machine stand in a ring, in the order in which they came, and each watches one
# other:
#
#     came 1st ◄── 2nd ◄── 3rd ◄── ... ◄── last
#         └────────────────────────────────►
#
# So when several die, a live rank watches one of them. A process is distinguished from a later one of
# the same number by its start time. Machines are distinguished by boot and by process namespace, so
# that no rank looks for a process where it could not see it. If the system provides neither, no rank
# is watched and the deadline has to do.


class Gone(NamedTuple):
    """A process that has ended: its rank's place in the group, and its host and id."""

    place: int
    where: str


class PeerWatch:
    """This process's part in the ring of its machine.

    Args:
        store: a client of the store of a group; each rank makes one `PeerWatch` on it.
        place: this rank's place in the group.

    Raises ReshardError if torchrun started the ranks again over the store of ranks that are gone.
    """

    def __init__(self, store: Any, place: int) -> None:
        here = machine()
        self._key = f"machines/{here}" if here else ""
        self._watched: tuple[int, int, str] | None = None
        self.knows_whom = not self._key
        """True once the answer is final, so that the store need not be asked again."""
        if self._key:
            self._index = store.add(self._key, 1) - 1
            self._refuse_reused(store)
            pid = os.getpid()
            store.set(f"{self._key}/{self._index}", f"{place} {pid} {start_of(pid)}".encode())

    def _refuse_reused(self, store: Any) -> None:
        """Raise if more ranks registered than torchrun started here and the first has ended: its
        sessions are still in the store."""
        if self._index < int(os.environ.get("LOCAL_WORLD_SIZE", self._index + 1)):
            return
        _, _, process = (store.peek(f"{self._key}/0") or b"").decode().partition(" ")
        pid, _, start = process.partition(" ")
        if pid and start_of(int(pid)) != start:
            raise ReshardError(
                f"an earlier attempt of this job used the key-value store of this process group, and its process {pid} "
                f"on {socket.gethostname()} is gone: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
                "environment, so that each attempt gets a new store"
            )

    def look(self, store: Any, *, all_came: bool) -> Gone | None:
        """Return the watched process if it has ended. This asks the local system. It asks the store
        which process to watch, until that is certain.

        `all_came`: every rank of the group has made its `PeerWatch`. Until then, the process that
        the first rank watches may change with each call, so that rank must call again after all
        came.
        """
        if not self.knows_whom:
            # the first rank watches the last one, which may be another rank when it looks again
            index = self._index - 1 if self._index else store.add(self._key, 0) - 1
            found = None if index <= 0 and self._index == 0 else store.peek(f"{self._key}/{index}")
            if found is not None:
                place, pid, start = found.decode().split(" ")
                self._watched = int(place), int(pid), start
                self.knows_whom = all_came or self._index > 0
        if self._watched is None:
            return None
        watched, process, began = self._watched
        is_there = start_of(process) == began
        return None if is_there else Gone(watched, f"process {process} on {socket.gethostname()}")


def machine() -> str:
    """Return text that two processes have in common only if each sees the other in /proc. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot} {namespace}" if start_of(os.getpid()) else ""


def is_gone(pid: int, start: str) -> bool:
    """Return True if the process of this machine that started at that time has ended."""
    now = start_of(pid)
    if now:
        return now != start
    try:
        os.kill(pid, 0)
    except PermissionError:  # /proc may hide processes of other users (its option hidepid)
        return False
    except (ProcessLookupError, OverflowError):
        pass
    return True  # or dead and not yet buried


def start_of(pid: int) -> str:
    """Return the time at which the process started, in the kernel's ticks; "" if it does not exist
    or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read().decode("ascii", "replace")
    except OSError:
        return ""
    # the second field is the program's name in parentheses, which may hold spaces and
    # parentheses itself
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZXx" else fields[19]


# Claims: small files that say which process is writing something, so that others know whether it
# may still be.
#
# A process of this machine that no longer exists is dead. A process that cannot be seen from here
# (on another machine, in another container, or before a restart of this machine) is considered dead
# after a day.


_FOREIGN_AGE_S = 86_400.0
"""After this time, a process that cannot be seen from here is considered dead."""

BEAT_S = 5.0
"""Interval at which a claim that is kept is published again."""
WATCH_S = 12.0
"""After this time without a renewal, the process that made a claim is considered dead."""

_running: set[str] = set()
"""Work that this process has in progress."""


_fences: dict[str, weakref.WeakMethod[Callable[[], None]]] = {}
"""URL of a folder -> a function that raises if this process may no longer publish anything below it."""


def set_fence(url: str, check: Callable[[], None]) -> None:
    """Call `check` before anything is published below the folder, as long as the object exists
    whose method it is."""
    _fences[url.rstrip("/") + "/"] = weakref.WeakMethod(check)


def check_fences(url: str) -> None:
    """Raise an error if this process may no longer publish in the folder."""
    for root, fence in list(_fences.items()):
        if url.startswith(root) and (check := fence()) is not None:
            check()


class WriterLease(msgspec.Struct, frozen=True):
    """The process that does some work, such as a save."""

    host: str
    pid: int
    process_start: str
    """Start time of the process in the kernel's ticks: a later process may have the same number."""
    unix_s: float
    machine: str = ""
    """Where the process number is valid. Containers of one host may have the same host name but
    different process numbers."""
    has_left: bool = False
    """True if the process has given up the work. It may still run."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_seen(self) -> bool:
        """Return True if this machine can see whether the process exists."""
        return bool(self.machine) and self.machine == machine()

    def is_of(self, other: WriterLease) -> bool:
        """Return True if it is of the same process, and neither has given up the work."""
        return self.process == other.process and not self.has_left and not other.has_left

    @property
    def process(self) -> tuple[Any, ...]:
        """What distinguishes the process from all others."""
        return self.pid, self.process_start, self.machine, self.host

    def is_running(self, work: str) -> bool:
        """Return True if the process exists, as far as this machine sees. If it is this process, it
        must also be doing that work."""
        if self.has_left or not self.is_seen() or (self.pid == os.getpid() and work not in _running):
            return False
        return not is_gone(self.pid, self.process_start)


def take_lease(storage: Storage, name: str, work: str) -> WriterLease:
    """Publish under `name` that this process does the work, until `release_lease`. `work` is unique text."""
    _running.add(work)
    pid = os.getpid()
    mine = WriterLease(socket.gethostname(), pid, start_of(pid), time.time(), machine())
    try:
        storage.publish(name, msgspec.json.encode(mine))
    except BaseException:
        release_lease(work)
        raise
    return mine


def release_lease(work: str) -> None:
    """Publish that this process no longer does the work, even if its claim could not be removed."""
    _running.discard(work)


def read_lease(storage: Storage, name: str) -> WriterLease | None:
    """Read the claim of that name. None if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(storage.read(name), type=WriterLease)
    except (CheckpointNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def may_be_alive(found: WriterLease | None, work: str) -> bool:
    """Return whether a process may still do the work."""
    if found is None:
        return False
    if found.has_left or found.is_seen():
        return found.is_running(work)
    return time.time() - found.unix_s < _FOREIGN_AGE_S


class KeptLease:
    """This process's claim, published again every `BEAT_S` seconds, for processes that cannot see
    this one."""

    def __init__(self, storage: Storage, name: str, work: str) -> None:
        self._storage, self._name, self._work = storage, name, work
        self.holder = take_lease(storage, name, work)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if not self._say(has_left=False):  # this process must stop
                    return
            except ReshardError as error:
                _log.warning("%s of %s could not be published again: %s", self._name, self._storage.url, error)

    @property
    def is_taken(self) -> bool:
        """Whether another process, which considered this one dead, has taken the claim and continues."""
        found = read_lease(self._storage, self._name)
        return found is None or found.process != self.holder.process

    def _say(self, *, has_left: bool) -> bool:
        """Publish the claim. Returns False if another process has taken it: then it stays unchanged."""
        said = msgspec.structs.replace(self.holder, unix_s=time.time(), has_left=has_left)
        try:
            self._storage.publish_while(self._name, msgspec.json.encode(said), self._check)
        except StorageError:
            if self.is_taken:
                return False
            raise
        return True

    def _check(self) -> None:
        if self.is_taken:
            raise StorageError(f"{self._name} of {self._storage.url} was taken by another process")

    def stop(self) -> None:
        """Stop publishing. The claim stays, but this process no longer does the work."""
        self._ended.set()
        self._thread.join()
        release_lease(self._work)

    def give_up(self) -> bool:
        """Publish that the work is given up: other processes stop their parts of it, and any of
        them may continue it.

        Returns False if another process has already taken the claim.
        """
        self.stop()
        return self._say(has_left=True)


def is_kept(storage: Storage, name: str, found: WriterLease) -> bool:
    """Return whether a process that this machine cannot see renews its claim within `WATCH_S` seconds."""
    _log.info("waiting %.0f s to see whether %s is still at work in %s", WATCH_S, found, storage.url)
    stop = time.monotonic() + WATCH_S
    while time.monotonic() < stop:
        time.sleep(BEAT_S / 4)
        now = read_lease(storage, name)
        if now is None or now.has_left:
            return False
        if now != found:
            return True
    return False
