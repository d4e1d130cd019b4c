"""What earlier versions wrote stays readable for ever: every folder of `tests/golden` still holds what it held."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import reshard
from tests.golden import make
from tests.same import same

VERSIONS = sorted(path for path in make.HERE.iterdir() if path.is_dir() and path.name.startswith("v"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_what_one_process_wrote(version: Path):
    nested, expected = reshard.open(version / "single").nested(), make.single()

    for name, tensor in expected["model"].items():
        found = reshard.open(version / "single")[f"model.{name}"][...]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert same(found, tensor), name
    assert math.isnan(nested.pop("nan"))
    assert {k: v for k, v in nested.items() if k != "model"} == {
        k: v for k, v in expected.items() if k not in ("model", "nan")
    }
    assert reshard.verify(version / "single").ok


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_what_four_ranks_wrote(version: Path):
    expected = make.sharded_values()
    target = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}, "step": 0}
    target["rng"] = reshard.PerRank(
        torch.tensor([9]), on_change=lambda saved, rank, world: torch.cat(list(saved.values()))
    )

    report = reshard.load(target, version / "sharded")

    assert report.ok
    for name, value in expected.items():
        assert torch.equal(target["model"][name], value), name
    assert target["rng"].value.tolist() == [0, 1, 2, 3]
    assert target["step"] == 3
    assert reshard.verify(version / "sharded").ok
    assert reshard.open(version / "sharded").layout.world_size == 4


def test_there_is_a_golden_checkpoint_of_this_version():
    from reshard.native.manifest import VERSION

    assert f"v{VERSION}" in {path.name for path in VERSIONS}
