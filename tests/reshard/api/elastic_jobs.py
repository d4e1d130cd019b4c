"""What real ranks do in the tests of `reshard.elastic`: by itself, since each of many processes imports it."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.api.elastic import generation, tier as keeping
from reshard.elastic import Tier
from reshard.errors import ReshardError, StorageError

__all__ = [
    "failed_before",
    "failed_behind",
    "kept_after_a_failure",
    "kept_behind",
    "recovered",
    "trained",
    "went_on",
    "whole",
]

SHAPES = {"rows": (13, 8), "both": (16, 24), "same": (5,), "one": (), "none": (0, 4)}


def whole(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=made, device="cpu") for name, shape in SHAPES.items()}


def live(mesh: Any, values: dict[str, torch.Tensor], placements: dict[str, list[Any]], step: int) -> dict[str, Any]:
    tensors = {name: distribute_tensor(values[name], mesh, cuts) for name, cuts in placements.items()}
    rest = {name: value.clone() for name, value in values.items() if name not in placements}
    return {"model": {**tensors, **rest}, "step": step, "rng": reshard.PerRank(dist.get_rank(), on_change="keep")}


def lose_host(folder: str) -> None:
    """Kill this process when the other one of its host is here, too: whichever is late would meet its end first."""
    rank = dist.get_rank()
    Path(f"{folder}-here-{rank}").touch()
    while not Path(f"{folder}-here-{rank ^ 1}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)


def trained(folder: str) -> None:
    """8 ranks on 4 hosts: two steps are kept, and in the third all processes of a host are killed."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 4))
    tier = Tier(folder, host=f"h{rank // 2}", timeout=30.0)
    cuts = {"rows": [Replicate(), Shard(0)], "both": [Shard(0), Shard(1)]}
    for step in (1, 2):
        report = tier.save(live(mesh, whole(step), cuts, step), step)
        assert report.number == step
        assert sum(report.bytes_by_host.values()) == 2 * report.total_bytes
    if rank // 2 == 1:
        with mock.patch.object(keeping._KeepJob, "_mirror", side_effect=lambda *_: lose_host(folder)):
            tier.save(live(mesh, whole(3), cuts, 3), 3)
    tier.save(live(mesh, whole(3), cuts, 3), 3)


