"""Folders of Megatron-core: what a conversion writes beside Megatron's own files opens again, and holds the same."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import CorruptCheckpointError, FormatError
from tests.reshard.formats.writers import DcpWriter, grid
from tests.samples import sample

COMMON: dict[str, Any] = {
    "args": {"hidden_size": 4, "lr": 1e-4, "limit": math.nan, "names": ["a", "b"], "dtype": torch.bfloat16},
    "iteration": 3,
    "optimizer": {"state": {"common_step": torch.tensor(3)}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]},
    "bias": torch.arange(5.0),
}


def made(folder: Path) -> Path:
    """A small checkpoint of Megatron-core."""
    weight = torch.arange(24.0).reshape(6, 4)
    DcpWriter({"decoder.layers.mlp.weight": grid(weight, 2)}, {"rng": [1, 2]}).write(folder)
    torch.save(COMMON, folder / "common.pt")
    described = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(described))
    return folder


def sources(name: str, tmp_path: Path) -> Path:
    if name == "made":
        return made(tmp_path / "source")
    return next((sample(name) / "ckpt").glob("iter_*"))


@pytest.mark.parametrize("beside", [("common.pt",), ("common.pt", "metadata.json")], ids="+".join)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["made", "mcore_tp1", "mcore_tp2_pp2", "mcore_moe_ep2"])
def test_a_conversion_beside_its_own_files(name: str, first: bool, beside: tuple[str, ...], tmp_path: Path) -> None:
    source, target = sources(name, tmp_path), tmp_path / "target"
    target.mkdir()

    def put() -> None:
        for file in beside:
            shutil.copy(source / file, target)

    if first:
        put()
    reshard.convert(source, target, format="dcp", overwrite=True)
    if not first:
        put()

    opened = reshard.open(target)
    assert opened.format == "megatron"
    assert reshard.compare(source, target).ok
    assert set(opened.objects) == set(reshard.open(source).objects)
    if name != "made":
        a, b = reshard.open(source).normalized(), opened.normalized()
        assert set(a["model"]) == set(b["model"])
        assert [len(g["params"]) for g in a["optim"]["param_groups"]] == [
            len(g["params"]) for g in b["optim"]["param_groups"]
        ]
    assert ("metadata.json is missing" in str(opened.warnings)) == ("metadata.json" not in beside)


@pytest.mark.parametrize(
    "change",
    [{"iteration": 4}, {"bias": torch.ones(5)}, {"bias": 5}, {"args": {**COMMON["args"], "hidden_size": 5}}],
    ids=str,
)
def test_files_of_two_checkpoints_are_not_taken_for_one(change: dict[str, Any], tmp_path: Path) -> None:
    source, target = made(tmp_path / "source"), tmp_path / "target"
    reshard.convert(source, target, format="dcp")
    torch.save({**COMMON, **change}, target / "common.pt")

    with pytest.raises(FormatError, match=r"differs from 'common\..*move common.pt elsewhere"):
        reshard.open(target)


@pytest.mark.parametrize("text", ["\u00b2", "1" * 5000, ""])
def test_an_iteration_that_is_no_number_is_damage(text: str, tmp_path: Path) -> None:
    """It was a ValueError of Python's."""
    made(tmp_path / "run" / "iter_0000001")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)

    with pytest.raises(CorruptCheckpointError, match="but there is no folder"):
        reshard.open(tmp_path / "run")
