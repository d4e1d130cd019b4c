"""The transport for torchft, without torchft."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch

from reshard.errors import DeadlineError
from tests import gloo

T = TypeVar("T")
SECONDS = timedelta(seconds=20)
NAME = "reshard.integrations.torchft"


class CheckpointTransport(Generic[T]):
    """In place of torchft's."""


def transport_class() -> Any:
    """The transport's class, on our class in place of torchft's."""
    names = ("torchft", "torchft.checkpointing", "torchft.checkpointing.transport")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[names[-1]])["CheckpointTransport"] = CheckpointTransport
        patch.delitem(sys.modules, NAME, raising=False)
        made = importlib.import_module(NAME).ReshardTransport
        patch.delitem(sys.modules, NAME)
    return made


def test_a_checkpoint_of_an_earlier_run_is_not_read(tmp_path: Path) -> None:
    new = transport_class()
    earlier, restarted, other = new(tmp_path), new(tmp_path), new(tmp_path / "other")
    earlier.send_checkpoint([1], 0, {"w": torch.zeros(3)}, SECONDS)

    with pytest.raises(DeadlineError, match="step-0 did not appear"):
        other.recv_checkpoint(0, restarted.metadata(), 0, timedelta(seconds=0.1))

    restarted.send_checkpoint([1], 0, {"w": torch.ones(3)}, SECONDS)
    assert other.recv_checkpoint(0, restarted.metadata(), 0, SECONDS)["w"].tolist() == [1, 1, 1]


def test_earlier_checkpoints_are_deleted(tmp_path: Path) -> None:
    new = transport_class()
    for _ in range(3):
        transport = new(tmp_path)
        for step in range(3):
            transport.send_checkpoint([1], step, {"w": torch.full((3,), float(step))}, SECONDS)
            assert transport.recv_checkpoint(0, transport.metadata(), step, SECONDS)["w"].tolist() == [step] * 3
        assert len(list(tmp_path.glob("**/manifest.json"))) == 1


def one_name(folder: str) -> str:
    transport = transport_class()(folder)
    transport.send_checkpoint([1], 3, {"w": torch.ones(3)}, SECONDS)
    assert transport.recv_checkpoint(0, transport.metadata(), 3, SECONDS)["w"].tolist() == [1, 1, 1]
    return str(transport.metadata())


@pytest.mark.gloo
def test_the_ranks_of_a_group_have_one_name(tmp_path: Path) -> None:
    first, second = gloo.run(one_name, 2, str(tmp_path))
    assert first == second != str(tmp_path)
