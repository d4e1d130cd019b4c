"""Planning, compared with DCP: one rank's plan of theirs, and all ranks' plan and proof of ours.

    python -m benchmarks.plan [--quick]

Every case runs in a new process, so that memory and caches are its own. There are no weights, devices, or files: the
peers get their metadata in memory. `--quick` uses a tenth of the layers. One rank's plan of theirs is compared with
ours for all ranks, from existing layouts, including the proof.
"""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from benchmarks import models
from benchmarks.page import Row, arguments, report
from planners import Box, StateLayout, TensorSpec, dumps, plan_reads, plan_transfers, schedule, verify

Figures = dict[str, Any]


class Clock:
    """Seconds of named steps, and the peak of memory so far."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._first_mb = self.peak_mb()

    @staticmethod
    def peak_mb() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def time(self, name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = step()
        self.figures[name] = time.perf_counter() - start
        return out

    def done(self, **more: Any) -> Figures:
        return self.figures | more | {"peak_mb": self.peak_mb(), "extra_mb": self.peak_mb() - self._first_mb}


def ours(specs: dict[str, TensorSpec], before: Any, after: Any) -> Figures:
    """Plan and prove for all ranks, from two rules to the items of one rank."""
    clock = Clock()
    saved: StateLayout = clock.time("layout saved", lambda: models.laid_out(specs, before))
    wanted: StateLayout = clock.time("layout wanted", lambda: models.laid_out(specs, after))
    plan = clock.time("plan", lambda: plan_reads(saved, wanted))
    report = clock.time("proof", lambda: verify(plan))
    report.raise_if_failed()
    loads = clock.time("bytes of all ranks", plan.rank_bytes)
    items = clock.time("items of one rank", lambda: plan.items(wanted.world_size // 2))
    clock.figures["the same for 10,000"] = clock.figures["items of one rank"] * 10_000 / len(items)
    planning_mb = clock.peak_mb() - clock._first_mb
    text = clock.time("JSON", lambda: dumps(wanted))
    return clock.done(
        tensors=len(specs),
        ranks=[saved.world_size, wanted.world_size],
        items=len(items),
        total_bytes=int(loads.sum()),
        json_mb=len(text) / 1e6,
        planning_mb=planning_mb,
    )


def ours_transfers(specs: dict[str, TensorSpec], before: Any, after: Any) -> Figures:
    """Plan the same change between running ranks: plan, proof, and rounds."""
    clock = Clock()
    old, new = models.laid_out(specs, before), models.laid_out(specs, after)
    plan = clock.time("plan", lambda: plan_transfers(old, new, ranks_per_host=8))
    clock.time("bytes of all ranks", plan.sent_bytes)
    clock.time("proof", lambda: verify(plan)).raise_if_failed()
    rounds = clock.time("scheduling", lambda: schedule(plan, max_inflight_bytes=1 << 30))
    clock.time("proof of rounds", lambda: verify(rounds)).raise_if_failed()
    return clock.done(rounds=rounds.rounds, messages=len(rounds), moved_bytes=plan.bytes_moved)


def growth(specs: dict[str, TensorSpec]) -> Figures:
    """Measure layouts, plan, and proof from n ranks to three quarters of n, for growing n."""
    out: Figures = {}
    for power in range(7, 18):
        ranks = 1 << power
        start = time.perf_counter()
        saved = models.laid_out(specs, models.fsdp_tp(ranks))
        wanted = models.laid_out(specs, models.fsdp_tp(ranks * 3 // 4))
        verify(plan_reads(saved, wanted)).raise_if_failed()
        out[str(ranks)] = time.perf_counter() - start
    return out


def dcp_one_rank(specs: dict[str, TensorSpec]) -> Figures:
    """Make torch's default local load plan for one of 768 ranks, from metadata with 1,024 chunks per tensor."""
    import torch
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    saved, wanted, rank = 1024, 768, 384
    mesh = fake_mesh(wanted, rank)
    clock = Clock()
    chunks: dict[tuple[int, ...], list[Any]] = {}  # shared by tensors of one shape, to the peer's advantage
    metadata, state = {}, {}
    for fqn, spec in specs.items():
        if spec.shape not in chunks:
            chunks[spec.shape] = [
                ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                for box in row_boxes(spec.shape, saved)
            ]
        kind = TensorProperties(dtype=getattr(torch, spec.dtype))
        metadata[fqn] = TensorStorageMetadata(properties=kind, size=torch.Size(spec.shape), chunks=chunks[spec.shape])
        state[fqn] = meta_dtensor(spec, mesh, rank)
    plan = clock.time(
        "plan of one rank", lambda: create_default_local_load_plan(state, Metadata(state_dict_metadata=metadata))
    )
    return clock.done(items=len(plan.items))


