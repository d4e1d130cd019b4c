"""Folders of runs: which checkpoint is opened, and what is looked at for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import reshard
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, NewerVersionError
from reshard.formats import detect
from tests import gloo
from tests.torch_releases import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def as_dcp(path: Path, value: float) -> None:
    save_alone({"w": torch.full((2,), value)}, checkpoint_id=path)


def as_file(path: Path, value: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((2,), value)}, path)


def as_safetensors(path: Path, value: float) -> None:
    path.mkdir(parents=True)
    save_file({"w": torch.full((2,), value)}, path / "model.safetensors")


def as_ours(path: Path, value: float) -> None:
    reshard.save({"w": torch.full((2,), value)}, path)


RUNS = {
    "torchtitan": (as_dcp, "step-{}"),
    "orbax": (as_ours, "{}"),
    "trainer": (as_safetensors, "checkpoint-{}"),
    "accelerate": (as_safetensors, "checkpoints/checkpoint_{}"),
    "lightning": (as_file, "checkpoints/epoch=0-step={}.ckpt"),
    "dumps": (as_dcp, "checkpoint/step-{}"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_newest_by_number_or_the_step_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    make, name = RUNS[kind]
    for step in (9, 100):
        make(tmp_path / name.format(step), float(step))
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("a: 1")

    newest = reshard.open(tmp_path)

    assert newest["w"][...].tolist() == [100, 100]
    assert newest.url == str(tmp_path / name.format(100))
    assert reshard.open(tmp_path, step=9)["w"][...].tolist() == [9, 9]
    with pytest.raises(CheckpointNotFoundError, match=r"has no step 10: its steps are 9, 100"):
        reshard.open(tmp_path, step=10)
    for load in (reshard.load, lambda target, path: reshard.dcp.load(target, checkpoint_id=path)):
        load(target := {"w": torch.zeros(2)}, tmp_path)
        assert target["w"].tolist() == [100, 100]


def test_lightning_s_last_is_the_newest(tmp_path: Path) -> None:
    for name, value in {"epoch=0-step=7.ckpt": 7.0, "last.ckpt": 8.0}.items():
        as_file(tmp_path / name, value)

    assert reshard.open(tmp_path)["w"][...].tolist() == [8, 8]
    assert reshard.open(tmp_path, step=7)["w"][...].tolist() == [7, 7]


def test_what_is_not_complete_is_passed_over_and_told(tmp_path: Path) -> None:
    as_dcp(tmp_path / "step-10", 10.0)
    as_dcp(tmp_path / "step-20", 20.0)
    (tmp_path / "step-20" / ".metadata").unlink()
    (tmp_path / "step-30").mkdir()

    newest = reshard.open(tmp_path)

    assert newest["w"][...].tolist() == [10, 10]
    assert [warning.partition(" ")[0] for warning in newest.warnings] == ["step-30", "step-20"]
    with pytest.raises(CorruptCheckpointError, match=r"step-20.* no .metadata"):
        reshard.open(tmp_path, step=20)
    (tmp_path / "step-10" / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint of the run at .* can be opened"):
        reshard.open(tmp_path)


def test_of_many_steps_without_one_that_opens_the_newest_say_why(tmp_path: Path) -> None:
    for step in range(1, 7):
        as_ours(tmp_path / f"step-{step}", float(step))
        (tmp_path / f"step-{step}" / "manifest.json").write_text("x")
    with pytest.raises(
        CorruptCheckpointError, match=r"\n  step-6: .*\n  step-5: .*\n  step-4: .*\n  and 3 older steps$"
    ) as caught:
        reshard.open(tmp_path)
    assert "step-3" not in str(caught.value)


def test_one_that_this_version_cannot_read_is_not_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        as_ours(tmp_path / f"step-{step}", float(step))
    manifest = tmp_path / "step-2" / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "version": 999}))

    with pytest.raises(NewerVersionError, match="upgrade"):
        reshard.open(tmp_path)


def test_a_checkpoint_that_has_steps_beside_it_is_itself(tmp_path: Path) -> None:
    """A Trainer leaves the model at the top in the end."""
    as_safetensors(tmp_path / "run", 1.0)
    as_safetensors(tmp_path / "run" / "checkpoint-5", 5.0)

    assert reshard.open(tmp_path / "run" / "model.safetensors")["w"][...].tolist() == [1, 1]
    assert reshard.open(tmp_path / "run", step=5)["w"][...].tolist() == [5, 5]


def test_two_runs_in_one_folder_are_for_the_caller_to_choose(tmp_path: Path) -> None:
    for name in ("a_checkpoints", "checkpoints"):
        as_file(tmp_path / name / "step=1.ckpt", 1.0)

    with pytest.raises(FormatError, match="runs in a_checkpoints, checkpoints"):
        reshard.open(tmp_path)


def test_a_run_that_is_not_on_this_machine(tmp_path: Path) -> None:
    for step in (1, 2):
        reshard.save({"w": torch.full((2,), float(step))}, f"memory://run-of-two/step-{step}")

    assert reshard.open("memory://run-of-two")["w"][...].tolist() == [2, 2]
    assert reshard.open("memory://run-of-two", step=1)["w"][...].tolist() == [1, 1]


def test_a_folder_of_thousands_of_others_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2000):
        (tmp_path / f"entry{number}").mkdir()
    (tmp_path / "entry7" / "notes.txt").write_text("x")
    monkeypatch.setattr(detect, "_find", None)  # lists everything below
    looked = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))

    with pytest.raises(FormatError, match="none of its 2,000 entries"):
        reshard.open(tmp_path)

    assert len(looked) < 300


def load_another_step(folder: str) -> str:
    """As if a newer checkpoint had been completed between the looks of two ranks."""
    step = reshard.open(folder, step=1 + dist.get_rank())
    assert step.run == folder
    try:
        reshard.load({"w": torch.zeros(2)}, step)
    except reshard.ReshardError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_ranks_that_found_different_steps_are_told(tmp_path: Path) -> None:
    for step in (1, 2):
        as_dcp(tmp_path / f"step-{step}", float(step))

    said = gloo.run(load_another_step, 2, str(tmp_path))

    assert said[0] == said[1]
    assert "not the same checkpoint on all ranks: some opened the save /step-1, others /step-2" in said[0]
