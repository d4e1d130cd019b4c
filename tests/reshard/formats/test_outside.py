"""What leads out of a checkpoint, and what is far larger than what is stored: names, links, repeated bytes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import CorruptCheckpointError, FormatError


def state(step: int) -> dict[str, torch.Tensor]:
    return {"frozen": torch.arange(100.0), "trained": torch.full((5,), float(step))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with every kind of file but a table."""
    for step in (1, 2):
        reshard.save(state(step), tmp_path / f"step-{step}", base="auto")
    shutil.rmtree(tmp_path / "step-1")
    return tmp_path / "step-2"


def edit(saved: Path, change: dict) -> None:
    """What is changed by hand has no digest."""
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["digest"]
    (saved / "manifest.json").write_text(json.dumps({**manifest, **change}))


BAD_NAMES = ("../../x", "../step-2/data", "/etc/passwd", "manifest.json", "data-x/00000.safetensors", "", ".", "a\nb")


@pytest.mark.parametrize("name", [*BAD_NAMES, "0" * 12, "0" * 12 + "-" + "G" * 12, "0" * 12 + "-" + "0" * 12 + "/x"])
def test_save_ids_are_of_one_form(name: str, saved: Path) -> None:
    edit(saved, {"save_id": name})
    with pytest.raises(CorruptCheckpointError, match=r"`\$\.save_id`"):
        reshard.open(saved)
    assert reshard.latest_complete(saved.parent) is None


@pytest.mark.parametrize("field", ["files", "parts", "linked", "table"])
@pytest.mark.parametrize("name", [*BAD_NAMES, "{}/../x", "{}/a/b", "{}/.hidden", "{}/", "{}"])
def test_names_of_files_are_of_one_form(field: str, name: str, saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    name = name.format("data-" + manifest["save_id"])
    found = {**manifest, "table": {"name": name, "ranks": [[0, 1, 1]], "pages": "0" * 16}}[field]
    rows = [found] if field == "table" else list(found.values()) if isinstance(found, dict) else found
    assert rows
    rows[0]["name"] = name
    edit(saved, {field: found})
    with pytest.raises(CorruptCheckpointError, match=r"regex .*data-.*\.name`"):
        reshard.open(saved)


@pytest.mark.parametrize("kind", [".safetensors", ".sums", ".parts"])
@pytest.mark.parametrize("how", ["the file", "its folder"])
def test_links_out_of_a_checkpoint_are_not_followed(kind: str, how: str, saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (generation,) = saved.glob("data-*")
    if how == "its folder":
        shutil.move(generation, outside)
        generation.symlink_to(outside)
    else:
        for file in sorted(generation.glob(f"*{kind}")):
            outside.mkdir(exist_ok=True)
            shutil.move(file, outside / file.name)
            file.symlink_to(outside / file.name)
    with pytest.raises(CorruptCheckpointError, match=r"link to outside the checkpoint's folder|is missing"):
        reshard.load(state(0), saved)
    assert not reshard.verify(saved).ok
    if how == "the file":
        shutil.copytree(saved, tmp_path / "copy")  # follows links
        assert reshard.verify(tmp_path / "copy").ok


def test_links_that_stay_inside_and_links_to_checkpoints_are_followed(saved: Path, tmp_path: Path) -> None:
    (generation,) = saved.glob("data-*")
    for file in sorted(generation.iterdir()):
        (generation / "real").mkdir(exist_ok=True)
        file.rename(generation / "real" / file.name)
        file.symlink_to(Path("real") / file.name)
    (tmp_path / "latest").symlink_to("step-2")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "there").symlink_to(tmp_path / "latest")
    for path in (saved, tmp_path / "latest", tmp_path / "links" / "there"):
        target = state(0)
        assert reshard.load(target, path).ok
        assert torch.equal(target["trained"], state(2)["trained"])


def test_the_cache_of_a_hub_is_links_and_opens(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshots" / "main" / "model.safetensors").symlink_to("../../blobs/abc")
    assert reshard.open(tmp_path / "snapshots" / "main")["w"][...].tolist() == [1, 1, 1]
    assert reshard.verify(tmp_path / "snapshots" / "main").ok


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(1 << 40), torch.as_strided(torch.zeros(1 << 16), (1 << 15, 1 << 15, 1 << 8), (1, 1, 0))],
)
def test_work_is_bounded_by_what_is_stored(tensor: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    torch.save({"w": tensor, "v": torch.ones(3)}, path)
    assert os.path.getsize(path) < 1 << 20
    begun = time.monotonic()
    calls = [
        reshard.fingerprint,
        lambda path: reshard.convert(path, tmp_path / "c"),
        lambda path: reshard.open(path)["w"][...],
    ]
    for call in calls:
        with pytest.raises(FormatError, match=r"repeats a storage of \d+ bytes"):
            call(path)
    assert "repeats a storage" in str(reshard.verify(path).findings[0])
    assert not reshard.compare(path, path).ok
    assert reshard.open(path)["v"][...].tolist() == [1, 1, 1]
    assert reshard.open(path)["w"].shape == tensor.shape
    assert time.monotonic() - begun < 30


def test_tensors_that_repeat_a_little_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0).expand(1000, 3)}, tmp_path / "expanded.pt")
    assert reshard.verify(tmp_path / "expanded.pt").ok
    assert torch.equal(reshard.open(tmp_path / "expanded.pt")["w"][...], torch.arange(3.0).expand(1000, 3))
