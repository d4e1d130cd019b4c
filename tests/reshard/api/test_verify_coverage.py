"""What `verify` says that it covered: a changed bit is found, or the verdict does not claim that it would have been."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import reshard
from planners.findings import Coverage
from planners.units import format_bytes
from reshard.cli.app import app
from tests.torch_releases import save_alone

STATE: dict[str, Any] = {
    "a": torch.arange(3000.0).reshape(60, 50),
    "b": torch.ones(70, 9).bfloat16(),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(4),
    "note": "text",
}
NBYTES = sum(t.nbytes for t in STATE.values() if isinstance(t, torch.Tensor))
UNCHECKED = ("safetensors", "zstd", "legacy")
LEAVES_OPEN = {
    "safetensors": "unchecked: the format has no checksums",
    "dcp": "unchecked: whether all files are from the same save, and whether replicas are equal",
    "zstd": "unchecked: whether all files are from the same save, and whether replicas are equal",
}


def written(form: str, folder: Path) -> Path:
    if form == "native":
        reshard.save(STATE, folder)
    elif form in ("torch_save", "legacy"):
        folder = folder.with_suffix(".pt")
        torch.save(STATE, folder, _use_new_zipfile_serialization=form == "torch_save")
    elif form in ("dcp", "zstd"):
        extensions: dict[str, Any] = {}
        if form == "zstd":
            extensions["_extensions"] = [pytest.importorskip("torch.distributed.checkpoint._extension").ZStandard()]
        writer = dcp.FileSystemWriter(folder, **extensions)
        save_alone(STATE, storage_writer=writer)
    else:
        reshard.save(STATE, folder.with_name("source"))
        reshard.convert(folder.with_name("source"), folder, format="safetensors", select=["!note"])
    return folder


def said(*arguments: str) -> str:
    return CliRunner().invoke(app, ["verify", *arguments]).stdout


@pytest.fixture(params=["native", "dcp", "torch_save", *UNCHECKED])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    with warnings.catch_warnings(action="ignore"):  # that torch is not distributed
        return request.param, written(request.param, tmp_path / "c")


def test_a_verdict_says_how_far_it_reaches(checkpoint: tuple[str, Path]) -> None:
    form, path = checkpoint
    checked, sealed = 0 if form in UNCHECKED else NBYTES, form in ("native", "torch_save")

    unchecked = LEAVES_OPEN.get(form, "")

    assert reshard.verify(path).covered == Coverage(NBYTES, NBYTES, checked, sealed, unchecked)
    assert unchecked in said(str(path))
    assert reshard.verify(path, deep=False).covered == Coverage(NBYTES, 0, 0, sealed)
    assert f"{format_bytes(checked)} verified" in str(reshard.verify(path))
    assert json.loads(said(str(path), "--json"))["covered"] == {
        "total_bytes": NBYTES,
        "read_bytes": NBYTES,
        "checked_bytes": checked,
        "metadata_checked": sealed,
        "unchecked": unchecked,
    }
    assert ("undamaged" in said(str(path))) == sealed
    assert "undamaged" not in said(str(path), "--shallow")


def test_a_changed_bit_is_found_or_not_claimed_to_be(checkpoint: tuple[str, Path]) -> None:
    """Anywhere in any file: what is right, by a verdict that covers all values, holds the values that were saved."""
    _, path = checkpoint
    found = 0
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            data = bytearray(whole)
            data[at] ^= 4
            file.write_bytes(data)
            try:
                report = reshard.verify(path)
            except reshard.ReshardError:
                found += 1
                continue
            found += not report.ok
            if report.ok and report.covered is not None and report.covered.is_full:
                opened = reshard.open(path)
                sealed = report.covered.metadata_checked
                names = set(opened) if sealed else set(opened) & set(STATE)
                assert all(torch.equal(opened[name][...], STATE[name]) for name in names), (file.name, at)
                assert not sealed or dict(opened.objects) == {"note": "text"}, (file.name, at)
        file.write_bytes(whole)
    assert found
    assert reshard.verify(path).ok


def test_what_another_checkpoint_was_compared_with_is_covered(tmp_path: Path) -> None:
    path = written("safetensors", tmp_path / "c")

    assert reshard.verify(path, against={k: v for k, v in STATE.items() if k != "note"}).covered == Coverage(
        NBYTES, NBYTES, NBYTES
    )
    native = tmp_path / "source"
    assert reshard.compare(native, native).covered == Coverage(NBYTES, NBYTES, NBYTES)
    unread = reshard.compare(native, native, by_fingerprint=True)
    assert unread.covered == Coverage(NBYTES, 0, 0)
    assert "and objects compared (not types of containers; 1 equals 1.0); 0 B of " in unread.verdict
    assert "the rest only by their saved fingerprints" in unread.verdict
    assert "complete and undamaged" in said(str(native), "--against", str(native))
    shallow = said(str(native), "--against", str(native), "--shallow")
    assert "of values were not read. Their saved fingerprints are equal to those of" in shallow


def test_damage_is_a_difference_unless_values_were_told_not_to_be_read(tmp_path: Path) -> None:
    good, bad = written("native", tmp_path / "good"), written("native", tmp_path / "bad")
    (file,) = bad.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    for sides in ((bad, good), (good, bad)):
        assert not reshard.compare(*sides).ok
        assert not reshard.compare(*sides, atol=1e-30).ok
        unread = reshard.compare(*sides, by_fingerprint=True)
        assert unread.ok
        assert "0 B of 13.0 KiB of values on each side read" in repr(unread)
    # what cannot be read is a finding, too
    opened = reshard.open(bad)
    file.write_bytes(data[:40])
    assert {one.fqn for one in reshard.compare(good, opened).findings} == {"a", "b", "scalar"}


@pytest.mark.parametrize("relative", [False, True])
def test_damage_of_a_checkpoint_whose_name_begins_like_the_other_ones(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of step-1, nothing is damaged if step-10 is."""
    monkeypatch.chdir(tmp_path)
    good, bad = (Path(name) if relative else tmp_path / name for name in ("step-1", "step-10"))
    written("native", good)
    written("native", bad)
    (file,) = bad.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for one, other, deep in ((good, bad, True), (good, bad, False)):
        report = reshard.verify(one, against=other, deep=deep)
        assert report.covered is not None or report.ok
    assert reshard.verify(bad, against=good).covered is None
    assert "undamaged, but step-10 is damaged" in said("step-1", "--against", "step-10").replace("\n", " ")
    assert said("step-10", "--against", "step-1").startswith("damaged: ")
    opened = reshard.open(bad)
    file.write_bytes(data[:40])  # whose damage only a comparison finds
    assert reshard.verify(good, against=opened, deep=False).covered is not None


