"""Saves in the background when the program ends: they are finished, or their failure is told."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import torch

import reshard
from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.api import background_saves
from reshard.api.staging import staged
from reshard.errors import CheckpointError, StorageError
from reshard.native.data_file import Entry
from reshard.storage import LocalStorage, Writer
from tests.faulty import Faulty


class Holding(LocalStorage):
    """Writes no data before it may `go_on`."""

    go_on: threading.Event

    def create(self, name: str) -> Writer:
        if name.endswith(".safetensors"):
            self.go_on.wait()
        return super().create(name)


PROGRAM = """
import sys, time
import torch, reshard
from reshard.errors import StorageError
from reshard.storage import open_storage
from tests.faulty import Faulty

def fault(verb, name):
    if verb == "write":
        time.sleep(0.05)
        if sys.argv[2] == "fail":
            raise StorageError("the disk burns")

reshard.async_save({"w": torch.ones(1000)}, Faulty(open_storage(sys.argv[1]), fault))
{end}
"""


def run(path: Path, end: str, how: str = "work") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("{end}", end)
    root = Path(reshard.__file__).parents[1]
    return subprocess.run([sys.executable, "-c", program, path, how], capture_output=True, text=True, cwd=root)


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise ValueError('training went wrong')", 1)]
)
def test_a_save_that_was_begun_is_finished(end: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path / "c", end)
    assert done.returncode == code, done.stderr
    assert reshard.verify(tmp_path / "c").ok
    assert ("training went wrong" in done.stderr) == (code == 1)


def test_a_failure_that_nobody_asks_for_is_told(tmp_path: Path) -> None:
    done = run(tmp_path / "c", "pass", "fail")
    assert "a save in the background failed, and its result() was not called" in done.stderr
    assert "the disk burns" in done.stderr
    assert not list((tmp_path / "c").glob("*"))


def test_so_is_one_of_dcp(tmp_path: Path) -> None:
    program = """
