"""Loads that compare what they read when it is in its targets already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.errors import CorruptCheckpointError, OptionError, RankFailedError, StorageError
from reshard.execute import in_place
from reshard.native.manifest import BLOCK_BYTES
from reshard.storage import MemoryStorage
from tests import gloo
from tests.kernels import COMPILED, NUMPY, summed_up_by


def tensors() -> dict[str, torch.Tensor]:
    """Large and small ones, whose first and last blocks they share."""
    sizes = {"a": 400_003, "b": 3, "c": 1 << 20, "d": 70_001, "e": 500_000, "empty": 0}
    return {name: torch.arange(n, dtype=torch.int32) + i for i, (name, n) in enumerate(sizes.items())}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def data_file(path: Path) -> Path:
    return max(path.rglob("*.safetensors"), key=lambda file: file.stat().st_size)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as data:
        os.pwrite(data.fileno(), bytes([os.pread(data.fileno(), 1, at)[0] ^ 4]), at)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_it_loads_and_checks_the_same(tmp_path, which, threads, monkeypatch):
    reshard.save(tensors(), tmp_path / "ckpt")
    before, during = zeros(), zeros()
    ran = []
    run = in_place.InPlace.run
    monkeypatch.setattr(in_place.InPlace, "run", lambda self, *of: ran.append(len(self.copies)) or run(self, *of))
    with summed_up_by(which):
        one = reshard.load(before, tmp_path / "ckpt", check="before", threads=threads)
        other = reshard.load(during, tmp_path / "ckpt", check="during", threads=threads)

    assert ran == [3]  # a, c and e
    assert all(torch.equal(tensor, during[name]) for name, tensor in tensors().items())
    assert (other.bytes_checked, other.bytes_read, other.bytes_read_to_check, other.bytes_unchecked) == (
        one.bytes_checked,
        one.bytes_read,
        one.bytes_read_to_check,
        0,
    )


@pytest.mark.parametrize("which", [NUMPY, COMPILED])
@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 18, 1 << 20])  # of older checkpoints: 1 MiB
def test_blocks_of_any_size_are_compared_whole(tmp_path, which, block_bytes, monkeypatch):
    monkeypatch.setattr("reshard.native.commit.BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("reshard.native.data_file.BLOCK_BYTES", block_bytes)
    reshard.save(tensors(), tmp_path / "ckpt")
    target = zeros()
    with summed_up_by(which):
        report = reshard.load(target, tmp_path / "ckpt", check="during")
        flip(data_file(tmp_path / "ckpt"), 3 << 20)
        with pytest.raises(CorruptCheckpointError, match="are undefined"):
            reshard.load(zeros(), tmp_path / "ckpt", check="during")

    assert report.bytes_unchecked == 0
    assert all(torch.equal(tensor, target[name]) for name, tensor in tensors().items())


@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_targets_that_are_no_run_of_bytes_and_storages_without_files(tmp_path, which):
    storage = MemoryStorage()
    known = {"w": torch.randn(1000, 700), "turned": torch.randn(600, 800), "part": torch.randn(400, 300)}
    reshard.save(known, storage)
    wide = torch.zeros(400, 600)
    target = {"w": torch.zeros(1000, 700), "turned": torch.zeros(800, 600).t(), "part": wide[:, 300:]}
    with summed_up_by(which):
        assert reshard.load(target, storage, check="during").bytes_unchecked == 0
    assert all(torch.equal(target[name], tensor) for name, tensor in known.items())


@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_damage_is_found_wherever_it_is_and_the_error_names_what_was_overwritten(tmp_path, which):
    reshard.save(tensors(), tmp_path / "ckpt")
    file = data_file(tmp_path / "ckpt")
    size = file.stat().st_size
    overwritten = 0
    for at in [*range(20, size, 700_000), size - 1]:
        flip(file, at)
        target = zeros()
        with summed_up_by(which), pytest.raises(CorruptCheckpointError) as found:
            reshard.load(target, tmp_path / "ckpt", check="during", threads=1)
        message, changed = str(found.value), [name for name, tensor in target.items() if tensor.any()]
        assert f"{file.name}: the block of bytes [{at // BLOCK_BYTES * BLOCK_BYTES}, " in message or "header" in message
        assert all(repr(name) in message for name in changed), (at, message)
        assert ("are undefined" in message) == bool(changed)
        overwritten += bool(changed)
        assert not changed or str(len(changed)) in message
        flip(file, at)
    assert overwritten >= 5

    for check in (True, "before"):
        flip(file, size // 2)
        target = zeros()
        with summed_up_by(which), pytest.raises(CorruptCheckpointError):
            reshard.load(target, tmp_path / "ckpt", check=check)
        assert not any(tensor.any() for tensor in target.values())
        flip(file, size // 2)


@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_a_file_that_is_cut_short_meanwhile(tmp_path, which, monkeypatch):
    reshard.save({"w": torch.ones(1 << 20)}, tmp_path / "ckpt")
    file, run = data_file(tmp_path / "ckpt"), in_place.InPlace.run

    def cut(self: in_place.InPlace, *of: Any) -> int:
        os.truncate(file, 3 << 20)
        return run(self, *of)

    monkeypatch.setattr(in_place.InPlace, "run", cut)
    with summed_up_by(which), pytest.raises((CorruptCheckpointError, StorageError), match=r"1 \('w'\) are undefined"):
        reshard.load({"w": torch.zeros(1 << 20)}, tmp_path / "ckpt", check="during")


def test_an_unknown_word_is_refused(tmp_path):
    with pytest.raises(OptionError, match="check must be one of 'before', 'during', True, False; got 'after'"):
        reshard.load({}, tmp_path, check="after")


def job(path: str) -> tuple[str, str]:
    """Each rank loads its own half."""
    rank = dist.get_rank()
    target = {"w": distribute_tensor(torch.zeros(1 << 20), init_device_mesh("cpu", (2,)), [Shard(0)])}
    try:
        reshard.load(target, path, check="during")
        wanted = torch.arange(1 << 20)[rank << 19 : (rank + 1) << 19].float()
        return "loaded", str(torch.equal(target["w"].to_local(), wanted))
    except (CorruptCheckpointError, RankFailedError) as error:
        return type(error).__name__, str(error)


@pytest.mark.gloo
def test_a_rank_without_damage_fails_with_the_one_that_has_some(tmp_path):
    reshard.save({"w": torch.arange(1 << 20).float()}, tmp_path / "ckpt")
    assert gloo.run(job, 2, str(tmp_path / "ckpt")) == [("loaded", "True")] * 2
    flip(data_file(tmp_path / "ckpt"), 3 << 20)
    ends = gloo.run(job, 2, str(tmp_path / "ckpt"))
    assert [name for name, _ in ends] == ["RankFailedError", "CorruptCheckpointError"]
    assert all("1 ('w') are undefined" in message for _, message in ends)


KNOWN = {
    "everywhere": torch.arange(100_003, dtype=torch.int32),
    "columns": torch.arange(300 * 500, dtype=torch.float32).reshape(300, 500),
    "rows": torch.arange(350_000, dtype=torch.float32).reshape(350, 1000),
    "small": torch.arange(5, dtype=torch.int64),
}


def shared_job(path: str, file: str, check: str, read_once: bool | None) -> list[int]:
    """Both ranks load what they share and what they do not, with a byte changed in one block after another; the blocks
    of which they did not complain."""
    mesh, cuts = init_device_mesh("cpu", (2,)), {"columns": Shard(1), "rows": Shard(0)}
    missed = []
    for at in range(100, os.path.getsize(file), BLOCK_BYTES):
        blank = {name: torch.zeros_like(value) for name, value in KNOWN.items()}
        target = {k: distribute_tensor(v, mesh, [cuts[k]]) if k in cuts else v for k, v in blank.items()}
        if dist.get_rank() == 0:
            flip(Path(file), at)
        dist.barrier()
        try:
            reshard.load(target, path, check=check, read_once=read_once)
            missed.append(at)
        except (CorruptCheckpointError, RankFailedError):
            assert check == "during" or not any(value.any() for value in blank.values())
        dist.barrier()
        if dist.get_rank() == 0:
            flip(Path(file), at)
    return missed


@pytest.mark.gloo
@pytest.mark.parametrize("check", ["before", "during"])
@pytest.mark.parametrize("read_once", [None, True, False])
def test_ranks_that_share_the_comparing_leave_no_block_out(tmp_path, check, read_once):
    reshard.save(KNOWN, tmp_path / "ckpt")
    file = data_file(tmp_path / "ckpt")
    assert file.stat().st_size > 30 * BLOCK_BYTES

    assert gloo.run(shared_job, 2, str(tmp_path / "ckpt"), str(file), check, read_once) == [[], []]
