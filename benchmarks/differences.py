"""Weights that travel as differences, beside the whole replay: `python -m benchmarks.differences [--quick]`.

Six gloo processes: four trainers hold rows, two engine ranks want columns of the same bf16 tensors, as at each step of
reinforcement learning. A share of the elements changes between runs, scattered or in rows together. Prints the bytes
that crossed, and seconds, of a prepared transfer with `delta=True` and of one without, run in turn; both must be right.
On one machine a link is as fast as memory: what is gained in seconds shows only where it is slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

import reshard
from benchmarks.processes import run, timed
from planners import Mesh, Shard, TensorLayout, TensorSpec

TRAINERS, ENGINES = 4, 2
CASES = [("scattered", 0.001), ("scattered", 0.01), ("scattered", 0.1), ("together", 0.1), ("scattered", 1.0)]


def change(tensor: torch.Tensor, how: str, share: float, seed: int) -> None:
    """In place: flip the lowest bit of a share of the elements."""
    bits = tensor.view(torch.int16)
    if how == "together":
        bits[: max(int(len(bits) * share), 1)] ^= 1
    else:
        bits ^= (torch.rand(bits.shape, generator=torch.Generator().manual_seed(seed)) < share).to(torch.int16)


def case(rows: int, tensors: int, repeats: int) -> list[list[float]]:
    """For each case: bytes and seconds with differences, and without."""
    rank, trains = dist.get_rank(), dist.get_rank() < TRAINERS
    specs = [TensorSpec(f"layers.{i}.weight", (rows, rows), "bfloat16") for i in range(tensors)]
    before = {s.fqn: TensorLayout(s, Mesh({"dp": TRAINERS}), [Shard(0)]) for s in specs}
    after_mesh = Mesh({"tp": ENGINES}, ranks=range(TRAINERS, TRAINERS + ENGINES))
    after = {s.fqn: TensorLayout(s, after_mesh, [Shard(1)]) for s in specs}
    state: dict[str, torch.Tensor] = {}
    if trains:
        for i, spec in enumerate(specs):
            noise = torch.randn(rows // TRAINERS, rows, generator=torch.Generator().manual_seed(rank * 100 + i))
            state[spec.fqn] = noise.bfloat16()
    layouts: Any = {"source_layouts": before, "target_layouts": after, "check_replicas": False}
    targets = [{} if trains else {s.fqn: torch.zeros(rows, rows // ENGINES).bfloat16() for s in specs} for _ in "12"]
    ours = reshard.prepare(state, targets[0], delta=True, **layouts)
    whole = reshard.prepare(state, targets[1], **layouts)
    ours.run()
    whole.run()
    found = []
    for how, share in CASES:
        times: list[tuple[float, float, float, float]] = []
        for repeat in range(repeats):
            for tensor in state.values():
                change(tensor, how, share, repeat)
            mine, report = timed(ours.run)
            theirs, other = timed(whole.run)
            times.append((report.bytes_moved, mine, other.bytes_moved, theirs))
            for name, tensor in targets[0].items():
                assert torch.equal(tensor, targets[1][name])
        found.append([statistics.median(column) for column in zip(*times, strict=True)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller tensors")
    options = parser.parse_args()
    size = (1024, 4, 3) if options.quick else (4096, 4, 5)
    rows = run(case, TRAINERS + ENGINES, *size)[0]
    print(f"{'changed':>8}  {'how':10}{'bytes':>12}{'of all':>14}{'fewer':>9}{'seconds':>10}{'of all':>9}{'faster':>8}")
    for (how, share), (mine, mine_s, all_, all_s) in zip(CASES, rows, strict=True):
        print(
            f"{share:8.1%}  {how:10}{mine / 1e6:9.2f} MB{all_ / 1e6:11.2f} MB{all_ / mine:8.2f}x"
            f"{mine_s:10.3f}{all_s:9.3f}{all_s / mine_s:7.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
