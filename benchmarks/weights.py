"""Weights for an inference engine, compared with what engines do: `python -m benchmarks.weights [--quick]`.

Two gloo processes hold 104 MB of bfloat16 weights by rows. The first builds flat buckets of full tensors. Ours is
`reshard.WeightSource.buckets`. The peer gathers each tensor on every rank (`DTensor.full_tensor`) and concatenates
the gathered ones, as trainers for verl and SGLang's flattened buckets do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run

WORLD = 2
LAYERS = 24
SHAPES = {"q.weight": (768, 768), "up.weight": (2048, 768), "norm.weight": (768,)}
BUCKETS = {"64 KiB": 64 << 10, "16 MiB": 16 << 20, "1 GiB": 1 << 30}


def made() -> dict[str, DTensor]:
    """Return this rank's part, and open the connections of all pairs."""
    mesh = init_device_mesh("cpu", (WORLD,))
    dist.all_reduce(torch.zeros(1))
    torch.manual_seed(0)
    return {
        f"layers.{i}.{name}": distribute_tensor(torch.randn(shape).bfloat16(), mesh, [Shard(0)])
        for i in range(LAYERS)
        for name, shape in SHAPES.items()
    }


def gathered(state: dict[str, DTensor], bucket_bytes: int) -> Iterator[torch.Tensor]:
    """Build the flat buckets on the first rank."""
    waiting: list[torch.Tensor] = []
    held_bytes = 0
    for tensor in state.values():
        full = tensor.full_tensor()
        if dist.get_rank():
            continue
        if waiting and held_bytes + full.nbytes > bucket_bytes:
            yield torch.cat(waiting)
            waiting, held_bytes = [], 0
        waiting.append(full.flatten().view(torch.uint8))
        held_bytes += full.nbytes
    if waiting:
        yield torch.cat(waiting)


def passes(bucket_bytes: int, repeats: int) -> list[dict[str, tuple[float, float]]]:
    """Run both ways in turns, after a warm-up of each."""
    state = made()
    source = reshard.WeightSource(state, bucket_bytes=bucket_bytes)
    ways: dict[str, Any] = {
        "ours": lambda: sum(bucket.flat.numel() for bucket in source.buckets()),
        "full_tensor": lambda: sum(flat.numel() for flat in gathered(state, bucket_bytes)),
    }
    assert len({way() for way in ways.values()}) == 1, "both give the same bytes"
    return [{name: measured(way)[:2] for name, way in ways.items()} for _ in range(repeats)]


def first(bucket_bytes: int, way: str) -> float:
    """Return the seconds of the first pass in new processes, including its preparation."""
    state = made()

    def ours() -> None:
        for _ in reshard.WeightSource(state, bucket_bytes=bucket_bytes).buckets():
            pass

    return measured(ours if way == "ours" else lambda: list(gathered(state, bucket_bytes)))[0]


def rows(repeats: int) -> Iterator[Row]:
    for name, bucket_bytes in BUCKETS.items():
        for unit, by_way in over_ranks(run(passes, WORLD, bucket_bytes, repeats)).items():
            ours = by_way.pop("ours")
            yield Row("weights", f"buckets of {name}", unit, ours, by_way)
        if bucket_bytes == 16 << 20:
            continue  # its first pass is like those of the others
        starts = [{way: max(run(first, WORLD, bucket_bytes, way)) for way in ("ours", "full_tensor")} for _ in range(3)]
        theirs = tuple(one["full_tensor"] for one in starts)
        yield Row(
            "weights",
            f"buckets of {name}, the first",
            "s",
            tuple(one["ours"] for one in starts),
            {"full_tensor": theirs},
        )


def main() -> int:
    options = arguments(__doc__).parse_args()
    return report(rows(5 if options.quick else 11), options.rows)


if __name__ == "__main__":
    sys.exit(main())