def went_on(folder: str) -> tuple[int | None, dict[str, torch.Tensor], int]:
    """6 ranks on the 3 hosts that are left, cut otherwise."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3, 2))
    tier = Tier(folder, host=["h0", "h2", "h3"][rank // 2], timeout=30.0)
    cuts = {"rows": [Shard(1), Replicate()], "both": [Shard(1), Shard(0)], "same": [Shard(0), Shard(0)]}
    state = live(mesh, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, cuts, 0)
    report = tier.restore(state)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state["model"].items()}
    assert report.bytes_checked > 0
    assert (report.load.bytes_unchecked, report.load.unchecked) == (0, "")
    assert state["rng"].value == rank
    tier.save(state, 2)
    tier.clear()
    return report.step, full, state["step"]


def sharded(value: float) -> dict[str, Any]:
    """4 MiB a rank."""
    local = torch.full((1 << 20,), float(value))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "own": reshard.PerRank(dist.get_rank(), on_change="keep")}


def kept_behind(folder: str, how: str) -> tuple[list[float], list[float], int]:
    """4 ranks on 2 hosts keep in the background while they talk over the job's own process group: how long the call
    and the copies took, what is there in the end, and how often they talked; by "kill" host 1 is lost meanwhile."""
    rank = dist.get_rank()
    tier = Tier(folder, host=f"h{rank // 2}", timeout=60.0)
    state = sharded(float(rank))
    tier.save(state, 1)
    dist.barrier()
    started = time.monotonic()
    # 4 MiB out and 4 MiB in: 2 s, and 32 s where host 1 is lost after half a second
    pending = tier.async_save(state, 2, bytes_per_s=4 << 20 if how == "keep" else 1 << 18)
    waited = time.monotonic() - started
    state["w"].to_local().add_(100.0)  # the state kept is that of the call
    ended, talks = 0, 0
    while ended < 4:
        # by the clock of any rank: one that went on alone would wait for the others, whose copies it holds up
        is_over = how == "kill" and time.monotonic() - started > 0.5
        said = torch.tensor([pending.done(), is_over], dtype=torch.int32)
        try:
            dist.all_reduce(said)
            ended, is_over = int(said[0]), bool(said[1])
        except RuntimeError:  # a process is gone
            is_over = True
        if is_over and rank // 2 == 1:
            os.kill(os.getpid(), 9)
        if is_over:
            break
        talks += 1
    report = pending.result()
    took = time.monotonic() - started
    assert report.step == 2
    assert report.bytes_received >= 4 << 20
    again = sharded(-1)
    assert tier.restore(again).step == 2
    assert again["own"].value == rank
    return [waited, took], again["w"].full_tensor()[:: 1 << 20].tolist(), talks


def lost_while_joining(folder: str) -> None:
    """Host 1 is lost when its ranks are to make the group that copies would cross over."""
    rank = dist.get_rank()
    tier = Tier(folder, host=f"h{rank // 2}", timeout=60.0)
    state = sharded(float(rank))
    tier.save(state, 1)
    dist.barrier()
    lost = mock.patch.object(dist, "new_group", side_effect=lambda *_, **__: lose_host(folder))
    with lost if rank // 2 == 1 else nullcontext():
        tier.async_save(state, 2).result()


def recovered(folder: str) -> tuple[int | None, list[float]]:
    """On what is left of them."""
    state = {"w": distribute_tensor(torch.zeros(4 << 20), init_device_mesh("cpu", (2,)), [Shard(0)])}
    state["own"] = reshard.PerRank(0, on_change="keep")  # type: ignore[assignment]
    step = Tier(folder, host="h0", copies=0).restore(state).step
    return step, state["w"].full_tensor()[:: 1 << 20].tolist()


def failed_behind(folder: str) -> tuple[list[str], int | None]:
    """A host has no more room for the copies, in the background: who is told, and what is there then."""
    rank, said = dist.get_rank(), []
    tier = Tier(folder, host=f"h{rank}", timeout=60.0)
    state = sharded(float(rank))
    tier.save(state, 1)
    full = mock.patch.object(generation, "_make_room", side_effect=StorageError("no room"))
    with full if rank == 1 else nullcontext():
        with suppress(reshard.ReshardError):
            tier.async_save(state, 2).result()
        tier.async_save(state, 3)
        try:
            tier.async_save(state, 4)
        except reshard.ReshardError as error:
            said.append(f"{type(error).__name__}: {error}".splitlines()[0])
    tier.save(state, 5)
    return said, tier.restore(sharded(-1)).step


def failed_before(folder: str, verb: str) -> str:
    """A save fails in the background, and rank 0 knows: what each rank is told by the next call."""
    rank = dist.get_rank()
    tier = Tier(folder, host=f"h{rank}", timeout=20.0)
    state = sharded(float(rank))
    full = mock.patch.object(generation, "_make_room", side_effect=StorageError("no room"))
    with full if rank == 1 else nullcontext():
        pending = tier.async_save(state, 1)
        if rank == 0:
            pending.exception()
        try:
            tier.restore(state) if verb == "restore" else tier.clear()
        except ReshardError as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def kept_after_a_failure(folder: str) -> tuple[str, int | None, list[float]]:
    """Each rank is a host. Rank 1 has no room for its copy when rank 0 has sent it; the next step is kept."""
    rank = dist.get_rank()
    tier = Tier(folder, host=f"h{rank}", timeout=30.0)
    full = mock.patch.object(generation, "_make_room", side_effect=StorageError("no room"))
    said = ""
    with full if rank == 1 else nullcontext():
        try:
            tier.save(sharded(1.0 + rank), 1)
        except ReshardError as error:
            said = str(error).partition("\n")[0]
    tier.save(sharded(3.0 + rank), 2)
    again = sharded(-1)
    step = tier.restore(again).step
    return said, step, again["w"].full_tensor()[:: 1 << 20].tolist()
