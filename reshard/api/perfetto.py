"""Traces of phases in the format of Chrome, which Perfetto opens: each rank is a process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from reshard.errors import StorageError
from reshard.ranks.timespans import Span

_SKEW_NS = 50_000_000
"""If the clocks of hosts differ by more than this, they are set by the moment at which the ranks
met. Smaller differences cannot be corrected this way."""


class RankPhases(msgspec.Struct):
    """The phases of one rank."""

    rank: int
    met_ns: int
    """When it had met the others, by its own clock."""
    phases: Span


def trace_of(phases: Mapping[int, Span], skews: Mapping[int, int]) -> dict[str, Any]:
    """Build a trace of all ranks.

    Args:
        skews: how many ns the clock of each rank is ahead.
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
    """Yield the events of a span and of all spans inside it. Threads are numbered in order."""
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


def write_trace(path: str, ranks: Sequence[RankPhases]) -> None:
    """Write the file completely, or not at all."""
    met = ranks[0].met_ns
    skews = {one.rank: one.met_ns - met for one in ranks if abs(one.met_ns - met) > _SKEW_NS}
    trace, made = trace_of({one.rank: one.phases for one in ranks}, skews), ""
    try:
        number, made = tempfile.mkstemp(prefix=".timeline-", dir=os.path.dirname(path) or ".")
        with os.fdopen(number, "wb") as file:
            file.write(msgspec.json.encode(trace))
        os.replace(made, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(made)
        raise StorageError(
            f"the timeline cannot be written to {path}: {error.strerror}. Pass a file in a local folder that exists"
        ) from error
