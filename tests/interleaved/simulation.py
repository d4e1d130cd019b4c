"""Jobs of simulated processes in one: the real code of whole calls, under a scheduler that lets one go on at a time.

Each process is a greenlet, and so is each thread that it starts. They take turns at every call that touches files, at
every question to the store, and where the wall clock is read. Files are real, in a folder that had better be in memory;
the store, the clock, process numbers, and machines are simulated. So a seed gives the same run again.

    simulation = Simulation(folder, choose=random.Random(seed).randrange)
    job = simulation.start(2, lambda rank: reshard.save(state(rank), folder))
    with simulated(simulation):
        simulation.run()
    job.ends                         # what each returned, or the error that it ended with
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import heapq
import itertools
import math
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal

import greenlet
import torch

from reshard.api import background_saves, convert, load, redistribute, retention, save as save_module
from reshard.execute import exchange
from reshard.live import tensors
from reshard.native import commit
from reshard.ranks import liveness
from reshard.ranks.group import DEADLINE_S, Group
from tests.interleaved.messages import IntoTarget, Network
from tests.simulated_hosts import cut_tensors
from tests.simulated_ranks import Died, World

__all__ = ["Fault", "Hang", "Job", "Process", "Simulation", "simulated"]

MODULES = (convert, load, redistribute, retention)
"""Imported before names in them are swapped, which is once."""
CHANGES = ("mkdir", "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "replace", "link", "unlink", "rmdir")
"""Of files and folders; `open` is one, too, where it creates."""
_EPOCH_S = 1.7e9


class Hang(AssertionError):
    """Processes that wait, and nothing that could wake them."""


@dataclass(frozen=True)
class Fault:
    """What happens to a process before an operation of its: its number, counted from 1.

    Attributes:
        kind: "kill": none of it runs any more. "pause": others go on, so many operations long. "fail": the next call
            that changes files raises the error. "full": so do all that add to them, from then on.
        length: of a pause, in operations of others.
        error: the number of the error.
        with_all: whether it is of all processes of the machine.
    """

    kind: Literal["kill", "pause", "fail", "full"]
    at: int
    length: int = 0
    error: int = errno.EIO
    with_all: bool = False


@dataclass(eq=False)
class Process:
    """A simulated process."""

    number: int
    rank: int
    job: Job
    machine: str
    fault: Fault | None = None
    ops: int = 0
    is_dead: bool = False
    is_over: bool = False
    is_full: bool = False
    spent_s: float = 0.0
    """Processor time."""
    resumes_at: int | None = None
    """Where it is paused: the number of operations of all after which it goes on."""
    own: dict[str, Any] = field(default_factory=lambda: {"saves": {}, "kept": OrderedDict(), "running": set()})
    """What each process has for itself in the modules of reshard."""


@dataclass(eq=False)
class _Task:
    process: Process
    body: Callable[[], None]
    run: Any = None
    waits: int = 0
    """The number of its latest wait: one that is over wakes nobody."""
    until: Callable[[], bool] | None = None
    is_daemon: bool = False
    """Whether it ends with the process."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or its process has and it must."""
        return self.process.is_dead or (self.is_daemon and self.process.is_over)


class Job(World):
    """The ranks that talk over one store, each a process.

    Attributes:
        ends: what each returned, or the error that it ended with; None as long as it runs.
    """

    def __init__(self, simulation: Simulation, size: int, machines: Sequence[str], name: str) -> None:
        self.simulation, self.name = simulation, name
        super().__init__(size)
        self.machines = machines
        self.mates: dict[str, list[int]] = defaultdict(list)
        for rank, machine in enumerate(machines):
            self.mates[machine].append(rank)
        self.ends: list[Any] = [None] * size
        self.processes: list[Process] = []

    @property
    def now(self) -> float:  # type: ignore[override]
        """The simulation's clock."""
        return self.simulation.now

    @now.setter
    def now(self, value: float) -> None:
        pass

    @property
    def settled(self) -> bool:
        """Whether each process has ended, died, or is paused."""
        return all(p.is_over or p.is_dead or p.resumes_at is not None for p in self.processes)

    def watched_by(self, rank: int) -> int:
        """The rank before it on its machine; for the first one, the last."""
        mates = self.mates[self.machines[rank]]
        return mates[mates.index(rank) - 1]

    def pause(self) -> None:
        self.simulation.op("store")

    def touched(self, key: str) -> None:
        self.simulation.wake((id(self), key))

    def _block(self, key: str | None, until: float) -> None:
        self.simulation.block(None if key is None else (id(self), key), until)


