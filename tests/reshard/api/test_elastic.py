"""`reshard.elastic`: hosts that are lost, with real processes; and on simulated hosts what is refused, filled, told."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

import reshard
from planners import Mesh, Shard as S, TensorLayout, TensorSpec
from reshard.api.elastic import tier as keeping
from reshard.api.elastic.generation import GenerationFolder, Incarnation, ManifestStamp, Recorded, meet
from reshard.api.elastic.lineage import FoundGenerations
from reshard.api.tasks import Processes
from reshard.cli.app import run
from reshard.elastic import Tier
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    LayoutError,
    OptionError,
    RankFailedError,
    ReshardError,
    StorageError,
)
from reshard.native import commit as generations
from reshard.native.manifest import HF_INDEX
from reshard.ranks.liveness import WriterLease
from tests import gloo
from tests.kernels import NUMPY, summed_up_by
from tests.reshard.api import elastic_jobs
from tests.same import bits
from tests.simulated_hosts import Job, cut, global_of


@pytest.mark.gloo
def test_a_job_goes_on_without_a_host_in_another_topology(tmp_path: Path) -> None:
    ends = gloo.outcomes(elastic_jobs.trained, 8, str(tmp_path), store="parent")
    assert [end.exitcode for end in ends[2:4]] == [-signal.SIGKILL] * 2
    assert all(isinstance(end.error, ReshardError) for end in [*ends[:2], *ends[4:]])
    shutil.rmtree(tmp_path / "h1")  # the memory of the host is gone

    for step, full, saved in gloo.run(elastic_jobs.went_on, 6, str(tmp_path)):
        assert step == saved == 2
        assert {name: bits(value) for name, value in full.items()} == {
            k: bits(v) for k, v in elastic_jobs.whole(2).items()
        }
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.gloo
def test_copies_cross_in_the_background_at_a_bounded_pace_and_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    for (waited, took), values, talks in gloo.run(elastic_jobs.kept_behind, 4, str(tmp_path), "keep"):
        assert values == [0.0, 1.0, 2.0, 3.0]
        assert took > 0.5  # a last burst need not wait for its time to be over
        assert waited < took / 2
        assert talks > 20


@pytest.mark.gloo
def test_a_host_that_is_lost_while_copies_cross_leaves_the_generation_before(tmp_path: Path) -> None:
    ends = gloo.outcomes(elastic_jobs.kept_behind, 4, str(tmp_path), "kill", store="parent")
    assert [end.exitcode for end in ends[2:]] == [-signal.SIGKILL] * 2
    assert all(isinstance(end.error, ReshardError) for end in ends[:2])
    shutil.rmtree(tmp_path / "h1")

    assert gloo.run(elastic_jobs.recovered, 2, str(tmp_path)) == [(1, [0.0, 1.0, 2.0, 3.0])] * 2


@pytest.mark.gloo
def test_a_host_that_is_lost_while_the_group_for_copies_is_made_is_told_soon(tmp_path: Path) -> None:
    ends = gloo.outcomes(elastic_jobs.lost_while_joining, 4, str(tmp_path), store="parent")
    assert [end.exitcode for end in ends[2:]] == [-signal.SIGKILL] * 2
    assert all(isinstance(end.error, RankFailedError) for end in ends[:2]), ends
    assert all(end.seconds < 4 * gloo.SOON_S for end in ends)

    assert gloo.run(elastic_jobs.recovered, 2, str(tmp_path)) == [(1, [0.0, 1.0, 2.0, 3.0])] * 2


@pytest.mark.gloo
def test_a_step_is_kept_after_one_whose_copies_were_sent_in_vain(tmp_path: Path) -> None:
    ends = gloo.run(elastic_jobs.kept_after_a_failure, 2, str(tmp_path))

    assert ends[1][0] == "no room"
    assert ends[0][0].startswith("rank 1 failed in 'write': StorageError: no room")
    assert [end[1:] for end in ends] == [(2, [3.0, 4.0])] * 2


@pytest.mark.gloo
def test_what_fails_in_the_background_is_told_once_and_leaves_the_generation_before(tmp_path: Path) -> None:
    [(first, step), (second, other)] = gloo.run(elastic_jobs.failed_behind, 2, str(tmp_path))

    assert first[0].startswith("RankFailedError: rank 1 failed")
    assert second == ["StorageError: no room"]
    assert step == other == 5


@pytest.mark.gloo
@pytest.mark.parametrize("verb", ["restore", "clear"])
def test_what_failed_in_the_background_fails_the_next_call_of_all(verb: str, tmp_path: Path) -> None:
    first, second = gloo.run(elastic_jobs.failed_before, 2, str(tmp_path), verb)

    assert first.startswith("RankFailedError: rank 1 failed in ")
    assert second == "StorageError: no room"


# --- on simulated hosts ---

NAMES = ["a", "a", "b", "b", "c"]
ROWS = TensorLayout(TensorSpec("w", (300, 1000), "float32"), Mesh({"dp": 5}), [S(0)])
COLUMNS = TensorLayout(TensorSpec("w", (300, 1000), "float32"), Mesh({"dp": 3}), [S(1)])
BIAS = TensorLayout(TensorSpec("b", (10,), "float32"), Mesh({"dp": 5}), [S(0)])


def values(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {"w": torch.randn(300, 1000, generator=made, device="cpu"), "b": torch.full((10,), 7.0, device="cpu")}


def held(rank: int, step: int) -> dict[str, Any]:
    """What a rank has of a step."""
    all_of_it = values(step)
    return {"w": cut(all_of_it["w"], ROWS, rank), "b": cut(all_of_it["b"], BIAS, rank), "step": step}


def kept(folder: Path, *steps: int, copies: int = 1, names: list[str] = NAMES, **more: Any) -> list[Any]:
    """What all ranks of a job say that keeps these steps, one after another."""

    def life(rank: int, tier: Tier) -> Any:
        for step in steps:
            report = tier.save(held(rank, step), step, **more)
        return report

    return Job(folder, names, copies=copies).run(life)


def recovered(folder: Path, names: list[str], fallback: Any = None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What 3 ranks say that recover, and the tensors that they have then."""
    states: dict[int, dict[str, Any]] = {}

    def life(rank: int, tier: Tier) -> Any:
        states[rank] = {"w": cut(torch.zeros(300, 1000), COLUMNS, rank), "b": torch.zeros(10), "step": 0}
        return tier.restore(states[rank], fallback)

    ends = Job(folder, names).run(life)
    w = global_of({rank: state["w"] for rank, state in states.items()}, torch.zeros(300, 1000))
    return ends, {"w": w, "b": states[0]["b"]}


