"""Offline work in tasks, on any `concurrent.futures.Executor`.

    run_tasks(work, tasks, executor, on_done)

Each worker opens `work`, a picklable value, once, and is then handed one task after another.
A task is small, may be done twice, and gives the same on every worker.

What a task raises comes back as a value, with the worker's name, and ends the work. What a future
raises itself is the engine's: the task is given out again, at most `TRIES` times.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar
from uuid import uuid4

from reshard.arguments import check_options
from reshard.errors import CheckpointError, OptionError, ReshardError
from reshard.version import __version__

_log = logging.getLogger("reshard")

T = TypeVar("T")
R = TypeVar("R")
T_in = TypeVar("T_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)

TRIES = 4
"""How many times a task is submitted."""
IN_FLIGHT = 256
"""Tasks in flight for an executor that does not say how many workers it has."""
STOP_S = 10.0
"""How long to wait for running tasks when the work is abandoned."""
_PROBE_S = 0.2
_VERSION = "reshard:__version__"
"""A public name: workers with any release can look it up."""


class Work(Protocol[T_in, R_out]):
    """What all tasks share. Picklable."""

    def begin(self) -> Callable[[T_in], R_out]:
        """Open what the tasks need, in the process and thread that will run them.

        Raises a ReshardError if it differs from what the driver sees.
        """


@dataclass(frozen=True)
class _Order:
    version: str
    key: str
    """Unique for each run, because engines such as Dask reuse the results of equal calls."""
    work: bytes
    task: Any = None
    tries: int = 0


@dataclass(frozen=True)
class _Answer:
    worker: str
    result: Any = None
    error: Exception | None = None


class _Open(threading.local):
    """The work that this thread ran last. Other threads of the process may run other tasks of it."""

    key = ""
    hand: Callable[[Any], Any]


_open = _Open()


def _begin(order: _Order) -> Callable[[Any], Any]:
    if order.version != __version__:
        raise CheckpointError(
            f"this worker has reshard {__version__}, but the driver has {order.version}: install the same version "
            "everywhere"
        )
    try:
        work: Work[Any, Any] = pickle.loads(order.work)  # from the driver, which is trusted to run code here
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"the work cannot be unpickled: {error}: define it in a module that workers can import"
        ) from error
    return work.begin()


def _perform(order: _Order) -> _Answer:
    """Run one task, on a worker."""
    worker = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        if _open.key != order.key:
            _open.key, _open.hand = "", _begin(order)
            _open.key = order.key
        return _Answer(worker, _open.hand(order.task))
    except Exception as error:
        return _Answer(worker, error=_sendable(error))


def _look(order: _Order) -> _Answer:
    """Return whether the work can be begun. Runs on a worker."""
    worker, started = f"process {os.getpid()} on {socket.gethostname()}", time.monotonic()
    try:
        _begin(order)
    except Exception as error:
        return _Answer(worker, error=_sendable(error))
    time.sleep(max(0.0, _PROBE_S - (time.monotonic() - started)))  # so that the next one asks another worker
    return _Answer(worker)


def _sendable(error: Exception) -> Exception:
    """Return an error that the driver can unpickle."""
    try:
        if isinstance(error, ReshardError) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error.with_traceback(None)
    except Exception:  # whatever its own pickling does
        pass
    made = CheckpointError(f"{type(error).__name__}: {error}")
    made.add_note("".join(traceback.format_exception(error)))
    return made


def run_tasks(
    work: Work[T, R] | None,
    tasks: Iterable[T],
    executor: Executor | None,
    on_done: Callable[[T, R], None],
    *,
    here: Callable[[T], R] | None = None,
    on_stop: Callable[[], object] = lambda: None,
) -> None:
    """Run all tasks, by the executor or, if `needed` finds it useless, one after another in this
    process. Call `on_done` for each.

    Args:
        work: None if there is no executor, and something that does a task `here`, in this process.
        on_stop: called when the work is given up, before running tasks are waited for.

    Raises what a task raises, and CheckpointError if the executor does not do them.
    """

    waiting = deque(tasks)
    executor = needed(executor, len(waiting))
    if executor is None:
        hand = here if here is not None else work.begin()  # type: ignore[union-attr]
        for number, task in enumerate(waiting):
            if number:
                gc.collect(1)  # garbage of the previous task, if the caller paused collection
            on_done(task, hand(task))
    elif waiting:
        driver = _Driver(executor, _packed(work), waiting)
        try:
            for task, found in driver.results():
                on_done(task, found)
                gc.collect(1)
        except BaseException:
            on_stop()
            driver.stop()
            raise


def needed(executor: Executor | None, tasks: int) -> Executor | None:
    """Return the executor, unless it would start processes for a single task."""
    return None if isinstance(executor, Processes) and tasks < 2 else executor


def _packed(work: object) -> bytes:
    try:
        return pickle.dumps(work)
    except Exception as error:  # whatever a value's own pickling does
        raise CheckpointError(
            f"the work cannot be sent to workers: {error}: its functions and classes must be defined in a module, and "
            "lambdas do not work"
        ) from error


class _Driver:
    """Submits the tasks of one call, from its own thread.

    A KeyboardInterrupt reaches the main thread at any moment. In a method of a future, it could
    leave the future's lock locked forever. So the main thread uses no future.
    """

    def __init__(self, executor: Executor, packed: bytes, tasks: deque[Any]) -> None:
        self._executor, self._tasks, self._count, self._done = executor, tasks, len(tasks), 0
        self._order = (__version__, uuid4().hex, packed)
        self._pending: dict[Future[_Answer], Any] = {}
        self._renews = isinstance(executor, Processes)
        self._ended = SimpleQueue[Future[_Answer] | None]()
        """Futures that ended, and None for the request to stop."""
        self._results = SimpleQueue[tuple[Any, Any] | BaseException | None]()
        """A task and its result, an error, or None at the end."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._drive, name="reshard-tasks", daemon=True)

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield each task with its result, in the order in which they end. Raises as `_meet` and `_run` do."""
        self._thread.start()
        while (found := self._results.get()) is not None:
            if isinstance(found, BaseException):
                try:
                    raise found
                finally:
                    del found
            yield found

    def _drive(self) -> None:
        try:
            self._meet()
            self._run()
        except BaseException as error:
            self._results.put(error)
        else:
            self._results.put(None)
        self._cancel()

    def _meet(self) -> None:
        """Raise CheckpointError unless all workers that answer have this version, and see what the
        driver sees.

        Workers that do not answer are asked again before their first task, by `_begin`.
        """
        if self._renews:  # of this machine, and of this environment
            return
        for worker, found in self._ask(pkgutil.resolve_name, _VERSION):  # no worker needs reshard to understand that
            if isinstance(found, Exception):
                raise CheckpointError(f"worker {worker} cannot import reshard: {found}") from found
            if found != __version__:
                raise CheckpointError(
                    f"worker {worker} has reshard {found}, the driver {__version__}: install the same version "
                    "everywhere"
                )
        for worker, answer in self._ask(_look, _Order(*self._order)):
            self._result(answer, worker)

    def _ask(self, question: Callable[[Any], Any], about: object) -> list[tuple[str, Any]]:
        """Return the answers of all workers that the executor knows, including that one cannot
        import something. Raises CheckpointError if there is none."""
        ask_each = _ask_each(self._executor)
        if ask_each is not None:
            answers = sorted(ask_each(question, about).items())
        else:
            count = getattr(self._executor, "num_workers", None) or 1  # mpi4py knows
            asked = [self._submit(question, about) for _ in range(count)]
            answers = [(getattr(one, "worker", "of the executor"), one) for one in map(_answer_of, asked)]
        gone = [(worker, one) for worker, one in answers if isinstance(one, BaseException) and not _is_of_import(one)]
        for worker, error in gone:
            if len(gone) == len(answers):
                raise CheckpointError(f"no worker answers: {_words(error)}. {self._so_far}") from error
            _log.warning("worker %s does not answer: %s", worker, _words(error))
        return [row for row in answers if row not in gone]

    def _run(self) -> None:
        """Run until all tasks are done, or `stop`."""
        tries: Counter[int] = Counter()
        waiting = deque(enumerate(self._tasks))
        most = (getattr(self._executor, "num_workers", None) or IN_FLIGHT // 2) * 2
        while (waiting or self._pending) and not self._is_stopped:
            while waiting and len(self._pending) < most:
                number, task = waiting.popleft()
                tries[number] += 1
                future = self._submit(_perform, _Order(*self._order, task, tries[number]))
                self._pending[future] = number, task
                future.add_done_callback(self._ended.put)
            ended = self._ended.get()
            if ended is None:
                return
            number, task = self._pending.pop(ended)
            try:
                answer = ended.result()
            except (Exception, CancelledError) as error:
                self._lost(error, tries[number])
                waiting.appendleft((number, task))
                continue
            found = self._result(answer)
            self._done += 1
            self._results.put((task, found))

    def _cancel(self) -> None:
        """Start no more tasks, and wait for those in progress."""
        if self._pending and isinstance(self._executor, Processes):
            self._executor.kill()
        running = {future for future in self._pending if not future.cancel()}
        while running:
            running.discard(self._ended.get())

    def _submit(self, what: Callable[[Any], Any], about: object) -> Future[Any]:
        try:
            return self._executor.submit(what, about)
        except BrokenExecutor as error:
            raise self._broken(error) from error
        except Exception as error:  # engines have kinds of their own
            raise CheckpointError(
                f"the executor accepts no tasks: {_words(error)}: it may be shut down or closed. {self._so_far}"
            ) from error

    def _lost(self, error: BaseException, tries: int) -> None:
        """Handle a task that did not return. Raises CheckpointError if there are no more tries."""
        if isinstance(error, BrokenExecutor) and not self._renews:
            raise self._broken(error) from error
        if isinstance(error, pickle.PicklingError):
            raise CheckpointError(f"a task cannot be sent to workers: {error}") from error
        if tries >= TRIES:
            raise CheckpointError(
                f"a task was lost {tries} times, the last time by {_words(error)}. It may kill its worker, for "
                f"example by running out of memory. {self._so_far}"
            ) from error
        _log.warning("a task was lost and is submitted again: %s", _words(error))

    def _broken(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the executor is broken: {_words(error)}. {self._so_far}; the same call with a new executor continues"
        )

    @property
    def _so_far(self) -> str:
        return f"{self._done} of {self._count} tasks are done"

    def _result(self, answer: _Answer, worker: str = "") -> Any:
        """Return the result. Raises the error, with the worker's name unless it is one of ours."""
        error = answer.error
        if error is None:
            return answer.result
        if not self._renews and len(error.args) == 1:
            error.args = (f"{error} (at worker {worker or answer.worker})",)
        try:
            raise error
        finally:
            del error, answer

    def stop(self) -> None:
        """Start no more tasks, and wait up to `STOP_S` for those in progress."""
        self._is_stopped = True
        self._ended.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)


