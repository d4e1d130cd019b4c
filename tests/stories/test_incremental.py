"""Saves on the base of an earlier one: what they write, what they need of it afterwards, and what goes wrong."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from reshard.api.save import job as save_job
from reshard.errors import CheckpointError, CheckpointNotFoundError, FormatError, ReshardError
from reshard.formats.native import blocks, generations
from reshard.storage.memory import MemoryStorage
from tests import gloo
from tests.faulty import Crash, SystemCalls
from tests.same import assert_same


def lora(step: int) -> dict:
    """A frozen base and a small part that is trained."""
    frozen = torch.randn(512, 2048, generator=torch.manual_seed(0))
    return {"base": {"w": frozen, "v": frozen[:, :100].t()}, "lora": torch.full((64,), float(step)), "step": step}


def loaded(path: object) -> dict:
    target = {"base": {"w": torch.zeros(512, 2048), "v": torch.zeros(100, 512)}, "lora": torch.zeros(64), "step": 0}
    assert reshard.load(target, path).ok
    return target


def disk_bytes(folder: Path) -> int:
    """As the file system counts: what has two names, once."""
    found = {(s := file.stat()).st_ino: s.st_size for file in folder.rglob("*") if file.is_file()}
    return sum(found.values())


def test_what_is_frozen_is_written_once(tmp_path):
    first = reshard.save(lora(1), tmp_path / "step-1", base="auto")
    size = disk_bytes(tmp_path)
    second = reshard.save(lora(2), tmp_path / "step-2", base="auto")
    third = reshard.async_save(lora(3), tmp_path / "step-3", base="auto").result()

    assert (first.base, first.bytes_reused) == (None, 0)
    assert (second.base, third.base) == (first.save_id, second.save_id)
    assert second.bytes_reused == third.bytes_reused == first.bytes_written - 64 * 4
    assert second.bytes_written == 64 * 4
    assert "4.2 MiB as they were" in repr(third)
    assert disk_bytes(tmp_path) < size + 10_000
    for step in (1, 2, 3):
        assert_same(loaded(tmp_path / f"step-{step}"), lora(step))


@pytest.mark.parametrize("gone", ["removed", "pruned", "replaced"])
def test_whatever_becomes_of_the_base_the_checkpoint_is_whole(gone, tmp_path):
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    reshard.save(lora(2), tmp_path / "step-2", base="auto")
    if gone == "removed":
        shutil.rmtree(tmp_path / "step-1")
    elif gone == "pruned":
        reshard.prune(tmp_path, keep_last=1)
    else:
        reshard.save({"other": torch.zeros(3)}, tmp_path / "step-1")
    assert_same(loaded(tmp_path / "step-2"), lora(2))
    report = reshard.verify(tmp_path / "step-2")
    assert report.ok, report
    shutil.move(tmp_path / "step-2", tmp_path / "elsewhere")
    assert_same(loaded(tmp_path / "elsewhere"), lora(2))


def test_a_save_over_itself_keeps_what_it_needs(tmp_path):
    for step in (1, 2, 3):
        report = reshard.save(lora(step), tmp_path / "last", base="auto")
        assert_same(loaded(tmp_path / "last"), lora(step))
        assert len([folder for folder in (tmp_path / "last").iterdir() if folder.is_dir()]) == 1
    assert report.bytes_written == 64 * 4


def test_a_file_of_which_little_is_left_is_let_go(tmp_path):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(10)}
    reshard.save(state, tmp_path / "step-1", base="auto")
    for i in range(8):
        state[f"w{i}"] += 1
    report = reshard.save(state, tmp_path / "step-2", base="auto")
    assert report.bytes_reused == 0
    assert not list((tmp_path / "step-2").rglob("from-*"))


def test_an_earlier_checkpoint_without_digests_is_compared_by_fingerprint(tmp_path):
    reshard.save(lora(1), tmp_path / "step-1")
    assert reshard.save(lora(2), tmp_path / "step-2", base="auto").bytes_written == 64 * 4
    assert reshard.save(lora(3), tmp_path / "step-3", base="auto").bytes_written == 64 * 4
    assert_same(loaded(tmp_path / "step-3"), lora(3))


def test_damaged_digests_only_cost_time(tmp_path):
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    (file,) = (tmp_path / "step-1").rglob("*.blocks")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    report = reshard.save(lora(2), tmp_path / "step-2", base="auto")
    assert report.bytes_reused == 0
    assert_same(loaded(tmp_path / "step-2"), lora(2))


def test_a_file_system_without_links(tmp_path, monkeypatch, caplog):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    monkeypatch.setattr(os, "link", link)
    assert reshard.save(lora(2), tmp_path / "step-2", base="auto").bytes_reused == 0
    assert "has no links: all is written again" in caplog.text
    assert_same(loaded(tmp_path / "step-2"), lora(2))


def test_a_base_that_goes_while_it_is_compared(tmp_path, monkeypatch, caplog):
    def reuse(*args: object, **kwargs: object) -> object:
        shutil.rmtree(tmp_path / "step-1")
        return real(*args, **kwargs)

    real = save_job.reuse
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    monkeypatch.setattr(save_job, "reuse", reuse)
    report = reshard.save(lora(2), tmp_path / "step-2", base="auto")
    assert report.bytes_reused == 0
    assert "all is written again: the checkpoint that the save is based on cannot be read" in caplog.text
    assert_same(loaded(tmp_path / "step-2"), lora(2))


def test_no_storage_but_its_own_has_a_neighbour():
    storage = MemoryStorage("alone")
    reshard.save(lora(1), storage, base="auto")
    assert reshard.save(lora(2), storage, base="auto").bytes_written == 64 * 4
    assert_same(loaded(storage), lora(2))


def test_bases_that_are_none(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    reshard.save(lora(1), tmp_path / "elsewhere" / "step-1")
    with pytest.raises(CheckpointError, match=r"at .*step-2 itself or one in a folder beside it"):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "elsewhere" / "step-1")
    with pytest.raises(CheckpointNotFoundError):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "step-1")
    with pytest.raises(FormatError, match="is torch_save: a save can only be based on one of this library's own"):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match='base must be "auto" or the path of a checkpoint, got True'):
        reshard.save(lora(2), tmp_path / "step-2", base=True)  # type: ignore[arg-type]
    assert not (tmp_path / "step-2").exists()


@pytest.mark.parametrize("how", ["failing", "crashing"])
@pytest.mark.parametrize("where", ["beside", "over itself"])
def test_every_call_fails_in_turn_and_nothing_that_counts_is_lost(how, where, tmp_path, monkeypatch):
    monkeypatch.setattr(generations, "_CLAIMING_S", 0.0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)

    def state(step: int) -> dict:
        return {"frozen": torch.arange(100.0), "trained": torch.full((5,), float(step)), "step": step}

    def found(path: Path) -> int:
        target = {"frozen": torch.zeros(100), "trained": torch.zeros(5), "step": 0}
        reshard.load(target, path)
        assert_same(target, state(target["step"]))
        return target["step"]

    calls, old = SystemCalls(), tmp_path / "step-1"
    new = old if where == "over itself" else tmp_path / "step-2"

    def begin() -> None:
        shutil.rmtree(tmp_path)
        reshard.save(state(1), old, base="auto")

    begin()
    with calls.counted():
        reshard.save(state(2), new, base="auto")
    ends = []
    for at in range(1, calls.made + 1):
        begin()
        with getattr(calls, how)(at), suppress(Crash, ReshardError):
            reshard.save(state(2), new, base="auto")
        try:
            ends.append(found(new))
        except CheckpointNotFoundError:
            ends.append(0)
        assert ends[-1] in ((1, 2) if where == "over itself" else (0, 2)), f"call {at}"
        assert where == "over itself" or found(old) == 1
        report = reshard.save(state(3), new, base="auto")
        assert report.bytes_reused == 400, f"call {at}"
        if new != old:
            shutil.rmtree(old)
        assert found(new) == 3
        assert len(list(new.iterdir())) == 2, f"call {at} left something: {sorted(new.rglob('*'))}"
    assert len(set(ends)) == 2


def _cut(path: str, step: int, how: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}[how]
    values = lora(step)
    state = {
        "base": {
            name: distribute_tensor(value.contiguous(), mesh, [placement]) for name, value in values["base"].items()
        },
        "lora": distribute_tensor(values["lora"], mesh, [Shard(0)]),
        "step": step,
    }
    report = reshard.save(state, f"{path}/step-{step}", base="auto")
    return report.bytes_written, report.bytes_reused


@pytest.mark.gloo
def test_ranks_that_cut_it_otherwise_reuse_it_too(tmp_path):
    whole = sum(value.nbytes for value in lora(0)["base"].values())
    for step, how, world in ((1, "rows", 3), (2, "rows", 3), (3, "columns", 2), (4, "copies", 2), (5, "rows", 1)):
        ends = gloo.run(_cut, world, str(tmp_path), step, how)
        written, reused = (sum(row) for row in zip(*ends, strict=True))
        assert (written, reused) == ((whole + 256, 0) if step == 1 else (256, whole)), (step, how)
        assert_same(loaded(tmp_path / f"step-{step}"), lora(step))
