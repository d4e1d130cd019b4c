"""The command line as tests use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import reshard
from reshard.cli.app import run


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs a command line in this process."""

    def say(*words: object) -> Said:
        with pytest.raises(SystemExit) as end:
            run([str(word) for word in words])
        code = end.value.code
        return Said(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    return say


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three layers that are alike, one that is not, an optimizer and a few plain values, saved by one process."""
    model = {f"layers.{i}.w": torch.arange(24.0).reshape(6, 4) + i for i in range(3)}
    model |= {"norm": torch.ones(4, dtype=torch.bfloat16), "count": torch.tensor(3)}
    optim = {"state": {"norm": {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 0.1, "params": ["norm"]}]}
    reshard.save({"model": model, "optim": optim, "step": 7}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"
