"""Benchmarks are not run by tests, but what they import and call by name must exist."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES
from tests import simulated

SUITES = (
    "tests/stories/test_engine.py::TestRoundTrip",
    "tests/stories/test_roundtrip.py::test_state_arrives_bit_exact[fsdp-2-fsdp_tp-4]",
    "tests/reshard/api/test_live.py::test_views_fuse_turn_pad_and_repeat_on_the_way",
)
"""Parts of the suites of engine, live transfers, and state dicts."""

FILES = {path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_benchmark_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    assert (name in NAMES) == hasattr(module, "main")


@pytest.mark.gloo
@pytest.mark.host_only("starts a run on the simulated device")
@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.WHY_NOT)
def test_what_make_gpu_does_runs_on_a_simulated_device() -> None:
    """So that it runs on the first real device, too. Runs parts of the suites, and does not check times."""
    command = [sys.executable, "-m", "benchmarks.device", "--device=sim", "--mib=1", "--suites", *SUITES]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert [line.count("|") for line in ended.stdout.splitlines() if line.startswith("| ")] == [6] * (1 + 2 * 5 + 4)
    assert "| DCP |" not in ended.stdout, "torch's own does not run there"


def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import device

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr("sys.argv", ["device"])
    assert device.main() == 0
    assert "nothing was run" in capsys.readouterr().out
