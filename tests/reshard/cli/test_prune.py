"""`reshard prune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import OptionError
from reshard.formats import run_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four steps."""
    for step in range(4):
        reshard.save({"a": torch.ones(3)}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def _left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_it_lists_what_it_removes(say, run) -> None:
    before = _left(run)
    for words in ([], ["--json"]):
        said = say("prune", run, "--keep-last", 2, "--dry-run", *words)
        assert said.code == 0
        assert all(f"step-{step}" in said.out for step in range(2))
        assert (f"{run}/step-2" in said.out) == bool(words)
        if words:
            assert json.loads(said.out)["kept"] == [f"{run}/step-2", f"{run}/step-3"]
        assert _left(run) == before
    assert json.loads(said.out)["dry_run"] is True
    assert say("prune", f"{run}/", "--keep-last", 1, "--dry-run").out.splitlines() == [
        "would delete 3 of 4 checkpoints, 36 B of tensors: step-0, step-1, step-2; keeps step-3"
    ]

    said = say("prune", run, "--keep-last", 2)

    assert said.code == 0
    assert said.out.splitlines() == [
        "deleted 2 of 4 checkpoints, 24 B of tensors: step-0, step-1; kept step-2, step-3",
    ]
    assert _left(run) == ["step-2", "step-3"]
    told = json.loads(say("prune", run, "--keep-last", 1, "--on", "processes:2", "--json").out)
    assert told == {
        "ok": True,
        "path": str(run),
        "dry_run": False,
        "deleted": [f"{run}/step-2"],
        "kept": [f"{run}/step-3"],
        "leftovers": [],
    }
    assert say("prune", run, "--keep-last", 1).out == "deleted 0 of 1 checkpoint; kept step-3\n"


def test_it_lists_what_killed_saves_left(say, run) -> None:
    for step, size in (("step-0", 1 << 10), ("step-3", 2 << 20), ("step-4", 3 << 20)):
        left = run / step / "data-0192f3c1a8aa-5d2e00112233"
        left.mkdir(parents=True)
        (left / "claim.json").write_text("{}")
        (left / "00000.safetensors").write_bytes(bytes(size - 2))
    before = _left(run)
    files = [{"path": f"{run}/step-3", "nbytes": 2 << 20}, {"path": f"{run}/step-4", "nbytes": 3 << 20}]
    for words, done, keeps in ((["--dry-run"], "would delete", "keeps"), ([], "deleted", "kept")):
        if words:
            found = json.loads(say("prune", run, "--keep-last", 3, *words, "--json").out)
            assert (found["deleted"], found["leftovers"]) == ([f"{run}/step-0"], files)
            assert reshard.prune(run, keep_last=3, dry_run=True) == [f"{run}/step-0"]
        assert _left(run) == before
        assert say("prune", run, "--keep-last", 3, *words).out.splitlines() == [
            f"{done}  {run}/step-3  (files of killed saves, 2.0 MiB)",
            f"{done}  {run}/step-4  (files of killed saves, 3.0 MiB)",
            f"{done} 1 of 4 checkpoints, 12 B of tensors: step-0; {keeps} step-1, step-2, step-3",
        ]
    assert _left(run) == ["step-1", "step-2", "step-3"]
    assert json.loads(say("prune", run, "--keep-last", 3, "--json").out)["leftovers"] == []


def test_it_says_that_it_ignores_what_a_manager_keeps(say, run, caplog) -> None:
    (run / run_folder.LEDGER).write_text("{}")
    note = "prune does not apply the Keep rules of this run's CheckpointManager: it"
    for words, done in ((["--dry-run"], "would delete"), ([], "deleted")):
        say("prune", run, "--keep-last", 2, *words)
        assert caplog.messages[-1] == f"{note} {done} step-0, step-1"


def test_it_refuses_what_the_function_refuses(say, tmp_path) -> None:
    for name in ("a", "b"):
        reshard.save({"a": torch.ones(3)}, tmp_path / name)

    for words in ([], ["--dry-run"]):
        said = say("prune", tmp_path, "--keep-last", 1, *words)
        assert said.code == 3
        assert "the names of its checkpoints have no step numbers" in said.err
    assert _left(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_checkpoint_is_no_run(say, run, dry_run) -> None:
    """Of any format, a file too; a folder without a checkpoint is a run before its first save."""
    torch.save({"a": torch.ones(3)}, run / "x.pt")
    reshard.convert(run / "step-0", run.parent / "dcp", format="dcp")
    for one in (run / "step-3", run / "x.pt", run.parent / "dcp"):
        said = say("prune", one, "--keep-last", 1, *["--dry-run"] * dry_run)
        assert said.code == 2
        assert f"{one} is a checkpoint, not the folder of a run: pass the folder above it" in " ".join(said.err.split())
        with pytest.raises(OptionError, match="is a checkpoint, not the folder of a run"):
            reshard.prune(one, keep_last=1, dry_run=dry_run)
    assert len(_left(run)) == 5
    (run.parent / "new").mkdir()
    assert reshard.prune(run.parent / "new", keep_last=1, dry_run=dry_run) == []
