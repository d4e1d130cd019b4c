"""Benchmarks are no tests, and no test runs them; but what they import and call by name must be there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

FILES = {path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_benchmark_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    assert (name in NAMES) == hasattr(module, "main")
