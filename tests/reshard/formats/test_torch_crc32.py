"""CRC-32 out of that of parts: the algebra, and what goes along from checkpoint to checkpoint."""

from __future__ import annotations

import importlib.util
import io
import sys
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import reshard
from planners import Mesh, Shard, StateLayout, TensorLayout, TensorSpec
from planners.geometry.box import Box
from reshard.errors import CorruptCheckpointError
from reshard.formats.torch_save import writer as torch_zip_writer
from reshard.formats.torch_save.archive import locate_item, read_head
from reshard.formats.torch_save.writer import ArchiveWriter, written_crc
from reshard.stored import record_checksums, streaming
from reshard.stored.record_checksums import RecordChecksums, combined, crc32
from reshard.stored.source import BytesSource
from reshard.stored.streaming import Region
from reshard.stored.tensor import StoredChunk, StoredTensor
from tests.torch_releases import save_alone

TENSOR = torch.arange(48, dtype=torch.float32).reshape(6, 8)
CRC = zlib.crc32(TENSOR.numpy().tobytes())


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_of_two_runs_in_a_row(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_of_runs_beyond_32_bits() -> None:
    """Joining is associative, so a run of 8 GiB of zeros is told from one that is a byte shorter."""
    tail = zlib.crc32(b"tail")
    zeros = [zlib.crc32(bytes(1 << 20))]
    for doubled in range(20, 33):
        zeros.append(combined(zeros[-1], zeros[-1], 1 << doubled))

    assert zeros[1] == zlib.crc32(bytes(2 << 20))
    from_left = combined(combined(zeros[-1], zeros[-1], 1 << 33), tail, 4)
    assert from_left == combined(zeros[-1], combined(zeros[-1], tail, 4), (1 << 33) + 4)
    assert from_left != combined(zeros[-1], combined(zeros[-1], tail, 4), (1 << 33) + 3)


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_whichever_function_was_found_is_zlib_s(data: bytes, before: int) -> None:
    """Of pieces that follow others, and of buffers of all kinds."""
    assert crc32(data) == crc32(memoryview(data)) == crc32(bytearray(data)) == zlib.crc32(data)
    assert crc32(data, before) == zlib.crc32(data, before)


def test_zlib_stands_in_where_the_extra_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.spec_from_file_location("crc32_without_isal", record_checksums.__file__)
    assert spec is not None
    assert spec.loader is not None
    chapter = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, chapter)
    spec.loader.exec_module(chapter)

    assert chapter.crc32 is zlib.crc32


@pytest.mark.parametrize("sizes", [[0], [1], [(9 << 20) + 5, 3, 1 << 20, 0, 7 << 20]])
def test_pieces_are_summed_one_after_another(sizes: list[int]) -> None:
    """`zipfile` compares."""
    out, data = io.BytesIO(), bytes(range(251)) * 50_000
    pieces = [data[7 * i : 7 * i + size] for i, size in enumerate(sizes)]

    archive = ArchiveWriter(out.write)
    archive.record("r", sum(sizes), pieces)
    archive.close()

    assert zipfile.ZipFile(out).read("archive/r") == b"".join(pieces)


def test_sums_of_columns_are_put_together_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the threads that read take, each of a piece; `zipfile` compares."""
    monkeypatch.setattr(streaming, "NEAR_PIECE_BYTES", 64)
    reshard.convert(dcp(tmp_path, columns=2), tmp_path / "one.pt", format="torch_save")
    assert summed_records(tmp_path / "one.pt")["data/0"] == CRC


def summed_records(path: Path) -> dict[str, int]:
    """The CRC of each record, which the archive's directory says, after all were compared."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {entry.filename.partition("/")[2]: entry.CRC for entry in archive.infolist()}


