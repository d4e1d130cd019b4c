"""Storages that have no view of their bytes: each byte is asked for once, in a few large requests, and checked."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import reshard
from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.plans.load import count_reads, plan_reads
from reshard.errors import CorruptCheckpointError, ReshardError
from reshard.execute.host_assignment import REMOTE_SEGMENT_BYTES as SIZE
from reshard.execute.reading import Staged
from reshard.native.manifest import BLOCK_BYTES
from reshard.native.reader import Once
from reshard.stored.source import FileSource
from reshard.stored.tensor import Extent, copy_place
from tests import gloo
from tests.states import large
from tests.storages import Remote


def zeros(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in of.items()}


@pytest.mark.parametrize("options", [{}, {"memory_budget_bytes": 8 << 20}, {"threads": 1}, {"check": False}])
def test_a_load_asks_for_each_byte_once_and_checks_it(tmp_path, options):
    known = large()
    reshard.save(known, tmp_path / "ckpt")
    remote = Remote(tmp_path / "ckpt")
    target = zeros(known)

    report = reshard.load(target, remote, **options)

    assert all(torch.equal(target[name], known[name]) for name in known)
    total = sum(t.nbytes for t in known.values())
    assert report.bytes_read == report.bytes_needed == total
    assert remote.nbytes_of(".safetensors") <= 1.02 * total + 64 * 1024
    assert len(remote.ranges) < 40
    assert report.bytes_checked >= (total if options.get("check", True) else 0)


def test_other_dtypes_slices_and_a_few_rows_arrive_too(tmp_path):
    known = large()
    reshard.save(known, tmp_path / "ckpt")
    remote = Remote(tmp_path / "ckpt")
    target = {"big": torch.zeros(3000, 1001, dtype=torch.float64).t().contiguous().t()}

    report = reshard.load(target, remote, strict=False, dtype_policy="cast")
    row = reshard.open(remote)["big"][77:79, 10:20]

    assert torch.equal(target["big"], known["big"].double())
    assert torch.equal(row, known["big"][77:79, 10:20])
    assert report.bytes_read == known["big"].nbytes


@pytest.mark.parametrize("at", [200, SIZE - 1, SIZE, 3 * SIZE + 5, -1])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, at):
    known = large()
    reshard.save(known, tmp_path / "ckpt")
    file = max((tmp_path / "ckpt").rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match=file.name):
        reshard.load(zeros(known), Remote(tmp_path / "ckpt"))


def test_a_file_that_was_cut_short_is_found_before_anything_is_written(tmp_path):
    known = large()
    reshard.save(known, tmp_path / "ckpt")
    file = max((tmp_path / "ckpt").rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-5])
    target = zeros(known)

    with pytest.raises(CorruptCheckpointError):
        reshard.load(target, Remote(tmp_path / "ckpt"))
    assert not any(t.any() for t in target.values())


class AllAtOnce(Remote):
    """Answers who asks for a header, or for checksums, only when all of those that there are were asked for."""

    def __init__(self, root: Path | str, count: int) -> None:
        super().__init__(root)
        self._all_asked = threading.Barrier(count)
        self.small: list[str] = []

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if name.endswith(".safetensors") and start == 0 and buffer.nbytes <= BLOCK_BYTES:
            self._wait(name)
        super().read_into(name, start, buffer)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if name.endswith(".sums"):
            self._wait(name)
        return super().read(name, start, length)

    def _wait(self, name: str) -> None:
        self.small.append(name)
        self._all_asked.wait(timeout=20)


def _save_rows(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    storage = Remote(path)
    storage.supports_shared_write = False  # a file each, as in an object store
    reshard.save({"w": distribute_tensor(torch.arange(90_000.0).reshape(300, 300), mesh, [Shard(0)])}, storage)


def test_headers_and_checksums_of_all_files_are_asked_for_at_once(tmp_path):
    gloo.run(_save_rows, 2, str(tmp_path / "ckpt"))
    for check, count in ((True, 4), (False, 2)):
        target = {"w": torch.zeros(300, 300)}
        storage = AllAtOnce(tmp_path / "ckpt", count)

        reshard.load(target, storage, check=check)

        assert torch.equal(target["w"], torch.arange(90_000.0).reshape(300, 300))
        assert len(storage.small) == len(set(storage.small)) == count


def test_what_many_threads_ask_for_is_made_once_and_errors_are_not_kept():
    asked: list[str] = []
    begun = threading.Event()

    def make(name: str) -> int:
        asked.append(name)
        begun.wait(0.05)
        if len(asked) == 1:
            raise KeyError(name)
        return len(asked)

    once = Once(make)
    with pytest.raises(KeyError):
        once("a")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, ["a"] * 8)) == [2] * 8
    assert asked == ["a", "a"]


def test_files_are_let_go_with_their_checkpoint_and_not_when_garbage_is_collected(tmp_path):
    reshard.save({"w": torch.arange(4.0)}, tmp_path / "ckpt")
    gc.disable()
    try:
        checkpoint = reshard.open(tmp_path / "ckpt")
        file = weakref.ref(checkpoint["w"].stored.chunks[0].source)
        assert torch.equal(checkpoint["w"][:], torch.arange(4.0))
        del checkpoint
        assert file() is None
    finally:
        gc.enable()


def shared_job(path: str) -> list[dict[str, Any]]:
    whole = {"big": torch.arange(6_000_000, dtype=torch.float32).reshape(6000, 1000)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = []
    for placement in (Shard(1), Replicate(), Shard(0)):
        how: list[Placement] = [placement]
        known = distribute_tensor(whole["big"], mesh, how)
        target = {"big": distribute_tensor(torch.zeros_like(whole["big"]), mesh, how)}
        remote = Remote(path)
        report = reshard.load(target, remote)
        right = torch.equal(target["big"].to_local(), known.to_local())
        out.append({"right": right, "asked": remote.nbytes_of(".safetensors"), "checked": report.bytes_checked})
    return out


@pytest.mark.gloo
def test_ranks_of_a_machine_ask_for_each_byte_once_between_them(tmp_path):
    whole = torch.arange(6_000_000, dtype=torch.float32).reshape(6000, 1000)
    reshard.save({"big": whole}, tmp_path / "ckpt")

    ranks = gloo.run(shared_job, 3, str(tmp_path / "ckpt"))

    for rows in zip(*ranks, strict=True):
        assert all(row["right"] for row in rows)
        assert sum(row["asked"] for row in rows) <= 1.02 * whole.nbytes + 3 * 64 * 1024
        assert sum(row["checked"] for row in rows) >= 0.8 * whole.nbytes


def again_job(damaged: str, good: str) -> tuple[str, bool]:
    """A load that fails on the last rank while the others have read their share, and then another one."""
    options: dict[str, Any] = {"read_once": True, "timeout": 10}
    target = torch.zeros(3000, 1001)
    try:
        reshard.load({"big": target}, Remote(damaged), **options)
        end = "loaded"
    except ReshardError as error:
        end = type(error).__name__
    reshard.load({"big": target}, Remote(good), **options)
    return end, torch.equal(target, large()["big"])


@pytest.mark.gloo
def test_after_a_load_that_failed_while_reading_the_same_group_loads_another(tmp_path):
    reshard.save({"big": -large()["big"]}, tmp_path / "damaged")
    reshard.save({"big": large()["big"]}, tmp_path / "good")
    (file,) = (tmp_path / "damaged").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)

    ends = gloo.run(again_job, 3, str(tmp_path / "damaged"), str(tmp_path / "good"))

    assert sorted(ends) == [("CorruptCheckpointError", True)] + [("RankFailedError", True)] * 2


def test_what_is_staged_stays_within_its_pieces(tmp_path, monkeypatch):
    known = {"big": torch.randn(600, 1000)}
    reshard.save(known, tmp_path / "ckpt")
    sizes = []
    fill = Staged.fill

    def counted(self: Staged, place: Extent, buffer_bytes: int) -> None:
        sizes.append(place.window.nbytes)
        fill(self, place, buffer_bytes)

    monkeypatch.setattr(Staged, "fill", counted)
    target = {"big": torch.zeros(600, 1000, dtype=torch.float64)}
    reshard.load(target, Remote(tmp_path / "ckpt"), dtype_policy="cast", memory_budget_bytes=128 << 10)

    assert torch.equal(target["big"], known["big"].double())
    assert max(sizes) <= 64 << 10


@pytest.mark.parametrize("gap", [0, 8, 100, 1 << 20])
def test_a_reader_asks_as_often_and_for_as_much_as_a_plan_counts(tmp_path, gap):
    spec = TensorSpec("w", (6, 10, 8), "uint8")
    (tmp_path / "data").write_bytes(bytes(range(240)) * 2)
    saved = StateLayout({"w": TensorLayout.from_boxes(spec, {0: [Box.full(spec.shape)]})})
    boxes = (
        Box((0, 0, 0), (6, 10, 3)),
        Box((0, 2, 0), (6, 4, 8)),
        Box((1, 3, 2), (4, 5, 4)),
        Box((2, 0, 0), (2, 10, 8)),
    )
    for box in boxes:
        storage = Remote(tmp_path, max_gap_bytes=gap)
        window = Window.row_major(0, spec.shape, 1).crop(box)
        copy_place(Extent(FileSource(storage, "data"), window), np.empty(box.sizes, np.uint8))

        counts = count_reads(plan_reads(saved, StateLayout({"w": TensorLayout.from_boxes(spec, {0: [box]})})), gap)
        assert (len(storage.ranges), storage.nbytes_read) == (counts.requests[0], counts.read_bytes[0])
