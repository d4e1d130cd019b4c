"""A conversion and a verification by one process, two, Dask and Ray; and what 64 machines would take for 6 TB.

    python -m benchmarks.engines [--quick] [--folder /dev/shm]

Our format to DCP's, in files of 128 MiB, in memory that looks like a disk; then the source is verified. Each engine has
a driver of its own, in a new process, and two workers of one thread each, which have done the same with a little
checkpoint before; and it gets a quarter of the size first. CPU time is that of the driver and of its workers,
without that of Dask's nannies and Ray's daemons. Memory is a process's own, without files that are mapped: the peak
above what it had at its beginning. What the driver reads are bytes of its calls for files and pipes, and all that goes
over the machine's loopback meanwhile: the most that it can have been. The simulation gives tasks as long as those that
one process took, in their order, to the first worker that is free, by a driver that needs for each as long as an engine
for a task that does nothing. Storage and network, which machines would share, are as fast as here for each worker.
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
"""What each engine needs."""
WORKERS = 2
LITTLE = "little"
"""A checkpoint to warm up with."""
FILE_BYTES = 128 << 20
NOTHING = 200
MACHINES = (64, 512)
"""Workers of the simulation: one on each of 64 machines, and eight."""

Figures = dict[str, float]
"""By what was measured and its unit, with a bar between them."""


class Watch(threading.Thread):
    """Looks every few milliseconds how much memory this process has of its own: files that are mapped do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    @staticmethod
    def now_mb() -> float:
        """The kernel keeps no peak of it."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.peak_mb = max(self.peak_mb, self.now_mb())
            time.sleep(0.005)


_watch = Watch()


@dataclass(frozen=True)
class Said:
    """By a process, of itself."""

    pid: int
    processor_s: float
    now_mb: float
    peak_mb: float
    """Since it was last asked."""

    @classmethod
    def here(cls) -> Said:
        """Of this process; its peak begins anew."""
        if not _watch.is_alive():
            _watch.start()
        now_mb = Watch.now_mb()
        peak_mb, _watch.peak_mb = max(now_mb, _watch.peak_mb), now_mb
        return cls(os.getpid(), time.process_time(), now_mb, peak_mb)


@dataclass(frozen=True)
class Nothing:
    """Tasks that do nothing but say how their process is. No two are equal, so that no engine knows an answer."""

    made_ns: int = field(default_factory=time.monotonic_ns)

    def begin(self) -> Callable[[int], Said]:
        """Imports what conversions and verifications import."""
        reshard.convert, reshard.verify  # noqa: B018  # imported when they are first named
        return lambda number: Said.here()


def asked(executor: Executor | None, count: int) -> dict[int, Said]:
    """What so many workers say, by their numbers: the last of each, with the highest peak."""
    last: dict[int, Said] = {}

    def on_done(number: int, said: Said) -> None:
        peak = max(said.peak_mb, last[said.pid].peak_mb if said.pid in last else 0.0)
        last[said.pid] = replace(said, peak_mb=peak)

    while len(last) < count:
        run_tasks(Nothing(), range(NOTHING), executor, on_done)
    return last


def read_bytes() -> int:
    """What this process has read by calls, and what has come over loopback for whomever."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    loopback = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(rows["rchar"]) + sum(int(line.split(":")[1].split()[0]) for line in loopback)


def measured(what: str, call: Callable[[], object], executor: Executor | None, idle: dict[int, Said]) -> Figures:
    """Of a call; `idle` is what driver and workers said at their beginning."""
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
    """By its name."""
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
    """All that is measured of one engine, on sources of these sizes, and what it took for each task: one process for
    those of the last conversion, an engine for some that do nothing."""
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

        idle = asked(executor, 0 if executor is None else WORKERS)  # they start
        for call in (partial(convert, file_bytes=1 << 16), verify):  # and import what these need
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
    """`drive` in a new process; None where the engine is not installed."""
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
    """When the last of the tasks ends, each given to the first worker that is free, one after another."""
    free, now = [0.0] * workers, 0.0
    for seconds in tasks_s:
        now = max(now + each_s, free[0])
        heapq.heapreplace(free, now + seconds)
    return max(free)


def save_all(folder: Path, *, quick: bool) -> list[str]:
    """Checkpoints of tensors of 64 MiB, and a little one; the names of the former, which say their sizes."""
    reshard.save({f"w{i}": torch.ones(1 << 14) for i in range(32)}, folder / LITTLE)
    names, part = [], torch.randn(16 << 20)
    for count in (1, 4) if quick else (16, 64):
        names.append(f"{count * (64 << 20) / 1e9:.2g} GB")
        reshard.save({f"w{i}": part + i for i in range(count)}, folder / names[-1])
    return names


def measure(parent: str | None, *, quick: bool) -> dict[str, dict[str, Any] | None]:
    """What `drive` found for each engine, by its name."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-engines-", dir=parent))
    try:
        sizes = save_all(folder, quick=quick)
        return {name: driven(name, folder, sizes) for name in MODULES}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rows(found: dict[str, Any]) -> Iterator[Row]:
    """Ours is one process, and peers are the engines."""
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
