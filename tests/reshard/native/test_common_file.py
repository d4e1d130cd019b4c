"""One data file of several ranks: other tools read it, and nothing in it is taken on trust."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError, StorageError
from reshard.native import data_file as common_file
from reshard.native.data_file import CommonFile, Entry, FileGroup, write_common_file, write_pieces
from reshard.native.manifest import BLOCK_BYTES
from reshard.storage.local import LocalStorage
from tests.same import same

MIB = BLOCK_BYTES


def entry(name: str, tensor: torch.Tensor) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(TensorSpec(name, tuple(tensor.shape), dtype), Box.of((0,) * tensor.ndim, tuple(tensor.shape)), tensor)


def numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    whole = torch.randint(-100, 100, (count,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return whole.to(dtype)


def together(storage: Any, held: list[dict[str, torch.Tensor]]) -> list[CommonFile | None]:
    """What each rank of the file_group returns."""
    meeting, said = threading.Barrier(len(held)), [b""] * len(held)

    def write(place: int) -> CommonFile | None:
        def tell(data: bytes) -> list[bytes]:
            said[place] = data
            meeting.wait(10)
            out = list(said)
            meeting.wait(10)
            return out

        file_group = FileGroup(tuple(range(10, 10 + len(held))), place, tell)
        entries = [entry(name, tensor) for name, tensor in held[place].items()]
        return write_common_file(storage, "data/x", entries, file_group)

    with ThreadPoolExecutor(len(held)) as pool:
        return list(pool.map(write, range(len(held))))


MIXED = [
    {"a": numbers(300_001, torch.float32, 1), "b": numbers(3, torch.uint8, 2), "c": numbers(MIB, torch.bfloat16, 3)},
    {},
    {"d": numbers(7, torch.bfloat16, 4), "e": torch.tensor(2.5, device="cpu"), "none": torch.zeros(0, 3, device="cpu")},
    {"f": numbers(500_000, torch.float64, 5), "g": numbers(11, torch.uint8, 6), "t": numbers(6, torch.int32, 7)[::2]},
]


@pytest.mark.parametrize(
    "held",
    [
        MIXED,
        MIXED[::-1],
        [{"tiny": numbers(1, torch.uint8, 1)}],
        [{}, {"none": torch.zeros(0, device="cpu")}],
        [{str(i): numbers(MIB // 4 * 3, torch.float32, i)} for i in range(3)],
    ],
    ids=["mixed", "turned", "one byte", "no bytes", "large"],
)
def test_other_tools_read_it_and_every_block_has_its_sum(held: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    first, *others = together(LocalStorage(tmp_path), held)

    assert first is not None
    assert others == [None] * len(others)
    assert first.ranks == tuple(10 + place for place, some in enumerate(held) if some)
    with safe_open(tmp_path / "data/x", "pt") as file:
        wanted = {name: tensor for some in held for name, tensor in some.items()}
        assert set(file.keys()) == set(wanted)
        assert all(same(file.get_tensor(name), tensor) for name, tensor in wanted.items())
    data = (tmp_path / "data/x").read_bytes()
    sums = [xxhash.xxh3_64_intdigest(data[at : at + MIB]) for at in range(0, len(data), MIB)]
    assert (tmp_path / "data/x.sums").read_bytes() == np.array(sums, dtype="<u8").tobytes()
    record = first.record
    assert (record.nbytes, record.header_bytes % 64) == (len(data), 0)
    assert record.sums == xxhash.xxh3_128_hexdigest(np.array(sums, dtype="<u8").tobytes())


def test_nobody_has_anything(tmp_path: Path) -> None:
    assert together(LocalStorage(tmp_path), [{}, {}]) == [None, None]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["data/x", "data/x.sums"])
def test_what_is_not_what_a_rank_wrote_is_found(what: str, tmp_path: Path) -> None:
    class Damaging(LocalStorage):
        def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
            data = bytearray(super().read(name, start, length))
            data[-1 if name != what else 8] ^= name == what
            return bytes(data)

    with pytest.raises(StorageError, match=rf"of {what} are not what rank 1[03] has just written"):
        together(Damaging(tmp_path), MIXED)


def test_a_header_that_no_tool_would_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(FormatError, match="choose a smaller ranks_per_file"):
        together(LocalStorage(tmp_path), MIXED)


@pytest.mark.parametrize("sizes", [[BLOCK_BYTES * 20 + 5], [1, BLOCK_BYTES, 700_001, 3], [BLOCK_BYTES - 40] * 9])
def test_blocks_are_hashed_alike_however_the_bytes_come(tmp_path, sizes):
    storage, data = LocalStorage(tmp_path), np.random.default_rng(7).bytes(sum(sizes))
    stops = list(itertools.accumulate(sizes))
    pieces = [memoryview(data)[stop - size : stop] for size, stop in zip(sizes, stops)]
    seen: list[bytes] = []

    record = write_pieces(storage, "a", b"header", pieces, len(data), seen=lambda piece: seen.append(bytes(piece)))

    whole = b"header" + data
    assert storage.read("a") == b"".join(seen) == whole
    blocks = [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]
    sums = np.array(list(map(xxhash.xxh3_64_intdigest, blocks)), "<u8").tobytes()
    assert storage.read("a.sums") == sums
    assert record.sums == xxhash.xxh3_128_hexdigest(sums)
