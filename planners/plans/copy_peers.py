"""Copies of what each rank has written, on other hosts, so that the loss of any `k` hosts loses nothing. Pure.

Hosts are put into groups, each as small as it may be (k + 1 hosts, at most 2k + 1), and each group is a ring: what a
host wrote is also on the next k of its ring.

    ring 0   a -> b -> a          k = 1: nothing is lost unless a and b are, or two of c, d, e that are neighbors
    ring 1   c -> d -> e -> c

So more than k hosts may be lost, if they are in different rings. If copies were spread over all hosts, every pair
of hosts would share some bytes, and any k + 1 lost hosts would lose something. Hosts with much go together with
hosts that have little, since each keeps what its neighbors wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from planners.errors import PlanError
from planners.findings import Finding
from planners.geometry.arrays import grouped
from planners.units import format_count, format_some


@dataclass(frozen=True)
class CopyPlan:
    """Which ranks keep copies of the data of other ranks. The host of each rank has the first copy of its data."""

    hosts: tuple[str, ...]
    """Host of each rank."""
    nbytes: tuple[int, ...]
    """Bytes that each rank writes."""
    copies: int
    """Number of copies of each byte, not counting the first. This number of hosts may be lost."""
    rings: tuple[tuple[str, ...], ...]
    keepers: tuple[tuple[int, ...], ...]
    """For each rank, the ranks that receive a copy."""

    covers: ClassVar[str] = "the bytes of each rank are kept on the required number of other hosts"

    @property
    def names(self) -> tuple[str, ...]:
        """Host of each rank."""
        return self.hosts

    @cached_property
    def ring_of(self) -> dict[str, int]:
        """Index of each host's ring."""
        return {host: number for number, ring in enumerate(self.rings) for host in ring}

    @cached_property
    def bytes_by_host(self) -> dict[str, int]:
        """Return the bytes that each host holds of one generation: what its ranks wrote, and copies."""
        held = dict.fromkeys(self.ring_of, 0)
        for host, nbytes, keepers in zip(self.hosts, self.nbytes, self.keepers, strict=True):
            for place in (host, *(self.hosts[keeper] for keeper in keepers)):
                held[place] += nbytes
        return held

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent between hosts for one generation."""
        return sum(nbytes * len(keepers) for nbytes, keepers in zip(self.nbytes, self.keepers, strict=True))

    def findings(self) -> Iterator[Finding]:
        """Yield the ranks whose bytes are not on `copies + 1` different hosts."""
        for rank, keepers in enumerate(self.keepers):
            places = {self.hosts[rank], *(self.hosts[keeper] for keeper in keepers)}
            if len(places) != self.copies + 1:
                yield Finding(f"its data is on {len(places)} hosts instead of {self.copies + 1}", rank=rank)
            if len(places) != 1 + len(keepers):
                yield Finding("two copies of its data are on the same host", rank=rank)

    def __str__(self) -> str:
        return f"{format_count(self.copies, 'copy')} on {format_count(len(self.ring_of), 'host')}"

    def lost(self, hosts: Collection[str]) -> list[int]:
        """Return the ranks whose bytes have no copy left if these hosts are lost."""
        gone = set(hosts)
        return [
            rank
            for rank, keepers in enumerate(self.keepers)
            if self.nbytes[rank] and {self.hosts[rank], *(self.hosts[keeper] for keeper in keepers)} <= gone
        ]


def plan_copies(hosts: Sequence[str], nbytes: Sequence[int], *, copies: int = 1) -> CopyPlan:
    """Choose which ranks keep copies of which data.

    Args:
        hosts: name of each rank's host, by rank.
        nbytes: bytes that each rank writes, by rank.
        copies: number of hosts that may be lost.

    Raises PlanError for fewer hosts than `copies + 1`, and for invalid numbers.
    """
    if len(hosts) != len(nbytes) or any(size < 0 for size in nbytes):
        raise PlanError(f"each of {len(hosts)} ranks must say how many bytes it writes, got {len(nbytes)} numbers")
    written = dict.fromkeys(hosts, 0)
    for host, size in zip(hosts, nbytes, strict=True):
        written[host] += size
    if copies < 0 or len(written) < copies + 1:
        raise PlanError(
            f"copies={copies} on other hosts needs {copies + 1} hosts or more, but there are {len(written)} "
            f"({format_some(sorted(written))}): ask for fewer copies, or run on more hosts"
        )
    rings = _rings(written, copies)
    following = {
        host: [ring[(i + step) % len(ring)] for step in range(1, copies + 1)]
        for ring in rings
        for i, host in enumerate(ring)
    }
    return CopyPlan(tuple(hosts), tuple(nbytes), copies, rings, _keepers(hosts, nbytes, following))


def _rings(written: dict[str, int], copies: int) -> tuple[tuple[str, ...], ...]:
    """Distributed from the host with most to the one with least, back and forth."""
    count = len(written) // (copies + 1)
    rings: list[list[str]] = [[] for _ in range(count)]
    for number, host in enumerate(sorted(written, key=lambda host: (-written[host], host))):
        turn, at = divmod(number, count)
        rings[count - 1 - at if turn % 2 else at].append(host)
    return tuple(map(tuple, rings))


def _keepers(
    hosts: Sequence[str], nbytes: Sequence[int], following: dict[str, list[str]]
) -> tuple[tuple[int, ...], ...]:
    """For each rank, choose one rank on each of the next hosts: the one with the fewest bytes so
    far. The largest come first."""
    ranks = grouped((host, rank) for rank, host in enumerate(hosts))
    got, out = [0] * len(hosts), [()] * len(hosts)  # type: tuple[list[int], list[tuple[int, ...]]]
    for rank in sorted(range(len(hosts)), key=lambda rank: -nbytes[rank]):
        chosen = [min(ranks[host], key=lambda keeper: (got[keeper], keeper)) for host in following[hosts[rank]]]
        for keeper in chosen:
            got[keeper] += nbytes[rank]
        out[rank] = tuple(chosen)
    return tuple(out)
