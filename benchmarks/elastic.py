"""Recovery from the memory of hosts, beside a load: `python -m benchmarks.elastic [--quick] [--folder F]`.

Four gloo processes on two simulated hosts keep a state cut by rows; then one host's memory is lost, and four new
processes, on the host that is left and on a new one, want columns. Prints the seconds of `recover` and of
`reshard.load` of the same state from a folder, and of `keep` and `reshard.save`, in turns, and the memory of a host
beside what was planned. On one machine the network is memory, and the folder is in the page cache: a real storage is
slower, and so is a real network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
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
        ours, report = timed(lambda state=state, step=step: tier.keep(state, step))
        theirs, _ = timed(lambda state=state: reshard.save(state, stored))
        there = sum(path.stat().st_size for path in Path(memory, "ab"[rank // 2]).rglob("*") if path.is_file())
        found.append((ours, theirs, report.bytes_by_host["ab"[rank // 2]], there))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state, fewer repeats")
    parser.add_argument("--folder", default=None, help="where the checkpoint lies; default: the temporary folder")
    options = parser.parse_args()
    rows, repeats = (1024, 3) if options.quick else (4096, 5)
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as memory, tempfile.TemporaryDirectory(dir=options.folder) as stored:
        kept = run(keep, RANKS, memory, stored, rows, repeats)[0]
        shutil.rmtree(Path(memory) / "b")
        back = run(recover, RANKS, memory, stored, rows, repeats)[0]
    print(f"{TENSORS * rows * rows * 4 / 1e6:.0f} MB on {RANKS} ranks, 2 hosts, 1 copy; medians of {repeats}")
    for ours, theirs, rows_of in (("keep", "save", kept), ("recover", "load", back)):
        a, b = (statistics.median(row[i] for row in rows_of) for i in (0, 1))
        print(f"{ours:8}{a:7.3f} s   {theirs:5}{b:7.3f} s   ratio {b / a:.2f}")
    print(f"memory of a host: planned {kept[-1][2]} bytes, there {kept[-1][3]}: {kept[-1][3] / kept[-1][2]:.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