def torch_checkpointing_one_rank(specs: dict[str, TensorSpec]) -> Figures:
    """Make torch_checkpointing's plan for one of 768 ranks, from metadata of 1,024 ranks."""
    if importlib.util.find_spec("torch_checkpointing") is None:
        return {"absent": "torch_checkpointing is not installed"}
    from types import SimpleNamespace

    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.dtensor_metadata import DeviceMeshSpec, DTensorShardingMetadata, ShardSpec

    fake_mesh(768, 384)
    meshes = {n: DeviceMeshSpec("cpu", (n,), tuple(range(n)), ("fsdp",)) for n in (768, 1024)}

    def described(spec: TensorSpec, ranks: int) -> Any:
        stride = row_major(spec.shape)
        return DTensorShardingMetadata(spec.shape, f"torch.{spec.dtype}", stride, meshes[ranks], (ShardSpec(0),))

    wanted = {(fqn,): described(spec, 768) for fqn, spec in specs.items()}
    saved = SimpleNamespace(
        nested_path_to_metadata={
            (fqn,): [SimpleNamespace(sharding_metadata=described(spec, 1024), ranks=range(1024))]
            for fqn, spec in specs.items()
        }
    )
    clock = Clock()
    resharder: Any = DefaultResharder()
    plan = clock.time("plan of one rank", lambda: resharder._generate_load_plans(wanted, saved))
    return clock.done(items=sum(len(plans) for plans in plan.nested_path_to_load_plans.values()))


def fake_mesh(ranks: int, rank: int) -> Any:
    """Return a device mesh of a job that does not run."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def meta_dtensor(spec: TensorSpec, mesh: Any, rank: int) -> Any:
    """Return one rank's rows of a tensor, without memory."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    rows = row_boxes(spec.shape, mesh.size())[rank].sizes
    local = torch.empty(rows, dtype=getattr(torch, spec.dtype), device="meta")
    shape, stride = torch.Size(spec.shape), row_major(spec.shape)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def row_boxes(shape: tuple[int, ...], ranks: int) -> list[Box]:
    """Return the rows of each rank, divided as by torch.chunk."""
    step = -(-shape[0] // ranks)
    starts = [min(rank * step, shape[0]) for rank in range(ranks + 1)]
    return [Box((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in pairwise(starts)]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def cases(quick: bool) -> dict[str, Callable[[], Figures]]:
    """Return what to run in separate processes, by name."""

    def dense() -> dict[str, TensorSpec]:
        return models.with_adam(models.llama(12 if quick else 126))

    def sparse() -> dict[str, TensorSpec]:
        return models.with_adam(models.moe(9 if quick else 61))

    return {
        "405B, FSDP 1,024 -> 768": lambda: ours(dense(), models.fsdp(1024), models.fsdp(768)),
        "the same, DCP, one rank": lambda: dcp_one_rank(dense()),
        "the same, torch_checkpointing, one rank": lambda: torch_checkpointing_one_rank(dense()),
        "405B, FSDP2 x TP 16,384 -> 12,288": lambda: ours(dense(), models.fsdp_tp(16384), models.fsdp_tp(12288)),
        "405B, FSDP2 x TP 16,384 -> 12,288, between running ranks": lambda: ours_transfers(
            dense(), models.fsdp_tp(16384), models.fsdp_tp(12288)
        ),
        "671B MoE, EP 64 x FSDP 32 -> EP 128 x TP 8": lambda: ours(
            sparse(), models.expert_fsdp(2048, 64), models.expert_tp(1024, 128)
        ),
        "growth": lambda: growth(dense()),
    }


def alone(name: str, quick: bool) -> Figures:
    """Run one case in a new process."""
    command = [sys.executable, "-m", "benchmarks.plan", "--case", name, *(["--quick"] if quick else [])]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: Figures = json.loads(out.splitlines()[-1])
    return figures


_STEPS = {"items of one rank": "read items of one rank", "scheduling": "rounds", "proof of rounds": "proof of rounds"}


def rows(quick: bool, rounds: int) -> Iterator[Row]:
    """Yield the rows. Contestants run in turns, `rounds` times. Cases without a peer run once."""
    mine, *peers = list(cases(quick))[:3]
    turns = [{name: alone(name, quick) for name in (mine, *peers)} for _ in range(rounds)]
    ready = tuple(turn[mine]["plan"] + turn[mine]["proof"] for turn in turns)
    theirs = {
        peer.split(", ")[1]: tuple(turn[peer]["plan of one rank"] for turn in turns)
        for peer in peers
        if "absent" not in turns[0][peer]
    }
    yield Row("plan", f"{mine}: plan and proof of all ranks; peers: plan of one", "s", ready, theirs)
    whole = tuple(turn[mine]["layout saved"] + turn[mine]["layout wanted"] + s for turn, s in zip(turns, ready))
    yield Row("plan", f"{mine}: the same, layouts made first", "s", whole, theirs)
    memory = {
        peer.split(", ")[1]: tuple(turn[peer]["extra_mb"] for turn in turns)
        for peer in peers
        if "absent" not in turns[0][peer]
    }
    yield Row("plan", f"{mine}: memory", "MB", tuple(turn[mine]["planning_mb"] for turn in turns), memory)
    for name in list(cases(quick))[3:-1]:
        figures = alone(name, quick)
        yield Row("plan", f"{name}: plan and proof", "s", (figures["plan"] + figures["proof"],))
        for key, step in _STEPS.items():
            if key in figures:
                yield Row("plan", f"{name}: {step}", "s", (figures[key],))
    for ranks, seconds in alone("growth", quick).items():
        wanted = int(ranks) * 3 // 4
        yield Row("plan", f"405B, FSDP2 x TP {int(ranks):,} -> {wanted:,}: layouts, plan, proof", "s", (seconds,))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", help="run one case in this process and print it as JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(cases(options.quick)[options.case]()))
        return 0
    return report(rows(options.quick, 3), options.rows)


if __name__ == "__main__":
    sys.exit(main())