def _answer_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except (Exception, CancelledError) as error:
        return error


def _is_of_import(error: BaseException) -> bool:
    """Return whether an error says that a worker lacks a module. Engines keep the class of the
    error or only its text."""
    return isinstance(error, ImportError | AttributeError) or "ModuleNotFoundError" in str(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _ask_each(executor: Executor) -> Callable[..., Mapping[str, Any]] | None:
    """Return a function that asks each worker of the executor once, and returns answers or errors
    by worker."""
    client: Any = getattr(executor, "_client", None)  # of dask.distributed's executor
    if hasattr(client, "scheduler_info"):
        return lambda function, about: client.run(function, about, on_error="return")
    return getattr(executor, "ask_each", None)


def check_executor(executor: Executor | None, workers: int, *opened_by_workers: object) -> None:
    """Raise CheckpointError for what no worker could open, and OptionError for workers of two kinds."""
    check_options(workers=workers)
    if executor is None and workers == 1:
        return
    if executor is not None and workers > 1:
        raise OptionError("an executor has its own workers: pass executor or workers, not both")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise CheckpointError(
            f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}: of dask.distributed, "
            "client.get_executor()"
        )
    for path in opened_by_workers:
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(
                f"workers open checkpoints themselves: pass a path or URL, not a {type(path).__name__}"
            )
        if workers > 1 and os.fspath(path).startswith("memory://"):
            raise CheckpointError("worker processes cannot see the memory of this process: use a folder")