def refuse_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing of a tensor is summed: its values can only have their CRC from where they were stored."""

    def refuse(data: Any, crc: int = 0) -> int:
        assert TENSOR.numpy().tobytes().find(bytes(data)) < 0, "it was summed anew"
        return zlib.crc32(data, crc)

    monkeypatch.setattr(torch_zip_writer, "crc32", refuse)


def dcp(path: Path, **cut: int) -> Path:
    """A folder of DCP with TENSOR, cut along the dims that are named."""
    mesh = Mesh(dict(cut))
    placements = [Shard({"rows": 0, "columns": 1}[axis]) for axis in cut]
    layout = StateLayout({"w": TensorLayout(TensorSpec("w", (6, 8), "float32"), mesh, placements)})
    torch.save({"w": TENSOR}, path / "source.pt")
    reshard.convert(path / "source.pt", path / "dcp", format="dcp", onto=layout)
    return path / "dcp"


def crc_of(path: Path) -> int | None:
    return written_crc(Region.whole(reshard.open(path)["w"].stored))


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 8])
def test_rows_take_their_sums_along(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last ranks have fewer rows, or none."""
    folder = dcp(tmp_path, rows=rows)
    refuse_sums(monkeypatch)

    reshard.convert(folder, tmp_path / "one.pt", format="torch_save")
    reshard.convert(tmp_path / "one.pt", tmp_path / "again.pt", format="torch_save")

    assert crc_of(folder) == CRC
    for name in ("one.pt", "again.pt"):
        assert summed_records(tmp_path / name)["data/0"] == CRC
        assert torch.equal(torch.load(tmp_path / name)["w"], TENSOR)


def test_columns_and_parts_are_summed_anew(tmp_path: Path) -> None:
    """Chunks whose bytes do not follow one another, tensors that are a part of what was saved, and turned ones."""
    folder = dcp(tmp_path, columns=2)
    assert crc_of(folder) is None
    reshard.convert(folder, tmp_path / "one.pt", format="torch_save")
    assert summed_records(tmp_path / "one.pt")["data/0"] == CRC

    whole = reshard.open(tmp_path / "one.pt")["w"].stored
    assert written_crc(Region(whole, Box.full((6, 8)))) == CRC
    assert written_crc(Region(whole, Box.of((0, 0), (3, 8)))) is None

    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    other = {"turned": TENSOR.T, "part": TENSOR[1:3], "repeated": TENSOR[:1].expand(6, 8), "conjugate": conjugate}
    torch.save(other, tmp_path / "other.pt")
    opened = reshard.open(tmp_path / "other.pt")
    assert {name: written_crc(Region.whole(opened[name].stored)) for name in other} == dict.fromkeys(other)
    reshard.convert(tmp_path / "other.pt", tmp_path / "plain.pt", format="torch_save")
    summed_records(tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt")
    assert all(torch.equal(loaded[name], value) for name, value in other.items())


def test_torch_s_own_files_and_those_that_torch_wrote_without_sums(tmp_path: Path) -> None:
    torch.save({"w": TENSOR}, tmp_path / "with.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": TENSOR}, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    assert crc_of(tmp_path / "with.pt") == CRC
    assert crc_of(tmp_path / "without.pt") is None
    reshard.convert(tmp_path / "without.pt", tmp_path / "mended.pt", format="torch_save")
    assert summed_records(tmp_path / "mended.pt")["data/0"] == CRC


def test_what_changed_in_the_source_is_still_seen_in_what_was_made_of_it(tmp_path: Path) -> None:
    folder = dcp(tmp_path, rows=2)
    file = next(file for file in folder.glob("*.distcp") if file.stat().st_size)
    data = bytearray(file.read_bytes())
    at = data.find(TENSOR[:3].numpy().tobytes())
    at = at if at >= 0 else data.find(TENSOR[3:].numpy().tobytes())
    data[at + 5] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match="was changed since it was written"):
        reshard.convert(folder, tmp_path / "one.pt", format="torch_save")
    for source in (folder, opened := reshard.open(folder)):
        report = reshard.convert(source, tmp_path / "one.pt", format="torch_save", check=False, overwrite=True)
        assert report.unchecked == "unchecked: check=False"
    assert opened.contents.checking.enabled
    with zipfile.ZipFile(tmp_path / "one.pt") as archive:
        assert archive.testzip() == "one/data/0"


