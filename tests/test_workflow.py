"""GitHub's workflow, which is not run here: actions are pinned, targets exist, and versions are those that we
support."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
if not WORKFLOW.exists():
    pytest.skip("the sdist has no workflows", allow_module_level=True)
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def test_actions_are_pinned_to_commits() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]

    assert used
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []


def test_every_target_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    asked = {target for step in STEPS for target in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))}

    assert {"check", "test", "docs", "dist", "demo"} == asked
    assert asked <= targets


def test_every_promised_python_and_the_oldest_and_newest_torch_are_tested() -> None:
    from reshard.live.tensors import NEWEST_TRIED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = {line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    matrix = JOBS["test"]["strategy"]["matrix"]["include"]
    torches = {row["torch"] for row in matrix}

    assert promised <= {row["python"] for row in matrix}
    (oldest,) = [line.partition(">=")[2] for line in project["dependencies"] if line.startswith("torch>=")]
    assert f"{oldest}.0" in torches
    assert "" in torches  # the repository's own
    assert max(tuple(map(int, t.split(".")[:2])) for t in torches if t) == NEWEST_TRIED
