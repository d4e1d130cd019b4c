"""Recovery from the memory of hosts, beside a load: `python -m benchmarks.elastic [--quick] [--folder F]`.

Four gloo processes on two simulated hosts keep a state cut by rows; then one host's memory is lost, and four new
processes, on the host that is left and on a new one, want columns. Beside `keep` and `recover` are `reshard.save` and
`reshard.load` of the same state in a folder; the floor of a host's memory is what was planned. On one machine the
network is memory, and the folder is in the page cache: a real storage is slower, and so is a real network.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from benchmarks.page import Row, arguments, report
from benchmarks.processes import run, timed

RANKS, TENSORS = 4, 8


def cut(rows: int, dim: int, value: float) -> dict[str, Any]:
    """Square matrices, cut along a dim."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shape = (rows // RANKS, rows) if dim == 0 else (rows, rows // RANKS)
    local = {i: torch.full(shape, float(value + dist.get_rank() * (dim == 0))) for i in range(TENSORS)}
    return {f"layers.{i}": DTensor.from_local(local[i], mesh, [Shard(dim)], run_check=False) for i in local}


def keep(memory: str, stored: str, rows: int, repeats: int) -> list[tuple[float, float, int, int]]:
    """Seconds of `keep` and `save`; bytes planned for a host, and there."""
    rank, found = dist.get_rank(), []
    tier = reshard.elastic.Tier(memory, host="ab"[rank // 2])
    for step in range(repeats):
        state = cut(rows, 0, step)
        ours, kept = timed(lambda state=state, step=step: tier.keep(state, step))
        theirs, _ = timed(lambda state=state: reshard.save(state, stored))
        there = sum(path.stat().st_size for path in Path(memory, "ab"[rank // 2]).rglob("*") if path.is_file())
        found.append((ours, theirs, kept.bytes_by_host["ab"[rank // 2]], there))
    return found


def recover(memory: str, stored: str, rows: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of `recover` and `load`; both must be right."""
    rank, found = dist.get_rank(), []
    tier = reshard.elastic.Tier(memory, host="an"[rank // 2])
    for _ in range(repeats):
        ours, theirs = cut(rows, 1, -1.0), cut(rows, 1, -1.0)
        mine, _ = timed(lambda state=ours: tier.recover(state))
        its, _ = timed(lambda state=theirs: reshard.load(state, stored))
        assert all(torch.equal(ours[key].to_local(), theirs[key].to_local()) for key in ours)
        assert bool((ours["layers.0"].to_local() >= 0).all())
        found.append((mine, its))
    return found


def rows(size: int, repeats: int, folder: str | None) -> Iterator[Row]:
    """`size`: rows of the matrices; `folder`: where the checkpoint lies."""
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
    return report(rows(size, repeats, options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
