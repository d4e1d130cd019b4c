"""What OpenTelemetry hears of calls, by its own SDK, and that nobody pays for it who has no use for it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.errors import CheckpointNotFoundError, FormatError
from reshard.ranks import progress
from reshard.ranks.progress import current, phase, rest_of_call
from reshard.storage.memory import MemoryStorage

ROOT = Path(__file__).parents[3]
STATE = {"model": {"w": torch.arange(600.0).reshape(20, 30), "b": torch.ones(3)}, "step": 7}
NBYTES = 603 * 4
has_sdk = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk")
needs_sdk = pytest.mark.skipif(not has_sdk, reason="opentelemetry-sdk, of the extra `test`, is not installed")


def told_by(job: str, *arguments: object) -> Any:
    """By a fresh interpreter, since providers are set once in a process."""
    code = f"from {__name__} import {job} as job; import json; print(json.dumps(job(*{[str(a) for a in arguments]!r})))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {"err": done.stderr, **json.loads(done.stdout.splitlines()[-1])}


class Failing(MemoryStorage):
    """Nothing gets into it in the end."""

    def publish(self, name: str, data: bytes) -> None:
        raise FormatError("not published")


def verbs(folder: str) -> dict[str, Any]:
    """Some calls, and what the SDK had of them."""
    reshard.save(STATE, f"{folder}/before")
    before = [name for name in sys.modules if name.startswith("opentelemetry.")]

    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reshard.save(STATE, f"{folder}/unset")  # imported, and not set up yet
    exporter, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))

    target = {"model": {"w": torch.zeros(20, 30), "b": torch.zeros(3)}, "step": 0}
    with trace.get_tracer("mine").start_as_current_span("training step"):
        saved = reshard.save(STATE, f"{folder}/a")
    reshard.async_save(STATE, Path(folder) / "b").result()
    reshard.load(target, reshard.open(f"{folder}/a"))
    with pytest.raises(CheckpointNotFoundError):
        reshard.load(target, f"{folder}/none")
    with pytest.raises(FormatError):
        reshard.async_save(STATE, Failing()).result()
    reshard.redistribute(STATE, target)
    reshard.convert(f"{folder}/a", f"{folder}/c", format="safetensors")
    assert reshard.verify(f"{folder}/a").ok
    assert reshard.compare(f"{folder}/a", f"{folder}/b").ok
    reshard.fingerprint(STATE)
    reshard.dcp.save(STATE, checkpoint_id=f"{folder}/dcp", no_dist=True)
    dist.init_process_group("fake", rank=2, world_size=4, store=dist.HashStore())
    reshard.save(STATE, f"{folder}/d", alone=True)

    from reshard.ranks import telemetry

    telemetry.tell = None  # what can go wrong there
    reshard.save(STATE, f"{folder}/e", alone=True)
    telemetry_metrics = reader.get_metrics_data()
    assert telemetry_metrics is not None
    return {
        "before": before,
        "seconds": saved.phases.seconds,
        "spans": [json.loads(span.to_json()) for span in exporter.get_finished_spans()],
        "metrics": json.loads(telemetry_metrics.to_json())["resource_metrics"][0]["scope_metrics"],
    }


@needs_sdk
def test_a_call_is_a_span_with_its_phases_and_two_numbers(tmp_path: Path) -> None:
    told = told_by("verbs", tmp_path)
    assert told["before"] == [], "nothing is imported for those who have not"
    spans = told["spans"]
    by_id = {span["context"]["span_id"]: span for span in spans}
    calls = [span for span in spans if span["name"].startswith("reshard.")]
    assert [(call["name"][8:], call["attributes"].get("reshard.path"), call["attributes"]["reshard.rank"],
             call["status"]["status_code"]) for call in calls] == [
        ("save", f"{tmp_path}/a", 0, "UNSET"),
        ("async_save", f"{tmp_path}/b", 0, "UNSET"),
        ("load", f"{tmp_path}/a", 0, "UNSET"),
        ("load", f"{tmp_path}/none", 0, "ERROR"),
        ("async_save", Failing().url, 0, "ERROR"),
        ("prepare", None, 0, "UNSET"),
        ("redistribute", None, 0, "UNSET"),
        ("convert", f"{tmp_path}/c", 0, "UNSET"),
        ("verify", f"{tmp_path}/a", 0, "UNSET"),
        ("compare", f"{tmp_path}/a and {tmp_path}/b", 0, "UNSET"),
        ("save", f"{tmp_path}/dcp", 0, "UNSET"),
        ("save", f"{tmp_path}/d", 2, "UNSET"),
    ]  # fmt: skip
    save, background, _, missing, broken, *_ = calls
    assert by_id[save["parent_id"]]["name"] == "training step"
    assert background["parent_id"] is None
    assert missing["attributes"]["error.type"] == "CheckpointNotFoundError"
    assert broken["status"]["description"] == "FormatError"
    assert [call["attributes"]["reshard.bytes"] for call in calls[:5]] == [NBYTES, NBYTES, NBYTES, 0, 0]
    assert calls[10]["attributes"]["reshard.bytes"] > NBYTES, "a save of DCP, with headers"

    inner: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        inner.setdefault(span["parent_id"], []).append(span)
    phases = {span["name"]: span for span in inner[save["context"]["span_id"]]}
    assert [*phases] == [
        "wait for earlier saves",
        "plan",
        "check existing",
        "stage",
        "begin",
        "write",
        "publish",
        "clean up",
    ]
    assert phases["write"]["attributes"]["reshard.bytes"] == NBYTES
    assert all(
        {"reshard.rank", "thread.name", "reshard.bytes"} <= each["attributes"].keys() for each in phases.values()
    )
    [prints] = inner[phases["write"]["context"]["span_id"]]
    assert (prints["name"], prints["attributes"]["reshard.rank"]) == ("fingerprints", 0)
    assert prints["attributes"]["thread.name"] != phases["write"]["attributes"]["thread.name"]
    failed = [span["name"] for span in inner[broken["context"]["span_id"]] if span["status"]["status_code"] == "ERROR"]
    assert failed == ["begin"]
    late = {span["name"]: span for span in inner[background["context"]["span_id"]]}["clean up"]
    assert late["end_time"] <= background["end_time"], "a call is over when its background is"
    assert all(span["start_time"] <= span["end_time"] for span in spans)

    [metrics] = [scope["metrics"] for scope in told["metrics"] if scope["scope"]["name"] == "reshard"]
    points = {one["name"]: one["data"]["data_points"] for one in metrics}
    counts = {
        (of["reshard.operation"], of.get("error.type"), of["reshard.rank"]): one["count"]
        for one in points["reshard.duration"]
        for of in [one["attributes"]]
    }  # fmt: skip
    assert counts == {
        ("save", None, 0): 2, ("save", None, 2): 1, ("async_save", None, 0): 1, ("async_save", "FormatError", 0): 1,
        ("load", None, 0): 1, ("load", "CheckpointNotFoundError", 0): 1, ("prepare", None, 0): 1,
        ("redistribute", None, 0): 1, ("convert", None, 0): 1, ("verify", None, 0): 1, ("compare", None, 0): 1,
    }  # fmt: skip
    saves = [
        one
        for one in points["reshard.duration"]
        if one["attributes"] == {"reshard.operation": "save", "reshard.rank": 0}
    ]
    assert [one["sum"] > told["seconds"] for one in saves] == [True]
    moved = {
        (one["attributes"]["reshard.operation"], one["attributes"].get("error.type")): one["value"]
        for one in points["reshard.bytes"]
    }
    assert (moved["load", None], moved["load", "CheckpointNotFoundError"]) == (NBYTES, 0)
    assert "OpenTelemetry could not record save" in told["err"], "and the save was made"
    assert reshard.verify(tmp_path / "e").ok


def test_a_call_is_told_once_though_its_background_fails_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress, "_tell", lambda call: told.append(call.error))
    with phase("call", goes_on=True), pytest.raises(FormatError), rest_of_call():
        raise FormatError("at once")
    assert told == ["FormatError"]
    with pytest.raises(FormatError), phase("call", goes_on=True):
        raise FormatError("before anything goes on")
    assert told == ["FormatError"] * 2


def test_phases_cost_next_to_nothing(tmp_path: Path) -> None:
    def cheapest(tries: int, work: Any) -> float:
        taken = []
        for _ in range(tries):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return min(taken)

    def thousand() -> None:
        with phase("call"):
            for _ in range(1000):
                with phase("phase"):
                    pass

    state = {"w": torch.ones(50 << 18)}
    report = reshard.save(state, tmp_path / "ck")
    phases = len(report.phases.inner) + sum(len(span.inner) for span in report.phases.inner) + 1
    whole = cheapest(3, lambda: reshard.save(state, tmp_path / "ck"))
    share = phases * cheapest(5, thousand) / 1000 / whole
    assert current.get(None) is None
    assert phases >= 10
    assert share <= 0.005, f"{share:.2%} of a save of 50 MiB"
