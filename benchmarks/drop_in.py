"""`reshard.dcp` compared with DCP: the same calls, with the same planner objects, on both sides.

    python -m benchmarks.drop_in [--quick] [--folder /dev/shm]

Every rank holds the nested state of a training job: parameters sharded along dim 0, two moments of each, counters,
and plain values. Prints the CPU seconds of all ranks together, and the seconds until the last rank is done, of a save
and a load with torch's `DefaultSavePlanner` and `DefaultLoadPlanner`, of a save whose plan torch has cached, and of
background saves by a thread and by a process (until the call returns, and until everything is written).
"""

from __future__ import annotations

import gc
import glob
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard.dcp as ours
from benchmarks.page import Row, arguments, report
from benchmarks.processes import over_ranks, run

warnings.filterwarnings("ignore")

ROUNDS = 3

CASES = {
    # name: (ranks, parameters, rows of each, columns of each)
    "many small tensors": (2, 200, 64, 16),
    "few large tensors": (2, 8, 2048, 2048),
}

Measured = dict[str, list[tuple[float, float]]]
"""By call: (seconds, CPU seconds) of each round."""


def state_of(count: int, rows: int, columns: int, seed: int) -> dict[str, Any]:
    """Return parameters and both moments of each, as AdamW has them, all sharded along dim 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())

    def tensor() -> DTensor:
        local = torch.rand(rows // mesh.size(), columns, generator=generator)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    names = [f"layers.{i}.weight" for i in range(count)]
    moments = {name: {"exp_avg": tensor(), "exp_avg_sq": tensor(), "step": torch.tensor(1.0)} for name in names}
    groups = [{"params": names, "lr": 0.1, "betas": (0.9, 0.95)}]
    return {"model": {name: tensor() for name in names}, "optim": {"state": moments, "param_groups": groups}, "n": seed}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its live children, which save for it."""
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for path in glob.glob("/proc/self/task/*/children"):
        with suppress(FileNotFoundError):  # the thread or child has just ended
            for child in Path(path).read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / tick
    return total


def timed(out: Measured, name: str, work: Callable[[], Any], *, is_within: bool = False) -> Any:
    """Run `work` on all ranks together, and record its times. `is_within`: another call is being timed."""
    if not is_within:  # a collection of all objects takes longer than a save: it must not hit one side by chance
        gc.collect()
    dist.barrier()
    begin, used = time.perf_counter(), cpu_seconds()
    value = work()
    out.setdefault(name, []).append((time.perf_counter() - begin, cpu_seconds() - used))
    dist.barrier()
    return value


def measure(folder: str, count: int, rows: int, columns: int) -> dict[str, Measured]:
    """Return what one rank measured, by contestant."""
    sides = {"torch": theirs, "ours": ours}
    out: dict[str, Measured] = {who: {} for who in sides}
    jobs = {who: _Job(dcp, f"{folder}/{who}", (count, rows, columns), out[who]) for who, dcp in sides.items()}
    for _ in range(ROUNDS + 1):
        for job in jobs.values():
            job.round()
    # the first round warmed up the imports of both
    return {who: {name: rounds[1:] for name, rounds in of.items()} for who, of in out.items()}


class _Job:
    """A program that saves and loads by the given `dcp` module."""

    def __init__(self, dcp: Any, folder: str, sizes: tuple[int, int, int], out: Measured) -> None:
        self.dcp, self.folder, self.out = dcp, folder, out
        self.state, self.target = state_of(*sizes, seed=1), state_of(*sizes, seed=2)
        self.group = dist.new_group(backend="gloo")
        self.cached = DefaultSavePlanner(enable_plan_caching=True)

    def round(self) -> None:
        self.clear()
        timed(self.out, "save", lambda: self.save(DefaultSavePlanner()))
        timed(self.out, "load", self.load)
        self.check()
        self.clear()
        timed(self.out, "save, plan cached", lambda: self.save(self.cached))
        for kind in ("thread", "process"):
            self.clear()
            timed(self.out, f"async by {kind}, all", lambda kind=kind: self.save_behind(kind).result())
        self.clear()

    def save(self, planner: DefaultSavePlanner) -> None:
        self.dcp.save(self.state, checkpoint_id=self.folder, planner=planner)

    def load(self) -> None:
        self.dcp.load(self.target, checkpoint_id=self.folder, planner=DefaultLoadPlanner())

    def save_behind(self, kind: str) -> Any:
        options = {
            "checkpoint_id": self.folder,
            "planner": DefaultSavePlanner(),
            "process_group": self.group,
            "async_checkpointer_type": self.dcp.state_dict_saver.AsyncCheckpointerType(kind),
        }
        call = f"async by {kind}, the call"
        return timed(self.out, call, lambda: self.dcp.async_save(self.state, **options), is_within=True)

    def check(self) -> None:
        for name, tensor in self.state["model"].items():
            if not torch.equal(self.target["model"][name].to_local(), tensor.to_local()):
                raise AssertionError(f"{name} came back wrong")
            self.target["model"][name].to_local().zero_()

    def clear(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()


def rows(names: list[str], folder: str) -> Iterator[Row]:
    """Yield the rows of these cases: each call by CPU time and by seconds."""
    for name in names:
        world, count, size, columns = CASES[name]
        here = tempfile.mkdtemp(dir=folder)
        try:
            found = run(measure, world, here, count, size, columns)
        finally:
            shutil.rmtree(here)
        for what in found[0]["ours"]:
            ranks = [[{who: rank[who][what][i] for who in rank} for i in range(ROUNDS)] for rank in found]
            for unit, one in over_ranks(ranks).items():
                yield Row("drop_in", f"{name}, {what}", unit, one["ours"], {"torch": one["torch"]})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    options = parser.parse_args()
    return report(rows(list(CASES)[:1] if options.quick else list(CASES), options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
