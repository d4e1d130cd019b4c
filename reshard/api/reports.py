"""What several reports say in the same words: of keys, of what was written, of checksums, of hosts; and of time, of
which all ranks together make a trace."""

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
from reshard.errors import StorageError, renamed
from reshard.ranks.group import Group
from reshard.ranks.progress import EPOCH_NS
from reshard.ranks.spans import Span

__all__ = ["CheckedReport", "FilledReport", "HostsReport", "TimedReport", "WrittenReport", "trace_of"]


@dataclass(frozen=True, repr=False)
class TimedReport(Tabled):
    """Of a verb that takes time."""

    phases: Span = field(compare=False)
    """When each part of it began and ended, on this rank."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Time of this rank, by phase."""
        return self.phases.by_phase()

    @renamed(deadline_s="timeout")
    def timeline(
        self,
        path: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        alone: bool = False,
        timeout: float | timedelta = 300.0,
    ) -> None:
        """Collective: write the phases of all ranks to the file `path`, in the format of Chrome's traces.

        Perfetto and `chrome://tracing` open it: a process a rank, a row a thread, and as a kind of their own the waits
        for other ranks. The first rank writes; all have to call it with their reports of one and the same call.

        Args:
            process_group: the ranks that made the call.
            alone: only this rank's phases, by this rank.
            timeout: how long the call may take, in seconds or as a `timedelta`.

        Raises LayoutError where ranks have reports of different verbs, StorageError where the file cannot be written.
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
    """Of a load or a transfer, which fill a target."""

    missing: tuple[str, ...]
    """Keys of the target that nobody has for it; they keep the values they had."""
    unexpected: tuple[str, ...]
    """Keys that no rank's target has; they were not read or moved."""
    cast: Mapping[str, tuple[str, str]]
    """Key of the target -> (dtype before, dtype of the target) of what was converted."""


@dataclass(frozen=True, repr=False)
class WrittenReport(TimedReport):
    """Of a save or a conversion, which write a checkpoint."""

    tensors: int
    objects: int
    total_bytes: int
    """Bytes of all tensors, each distinct element once."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that holds them."""


@dataclass(frozen=True, repr=False)
class CheckedReport(TimedReport):
    """Of a load or a conversion, which read a checkpoint."""

    format: str
    """Of the checkpoint that was loaded, or written."""
    bytes_unchecked: int
    """Bytes of the elements that were asked for, of a load those of this rank, that nobody compared
    with a checksum: the format has none, `check` was off, or it would have cost too much, see
    `reshard.stored.checksums.may_check`."""
    unchecked: str
    """In words, what was not compared; empty where every byte was, and of a conversion what was
    written with the saved fingerprints."""


@dataclass(frozen=True, repr=False)
class HostsReport(TimedReport):
    """Of what hosts keep in their memory. Each rank has its own."""

    bytes_received: int
    """By this rank, from other hosts: of copies, or of what was recovered."""


# Chrome's traces, which Perfetto opens: ranks are their processes.


_SKEW_NS = 50_000_000
"""Clocks of hosts that are further apart than this are set by the moment at which the ranks had met: by less, meeting
tells no better than the clocks."""


class _RankPhases(msgspec.Struct):
    """What one rank gives."""

    rank: int
    met_ns: int
    """When it had met the others, by its own clock."""
    phases: Span


def trace_of(phases: Mapping[int, Span], skews: Mapping[int, int]) -> dict[str, Any]:
    """A trace of all of them.

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
    """Of a span and all within it; numbers threads as they come."""
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
    """Whole, or not at all."""
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
            f"the timeline cannot be written to {path}: {error}. Give a file of a local folder"
        ) from error
