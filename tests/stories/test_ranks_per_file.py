"""Saves in which several ranks write one file: what is there then, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import reshard
from reshard.api import save_job
from reshard.errors import OptionError
from reshard.native import data_file
from tests import gloo
from tests.states import MATRIX, sharded_in_every_way_of
from tests.stories.engine_jobs import caught


def refused_writing(*_: Any) -> Any:
    raise RuntimeError("no more")


def saves(folder: str) -> dict[str, Any]:
    """Saves of all kinds; one rank's trouble; what is refused."""
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    reshard.save(sharded_in_every_way_of(1), f"{folder}/each")
    reshard.save(sharded_in_every_way_of(1), f"{folder}/three", ranks_per_file=3)
    plain = {"w": torch.ones(3, device="cpu"), "v": torch.zeros(2, device="cpu")}
    reshard.save(plain, f"{folder}/whole", ranks_per_file=4, divide_above_bytes=1 << 30)
    save_job.machine = lambda: f"machine {rank // 2}"  # type: ignore[assignment]
    reshard.save(sharded_in_every_way_of(1), f"{folder}/machines", ranks_per_file=8)
    if rank == 2:
        real, data_file.row_major_pieces = data_file.row_major_pieces, refused_writing
    out["failed"] = caught_any(lambda: reshard.save(sharded_in_every_way_of(9), f"{folder}/machines", ranks_per_file=2))
    if rank == 2:
        data_file.row_major_pieces = real
    reshard.async_save(sharded_in_every_way_of(2), f"{folder}/later", ranks_per_file=2).result()
    reshard.save(sharded_in_every_way_of(3), f"{folder}/later-still", base=f"{folder}/later")
    out["memory"] = caught(lambda: reshard.save(plain, "memory://m", ranks_per_file=2))
    return out


def caught_any(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaded(path: str) -> dict[str, Any]:
    target = sharded_in_every_way_of(0)
    target["rng"] = reshard.PerRank(torch.zeros(3, dtype=torch.uint8, device="cpu"), on_change="keep")
    report = reshard.load(target, path)
    model = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in target["model"].items()}
    return {"ok": report.ok, "rng": target["rng"].value.tolist(), "w": torch.equal(model["w"], MATRIX + target["step"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    return gloo.run(saves, 4, str(folder))


@pytest.mark.gloo
def test_files_of_several_ranks(told: list[dict[str, Any]], folder: Path) -> None:
    def files(name: str) -> list[str]:
        return sorted(path.name for path in (folder / name).glob("data-*/*") if path.suffix != ".sums")

    assert len(files("each")) == 4
    assert files("three") == ["00000.safetensors", "00003.safetensors"]
    assert files("machines") == files("later") == ["00000.safetensors", "00002.safetensors"]
    assert files("whole") == ["00000.safetensors"]
    for name in ("three", "machines", "later", "later-still", "whole"):
        report = reshard.verify(folder / name)
        assert report.ok, report
    for name in ("three", "machines"):
        report = reshard.compare(folder / "each", folder / name)
        assert report.ok, report
    assert reshard.open(folder / "whole").format == "native"
    assert (folder / "whole/model.safetensors.index.json").exists()


@pytest.mark.gloo
def test_they_load_under_any_topology(told: list[dict[str, Any]], folder: Path) -> None:
    for rank, result in enumerate(gloo.run(loaded, 3, str(folder / "machines"))):
        assert result == {"ok": True, "w": True, "rng": [rank] * 3}
    reshard.convert(folder / "three", folder / "converted", format="native")
    report = reshard.compare(folder / "each", folder / "converted")
    assert report.ok, report


@pytest.mark.gloo
def test_one_rank_s_trouble_leaves_the_old_one(told: list[dict[str, Any]], folder: Path) -> None:
    assert told[2]["failed"] == "RuntimeError: no more"
    for rank in (0, 1, 3):
        assert "rank 2 failed in 'write': RuntimeError: no more" in told[rank]["failed"]
    assert reshard.open(folder / "machines").objects["step"] == 1
    assert reshard.verify(folder / "machines").ok
    reshard.save({"x": torch.ones(1)}, folder / "machines")
    data, *rest = sorted(path.name for path in (folder / "machines").iterdir())
    assert data.startswith("data-")
    assert rest == ["manifest.json", "model.safetensors.index.json"], "the data beside them is that of this save"


@pytest.mark.gloo
def test_storages_without_places_are_refused(told: list[dict[str, Any]]) -> None:
    for result in told:
        assert result["memory"][0] == "StorageError"
        assert "omit ranks_per_file" in result["memory"][1]


def test_a_base_and_what_is_no_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave one of them out"):
        reshard.save({"w": MATRIX}, tmp_path, base="auto", ranks_per_file=2)


@pytest.mark.parametrize(
    ("places", "per_file", "expected"),
    [
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3], [4]]),
        ([4, 5, 6, 7], 8, [[4, 5, 6, 7]]),
        ([0, 2, 4, 5], 4, [[0], [2], [4, 5]]),
        ([], 4, []),
    ],
)
def test_crews_are_neighbours(places: list[int], per_file: int, expected: list[list[int]]) -> None:
    assert list(save_job.file_groups(places, per_file)) == expected
