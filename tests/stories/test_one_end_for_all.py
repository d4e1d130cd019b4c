"""A save or load in which one of three ranks fails, dies or hangs: all ranks end alike, soon, and nothing is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.api.load import load
from reshard.api.save import save
from reshard.errors import StorageError
from reshard.storage import open_storage
from tests import gloo
from tests.faulty import Faulty
from tests.states import own_tensor_of

pytestmark = pytest.mark.gloo

WORLD_SIZE = 3


class _Unplain:
    pass


def _work(folder: str, who: int, when: str, how: str) -> tuple[str, str, float]:
    """Class and text of the error that this rank ended with, and after how many seconds."""
    rank = dist.get_rank()
    state = own_tensor_of(2)
    if when == "plan" and rank == who:
        state["odd"] = _Unplain()

    slept: list[str] = []

    def fault(verb: str, name: str) -> None:
        meant = {"write": ("write",), "read": ("mapped", "read_into")}.get(when, ())
        if rank == who and verb in meant and name.endswith(".safetensors"):
            if how == "raise":
                raise StorageError(f"cannot {when} {name}: the disk burns")
            if how == "exit":
                os._exit(3)
            if not slept:
                slept.append(verb)
                time.sleep(4.0)

    storage = Faulty(open_storage(folder), fault)
    start = time.monotonic()
    deadline_s = 1.5 if how == "sleep" else 60.0
    try:
        if when == "read":
            load(state, storage, strict=False, timeout=deadline_s)
        else:
            save(state, storage, timeout=deadline_s)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _first_save(folder: str) -> None:
    save(own_tensor_of(1), folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    gloo.run(_first_save, WORLD_SIZE, str(folder))
    return folder


def _still_old(folder: Path) -> None:
    target = {f"w{rank}": torch.zeros(1000) for rank in range(WORLD_SIZE)} | {"step": 0}
    load(target, folder)
    assert target["step"] == 1
    assert all(torch.equal(target[f"w{rank}"], torch.ones(1000)) for rank in range(WORLD_SIZE))


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("when", "words"),
    [("plan", "odd"), ("write", "the disk burns"), ("read", "the disk burns")],
)
def test_one_raises(saved: Path, who: int, when: str, words: str) -> None:
    ends = gloo.run(_work, WORLD_SIZE, str(saved), who, when, "raise")
    for rank, (kind, text, seconds) in enumerate(ends):
        assert (kind == "RankFailedError") == (rank != who), (rank, kind, text)
        assert words in text
        assert rank == who or text.startswith(f"rank {who} failed in ")
        assert seconds < gloo.SOON_S
    _still_old(saved)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", ["write", "read"])
def test_one_exits(saved: Path, who: int, when: str) -> None:
    ends = gloo.outcomes(_work, WORLD_SIZE, str(saved), who, when, "exit", store="parent")
    for end in ends:
        if end.rank == who:
            assert end.exitcode == 3
            continue
        assert end.value is not None, end.trace
        kind, text, seconds = end.value
        assert kind == "RankFailedError", text
        assert text.startswith(f"rank {who} (process ")
        assert seconds < gloo.SOON_S
    _still_old(saved)


@pytest.mark.parametrize("when", ["write", "read"])
def test_one_hangs(saved: Path, when: str) -> None:
    ends = gloo.outcomes(_work, WORLD_SIZE, str(saved), 1, when, "sleep", linger_s=10.0)
    for end in ends:
        assert end.value is not None, end.trace
        kind, text, seconds = end.value
        assert kind == "DeadlineError", text
        assert text.startswith("rank 1 did not reach ")
        assert end.rank == 1 or seconds < 1.5 + gloo.SOON_S
    _still_old(saved)


WRONG_ON_ONE_RANK = {
    "compare": lambda path, is_wrong, group: reshard.compare(
        path, own_tensor_of(2), rtol=-1.0 if is_wrong else 0.0, process_group=group, timeout=60
    ),
    "compare with workers": lambda path, is_wrong, group: reshard.compare(
        path, own_tensor_of(2), workers=0 if is_wrong else 1, process_group=group, timeout=60
    ),
    "fingerprint": lambda path, is_wrong, group: reshard.fingerprint(
        own_tensor_of(2), **({"key": "secret"} if is_wrong else {})
    ),
    "CheckpointManager": lambda path, is_wrong, group: reshard.CheckpointManager(
        "" if is_wrong else f"{path}-run", every=reshard.Every(steps=1), timeout=60
    ),
    "CheckpointManager without every": lambda path, is_wrong, group: reshard.CheckpointManager(
        f"{path}-run", every=None if is_wrong else reshard.Every(steps=1), timeout=60
    ),
}


def _call_wrongly(path: str) -> dict[str, tuple[str, float]]:
    told = {}
    for name, call in WRONG_ON_ONE_RANK.items():
        start = time.monotonic()
        try:
            call(path, dist.get_rank() == 1, dist.group.WORLD)
        except Exception as error:
            told[name] = type(error).__name__, time.monotonic() - start
    return told


def test_a_wrong_argument_on_one_rank_keeps_no_rank_waiting(saved: Path) -> None:
    for rank, told in enumerate(gloo.run(_call_wrongly, WORLD_SIZE, str(saved))):
        assert told.keys() == WRONG_ON_ONE_RANK.keys()
        for name, (kind, seconds) in told.items():
            assert (kind == "RankFailedError") == (rank != 1), (rank, name, kind)
            assert seconds < 30, (rank, name)
