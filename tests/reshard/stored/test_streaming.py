"""A stream of pieces, read by several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from reshard.stored import streaming
from reshard.stored.source import BytesSource
from reshard.stored.streaming import Feed, Region
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

WAIT_S = 20.0


class Held:
    """A file that is given back when others are done with it."""

    def __init__(self, releasing: threading.Event, others: threading.Event) -> None:
        self.releasing, self.others, self.is_released = releasing, others, False

    def release(self) -> None:
        self.releasing.set()
        assert self.others.wait(WAIT_S)
        self.is_released = True


def region() -> Region:
    spec, box = TensorSpec("w", (4,), "float32"), Box.full((4,))
    place = Extent(BytesSource(bytes(16)), Window.row_major(0, (4,), 4))
    return Region(StoredTensor(spec, (StoredChunk(box, place),)), box)


def test_a_thread_may_add_a_file_while_another_gives_files_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread began to read before the first one, which ends before it, gave its file back."""
    reading, releasing, added = threading.Event(), threading.Event(), threading.Event()
    slow, fast = region(), region()
    files = {id(slow): Held(threading.Event(), releasing), id(fast): Held(releasing, added)}

    def read(self: Region, box: Box, out: Any) -> set[Any]:
        if self is slow:
            reading.set()
            assert releasing.wait(WAIT_S)
        else:
            assert reading.wait(WAIT_S)
        return {files[id(self)]}

    monkeypatch.setattr(Region, "read", read)
    monkeypatch.setattr(streaming, "_RELEASE_BYTES", fast.nbytes)
    with Feed(is_near=True) as feed, ThreadPoolExecutor(2) as threads:

        def load(region: Region) -> None:
            feed.load(region, region.box)
            if region is slow:
                added.set()

        for done in [threads.submit(load, slow), threads.submit(load, fast)]:
            done.result()
    assert all(file.is_released for file in files.values())
