"""What Orbax saved in regular shardings of one, two, and three dims is read as Orbax restores it, whole and in part."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="Orbax is not installed")


def test_every_sharding_is_read_as_orbax_restores_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.orbax_shards", "--quick", "--folder", str(tmp_path)]

    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr  # the benchmark compares all values
    assert ended.stdout.count("16 MiB cut") == 10
