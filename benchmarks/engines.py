"""A conversion and a verification by one process, several, Dask and Ray; and what 64 machines would take for 6 TB.

    python -m benchmarks.engines [--size 4096] [--folder /tmp] [--workers 2]

The processor time is that of the driver and of all workers, without their start; workers have imported everything
before. What the driver reads are bytes of `read` calls of its process. Overhead is that of tasks that do nothing. The
simulation deals tasks as long as those that were measured to the first worker that is free; storage and network, which
64 machines would share, are as fast as here for each worker.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import reshard
from reshard.api.tasks import Processes, run_tasks

FILE_BYTES = 128 << 20
NOTHING = 200


@dataclass(frozen=True)
class Nothing:
    """Tasks that do nothing but say how much processor time their process has had."""

    def begin(self) -> Callable[[int], tuple[int, float]]:
        """Imports what conversions import."""
        import os

        reshard.convert, reshard.verify  # noqa: B018  # imported when they are first named
        return lambda number: (os.getpid(), time.process_time())


def processor_s(executor: Executor | None) -> tuple[float, float, float]:
    """Of this process and of all workers, and the seconds that a task that does nothing takes."""
    seen: dict[int, float] = {}
    started = time.perf_counter()

    def on_done(number: int, said: tuple[int, float]) -> None:
        seen[said[0]] = max(said[1], seen.get(said[0], 0.0))

    run_tasks(Nothing(), range(NOTHING), executor, on_done)
    each = (time.perf_counter() - started) / NOTHING
    return time.process_time(), sum(seen.values()) if executor is not None else 0.0, each


def driver_read_bytes() -> int:
    """What this process has read by calls so far."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


def measured(what: Callable[[], Any], executor: Executor | None) -> list[float]:
    """Wall seconds, processor seconds of driver and workers, MiB that the driver has read, and its peak in MiB."""
    mine, theirs, _ = processor_s(executor)
    read, started = driver_read_bytes(), time.perf_counter()
    what()
    wall = time.perf_counter() - started
    read = driver_read_bytes() - read
    after, workers, _ = processor_s(executor)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [wall, after - mine, workers - theirs, read / (1 << 20), peak]


@contextmanager
def engine(name: str, workers: int) -> Iterator[Executor | None]:
    """By its name."""
    if name == "one process":
        yield None
    elif name == "processes":
        with Processes(workers) as executor:
            yield executor
    elif name == "Dask":
        from distributed import Client, LocalCluster

        options = {"processes": True, "dashboard_address": None, "silence_logs": 50}
        with LocalCluster(n_workers=workers, threads_per_worker=1, **options) as cluster, Client(cluster) as client:
            yield client.get_executor()
    else:
        import ray

        from reshard.integrations.ray import RayExecutor

        ray.init(num_cpus=workers, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
        with RayExecutor() as made:
            yield made
        ray.shutdown()


def simulated_s(tasks: list[float], workers: int) -> float:
    """When the last of the tasks ends, each given to the first worker that is free."""
    free = [0.0] * workers
    for seconds in tasks:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def row(engine_name: str, what: str, found: list[float], each: float) -> str:
    """Of the table."""
    wall, driver, workers, read, peak = found
    return (
        f"| {engine_name} | {what} | {wall:.2f} | {driver:.2f} | {workers:.2f} | {read:.1f} | {peak:.0f} | "
        f"{1000 * each:.1f} |"
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=4096, help="MiB")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", default="one process,processes,Dask,Ray")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="reshard-engines-", dir=given.folder))
    try:
        source = folder / "source"
        part = torch.randn(16 << 20, dtype=torch.float32)
        reshard.save({f"w{i}": part + i for i in range(given.size // 64)}, folder / "made")
        reshard.convert(folder / "made", source, max_shard_bytes=FILE_BYTES)
        shutil.rmtree(folder / "made")
        print("| by | what | wall s | driver s | workers s | driver read MiB | driver peak MiB | ms a task |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        a_task = 0.0
        for name in given.engines.split(","):
            with engine(name, given.workers) as executor:
                processor_s(executor)  # workers start
                _, _, each = processor_s(executor)

                def convert(executor: Executor | None = executor) -> None:
                    reshard.convert(source, folder / "to", format="dcp", max_shard_bytes=FILE_BYTES, executor=executor)

                converted = measured(convert, executor)
                print(row(name, "convert", converted, each), flush=True)
                shutil.rmtree(folder / "to")
                found = measured(lambda executor=executor: reshard.verify(source, executor=executor), executor)
                print(row(name, "verify", found, each), flush=True)
            if name == "one process":
                a_task = converted[0] / (given.size * (1 << 20) / FILE_BYTES)
        count = 6 * 10**12 // FILE_BYTES if a_task else 0
        for workers in (1, 64, 64 * 8):
            print(
                f"6 TB in {count} tasks of {a_task:.2f} s by {workers}: {simulated_s([a_task] * count, workers):.0f} s"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    from benchmarks import engines

    engines.main()  # workers find its tasks by the module's name
