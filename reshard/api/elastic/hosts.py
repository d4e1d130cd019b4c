"""Which rank is on which host, and whose the folder of a host is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from reshard.control import claims
from reshard.control.group import Group
from reshard.errors import CheckpointError, StorageError, format_ranks
from reshard.storage.local import LocalStorage

__all__ = ["Hosts", "Settings", "free_bytes", "meet"]

_OWNER = "owner.json"


@dataclass(frozen=True)
class Settings:
    """What a `Tier` was made with; see there."""

    folder: Path
    host: str
    copies: int
    process_group: dist.ProcessGroup | None
    max_inflight_bytes: int
    deadline_s: float


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job. The same on every rank, but for `place`."""

    names: tuple[str, ...]
    """Of each rank, by its place in the group."""
    place: int
    """Of this rank in the group."""
    folder: Path
    """Of this rank's host."""

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """The ranks of each host, by their places in the group."""
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.names):
            found.setdefault(name, []).append(place)
        return found

    @property
    def name(self) -> str:
        """Of this rank's host."""
        return self.names[self.place]

    @property
    def mine(self) -> list[int]:
        """The ranks of this host."""
        return self.places[self.name]

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host, which acts for it."""
        return self.mine[0] == self.place


def meet(folder: Path, host: str, group: Group) -> Hosts:
    """Collective: who is where. The first rank of each host claims its folder.

    Raises StorageError if another job that is running has it, or if ranks that name one host do not share its folder.
    """
    names = tuple(name.decode() for name in group.exchange(host.encode()))
    hosts = Hosts(names, group.rank, folder / host)
    storage, work = LocalStorage(hosts.folder), f"elastic {hosts.folder}"
    pids = set(group.among(host, b"%d" % os.getpid()).values())
    if hosts.leads:
        found = claims.read_claim(storage, _OWNER)
        if found is not None and b"%d" % found.pid not in pids and found.is_running(work):
            raise StorageError(
                f"{hosts.folder} belongs to {found}, which is running: another job has it. Give each job a folder of "
                "its own, or end the other one"
            )
        claims.claim(storage, _OWNER, work)
    group.barrier()
    try:
        seen = storage.read(_OWNER)
    except CheckpointError:
        seen = b""
    rows = group.among(host, seen)
    if not seen or len(set(rows.values())) > 1:
        ranks = format_ranks(group.ranks[place] for place in rows)
        raise StorageError(
            f"{ranks} say that they are on host {host!r}, but do not see the same folder {hosts.folder}: ranks of one "
            "host must share it, and hosts must have different names"
        )
    return hosts


def free_bytes(folder: Path) -> int:
    """What the file system of a folder has left. Raises StorageError if it cannot be asked."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise StorageError(f"cannot ask how much room there is in {folder}: {error.strerror or error}") from error
    return found.f_bavail * found.f_frsize
