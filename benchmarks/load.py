"""Loading against torch.distributed.checkpoint: each from its own checkpoint of the same tensors, in one process tree.

    python -m benchmarks.load [--quick] [--folder /dev/shm] [--case TEXT] [--rows 4096] [--unchecked]

Prints, for both, the seconds until the last rank is done and the processor time of all ranks together, which depends
less on what else the machine does; how many times faster we are by both; the same for a raw copy of as many bytes from
the same files into the same memory; and the bytes read for each byte needed. For columns also: the time of what cannot
be left out. What the peer reads is counted by the kernel; we read through mappings, too, which the kernel does not
count, so what is printed for us is the larger of what the load reports and what the kernel counted.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
from benchmarks.processes import measured, read_chars, run

warnings.filterwarnings("ignore")

ROUNDS = 4

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
    folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int, ours_at: str, check: bool
) -> dict[str, Any]:
    theirs = make(shape, placements, count, rows, seed=None)
    ours = make(shape, placements, count, rows, seed=None)
    needed = sum(t.to_local().nbytes for t in ours.values())
    out: dict[str, Any] = {"needed": needed}
    raw = make(shape, placements, count, rows, seed=None)
    for t in (*theirs.values(), *ours.values(), *raw.values()):
        t.to_local().add_(1)  # the memory is there before the clock starts
    # all files' names, this rank's own first, so that the copies of all ranks cover all files
    files = sorted(glob.glob(f"{folder}/reshard/data-*/*.safetensors"))
    turn = dist.get_rank() % len(files)
    for _ in range(ROUNDS):  # the first round warms the page cache and the imports of both; the best one counts
        before = read_chars()
        seconds, cpu, _ = measured(lambda: dcp.load(theirs, checkpoint_id=f"{folder}/dcp"))
        out["dcp_read"] = read_chars() - before
        note(out, "dcp", seconds, cpu)
        before = read_chars()
        seconds, cpu, report = measured(lambda: reshard.load(ours, f"{folder}/{ours_at}", check=check))
        out["our_read"] = max(report.bytes_read + report.bytes_read_to_check, read_chars() - before)
        if note(out, "our", seconds, cpu):
            out["phases"] = dict(report.seconds)
        seconds, cpu, _ = measured(lambda: copy_raw(files[turn:] + files[:turn], list(raw.values())))
        note(out, "raw", seconds, cpu)
        seconds, cpu, _ = measured(lambda: work_of_columns(files[turn:] + files[:turn], needed))
        note(out, "floor", seconds, cpu)
    pairs = [
        (a.to_local().view(torch.int16), b.to_local().view(torch.int16)) for a, b in zip(theirs.values(), ours.values())
    ]
    out["equal"] = all(torch.equal(a, b) for a, b in pairs)
    return out


def note(out: dict[str, Any], who: str, seconds: float, cpu: float) -> bool:
    """Keep the best round; whether this is it."""
    best = seconds < out.get(f"{who}_s", float("inf"))
    out[f"{who}_s"] = min(seconds, out.get(f"{who}_s", seconds))
    out[f"{who}_cpu"] = min(cpu, out.get(f"{who}_cpu", cpu))
    return best


def copy_raw(files: list[str], targets: list[DTensor]) -> None:
    """Fill the targets with as many bytes from the front of the files, one after the other."""
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


def work_of_columns(files: list[str], nbytes: int) -> None:
    """What every loader has to do for columns that checks what it reads, and nothing else: read this rank's share of
    the bytes once, hash them, and copy them once as narrow columns."""
    world, mib = dist.get_world_size(), 1 << 20
    buffer, target = np.empty(mib, np.uint8), np.empty(64 * mib, np.uint8)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case only, with an eighth of the bytes")
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--case", help="only cases whose name holds this text")
    parser.add_argument("--same-checkpoint", action="store_true", help="both load the checkpoint that torch wrote")
    parser.add_argument("--rows", type=int, default=4096, help="of each of the square tensors (default: 4096)")
    parser.add_argument("--unchecked", action="store_true", help="we compare no checksums either")
    options = parser.parse_args()
    count, rows = (12, 2048) if options.quick else (24, options.rows)
    names = [name for name in CASES if options.case is None or options.case in name]
    print(f"{count} bf16 tensors of {rows} x {rows}, {count * rows * rows * 2 / 1e9:.2f} GB, in {options.folder}")
    print(
        f"{'':30} {'seconds':^20} {'processor s':^20} {'DCP/ours':^11} {'raw/ours':^11} {'bytes/byte':^11}\n"
        f"{'case':30} {'DCP':>6} {'ours':>6} {'raw':>6} {'DCP':>6} {'ours':>6} {'raw':>6}"
        f" {'wall':>5} {'cpu':>5} {'wall':>5} {'cpu':>5} {'DCP':>5} {'ours':>5}"
    )
    for name in names[:1] if options.quick else names:
        world, saved_shape, saved, wanted_shape, wanted = CASES[name]
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            savers = torch.Size(saved_shape).numel()
            run(save, savers, folder, saved_shape, saved, count, rows)
            ours_at = "dcp" if options.same_checkpoint else "reshard"
            rows_out = run(load, world, folder, wanted_shape, wanted, count, rows, ours_at, not options.unchecked)
        finally:
            shutil.rmtree(folder)
        assert all(row["equal"] for row in rows_out), "the two loaded different values"
        wall = {who: max(r[f"{who}_s"] for r in rows_out) for who in ("dcp", "our", "raw", "floor")}
        cpu = {who: sum(r[f"{who}_cpu"] for r in rows_out) for who in ("dcp", "our", "raw", "floor")}
        needed = sum(r["needed"] for r in rows_out)
        theirs, ours = (sum(r[k] for r in rows_out) / needed for k in ("dcp_read", "our_read"))
        print(
            f"{name:30} {wall['dcp']:6.2f} {wall['our']:6.2f} {wall['raw']:6.2f}"
            f" {cpu['dcp']:6.2f} {cpu['our']:6.2f} {cpu['raw']:6.2f}"
            f" {wall['dcp'] / wall['our']:5.1f} {cpu['dcp'] / cpu['our']:5.1f}"
            f" {wall['raw'] / wall['our']:5.2f} {cpu['raw'] / cpu['our']:5.2f} {theirs:5.2f} {ours:5.2f}",
            {phase: round(seconds, 3) for phase, seconds in rows_out[0]["phases"].items()},
            flush=True,
        )
        if wanted == [Shard(1)]:
            dcp_s, our_s, floor_s = wall["dcp"], wall["our"], wall["floor"]
            print(
                f"{'':4}one read, one hash and one strided copy of each byte, nothing else: {floor_s:.2f} s,", end=" "
            )
            print(
                f"{dcp_s / floor_s:.1f} times as fast as DCP; ours takes {our_s / floor_s:.1f} times that", flush=True
            )


if __name__ == "__main__":
    main()