def is_step(found: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(found[name], value) for name, value in values(step).items())


def files(folder: Path, host: str, suffix: str = ".safetensors") -> list[Path]:
    return sorted(path for path in (folder / host).rglob(f"*{suffix}"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_job_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    kept(tmp_path / "run", 1)
    assert Job(tmp_path / "run", NAMES).run(lambda rank, tier: tier.clear()) == [None] * 5
    assert not (tmp_path / "run").exists()


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "a" / "mine").mkdir(parents=True)
    tier = Tier(tmp_path, host="a", copies=0)
    for step in (1, 2):
        tier.save({"w": torch.ones(3)}, step)
    assert len(list((tmp_path / "a").glob("*-step-*"))) == 1
    tier.clear()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


def test_a_job_whose_folder_was_taken_over_clears_nothing(tmp_path: Path) -> None:
    tier = Tier(tmp_path, host="a", copies=0)
    tier.save({"w": torch.ones(3)}, 1)
    owner = tmp_path / "a" / "owner.json"
    other = WriterLease("node1", 1, "9", time.time(), "m2")
    owner.write_bytes(msgspec.json.encode(other))
    there = contents(tmp_path)

    with pytest.raises(StorageError, match=r"process 1 on node1 has taken .* over from"):
        tier.clear()
    assert contents(tmp_path) == there


def test_a_fallback_that_is_not_there_yet_is_none(tmp_path: Path) -> None:
    """As before the first save to storage: what memory has is not lost."""
    tier = Tier(tmp_path / "memory", host="a", copies=0)
    (tmp_path / "empty").mkdir()
    for fallback in (tmp_path / "run", tmp_path / "empty"):
        with pytest.raises(CheckpointNotFoundError, match=fallback.name):
            tier.restore({"w": torch.zeros(3)}, fallback)
    tier.save({"w": torch.ones(3)}, 1)
    for fallback in (tmp_path / "run", tmp_path / "empty"):
        report = tier.restore(state := {"w": torch.zeros(3)}, fallback)
        assert (report.step, state["w"].tolist()) == (1, [1, 1, 1])


def test_who_is_where_is_asked_once(tmp_path: Path) -> None:
    with mock.patch("reshard.api.elastic.tier.meet", side_effect=meet) as asked:
        reports = kept(tmp_path, 1, 2, names=["a", "b", "c", "d", "e"])
    assert asked.call_count == 5
    assert {report.number for report in reports} == {2}


def test_two_generations_at_most_and_as_much_memory_as_planned(tmp_path: Path) -> None:
    reports = kept(tmp_path, 1, 2, 3)

    assert [report.number for report in reports] == [3] * 5
    for host, nbytes in reports[0].bytes_by_host.items():
        (generation,) = [path for path in (tmp_path / host).iterdir() if path.is_dir()]
        there = sum(path.stat().st_size for path in files(tmp_path, host))
        assert generation.name.startswith("00000003-step-3-")
        assert nbytes <= there <= nbytes + 4096 * len(files(tmp_path, host))
    assert "generation 3, step 3" in repr(reports[0])


def test_damaged_blocks_count_as_lost_and_the_other_copy_is_taken(tmp_path: Path) -> None:
    kept(tmp_path, 1, copies=2)
    shutil.rmtree(tmp_path / "b")
    for host in "ac":  # every file is damaged here or there, its header included
        for number, path in enumerate(files(tmp_path, host)):
            if number % 2 == (host == "a"):
                flip(path, 9 if number == 0 else path.stat().st_size - 1)

    ends, found = recovered(tmp_path, ["a", "c", "new"])

    assert is_step(found, 1)
    assert ends[0].bytes_received + ends[1].bytes_received > 0
    assert not list(tmp_path.glob("*/fetched-*"))


def test_an_older_generation_is_taken_whole_and_the_report_says_why(tmp_path: Path) -> None:
    with mock.patch.object(keeping, "remove"):  # as if killed before the older one was removed
        kept(tmp_path, 1, 2)
    for host in "abc":
        for path in files(tmp_path, host):
            if "step-2" in str(path) and path.name == "00004.safetensors":
                path.unlink()

    ends, found = recovered(tmp_path, ["a", "b", "c"])

    assert {end.step for end in ends} == {1}
    assert is_step(found, 1)
    assert "generation 2 (step 2) is not complete" in ends[0].skipped[0]
    assert "'w' lacks Box[240:300, 0:1000], written by rank 4" in ends[0].skipped[0]


def test_what_survives_nowhere_comes_from_a_fallback_that_has_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reshard.save({**values(5), "step": 5}, tmp_path / "before")
    reshard.save({**values(1), "step": 1}, tmp_path / "same")
    kept(folder, 1)
    reshard.save({**values(5), "step": 6}, tmp_path / "after")
    shutil.rmtree(folder / "a")
    for number in range(4):
        shutil.copytree(folder, tmp_path / f"copy{number}")
    for copy in tmp_path.glob("copy[0-2]"):
        (path,) = [path for path in files(copy, "b") if path.name == "00001.safetensors"]
        flip(path, path.stat().st_size - 1)  # in the last block, of which b has nothing

    def ends(number: int, fallback: Path | None) -> tuple[Any, dict[str, torch.Tensor]]:
        found, tensors = recovered(tmp_path / f"copy{number}", ["b", "c", "new"], fallback)
        return found[0], tensors

    refused, _ = ends(0, None)
    assert type(refused) is CheckpointNotFoundError
    assert "'w' lacks Box[60:120, 0:1000], written by rank 1. Damaged: " in str(refused)
    assert f"{path.name}. Pass a checkpoint as fallback" in str(refused)
    filled, found = ends(0, tmp_path / "same")
    assert (filled.step, filled.from_fallback) == (1, ("w",))
    assert is_step(found, 1)
    older, found = ends(1, tmp_path / "before")  # the same b, and another w: not the same state
    assert (older.number, older.load.loaded) == (None, ("w", "b", "step"))
    assert "does not have the same 'w', by fingerprint" in older.skipped[0]
    assert is_step(found, 5)
    assert not files(tmp_path / "copy1", "b")
    with summed_up_by(NUMPY), mock.patch("reshard.stored.checksums.xxhash.xxh3_64_intdigest", return_value=1):
        damaged, _ = ends(2, tmp_path / "same")
    assert isinstance(damaged, ReshardError)
    newer, found = ends(3, tmp_path / "after")
    assert newer.number is None
    assert newer.skipped == ("generation 1 (step 1) on hosts 'b', 'c' was not used: the fallback was saved later",)
    assert is_step(found, 5)
    assert files(tmp_path / "copy3", "b")  # until the next save


def test_a_fallback_that_cannot_be_used_does_not_keep_a_generation_from_being_loaded(tmp_path: Path) -> None:
    kept(tmp_path / "run", 1)
    for name in ("text", "torn", "damaged"):
        reshard.save({**values(5), "step": 5}, tmp_path / name)
    (tmp_path / "text" / "manifest.json").write_text("")
    (tmp_path / "text" / "config.yaml").write_text("")
    os.truncate(tmp_path / "torn" / "manifest.json", 100)
    (path,) = (tmp_path / "damaged").rglob("*.safetensors")
    flip(path, path.stat().st_size - 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("")
    for name, why in (
        ("text", "manifest"),
        ("torn", "truncated"),
        ("damaged", "was changed"),
        ("other", "config.yaml"),
    ):
        ends, found = recovered(tmp_path / "run", ["a", "b", "c"], tmp_path / name)
        assert {end.step for end in ends} == {1}, ends
        for end in ends:
            assert end.skipped[0].startswith("the fallback was not used: "), name
            assert why in end.skipped[0]
        assert is_step(found, 1)

    shutil.rmtree(tmp_path / "run" / "a")
    shutil.rmtree(tmp_path / "run" / "b")
    ends, found = recovered(tmp_path / "run", ["a", "b", "c"], tmp_path / "damaged")
    assert "the fallback was not used: " in str(ends[0])
    assert "is not complete" in str(ends[0])
    assert not any(tensor.any() for tensor in found.values())
    ends, _ = recovered(tmp_path / "empty", ["a", "b", "c"], tmp_path / "damaged")
    assert any(isinstance(end, CorruptCheckpointError) for end in ends)


def test_a_fallback_that_does_not_match_the_state_is_an_error(tmp_path: Path) -> None:
    """It was meant, so an older generation is not what was asked for."""
    kept(tmp_path / "run", 1)
    reshard.save({**values(5), "step": 5, "more": torch.ones(2)}, tmp_path / "after")
    ends, found = recovered(tmp_path / "run", ["a", "b", "c"], tmp_path / "after")
    assert {type(end) for end in ends} == {KeyMismatchError}
    assert not any(tensor.any() for tensor in found.values())
    ends, _ = recovered(tmp_path / "run", ["a", "b", "c"])
    assert {end.step for end in ends} == {1}


def test_what_convert_makes_of_a_checkpoint_is_not_newer(tmp_path: Path) -> None:
    reshard.save({**values(5), "step": 5}, tmp_path / "before")
    kept(tmp_path / "run", 1)
    reshard.convert(tmp_path / "before", tmp_path / "converted")
    ends, found = recovered(tmp_path / "run", ["a", "b", "c"], tmp_path / "converted")
    assert {end.step for end in ends} == {1}
    assert is_step(found, 1)


@pytest.mark.parametrize("lost", [["b"], ["a"], []])
def test_gathered_folders_are_an_ordinary_checkpoint(tmp_path: Path, lost: list[str]) -> None:
    kept(tmp_path / "run", 1, 2)
    places = [tmp_path / "run" / host for host in "abc" if host not in lost]

    report = reshard.elastic.gather(places, tmp_path / "out")

    assert (report.step, report.files) == (2, 5)
    assert reshard.verify(tmp_path / "out").ok
    state = {"w": torch.zeros(300, 1000), "b": torch.zeros(10), "step": 0}
    reshard.load(state, tmp_path / "out")
    assert is_step(state, 2)
    with pytest.raises(FormatError, match="open it, or delete it first"):
        reshard.elastic.gather(places, tmp_path / "out")


def test_a_refused_save_leaves_no_folder_where_none_was(tmp_path: Path) -> None:
    tier = reshard.elastic.Tier(tmp_path / "run", host="a", copies=0)
    for refused in ({"w": object()}, {"w": torch.empty(2, device="meta")}):
        for save in (tier.save, tier.async_save):
            with pytest.raises(CheckpointError, match="'w'"):
                save(refused, 1)
            assert not (tmp_path / "run").exists()
    tier.save({"w": torch.ones(2)}, 1)
    with pytest.raises(CheckpointError, match="'w'"):
        tier.save({"w": object()}, 2)
    assert reshard.elastic.gather([tmp_path / "run" / "a"], tmp_path / "out").step == 1


def test_a_save_in_the_background_outlives_the_interrupt_of_the_call_that_waits_for_it(tmp_path: Path) -> None:
    finish, go_on = keeping._KeepJob.finish, threading.Event()

    def late(*args: Any) -> Any:
        go_on.wait()
        return finish(*args)

    def interrupt(*_: Any) -> None:
        threading.Timer(0.3, go_on.set).start()
        raise KeyboardInterrupt

    tier, state = Tier(tmp_path, host="a", copies=0), {"w": torch.ones(2)}
    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        with mock.patch.object(keeping._KeepJob, "finish", late):
            tier.async_save(state, 1)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                tier.restore(state)
            assert tier.restore(state).step == 1
    finally:
        signal.signal(signal.SIGALRM, earlier)


def test_folders_of_no_host_are_named_where_the_others_suffice(tmp_path: Path) -> None:
    kept(tmp_path / "run", 1)
    places = [tmp_path / "run" / host for host in ("a", "b", "c", "d")]

    report = reshard.elastic.gather(places, tmp_path / "out")

    assert report.skipped == (f"{tmp_path}/run/d has no data of a host (no such folder)",)


def test_a_gathering_that_replaces_a_checkpoint_leaves_no_index_of_it(tmp_path: Path) -> None:
    kept(tmp_path / "run", 1)
    reshard.save({"w": torch.ones(3)}, tmp_path / "out")
    assert (tmp_path / "out" / HF_INDEX).exists()

    reshard.elastic.gather([tmp_path / "run" / host for host in "abc"], tmp_path / "out", overwrite=True)

    assert not (tmp_path / "out" / HF_INDEX).exists()
    assert reshard.verify(tmp_path / "out").ok


def test_workers_gather_what_one_process_gathers(tmp_path: Path) -> None:
    kept(tmp_path / "run", 1, 2)
    places = [tmp_path / "run" / host for host in "ac"]
    reshard.elastic.gather(places, tmp_path / "one")

    with Processes(1) as processes, ThreadPoolExecutor(3) as threads:
        for executor in (processes, threads):
            out = tmp_path / type(executor).__name__
            reshard.elastic.gather(places, out, executor=executor)
            assert contents(out) == contents(tmp_path / "one")
            assert (out / "manifest.json").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_gathering_names_the_damaged_files(tmp_path: Path) -> None:
    """Which are there, so that their hosts are not to be looked for."""
    kept(tmp_path / "run", 1, copies=0)
    file = next(path for path in files(tmp_path / "run", "c") if path.name.endswith("00004.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    with pytest.raises(
        CorruptCheckpointError, match=rf"'w' lacks Box.*\. Damaged: '?{file}'?\. No other step"
    ) as raised:
        reshard.elastic.gather([tmp_path / "run" / host for host in "abc"], tmp_path / "out")
    assert str(raised.value).count(".safetensors") == 1


def test_a_recovery_names_the_damaged_files(tmp_path: Path) -> None:
    """As a gathering does. A file of the wrong length is damaged, too; one that is not there is not."""
    kept(tmp_path, 1, copies=0)
    flip(last := next(path for path in files(tmp_path, "c") if path.name == "00004.safetensors"), -1)
    os.truncate(short := next(path for path in files(tmp_path, "a") if path.name == "00000.safetensors"), 100)
    next(path for path in files(tmp_path, "b") if path.name == "00002.safetensors").unlink()

    ends, _ = recovered(tmp_path, ["a", "b", "c"])

    assert {type(end) for end in ends} == {CheckpointNotFoundError}
    assert f". Damaged: {short}, {last}. Pass a checkpoint as fallback=" in str(ends[0])


def test_a_gathering_that_lacks_something_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(keeping, "remove"):
        kept(tmp_path / "run", 1, 2, copies=0)
    for path in files(tmp_path / "run", "c"):
        if "step-2" in str(path):
            path.unlink()
    places = [tmp_path / "run" / host for host in "abc"]

    with pytest.raises(CorruptCheckpointError, match=r"'w' lacks Box\[240:300, 0:1000\], written by rank 4.*step=1"):
        reshard.elastic.gather(places, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    words = r"no complete in-memory checkpoint of step 7 in .*; found there: step 2, step 1\. Pass the folder of each"
    with pytest.raises(CheckpointNotFoundError, match=words):
        reshard.elastic.gather(places, tmp_path / "out", step=7)
    inside = rf"checkpoint in {tmp_path}/run \(the hosts' folders are in it: a, b, c\)\. Pass the folder of each host"
    with pytest.raises(CheckpointNotFoundError, match=inside):
        reshard.elastic.gather([tmp_path / "run"], tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        run(["gather", *map(str, places), str(tmp_path / "out")])
    assert ended.value.code == 3
    with pytest.raises(SystemExit):
        run(["gather", *map(str, places), str(tmp_path / "out"), "--step", "1"])
    assert "step 1, generation 1: 5 files" in capsys.readouterr().out
    assert reshard.open(tmp_path / "out").objects["step"] == 1


# --- hosts that come back with what the job went on without ---


def small(
    folder: Path, names: list[str], *steps: int, recovers: bool = True, now: float = 0.0, copies: int = 0, **asked: Any
) -> Any:
    """One life of a job of a rank for each name: it recovers or does not, and keeps these. What the first rank says."""

    def life(rank: int, tier: Tier) -> Any:
        state = {"w": torch.zeros(4), "step": 0}
        report = tier.restore(state, **asked) if recovers else None
        for step in steps:
            tier.save({"w": torch.full((4,), float(step)), "step": step}, step)
        assert report is None or report.step == state["step"] == state["w"][0]
        return report

    clock = SimpleNamespace(time=lambda: now or time.time())
    with mock.patch.object(generations, "time", clock):
        ends = Job(folder, names, copies=copies).run(life)
    return ends[0]


def unrecorded(folder: Path) -> None:
    """Leave nothing that earlier releases did not write."""
    for path in folder.rglob("lineage.json"):
        path.unlink()


@pytest.mark.parametrize("back", [["a", "b"], ["b", "a"], ["new", "b", "a"]])
def test_what_a_host_brings_back_is_not_newer_than_what_the_job_kept_without_it(
    tmp_path: Path, back: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path / "run", ["a"], 10, 20, 30, recovers=False)
    small(tmp_path / "run", ["b"], 15, recovers=False)
    folders = [str(tmp_path / "run" / host) for host in back]

    with pytest.raises(SystemExit):
        run(["gather", *folders, str(tmp_path / "out")])
    report = small(tmp_path / "run", back, 40)

    (why,) = report.skipped
    assert report.step == 15
    assert why == (
        "generation 3 (step 30) on host 'a' was not used: a later run of the job, by the clocks of the "
        "hosts, saved generation 1 (step 15) and had not restored this one"
    )
    told = capsys.readouterr().out
    assert "step 15, generation 1: " in told
    assert "generation 3 (step 30) on host " in told
    assert reshard.open(tmp_path / "out").objects["step"] == 15
    assert {path.name[:8] for path in (tmp_path / "run").glob("*/*-step-*")} == {"00000004"}


def test_a_later_incarnation_that_knew_of_an_earlier_is_later_whatever_the_clocks_say(tmp_path: Path) -> None:
    small(tmp_path, ["a", "b"], 10, recovers=False, now=9e8, copies=1)
    small(tmp_path, ["a", "b"], 20, now=7e8, copies=1)
    for away in ("away", "later"):
        shutil.copytree(tmp_path / "a", tmp_path / away)
    small(tmp_path, ["a", "b"], 5, now=6e8, copies=1)

    report = small(tmp_path, ["away", "a", "b"], now=5e8)
    assert (report.step, report.skipped) == (5, ())  # what it went on from is older, and nothing odd
    small(tmp_path, ["a", "b"], 6, recovers=False, now=4e8, copies=1)
    report = small(tmp_path, ["later", "a"], now=3e8)
    assert report.step == 6
    assert report.skipped[0] == (
        "generation 2 (step 20) on host 'later' was not used: a later run of the job, which knew of it, saved "
        "generation 4 (step 6) and had not restored this one"
    )


def test_lives_at_the_same_time_are_not_told_apart_by_guessing(tmp_path: Path) -> None:
    run_, out = tmp_path / "run", tmp_path / "out"
    small(run_, ["a"], 30, recovers=False, now=1000.0)
    small(run_, ["b"], 15, recovers=False, now=1000.0)

    refused = small(run_, ["a", "b"])
    assert type(refused) is CheckpointError
    for part in ("generation 1 (step 30) on host 'a'", "generation 1 (step 15) on host 'b'", "pass step=30 or step=15"):
        assert part in str(refused)
    assert "by a run from 1970-01-01 00:16:40.000 UTC" in str(refused)
    with pytest.raises(CheckpointError, match="cannot determine which generation the job used last"):
        reshard.elastic.gather([run_ / "a", run_ / "b"], out)
    assert not out.exists()
    assert reshard.elastic.gather([run_ / "a", run_ / "b"], out, step=30).step == 30
    none = small(run_, ["a", "b"], step=7)
    assert type(none) is CheckpointNotFoundError
    assert "no generation of step 7" in str(none)
    assert "found on 2 hosts: 30, 15" in str(none)
    report = small(run_, ["a", "b"], step=30)
    assert report.skipped == ("generation 1 (step 15) on host 'b' was not used: step 30 was requested",)
    assert small(run_, ["a", "b"]).step == 30


def test_of_two_lives_with_the_same_step_one_must_be_removed(tmp_path: Path) -> None:
    for host in "ab":
        small(tmp_path, [host], 15, recovers=False, now=1000.0)
    refused = small(tmp_path, ["a", "b"], step=15)
    assert type(refused) is CheckpointError
    assert "Delete the folders of the generations that you do not want: 00000001-step-15-" in str(refused)
    shutil.rmtree(tmp_path / "b")
    assert small(tmp_path, ["a", "b"]).step == 15


def test_folders_of_earlier_releases_are_told_apart_by_number(tmp_path: Path) -> None:
    with mock.patch.object(keeping, "remove"):  # as if killed before the older one was removed
        small(tmp_path, ["a", "b"], 1, 2, recovers=False)
    unrecorded(tmp_path)
    report = small(tmp_path, ["b", "a"], 3)
    assert (report.number, report.step, report.skipped) == (2, 2, ())
    assert small(tmp_path, ["b", "a"]).number == 3


def test_folders_of_earlier_releases_whose_numbers_and_times_contradict_are_refused(tmp_path: Path) -> None:
    small(tmp_path, ["a"], 10, 20, 30, recovers=False, now=1000.0)
    small(tmp_path, ["b"], 15, recovers=False, now=2000.0)
    unrecorded(tmp_path)
    refused = small(tmp_path, ["a", "b"])
    assert type(refused) is CheckpointError
    assert "pass step=15 or step=30" in str(refused) or "pass step=30 or step=15" in str(refused)
    small(tmp_path, ["a", "b"], 40, step=15)
    assert small(tmp_path, ["a", "b"]).step == 40


def test_a_damaged_lineage_is_taken_from_another_host(tmp_path: Path) -> None:
    small(tmp_path, ["a", "b"], 10, recovers=False, now=2000.0, copies=1)
    shutil.copytree(tmp_path / "a", tmp_path / "away")
    small(tmp_path, ["b", "c"], 20, now=1000.0, copies=1)
    (record,) = files(tmp_path, "b", "lineage.json")
    flip(record, 20)

    assert small(tmp_path, ["away", "b", "c"]).step == 20


def test_what_returned_stays_until_a_new_generation_counts(tmp_path: Path) -> None:
    small(tmp_path, ["a"], 10, recovers=False)
    small(tmp_path, ["b"], 20, recovers=False)
    with mock.patch.object(keeping._KeepJob, "_mirror", side_effect=StorageError("no")):
        assert isinstance(small(tmp_path, ["a", "b"], 30, recovers=False), ReshardError)
    assert all(files(tmp_path, host) for host in "ab")
    small(tmp_path, ["a", "b"], 30, recovers=False)
    assert {path.name[:16] for path in tmp_path.glob("*/*-step-*")} == {"00000002-step-30"}


def test_an_incarnation_remembers_so_many_before_it() -> None:
    one: Incarnation | None = None
    for number in range(1, 100):
        kept_ = GenerationFolder(number, number, f"{number:012x}-{number:012x}")
        rows = {kept_: Recorded(ManifestStamp(0.0, ""), one)}
        with mock.patch("reshard.api.elastic.lineage.new_save_id", return_value=f"{number:012x}-{'a' * 12}"):
            one = FoundGenerations.of([("a", rows)]).begin(kept_)
        assert one.first == number + 1
    assert list(one.earlier.values()) == list(range(36, 100))


def test_what_cannot_be_kept_is_refused_on_all_ranks_and_leaves_the_one_before(tmp_path: Path) -> None:
    kept(tmp_path, 1)
    ends = kept(tmp_path, 2, copies=3)
    assert all(isinstance(end, OptionError) and isinstance(end, LayoutError) for end in ends)
    assert "copies=3 on other hosts needs 4 hosts or more, but there are 3" in str(ends[0])
    with mock.patch.object(keeping, "free_bytes", return_value=1000):
        ends = kept(tmp_path, 2)
    assert {type(end) for end in ends} == {StorageError, RankFailedError}
    assert "host 'a' must hold 7" in str(ends[0])
    assert "Make the file system larger" in str(ends[0])
    assert is_step(recovered(tmp_path, ["a", "b", "c"])[1], 1)


def test_a_host_that_cannot_take_a_copy_says_why(tmp_path: Path) -> None:
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
        ends = kept(tmp_path, 1)
    assert {type(end) for end in ends} <= {StorageError, RankFailedError}
    assert re.search(r"cannot make \d+ bytes of .*\.safetensors: Read-only file system", str(ends[0]))


def test_the_folder_of_another_job_that_is_running_is_left_alone(tmp_path: Path) -> None:
    kept(tmp_path, 1, names=["a", "a", "a", "a", "a"], copies=0)
    owner = tmp_path / "a" / "owner.json"
    text = owner.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{os.getppid()}')
    owner.write_text(text)
    with mock.patch("reshard.ranks.liveness.is_gone", return_value=False):
        ends = kept(tmp_path, 2, names=["a", "a", "a", "a", "a"], copies=0)
    assert {type(end) for end in ends} == {StorageError, RankFailedError}
    assert "is in use by" in str(ends[0])


def test_what_another_job_has_taken_over_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """Two jobs that looked at the same moment whether the folder is free: the one that took it last has it."""
    others = b"not yet"

    def body(rank: int, tier: Tier) -> Any:
        nonlocal others
        tier.save(held(rank, 1), 1)
        owner = tmp_path / "a" / "owner.json"
        others = owner.read_bytes().replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % os.getppid())
        owner.write_bytes(others)
        return tier.save(held(rank, 2), 2)

    ends = Job(tmp_path, ["a"] * 5, copies=0).run(body)
    assert {type(end) for end in ends} == {StorageError, RankFailedError}
    assert re.search(rf"process {os.getppid()} on .* has taken .* over from process {os.getpid()} on", str(ends[0]))
    assert (tmp_path / "a" / "owner.json").read_bytes() == others
    assert {path.name[:15] for path in tmp_path.glob("*/*-step-*")} == {"00000001-step-1"}


def test_what_a_killed_process_left_of_its_claim_goes(tmp_path: Path) -> None:
    kept(tmp_path, 1, names=["a"] * 5, copies=0)
    left = tmp_path / "a" / "owner.json.~0123456789abcdef.tmp"
    left.write_bytes(b"{")
    kept(tmp_path, 2, names=["a"] * 5, copies=0)
    assert not left.exists()


def test_keys_that_do_not_fit_are_all_told_and_nothing_is_written(tmp_path: Path) -> None:
    kept(tmp_path, 1, copies=2)
    state = {"v": torch.zeros(3), "w": torch.zeros(300, 1000), "b": torch.zeros(10), "step": 0}
    (end,) = Job(tmp_path, ["a"]).run(lambda rank, tier: tier.restore(state))
    assert type(end) is KeyMismatchError
    assert not state["w"].any()
    (end,) = Job(tmp_path, ["a"]).run(lambda rank, tier: tier.restore(state, strict=False))
    assert end.load.missing == ("v",)
    assert torch.equal(state["w"], values(1)["w"])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"folder": "s3://bucket/x"}, "must be a path on each host"),
        ({"folder": 3}, "must be a path on each host"),
        ({"copies": -1}, "copies must be"),
        ({"max_inflight_bytes": 5}, "at least 1024"),
        ({"host": "a/b"}, "the name of one folder"),
        ({"host": ""}, "expected parts"),
    ],
)
def test_wrong_tiers(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ReshardError, match=told):
        Tier(**{"folder": "/dev/shm/x", **wrong})


