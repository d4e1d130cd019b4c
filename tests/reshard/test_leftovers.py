"""What saves that were killed leave: the next one, or pruning, takes it away, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

import reshard
from reshard import generations
from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.storage import open_storage
from tests.faulty import Faulty

STATE = {"w": torch.ones(3)}
EMPTY = "data-0192f3c1a8aa-5d2e00112233"


def test_an_empty_folder_is_named_by_opening_and_removed_by_the_next_save(tmp_path):
    (tmp_path / "c" / EMPTY).mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match="a save was killed before it wrote anything"):
        reshard.open(tmp_path / "c")
    assert reshard.latest_complete(tmp_path) is None
    (tmp_path / "c" / "mine").mkdir()
    (tmp_path / "c" / "data-of-mine").mkdir()

    reshard.save(STATE, tmp_path / "c")

    folders = {path.name for path in (tmp_path / "c").iterdir() if path.is_dir()}
    assert EMPTY not in folders
    assert {"mine", "data-of-mine"} < folders
    assert len(folders) == 3


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


def test_a_save_whose_empty_folder_is_taken_away_makes_it_again(tmp_path):
    inner = open_storage(tmp_path / "c")

    def fault(verb: str, name: str) -> None:
        if verb in ("create", "publish"):
            generations._remove_empty(inner)

    reshard.save(STATE, Faulty(inner, fault))
    assert reshard.verify(tmp_path / "c").ok


@pytest.mark.parametrize("text", ["{", json.dumps({"reshard": "checkpoint", "version": 99})])
def test_a_failed_save_over_an_unreadable_manifest_tells_why_it_failed(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)

    def fault(verb: str, name: str) -> None:
        if verb == "write" and name.endswith(".safetensors"):
            raise StorageError("no space left on the device")

    with pytest.raises(StorageError, match="no space left"):
        reshard.save(STATE, Faulty(open_storage(tmp_path), fault))
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    reshard.save(STATE, tmp_path)
    assert reshard.verify(tmp_path).ok
