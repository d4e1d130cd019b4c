"""Chunks are located together: in few round trips where each is a request, with the first error in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.contents import Place, StoredChunk
from reshard.formats.stored.locating import locate_all
from reshard.formats.stored.source import FileSource
from tests.reshard.formats.writers import CountingStorage, DcpWriter, grid


@pytest.mark.parametrize("mapped", [True, False])
def test_all_are_located_and_empty_ones_left_alone(mapped: bool, tmp_path: Path) -> None:
    DcpWriter({"w": [*grid(torch.ones(40, 3), 20), ((40, 0), torch.ones(0, 3))]}).write(tmp_path)
    checkpoint = open_checkpoint(tmp_path if mapped else CountingStorage(tmp_path))
    chunks = checkpoint["w"].stored.chunks

    locate_all(chunks)
    locate_all(chunks)

    assert [chunk.is_located for chunk in chunks] == [True] * 20 + [False]


def test_requests_overlap_and_the_first_error_counts(tmp_path: Path) -> None:
    """All requests are under way at once: each waits until the last one has begun."""
    storage = CountingStorage(tmp_path)
    (tmp_path / "x").write_bytes(b"1234")
    together = threading.Barrier(5, timeout=20)

    def locate(i: int) -> Place:
        if i:
            together.wait()
        if i in (2, 4):
            raise DamagedCheckpointError(f"chunk {i}")
        return Place(FileSource(storage, "x"), Window.row_major(0, (1,), 4))

    chunks = [StoredChunk(Box((i,), (1,)), lambda i=i: locate(i)) for i in range(6)]  # type: ignore[misc]

    with pytest.raises(DamagedCheckpointError, match="chunk 2"):
        locate_all(chunks)
    assert [chunk.is_located for chunk in chunks] == [True, True, False, True, False, True]
