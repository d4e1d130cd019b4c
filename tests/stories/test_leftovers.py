"""What saves that were killed leave: the next one, or pruning, takes it away, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.api.convert_job import remove_dead_jobs
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    OptionError,
    ReshardError,
    StorageError,
)
from reshard.native import commit
from reshard.ranks import liveness
from reshard.storage import LocalStorage, MemoryStorage, Storage, open_storage
from tests import gloo
from tests.faulty import Crash, Faulty, SystemCalls
from tests.samples import sample

STATE = {"w": torch.ones(3)}
EMPTY = "data-0192f3c1a8aa-5d2e00112233"
GONE = {"pid": 2**22 + 1, "process_start": "1"}


def claimed(storage: Storage, **other: Any) -> str:
    """A generation that somebody writes, by a claim like ours but for what is `other`."""
    save_id = commit.new_save_id()
    commit.claim(storage, save_id)
    name = f"{commit.folder_of(save_id)}/claim.json"
    storage.publish(name, json.dumps({**json.loads(storage.read(name)), **other}).encode())
    return save_id


def test_an_empty_folder_is_named_by_opening_and_removed_by_the_next_save(tmp_path):
    (tmp_path / "c" / EMPTY).mkdir(parents=True)
    with pytest.raises(
        CheckpointNotFoundError, match="a save has just started, or was killed before it wrote anything"
    ):
        reshard.open(tmp_path / "c")
    assert reshard.latest_complete(tmp_path) is None
    (tmp_path / "c" / "mine").mkdir()
    (tmp_path / "c" / "data-of-mine").mkdir()

    reshard.save(STATE, tmp_path / "c")

    folders = {path.name for path in (tmp_path / "c").iterdir() if path.is_dir()}
    assert EMPTY not in folders
    assert {"mine", "data-of-mine"} < folders
    assert len(folders) == 3


def test_what_only_looks_like_data_of_ours_is_never_removed(tmp_path):
    mine = ["data-raw/train.bin", "data-mine", "data-0192f3c1a8aa/x", f"{EMPTY}.tar", "notes.txt"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("years of work")
    for _ in range(2):
        reshard.save(STATE, tmp_path)
    assert all((tmp_path / name).exists() for name in mine)
    assert len([path for path in tmp_path.iterdir() if commit.is_generation(path.name)]) == 1


def saved(folder, *names):
    for name in names:
        reshard.save(STATE, folder / name)
    return folder


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_the_same_for_all_that_ask(tmp_path):
    """The highest number, whatever was saved last. Pruning once deleted step-20 here, which `open` had chosen."""
    run = saved(tmp_path, "step-3", "step-20", "step-10")

    assert reshard.latest_complete(run) == reshard.open(run).url == str(run / "step-20")
    assert [step.step for step in reshard.steps(run)] == [3, 10, 20]
    assert reshard.prune(run, keep_last=1) == [str(run / "step-3")]
    assert left_in(run) == ["step-10", "step-20"]  # the newest, and the one saved last


def test_what_a_run_saves_after_it_returned_to_an_earlier_step_is_not_pruned(tmp_path):
    run = saved(tmp_path, "step-1", "step-8", "step-9")
    for step in (2, 3, 4):
        saved(run, f"step-{step}")
        reshard.prune(run, keep_last=1)
        assert left_in(run) == [f"step-{step}", "step-9"]


def test_pruning_a_run_leaves_checkpoints_without_a_step(tmp_path):
    run = saved(tmp_path, "best", "step-1", "step-2", "final")

    assert reshard.latest_complete(run) == str(run / "step-2")
    assert reshard.prune(run, keep_last=1) == [str(run / "step-1")]
    assert left_in(run) == ["best", "final", "step-2"]


def test_without_any_step_the_time_of_a_save_is_its_age(tmp_path):
    run = saved(tmp_path, "c", "b", "a")

    assert reshard.latest_complete(run) == str(run / "a")


def test_checkpoints_without_step_numbers_are_not_pruned(tmp_path):
    """Once `prune(".", keep_last=1)` removed all but the newest of checkpoints that had nothing to do with each
    other."""
    run = saved(tmp_path, "base", "best", "adapters")
    with pytest.raises(FormatError, match=r"no step numbers.* deleted none of 3 \('.*'\).* step-<number>"):
        reshard.prune(run, keep_last=2)
    assert left_in(run) == ["adapters", "base", "best"]
    assert reshard.prune(run, keep_last=3) == []
    (run / "base" / "manifest.json").unlink()
    assert reshard.prune(run, keep_last=2) == []


def test_the_newest_is_the_same_in_every_format(tmp_path):
    """Once it was None for a run of DCP checkpoints, which `open` opened."""
    saved(tmp_path, "step-1", "best")
    reshard.dcp.save(dict(STATE), checkpoint_id=tmp_path / "step-2")

    assert reshard.latest_complete(tmp_path) == reshard.open(tmp_path).url == str(tmp_path / "step-2")
    assert reshard.prune(tmp_path, keep_last=1) == []
    (tmp_path / "step-2" / ".metadata").unlink()
    assert reshard.latest_complete(tmp_path) == reshard.open(tmp_path).url == str(tmp_path / "step-1")


@pytest.mark.parametrize("left", [b"{", None])
def test_a_run_whose_steps_are_damaged_is_still_a_run(left, tmp_path):
    """Once `best` was its newest then, and pruning removed all but one of those without a number."""
    run = saved(tmp_path, "best", "final", "step-1")
    manifest = run / "step-1" / "manifest.json"
    if left is None:
        manifest.unlink()
    else:
        manifest.write_bytes(left)

    assert reshard.latest_complete(run) is None
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint of the run at .* can be opened"):
        reshard.open(run)
    assert reshard.prune(run, keep_last=1) == []
    assert {"best", "final"} < {*left_in(run), "either"}


@pytest.mark.parametrize("format", ["dcp", "safetensors", "torch_checkpointing"])
def test_nothing_is_converted_into_what_a_killed_save_has_left(format, tmp_path):
    """Once it was, and did not open."""
    saved(tmp_path, "source")
    calls = SystemCalls()
    with calls.crashing(12), pytest.raises(Crash):
        reshard.save({"w": torch.ones(9000)}, tmp_path / "step-1")
    before = sorted((tmp_path / "step-1").rglob("*"))

    with pytest.raises(FormatError, match=r"contains files of a native checkpoint \(data-.*\), which would mix with"):
        reshard.convert(tmp_path / "source", tmp_path / "step-1", format=format)

    assert sorted((tmp_path / "step-1").rglob("*")) == before


def test_what_a_killed_save_has_left_does_not_count_beside_a_dcp_checkpoint(tmp_path):
    """Once the two were a mixture, and the run went on from an older step."""
    calls = SystemCalls()
    with calls.crashing(12), pytest.raises(Crash):
        reshard.save({"w": torch.ones(9000)}, tmp_path / "step-1")
    reshard.dcp.save(dict(STATE), checkpoint_id=tmp_path / "step-1")

    assert reshard.open(tmp_path)["w"][...].tolist() == [1, 1, 1]
    assert reshard.verify(tmp_path / "step-1").ok


BELOW = ["step-5", "7", "checkpoints/step-5", "epoch=0-step=5.ckpt"]


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_no_first_step_is_saved_below_a_checkpoint(kind, name, tmp_path, monkeypatch):
    """Afterwards, its path would mean either."""
    top = tmp_path / "top"
    if kind == "native":
        saved(tmp_path, "top")
    else:
        reshard.dcp.save(dict(STATE), checkpoint_id=top)
    saved(tmp_path, "other")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(top)
    for path in (top / name, name, f"../top/{name}", (top / name).as_uri()):
        for attempt in (
            lambda path=path: reshard.save(STATE, path),
            lambda path=path: reshard.async_save(STATE, path).result(),
            lambda path=path: reshard.convert(tmp_path / "other", path, format="torch" if "." in name else "dcp"),
        ):
            told = rf"{top} is a checkpoint \((manifest.json|.metadata)\), so it .* has .*{name}: choose another"
            with pytest.raises(FormatError, match=told):
                attempt()
    assert sorted(tmp_path.rglob("*")) == before
    assert reshard.open(top)["w"][...].tolist() == [1, 1, 1]


def test_what_has_no_number_is_saved_below_a_checkpoint_and_a_run_that_is_both_goes_on(tmp_path):
    saved(tmp_path, "", "best", "data/x", "last")
    assert reshard.open(tmp_path).url == str(tmp_path)
    with pytest.raises(FormatError, match="is a checkpoint"):
        reshard.save(STATE, tmp_path / "step-1")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "log").touch()  # from here on, the path means either
    saved(tmp_path, "step-1", "step-2")
    assert reshard.open(tmp_path, step=2).url == str(tmp_path / "step-2")


def test_nothing_is_saved_below_a_checkpoint_on_another_storage():
    reshard.save(STATE, "memory://both/top")
    with pytest.raises(FormatError, match=r"memory://both/top is a checkpoint \(manifest.json\)"):
        reshard.save(STATE, "memory://both/top/step-5")


def test_files_for_hugging_face_tools_are_converted_to_the_top_of_a_run(tmp_path, caplog):
    """As the Trainer leaves them; these tools look there."""
    run = saved(tmp_path / "run", "step-1", "step-2")
    reshard.convert(run / "step-1", run, format="safetensors")

    assert "is the folder of a run with the steps step-2, step-1, and becomes a checkpoint, too" in caplog.text
    with pytest.raises(FormatError, match=r"both a checkpoint \(model.safetensors\) and the folder of a run"):
        reshard.open(run)
    assert reshard.latest_complete(run) == str(run / "step-2")
    assert reshard.open(run / "model.safetensors")["w"][...].tolist() == [1, 1, 1]
    saved(run, "step-3")


def test_nothing_is_saved_at_the_top_of_a_run(tmp_path):
    """Afterwards, the path would mean either."""
    run = saved(tmp_path / "run", "step-1", "step-2")
    saved(tmp_path, "other")
    for attempt in (
        lambda: reshard.save(STATE, run),
        lambda: reshard.convert(tmp_path / "other", run),
        lambda: reshard.convert(tmp_path / "other", run, format="dcp"),
    ):
        with pytest.raises(
            FormatError, match=r"run with the steps step-2, step-1: .* save to .*/step-N, or to another"
        ):
            attempt()
    assert left_in(run) == ["step-1", "step-2"]
    assert reshard.open(run).url == str(run / "step-2")


def test_pruning_removes_what_holds_nothing(tmp_path):
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
    (tmp_path / "step-3" / EMPTY).mkdir(parents=True)
    (tmp_path / "step-2" / EMPTY).mkdir()
    (tmp_path / "plots").mkdir()

    assert reshard.prune(tmp_path, keep_last=2) == [str(tmp_path / "step-0")]

    assert sorted(path.name for path in tmp_path.iterdir()) == ["plots", "step-1", "step-2"]
    assert not (tmp_path / "step-2" / EMPTY).exists()
    assert reshard.verify(tmp_path / "step-2").ok


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_pruning_never_takes_the_last_whole_checkpoint_for_the_sake_of_a_broken_one(harm, tmp_path):
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
    (data,) = (tmp_path / "step-2").glob("data-*/*.safetensors")
    if harm == "missing":
        data.unlink()
    else:
        os.truncate(data, 10)

    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-0")]

    assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-1")
    assert (tmp_path / "step-2").exists()  # a broken one is for its owner to look at


def test_pruning_leaves_data_whose_manifest_was_overwritten_by_that_of_an_older_save(tmp_path):
    """As by a copy that brings back some files: the data counted as those of a killed save."""
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
    manifest = tmp_path / "step-2" / "manifest.json"
    older = manifest.read_bytes()
    reshard.save({"w": torch.zeros(3)}, tmp_path / "step-2")
    newer = manifest.read_bytes()
    manifest.write_bytes(older)

    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-0")]

    manifest.write_bytes(newer)
    assert reshard.verify(tmp_path / "step-2").ok


def test_a_step_without_the_file_of_a_rank_is_not_complete(tmp_path):
    """Of DeepSpeed, whose files show which others there were: `open` of its own path tells, and gives the rest."""
    for step in (1, 2):
        shutil.copytree(sample("ds_z3_w2/ckpt"), tmp_path / f"step-{step}")
    gone = next((tmp_path / "step-2").rglob("zero_pp_rank_1*optim_states.pt"))
    gone.unlink()

    assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-1")
    before, last = reshard.steps(tmp_path)
    assert before.problem is None
    assert f"{gone.name} is missing" in str(last.problem)
    found = reshard.open(tmp_path)
    assert found.url == str(tmp_path / "step-1")
    assert "step-2 is newer but was skipped because it is not complete" in found.warnings[-1]
    for opened in (reshard.open(tmp_path / "step-2"), reshard.open(tmp_path, step=2)):
        assert gone.name in " ".join(opened.problems())
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(CorruptCheckpointError, match="no checkpoint of the run"):
        reshard.open(tmp_path)


def test_who_uses_an_older_step_says_which_newer_ones_are_not_complete(tmp_path, caplog):
    for step in (1, 2):
        reshard.save(STATE, tmp_path / f"step-{step}")
    data = next((tmp_path / "step-2").rglob("*.safetensors"))
    os.truncate(data, data.stat().st_size - 1)

    report = reshard.load({"w": torch.zeros(3)}, tmp_path)
    assert report.path == str(tmp_path / "step-1")
    skipped = "step-2 is newer but was skipped because it is damaged: "
    assert report.skipped["step-2"].startswith(skipped)
    assert "skipped 1 ('step-2')" in repr(report)
    assert reshard.load({"w": torch.zeros(3)}, tmp_path / "step-1").skipped == {}
    for call in (
        lambda: reshard.open(tmp_path),
        lambda: reshard.load({"w": torch.zeros(3)}, tmp_path),
        lambda: reshard.compare(tmp_path, STATE),
        lambda: reshard.fingerprint(tmp_path),
        lambda: reshard.plan(tmp_path, "fsdp=1"),
        lambda: reshard.convert(tmp_path, tmp_path.parent / "converted"),
    ):
        caplog.clear()
        call()
        assert caplog.text.count(f"{tmp_path}/step-1 was opened: {skipped}") == 1
    for deep in (True, False):
        (finding,) = reshard.verify(tmp_path, deep=deep).findings
        assert finding.message.startswith(skipped)


def test_one_data_file_of_a_checkpoint_is_not_taken_for_all_of_it(tmp_path):
    reshard.save(STATE, tmp_path / "step-1")
    (file,) = (tmp_path / "step-1").glob("data-*/*.safetensors")
    warning = f"00000.safetensors is one rank's part of {tmp_path}/step-1: open that for the rest"
    assert reshard.open(file).warnings == (warning,)
    assert warning in reshard.verify(file).covered.unchecked


def test_pruning_leaves_what_is_being_replaced(tmp_path):
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
    storage, save_id = open_storage(tmp_path / "step-0"), commit.new_save_id()
    commit.claim(storage, save_id)

    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-1")]
    assert reshard.verify(tmp_path / "step-0").ok

    liveness.release_lease(save_id)
    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-0")]


def test_pruning_removes_only_what_a_save_has_written(tmp_path):
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
        for name in ("README.md", "config.json", "logs/events", "data-mine/x", "manifest.json.bak"):
            (tmp_path / f"step-{step}" / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"step-{step}" / name).write_text("mine")
    reshard.save(STATE, tmp_path / "step-3")
    mine = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    assert len(mine) == 15

    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / f"step-{step}") for step in range(3)]

    left = [path for path in tmp_path.rglob("*") if path.is_file() and "step-3" not in path.parts]
    assert sorted(left) == sorted(mine)
    assert reshard.prune(tmp_path, keep_last=1) == []
    assert not [path for path in tmp_path.glob("step-[012]/*") if commit.is_generation(path.name)]


def test_who_prunes_what_others_remove_at_every_try_fails_not(tmp_path, monkeypatch):
    """Another prune removes the folder each time before its claim is renamed: then that one has unpublished it."""
    for step in (1, 2):
        reshard.save({"w": torch.ones(4)}, tmp_path / f"step-{step}")
    monkeypatch.setattr(commit, "CLAIMING_S", 0.0)
    real, others = os.replace, []

    def replace(source, target):
        if Path(target).name == "claim.json" and Path(target).parent.parent == tmp_path / "step-1" and not busy:
            busy.append(1)
            others.append(reshard.prune(tmp_path, keep_last=1))
            busy.clear()
        real(source, target)

    busy = []
    monkeypatch.setattr(os, "replace", replace)
    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-1")]
    assert others == [[str(tmp_path / "step-1")], [], []]
    assert reshard.verify(tmp_path / "step-2").ok
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_removal_cut_short_is_taken_up_by_the_next_one(at, tmp_path):
    for step in range(2):
        reshard.save(STATE, tmp_path / f"step-{step}")
    calls = SystemCalls()
    with calls.crashing(at), pytest.raises(Crash):
        reshard.prune(tmp_path, keep_last=1)
    reshard.prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert reshard.verify(tmp_path / "step-1").ok


def test_pruning_takes_away_what_killed_saves_have_left_in_folders_of_their_own(tmp_path):
    reshard.save(STATE, tmp_path / "step-0")
    dead, running = (open_storage(tmp_path / name) for name in ("step-1", "step-2"))
    for storage, other in ((dead, GONE), (running, {})):
        folder = commit.folder_of(claimed(storage, **other))
        storage.publish(f"{folder}/00000.safetensors", b"half")
    assert reshard.prune(tmp_path, keep_last=1) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-2"]
    assert len(running.list()) == 2


@pytest.mark.parametrize("name", ["step 1", "step#1?x", "a%20b", "ü"])
def test_folders_below_a_file_url_are_found_and_pruned_whatever_their_names(name, tmp_path):
    reshard.save(STATE, tmp_path / name / "old")
    reshard.save(STATE, tmp_path / "new" / name)
    url = f"{(tmp_path / 'new').as_uri()}/"
    found = reshard.latest_complete(url)
    assert found is not None
    assert reshard.verify(found).ok
    assert open_storage(found).url == str(tmp_path / "new" / name)
    for step in range(2):
        reshard.save(STATE, tmp_path / "run" / name / f"step-{step}")
    run = (tmp_path / "run" / name).as_uri()
    assert [open_storage(path).url for path in reshard.prune(run, keep_last=1)] == [
        str(tmp_path / "run" / name / "step-0")
    ]


def test_folders_in_memory_are_found_and_pruned():
    for step in range(3):
        reshard.save(STATE, f"memory://pruned/step-{step}")
    assert reshard.latest_complete("memory://pruned") == "memory://pruned/step-2"
    assert len(reshard.prune("memory://pruned/", keep_last=1)) == 2
    assert {name.partition("/")[0] for name in open_storage("memory://pruned").list()} == {"step-2"}


def test_a_file_url_whose_path_would_be_cut_off_is_refused(tmp_path):
    for sign in "#?":
        with pytest.raises(StorageError, match="write %23 for '#' and %3F"):
            reshard.save(STATE, f"file://{tmp_path}/run{sign}1/step")
    reshard.save(STATE, f"file://{tmp_path}/run%231/step")
    assert reshard.verify(tmp_path / "run#1" / "step").ok


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, "2"])
def test_numbers_that_prune_nothing_that_makes_sense(keep_last, tmp_path):
    with pytest.raises(OptionError, match="keep_last must be an integer"):
        reshard.prune(tmp_path, keep_last=keep_last)


def test_folders_that_are_no_paths():
    for wrong in (None, 5):
        with pytest.raises(StorageError, match=f"a path must be a folder, URL, or Storage, got {type(wrong).__name__}"):
            reshard.latest_complete(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="expected a path or URL, got the storage memory:"):
        reshard.prune(MemoryStorage("some"), keep_last=1)  # type: ignore[arg-type]


def test_a_save_whose_empty_folder_is_taken_away_makes_it_again(tmp_path):
    inner = open_storage(tmp_path / "c")

    def fault(verb: str, name: str) -> None:
        if verb in ("create", "publish"):
            commit.remove_empty(inner)

    reshard.save(STATE, Faulty(inner, fault))
    assert reshard.verify(tmp_path / "c").ok


@pytest.mark.parametrize(
    ("folder", "claim"), [("data-0192f3c1a8f1-5d2e5d2e5d2e", commit.CLAIM), (f"convert-{'0' * 32}", "claim")]
)
def test_a_claim_made_while_empty_folders_are_removed_stays(folder, claim, tmp_path, monkeypatch):
    """Of a save or a conversion that begins just then: whoever cleans up has seen its folder, and not its claim."""
    inner, real = open_storage(tmp_path), LocalStorage.empty_folders
    (tmp_path / folder).mkdir()

    def then_claimed(storage: LocalStorage, prefix: str = "") -> list[str]:
        found = real(storage, prefix)
        inner.publish(f"{folder}/{claim}", b"{}")
        return found

    monkeypatch.setattr(LocalStorage, "empty_folders", then_claimed)
    if claim == commit.CLAIM:
        commit.remove_empty(inner)
    else:
        remove_dead_jobs(inner, [])
    assert inner.list() == {f"{folder}/{claim}": 2}


def test_a_folder_is_listed_once_to_tidy_up(tmp_path, monkeypatch):
    """In object stores, a list is a request for each thousand names."""
    reshard.save(STATE, tmp_path)
    dead, real, listed = claimed(inner := open_storage(tmp_path), **GONE), LocalStorage.list, []
    inner.publish("manifest.json.~0123456789abcdef.tmp", b"")
    of_dead = f"{commit.folder_of(dead)}/"

    def noted(storage: LocalStorage, prefix: str = "", *, sized: bool = True) -> dict[str, int]:
        listed.append(prefix)
        return real(storage, prefix, sized=sized)

    monkeypatch.setattr(LocalStorage, "list", noted)
    assert commit.remove_dead(inner, dry_run=True) == commit.remove_dead(inner) == [dead]
    assert [prefix for prefix in listed if prefix != of_dead] == ["", ""]
    assert not [name for name in real(inner) if name.startswith((of_dead, "manifest.json."))]


def test_a_save_that_counts_does_not_fail_for_want_of_tidying_up(tmp_path, caplog):
    def fault(verb: str, name: str) -> None:
        if verb == "delete":
            raise StorageError("permission denied")

    reshard.save(STATE, tmp_path)
    reshard.save({"w": torch.zeros(3)}, Faulty(open_storage(tmp_path), fault))
    assert "was saved, but files that are no longer needed could not be deleted: permission denied" in caplog.text
    assert reshard.verify(tmp_path).ok
    assert not reshard.open(tmp_path)["w"][...].any()
    reshard.save(STATE, tmp_path)
    assert len([path for path in tmp_path.iterdir() if commit.is_generation(path.name)]) == 1


@pytest.mark.parametrize("text", ["{", json.dumps({"reshard": "checkpoint", "version": 1})])
def test_a_failed_save_over_an_unreadable_manifest_tells_why_it_failed(text, tmp_path):
    reshard.save(STATE, tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    before = sorted(path.name for path in tmp_path.iterdir())

    def fault(verb: str, name: str) -> None:
        if verb == "write" and name.endswith(".safetensors"):
            raise StorageError("no space left on the device")

    with pytest.raises(StorageError, match="no space left"):
        reshard.save(STATE, Faulty(open_storage(tmp_path), fault))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    reshard.save(STATE, tmp_path)
    assert reshard.verify(tmp_path).ok


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors.index.json", "model.safetensors", ".metadata"])
def test_somebody_else_s_files_are_never_replaced(name, tmp_path):
    (tmp_path / name).write_text('{"name": "my web application"}')
    for attempt in (reshard.save, lambda state, path: reshard.async_save(state, path).result()):
        with pytest.raises(StorageError, match=f"contains .*{name}.*, which is not part of a native checkpoint"):
            attempt(STATE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "web" in (tmp_path / name).read_text()


def test_other_files_beside_a_checkpoint_stay(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        reshard.save(STATE, tmp_path)
    assert reshard.open(tmp_path).format == "native"
    assert (tmp_path / "config.json").exists()


def test_links_that_lead_nowhere_and_paths_that_are_none(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"cannot write to .*/link: .* or a dangling symbolic link\. Fix this"):
        reshard.save(STATE, tmp_path / "link")
    for attempt in (reshard.save, reshard.load):
        with pytest.raises(StorageError, match="NUL"):
            attempt(dict(STATE), f"{tmp_path}/a\0b")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not")
def test_a_folder_that_may_not_be_looked_into(tmp_path):
    reshard.save(STATE, tmp_path / "locked" / "c")
    (tmp_path / "locked").chmod(0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        for attempt in (reshard.open, lambda path: reshard.save(STATE, path), reshard.verify):
            with pytest.raises(StorageError, match=r"(?i)permission denied"):
                attempt(tmp_path / "locked" / "c")
    finally:
        os.seteuid(0)
    assert reshard.verify(tmp_path / "locked" / "c").ok


def saved_each_to_its_own(folder: str) -> str:
    with pytest.raises(ReshardError) as caught:
        reshard.save({**STATE, f"r{dist.get_rank()}": torch.ones(2)}, f"{folder}/{dist.get_rank()}")
    return str(caught.value)


@pytest.mark.gloo
def test_folders_of_each_machine_are_found_out_before_anything_is_written(tmp_path):
    for said in gloo.run(saved_each_to_its_own, 3, str(tmp_path)):
        assert f"the files of rank 0 in {tmp_path}/0 are not visible in {tmp_path}/" in said
        assert "to a folder that they share" in said
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_a_newer_version_is_not_replaced(tmp_path):
    reshard.save(STATE, tmp_path)
    manifest = tmp_path / "manifest.json"
    newer = {**json.loads(manifest.read_text()), "version": 4}
    manifest.write_text(json.dumps(newer))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(
        FormatError, match=r"manifest\.json has format version 4, but .* reads up to version 3: upgrade"
    ):
        reshard.save(STATE, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    manifest.write_text("{")  # a damaged one is nothing to keep
    reshard.save(STATE, tmp_path)
    assert reshard.verify(tmp_path).ok


@pytest.mark.parametrize(
    ("other", "dead"),
    [
        (GONE, True),
        ({"process_start": "1"}, True),
        ({**GONE, "machine": "another boot pid:[1]"}, False),
        ({**GONE, "machine": "another boot pid:[1]", "unix_s": 0}, True),
        ({**GONE, "machine": ""}, False),
        ({"machine": "", "unix_s": 0}, True),
    ],
)
def test_only_a_claim_whose_process_could_be_seen_from_here_is_that_of_a_dead_one(other, dead, tmp_path):
    storage = open_storage(tmp_path)
    save_id = claimed(storage, **other)
    reshard.save(STATE, tmp_path)
    assert ((tmp_path / commit.folder_of(save_id)).exists()) == (not dead)


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/proc/self/ns/pid"), reason="needs root, to make one")
def test_a_save_in_a_container_of_the_same_host_name_is_not_taken_for_dead(tmp_path):
    program = f"import os; from tests.stories.test_leftovers import *; print(claimed(open_storage({str(tmp_path)!r})))"
    inside = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program],
        capture_output=True, text=True, cwd=Path(reshard.__file__).parents[1],
    )  # fmt: skip
    if inside.returncode and "unshare" in inside.stderr:
        pytest.skip(f"no namespaces here: {inside.stderr}")
    save_id = inside.stdout.strip()
    reshard.save(STATE, tmp_path)
    assert (tmp_path / commit.folder_of(save_id) / "claim.json").exists()


def test_a_process_of_somebody_else_that_proc_hides_is_not_gone(monkeypatch):
    def forbidden(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert not liveness.is_gone(GONE["pid"], "1")


def test_a_checkpoint_of_a_newer_version_is_not_passed_over_for_an_older_one(tmp_path):
    for step in range(3):
        reshard.save(STATE, tmp_path / f"step-{step}")
    manifest = tmp_path / "step-2" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 4}))
    for attempt in (reshard.latest_complete, lambda path: reshard.prune(path, keep_last=1)):
        with pytest.raises(FormatError, match="upgrade reshard"):
            attempt(tmp_path)
    manifest.write_text('{"version": 4, "name": "my web application"}')
    (tmp_path / "step-2").rename(tmp_path / "app")
    for data in (tmp_path / "app").glob("data-*"):
        data.rename(tmp_path / "app" / "other")
    assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-1")


@pytest.mark.parametrize("save", [reshard.save, lambda *a, **k: reshard.async_save(*a, **k).result()])
def test_what_is_there_is_replaced_or_not_as_one_says(save, tmp_path) -> None:
    """The same argument and the same error for saves and conversions; nothing is written where it is refused."""
    save({"w": torch.ones(3)}, tmp_path / "c", overwrite=False)
    save({"w": torch.zeros(3)}, tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(FileExistsError, match=r"already contains a checkpoint: .* or pass overwrite=True") as info:
        save({"w": torch.ones(3)}, tmp_path / "c", overwrite=False)

    assert isinstance(info.value, FormatError)
    assert sorted(tmp_path.rglob("*")) == before
    assert reshard.open(tmp_path / "c")["w"][0] == 0
    reshard.convert(tmp_path / "c", tmp_path / "c.pt", format="torch_save")
    with pytest.raises(FileExistsError, match=r"c.pt already exists: choose another path, or pass overwrite=True"):
        reshard.convert(tmp_path / "c", tmp_path / "c.pt", format="torch_save")
    reshard.convert(tmp_path / "c", tmp_path / "c.pt", format="torch_save", overwrite=True)


def test_a_file_of_another_kind_is_no_checkpoint_that_a_conversion_replaces(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")
    script, empty = tmp_path / "train.py", tmp_path / "empty.pt"
    script.write_text("import torch\n")
    empty.touch()

    for overwrite in (False, True):
        with pytest.raises(
            FormatError, match=r"train\.py exists and is not a file of torch\.save: choose another path"
        ):
            reshard.convert(tmp_path / "c", script, format="torch_save", overwrite=overwrite)

    assert script.read_text() == "import torch\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "empty.pt", "train.py"]
    reshard.convert(tmp_path / "c", empty, format="torch_save", overwrite=True)
    assert torch.load(empty)["w"].tolist() == [1, 1, 1]


def test_a_report_says_that_an_earlier_save_was_replaced(tmp_path):
    first, second = reshard.save(STATE, tmp_path), reshard.save(STATE, tmp_path)
    assert (first.replaced, second.replaced) == (False, True)
    assert "replaced an earlier save" in repr(second)
    assert "in place of" not in repr(first)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", [("*.json",), ("*.json", "*.safetensors"), ("*.json", "*.safetensors", "*.blocks")])
@pytest.mark.parametrize("at", ["c", "run/step-3"])
def test_a_lost_manifest_is_damage_and_not_a_save_that_was_killed(at, lost, tmp_path):
    """Recipes begin at step 0 on FileNotFoundError, and the first save then removed all data, without a word."""
    folder = tmp_path / at
    reshard.save(STATE, folder)
    for file in [file for glob in lost for file in folder.rglob(glob)]:
        file.unlink()
    before = files_in(folder)

    for path in {folder, folder if at == "c" else folder.parent}:
        with pytest.raises(CorruptCheckpointError, match=r"no manifest.json in .* lost or not copied: data-") as info:
            reshard.open(path)
        assert not isinstance(info.value, FileNotFoundError)
    assert not reshard.verify(folder).ok
    assert reshard.latest_complete(folder.parent) is None

    with pytest.raises(FormatError, match=r"already contains a checkpoint: .* or pass overwrite=True"):
        reshard.save(STATE, folder, overwrite=False)
    reshard.save(STATE, tmp_path / "other")
    with pytest.raises(FormatError, match=r"already contains a checkpoint \(data-"):
        reshard.convert(tmp_path / "other", folder, format="native")
    assert files_in(folder) == before

    assert reshard.save(STATE, folder).replaced
    assert reshard.verify(folder).ok
    assert len(list(folder.glob("data-*"))) == 1


@pytest.mark.parametrize("at", ["c", "run/step-3"])
def test_a_first_save_that_was_killed_is_where_a_run_begins(at, tmp_path):
    folder = tmp_path / at
    reshard.save(STATE, folder)
    [data] = folder.glob("data-*")
    (folder / "manifest.json").unlink()
    (data / "claim.json").write_text(json.dumps({"host": "x", **GONE, "unix_s": 0.0}))  # as it is until it is published
    for path in {folder, folder if at == "c" else folder.parent}:
        with pytest.raises(FileNotFoundError, match="a save was killed before it was complete, or is still running"):
            reshard.open(path)
    assert not reshard.save(STATE, folder, overwrite=False).replaced
    assert not data.exists()


def test_pruning_leaves_data_whose_manifest_was_lost(tmp_path):
    run = saved(tmp_path, "step-1", "step-2", "step-3", "step-4")
    (run / "step-3" / "manifest.json").unlink()
    (run / "step-1" / "manifest.json").unlink()
    before = files_in(run / "step-3")
    assert reshard.prune(run, keep_last=1) == [str(run / "step-2")]
    assert left_in(run) == ["step-1", "step-3", "step-4"]
    assert files_in(run / "step-3") == before


def test_a_report_says_that_a_damaged_save_was_replaced(tmp_path):
    reshard.save(STATE, tmp_path)
    (tmp_path / "manifest.json").write_text('{"reshard": "checkpoint", "version"')
    with pytest.raises(FormatError, match="overwrite=True"):
        reshard.save(STATE, tmp_path, overwrite=False)
    assert reshard.save(STATE, tmp_path).replaced
