"""Which streams are waited for before other threads touch tensors. Needs no device: torch's answers are replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reshard
from reshard.state import tensors


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices whose streams were waited for, as if this machine had CUDA."""
    seen: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            seen.append(self.device)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    return seen


def test_each_device_once_and_none_of_the_cpu(waited: list[torch.device]) -> None:
    names = ["cuda:1", "cpu", "meta", "cuda:0", "cuda:1"]
    tensors.settle_streams(map(torch.device, names))
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_nothing_is_asked_of_a_machine_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    tensors.settle_streams([torch.device("cuda:0"), torch.device("cpu")])


def test_saves_and_loads_wait_before_they_start_threads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[set[torch.device]] = []
    monkeypatch.setattr("reshard.api.save.saving.settle_streams", lambda found: told.append(set(found)))
    monkeypatch.setattr("reshard.api.load.loading.settle_streams", lambda found: told.append(set(found)))
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")
    reshard.async_save({"w": torch.ones(3)}, tmp_path / "d").result()
    reshard.load({"w": torch.zeros(3)}, tmp_path / "c")
    assert told == [{torch.device("cpu")}] * 3
