"""Saves on the base of an earlier one: what they write, what they need of it afterwards, and what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from reshard.api import save_job
from reshard.api.save_job import base_at
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    OptionError,
    ReshardError,
    StorageError,
)
from reshard.native import commit as generations, data_file as blocks
from reshard.native.manifest import HF_INDEX
from reshard.storage import open_storage
from reshard.storage.memory import MemoryStorage
from tests import gloo
from tests.faulty import Crash, Faulty, SystemCalls
from tests.same import assert_same
from tests.states import frozen_and_trained_of


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
    assert "4.2 MiB reused" in repr(third)
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


def signed_blocks(**changes: object) -> bytes:
    """A file of blocks whose digest fits, though what it says is not what a save writes."""
    fields = {
        "block_bytes": blocks.DIGEST_BLOCK_BYTES,
        "sums": SUMS,
        "starts": [],
        "counts": [],
        "records": b"",
        **changes,
    }
    body = msgspec.msgpack.encode(fields)
    return msgspec.msgpack.encode({"version": 2, "body": body, "digest": xxhash.xxh3_128_digest(body)})


SUMS = "0" * 32
RECORDS = b"x" * 24
DAMAGED_BLOCKS = {
    "nothing": b"",
    "no map": b"\x01",
    "text that is no UTF-8": msgspec.msgpack.encode({"version": 2, "body": b"", "digest": b""}).replace(
        b"body", b"b\xffdy"
    ),
    "endless lists": b"\x91" * 100_000,
    "that of the first releases": msgspec.msgpack.encode(
        {"block_bytes": 1 << 20, "starts": [96], "counts": [1], "records": RECORDS}
        | {"digest": xxhash.xxh3_128_digest(RECORDS)}
    ),
    "a newer version": msgspec.msgpack.encode({"version": 3, "body": b"", "digest": xxhash.xxh3_128_digest(b"")}),
    "to another file": signed_blocks(),
    "other blocks": signed_blocks(block_bytes=1 << 16),
    "huge counts": signed_blocks(starts=[96], counts=[1 << 62], records=RECORDS),
    "negative counts": signed_blocks(starts=[96, 97], counts=[2, -1], records=RECORDS),
    "fewer starts than counts": signed_blocks(starts=[96], counts=[1, 0], records=RECORDS),
    "counts that are text": signed_blocks(starts=[96], counts=["1"], records=RECORDS),
    "records that are a list": signed_blocks(starts=[96], counts=[1], records=[1, 2]),
}


@pytest.mark.parametrize("how", DAMAGED_BLOCKS)
def test_digests_that_are_not_believed_only_cost_time(how, tmp_path, caplog):
    first = reshard.save(lora(1), tmp_path / "step-1", base="auto")
    (file,) = (tmp_path / "step-1").rglob("*.blocks")
    (tables,) = json.loads((tmp_path / "step-1" / "manifest.json").read_text())["files"].values()
    file.write_bytes(
        DAMAGED_BLOCKS[how].replace(SUMS.encode(), (SUMS if "another" in how else tables["sums"]).encode())
    )
    report = reshard.save(lora(2), tmp_path / "step-2", base="auto")
    assert (report.base, report.bytes_reused) == (first.save_id, 0)
    assert len(report.skipped) == 1
    assert f"{file.relative_to(tmp_path / 'step-1')} cannot be relied on" in report.skipped[0]
    assert "skipped: " in repr(report)
    assert report.skipped[0] in caplog.text
    assert_same(loaded(tmp_path / "step-2"), lora(2))
    assert reshard.save(lora(3), tmp_path / "step-3", base="auto").skipped == ()


def test_digests_of_another_save_of_the_same_form_are_not_believed(tmp_path):
    """Its digests are whole in themselves: only what they are of is another file."""
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    shutil.move(tmp_path / "step-1", tmp_path / "old")
    changed = lora(2)
    changed["base"]["w"] += 1
    reshard.save(changed, tmp_path / "step-2")
    (file,), (data,) = (tmp_path / "old").rglob("*.blocks"), (tmp_path / "step-2").rglob("*.safetensors")
    shutil.copy(file, f"{data}.blocks")
    shutil.rmtree(tmp_path / "old")
    report = reshard.save(lora(1), tmp_path / "step-3", base="auto", fingerprints=False)
    assert report.bytes_reused == 0
    assert "it belongs to another file" in report.skipped[0]
    assert_same(loaded(tmp_path / "step-3"), lora(1))


def _damaged(data: bytes, how: str, at: int) -> bytes:
    if how == "flipped":
        return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
    if how == "zeroed":
        return data[:at] + bytes(len(data) - at)
    return data[:at] if how == "truncated" else b""


@pytest.mark.parametrize("how", ["flipped", "zeroed", "truncated", "emptied", "removed"])
@pytest.mark.parametrize("layout", ["as it was", "known by fingerprint"])
def test_whatever_is_wrong_with_a_base_a_save_goes_on_and_is_right(how, layout, tmp_path):
    """All files but the data's own elements, which a save does not read."""

    state = partial(frozen_and_trained_of, frozen=99)

    def found(path: Path) -> dict:
        target = {"frozen": torch.zeros(99), "trained": torch.zeros(5), "step": 0}
        assert reshard.load(target, path).ok
        return target

    fingerprints = layout != "as it was"
    base = "auto" if layout == "as it was" else None
    reshard.save(state(1), tmp_path / "step-1", base=base)
    reshard.save(state(2), tmp_path / "step-2", base="auto")
    shutil.rmtree(tmp_path / "step-1")
    files = sorted(file for file in (tmp_path / "step-2").rglob("*") if file.is_file())
    assert {file.suffix for file in files} >= {".json", ".parts", ".sums", ".safetensors"}
    for file in files:
        data = file.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
        places = sorted({0, 1, 8, *range(0, header, max(header // 4, 1)), header - 1})
        for at in [at for at in places if at < len(data)] if how in ("flipped", "zeroed", "truncated") else [0]:
            if how == "truncated" and file.suffix == ".safetensors":
                at = len(data) - 1 - at
            # not over the old bytes: those that have a second name would be damaged in the other checkpoint, too
            file.unlink()
            if how != "removed":
                file.write_bytes(_damaged(data, how, at))
            report = reshard.save(state(3), tmp_path / "step-3", base="auto", fingerprints=fingerprints)
            assert_same(found(tmp_path / "step-3"), state(3))
            assert reshard.verify(tmp_path / "step-3").ok, (file, at)
            is_read = file.suffix not in (".blocks",) or not fingerprints
            if how != "removed" and is_read and _damaged(data, how, at) != data and file.name != HF_INDEX:
                assert report.skipped, (file, at)
            shutil.rmtree(tmp_path / "step-3")
            file.unlink(missing_ok=True)
            file.write_bytes(data)


def test_a_base_that_is_named_and_damaged_is_passed_over(tmp_path):
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    manifest = tmp_path / "step-1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    report = reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "step-1")
    assert report.base is None
    assert "manifest.json" in report.skipped[0]
    assert_same(loaded(tmp_path / "step-2"), lora(2))


def test_damaged_elements_of_the_base_are_found_in_the_new_checkpoint(tmp_path):
    """They are not read by the save: the checksums that come with them tell."""
    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    (file,) = (tmp_path / "step-1").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert reshard.save(lora(2), tmp_path / "step-2", base="auto").bytes_reused > 0
    assert not reshard.verify(tmp_path / "step-2").ok


def test_a_file_system_without_links(tmp_path, monkeypatch, caplog):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    reshard.save(lora(1), tmp_path / "step-1", base="auto")
    monkeypatch.setattr(os, "link", link)
    assert reshard.save(lora(2), tmp_path / "step-2", base="auto").bytes_reused == 0
    assert "written again: " in caplog.text
    assert "does not support links" in caplog.text
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
    assert "is written again: there is no data-" in caplog.text
    assert "there is no data-" in report.skipped[0]
    assert_same(loaded(tmp_path / "step-2"), lora(2))


def test_no_storage_but_its_own_has_a_neighbour():
    storage = MemoryStorage("alone")
    reshard.save(lora(1), storage, base="auto")
    assert reshard.save(lora(2), storage, base="auto").bytes_written == 64 * 4
    assert_same(loaded(storage), lora(2))


def test_bases_that_are_none(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    reshard.save(lora(1), tmp_path / "elsewhere" / "step-1")
    with pytest.raises(CheckpointError, match=r"at .*step-2 itself or one beside it"):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "elsewhere" / "step-1")
    with pytest.raises(CheckpointNotFoundError, match=r"^base='.*/step-1': no such file or folder: '.*step-1'"):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "step-1")
    with pytest.raises(FormatError, match="is torch_save: the base of a save must be in the native format"):
        reshard.save(lora(2), tmp_path / "step-2", base=tmp_path / "model.pt")
    with pytest.raises(OptionError, match='base must be "auto" or the path of a checkpoint, got True'):
        reshard.save(lora(2), tmp_path / "step-2", base=True)  # type: ignore[arg-type]
    assert not (tmp_path / "step-2").exists()


@pytest.mark.parametrize("how", ["failing", "crashing"])
@pytest.mark.parametrize("where", ["beside", "over itself"])
def test_every_call_fails_in_turn_and_nothing_that_counts_is_lost(how, where, tmp_path, monkeypatch):
    monkeypatch.setattr(generations, "CLAIMING_S", 0.0)
    monkeypatch.setattr(blocks, "DIGEST_BLOCK_BYTES", 64)

    state = partial(frozen_and_trained_of, frozen=100)

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


def test_a_rank_that_cannot_link_a_file_takes_nothing_from_one_that_could(tmp_path: Path) -> None:
    """Ranks that reuse parts of one file share its second name: where one fails, the others may rely on it already."""
    state = {"w": torch.arange(1000.0)}
    reshard.save(state, tmp_path / "step-1", base="auto")
    folder = "data-0192f3c1a8f1-5d2e5d2e5d2e"
    (tmp_path / "step-2" / folder).mkdir(parents=True)  # a link makes none
    one, other = (base_at(tmp_path / "step-2", "step-1") for _ in range(2))
    (file,) = one.facts.files
    name = one.link(file, folder)

    def fault(verb: str, name: str) -> None:
        if verb == "link" and name.endswith(".sums"):
            raise StorageError("input/output error")

    other = replace(other, storage=Faulty(other.storage, fault))
    assert other.link(file, folder) is None
    assert sorted(one.storage.list("step-2/")) == [f"step-2/{name}{end}" for end in ("", ".blocks", ".sums")]


def test_second_names_that_are_not_used_do_not_stay(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    reshard.save(state, tmp_path / "c", base="auto")

    def fault(verb: str, name: str) -> None:
        if verb == "link" and name.endswith(".sums"):
            raise StorageError("input/output error")

    report = reshard.save(state, Faulty(open_storage(tmp_path / "c"), fault), base="auto")
    assert report.skipped
    assert not [name for name in open_storage(tmp_path / "c").list() if "from-" in name]
    assert reshard.verify(tmp_path / "c").ok


def test_files_whose_blocks_have_another_size_are_reused_again_and_again(tmp_path, monkeypatch):
    """As older versions wrote them. Such a file keeps its blocks in a checkpoint whose own have today's size."""
    with monkeypatch.context() as older:
        older.setattr(generations, "BLOCK_BYTES", 1 << 20)
        older.setattr(blocks, "BLOCK_BYTES", 1 << 20)
        reshard.save(lora(1), tmp_path / "step-1")
    for step in (2, 3, 4):
        report = reshard.save(lora(step), tmp_path / f"step-{step}", base=str(tmp_path / f"step-{step - 1}"))
        assert not report.skipped
        assert report.bytes_written == 64 * 4
    assert reshard.verify(tmp_path / "step-4").ok
    assert_same(loaded(tmp_path / "step-4"), lora(4))
