"""Benchmarks are no tests, and no test runs them; but what they import and call by name must be there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import reshard
from benchmarks.__main__ import NAMES
from tests import gloo, simulated

FILES = {path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_benchmark_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    assert (name in NAMES) == hasattr(module, "main")


@pytest.mark.gloo
@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.WHY_NOT)
def test_the_benchmark_of_devices_runs_on_one(tmp_path: Path) -> None:
    """So that it does on the day it meets one. Of times it says nothing."""
    rows = gloo.run(_rows, 1, tmp_path)[0]
    assert [row.count("|") for row in rows] == [6] * 7


def _rows(folder: Path) -> list[str]:
    simulated.install()
    from benchmarks import device

    # torch's own has its pinned memory from the device's library, and the simulated one has none
    device._dcp_save, device._dcp_load = reshard.save, reshard.load
    kind = torch.device(simulated.DEVICE, 0)
    return [str(row) for row in device.one_process(kind, 1 << 16, folder)]


def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import device

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr("sys.argv", ["device"])
    assert device.main() == 0
    assert "nothing was run" in capsys.readouterr().out
