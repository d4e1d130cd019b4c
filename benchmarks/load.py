"""Loading compared with DCP: each loads its own checkpoint of the same tensors, in the same processes.

    python -m benchmarks.load [--quick] [--folder /dev/shm] [--case TEXT] [--size 4096] [--unchecked]

Measures both, and a raw copy of the same number of bytes from the same files to the same memory: the seconds until
the last rank is done, and the CPU time of all ranks together, which depends less on other load of the machine. For
columns, the floor is not a raw copy but what cannot be omitted: one read, one hash, and one strided copy of each
byte.

Also reports bytes read per byte needed. The kernel counts the peer's reads. It does not count reads through mappings,
so ours is the larger of the load's report and the kernel's count. If the compiled kernel is installed, there is a row
with it, from the same rounds. For the same layout, there are also rows with `check="during"`, which compare each
block right after it was read into its target.
"""

from __future__ import annotations

import functools
import glob
import mmap
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
from benchmarks.kernels import NAMED, compiled_kernel, is_installed
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, read_chars, run
from reshard.stored.checksums import CheckTime

warnings.filterwarnings("ignore")

ROUNDS = 4
DURING = ", check during"
"""Suffix of rows of loads that compare data in its target."""

CASES: dict[str, tuple[int, tuple[int, ...], list[Placement], tuple[int, ...], list[Placement]]] = {
    # name: (processes, mesh and placements of the save, mesh and placements of the load)
    "rows by 4 to columns by 8": (8, (4,), [Shard(0)], (8,), [Shard(1)]),
    "rows by 4 to columns by 4": (4, (4,), [Shard(0)], (4,), [Shard(1)]),
    "rows by 8, the same layout": (8, (8,), [Shard(0)], (8,), [Shard(0)]),
    "rows by 4 to copies on all": (4, (4,), [Shard(0)], (4,), [Replicate()]),
    "rows by 2 to columns by 2": (2, (2,), [Shard(0)], (2,), [Shard(1)]),
    "rows by 8 to columns by 8": (8, (8,), [Shard(0)], (8,), [Shard(1)]),
    "2 x 2 to 4 x 2, transposed": (8, (2, 2), [Shard(0), Shard(1)], (4, 2), [Shard(1), Shard(0)]),
}


def make(
    shape: tuple[int, ...], placements: list[Placement], count: int, rows: int, seed: int | None
) -> dict[str, Any]:
    """Return `count` square bf16 tensors on the first ranks: random with a seed, otherwise zeros."""
    mesh = init_device_mesh("cpu", shape)
    out = {}
    for i in range(count):
        local = [rows, rows]
        for size, placement in zip(shape, placements):
            if isinstance(placement, Shard):
                local[placement.dim] //= size
        if seed is None:
            data = torch.zeros(local, dtype=torch.bfloat16)
        else:
            torch.manual_seed(seed + i)
            data = torch.randint(0, 2**15, local, dtype=torch.int16).view(torch.bfloat16)
        out[f"layer{i}.weight"] = DTensor.from_local(data, mesh, placements, run_check=False)
    return out


