"""Weights sent as differences, compared with sending all: `python -m benchmarks.differences [--quick]`.

Six gloo processes: four trainers hold rows, and two engine ranks want columns of the same bf16 tensors, as in each
step of reinforcement learning. Between runs, a share of the elements changes, scattered or in consecutive rows. Ours
is a prepared transfer with `delta=True`, and the peer is one without, which sends everything. Measures transferred
bytes, and seconds, and checks both results. On one machine, a link is as fast as memory: the gain in seconds only
shows on slower links.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import reshard
from benchmarks.page import Row, arguments, report
from benchmarks.processes import run, timed
from planners import Mesh, Shard, TensorLayout, TensorSpec

TRAINERS, ENGINES = 4, 2
CASES = [("scattered", 0.001), ("scattered", 0.01), ("scattered", 0.1), ("together", 0.1), ("scattered", 1.0)]


def change(tensor: torch.Tensor, how: str, share: float, seed: int) -> None:
    """Flip the lowest bit of a share of the elements, in place."""
    bits = tensor.view(torch.int16)
    if how == "together":
        bits[: max(int(len(bits) * share), 1)] ^= 1
    else:
        bits ^= (torch.rand(bits.shape, generator=torch.Generator().manual_seed(seed)) < share).to(torch.int16)


def case(rows: int, tensors: int, repeats: int) -> list[list[tuple[float, ...]]]:
    """Return, for each case and repeat, megabytes and seconds with differences, and without."""
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
        times: list[tuple[float, ...]] = []
        for repeat in range(repeats):
            for tensor in state.values():
                change(tensor, how, share, repeat)
            mine, moved = timed(ours.run)
            theirs, other = timed(whole.run)
            times.append((moved.bytes_moved / 1e6, mine, other.bytes_moved / 1e6, theirs))
            for name, tensor in targets[0].items():
                assert torch.equal(tensor, targets[1][name])
        found.append(times)
    return found


def rows(size: tuple[int, int, int]) -> Iterator[Row]:
    """Yield the rows. Arguments are those of `case`."""
    for (how, share), times in zip(CASES, run(case, TRAINERS + ENGINES, *size)[0], strict=True):
        mine, mine_s, whole, whole_s = zip(*times, strict=True)
        yield Row("differences", f"{share:.1%} of the elements, {how}", "MB moved", mine, {"all": whole})
        yield Row("differences", f"{share:.1%} of the elements, {how}", "s", mine_s, {"all": whole_s})


def main() -> int:
    options = arguments(__doc__).parse_args()
    return report(rows((1024, 4, 3) if options.quick else (4096, 4, 5)), options.rows)


if __name__ == "__main__":
    sys.exit(main())
