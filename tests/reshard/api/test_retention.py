"""What `prune` deletes while others save, and what it says of leftovers."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.api import retention


@pytest.mark.parametrize("after", ["complete", "is_alive", "unpublish"])
def test_pruning_leaves_what_was_saved_anew_since_it_was_chosen(after, tmp_path, monkeypatch) -> None:
    """By a job that went back to step 1. Its new checkpoint was once deleted."""
    for step in (1, 2, 3):
        reshard.save({"w": torch.ones(4)}, tmp_path / f"step-{step}")
    real, new = getattr(retention, after), []

    def late(*args):
        found = real(*args) if after == "complete" else None
        if not new and (after == "complete" or args[0].url.endswith("step-2")):
            new.append(reshard.save({"w": torch.zeros(4)}, tmp_path / "step-2"))
        return found or real(*args)

    monkeypatch.setattr(retention, after, late)
    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-1")]

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert reshard.verify(tmp_path / "step-2").ok
    assert reshard.open(tmp_path / "step-2")["w"][...].tolist() == [0.0] * 4
    assert len(list((tmp_path / "step-2").glob("data-*"))) == 1
