"""`AsyncCheckpointerType.PROCESS`: another process writes; what comes out, and how it ends, is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import CheckpointException

import reshard.dcp as ours
from reshard.dcp.engine import saving_process
from reshard.errors import StorageError
from reshard.ranks.liveness import is_gone, start_of
from tests import gloo
from tests.reshard.dcp import jobs
from tests.same import assert_same
from tests.states import views_and_gradients

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PROCESS = {"async_checkpointer_type": "process"}


def zeros(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    return [zeros(item) for item in value] if isinstance(value, list) else None


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().clone()
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("writer", [ours.FileSystemWriter, theirs.FileSystemWriter], ids=["ours", "torch"])
def test_everything_is_written_as_by_a_thread(tmp_path, writer):
    made = views_and_gradients()
    kinds = getattr(ours.state_dict_saver, "AsyncCheckpointerType", None)  # torch 2.6 has no such thing
    kind = "process" if kinds is None else kinds.PROCESS
    ours.async_save(made, storage_writer=writer(tmp_path), async_checkpointer_type=kind).result()

    target = zeros(made)
    ours.load(target, checkpoint_id=tmp_path)

    assert_same(target, plain(made))


def test_one_process_serves_all_saves_and_what_changes_later_is_not_saved(tmp_path):
    children = set()
    for value in (1.0, 2.0):
        made = {"w": torch.full((1000,), value)}
        future = ours.async_save(made, checkpoint_id=tmp_path / str(value), **PROCESS)
        made["w"].fill_(9)
        future.result()
        children.add(saving_process._process.child.pid)
        ours.load(target := {"w": torch.zeros(1000)}, checkpoint_id=tmp_path / str(value))
        assert target["w"].unique().tolist() == [value]
    assert len(children) == 1
    assert children != {os.getpid()}


class Failing(ours.FileSystemWriter):
    """Says in which process it fails."""

    def write_data(self, plan, planner):
        raise ValueError(f"no, says {os.getpid()}")


class Busy(ours.FileSystemWriter):
    """Takes a second of processor time, all of it in Python."""

    def write_data(self, plan, planner):
        begin = time.thread_time()
        while time.thread_time() - begin < 1:
            pass
        return super().write_data(plan, planner)


class Locked(ours.FileSystemWriter):
    """Cannot be sent."""

    def __reduce__(self):
        raise TypeError("not me")


def test_an_error_there_is_an_error_here(tmp_path):
    with pytest.raises(ValueError, match="no, says") as caught:
        ours.async_save({"w": torch.ones(2)}, storage_writer=Failing(tmp_path), **PROCESS).result()

    assert isinstance(caught.value, CheckpointException)
    assert str(os.getpid()) not in str(caught.value).split()
    assert not (tmp_path / ".metadata").exists()
    ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, **PROCESS).result()


def test_writing_takes_no_turn_in_the_training_loop_s_interpreter(tmp_path):
    ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "first", **PROCESS).result()  # the process is there
    used = {}
    for kind in ("process", "thread"):
        begin = time.process_time()
        ours.async_save(
            {"w": torch.ones(2)}, storage_writer=Busy(tmp_path / kind), async_checkpointer_type=kind
        ).result()
        used[kind] = time.process_time() - begin

    assert used["process"] < 0.5
    assert used["thread"] >= 1


def test_what_cannot_go_to_another_process_is_refused_with_the_fix(tmp_path):
    with pytest.raises(StorageError, match=r"Locked cannot be sent(.|\n)*THREAD"):
        ours.async_save({"w": torch.ones(2)}, storage_writer=Locked(tmp_path), **PROCESS).result()
    with pytest.raises(StorageError, match="THREAD"):
        ours.async_save({"w": torch.ones(2)}, checkpoint_id="memory://by-a-process", **PROCESS).result()


def test_a_process_that_was_killed_is_an_error_and_the_next_save_has_another(tmp_path):
    ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", **PROCESS).result()
    child = saving_process._process.child
    os.kill(child.pid, signal.SIGSTOP)
    future = ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b", **PROCESS)
    child.kill()

    with pytest.raises(StorageError, match="the saving process ended with code -9"):
        future.result()

    assert not (tmp_path / "b" / ".metadata").exists()
    ours.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b", **PROCESS).result()
    assert saving_process._process.child.pid != child.pid


PROGRAM = """
import os, sys, torch, reshard.dcp as dcp
from reshard.dcp.engine import saving_process
dcp.async_save({"w": torch.ones(2)}, checkpoint_id=sys.argv[1], async_checkpointer_type="process").result()
print(saving_process._process.child.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_it_outlives_nobody(tmp_path, end):
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path), end]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(program.stdout.readline())
    start = start_of(pid)
    _, err = program.communicate(timeout=60)

    assert program.returncode == (0 if end == "ended" else -9), err
    until = time.monotonic() + 20
    while not is_gone(pid, start) and time.monotonic() < until:
        time.sleep(0.05)
    assert is_gone(pid, start)


@pytest.mark.gloo
def test_ranks_have_a_process_each(tmp_path):
    assert gloo.run(jobs.by_processes, 2, str(tmp_path)) == [True, True]
