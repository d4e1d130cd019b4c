"""Saves in the background of several ranks: beside the training loop's collectives, and when a rank dies or freezes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.errors import ReshardError, StorageError
from reshard.storage import open_storage
from tests import gloo
from tests.faulty import Faulty
from tests.states import own_tensor_of

pytestmark = pytest.mark.gloo

WORLD_SIZE = 3


def busy(folder: str) -> list[float]:
    """Saves in the background while the loop uses the same group, makes new ones, and saves and loads in front."""
    rank = dist.get_rank()

    def slow(verb: str, name: str) -> None:
        if verb == "write":
            time.sleep(0.02 * rank)  # no two ranks are ever at the same point

    pending, sums = [], []
    for step in range(3):
        storage = Faulty(open_storage(f"{folder}/{step}"), slow)
        pending.append(reshard.async_save(own_tensor_of(step), storage, max_in_flight=2))
        for _ in range(10):
            values = torch.full((100,), float(rank))
            dist.all_reduce(values)
            sums.append(float(values[0]))
        dist.barrier(group=dist.new_group(list(range(WORLD_SIZE))))
        reshard.save({"x": torch.ones(3)}, f"{folder}/front")
        reshard.load({"x": torch.zeros(3)}, f"{folder}/front")
    for save in pending:
        save.result(60.0)
    return sums


def test_the_training_loop_uses_the_group_meanwhile(tmp_path):
    for sums in gloo.run(busy, WORLD_SIZE, str(tmp_path)):
        assert sums == [3.0] * 30
    for step in range(3):
        checkpoint = reshard.open(tmp_path / str(step))
        assert checkpoint.objects["step"] == step
        assert all((checkpoint[f"w{rank}"][...] == step).all() for rank in range(WORLD_SIZE))


def struck(folder: str, how: int, deadline_s: float) -> tuple[str, str, float]:
    """Rank 1 gets a signal when its background thread writes; how the others' saves ended, and how soon after that."""
    reshard.save(own_tensor_of(1), folder)
    dist.barrier()
    note = Path(f"{folder}-struck")

    def fault(verb: str, name: str) -> None:
        if dist.get_rank() == 1 and verb == "write":
            note.with_suffix(".part").write_text(str(os.getpid()))
            note.with_suffix(".part").rename(note)
            os.kill(os.getpid(), how)

    pending = reshard.async_save(own_tensor_of(2), Faulty(open_storage(folder), fault), timeout=deadline_s)
    begin = time.monotonic()
    while not note.exists():
        assert time.monotonic() - begin < 60.0
        time.sleep(0.01)
    begin = time.monotonic()
    ended = ("", "", 0.0)
    try:
        pending.result(60.0)
    except ReshardError as error:
        ended = type(error).__name__, str(error), time.monotonic() - begin
    if dist.get_rank() == 2 and how == signal.SIGSTOP:
        time.sleep(1.0)  # rank 0, too, has learnt it by itself
        os.kill(int(note.read_text()), signal.SIGKILL)
    return ended


@pytest.mark.parametrize(
    ("how", "deadline_s", "kind", "words"),
    [
        (signal.SIGKILL, 60.0, "RankFailedError", "rank 1 (process "),
        (signal.SIGSTOP, 4.0, "DeadlineError", "rank 1 did not reach "),
    ],
    ids=["killed", "frozen"],
)
def test_a_rank_struck_in_the_background(how, deadline_s, kind, words, tmp_path):
    folder = tmp_path / "c"
    ends = gloo.outcomes(struck, WORLD_SIZE, str(folder), int(how), deadline_s, store="parent")
    assert ends[1].exitcode == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert end.value is not None, end.trace
        found, text, seconds = end.value
        assert found == kind, text
        assert text.startswith(words)
        assert seconds < gloo.SOON_S + (deadline_s if how == signal.SIGSTOP else 0.0)
    checkpoint = reshard.open(folder)
    assert checkpoint.objects["step"] == 1
    assert all((checkpoint[f"w{rank}"][...] == 1).all() for rank in range(WORLD_SIZE))


def asked_by_one(folder: str) -> list[str]:
    """A save fails; only the first rank asks how it went; then all save again, twice."""
    said = []

    def full(verb: str, name: str) -> None:
        if verb == "write":
            raise StorageError("no space left")

    failing = reshard.async_save(own_tensor_of(1), Faulty(open_storage(f"{folder}/full"), full))
    if dist.get_rank() == 0:
        with pytest.raises(ReshardError):
            failing.result(30.0)
    for _ in range(2):
        try:
            reshard.async_save(own_tensor_of(2), f"{folder}/good", timeout=30.0).result(30.0)
        except ReshardError as error:
            said.append(str(error))
    return said


def test_a_failure_that_some_ranks_have_not_asked_for_is_told_to_all_by_the_next_save(tmp_path):
    for said in gloo.run(asked_by_one, WORLD_SIZE, str(tmp_path), timeout_s=60.0):
        (once,) = said
        assert "no space left" in once
    assert reshard.open(tmp_path / "good").objects["step"] == 2


def unusable(folder: str) -> str:
    """The error of a save below a file."""
    Path(folder, "file").touch()
    dist.barrier()
    with pytest.raises(ReshardError) as found:
        reshard.async_save(own_tensor_of(1), f"{folder}/file/in")
    return str(found.value)


def test_a_path_that_cannot_be_used_is_an_error_of_the_call(tmp_path):
    for error in gloo.run(unusable, WORLD_SIZE, str(tmp_path), timeout_s=60.0):
        assert "a part of the path is a file" in error


def without_threads(folder: str) -> tuple[str, str, float]:
    """How the save ended on a rank where another one may start no more threads, and how soon."""
    if dist.get_rank() == 1:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("reshard-save"):
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = refuse  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises((ReshardError, RuntimeError)) as caught:
        reshard.async_save(own_tensor_of(1), folder).result(60.0)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begin


def test_a_rank_that_cannot_start_its_thread_tells_the_others(tmp_path):
    for rank, (kind, text, seconds) in enumerate(gloo.run(without_threads, WORLD_SIZE, str(tmp_path / "c"))):
        assert kind == ("RuntimeError" if rank == 1 else "RankFailedError")
        assert "can't start new thread" in text
        assert seconds < gloo.SOON_S
    assert not list((tmp_path / "c").glob("*"))