import sys
import torch, reshard.dcp as dcp
dcp.async_save({"w": torch.ones(1000)}, checkpoint_id=sys.argv[1])
"""
    root = Path(reshard.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "c"], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert reshard.open(tmp_path / "c")["w"][...].sum() == 1000


@pytest.mark.host_only("a process that has used a device cannot go on with it in a fork")
def test_a_process_that_is_forked_meanwhile_neither_waits_nor_saves(tmp_path: Path) -> None:
    go_on, held = threading.Event(), Holding(tmp_path / "c")
    held.go_on = go_on
    pending = reshard.async_save({"w": torch.ones(1000)}, held)

    def child() -> None:
        with pytest.raises(CheckpointError, match="and its fork, process"):
            pending.result()
        reshard.save({"w": torch.ones(1)}, tmp_path / "child")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    try:
        assert process.exitcode == 0, "a forked process, such as a DataLoader's worker, must be able to end"
    finally:
        process.kill()
        go_on.set()
    assert pending.result().tensors == 1
    assert reshard.verify(tmp_path / "c").ok
    assert reshard.verify(tmp_path / "child").ok


def test_a_save_in_the_background_keeps_no_tensor_alive(tmp_path: Path) -> None:
    held = Holding(tmp_path / "c")
    held.go_on = threading.Event()
    tensors = [torch.ones(1000), torch.ones(10, 10).t()]
    seen = [weakref.ref(tensor) for tensor in tensors]
    pending = reshard.async_save({"list": tensors}, held)
    try:
        tensors.clear()
        gc.collect()
        assert [tensor() for tensor in seen] == [None, None]
    finally:
        held.go_on.set()
    pending.result()
    assert reshard.verify(tmp_path / "c").ok


def test_what_is_saved_is_of_the_time_of_the_call_also_in_memory_that_was_used_before(tmp_path: Path) -> None:
    """Tensors that are large enough for kept memory, of all kinds of layouts and of several sizes of elements."""
    z = torch.randn(200, 300, dtype=torch.complex64)
    state = {
        "odd": torch.randint(0, 255, (70001,), dtype=torch.uint8),
        "wide": torch.randn(9001, dtype=torch.float64),
        "turned": torch.randn(150, 300).t(),
        "conjugated": z.conj(),
        "repeated": torch.randn(300, dtype=torch.bfloat16).expand(200, 300),
        "small": torch.randn(3),
    }
    for step in range(3):
        known = {name: tensor.clone() for name, tensor in state.items()}
        pending = reshard.async_save(state, tmp_path / str(step))
        for tensor in (z, *(state[name] for name in ("odd", "wide", "turned", "small"))):
            tensor.add_(1)
        pending.result()
        target = {name: torch.zeros_like(tensor).contiguous() for name, tensor in known.items()}
        reshard.load(target, tmp_path / str(step))
        assert all(torch.equal(target[name], tensor) for name, tensor in known.items())


def test_of_several_saves_that_failed_each_is_told_once(tmp_path: Path) -> None:
    state, begun, ended = {"w": torch.ones(2)}, threading.Event(), threading.Semaphore(0)
    for name in ("a", "b"):

        def fault(verb: str, file: str, name: str = name) -> None:
            if verb == "create":
                begun.wait()
                raise StorageError(f"disk {name} is full")

        pending = reshard.async_save(state, Faulty(LocalStorage(tmp_path / name), fault), max_in_flight=3)
        pending.add_done_callback(lambda _: ended.release())
    begun.set()
    for _ in "ab":
        assert ended.acquire(timeout=60)
    for name in ("a", "b"):
        with pytest.raises(StorageError, match=f"disk {name} is full"):
            reshard.async_save(state, tmp_path / "c")
    reshard.async_save(state, tmp_path / "c").result()


def test_a_save_whose_call_was_interrupted_as_it_began_is_waited_for() -> None:
    start, go_on = threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with mock.patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        background_saves.start_in_background(go_on.wait, "save", "place")
    threading.Timer(0.1, go_on.set).start()
    [ended] = background_saves.ended_for(1)
    assert ended.result(0)
    background_saves.forget_background_save(ended)


def test_a_save_that_ends_while_others_are_counted_is_waited_for_as_usual() -> None:
    class Ending(Future[None]):
        """It runs when it is asked first, and has ended when it is asked again."""

        asked = 0

        def done(self) -> bool:
            self.asked += 1
            return self.asked > 1

    ending = Ending()
    ending.set_result(None)
    with mock.patch.dict(background_saves.saves, {ending: ("place", frozenset())}, clear=True):
        assert background_saves.ended_for(1) == [ending]


def test_a_save_in_the_background_is_asked_as_a_future_is(tmp_path: Path) -> None:
    seen: list[object] = []
    pending = reshard.async_save({"w": torch.ones(2)}, tmp_path / "c")
    pending.add_done_callback(seen.append)
    assert pending.exception(timeout=60) is None
    assert pending.done()
    assert pending.result(60).tensors == 1
    pending.add_done_callback(seen.append)
    assert seen == [pending, pending]

    def full(verb: str, name: str) -> None:
        if verb == "create":
            raise StorageError("the disk is full")

    failed = reshard.async_save({"w": torch.ones(2)}, Faulty(LocalStorage(tmp_path / "d"), full))
    assert isinstance(failed.exception(), StorageError)
    reshard.async_save({"w": torch.ones(2)}, tmp_path / "e").result()  # does not raise the other's error again
    with pytest.raises(StorageError):
        failed.result()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wait", r"^'PendingSave' object has no attribute 'wait': result\(\) waits for the save$"),
        ("upload_completion", r"result\(\) waits for the save$"),
        ("staging_completion", "async_save returns once the values are copied, so there is nothing to wait for"),
        ("results", "did you mean 'result'"),
    ],
)
def test_names_of_other_libraries_for_waiting_are_told_the_name_here(name: str, text: str, tmp_path: Path) -> None:
    pending = reshard.async_save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(AttributeError, match=text):
        getattr(pending, name)
    pending.result()
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
        with pytest.raises(AttributeError, match=r"no attribute 'wait_until_finished': wait\(\) waits for saves"):
            manager.wait_until_finished()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"no attribute 'load': restore\(state\) fills a state$"):
            manager.load({})  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="did you mean 'best_step'"):
            manager.best_steps()  # type: ignore[attr-defined]


def test_copies_begin_where_cache_lines_do() -> None:
    """Copies to elsewhere take a quarter longer."""
    sizes = [(70_001,), (33_333, 3), (65_536,)]
    tensors = [torch.arange(float(torch.Size(size).numel())).view(size) for size in sizes]
    specs = [TensorSpec(f"w{i}", tuple(tensor.shape), "float32") for i, tensor in enumerate(tensors)]
    boxes = [Box((0,) * len(spec.shape), spec.shape) for spec in specs]
    entries = [Entry(*one) for one in zip(specs, boxes, tensors, strict=True)]
    for _ in range(2):  # in new memory, and in old
        found = staged(entries, "host", fingerprints=False)
        assert [entry.tensor.data_ptr() % 64 for entry in found.entries] == [0, 0, 0]
        assert all(torch.equal(entry.tensor, one) for entry, one in zip(found.entries, tensors, strict=True))
        found.release()
