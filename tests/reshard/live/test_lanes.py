"""What is asked of devices before other threads touch their tensors. Needs no device: torch's answers are replaced."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reshard.live import copy_streams as downloads, copy_streams as lanes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What modules of devices were asked, as if this machine had CUDA, and a device of which torch has no streams."""
    seen: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = f"stream of {device}"

        def record_event(self) -> str:
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            seen.append(f"{self.name} waits for {event}")

    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda device: Stream(device))
    mps = SimpleNamespace(synchronize=lambda: seen.append("synchronize"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"cuda": cuda, "mps": mps}[device.type])
    return seen


def test_a_lane_for_each_device_with_streams(asked: list[str]) -> None:
    names = ["cuda:1", "cpu", "meta", "cuda:0", "cuda:1"]
    made = lanes.CopyStreams(map(torch.device, names))
    assert sorted(asked) == [f"stream of cuda:{i} waits for event of stream of cuda:{i}" for i in (0, 1)]
    assert made[torch.device("cuda:1")] is not None
    assert made[torch.device("cpu")] is None


def test_a_stream_serves_one_lane_after_another(asked: list[str]) -> None:
    """Allocators keep memory for each stream on which some was made."""
    device = torch.device("cuda:7")
    first, beside = lanes.CopyStream(device), lanes.CopyStream(device)
    assert first._stream is not beside._stream
    streams = [first._stream, beside._stream]
    del first
    assert lanes.CopyStream(device)._stream is streams[0]


def test_devices_that_only_other_libraries_know() -> None:
    device = torch.device("xla:0")
    assert not lanes.has_copy_streams(device)
    lanes.wait_for(device)


def test_devices_without_streams_are_waited_for(asked: list[str]) -> None:
    assert lanes.CopyStreams([torch.device("mps:0"), torch.device("cpu")])[torch.device("mps:0")] is None
    assert asked == ["synchronize"]


def test_memory_that_cannot_be_pinned_is_told_of(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(*sizes: int, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no more locked pages")
        return real(*sizes, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING, "reshard"):
        assert lanes.pinned(100).shape == (100,)
    assert "no more locked pages" in caplog.text


def test_memory_is_kept_in_blocks_as_much_as_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(downloads, "BLOCK_BYTES", 200)
    memory = downloads.HostMemory(lambda n: made.append(n) or torch.empty(n, dtype=torch.uint8))
    rooms, blocks = memory.take([64, 30, 70, 250, 0, 90])
    assert [room.numel() for room in rooms] == [64, 30, 70, 250, 0, 90]
    assert made == [128, 128, 256, 128], "whole cache lines"
    spans = sorted((room.data_ptr(), room.data_ptr() + room.numel()) for room in rooms if room.numel())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    memory.give(blocks)
    again, same = memory.take([250, 90])
    assert made == [128, 128, 256, 128], "what is there is used"
    memory.give(same)
    memory.take([257])
    assert made == [128, 128, 256, 128, 320], "in the place of some that is too small"
    assert len(memory._free) == 3
    assert [room.numel() for room in again] == [250, 90]
