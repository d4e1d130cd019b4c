"""Saving against torch.distributed.checkpoint: each in its own format, the same tensors, in one process tree.

    python -m benchmarks.save [--quick] [--folder /dev/shm]
    python -m benchmarks.save --planning

Prints the seconds until the last rank is done and the processor time of all ranks together, for the peer (which writes
no checksums), for us with checksums, for us with checksums and fingerprints, as is the default, and for a raw write of
the same bytes by the same processes. With `--planning`: the time in which one rank plans a save, for 8 to 8,192 ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
from benchmarks.load import make, note
from benchmarks.processes import measured, run
from planners import Mesh, StateLayout, TensorLayout, TensorSpec, plan_writes
from planners import Shard as PlanShard

warnings.filterwarnings("ignore")

ROUNDS = 4

CASES: dict[str, tuple[int, tuple[int, ...], list[Placement]]] = {
    "rows by 8": (8, (8,), [Shard(0)]),
    "rows by 2": (2, (2,), [Shard(0)]),
    "2 copies of rows by 4": (8, (2, 4), [Replicate(), Shard(0)]),
}


def save(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> dict[str, Any]:
    state = make(shape, placements, count, rows, seed=1)
    out: dict[str, Any] = {}

    def clear(name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        dist.barrier()

    contestants = {
        "dcp": lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp"),
        "sums": lambda: reshard.save(state, f"{folder}/sums", fingerprints=False),
        "prints": lambda: reshard.save(state, f"{folder}/prints"),
        "raw": lambda: write_raw(f"{folder}/raw", list(state.values())),
    }
    for _ in range(ROUNDS):  # the first one warms the imports; the best one counts
        for name, work in contestants.items():
            clear(name)
            seconds, cpu, _ = measured(work)
            note(out, name, seconds, cpu)
            clear(name)
    return out


def write_raw(folder: str, tensors: list[DTensor]) -> None:
    """Each rank's own share of the bytes into one file, and on to stable storage."""
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
    """A Llama-like state of 3,000 tensors, all cut along dim 0."""
    print(f"{'ranks':>6} {'our plan of one rank, ms':>26} {'DCP, rank 0, ms':>16}")
    _their_planning(1)  # it imports at first use
    for ranks in (8, 64, 512, 8192):
        mesh = Mesh({"dp": ranks})
        specs = [TensorSpec(f"layers.{i}.w", (8192 + 1024 * (i % 4), 256), "float32") for i in range(3000)]
        begin = time.process_time()
        layout = StateLayout({spec.fqn: TensorLayout(spec, mesh, (PlanShard(0),)) for spec in specs})
        plan_writes(layout).items(ranks // 2)
        ours = time.process_time() - begin
        print(f"{ranks:6} {ours * 1e3:26.1f} {_their_planning(ranks) if ranks <= 512 else 'not run':>16}", flush=True)


def _their_planning(ranks: int) -> str:
    """What the peer's coordinator does with everybody's plans; of many ranks, for a tenth of the tensors, times ten."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case only, with an eighth of the bytes")
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--planning", action="store_true", help="time the planning for many simulated ranks instead")
    options = parser.parse_args()
    if options.planning:
        planning()
        return
    count, rows = (12, 2048) if options.quick else (24, 4096)
    print(f"{count} bf16 tensors of {rows} x {rows}, {count * rows * rows * 2 / 1e9:.2f} GB, in {options.folder}")
    columns = "".join(f"{who:>9}" for who in ("DCP", "sums", "+prints", "raw"))
    print(f"{'':24} {'seconds':^36} {'processor seconds':^36}\n{'case':24} {columns} {columns}")
    for name in list(CASES)[:1] if options.quick else CASES:
        world, shape, placements = CASES[name]
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            results = run(save, world, folder, shape, placements, count, rows)
        finally:
            shutil.rmtree(folder)
        wall = {who: max(r[f"{who}_s"] for r in results) for who in ("dcp", "sums", "prints", "raw")}
        cpu = {who: sum(r[f"{who}_cpu"] for r in results) for who in ("dcp", "sums", "prints", "raw")}
        print(f"{name:24} " + " ".join("".join(f"{x:9.2f}" for x in of.values()) for of in (wall, cpu)))
        for what, of in (("seconds", wall), ("processor seconds", cpu)):
            print(
                f"    by {what}: {of['dcp'] / of['sums']:.2f} times as fast as DCP with checksums,"
                f" {of['dcp'] / of['prints']:.2f} with fingerprints too;"
                f" {of['raw'] / of['sums']:.2f} and {of['raw'] / of['prints']:.2f} of a raw write",
                flush=True,
            )


if __name__ == "__main__":
    main()
