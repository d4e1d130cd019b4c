"""A conversion and a verification by one process, two processes, Dask, and Ray, and an estimate for 64 machines.

    python -m benchmarks.engines [--quick] [--folder /dev/shm]

A conversion from our format to DCP's, in files of 128 MiB, in memory that looks like a disk. Then, the source is
verified. Each engine has a driver in a new process, and two workers of one thread each, which have done the same with
a small checkpoint before, and it first runs a quarter of the size. CPU time is that of the driver and its workers,
without Dask's nannies and Ray's daemons. Memory is that of a process without mapped files: its peak minus its initial
value. The driver's bytes are those that it read from files and pipes, plus all traffic on the machine's loopback
device in that time: an upper bound.

The simulation takes the durations of one process's tasks, and assigns them in order to the first free worker. Its
driver takes as long per task as an engine does for a task that does nothing. Storage and network, which machines
would share, are as fast for each worker as here.
"""

from __future__ import annotations

import heapq
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

import reshard
from benchmarks.page import Row, arguments, report
from reshard.api.convert_job import FileTasks
from reshard.api.tasks import Processes, run_tasks

ONE = "one process"
MODULES = {ONE: "reshard", "2 processes": "reshard", "Dask": "distributed", "Ray": "ray"}
"""Modules that each engine requires."""
WORKERS = 2
LITTLE = "little"
"""Size of a checkpoint for warm-up."""
FILE_BYTES = 128 << 20
NOTHING = 200
MACHINES = (64, 512)
"""Workers of the simulation: one on each of 64 machines, and eight."""

Figures = dict[str, float]
"""By measurement and unit, separated by a bar."""


class Watch(threading.Thread):
    """Samples this process's memory every few milliseconds, without mapped files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    @staticmethod
    def now_mb() -> float:
        """The kernel records no peak of it."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.peak_mb = max(self.peak_mb, self.now_mb())
            time.sleep(0.005)


_watch = Watch()


@dataclass(frozen=True)
class Said:
    """What a process reports about itself."""

    pid: int
    processor_s: float
    now_mb: float
    peak_mb: float
    """Since the last report."""

    @classmethod
    def here(cls) -> Said:
        """Return the report of this process, and reset its peak."""
        if not _watch.is_alive():
            _watch.start()
        now_mb = Watch.now_mb()
        peak_mb, _watch.peak_mb = max(now_mb, _watch.peak_mb), now_mb
        return cls(os.getpid(), time.process_time(), now_mb, peak_mb)


@dataclass(frozen=True)
class Nothing:
    """Tasks that only report on their process. No two are equal, so that engines cannot cache results."""

    made_ns: int = field(default_factory=time.monotonic_ns)

    def begin(self) -> Callable[[int], Said]:
        """Import what conversions and verifications import."""
        reshard.convert, reshard.verify  # noqa: B018  # imported on first access
        return lambda number: Said.here()


def asked(executor: Executor | None, count: int) -> dict[int, Said]:
    """Return the last report of each of `count` workers, with the highest peak, by process ID."""
    last: dict[int, Said] = {}

    def on_done(number: int, said: Said) -> None:
        peak = max(said.peak_mb, last[said.pid].peak_mb if said.pid in last else 0.0)
        last[said.pid] = replace(said, peak_mb=peak)

    while len(last) < count:
        run_tasks(Nothing(), range(NOTHING), executor, on_done)
    return last