def save(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> None:
    state = make(shape, placements, count, rows, seed=1)
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    reshard.save(state, f"{folder}/reshard")


def load(
    folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int, ours_at: str, check: bool
) -> dict[str, Any]:
    """Return what this rank measured, round by round, and whether both loaded the same."""
    theirs, ours, raw = (make(shape, placements, count, rows, seed=None) for _ in range(3))
    for t in (*theirs.values(), *ours.values(), *raw.values()):
        t.to_local().add_(1)  # allocates the memory before the clock starts
    needed = sum(t.to_local().nbytes for t in ours.values())
    # names of all files, this rank's own first, so that the copies of all ranks cover all files
    files = sorted(glob.glob(f"{folder}/reshard/data-*/*.safetensors"))
    turn = dist.get_rank() % len(files)
    files = files[turn:] + files[:turn]
    rounds: list[dict[str, tuple[float, float]]] = []
    read: dict[str, float] = {}
    ways: dict[str, bool | CheckTime] = {"": check}
    if check and placements == [Shard(0)]:
        ways[DURING] = "during"
    for _ in range(ROUNDS + 1):
        found: dict[str, tuple[float, float]] = {}
        before = read_chars()
        *found["DCP"], _ = measured(lambda: dcp.load(theirs, checkpoint_id=f"{folder}/dcp"))
        read["DCP"] = (read_chars() - before) / needed
        for way, when in ways.items():
            before = read_chars()
            *found[way], done = measured(lambda when=when: reshard.load(ours, f"{folder}/{ours_at}", check=when))
            read[way] = max(done.bytes_read + done.bytes_read_to_check, read_chars() - before) / needed
            if is_installed():
                with compiled_kernel():
                    *found[f"{way}{NAMED}"], _ = measured(
                        lambda when=when: reshard.load(ours, f"{folder}/{ours_at}", check=when)
                    )
        if placements == [Shard(1)]:
            *found["floor"], _ = measured(lambda: work_of_columns(files, needed))
        else:
            *found["floor"], _ = measured(lambda: copy_raw(files, list(raw.values())))
        rounds.append(found)
    pairs = [
        (a.to_local().view(torch.int16), b.to_local().view(torch.int16)) for a, b in zip(theirs.values(), ours.values())
    ]
    # the first round warmed up the page cache and the imports of both
    return {"rounds": rounds[1:], "read": read, "equal": all(torch.equal(a, b) for a, b in pairs)}


def copy_raw(files: list[str], targets: list[DTensor]) -> None:
    """Fill the targets, one after another, with the first bytes of the files."""
    at = 0
    handles = [os.open(file, os.O_RDONLY) for file in files]
    sizes = [os.fstat(handle).st_size for handle in handles]
    for target in targets:
        view = memoryview(target.to_local().view(torch.int16).numpy()).cast("B")
        done = 0
        while done < len(view):
            if at >= sizes[0]:
                handles.append(handles.pop(0))
                sizes.append(sizes.pop(0))
                at = 0
            got = os.preadv(handles[0], [view[done : done + min(sizes[0] - at, len(view) - done)]], at)
            done, at = done + got, at + got
    for handle in handles:
        os.close(handle)


@functools.cache
def place_of_columns(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory that exists before the clock starts, from the second round on, as the targets of a load do."""
    target = np.empty(nbytes, np.uint8)
    target.fill(0)
    return target


def work_of_columns(files: list[str], nbytes: int) -> None:
    """Do what any loader of columns that checks its reads must do: read this rank's share of the bytes once, hash
    them, and copy them once as narrow columns."""
    world, mib = dist.get_world_size(), 1 << 20
    # complete pages: a copy takes three times as long if its ends are a few bytes apart within their pages
    buffer, target = np.frombuffer(mmap.mmap(-1, mib), np.uint8), place_of_columns(64 * mib)
    rows = buffer.reshape(-1, 1024 * world) if mib % (1024 * world) == 0 else buffer.reshape(-1, 1024)
    columns = [rows[:, start : start + 1024] for start in range(0, rows.shape[1], 1024)]
    done, shape = 0, (len(rows), 1024)
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        for at in range(0, min(os.fstat(handle).st_size, nbytes - done), mib):
            done += os.preadv(handle, [buffer], at)
            xxhash.xxh3_64_intdigest(buffer)
            for i, column in enumerate(columns):
                start = (done + i * column.size) % (63 * mib)
                np.copyto(target[start : start + column.size].reshape(shape), column)
        os.close(handle)


def rows(names: list[str], size: tuple[int, int], folder: str, ours_at: str, check: bool) -> Iterator[Row]:
    """Yield the rows of these cases."""
    for name in names:
        world, saved_shape, saved, wanted_shape, wanted = CASES[name]
        here = tempfile.mkdtemp(dir=folder)
        try:
            run(save, torch.Size(saved_shape).numel(), here, saved_shape, saved, *size)
            found = run(load, world, here, wanted_shape, wanted, *size, ours_at, check)
        finally:
            shutil.rmtree(here)
        assert all(rank["equal"] for rank in found), "the two loaded different values"
        for unit, one in over_ranks([rank["rounds"] for rank in found]).items():
            for way in [way for way in one if way not in ("DCP", "floor")]:
                yield Row("load", f"{name}{way}", unit, one[way], {"DCP": one["DCP"]}, one["floor"])
        ours, theirs = (sum(rank["read"][who] for rank in found) / len(found) for who in ("", "DCP"))
        yield Row("load", name, "bytes per byte", (ours,), {"DCP": (theirs,)})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--case", help="only cases whose name holds this text")
    parser.add_argument("--same-checkpoint", action="store_true", help="both load the checkpoint that torch wrote")
    parser.add_argument("--size", type=int, default=4096, help="rows of each of the 24 square tensors (default: 4096)")
    parser.add_argument("--unchecked", action="store_true", help="we compare no checksums either")
    options = parser.parse_args()
    names = [name for name in CASES if (options.case or "") in name]
    ours_at = "dcp" if options.same_checkpoint else "reshard"
    chosen = names[:5] if options.quick else names
    return report(rows(chosen, (24, options.size), options.folder, ours_at, not options.unchecked), options.rows)


if __name__ == "__main__":
    sys.exit(main())
