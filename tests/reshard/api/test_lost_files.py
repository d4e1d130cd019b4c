"""`verify` goes on where files are missing or truncated: it lists all of them, and what else is damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners import fsdp
from reshard.errors import CorruptCheckpointError
from tests.samples import sample

RANKS = 4


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    reshard.save({"model": {f"layers.{i}.w": torch.randn(64, 64) for i in range(8)}}, folder / "native")
    return Path(folder / "native")


def damage(folder: Path, files: list[Path]) -> list[Path]:
    """Remove one file, truncate one, and change a byte of the last."""
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:9000])
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    return files


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("format", "suffix"), [("native", ".safetensors"), ("dcp", ".distcp")])
def test_all_damaged_files_are_listed(format: Any, suffix: str, workers: int, full, tmp_path) -> None:
    path = tmp_path / "checkpoint"
    reshard.convert(full, path, format=format, onto=fsdp(RANKS))
    gone, short, good, changed = damage(path, sorted(path.rglob(f"*{suffix}")))

    report = reshard.verify(path, workers=workers)

    assert not report.ok
    assert report.covered is None
    texts = [str(finding) for finding in report.findings]
    for file in (gone, short, changed):
        assert any(file.name in text for text in texts), file
    assert not any(good.name in text for text in texts)
    named = {finding.fqn for finding in report.findings} - {None}
    assert named == {f"model.layers.{i}.w" for i in range(8)}  # each tensor has rows in the file that is gone
    with pytest.raises(reshard.errors.CorruptCheckpointError, match=gone.name):
        reshard.load({"model": {"layers.0.w": torch.zeros(64, 64)}}, path, strict="subset")


def test_a_truncated_file_is_named_with_its_tensors(tmp_path: Path) -> None:
    reshard.save({"a": torch.ones(64), "b": torch.ones(64)}, path := tmp_path / "checkpoint")
    (file,) = path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:200])

    report = reshard.verify(path)

    assert {finding.fqn for finding in report.findings} == {None, "a", "b"}
    assert all(f"{file.name} has 200 of its" in finding.message for finding in report.findings)


def test_files_of_an_index_are_listed(full, tmp_path) -> None:
    path = tmp_path / "hf"
    reshard.convert(full, path, format="safetensors", max_shard_bytes=20_000)
    gone, short, *_ = damage(path, sorted(path.glob("*.safetensors")))

    report = reshard.verify(path)

    texts = map(str, report.findings)
    assert all(file.name in text for text, file in zip(texts, (gone, short), strict=True))
    assert report.tensors == 6  # the rest was read


@pytest.mark.parametrize("name", ["pt_dtensor_2x2/ckpt", "mcore_legacy_tp2_pp2/ckpt", "ds_z1_w2/ckpt", "hf_gpt2/ckpt"])
def test_files_of_other_frameworks_are_listed(name: str, tmp_path) -> None:
    shutil.copytree(sample(name), path := tmp_path / "ckpt")
    kinds = (".pt", ".safetensors")
    gone, *_, short = sorted(file for file in path.rglob("*") if file.suffix in kinds and file.stat().st_size > 2000)
    gone.unlink()
    short.write_bytes(short.read_bytes()[: short.stat().st_size // 2])

    text = str(reshard.verify(path))

    for file in (gone, short):
        assert file.name in text or file.parent.name in text


def test_inspect_shows_the_rest(full, tmp_path, capsys) -> None:
    from reshard.cli.app import run

    path = tmp_path / "checkpoint"
    reshard.convert(full, path, onto=fsdp(RANKS))
    gone, short, *_ = damage(path, sorted(path.rglob("*.safetensors")))
    with pytest.raises(SystemExit) as end:
        run(["inspect", str(path)])
    out = capsys.readouterr().out
    assert end.value.code == 1
    assert "8 tensors" in out
    assert [line.split()[0] for line in out.splitlines() if gone.name in line or short.name in line] == ["damaged"] * 2


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("harm", ["gone", "short"])
@pytest.mark.parametrize(("format", "suffix"), [("native", ".safetensors"), ("dcp", ".distcp")])
def test_files_that_an_open_checkpoint_lost_are_found(
    format: Any, suffix: str, harm: str, is_read: bool, deep: bool, full, tmp_path
) -> None:
    reshard.convert(full, path := tmp_path / "checkpoint", format=format)
    checkpoint = reshard.open(path)
    if is_read:
        checkpoint["model.layers.0.w"][...]
    (file,) = path.rglob(f"*{suffix}")
    file.unlink() if harm == "gone" else os.truncate(file, 5000)

    report = reshard.verify(checkpoint, deep=deep)

    assert not report.ok
    assert report.covered is None
    assert file.name in str(report)
    assert len({str(finding) for finding in report.findings}) == len(report.findings)


@pytest.mark.parametrize("deep", [True, False])
def test_a_checkpoint_that_was_opened_to_recover_its_data_is_not_called_whole(deep, full, tmp_path) -> None:
    shutil.copytree(full, path := tmp_path / "checkpoint")
    (file,) = path.rglob("*.safetensors")
    os.truncate(file, 9000)
    report = reshard.verify(reshard.open(path, check=False), deep=deep)
    assert not report.ok
    assert f"{file.name} has 9000 of its" in str(report.findings[0])


@pytest.mark.host_only("it is about a folder")
def test_what_else_is_in_the_folder_of_a_checkpoint_is_not_opened(full, tmp_path) -> None:
    shutil.copytree(full, path := tmp_path / "checkpoint")
    os.mkfifo(path / "pipe")
    (gone := path / "claim.json").write_text("{}")
    checkpoint = reshard.open(path)
    gone.unlink()
    assert reshard.verify(checkpoint).ok
    assert reshard.verify(path).ok


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_file_that_is_deleted_after_the_checkpoint_was_opened_is_damage(format: Any, tmp_path: Path) -> None:
    """A job that starts afresh where there is no checkpoint would lose its progress."""
    state = {"w": torch.ones(8)}
    reshard.save(state, tmp_path / "native")
    if format != "native":
        reshard.convert(tmp_path / "native", tmp_path / format, format=format)
    opened = reshard.open(tmp_path / format)
    (data,) = (tmp_path / format).rglob("*.safetensors" if format == "native" else "*.distcp")
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"no .*{data.name}.*The checkpoint needs it: restore it"):
        reshard.load({"w": torch.zeros(8)}, opened)
    assert not reshard.compare(opened, state).ok
