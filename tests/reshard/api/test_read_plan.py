"""A load lists what it reads only when its plan is proved, and says so where a checkpoint has a hole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners.findings import Finding
from planners.plans.load import LoadPlan
from reshard.errors import CorruptCheckpointError


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_item_is_listed_of_a_plan_that_is_not_right(dry_run: bool, tmp_path: Path, monkeypatch: Any) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path)
    target = {"w": torch.zeros(3)}
    listed: list[int] = []
    monkeypatch.setattr(LoadPlan, "items", lambda self, rank: listed.append(rank))
    monkeypatch.setattr(LoadPlan, "findings", lambda self: iter([Finding("is read twice", "w", 0, (1,))]))

    with pytest.raises(
        CorruptCheckpointError,
        match=r"lacks elements that the target needs, or has some of them twice: 'w', rank 0.*is read twice$",
    ):
        reshard.load(target, tmp_path, dry_run=dry_run)

    assert listed == []
    assert not target["w"].any()
