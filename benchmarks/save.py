"""Saving, compared with DCP: each in its own format, the same tensors, in the same processes.

    python -m benchmarks.save [--quick] [--folder /dev/shm]
    python -m benchmarks.save --planning

Measures the seconds until the last rank is done, and the CPU time of all ranks together, of a save with checksums and
fingerprints (the default), of one with checksums only, and of the peer's, which writes neither. The floor is a raw
write of the same bytes by the same processes. If the compiled kernel is installed, the default has a row with it and
one without.

Also measures how long the call of `async_save` blocks the slowest rank, and the CPU time of the calling threads. Its
floor is a copy of the same number of bytes in memory. With `--planning`: the time in which one rank plans a save, for
8 to 8,192 ranks.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
from benchmarks.kernels import NAMED, compiled_kernel, is_installed
from benchmarks.load import make
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run
from planners import Mesh, Shard as PlanShard, StateLayout, TensorLayout, TensorSpec, plan_writes

warnings.filterwarnings("ignore")

ROUNDS = 3

CASES: dict[str, tuple[int, tuple[int, ...], list[Placement]]] = {
    "one rank": (1, (1,), [Shard(0)]),
    "rows by 4": (4, (4,), [Shard(0)]),
    "rows by 8": (8, (8,), [Shard(0)]),
    "2 copies of rows by 4": (8, (2, 4), [Replicate(), Shard(0)]),
}
WAYS = ("default", f"default{NAMED}", "without fingerprints", "async, the call")


def save(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> Any:
    """Return what this rank measured, by way and round."""
    state = make(shape, placements, count, rows, seed=1)
    copies = [tensor.to_local().clone() for tensor in state.values()]
    behind = dist.new_group(backend="gloo")  # for torch's thread, while the ranks use the other group

    def clear(name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        dist.barrier()

    def timed(name: str, work: Callable[[str], Any]) -> tuple[float, ...]:
        clear(name)
        *found, _ = measured(lambda: work(f"{folder}/{name}"))
        clear(name)
        return tuple(found)

    def blocked(
        name: str, work: Callable[[str], Any], after: Callable[[Any], Any] = lambda _: None
    ) -> tuple[float, ...]:
        clear(name)
        start, cpu = time.perf_counter(), time.thread_time()
        value = work(f"{folder}/{name}")
        found = time.perf_counter() - start, time.thread_time() - cpu
        after(value)
        clear(name)
        return found

    with_kernel = is_installed()
    ways: dict[str, list[dict[str, tuple[float, ...]]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS + 1):
        theirs = timed("dcp", lambda path: dcp.save(state, checkpoint_id=path))
        raw = timed("raw", lambda path: write_raw(path, list(state.values())))
        found = {"default": timed("prints", lambda path: reshard.save(state, path))}
        if with_kernel:
            with compiled_kernel():
                found[f"default{NAMED}"] = timed("prints", lambda path: reshard.save(state, path))
        found["without fingerprints"] = timed("sums", lambda path: reshard.save(state, path, fingerprints=False))
        for way, ours in found.items():
            ways[way].append({"ours": ours, "DCP": theirs, "floor": raw})
        theirs = blocked(
            "later", lambda path: dcp.async_save(state, checkpoint_id=path, process_group=behind), lambda f: f.result()
        )
        ours = blocked("later", lambda path: reshard.async_save(state, path), lambda pending: pending.result())
        copy = blocked("none", lambda _: [a.copy_(b.to_local()) for a, b in zip(copies, state.values())], len)
        ways["async, the call"].append({"ours": ours, "DCP": theirs, "floor": copy})
    return {way: rounds[1:] for way, rounds in ways.items() if rounds}  # the first round warmed up the imports


def write_raw(folder: str, tensors: list[DTensor]) -> None:
    """Write each rank's share of the bytes into one file, durably."""
    os.makedirs(folder, exist_ok=True)
    copies = 2 if any(isinstance(p, Replicate) for p in tensors[0].placements) else 1
    mine = tensors[dist.get_rank() // 4 % copies :: copies]
    with open(f"{folder}/{dist.get_rank()}", "wb", buffering=0) as file:
        for tensor in mine:
            view = memoryview(tensor.to_local().view(torch.int16).numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def planning() -> None:
    """Measure planning for a Llama-like state of 3,000 tensors, all sharded along dim 0."""
    print(f"{'ranks':>6} {'our plan of one rank, ms':>26} {'DCP, rank 0, ms':>16}")
    _their_planning(1)  # it imports on first use
    for ranks in (8, 64, 512, 8192):
        mesh = Mesh({"dp": ranks})
        specs = [TensorSpec(f"layers.{i}.w", (8192 + 1024 * (i % 4), 256), "float32") for i in range(3000)]
        begin = time.process_time()
        layout = StateLayout({spec.fqn: TensorLayout(spec, mesh, (PlanShard(0),)) for spec in specs})
        plan_writes(layout).items(ranks // 2)
        ours = time.process_time() - begin
        print(f"{ranks:6} {ours * 1e3:26.1f} {_their_planning(ranks) if ranks <= 512 else 'not run':>16}", flush=True)


def _their_planning(ranks: int) -> str:
    """Do what the peer's coordinator does with all plans. For many ranks, measure a tenth of the tensors, times ten."""
    items = 3000 if ranks <= 64 else 300
    plans = []
    for rank in range(ranks):
        rows = []
        for i in range(items):
            size = torch.Size((8192 + 1024 * (i % 4), 256))
            step = size[0] // ranks
            chunk = ChunkStorageMetadata(torch.Size((rank * step, 0)), torch.Size((step, 256)))
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=torch.float32), size=size)
            index = MetadataIndex(f"layers.{i}.w", chunk.offsets)
            rows.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(rows))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.process_time()
    planner.create_global_plan(plans)
    return f"{(time.process_time() - begin) * 1e3 * 3000 / items:.0f}"


def rows(names: list[str], size: tuple[int, int], folder: str) -> Iterator[Row]:
    """Yield the rows of these cases."""
    for name in names:
        world, shape, placements = CASES[name]
        here = tempfile.mkdtemp(dir=folder)
        try:
            found = run(save, world, here, shape, placements, *size)
        finally:
            shutil.rmtree(here)
        for way in [way for way in WAYS if way in found[0]]:
            for unit, one in over_ranks([rank[way] for rank in found]).items():
                yield Row("save", f"{name}, {way}", unit, one["ours"], {"DCP": one["DCP"]}, one["floor"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--planning", action="store_true", help="time the planning for many simulated ranks instead")
    options = parser.parse_args()
    if options.planning:
        planning()
        return 0
    names = list(CASES)[:3] if options.quick else list(CASES)
    return report(rows(names, (24, 4096), options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
