"""Live resharding compared with alternatives: `python -m benchmarks.live`.

On 8 gloo processes, with at most 4 MiB in flight: compared with gathering each tensor and slicing it, and with
`DTensor.redistribute` where it applies. CPU time is that of all ranks together, and memory that of the rank that
needs most. At scale, only plans (`--scale` prints more about them): a trillion parameters from 256 trainers to 128
inference ranks.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard
import reshard.api.redistribute as prepared
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, run, timed
from planners import (
    BlockShard,
    Cluster,
    Mesh,
    Replicate as R,
    Shard as S,
    StateLayout,
    TensorLayout,
    TensorSpec,
    TransferPlan,
    estimate,
    plan_relay,
    plan_transfers,
    schedule,
    verify,
)
from planners.plans.relay import bytes_between, rank_groups

WORLD = 8
BUDGET_BYTES = 4 << 20
NIC_BYTES_PER_S = 50e9
"""400 Gbit/s per rank."""
Place = tuple[tuple[int, ...], list[Placement]]
CASES: dict[str, tuple[Place, Place]] = {
    "one axis: S(0) -> S(1)": (((8,), [Shard(0)]), ((8,), [Shard(1)])),
    "one axis: S(0) -> R": (((8,), [Shard(0)]), ((8,), [Replicate()])),
    "one axis: R -> S(1)": (((8,), [Replicate()]), ((8,), [Shard(1)])),
    "one of two axes: S(0),S(1) -> S(0),R": (((4, 2), [Shard(0), Shard(1)]), ((4, 2), [Shard(0), Replicate()])),
    "two axes: S(0),S(1) -> S(1),S(0)": (((4, 2), [Shard(0), Shard(1)]), ((4, 2), [Shard(1), Shard(0)])),
    "two axes: S(0),S(0) -> R,S(1)": (((4, 2), [Shard(0), Shard(0)]), ((4, 2), [Replicate(), Shard(1)])),
    "other mesh: S(0) of 8 -> S(0),S(1) of 4 x 2": (((8,), [Shard(0)]), ((4, 2), [Shard(0), Shard(1)])),
}


def make(place: Place, count: int, rows: int, *, fill: bool) -> dict[str, DTensor]:
    """Return `count` square bf16 tensors, whose element (i, j) is known on all ranks."""
    shape, placements = place
    mesh = init_device_mesh("cpu", shape)
    out = {}
    for i in range(count):
        whole = TensorSpec(f"layer{i}.weight", (rows, rows), "bfloat16")
        ours = [S(p.dim) if isinstance(p, Shard) else R() for p in placements]
        part = TensorLayout(whole, Mesh([(str(a), n) for a, n in enumerate(shape)]), ours).parts(dist.get_rank())[0]
        (r0, r1), (c0, c1) = part.dims[0][0], part.dims[1][0]
        local = torch.zeros(r1 - r0, c1 - c0, dtype=torch.int16)
        if fill:
            local += (torch.arange(r0, r1, dtype=torch.int16) * 181)[:, None] + torch.arange(c0, c1, dtype=torch.int16)
            local += i * 7919
        bits = local.view(torch.bfloat16)
        out[whole.fqn] = DTensor.from_local(
            bits, mesh, placements, run_check=False, shape=torch.Size((rows, rows)), stride=(rows, 1)
        )
    return out


def peak_bytes(fn: Callable[[], Any]) -> int:
    """Return by how much the peak of this process's memory while `fn` runs exceeds its start, in bytes."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak of the resident size
    before = _status("VmRSS")
    fn()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def gather_and_slice(source: dict[str, DTensor], target: dict[str, DTensor]) -> None:
    """Reshard as one would by hand: gather each tensor on every rank, then slice it."""
    for key, tensor in source.items():
        whole = tensor.full_tensor()
        wanted = target[key]
        part = reshard.layout_of(wanted, key).parts(dist.get_rank())[0]
        wanted.to_local().copy_(whole[tuple(slice(*dim[0]) for dim in part.dims)])


def torch_redistribute(source: dict[str, DTensor], target: dict[str, DTensor]) -> None:
    """Reshard each DTensor by its own method. The results are new tensors."""
    for key, tensor in source.items():
        tensor.redistribute(placements=target[key].placements)


