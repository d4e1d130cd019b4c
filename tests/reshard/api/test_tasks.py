"""Work in tasks: the same bytes by whatever executor, whoever dies meanwhile, or one clear error."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import task_shares, tasks
from reshard.api.tasks import Processes, run_tasks
from reshard.cli.app import run
from reshard.errors import CheckpointError, CorruptCheckpointError, OptionError, StorageError
from reshard.ranks import liveness
from tests.deadly import Deadly
from tests.noting import Noting

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "source"
    reshard.save({f"w{i}": torch.randn(1 << 18) for i in range(60)}, folder)
    return folder


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, bytes]:
    target = source.parent / "wanted"
    reshard.convert(source, target, format="safetensors", max_shard_bytes=MIB)
    return files_in(target)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def spawned(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: spawned(2),
}


@pytest.mark.parametrize("kind", EXECUTORS)
def test_the_same_bytes_by_any_executor(kind: str, source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    with EXECUTORS[kind]() as executor:
        report = reshard.convert(source, tmp_path / "c", format="safetensors", max_shard_bytes=MIB, executor=executor)
    assert files_in(tmp_path / "c") == wanted
    assert report.resumed == ()


class Interrupting(ThreadPoolExecutor):
    """Presses Ctrl-C when it is given its n-th task."""

    left = 8

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().submit(fn, *args, **kwargs)


def test_relative_paths_are_the_drivers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for going on with what was begun by absolute ones."""
    monkeypatch.setattr(tasks, "IN_FLIGHT", 2)
    with Interrupting(1) as executor, pytest.raises(KeyboardInterrupt):
        reshard.convert(source, tmp_path / "c", max_shard_bytes=MIB, executor=executor)
    assert not (tmp_path / "c" / "manifest.json").exists()

    monkeypatch.chdir(source.parent)
    report = reshard.convert("source", os.path.relpath(tmp_path / "c"), max_shard_bytes=MIB)
    assert report.resumed
    assert reshard.verify(tmp_path / "c", source).ok


