"""What several reports have in common: keys, written bytes, checksums, hosts, and phases."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from planners.notebooks import Tabled
from reshard.arguments import renamed
from reshard.errors import StorageError, format_names
from reshard.ranks.group import Group
from reshard.ranks.progress import EPOCH_NS
from reshard.ranks.spans import Span

__all__ = ["CheckedReport", "FilledReport", "HostsReport", "TimedReport", "WrittenReport", "trace_of"]


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
        """`"missing 5 ('a', 'b', 'c', ...)"` of each of these fields that has any."""
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

        Collective: all ranks call it with their reports of the same call, and the first rank writes. Perfetto and
        `chrome://tracing` open the file. It shows each rank as a process, with a row per thread, and marks waits for
        other ranks.

        Args:
            process_group: the ranks that made the call.
            alone: write only this rank's phases, without other ranks.
            timeout: limit for the call, in seconds or as a `timedelta`.

        Raises LayoutError if ranks pass reports of different calls, and StorageError if the file cannot be written.
        """
        group = Group(process_group, alone=alone, deadline_s=timeout)
        with group.together("timeline"):
            group.same_options("timeline", {"report": self.phases.name})
            group.barrier()
            told = group.gather(_RankPhases(group.job_rank, EPOCH_NS + time.perf_counter_ns(), self.phases))
            if told is not None:
                met = told[0].met_ns
                skews = {one.rank: one.met_ns - met for one in told if abs(one.met_ns - met) > _SKEW_NS}
                _write(os.fspath(path), trace_of({one.rank: one.phases for one in told}, skews))


@dataclass(frozen=True, repr=False)
class FilledReport(TimedReport):
    """The report of a load or transfer, which fills a target."""

    missing: tuple[str, ...]
    """Keys of the target that the source does not have. They keep their values."""
    unexpected: tuple[str, ...]
    """Keys of the source that no rank's target has. They were not read or moved."""
    cast: Mapping[str, tuple[str, str]]
    """Key of the target -> (dtype before, dtype of the target) of converted tensors."""


@dataclass(frozen=True, repr=False)
class WrittenReport(TimedReport):
    """The report of a save or conversion, which writes a checkpoint."""

    tensors: int
    objects: int
    """Values other than tensors. A list or tuple of plain values is one."""
    total_bytes: int
    """Bytes of all tensors. Each element counts once."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that stores them."""


@dataclass(frozen=True, repr=False)
class CheckedReport(TimedReport):
    """The report of a load or conversion, which reads a checkpoint."""

    format: str
    """Format of the checkpoint that was loaded or written."""
    bytes_unchecked: int
    """Bytes of the requested elements (in a load, of this rank) that were not compared with a checksum: the format has
    none, `check` was off, or the check would have read too much, see `reshard.stored.checksums.may_check`."""
    unchecked: str
    """In words, what was not compared. Empty if every byte was, and for a conversion that wrote the saved fingerprints.
    """


@dataclass(frozen=True, repr=False)
class HostsReport(TimedReport):
    """The report of a call that uses the memory of hosts. Each rank has its own."""

    bytes_received: int
    """Bytes that this rank received from other hosts: copies or recovered data."""


# Chrome's traces, which Perfetto opens: ranks are their processes.


_SKEW_NS = 50_000_000
"""Clocks of hosts that are further apart than this are set by the moment at which the ranks met. For smaller
differences, the clocks are as good as the meeting."""


class _RankPhases(msgspec.Struct):
    """The phases of one rank."""

    rank: int
    met_ns: int
    """When it had met the others, by its own clock."""
    phases: Span


def trace_of(phases: Mapping[int, Span], skews: Mapping[int, int]) -> dict[str, Any]:
    """Build a trace of all ranks.

    Args:
        skews: by how many ns the clock of a rank is fast.
    """
    start = min(span.began_ns - skews.get(rank, 0) for rank, span in phases.items())
    events: list[dict[str, Any]] = []
    for rank, root in phases.items():
        threads: dict[str, int] = {}
        events += _events(root, rank, start + skews.get(rank, 0), threads)
        events += [_named("process_name", rank, 0, f"rank {rank}"), _named("process_sort_index", rank, 0, rank)]
        events += [_named("thread_name", rank, number, thread) for thread, number in threads.items()]
    root = next(iter(phases.values()))
    seconds = {str(rank): skew / 1e9 for rank, skew in skews.items()}
    facts = {"verb": root.name, "began_unix_ns": str(start), "clocks_fast_by_seconds": seconds}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _events(span: Span, rank: int, start_ns: int, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Return the events of a span and all within it. Threads are numbered in order."""
    thread = threads.setdefault(span.thread, len(threads))
    facts: dict[str, Any] = {"bytes": span.nbytes} if span.nbytes else {}
    yield {
        "name": span.name, "cat": "wait" if span.waits else "phase", "ph": "X", "pid": rank, "tid": thread,
        "ts": (span.began_ns - start_ns) / 1e3, "dur": (span.ended_ns - span.began_ns) / 1e3,
        "args": facts | ({"error": span.error} if span.error else {}),
    }  # fmt: skip
    for inner in span.inner:
        yield from _events(inner, rank, start_ns, threads)


def _named(what: str, rank: int, thread: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if what.endswith("index") else "name"
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {key: value}}


def _write(path: str, trace: Mapping[str, Any]) -> None:
    """Write the file completely, or not at all."""
    made = ""
    try:
        number, made = tempfile.mkstemp(prefix=".timeline-", dir=os.path.dirname(path) or ".")
        with os.fdopen(number, "wb") as file:
            file.write(msgspec.json.encode(trace))
        os.replace(made, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(made)
        raise StorageError(
            f"the timeline cannot be written to {path}: {error}. Pass the path of a local file"
        ) from error
