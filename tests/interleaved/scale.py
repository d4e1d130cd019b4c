"""`python -m tests.interleaved.scale RANKS ...`: what a save and a load cost each rank, by simulated processes."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import reshard
from planners import Mesh, Shard, TensorLayout, TensorSpec
from tests.interleaved.simulation import Simulation, simulated
from tests.interleaved.trials import scratch
from tests.simulated_hosts import cut

DEADLINE_S = 1800.0


def state(rank: int, size: int) -> dict[str, Any]:
    """Two tensors, of which each rank holds a row."""
    mesh, whole = Mesh({"dp": size}), torch.arange(4.0 * size).reshape(size, 4)
    layouts = {name: TensorLayout(TensorSpec(name, (size, 4), "float32"), mesh, [Shard(0)]) for name in ("a", "b")}
    return {**{name: cut(whole, layout, rank) for name, layout in layouts.items()}, "step": 1}


def counted(folder: Path, size: int) -> list[str]:
    """Rows: of a save, the same again, and a load, what the first rank does, and what each other does at most."""
    path, rows, filled = str(folder / "c"), [], [state(rank, size) for rank in range(size)]

    def save(rank: int) -> Any:
        return reshard.save(filled[rank], path, timeout=DEADLINE_S)

    def load(rank: int) -> Any:
        return reshard.load(filled[rank], path, read_once=False, timeout=DEADLINE_S)

    simulation = Simulation(folder, lambda count: 0)
    with simulated(simulation):
        for name, body in (("save", save), ("save over it", save), ("load", load)):
            simulation.log, began = [], time.process_time()
            job = simulation.start(size, body, name="job", machines=[f"host-{rank // 8}" for rank in range(size)])
            simulation.run()
            bad = [end for end in job.ends if isinstance(end, BaseException)]
            assert not bad, bad[0]
            took = time.process_time() - began
            files: Counter[int] = Counter()
            for line in simulation.log:
                who, kind, *_ = line.split(" ")
                files[int(who.removeprefix("job."))] += kind not in ("store", "clock")
            rest = range(1, size)
            rows.append(
                f"| {size:,} | {name} | {files[0]:,} | {max(files[r] for r in rest):,} | {job.asked[0]:,} | "
                f"{max(job.asked[r] for r in rest):,} | {job.got[0] / 1024:,.0f} KiB | "
                f"{max(job.got[r] for r in rest) / 1024:,.0f} KiB | {took:.1f} s |"
            )
    return rows


def main() -> None:
    """Prints the table."""
    for size in map(int, sys.argv[1:]):
        with scratch() as folder:
            for row in counted(folder, size):
                print(row, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