class Simulation:
    """A scheduler, a clock, and the processes.

    Args:
        folder: whose files the processes share.
        choose: of so many tasks that could go on, which does; the first one is that which went on before, if it can.
            None: whoever goes on goes on until it waits, and then the one that has waited the longest.
        observe: called after each operation that changed which files there are, with their names, by nobody's process.
        op_s: how long an operation takes. All processes wait for it.
    """

    def __init__(
        self,
        folder: Path,
        choose: Callable[[int], int] | None,
        observe: Callable[[str], None] = lambda name: None,
        op_s: float = 0.001,
    ) -> None:
        self.folder, self.choose, self.observe, self.op_s = str(folder), choose, observe, op_s
        self.now = 0.0
        self.ops = 0
        self.switches = 0
        self.jobs: list[Job] = []
        self.processes: list[Process] = []
        self.dead_pids: set[int] = set()
        self.trace = hashlib.sha256()
        """Of all operations, in their order."""
        self.log: list[str] | None = None
        self._tasks: list[_Task] = []
        self._ready: list[_Task] = []
        self._conditional: list[_Task] = []
        self._paused: list[Process] = []
        self._timers: list[tuple[float, int, _Task, int]] = []
        self._waiting: dict[Any, list[tuple[_Task, int]]] = defaultdict(list)
        self._numbers = itertools.count()
        self._tokens = itertools.count(1)
        self._hub: Any = None
        self._task: _Task | None = None
        self.struck = 0
        """The number of the operation at which a process was killed."""
        self.violations: list[str] = []
        self.replaces: dict[str, str | None] = {}
        """Which save the save of an id was to replace, of those that came to publish."""
        self._calm = 0
        self._has_ended = False
        self._files: dict[int, str] = {}

    # --- processes ---

    def start(
        self,
        size: int,
        body: Callable[[int], Any],
        *,
        name: str = "job",
        machines: Sequence[str] | None = None,
        faults: dict[int, Fault] | None = None,
        after: Callable[[], bool] | None = None,
    ) -> Job:
        """A job of `size` processes that call `body(rank)`, once `after` is so."""
        job = Job(self, size, machines or ["m"] * size, name)
        self.jobs.append(job)
        for rank in range(size):
            process = Process(1000 + len(self.processes), rank, job, job.machines[rank], (faults or {}).get(rank))
            job.processes.append(process)
            self.processes.append(process)
            self._spawn(process, lambda process=process: self._life(process, body), after)
        return job

    def _life(self, process: Process, body: Callable[[int], Any]) -> None:
        job = process.job
        try:
            job.ends[process.rank] = body(process.rank)
        except (Exception, Died) as error:
            job.ends[process.rank] = error
        while not process.is_dead and any(not future.done() for future in process.own["saves"]):
            self.wait_for(lambda: all(future.done() for future in process.own["saves"]))
        process.is_over = self._has_ended = True
        if not process.is_dead:  # and is no more
            self.dead_pids.add(process.number)
            job.dead.add(process.rank)

    def _spawn(
        self,
        process: Process,
        body: Callable[[], None],
        after: Callable[[], bool] | None = None,
        *,
        is_daemon: bool = False,
    ) -> None:
        task = _Task(process, body, is_daemon=is_daemon)
        task.until = after
        self._tasks.append(task)
        (self._ready if after is None else self._conditional).append(task)

    def kill(self, process: Process) -> None:
        """Nothing of it runs any more."""
        process.is_dead = self._has_ended = True
        process.resumes_at = None
        self.dead_pids.add(process.number)
        process.job.dead.add(process.rank)

    @property
    def process(self) -> Process | None:
        """Whose turn it is."""
        return None if self._task is None else self._task.process

    # --- turns ---

    def run(self) -> None:
        """Until all processes have ended."""
        self._hub = greenlet.getcurrent()
        before: _Task | None = None
        while True:
            if self._has_ended:
                self._bury()
            self._notice()
            ready = [t for t in self._ready if t.process.resumes_at is None] if self._paused else self._ready
            if not ready:
                if self._advance():
                    continue
                if self._end_pauses():
                    continue
                if self._tasks:
                    names = sorted({f"{t.process.job.name} rank {t.process.rank}" for t in self._tasks})
                    raise Hang(f"for ever wait: {', '.join(names)}")
                return
            if self.choose is not None and before in ready:
                ready = [before, *(t for t in ready if t is not before)]
            chosen = ready[self.choose(len(ready))] if self.choose is not None and len(ready) > 1 else ready[0]
            self.switches += chosen is not before
            self._ready.remove(chosen)
            before = chosen
            self._switch(chosen)

    def _switch(self, task: _Task, *error: type[BaseException]) -> None:
        if task.run is None:
            task.run = greenlet.greenlet(task.body)
        self._task, begun = task, time.process_time()
        try:
            if error:
                task.run.throw(*error)
            else:
                task.run.switch()
        finally:
            self._task = None
            task.process.spent_s += time.process_time() - begun
            if task.run.dead:
                self._tasks.remove(task)

    def _bury(self) -> None:
        """Tasks of the dead, and threads that end with a process: none of them gets to an operation again."""
        self._has_ended = False
        for task in [t for t in self._tasks if t.is_over]:
            if task.run is None:
                task.body = lambda: None
                self._switch(task)
            else:
                self._switch(task, Died)
        self._ready = [t for t in self._ready if t.run is None or not t.run.dead]
        self._conditional = [t for t in self._conditional if t.run is None or not t.run.dead]

    def _notice(self) -> None:
        """Whose condition is met goes on, and whose time has come."""
        for task in self._conditional[:]:
            if task.until is not None and task.until():
                task.until = None
                self._conditional.remove(task)
                self._ready.append(task)
        for process in [p for p in self._paused if p.resumes_at is None or self.ops >= p.resumes_at]:
            process.resumes_at = None
            self._paused.remove(process)
        while self._timers and self._timers[0][0] <= self.now:
            self._ring()

    def _ring(self) -> bool:
        when, _, task, number = heapq.heappop(self._timers)
        if task.waits != number or (task.run is not None and task.run.dead):
            return False
        self.now = max(self.now, when)
        task.waits += 1
        self._ready.append(task)
        return True

    def _advance(self) -> bool:
        while self._timers:
            if self._ring():
                return True
        return False

    def _end_pauses(self) -> bool:
        paused, self._paused = self._paused, []
        for process in paused:
            process.resumes_at = None
        return bool(paused)

    def _leave(self) -> None:
        task = self._task
        assert task is not None
        self._hub.switch()
        self._task = task
        if task.process.is_dead:
            raise Died

    def op(self, kind: str, name: str = "") -> None:
        """An operation of the process whose turn it is: others may go on first, and it may be its last."""
        process = self.process
        if process is None:
            return
        if process.is_dead:
            raise Died
        is_alone = bool(self._calm) or (kind == "replace" and name.endswith("/manifest.json"))
        if not is_alone and self._could_switch():
            self._ready.append(self._task)  # type: ignore[arg-type]
            self._leave()
        self.ops += 1
        process.ops += 1
        self.now += self.op_s
        told = f"{process.job.name}.{process.rank} {kind} {name}"
        self.trace.update(told.encode())
        if self.log is not None:
            self.log.append(told)
        if process.fault is not None and process.ops >= process.fault.at:
            self._strike(process, process.fault, kind, is_alone=is_alone)

    def _could_switch(self) -> bool:
        """Whether the scheduler has anything to decide."""
        if self.choose is None:
            return False
        if self._ready or self._paused or (self._timers and self._timers[0][0] <= self.now):
            return True
        return any(task.until is not None and task.until() for task in self._conditional)

    def _strike(self, process: Process, fault: Fault, kind: str, *, is_alone: bool) -> None:
        if fault.kind == "kill":
            process.fault, self.struck = None, self.ops
            for other in process.job.processes:
                if other is process or (fault.with_all and other.machine == process.machine and not other.is_over):
                    self.kill(other)
            raise Died
        if fault.kind == "pause" and not is_alone:
            process.fault = None
            process.resumes_at = self.ops + fault.length
            self._paused.append(process)
            self._ready.append(self._task)  # type: ignore[arg-type]
            self._leave()
        elif fault.kind == "fail" and kind in CHANGES + ("create",):
            process.fault = None
            raise OSError(fault.error, os.strerror(fault.error))
        elif fault.kind == "full" and kind in ("mkdir", "write", "pwrite", "posix_fallocate", "create", "link"):
            raise OSError(fault.error, os.strerror(fault.error))

    def block(self, what: Any, until: float) -> None:
        """Until it is woken by `what`, or it is that time."""
        task = self._task
        assert task is not None
        if task.process.is_dead:
            raise Died
        task.waits += 1
        if until < math.inf:
            heapq.heappush(self._timers, (until, next(self._numbers), task, task.waits))
        if what is not None:
            self._waiting[what].append((task, task.waits))
        self._leave()

    def wake(self, what: Any) -> None:
        """Who waits for it goes on."""
        for task, number in self._waiting.pop(what, ()):
            if task.waits == number and not (task.run is not None and task.run.dead):
                task.waits += 1
                self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        """Let others go on, until that time."""
        self.block(None, self.now + max(seconds, 1e-6))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until it is so."""
        if condition():
            return
        task = self._task
        assert task is not None
        if task.process.is_dead:
            raise Died
        task.until = condition
        self._conditional.append(task)
        self._leave()

    @contextlib.contextmanager
    def calm(self) -> Iterator[None]:
        """Nobody else goes on meanwhile."""
        self._calm += 1
        try:
            yield
        finally:
            self._calm -= 1

    def observe_now(self, name: str) -> None:
        """Whether what is in the folder may be there, now that the file of this name was changed."""
        task, self._task = self._task, None
        try:
            self.observe(name)
        except AssertionError as error:
            self.violations.append(str(error))
        finally:
            self._task = task

    # --- what the code of a process sees ---

    def group(self, *_: Any, ranks: Any = (), alone: bool = False, deadline_s: Any = DEADLINE_S) -> Group:
        """What `Group()` is for the process whose turn it is."""
        process = self.process
        if alone or process is None or process.job.world_size == 1:
            return Group(alone=True)
        group = process.job.group(process.rank, deadline_s=60.0)
        group.tag = group._rounds.session  # type: ignore[union-attr]
        return group

    def wall_s(self) -> float:
        """Seconds since 1970. Others may go on between a look at the clock and the next."""
        self.op("clock")
        return _EPOCH_S + self.now

    def token(self, nbytes: int) -> str:
        """No two are the same."""
        return hashlib.sha256(b"%f %d" % (self.now, next(self._tokens))).hexdigest()[: 2 * nbytes]

    def pid(self, real: Callable[[], int] = os.getpid) -> int:
        """Of the process whose turn it is."""
        return real() if self.process is None else self.process.number

    def host(self, real: Callable[[], str] = socket.gethostname) -> str:
        """The name of its machine."""
        return real() if self.process is None else self.process.machine

    def start_of(self, pid: int) -> str:
        """When a process was started; "" if it is no more."""
        return "" if pid in self.dead_pids or not 1000 <= pid < 1000 + len(self.processes) else f"{pid}"

    def own(self, name: str, otherwise: Any) -> Any:
        """What this process has of that name."""
        return otherwise if self.process is None else self.process.own[name]


class _OfProcess:
    """A container of a module, of which each process has its own."""

    def __init__(self, simulation: Simulation, name: str, real: Any) -> None:
        self._found = lambda: simulation.own(name, real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __contains__(self, key: object) -> bool:
        return key in self._found()

    def __getitem__(self, key: Any) -> Any:
        return self._found()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._found()[key] = value


def _threads(simulation: Simulation) -> dict[int, Any]:
    """By the id of what modules have: what stands in for it."""

    class Thread:
        def __init__(self, target: Any, args: Any = (), name: str = "", daemon: bool = False) -> None:
            self._run, self._is_over, self._is_daemon = lambda: target(*args), False, daemon

        def start(self) -> None:
            assert simulation.process is not None
            simulation._spawn(simulation.process, self._live, is_daemon=self._is_daemon)

        def is_alive(self) -> bool:
            return not self._is_over

        def _live(self) -> None:
            with contextlib.suppress(Died):
                self._run()
            self._is_over = True

        def join(self) -> None:
            simulation.wait_for(lambda: self._is_over)

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def is_set(self) -> bool:
            return self._is_set

        def set(self) -> None:
            self._is_set = True
            simulation.wake(id(self))

        def wait(self, timeout: float) -> bool:
            if not self._is_set:
                simulation.block(id(self), simulation.now + timeout)
            return self._is_set

    class Queue:
        def __init__(self) -> None:
            self._items: deque[Any] = deque()

        def put(self, item: Any) -> None:
            self._items.append(item)
            simulation.wake(id(self))

        def get(self, timeout: float = math.inf) -> Any:
            until = simulation.now + timeout
            while not self._items:
                if simulation.now >= until:
                    raise Empty
                simulation.block(id(self), until)
            return self._items.popleft()

        def empty(self) -> bool:
            return not self._items

    class Pool:
        """Does all at once, where it is given."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def shutdown(self, *_: object, **__: object) -> None:
            pass

        def submit(self, work: Any, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            return future

        def map(self, work: Any, *rows: Any) -> Any:
            return iter([work(*row) for row in zip(*rows)])

    class Awaited(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Any:
            simulation.wait_for(self.done)
            return super().result(0)

        def exception(self, timeout: float | None = None) -> BaseException | None:
            simulation.wait_for(self.done)
            return super().exception(0)

    clock = SimpleNamespace(
        monotonic=lambda: simulation.now,
        time=simulation.wall_s,
        sleep=simulation.sleep,
        time_ns=lambda: int((_EPOCH_S + simulation.now) * 1e9),
        perf_counter=lambda: simulation.now,
        perf_counter_ns=lambda: int(simulation.now * 1e9),
    )
    return {
        id(time): clock,
        id(threading): SimpleNamespace(**{**vars(threading), "Thread": Thread, "Event": Event}),
        id(ThreadPoolExecutor): Pool,
        id(Future): Awaited,
        id(SimpleQueue): Queue,
        id(secrets): SimpleNamespace(token_hex=simulation.token),
        id(liveness.machine): lambda: "" if simulation.process is None else simulation.process.machine,
        id(liveness.start_of): simulation.start_of,
        id(Group): simulation.group,
        id(tensors.world_size): lambda: simulation.process.job.world_size if simulation.process else 1,
        id(tensors._rank): lambda: simulation.process.rank if simulation.process else 0,
    }


def _files(simulation: Simulation) -> dict[str, Callable[..., Any]]:
    """Calls of `os` that are operations where they touch the simulation's folder."""
    folder, files = simulation.folder, simulation._files

    def told(kind: str, real: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        try:
            simulation.op(kind, name)
        except Died:
            if simulation.struck == simulation.ops and kind in ("write", "pwrite"):  # killed in the middle of it
                real(args[0], args[1][: len(args[1]) // 2], *args[2:])
            raise
        made = real(*args, **kwargs)
        if kind in ("replace", "link", "unlink", "rmdir", "create", "mkdir"):
            simulation.observe_now(name)
        return made

    def by_path(kind: str) -> Callable[..., Any]:
        real = getattr(os, kind)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if simulation.process is None or isinstance(path, int) or not os.fspath(path).startswith(folder):
                return real(path, *args, **kwargs)
            what = kind if kind != "open" else "create" if args[0] & os.O_CREAT else "open"
            name = os.fspath(path)[len(folder) :]
            if kind == "replace":
                name += f" {os.fspath(args[0])[len(folder) :]}"
            made = told(what, real, name, (path, *args), kwargs)
            if kind == "open" and made >= 0:
                files[made] = name
            return made

        return call

    def by_file(kind: str) -> Callable[..., Any]:
        real = getattr(os, kind)

        def call(file: int, *args: Any, **kwargs: Any) -> Any:
            if simulation.process is None or file not in files:
                return real(file, *args, **kwargs)
            return told(kind, real if kind != "fsync" else lambda _: None, files[file], (file, *args), kwargs)

        return call

    def close(file: int, real: Callable[[int], None] = os.close) -> None:
        files.pop(file, None)
        real(file)

    paths = ("open", "mkdir", "replace", "link", "unlink", "rmdir", "scandir")
    by_number = ("write", "pwrite", "ftruncate", "posix_fallocate", "fsync")
    return {kind: by_path(kind) for kind in paths} | {kind: by_file(kind) for kind in by_number} | {"close": close}


@contextlib.contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """The modules of reshard and `os` go by the simulation."""
    swaps = _threads(simulation)
    this = SimpleNamespace(**{**vars(os), "getpid": simulation.pid, "kill": _nobody})
    rows: list[tuple[Any, str, Any]] = [
        *((module, name, swaps[its]) for module, name, its in _swapped(frozenset(swaps), len(sys.modules))),
        *((module, name, _OfProcess(simulation, own, getattr(module, name))) for module, name, own in _OWN),
        (save_module, "REMOVES_ALONE", 2),  # so that three ranks do what many do
        (liveness, "os", this),
        (exchange, "dist", Network(simulation)),
        (exchange, "_IntoTarget", IntoTarget),
        (commit, "_begun", [0.0]),
        (commit.Generation, "_check_current", _at_once(simulation)),
        *((os, name, call) for name, call in _files(simulation).items()),
        (os, "getpid", simulation.pid),
        (socket, "gethostname", simulation.host),
    ]
    real = [(place, name, getattr(place, name)) for place, name, _ in rows]
    with cut_tensors(), torch.no_grad():  # which each of them enters and leaves, in any order
        try:
            for place, name, value in rows:
                setattr(place, name, value)
            yield
        finally:
            for place, name, value in reversed(real):
                setattr(place, name, value)


_OWN = ((background_saves, "saves", "saves"), (save_module, "_kept", "kept"), (liveness, "_running", "running"))


@functools.cache
def _swapped(ids: frozenset[int], _: int) -> list[tuple[Any, str, int]]:
    """The modules of reshard, as many as are loaded, and what they have under which names of the values of these
    ids."""
    rows = []
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "reshard":
            some = {id(time)} if key in ("reshard.ranks.group", "reshard.ranks.timespans") else ids
            rows += [(module, name, id(value)) for name, value in vars(module).items() if id(value) in some]
    return rows


def _at_once(simulation: Simulation) -> Callable[[commit.Generation, Callable[[], None] | None], None]:
    """The last look before a manifest is published and its rename are one: no file system has a rename on condition,
    and tests/faults.md says so."""
    real = commit.Generation._check_current

    def check(generation: commit.Generation, before: Callable[[], None] | None) -> None:
        if before is not None:
            before()
        simulation.replaces[generation.save_id] = generation.replaces
        with simulation.calm():
            real(generation, None)

    return check


def _nobody(pid: int, signal: int) -> None:
    raise ProcessLookupError(pid)


def chooser(rng: random.Random, stays: float) -> Callable[[int], int]:
    """At random; who went on before goes on with that probability first."""
    return lambda count: 0 if rng.random() < stays else rng.randrange(count)