def read_bytes() -> int:
    """Return the bytes that this process has read by calls, plus all bytes received on loopback."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    loopback = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(rows["rchar"]) + sum(int(line.split(":")[1].split()[0]) for line in loopback)


def measured(what: str, call: Callable[[], object], executor: Executor | None, idle: dict[int, Said]) -> Figures:
    """Measure a call. `idle` has the initial reports of driver and workers."""
    count, pid = len(idle) - 1, os.getpid()
    before = asked(executor, count)
    before[pid] = Said.here()
    read, started = read_bytes(), time.perf_counter()
    call()
    wall, read = time.perf_counter() - started, read_bytes() - read
    after = {pid: Said.here()}
    after.update(asked(executor, count) if count else {})
    busy = {one: said.processor_s - before[one].processor_s for one, said in after.items()}
    risen = {one: said.peak_mb - idle[one].now_mb for one, said in after.items()}
    return {
        f"{what}|s": wall,
        f"{what}|CPU s": sum(busy.values()),
        f"{what}: the driver|CPU s": busy[pid],
        f"{what}: the driver reads|MB": read / 1e6,
        f"{what}: memory of the driver|MB": risen[pid],
        f"{what}: memory of who does it|MB": max(mb for one, mb in risen.items() if one != pid or not count),
    }


@contextmanager
def engine(name: str) -> Iterator[Executor | None]:
    """Start an engine, and end it after the block."""
    if name == ONE:
        yield None
    elif name == "2 processes":
        with Processes(WORKERS) as executor:
            yield executor
    elif name == "Dask":
        from distributed import Client, LocalCluster

        options = {"processes": True, "dashboard_address": None, "silence_logs": 50}
        with LocalCluster(n_workers=WORKERS, threads_per_worker=1, **options) as cluster, Client(cluster) as client:
            yield client.get_executor()
    else:
        import ray

        from reshard.integrations.ray import RayExecutor

        ray.init(num_cpus=WORKERS, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
        with RayExecutor() as made:
            yield made
        ray.shutdown()


def drive(name: str, folder: Path, sizes: list[str]) -> dict[str, Any]:
    """Return all measurements of one engine, on sources of these sizes, and the duration of each task: for one
    process those of the last conversion, for an engine those of tasks that do nothing."""
    tasks_s: list[float] = []
    write = FileTasks.__call__

    def timed(tasks: FileTasks, file: str) -> bool:
        started = time.perf_counter()
        was_there = write(tasks, file)
        tasks_s.append(time.perf_counter() - started)
        return was_there

    FileTasks.__call__ = timed  # type: ignore[method-assign]
    figures: Figures = {}
    with engine(name) as executor:

        def convert(source: Path, file_bytes: int = FILE_BYTES) -> None:
            reshard.convert(source, folder / "to", format="dcp", max_shard_bytes=file_bytes, executor=executor)

        def verify(source: Path) -> None:
            reshard.verify(source, executor=executor)

        idle = asked(executor, 0 if executor is None else WORKERS)  # starts the workers
        for call in (partial(convert, file_bytes=1 << 16), verify):  # and imports what these need
            call(folder / LITTLE)
        shutil.rmtree(folder / "to")
        started = time.perf_counter()
        run_tasks(Nothing(), range(NOTHING), executor, lambda number, said: None)
        each_s = (time.perf_counter() - started) / NOTHING
        idle = {**asked(executor, len(idle)), os.getpid(): Said.here()}
        for size in sizes:
            tasks_s.clear()
            figures |= measured(f"convert {size}", partial(convert, folder / size), executor, idle)
            shutil.rmtree(folder / "to")
            figures |= measured(f"verify {size}", partial(verify, folder / size), executor, idle)
    figures["a task that does nothing|ms"] = 1000 * each_s
    return {"figures": figures, "tasks_s": tasks_s}


def driven(name: str, folder: Path, sizes: list[str]) -> dict[str, Any] | None:
    """Call `drive` in a new process. Returns None if the engine is not installed."""
    if importlib.util.find_spec(MODULES[name]) is None:
        return None
    out = folder / "found.json"
    program = (
        "import sys, json, pathlib; from benchmarks import engines\n"
        "name, folder, out, *sizes = sys.argv[1:]\n"
        "pathlib.Path(out).write_text(json.dumps(engines.drive(name, pathlib.Path(folder), sizes)))"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, name, str(folder), str(out), *sizes], check=True)
    print(f"    {name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def simulated_s(tasks_s: Iterable[float], workers: int, each_s: float) -> float:
    """Return when the last task ends, if each is assigned in order to the first free worker."""
    free, now = [0.0] * workers, 0.0
    for seconds in tasks_s:
        now = max(now + each_s, free[0])
        heapq.heapreplace(free, now + seconds)
    return max(free)


def save_all(folder: Path, *, quick: bool) -> list[str]:
    """Save checkpoints of tensors of 64 MiB, and a small one. Return the names of the former, which contain their
    sizes."""
    reshard.save({f"w{i}": torch.ones(1 << 14) for i in range(32)}, folder / LITTLE)
    names, part = [], torch.randn(16 << 20)
    for count in (1, 4) if quick else (16, 64):
        names.append(f"{count * (64 << 20) / 1e9:.2g} GB")
        reshard.save({f"w{i}": part + i for i in range(count)}, folder / names[-1])
    return names


def measure(parent: str | None, *, quick: bool) -> dict[str, dict[str, Any] | None]:
    """Return the results of `drive` by engine."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-engines-", dir=parent))
    try:
        sizes = save_all(folder, quick=quick)
        return {name: driven(name, folder, sizes) for name in MODULES}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rows(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows. Ours is one process, and the peers are the engines."""
    figures = {name: one["figures"] if one else None for name, one in found.items()}
    for workers in MACHINES:
        for name, theirs in figures.items():
            if theirs:
                tasks_s = islice(cycle(found[ONE]["tasks_s"]), 6 * 10**12 // FILE_BYTES)
                seconds = simulated_s(
                    tasks_s, 1 if name == ONE else workers, theirs["a task that does nothing|ms"] / 1000
                )
                theirs[f"6 TB by {workers} workers, simulated|s"] = seconds
    for what, figure in figures[ONE].items():
        peers = {name: (one[what],) if one else () for name, one in figures.items() if name != ONE}
        yield Row("engines", *what.split("|"), (figure,), peers)


def main() -> int:
    parser = arguments(__doc__)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--folder", default=folder, help="where the checkpoints go: 8 GB (default: memory)")
    options = parser.parse_args()
    return report(rows(measure(options.folder, quick=options.quick)), options.rows)


if __name__ == "__main__":
    sys.exit(main())
