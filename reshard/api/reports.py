"""Common parts of reports: keys, written bytes, checksums, hosts, and phases."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from planners.geometry.arrays import grouped
from planners.notebooks import Tabled
from planners.units import format_count, format_some
from reshard.api.perfetto import RankPhases, write_trace
from reshard.arguments import renamed
from reshard.errors import format_names
from reshard.ranks.group import Group
from reshard.ranks.progress import EPOCH_NS
from reshard.ranks.timespans import Span


@dataclass(frozen=True, repr=False)
class TimedReport(Tabled):
    """The report of a call that measures its time."""

    phases: Span = field(compare=False)
    """When each phase began and ended, on this rank."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds per phase on this rank."""
        return self.phases.by_phase()

    def _first_of_each(self, *fields: str) -> list[str]:
        """Return `"missing 5 ('a', 'b', 'c', ...)"` for each of these fields that is not empty."""
        return [f"{name} {format_names(its)}" for name in fields if (its := getattr(self, name))]

    def __str__(self) -> str:
        """The report, and a line with the seconds of its phases."""
        return f"{self!r}\n{self.phases}"

    @renamed(deadline_s="timeout")
    def timeline(
        self,
        path: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        alone: bool = False,
        timeout: float | timedelta = 300.0,
    ) -> None:
        """Write the phases of all ranks to the file `path`, in the format of Chrome traces.

        Collective: all ranks call it with their reports of the same call, and the first rank
        writes. Perfetto and `chrome://tracing` open the file. It shows each rank as a process,
        with a row per thread, and marks waits for other ranks.

        Args:
            process_group: the ranks that made the call.
            alone: write only this rank's phases, without other ranks.
            timeout: limit for the call, in seconds or as a `timedelta`.

        Raises LayoutError if ranks pass reports of different calls, and StorageError if the file
        cannot be written.
        """
        group = Group(process_group, alone=alone, deadline_s=timeout)
        with group.together("timeline"):
            group.same_options("timeline", {"report": self.phases.name})
            group.barrier()
            told = group.gather(RankPhases(group.job_rank, EPOCH_NS + time.perf_counter_ns(), self.phases))
            if told is not None:
                write_trace(os.fspath(path), told)


def overflows(counts: Mapping[str, int], dtypes: Mapping[str, str]) -> list[str]:
    """Describe `overflowed` of a report. Empty if nothing overflowed. `dtypes`: those of the keys."""
    clauses = []
    for dtype, its in grouped((dtypes.get(key, "a dtype of the mapping"), key) for key in counts).items():
        each = [f"{format_count(counts[key], 'element')} of {key!r}" for key in its]
        verb = "does" if [counts[key] for key in its] == [1] else "do"
        clauses.append(f"{format_some(each, 3)} {verb} not fit into {dtype}")
    return ["; ".join(clauses)] if clauses else []


@dataclass(frozen=True, repr=False)
class FilledReport(TimedReport):
    """The report of a load or transfer, which fills a target."""

    missing: tuple[str, ...]
    """Keys of the target that the source does not have. They keep their values."""
    unexpected: tuple[str, ...]
    """Keys of the source that no rank's target has. They were not read or moved."""
    cast: Mapping[str, tuple[str, str]]
    """Key of the target -> (dtype before, dtype of the target) of converted tensors. A load also
    lists numbers that it stored as a 0-d tensor, or the reverse. These convert exactly, with any
    `dtype_policy`."""
    overflowed: Mapping[str, int]
    """Key of the target -> number of finite elements beyond the range of its dtype. They became
    infinite, NaN, or another number. A load counts this rank's elements, or with
    `read_once="job"` those of all ranks. A transfer counts elements of this rank's source in CPU
    memory. It does not count elements on devices, because it does not wait."""

    @property
    def _overflows(self) -> list[str]:
        return overflows(self.overflowed, {key: self.cast[key][1] for key in self.overflowed if key in self.cast})


@dataclass(frozen=True, repr=False)
class WrittenReport(TimedReport):
    """The report of a save or conversion, which writes a checkpoint."""

    tensors: int
    objects: int
    """Values other than tensors. A list or tuple of plain values is one."""
    total_bytes: int
    """Bytes of all tensors and numpy arrays. Each element counts once."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that stores them."""


@dataclass(frozen=True, repr=False)
class CheckedReport(TimedReport):
    """The report of a load or conversion, which reads a checkpoint."""

    format: str
    """Format of the checkpoint that was loaded or written."""
    bytes_unchecked: int
    """Bytes of the requested elements (in a load, of this rank) that were not compared with a
    checksum. The format has none, `check` was off, or the check would have read too much: see
    docs/what-ok-means.md."""
    unchecked: str
    """What was not compared, in words. Empty if every byte was compared, and if a conversion
    wrote the saved fingerprints."""


@dataclass(frozen=True, repr=False)
class HostsReport(TimedReport):
    """The report of a call that uses the memory of hosts. Each rank has its own."""

    bytes_received: int
    """Bytes that this rank received from other hosts: copies or recovered data."""