@pytest.mark.parametrize("writer", ["torch", "ours", "without sums"])
def test_a_pickle_of_an_item_that_changed_is_not_believed(writer: str, tmp_path: Path) -> None:
    """Its strides, swapped, give the transposed tensor: of the same shape, and all its elements have their CRC-32."""
    square = torch.arange(16.0).reshape(4, 4)
    if writer == "ours":
        reshard.save({"w": square}, tmp_path / "saved")
        reshard.convert(tmp_path / "saved", tmp_path / "c", format="dcp")
    else:
        torch.serialization.set_crc32_options(writer == "torch")
        try:
            save_alone({"w": square}, checkpoint_id=tmp_path / "c")
        finally:
            torch.serialization.set_crc32_options(True)
    (file,) = (tmp_path / "c").glob("*.distcp")
    data, strides = file.read_bytes(), b"K\x04K\x01\x86"
    assert data.count(strides) == 1
    assert reshard.open(tmp_path / "c")["w"][...].equal(square)
    file.write_bytes(data.replace(strides, b"K\x01K\x04\x86"))

    assert reshard.open(tmp_path / "c", check=False)["w"][...].equal(square.T)
    if writer == "without sums":
        assert reshard.open(tmp_path / "c")["w"][...].equal(square.T)
        return
    changed = rf"'w', .* the block of bytes \[64, {64 + 154}\) was changed since it was written"
    target = {"w": torch.zeros(4, 4)}
    for read in (
        lambda: reshard.load(target, tmp_path / "c"),
        lambda: reshard.open(tmp_path / "c")["w"][:2],
        lambda: reshard.convert(tmp_path / "c", tmp_path / "out"),
    ):
        with pytest.raises(CorruptCheckpointError, match=changed):
            read()
    assert not target["w"].any()


def test_a_descriptor_that_says_other_sizes_is_none(tmp_path: Path) -> None:
    """Or has another mark, or is cut off: then the record is summed."""
    out = io.BytesIO()
    torch.save(TENSOR, out)
    data = bytearray(out.getvalue())
    at = data.find(TENSOR.numpy().tobytes()) + TENSOR.nbytes

    def crc(data: Any) -> int | None:
        source = BytesSource(bytes(data))
        place, _ = locate_item(source, 0, source.nbytes, read_head(source, 0, source.nbytes))
        tensor = StoredTensor(TensorSpec("w", (6, 8), "float32"), [StoredChunk(Box.full((6, 8)), place)])
        return written_crc(Region.whole(tensor))

    assert crc(data) == CRC
    assert crc(data[: at + 8] + b"\x01" + data[at + 9 :]) is None
    assert crc(data[:at] + b"XX" + data[at + 2 :]) is None


def test_no_request_is_made_for_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a storage without a view each would be one: so there the bytes are summed that are read anyway."""
    stored = reshard.open(dcp(tmp_path, rows=2))["w"].stored
    assert written_crc(Region.whole(stored)) == CRC

    for chunk in stored.chunks:
        monkeypatch.setattr(type(chunk.source), "view", lambda _: None)

    assert written_crc(Region.whole(stored)) is None


def test_threads_count_what_is_owed_together() -> None:
    """Bytes that several threads have read of a block at the same time are neither lost nor counted twice."""

    class Slow(dict[Any, int]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            time.sleep(0.001)
            return found

    sums = RecordChecksums()
    sums.add(0, 8, lambda: 0)
    sums._owed = Slow()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sums.defer([(0, 8)], 3), range(8)))
    assert sums.settle() == 0
    assert sums.is_right((0, 8), [])
    assert sums.settle() == 24