@contextmanager
def engine(executor: Executor | None, workers: int = 1) -> Iterator[Executor | None]:
    """Yield the executor, or one of `workers` processes until the block ends. None for one process,
    which is this one."""
    if executor is not None or workers == 1:
        yield executor
        return
    with Processes(workers) as processes:
        yield processes


class Processes(Executor):
    """Processes of this machine. If one dies, all are replaced, and their tasks must be submitted again."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise OptionError(f"the number of processes must be >= 1, got {count}")
        self.num_workers = count
        self._made: tuple[ProcessPoolExecutor, Connection] | None = None

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call the function in a process. It is sent by name."""
        for _ in range(TRIES):
            with suppress(BrokenProcessPool):
                return self._pool().submit(fn, *args, **kwargs)
            self.shutdown()
        return self._pool().submit(fn, *args, **kwargs)

    def _pool(self) -> ProcessPoolExecutor:
        if self._made is None:
            theirs, ours = multiprocessing.Pipe(duplex=False)
            context = _Context()
            pool = ProcessPoolExecutor(self.num_workers, context, initializer=_follow, initargs=(theirs,))
            self._made = pool, ours
        return self._made[0]

    def kill(self) -> None:
        """Kill all processes at once. Returns when they have ended."""
        if self._made is not None:
            self._made[1].close()
            self.shutdown()  # the first that ends fails the tasks of all, while others may still write

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the processes end."""
        if self._made is not None:
            made, self._made = self._made, None
            made[0].shutdown(wait, cancel_futures=cancel_futures)
            made[1].close()


class _QuietProcess(SpawnProcess):
    """A process that does not run the program's main module again, which may lack a guard."""

    def start(self) -> None:
        """Start the process, with its main module hidden meanwhile."""
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process: ClassVar[type[SpawnProcess]] = _QuietProcess


def _follow(line: Connection) -> None:
    """End at once when the driver has ended, or requests it. Ctrl-C is handled by the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end() -> None:
        with suppress(OSError, EOFError):
            line.recv_bytes()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
