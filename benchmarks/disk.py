"""Saving to a local disk, compared with DCP: `python -m benchmarks.disk [--folder DIR]`.

Each saves the same tensors in its own format until all bytes are durable. The floor is the disk itself: the same
number of processes write the same number of bytes from aligned memory, bypassing the page cache (`O_DIRECT`), 8 MiB
at a time, and sync. What earlier rounds left in the cache is written before the clock starts. The folder must be on a
local disk.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

import reshard
from benchmarks.kernels import compiled_kernel, is_installed
from benchmarks.load import make
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run

warnings.filterwarnings("ignore")

ROUNDS = 5
SIZE = (24, 4096)
WRITE_BYTES = 8 << 20
CASES = {"one rank": 1, "rows by 4": 4}


def save(folder: str, world: int, count: int, rows: int) -> list[dict[str, tuple[float, ...]]]:
    """Return what this rank measured in each round, by contestant."""
    state = make((world,), [Shard(0)], count, rows, seed=1)

    def timed(work: Callable[[str], Any]) -> tuple[float, ...]:
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/x", ignore_errors=True)
            os.sync()
        dist.barrier()
        *found, _ = measured(lambda: work(f"{folder}/x"))
        dist.barrier()
        return tuple(found)

    def ours(path: str) -> None:
        if is_installed():
            with compiled_kernel():
                reshard.save(state, path)
        else:
            reshard.save(state, path)

    found = []
    for _ in range(ROUNDS + 1):
        found.append(
            {
                "ours": timed(ours),
                "DCP": timed(lambda path: dcp.save(state, checkpoint_id=path)),
                "floor": timed(lambda path: write_raw(path, list(state.values()))),
            }
        )
    return found[1:]  # the first round warmed up the imports


def write_raw(folder: str, tensors: list[DTensor]) -> None:
    """Write the same number of bytes as this rank holds, durably, bypassing the page cache."""
    os.makedirs(folder, exist_ok=True)
    left = sum(tensor.to_local().nbytes for tensor in tensors)
    buffer = mmap.mmap(-1, WRITE_BYTES)
    buffer[:] = os.urandom(4096) * (WRITE_BYTES // 4096)
    file = os.open(f"{folder}/{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    while left > 0:
        left -= os.write(file, buffer)
    os.fsync(file)
    os.close(file)


def rows(names: list[str], size: tuple[int, int], folder: str) -> Iterator[Row]:
    """Yield the rows of these cases."""
    for name in names:
        here = tempfile.mkdtemp(dir=folder)
        try:
            found = run(save, CASES[name], here, CASES[name], *size)
        finally:
            shutil.rmtree(here)
        for unit, one in over_ranks(found).items():
            yield Row("disk", name, unit, one["ours"], {"DCP": one["DCP"]}, one["floor"])


def is_on_a_disk(folder: str) -> bool:
    """Return True if the folder is on a block device of this machine."""
    device = os.stat(folder).st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/var/tmp", help="where the checkpoints go: a folder on a disk")
    options = parser.parse_args()
    if not is_on_a_disk(options.folder):
        print(f"{options.folder} is on no disk of this machine: give another --folder")
        return 0
    torch.set_num_threads(1)
    return report(rows(list(CASES), (3, 4096) if options.quick else SIZE, options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
