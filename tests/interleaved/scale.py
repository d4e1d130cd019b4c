"""`python -m tests.interleaved.scale RANKS ...`: what a save and a load cost each rank, by simulated processes."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import reshard
from planners import Mesh, Shard, TensorLayout, TensorSpec
from planners.plans.save import SavePlan
from reshard.api import save
from reshard.native import manifest, reader
from tests.interleaved.simulation import Simulation, simulated
from tests.interleaved.trials import scratch
from tests.simulated_hosts import cut

DEADLINE_S = 1800.0
STORE_ANSWERS_S = 2e-5
"""Of the simulated clock, each operation takes so long, as if the store answered 50,000 questions a second."""


def state(rank: int, size: int) -> dict[str, Any]:
    """Two tensors, of which each rank holds a row."""
    mesh, whole = Mesh({"dp": size}), torch.arange(4.0 * size).reshape(size, 4)
    layouts = {name: TensorLayout(TensorSpec(name, (size, 4), "float32"), mesh, [Shard(0)]) for name in ("a", "b")}
    return {**{name: cut(whole, layout, rank) for name, layout in layouts.items()}, "step": 1}


@contextlib.contextmanager
def common(simulation: Simulation) -> Iterator[None]:
    """What is large and equal on every rank is in memory once. Each rank is charged for the time that it took to make:
    so the memory does not grow with the square of the ranks, and what is measured is the same."""
    made: dict[Any, tuple[Any, float]] = {}

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in made:
            begun = time.process_time()
            made[key] = make(), time.process_time() - begun
        elif simulation.process is not None:
            simulation.process.spent_s += made[key][1]
        return made[key][0]

    def planned(layout: Any, divide_above_bytes: int) -> SavePlan:
        def make() -> SavePlan:
            plan = SavePlan(layout, divide_above_bytes)
            for assigned in plan.assignments:
                assert assigned._by_rank  # which each rank asks for
            return plan

        return once(("plan", divide_above_bytes, *layout.items()), make)  # type: ignore[no-any-return]

    class Table(manifest.FileTable):
        def __init__(self, storage: Any, table: Any, linked: Any = ()) -> None:
            whole = once(("table", table.name), lambda: manifest.FileTable(storage, table, linked))
            vars(self).update(vars(whole) | {"_storage": storage, "_pages": {}})

    with (
        mock.patch.object(save, "SavePlan", planned),
        mock.patch.object(reader, "SavePlan", planned),
        mock.patch.object(reader, "FileTable", Table),
    ):
        yield


@dataclass(frozen=True)
class Cost:
    """What a call cost the first rank, and what each other rank at most."""

    size: int
    call: str
    files: tuple[int, int]
    """Operations on files and folders."""
    store: tuple[int, int]
    """Questions."""
    store_kib: tuple[float, float]
    """That came from the store."""
    spent_ms: tuple[float, float]
    """Processor time."""
    total_s: float
    """Of all ranks."""

    def __str__(self) -> str:
        """A row of the table in tests/faults.md."""
        pairs = [f"{first:,} / {other:,}" for first, other in (self.files, self.store)]
        pairs += [f"{first:,.0f} / {other:,.0f}" for first, other in (self.store_kib, self.spent_ms)]
        return f"| {self.size:,} | {self.call} | {' | '.join(pairs)} | {self.total_s:.1f} s |"


def counted(folder: Path, size: int) -> Iterator[Cost]:
    """Of a save, the same again, and a load."""
    path, filled = str(folder / "c"), [state(rank, size) for rank in range(size)]

    def save(rank: int) -> Any:
        return reshard.save(filled[rank], path, timeout=DEADLINE_S)

    def load(rank: int) -> Any:
        return reshard.load(filled[rank], path, read_once=False, timeout=DEADLINE_S)

    simulation = Simulation(folder, None, op_s=STORE_ANSWERS_S)
    with simulated(simulation), common(simulation):
        for name, body in (("save", save), ("save over it", save), ("load", load)):
            simulation.log = []
            job = simulation.start(size, body, name="job", machines=[f"host-{rank // 8}" for rank in range(size)])
            simulation.run()
            bad = [end for end in job.ends if isinstance(end, BaseException)]
            assert not bad, bad[0]
            files: Counter[int] = Counter()
            for line in simulation.log:
                who, kind, *_ = line.split(" ")
                files[int(who.removeprefix("job."))] += kind not in ("store", "clock")
            spent = [process.spent_s for process in job.processes]
            of = lambda row: (row[0], max(row[rank] for rank in range(1, size)))  # noqa: E731  of the first and another
            got_kib = {rank: job.got[rank] / 1024 for rank in range(size)}
            spent_ms = [1000 * one for one in spent]
            yield Cost(size, name, of(files), of(job.asked), of(got_kib), of(spent_ms), sum(spent))


def main() -> None:
    """Prints the table."""
    for size in map(int, sys.argv[1:]):
        with scratch() as folder:
            for row in counted(folder, size):
                print(row, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
