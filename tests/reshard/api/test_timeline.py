"""What a report says of time, and the trace that all ranks write of it together."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch

import reshard
from reshard.api import reports
from reshard.api.perfetto import trace_of
from reshard.elastic import Tier
from reshard.errors import LayoutError, RankFailedError, ReshardError, StorageError
from reshard.ranks import progress
from reshard.ranks.progress import phase
from reshard.ranks.timespans import Span
from reshard.storage.memory import MemoryStorage
from tests import gloo

STATE = {"model": {"w": torch.arange(600.0).reshape(20, 30), "b": torch.ones(3)}, "step": 7}


def spans(root: Span) -> list[Span]:
    return [root, *(span for inner in root.inner for span in spans(inner))]


def test_phases_are_within_those_under_way_and_fail_with_them() -> None:
    with phase("outer") as outer:
        with phase("first"), phase("inner"):
            pass
        with pytest.raises(KeyError), phase("second"):
            raise KeyError
        with phase("a wait", waits=True):
            pass
        with phase("first"):
            time.sleep(0.01)
    with phase("other") as other:
        pass
    assert [span.name for span in spans(outer)] == ["outer", "first", "inner", "second", "a wait", "first"]
    assert [span.error for span in outer.inner] == ["", "KeyError", "", ""]
    assert list(outer.by_phase()) == ["first", "second"]
    assert outer.by_phase()["first"] >= 0.01
    assert re.match(r"first \d+ ms, second ", str(outer))
    assert not other.inner
    for span in spans(outer):
        assert all(span.began_ns <= inner.began_ns <= inner.ended_ns <= span.ended_ns for inner in span.inner)


def test_every_verb_says_where_its_time_went(tmp_path: Path) -> None:
    target = {"model": {"w": torch.zeros(20, 30), "b": torch.zeros(3)}, "step": 0}
    saved = reshard.save(STATE, tmp_path / "a")
    loaded = reshard.load(target, tmp_path / "a")
    moved = reshard.redistribute(STATE, target)
    converted = reshard.convert(tmp_path / "a", tmp_path / "b", format="safetensors")
    tier = Tier(tmp_path / "tier", host="h", copies=0)
    kept = tier.save(STATE, step=7)
    recovered = tier.restore(target)

    assert [*saved.seconds][-4:] == ["begin", "write", "publish", "clean up"]
    assert [*loaded.seconds] == ["open", "match", "plan", "check", "read", "assign"]
    assert [*moved.seconds] == ["agree", "plan", "bind", "check replicas", "move"]
    assert [*converted.phases.by_phase()] == ["open", "agree", "convert", "publish"]
    assert [*kept.seconds] == ["plan", "write", "copy", "publish", "remove"]
    assert [*recovered.seconds] == ["find", "check", "load"]
    assert 0 < sum(converted.phases.by_phase().values()) <= converted.phases.seconds
    [write] = [span for span in saved.phases.inner if span.name == "write"]
    assert write.nbytes == saved.total_bytes == 603 * 4
    assert [span.name for span in write.inner] == ["fingerprints"], "on a thread of its own"
    assert write.inner[0].thread != write.thread
    for report in (saved, loaded, moved, converted, kept, recovered):
        assert sum(report.phases.by_phase().values()) <= report.phases.seconds
        assert f'<td style="text-align: left">{report.phases}</td>' in report._repr_html_()
        report.timeline(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["verb"] == report.phases.name


def test_runs_of_a_prepared_transfer_tell_once_what_it_took_to_prepare() -> None:
    prepared = reshard.prepare(STATE, {"model": {k: torch.zeros_like(v) for k, v in STATE["model"].items()}, "step": 0})
    assert "bind" in prepared.run().seconds
    assert [*prepared.run().seconds] == ["move"]


class Slow(MemoryStorage):
    """Publishes late."""

    def publish(self, name: str, data: bytes) -> None:
        time.sleep(0.1)
        super().publish(name, data)


def test_a_save_in_the_background_is_told_on_its_thread() -> None:
    report = reshard.async_save(STATE, Slow()).result()
    threads = {span.name: span.thread for span in report.phases.inner}
    assert threads["stage"] == threading.current_thread().name
    assert threads["publish"].startswith("reshard-save-")
    assert report.phases.seconds >= 0.1 > (report.phases.ended_ns - report.phases.began_ns) / 1e9, (
        "the call waited less"
    )


def late(rank: int) -> None:
    """On one rank everything that is written takes longer."""
    if torch.distributed.get_rank() == rank:
        from reshard.native import data_file

        real = data_file.write_file

        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(1.0)
            return real(*args, **kwargs)

        import reshard.api.save_job

        reshard.api.save_job.write_file = slow


def saved_late(folder: str) -> tuple[Span, list[str]]:
    rank = torch.distributed.get_rank()
    late(1)
    if rank == 2:
        progress.EPOCH_NS += 3_600_000_000_000  # for what is recorded from here on
        reports.EPOCH_NS = progress.EPOCH_NS
    state = {"shared": torch.arange(4096.0), "own": reshard.PerRank(torch.full((64,), float(rank)))}
    report = reshard.save(state, f"{folder}/ck")
    report.timeline(f"{folder}/trace.json")
    errors = []
    for phases, path in ((Span(f"verb {rank % 2}", "", 0), "trace2.json"), (report.phases, "none/trace.json")):
        try:
            type(report).timeline(_Other(phases), f"{folder}/{path}")
        except ReshardError as error:
            errors.append(f"{type(error).__name__}: {error}")
    report.timeline(f"{folder}/alone{rank}.json", alone=True)
    return report.phases, errors


class _Other:
    def __init__(self, phases: Span) -> None:
        self.phases = phases


def test_all_ranks_write_one_trace(tmp_path: Path) -> None:
    told = gloo.run(saved_late, 3, str(tmp_path))
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["name"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}

    assert {event["pid"] for event in events} == {0, 1, 2}
    assert names[1, "process_name"] == {"name": "rank 1"}
    for rank, (root, _) in enumerate(told):
        mine = [(e["name"], e["dur"]) for e in events if e["pid"] == rank]
        assert mine == [(span.name, (span.ended_ns - span.began_ns) / 1e3) for span in spans(root)]
    # the clock of rank 2 is an hour fast, and its phases stand beside those of the others nevertheless
    assert 3599 < trace["otherData"]["clocks_fast_by_seconds"]["2"] < 3601
    assert [*trace["otherData"]["clocks_fast_by_seconds"]] == ["2"]
    assert all(0 <= event["ts"] < 60e6 for event in events)
    # who was late wrote for long, and the others waited for it
    longest = {
        rank: max((e for e in events if e["pid"] == rank), key=lambda e: e["dur"] * (e["cat"] == "wait"))
        for rank in range(3)
    }
    assert longest[0]["dur"] > 2e5 < longest[2]["dur"]
    assert longest[1]["dur"] < 2e5 < next(e["dur"] for e in events if e["pid"] == 1 and e["name"] == "write")

    for rank, (_, errors) in enumerate(told):
        assert errors[0].startswith(f"{LayoutError.__name__}: the ranks call timeline with different options")
        kind = StorageError if rank == 0 else RankFailedError
        assert errors[1].startswith(kind.__name__)
        assert "the timeline cannot be written to" in errors[1]
        alone = json.loads((tmp_path / f"alone{rank}.json").read_text())
        assert {event["pid"] for event in alone["traceEvents"]} == {rank}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "alone0.json", "alone1.json", "alone2.json", "ck", "trace.json",
    ]  # fmt: skip


def test_a_trace_counts_from_its_first_event_and_has_a_row_a_thread() -> None:
    inner = Span("inner", "t2", 1_500, 2_500, nbytes=9, error="KeyError")
    wait = Span("wait", "t1", 1_000, 4_000, waits=True)
    trace = trace_of(
        {4: Span("save", "t1", 1_000, 5_000, inner=[inner, wait]), 6: Span("save", "t1", 2_000, 3_000)}, {}
    )
    first, second, third, *rest = trace["traceEvents"]

    assert first == {"name": "save", "cat": "phase", "ph": "X", "pid": 4, "tid": 0, "ts": 0.0, "dur": 4.0, "args": {}}
    assert (second["tid"], second["ts"], second["args"]) == (1, 0.5, {"bytes": 9, "error": "KeyError"})
    assert third["cat"] == "wait"
    assert [(e["name"], e["tid"], e["args"]) for e in rest if e["name"] == "thread_name" and e["pid"] == 4] == [
        ("thread_name", 0, {"name": "t1"}), ("thread_name", 1, {"name": "t2"}),
    ]  # fmt: skip
    assert trace["otherData"]["began_unix_ns"] == "1000"
