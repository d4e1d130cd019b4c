"""The example of a training loop, run on real processes: saved in the background, resumed on another world."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests import gloo
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytestmark = pytest.mark.gloo

EXAMPLE = Path(__file__).parents[2] / "examples" / "training_loop.py"


def run_example(folder, steps):
    spec = importlib.util.spec_from_file_location("training_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_loop"] = module
    spec.loader.exec_module(module)
    return module.train(Path(folder), steps, every=4)


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_a_run_goes_on_where_another_world_left_off(tmp_path):
    folder = str(tmp_path / "ckpt")
    straight = gloo.run(run_example, 2, str(tmp_path / "straight"), 16)

    first = gloo.run(run_example, 2, folder, 8)
    again = gloo.run(run_example, 2, folder, 16)
    other_world = gloo.run(run_example, 3, folder, 20)

    assert [len(losses) for losses in (*first, *again, *other_world)] == [8, 8, 8, 8, 4, 4, 4]
    for rank in range(2):  # bit for bit the run that was never interrupted
        assert first[rank] + again[rank] == straight[rank]
    kept = sorted(entry.name for entry in (tmp_path / "ckpt").iterdir() if entry.is_dir())
    assert kept == ["step-12", "step-16", "step-20"]
