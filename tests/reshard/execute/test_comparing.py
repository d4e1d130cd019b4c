"""Blocks are compared by the compiled loop and by xxhash alike: the same are wrong, and the same are done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptCheckpointError
from reshard.execute.work_list import Ending, Kind
from reshard.stored import checksums
from tests.kernels import COMPILED, NUMPY, summed_up_by

BLOCK_BYTES = 64 << 10


def test_the_numbers_of_the_compiled_loop_are_those_of_work_lists() -> None:
    """Checksums are in a lower package than the lists, and cannot import them."""
    assert checksums._COMPARE == Kind.COMPARE
    assert checksums._DONE == Ending.DONE


def _found(folder: Path, threads: int) -> tuple[str, object]:
    state = {"w": torch.zeros(300_000), "v": torch.zeros(7)}
    try:
        report = reshard.load(state, folder, threads=threads)
    except CorruptCheckpointError as error:
        assert not any(value.any() for value in state.values()), "targets stay as they were"
        return str(error), error.places
    return "", (report.bytes_read, report.ok, state["w"].sum().item())


@pytest.mark.parametrize("at", [(), (5 * BLOCK_BYTES,), (100, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 1), (-1,)])
@pytest.mark.parametrize("threads", [1, 3])
def test_both_name_the_same_blocks(at: tuple[int, ...], threads: int, tmp_path: Path) -> None:
    reshard.save({"w": torch.arange(300_000.0), "v": torch.ones(7)}, tmp_path / "c")
    (file,) = (tmp_path / "c").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    for position in at:
        data[position if position < 0 else max(position, header_bytes)] ^= 1
    file.write_bytes(data)

    ends = {}
    for which in (NUMPY, COMPILED):
        with summed_up_by(which):
            ends[which] = _found(tmp_path / "c", threads)
    assert ends[NUMPY] == ends[COMPILED]
    assert bool(ends[NUMPY][0]) == bool(at)
