"""Recovery from hosts' memory, compared with a load: `python -m benchmarks.elastic [--quick] [--folder F]`.

Four gloo processes on two simulated hosts keep a state that is sharded by rows. Then the memory of one host is lost,
and four new processes, on the remaining host and on a new one, want columns. `keep` and `recover` are compared with
`reshard.save` and `reshard.load` of the same state in a folder. The floor of a host's memory is the planned size. On
one machine, the network is memory, and the folder is in the page cache: real storage and real networks are slower.

Then, 2 and 4 processes on two hosts keep in the background. The time that they wait in `async_save` is compared with
`save`. The floor is one copy of the same bytes, into existing memory. A training loop (a product of matrices, and a
sum over all ranks) runs beside copies at a bounded pace. The peer has no bound, and the floor is the loop alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from benchmarks.page import Row, arguments, report
from benchmarks.processes import run, timed

RANKS, TENSORS, STEPS = 4, 8, 80


def cut(rows: int, dim: int, value: float) -> dict[str, Any]:
    """Return square matrices, sharded along a dim."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shape = (rows // RANKS, rows) if dim == 0 else (rows, rows // RANKS)
    local = {i: torch.full(shape, float(value + dist.get_rank() * (dim == 0))) for i in range(TENSORS)}
    return {f"layers.{i}": DTensor.from_local(local[i], mesh, [Shard(dim)], run_check=False) for i in local}


def keep(memory: str, stored: str, rows: int, repeats: int) -> list[tuple[float, float, int, int]]:
    """Return the seconds of `keep` and `save`, and the planned and actual bytes on a host."""
    rank, found = dist.get_rank(), []
    tier = reshard.elastic.Tier(memory, host="ab"[rank // 2])
    for step in range(repeats):
        state = cut(rows, 0, step)
        ours, kept = timed(lambda state=state, step=step: tier.save(state, step))
        theirs, _ = timed(lambda state=state: reshard.save(state, stored))
        there = sum(path.stat().st_size for path in Path(memory, "ab"[rank // 2]).rglob("*") if path.is_file())
        found.append((ours, theirs, kept.bytes_by_host["ab"[rank // 2]], there))
    return found


def recover(memory: str, stored: str, rows: int, repeats: int) -> list[tuple[float, float]]:
    """Return the seconds of `recover` and `load`. Checks both results."""
    rank, found = dist.get_rank(), []
    tier = reshard.elastic.Tier(memory, host="an"[rank // 2])
    for _ in range(repeats):
        ours, theirs = cut(rows, 1, -1.0), cut(rows, 1, -1.0)
        mine, _ = timed(lambda state=ours: tier.restore(state))
        its, _ = timed(lambda state=theirs: reshard.load(state, stored))
        assert all(torch.equal(ours[key].to_local(), theirs[key].to_local()) for key in ours)
        assert bool((ours["layers.0"].to_local() >= 0).all())
        found.append((mine, its))
    return found


def of_rows(nbytes: int) -> dict[str, Any]:
    """Return rows of `nbytes` on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(nbytes // TENSORS // 4096, 1024)
    return {f"layers.{i}": DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False) for i in range(TENSORS)}


def of_two_hosts(memory: str) -> Any:
    return reshard.elastic.Tier(memory, host="ab"[dist.get_rank() * 2 // dist.get_world_size()])


def waits(memory: str, nbytes: int, repeats: int) -> list[tuple[float, float, float]]:
    """Return the seconds in `async_save`, in `save`, and of one copy, after a warm-up round."""
    tier, state, found = of_two_hosts(memory), of_rows(nbytes), []
    rooms = [torch.ones_like(tensor.to_local()) for tensor in state.values()]
    for step in range(repeats + 1):
        copy, _ = timed(lambda: [room.copy_(t.to_local()) for room, t in zip(rooms, state.values(), strict=True)])
        ours, pending = timed(lambda step=step: tier.async_save(state, 2 * step))
        pending.result()
        whole, _ = timed(lambda step=step: tier.save(state, 2 * step + 1))
        found.append((ours, whole, copy))
    return found[1:]


def loop() -> tuple[float, float]:
    """Return the seconds of a training loop, and of its slowest step."""
    weights, gradients, steps = torch.ones(384, 384), torch.ones(1 << 18), []
    for _ in range(STEPS):
        took, _ = timed(lambda: (weights @ weights, dist.all_reduce(gradients)))
        steps.append(took)
    return sum(steps), max(steps)


def beside(memory: str, nbytes: int, repeats: int) -> list[tuple[tuple[float, float], ...]]:
    """Return results of loops beside bounded and unbounded copies, and of one alone."""
    tier, state, found = of_two_hosts(memory), of_rows(nbytes), []
    for step in range(repeats + 1):
        one = []
        for number, bound in enumerate((2 * nbytes, 1e15)):  # for 1 s, or for as long as it takes
            pending = tier.async_save(state, 2 * step + number, bytes_per_s=bound)
            one.append(loop())
            pending.result()
        found.append((*one, loop()))
    return found[1:]


def waits_and_loops(memory: str, nbytes: int, repeats: int) -> tuple[list[Any], list[Any]]:
    return waits(memory, nbytes, repeats), beside(memory, nbytes, repeats) if dist.get_world_size() == 2 else []


def background(megabytes: int, repeats: int) -> Iterator[Row]:
    """Yield rows of keeping in the background, with a core for each rank's loop."""
    shm, nbytes = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None, megabytes << 20
    for ranks in (2, 4):
        name = f"{ranks} ranks, {megabytes} MiB each"
        with tempfile.TemporaryDirectory(dir=shm) as memory:
            waited, rounds = run(waits_and_loops, ranks, memory, nbytes, repeats)[0]
        ours, whole, copy = zip(*waited, strict=True)
        yield Row("elastic", f"{name}: wait in async_save", "s", ours, {"save": whole}, floor=copy)
        for i, what in enumerate((f"{STEPS} steps beside it", "the slowest step") if rounds else ()):
            bounded, free, alone = ([one[i] for one in loops] for loops in zip(*rounds, strict=True))
            yield Row("elastic", f"{name}: {what}", "s", (*bounded,), {"no bound": (*free,)}, floor=(*alone,))


def rows(size: int, repeats: int, folder: str | None) -> Iterator[Row]:
    """Yield all rows. `size`: rows of the matrices; `folder`: location of the checkpoint."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as memory, tempfile.TemporaryDirectory(dir=folder) as stored:
        keeps, saves, planned, there = zip(*run(keep, RANKS, memory, stored, size, repeats)[0], strict=True)
        shutil.rmtree(Path(memory) / "b")
        recovers, loads = zip(*run(recover, RANKS, memory, stored, size, repeats)[0], strict=True)
    name = f"{TENSORS * size * size * 4 / 1e6:.0f} MB"
    yield Row("elastic", f"keep {name}", "s", keeps, {"save": saves})
    yield Row("elastic", f"recover {name}", "s", recovers, {"load": loads})
    megabytes = [tuple(n / 1e6 for n in column) for column in (there, planned)]
    yield Row("elastic", "memory of a host", "MB", megabytes[0], floor=megabytes[1])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default=None, help="where the checkpoint lies; default: the temporary folder")
    options = parser.parse_args()
    size, repeats = (1024, 3) if options.quick else (4096, 5)
    kept = chain(rows(size, repeats, options.folder), background(32 if options.quick else 128, repeats))
    return report(kept, options.rows)


if __name__ == "__main__":
    sys.exit(main())
