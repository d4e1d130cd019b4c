"""The table of many data files: what is read of it, and what is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import reshard
from planners.geometry.topologies import Topology
from reshard.errors import CorruptCheckpointError
from reshard.native import commit as publish, manifest as file_table
from reshard.native.manifest import FileRecord, FileTable, TableRecord, encode_table
from reshard.storage.memory import MemoryStorage
from tests.storages import Remote

FOLDER = "data-0192f3c1a800-5d2e6f7a8b9c"


def record(rank: int) -> FileRecord:
    return FileRecord(f"{FOLDER}/{rank:05d}.safetensors", (1 << 40) + rank, 64 * rank, f"{rank:032x}")


@pytest.mark.parametrize(
    "ranks",
    [
        [*range(1000)],
        [*range(0, 131072, 8)],
        [5],
        [0, 1, 2, 7, 9, 11, 100, 4000],
    ],
    ids=["all", "every eighth", "one", "odd ones"],
)
def test_rows_are_those_that_were_given(ranks: list[int], tmp_path: Path) -> None:
    storage = Remote(tmp_path)
    table, data = encode_table(f"{FOLDER}/files", {rank: record(rank) for rank in ranks})
    storage.publish(table.name, data)
    table = msgspec.json.decode(msgspec.json.encode(table), type=TableRecord)
    assert len(table.ranks) <= 5

    files = FileTable(storage, table)
    last = ranks[-1]
    assert files.of_rank(last) == files.of_rank(last + 3) == files[record(last).name] == record(last)
    assert storage.nbytes_read <= 256 * 32
    assert (files.of_rank(ranks[0] - 1) is None) == (len(ranks) == 1 or ranks[0] == 0)
    assert list(files.values()) == [record(rank) for rank in ranks]
    assert len(files) == len(ranks)
    assert storage.nbytes_read == table.nbytes == len(data)
    assert "data-x/00005.safetensors" not in files
    assert f"{FOLDER}/5.safetensors" not in files


def test_a_changed_page_is_found_by_who_needs_it() -> None:
    storage = MemoryStorage()
    table, data = encode_table(f"{FOLDER}/files", {rank: record(rank) for rank in range(600)})
    storage.publish(table.name, data[:10_000] + b"\xff" + data[10_001:])
    files = FileTable(storage, table)
    assert files.of_rank(255) == record(255)
    with pytest.raises(CorruptCheckpointError, match=r"bytes \[8192, 16384\) of data-.*/files was changed"):
        files.of_rank(256)


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": [(3, 1, 2), (4, 1, 1)]},
        {"ranks": [(0, 0, 3)]},
        {"ranks": [(0, 1, 1 << 30)]},
        {"pages": "00"},
    ],
)
def test_tables_of_nonsense(fields: dict[str, Any]) -> None:
    table, _ = encode_table(f"{FOLDER}/files", {rank: record(rank) for rank in range(3)})
    said = {**msgspec.to_builtins(table), **fields}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(said, type=TableRecord)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of ten files, which are many."""
    monkeypatch.setattr(publish, "FEW_FILES", 4)
    monkeypatch.setattr(file_table, "PAGE_ROWS", 3)
    monkeypatch.setattr(file_table, "_PAGE_BYTES", 3 * 32)
    state = {"w": torch.arange(60.0, device="cpu").reshape(20, 3), "v": torch.ones(4, device="cpu"), "step": 3}
    reshard.save(state, tmp_path / "one")
    onto = Topology.parse("dp=10", {"w": "S(0)", "*": "R"}).layout(reshard.open(tmp_path / "one").layout.specs)
    reshard.convert(tmp_path / "one", tmp_path / "ten", format="native", onto=onto)
    return tmp_path


def test_a_checkpoint_with_a_table(many: Path) -> None:
    (table,) = (many / "ten").glob("data-*/files")
    assert table.stat().st_size == 10 * 32
    assert reshard.compare(many / "one", many / "ten").ok
    assert reshard.verify(many / "ten").ok
    target = {"w": torch.zeros(20, 3, device="cpu"), "v": torch.zeros(4, device="cpu"), "step": 0}
    assert reshard.load(target, many / "ten").ok
    assert torch.equal(target["w"], torch.arange(60.0, device="cpu").reshape(20, 3))  # type: ignore[arg-type]
    report = reshard.save(target, many / "next", base=many / "ten")
    assert report.bytes_reused == report.total_bytes
    assert reshard.verify(many / "next").ok


@pytest.mark.parametrize("how", ["cut", "changed", "removed"])
def test_a_damaged_table(how: str, many: Path) -> None:
    (table,) = (many / "ten").glob("data-*/files")
    data = table.read_bytes()
    if how == "removed":
        table.unlink()
    else:
        table.write_bytes(data[:100] if how == "cut" else data[:40] + b"\x01" + data[41:])
    with pytest.raises(CorruptCheckpointError, match="/files"):
        reshard.load({"w": torch.zeros(20, 3, device="cpu")}, many / "ten", strict=False)
    assert not reshard.verify(many / "ten").ok