def test_a_worker_that_dies(source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    """By a signal that nobody can answer, some while after the first file is there. What the two processes had under
    way is read again, and nothing else."""
    target, noting = tmp_path / "c", Noting(tmp_path / "log")
    options: dict[str, Any] = {"format": "safetensors", "max_shard_bytes": MIB, "mapping": noting}
    with Processes(2) as executor:
        thread = threading.Thread(target=lambda: reshard.convert(source, target, executor=executor, **options))
        thread.start()
        while not target.exists() or not list(target.glob("convert-*/*.json")):
            assert thread.is_alive()
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        for child in multiprocessing.active_children():
            if child.pid is not None and thread.is_alive():
                os.kill(child.pid, signal.SIGKILL)
                break
        thread.join()
    assert files_in(target) == wanted
    assert len(noting.reads()) == 60
    assert noting.reads().total() <= 60 + 2


def test_a_task_that_ends_its_worker_is_tried_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    with Processes(1) as executor:
        with pytest.raises(CheckpointError, match=r"a task was lost 4 times.*BrokenProcessPool.*of 2 tasks are done"):
            run_tasks(Deadly(), ["die", "live"], executor, lambda task, pid: done.append(task))
        assert sum("submitted again" in record.message for record in caplog.records) >= tasks.TRIES - 1
        run_tasks(Deadly(), ["live"] * 3, executor, lambda task, pid: done.append(task))
    assert done[-3:] == ["live"] * 3


class DyingAfter(ProcessPoolExecutor):
    """A user's own pool, one of whose processes dies while the n-th task is given out."""

    left = 10

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.left -= 1
        if not self.left:
            child = multiprocessing.active_children()[0]
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        return super().submit(fn, *args, **kwargs)


def test_a_broken_executor_is_one_error_and_the_call_goes_on(
    source: Path, wanted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "IN_FLIGHT", 2)
    options: dict[str, Any] = {"format": "safetensors", "max_shard_bytes": MIB}
    context = multiprocessing.get_context("spawn")
    with DyingAfter(2, context) as executor, pytest.raises(CheckpointError) as caught:
        reshard.convert(source, tmp_path / "c", executor=executor, **options)
    assert "the executor is broken" in str(caught.value)
    assert "of 60 tasks are done; the same call with a new executor continues" in str(caught.value)

    with spawned(2) as executor:
        report = reshard.convert(source, tmp_path / "c", executor=executor, **options)
    assert report.resumed
    assert files_in(tmp_path / "c") == wanted


class Lambdas(dict[str, str]):
    """What nobody can pickle."""

    def __init__(self, **names: str) -> None:
        super().__init__(names)
        self.why = lambda: names


def test_bad_executors(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one clear error, and nothing is written."""
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    with ThreadPoolExecutor(1) as threads, spawned(1) as processes:
        bad: list[tuple[str, dict[str, Any]]] = [
            ("accepts no tasks: RuntimeError: cannot schedule new futures after shutdown", {"executor": ended}),
            ("sent to workers: .*lambda", {"executor": threads, "mapping": Lambdas(a="w0")}),
            ("must be a concurrent.futures.Executor, got int", {"executor": 3}),
            ("has its own workers", {"executor": threads, "workers": 2}),
        ]
        for message, options in bad:
            with pytest.raises((CheckpointError, OptionError), match=message):
                reshard.convert(source, tmp_path / "c", **options)
        with pytest.raises(CheckpointError, match="not a Checkpoint"):
            reshard.convert(reshard.open(source), tmp_path / "c", executor=threads)

        reshard.convert(source, "memory://unseen", max_shard_bytes=MIB)
        with pytest.raises(CheckpointError, match=r"memory://unseen.*\(at worker process \d+ on"):
            reshard.convert("memory://unseen", tmp_path / "c", executor=processes)
        with pytest.raises(StorageError, match=r"must see the same folder.*\(at worker process \d+ on"):
            reshard.convert(source, "memory://elsewhere", executor=processes)
        assert not reshard.storage.open_storage("memory://elsewhere").list()

        monkeypatch.setattr(reshard, "__version__", "0.0.7")
        with pytest.raises(CheckpointError, match=f"has reshard 0.0.7, the driver {tasks.__version__}"):
            reshard.convert(source, tmp_path / "c", executor=threads)
    assert not files_in(tmp_path / "c")


def test_what_a_task_raises_is_raised_with_its_kind_and_worker(source: Path, tmp_path: Path) -> None:
    reshard.convert(source, tmp_path / "damaged", max_shard_bytes=MIB)
    file = sorted((tmp_path / "damaged").rglob("*.safetensors"))[3]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with spawned(2) as executor, pytest.raises(CorruptCheckpointError, match=r"was changed .*at worker process"):
        reshard.convert(tmp_path / "damaged", tmp_path / "c", max_shard_bytes=MIB, executor=executor)
    with pytest.raises(CorruptCheckpointError, match="was changed"):
        reshard.convert(tmp_path / "damaged", tmp_path / "c", max_shard_bytes=MIB, workers=2)
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    monkeypatch.setattr(liveness, "WATCH_S", 0.5)


def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is on another machine."""
    monkeypatch.setattr(liveness, "machine", lambda: "another one")


@pytest.mark.usefixtures("quick")
def test_a_second_driver_on_another_machine_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    class Meanwhile(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if not refused:
                with monkeypatch.context() as patch:
                    unseen(patch)
                    with pytest.raises(StorageError) as caught:
                        reshard.convert(source, tmp_path / "c", max_shard_bytes=MIB)
                refused.append(str(caught.value))
            return super().submit(fn, *args, **kwargs)

    with Meanwhile(2) as executor:
        reshard.convert(source, tmp_path / "c", max_shard_bytes=MIB, executor=executor)
    assert f"process {os.getpid()} on " in refused[0]
    assert "is already converting to" in refused[0]
    assert reshard.verify(tmp_path / "c", source).ok


class Sleeping:
    """Work that says which process does it, and sleeps at all tasks but the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> Callable[[int], None]:
        def work(task: int) -> None:
            (self.folder / f"{task}-{os.getpid()}").touch()
            time.sleep(60 if task else 0)

        return work


def test_who_stops_waits_for_all_workers_also_for_one_that_does_not_run(tmp_path: Path) -> None:
    """The first worker that ends fails the tasks of all. What the others have begun to write may still come."""
    found: list[int] = []

    def resume() -> None:
        with suppress(ProcessLookupError):  # on a busy machine, it may have been killed by then
            os.kill(found[0], signal.SIGCONT)

    def on_done(task: int, _: None) -> None:
        while len(names := [path.name for path in tmp_path.iterdir()]) < 3:
            time.sleep(0.01)
        found.extend(int(name.partition("-")[2]) for name in names if not name.startswith("0"))
        os.kill(found[0], signal.SIGSTOP)
        threading.Timer(1.0, resume).start()
        raise KeyboardInterrupt

    with Processes(2) as executor:
        with pytest.raises(KeyboardInterrupt):
            run_tasks(Sleeping(tmp_path), range(3), executor, on_done)
        for worker in found:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)


KILLED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import pathlib, sys, reshard
from tests.noting import Noting
if __name__ == "__main__":
    noting = Noting(pathlib.Path(sys.argv[3]))
    reshard.convert(sys.argv[1], sys.argv[2], max_shard_bytes=1 << 20, workers=2, mapping=noting)
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("how", "elsewhere"), [(signal.SIGKILL, True), (signal.SIGINT, False)])
def test_what_an_ended_driver_began_goes_on(
    how: signal.Signals, elsewhere: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or interrupted, its workers end, and nothing opens; here or on another machine, the same call goes on, and
    reads again what its two workers had under way."""
    target, noting = tmp_path / "c", Noting(tmp_path / "log")
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(source), str(target), str(tmp_path / "log")],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while child.poll() is None and len(list(target.glob("convert-*/data-*.json"))) < 3:
        time.sleep(0.001)
    os.killpg(child.pid, how) if how == signal.SIGINT else child.send_signal(how)
    assert child.wait() != 0
    assert not (target / "manifest.json").exists()
    if how == signal.SIGINT:
        left = {path.name.rpartition("~")[2] for path in target.rglob("*.safetensors*")}
        whole = {name.removesuffix(".json") for name in left if name.endswith(".json")}
        assert left == {name + end for name in whole for end in ("", ".sums", ".json")}
    if elsewhere:
        unseen(monkeypatch)

    report = reshard.convert(source, target, max_shard_bytes=MIB, mapping=noting)

    assert len(report.resumed) >= 3
    assert len(noting.reads()) == 60
    assert noting.reads().total() <= 60 + 2
    assert reshard.verify(target, source).ok
    assert not list(target.glob("convert-*"))


def test_workers_prune_what_one_process_prunes(source: Path, tmp_path: Path) -> None:
    for name in ("one", "many"):
        for step in range(4):
            reshard.save({"w": torch.ones(1000)}, tmp_path / name / f"step-{step}")
        (tmp_path / name / "step-0" / "notes.txt").write_text("mine")
    gone = reshard.prune(tmp_path / "one", keep_last=2)

    with spawned(1) as executor:
        assert [Path(path).name for path in reshard.prune(tmp_path / "many", keep_last=2, executor=executor)] == [
            Path(path).name for path in gone
        ]
    names = [{name.partition("/")[0] for name in files_in(tmp_path / folder)} for folder in ("one", "many")]
    assert names[0] == names[1] == {"step-0", "step-2", "step-3"}
    assert len(files_in(tmp_path / "many")) == len(files_in(tmp_path / "one"))


def test_the_command_works_on_an_engine(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ends_with(code: int, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run([*words[:1], str(source), *words[1:]])
        assert (ended.value.code or 0) == code
        return "".join(capsys.readouterr())

    ends_with(0, "convert", str(tmp_path / "c"), "--on", "processes:1")
    assert reshard.verify(tmp_path / "c", source, workers=2).ok
    assert "cannot read --on slurm:4" in ends_with(2, "verify", "--on", "slurm:4")
    assert "cannot read --on processes:0" in ends_with(2, "verify", "--on", "processes:0")
    assert "stored names" in ends_with(2, "diff", str(source), "--on", "processes:2", "--normalized")


class Answering:
    """Work whose tasks are their own results."""

    def begin(self) -> Callable[[int], int]:
        return lambda task: task


class NotInMain(Future[Any]):
    """A future that the main thread must not use: an interrupt within its methods leaves its lock taken."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("result", "cancel", "add_done_callback", "exception") and (
            threading.current_thread() is threading.main_thread()
        ):
            raise AssertionError(f"{name} was called in the main thread")
        return super().__getattribute__(name)


class Engine(Executor):
    """Does tasks at once, but for the last ones, of which nothing is heard."""

    def __init__(self, silent_from: int) -> None:
        self._given, self._silent_from = 0, silent_from
        self.all_given = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = NotInMain()
        self._given += 1
        if self._given < self._silent_from:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_running_or_notify_cancel()
            self.all_given.set()
        return future


@pytest.mark.parametrize("count", [None, 0])
def test_an_executor_that_does_not_know_its_workers(count: int | None, source: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        executor.num_workers = count  # type: ignore[attr-defined]
        assert reshard.fingerprint(source, executor=executor) == reshard.fingerprint(source)


def test_an_interrupt_cannot_leave_a_future_locked() -> None:
    found: list[int] = []
    run_tasks(Answering(), range(50), Engine(100), lambda task, result: found.append(result))
    assert found == [*range(50)]


def test_an_interrupt_ends_a_call_whose_engine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "STOP_S", 0.2)
    engine, stopped = Engine(20), threading.Event()

    def interrupt() -> None:
        assert engine.all_given.wait(60)
        for _ in range(3):  # Python drops what is raised while garbage is collected: people press the keys again
            os.kill(os.getpid(), signal.SIGINT)
            if stopped.wait(5):
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_tasks(Answering(), range(50), engine, lambda task, result: None, on_stop=stopped.set)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.is_set()


def test_no_process_starts_for_a_single_task(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only import torch again."""
    monkeypatch.setattr(Processes, "_pool", lambda _: pytest.fail("a process was started"))
    one = tmp_path / "one"

    reshard.convert(source, one, format="safetensors", select=["w1", "w2"], workers=2, progress=True)

    assert reshard.verify(one, workers=2).ok
    assert reshard.compare(one, one, workers=2).ok


def test_workers_compare_a_checksum_that_covers_more_than_a_task_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of torch.save has one, which no task compared if several of them read its tensor."""
    monkeypatch.setattr(task_shares, "SHARE_BYTES", 4 << 20)
    torch.save({"w": torch.zeros(20 << 20, dtype=torch.uint8)}, tmp_path / "w.pt")
    with open(tmp_path / "w.pt", "r+b") as file:
        file.seek(10 << 20)
        file.write(b"x")

    with Processes(2) as executor:
        report = reshard.compare(tmp_path / "w.pt", tmp_path / "w.pt", executor=executor)
        assert [*report.damaged] == ["w"]
        assert not reshard.verify(tmp_path / "w.pt", executor=executor).ok
        with pytest.raises(CorruptCheckpointError):
            reshard.fingerprint(tmp_path / "w.pt", executor=executor)