@pytest.mark.parametrize("relative", [False, True])
def test_damage_of_a_checkpoint_within_the_other_one(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outer = Path("c") if relative else tmp_path / "c"
    written("native", outer / "inner")
    written("safetensors", outer)
    opened = reshard.open(outer / "inner")
    for path in outer.glob("inner/data-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])
    for one in (outer, outer.resolve()):
        report = reshard.verify(one, against=opened, deep=False)
        assert report.findings
        assert report.covered is not None
        report = reshard.verify(opened, against=one, deep=False)
        assert report.covered is None


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_what_was_covered_of_a_damaged_checkpoint_is_not_said(tmp_path: Path, damage: str) -> None:
    path = written("native", tmp_path / "c")
    (file,) = path.glob("data-*/*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))

    report = reshard.verify(path)

    assert not report.ok
    assert report.covered is None
    assert json.loads(said(str(path), "--json"))["covered"] is None


def test_a_comparison_that_finds_differences_says_what_it_read(tmp_path: Path) -> None:
    reshard.save({"w": torch.arange(4.0)}, tmp_path / "a")
    reshard.save({"w": torch.arange(4.0) + 1}, tmp_path / "b")
    report = reshard.verify(tmp_path / "a", tmp_path / "b", deep=False)
    assert not report.ok
    assert report.covered == Coverage(16, 16, 0, True)
    assert "16 B of values read, none verified" in said(
        str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--shallow"
    )


@pytest.mark.parametrize("name", ["stage_{}.pt", "pytorch_model_rank{}.bin", "model_world_size_3_rank_{}.pt"])
def test_what_nothing_numbers_is_not_said_to_be_there(name: str, tmp_path: Path) -> None:
    for i in range(3):
        torch.save({f"layers.{i}.w" if "stage" in name else "w": torch.ones(2)}, tmp_path / name.format(i))
    assert ("files with higher numbers" in str(reshard.verify(tmp_path))) is ("world_size" not in name)
    (tmp_path / name.format(2)).unlink()
    if "world_size" in name:
        assert not reshard.verify(tmp_path).ok
    else:
        assert "whether files with higher numbers are missing" in str(reshard.verify(tmp_path))


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_a_shallow_verify_counts_metadata_that_opening_compared(tmp_path: Path, nbytes: int) -> None:
    torch.save({"w": torch.ones(4), "text": "x" * nbytes}, tmp_path / "x.pt")
    shallow = reshard.verify(tmp_path / "x.pt", deep=False).covered
    unchecked = reshard.verify(reshard.open(tmp_path / "x.pt", check=False), deep=False).covered
    assert shallow is not None
    assert unchecked is not None
    assert (shallow.metadata_checked, unchecked.metadata_checked) == (True, False)

    data = (tmp_path / "x.pt").read_bytes()
    at = data.index(b"x" * nbytes, data.index(b"text"))
    (tmp_path / "x.pt").write_bytes(data[: at + nbytes - 1] + b"y" + data[at + nbytes :])
    assert not reshard.verify(tmp_path / "x.pt", deep=False).ok