def case(name: str, count: int, rows: int, repeats: int) -> dict[str, Any]:
    """Run one case on this rank. Return, by way, the seconds and CPU seconds of each round, and memory in bytes."""
    before, after = CASES[name]
    source = make(before, count, rows, fill=True)
    target, known = make(after, count, rows, fill=False), make(after, count, rows, fill=True)
    options: dict[str, Any] = {"max_inflight_bytes": BUDGET_BYTES, "check_replicas": False}
    reshard.redistribute(source, target, **options)  # warms up connections of all pairs, and imports
    for tensor in target.values():
        tensor.to_local().zero_()
    prepared._cache.clear()  # so that the next one plans again
    planning, plan = timed(lambda: reshard.prepare(source, target, **options))
    moving, moved = timed(plan.run)
    assert all(
        torch.equal(target[k].to_local().view(torch.int16), known[k].to_local().view(torch.int16)) for k in known
    )
    ways: dict[str, Callable[[], Any]] = {"ours": plan.run, "gather": lambda: gather_and_slice(source, target)}
    if before[0] == after[0]:
        ways["DTensor"] = lambda: torch_redistribute(source, target)
    for way in ways.values():
        way()
    rounds = [{name: measured(way)[:2] for name, way in ways.items()} for _ in range(repeats)]  # in turns
    out: dict[str, Any] = {name: [run[name] for run in rounds] for name in ways}
    del plan, ways
    rise = peak_bytes(lambda: timed(lambda: reshard.redistribute(source, target, **options)))
    peaks = {"ours": max(rise, moved.buffer_bytes)}  # buffers may be in memory that existed before
    peaks["gather"] = peak_bytes(lambda: timed(lambda: gather_and_slice(source, target)))
    return {"rounds": out, "peaks": peaks, "first": planning + moving}


def rows(count: int, size: int, repeats: int, names: list[str]) -> Iterator[Row]:
    """Yield the rows of the cases with these names, for `count` square tensors of `size` rows."""
    for name in names:
        ranks = run(case, WORLD, name, count, size, repeats)
        for i, (unit, over_ranks) in enumerate((("s", max), ("CPU s", sum))):
            ours, *peers = (
                (way, tuple(over_ranks(rank["rounds"][way][r][i] for rank in ranks) for r in range(repeats)))
                for way in ranks[0]["rounds"]
            )
            yield Row("live", name, unit, ours[1], dict(peers))
        yield Row("live", f"{name}, the first with its plan", "s", (max(rank["first"] for rank in ranks),))
        peaks = {way: (max(rank["peaks"][way] for rank in ranks) / 2**20,) for way in ranks[0]["peaks"]}
        yield Row("live", f"{name}, memory", "MiB", peaks.pop("ours"), peaks)


# Plans at scale.


def trillion() -> dict[str, TensorSpec]:
    """Return the specs of a trillion-parameter mixture of experts: 61 layers, 384 experts, hidden 7168, experts 2048
    wide."""
    hidden, inner, heads, experts, layers = 7168, 2048, 64, 384, 61
    rows: dict[str, tuple[int, ...]] = {"embed": (163840, hidden), "head": (163840, hidden), "norm": (hidden,)}
    for i in range(layers):
        name = f"layers.{i}"
        rows |= {f"{name}.wqkv": (3 * heads * 128, hidden), f"{name}.wo": (hidden, heads * 128)}
        rows |= {f"{name}.norm1": (hidden,), f"{name}.norm2": (hidden,), f"{name}.router": (experts, hidden)}
        for part, shape in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
            rows[f"{name}.experts.{part}"] = (experts, *shape)
    return {fqn: TensorSpec(fqn, shape, "bfloat16") for fqn, shape in rows.items()}


def trainer(spec: TensorSpec) -> TensorLayout:
    """Return a layout on 256 ranks: experts over 32, with FSDP over 8 in each; everything else with FSDP over all."""
    if ".experts." in spec.fqn:
        return TensorLayout(spec, Mesh({"ep": 32, "fsdp": 8}), [S(0), S(1)])
    return TensorLayout(spec, Mesh({"fsdp": 256}), [S(0)])


