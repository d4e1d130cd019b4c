"""Loading against torch.distributed.checkpoint: each from its own checkpoint of the same tensors, in one process tree.

    python -m benchmarks.load [--quick] [--folder /dev/shm] [--same-checkpoint]

Prints the ratio of wall-clock times (above 1: we are faster) and the bytes read for each byte needed. What the peer
reads is counted by the kernel; we read local files through mappings, which the kernel does not count, so what is
printed for us is the bytes that were copied out of them, plus what the kernel counted. With `--same-checkpoint` both
load the one that torch wrote.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
from benchmarks.processes import read_chars, run, timed

warnings.filterwarnings("ignore")

CASES: dict[str, tuple[int, tuple[int, ...], list[Placement], tuple[int, ...], list[Placement]]] = {
    # name: (processes, mesh and placements of the save, mesh and placements of the load)
    "rows by 4 -> columns by 8": (8, (4,), [Shard(0)], (8,), [Shard(1)]),
    "rows by 2 -> columns by 2": (2, (2,), [Shard(0)], (2,), [Shard(1)]),
    "rows by 4 -> columns by 4": (4, (4,), [Shard(0)], (4,), [Shard(1)]),
    "rows by 8 -> columns by 8": (8, (8,), [Shard(0)], (8,), [Shard(1)]),
    "rows by 8, the same layout": (8, (8,), [Shard(0)], (8,), [Shard(0)]),
    "2 x 2 -> 4 x 2, transposed": (8, (2, 2), [Shard(0), Shard(1)], (4, 2), [Shard(1), Shard(0)]),
    "rows by 4 -> copies on all": (4, (4,), [Shard(0)], (4,), [Replicate()]),
}


def make(
    shape: tuple[int, ...], placements: list[Placement], count: int, rows: int, seed: int | None
) -> dict[str, Any]:
    """`count` square bf16 tensors placed over the first ranks; random if there is a seed, else zeros."""
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
    folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int, ours_at: str
) -> dict[str, Any]:
    theirs = make(shape, placements, count, rows, seed=None)
    ours = make(shape, placements, count, rows, seed=None)
    needed = sum(t.to_local().nbytes for t in ours.values())
    out: dict[str, Any] = {"needed": needed}
    for t in (*theirs.values(), *ours.values()):
        t.to_local().add_(1)  # the memory is there before the clock starts
    for round in range(2):  # the first round warms the page cache and the imports of both
        before = read_chars()
        seconds, _ = timed(lambda: dcp.load(theirs, checkpoint_id=f"{folder}/dcp"))
        out["dcp_s"], out["dcp_read"] = seconds, read_chars() - before
        before = read_chars()
        seconds, report = timed(lambda: reshard.load(ours, f"{folder}/{ours_at}"))
        out["our_s"], out["our_read"] = seconds, report.bytes_read + read_chars() - before
        out["phases"] = dict(report.seconds)
        del round
    pairs = [
        (a.to_local().view(torch.int16), b.to_local().view(torch.int16)) for a, b in zip(theirs.values(), ours.values())
    ]
    out["equal"] = all(torch.equal(a, b) for a, b in pairs)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case only, with an eighth of the bytes")
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--case", help="only cases whose name holds this text")
    parser.add_argument("--same-checkpoint", action="store_true", help="both load the checkpoint that torch wrote")
    options = parser.parse_args()
    count, rows = (12, 2048) if options.quick else (24, 4096)
    names = [name for name in CASES if options.case is None or options.case in name]
    print(f"{count} bf16 tensors of {rows} x {rows}, {count * rows * rows * 2 / 1e9:.2f} GB, in {options.folder}")
    print(f"{'case':30} {'DCP s':>8} {'ours s':>8} {'ratio':>7} {'DCP B/B':>8} {'our B/B':>8}")
    for name in names[:1] if options.quick else names:
        world, saved_shape, saved, wanted_shape, wanted = CASES[name]
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            savers = torch.Size(saved_shape).numel()
            run(save, savers, folder, saved_shape, saved, count, rows)
            ours_at = "dcp" if options.same_checkpoint else "reshard"
            rows_out = run(load, world, folder, wanted_shape, wanted, count, rows, ours_at)
        finally:
            shutil.rmtree(folder)
        assert all(row["equal"] for row in rows_out), "the two loaded different values"
        dcp_s, our_s = max(r["dcp_s"] for r in rows_out), max(r["our_s"] for r in rows_out)
        needed = sum(r["needed"] for r in rows_out)
        theirs, ours = (sum(r[k] for r in rows_out) / needed for k in ("dcp_read", "our_read"))
        print(
            f"{name:30} {dcp_s:8.2f} {our_s:8.2f} {dcp_s / our_s:7.1f} {theirs:8.2f} {ours:8.2f}", rows_out[0]["phases"]
        )


if __name__ == "__main__":
    main()