OPTIONS: dict[str, dict[str, Any]] = {
    "tier": {"copies": 2, "max_inflight_bytes": 12345, "folder": None},
    "save": {"step": 7, "check_replicas": False, "fingerprints": False},
    "restore": {"fallback": "elsewhere", "step": 7, "strict": False, "dtype_policy": "cast"},
}
"""What all ranks must choose alike, and another value than where nothing is said."""


@pytest.mark.parametrize(("verb", "option"), [(verb, option) for verb, its in OPTIONS.items() for option in its])
def test_options_that_differ_are_named_on_all_ranks(tmp_path: Path, verb: str, option: str) -> None:
    value = str(tmp_path / "other") if option == "folder" else OPTIONS[verb][option]

    def life(rank: int, tier: Tier) -> None:
        more = {option: value} if rank == 1 else {}
        if verb == "tier":
            tier.settings = dataclasses.replace(tier.settings, **more)
        if verb == "restore":
            tier.restore({"w": torch.zeros(2)}, **more)
        else:
            tier.save({"w": torch.zeros(2)}, **{"step": 1, **(more if verb == "save" else {})})

    ends = Job(tmp_path / "run", ["a", "b"]).run(life)
    assert {type(end) for end in ends} == {LayoutError}
    assert f"{option}: " in str(ends[0])
    assert str(value) in str(ends[0])


def test_every_option_is_on_one_side_or_the_other() -> None:
    own = {"host", "process_group", "timeout", "mapping", "state_dict", "self"}
    for call in (Tier.__init__, Tier.save, Tier.restore):
        known = {*own, *(option for its in OPTIONS.values() for option in its)}
        assert set(inspect.signature(call).parameters) <= known


@pytest.mark.parametrize("step", [-1, True, "7"])
def test_wrong_steps(step: Any) -> None:
    with pytest.raises(OptionError, match=r"step must be an integer >= 0, as in save\(state_dict, step\), got"):
        Tier("/dev/shm/x").save({}, step)


def test_swapped_arguments() -> None:
    with pytest.raises(OptionError, match=r"as in save\(state_dict, step\), got a dict: the arguments are swapped$"):
        Tier("/dev/shm/x").save(7, {"w": torch.ones(1)})  # type: ignore[arg-type]