def engine(spec: TensorSpec) -> TensorLayout:
    """Return a layout on 128 other ranks: 4 replicas of 32; experts over 32, attention and head TP 8, norms
    replicated."""
    mesh = Mesh({"replica": 4, "dp": 4, "tp": 8}, range(256, 384))
    if ".experts." in spec.fqn:
        return TensorLayout(spec, mesh, [R(), S(0), S(0)])
    if spec.fqn.endswith("wqkv"):
        return TensorLayout(spec, mesh, [R(), R(), BlockShard(0, [spec.shape[0] // 3] * 3)])
    if spec.fqn.endswith(("embed", "head")):
        return TensorLayout(spec, mesh, [R(), R(), S(0)])
    if spec.fqn.endswith("wo"):
        return TensorLayout(spec, mesh, [R(), R(), S(1)])
    return TensorLayout(spec, mesh, [R(), R(), R()])


Steps = tuple[TransferPlan, ...]


def ways_of_a_trillion() -> dict[str, Callable[[], Steps]]:
    """Return plans from 256 trainers to 128 inference ranks, by how the four replicas get their tensors."""
    specs = trillion()
    before = StateLayout({fqn: trainer(spec) for fqn, spec in specs.items()}, 384)
    after = StateLayout({fqn: engine(spec) for fqn, spec in specs.items()}, 384)
    return {
        "replicas one by one": lambda: (plan_transfers(before, after, ranks_per_host=8),),
        "replicas in stripes that they pass on": lambda: plan_relay(before, after, ranks_per_host=8),
    }


def rows_at_scale() -> Iterator[Row]:
    """Yield the CPU time of planning for all ranks, once."""
    for how, make_steps in ways_of_a_trillion().items():
        begun = time.process_time()
        steps = make_steps()
        planned = time.process_time()
        rounds = [schedule(plan, max_inflight_bytes=(512 << 20) // len(steps)) for plan in steps]
        scheduled = time.process_time()
        for step in rounds:
            verify(step).raise_if_failed()
        proved = time.process_time()
        for what, took in (("plan", planned - begun), ("rounds", scheduled - planned), ("proof", proved - scheduled)):
            yield Row("live", f"a trillion parameters, {how}: {what}", "CPU s", (took,))


def print_scale() -> None:
    """Print what these plans send, and what a described network allows."""
    specs = trillion()
    parameters = sum(spec.numel for spec in specs.values())
    print(f"{parameters / 1e12:.2f}T parameters in {len(specs)} bf16 tensors, 256 trainers -> 128 inference ranks")
    for how, make_steps in ways_of_a_trillion().items():
        steps = make_steps()
        sent, received = (sum(columns) for columns in zip(*((p.sent_bytes(), p.received_bytes()) for p in steps)))
        rounds = [schedule(plan, max_inflight_bytes=(512 << 20) // len(steps)) for plan in steps]
        print(f"  {how}: rank 300 has {sum(len(step.messages(300)) for step in rounds)} messages")
        hosts, sides = rank_groups(steps[0])
        for name, groups in (("from side to side", sides), ("between hosts", hosts)):
            print(f"    {sum(bytes_between(plan, groups) for plan in steps) / 1e12:.2f} TB {name}")
        print(f"    a trainer sends at most {sent[:256].max() / 1e9:.1f} GB,", end=" ")
        print(f"an inference rank {sent[256:].max() / 1e9:.1f} GB, and gets {received[256:].max() / 1e9:.1f} GB")
        for plan, step in zip(steps, rounds):
            links, largest = plan.traffic().nbytes, step.round_bytes().max()
            print(f"    {len(links)} links of {links.min() / 1e6:.3f} MB to {links.max() / 1e9:.2f} GB,", end=" ")
            print(f"{step.rounds} rounds, {len(step)} messages of at most {largest / 1e6:.0f} MB")
        busiest = sum(max(p.sent_bytes().max(), p.received_bytes().max()) for p in steps) / NIC_BYTES_PER_S
        waiting = sum(step.round_bytes().sum() for step in rounds) / NIC_BYTES_PER_S
        print(f"    at {NIC_BYTES_PER_S / 1e9:.0f} GB/s per rank: {busiest:.2f} s for the busiest rank alone,")
        print(f"    {waiting:.2f} s if every round waits for its largest message; and by host:")
        cluster = Cluster(ranks_per_host=8, network_bytes_per_s=8 * NIC_BYTES_PER_S, local_bytes_per_s=8 * 450e9)
        for plan in steps:
            print("    " + str(estimate(plan, cluster)).replace("\n", "\n    "))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", default="", help="only cases whose name holds this text")
    parser.add_argument("--scale", action="store_true", help="only what the plans of a trillion parameters carry")
    options = parser.parse_args()
    if options.scale:
        print_scale()
        return 0
    names = [name for name in CASES if options.case in name]
    size = (4, 2048, 3) if options.quick else (8, 4096, 3)
    return report(chain(rows(*size, names), () if options.case else rows_at_scale()), options.rows)


if __name__ == "__main__":
    sys.exit(main())
