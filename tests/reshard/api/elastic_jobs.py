"""What real ranks do in the tests of `reshard.elastic`: by itself, since each of many processes imports it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.api.elastic import tier as keeping
from reshard.elastic import Tier

__all__ = ["trained", "went_on", "whole"]

SHAPES = {"rows": (13, 8), "both": (16, 24), "same": (5,), "one": (), "none": (0, 4)}


def whole(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=made, device="cpu") for name, shape in SHAPES.items()}


def live(mesh: Any, values: dict[str, torch.Tensor], placements: dict[str, list[Any]], step: int) -> dict[str, Any]:
    tensors = {name: distribute_tensor(values[name], mesh, cuts) for name, cuts in placements.items()}
    rest = {name: value.clone() for name, value in values.items() if name not in placements}
    return {"model": {**tensors, **rest}, "step": step, "rng": reshard.PerRank(dist.get_rank(), on_change="keep")}


def trained(folder: str) -> None:
    """8 ranks on 4 hosts: two steps are kept, and in the third all processes of a host are killed."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 4))
    tier = Tier(folder, host=f"h{rank // 2}", deadline_s=30.0)
    cuts = {"rows": [Replicate(), Shard(0)], "both": [Shard(0), Shard(1)]}
    for step in (1, 2):
        report = tier.keep(live(mesh, whole(step), cuts, step), step)
        assert report.number == step
        assert sum(report.bytes_by_host.values()) == 2 * report.total_bytes
    if rank // 2 == 1:
        with mock.patch.object(keeping, "_mirror", side_effect=lambda *_: os.kill(os.getpid(), 9)):
            tier.keep(live(mesh, whole(3), cuts, 3), 3)
    tier.keep(live(mesh, whole(3), cuts, 3), 3)


def went_on(folder: str) -> tuple[int | None, dict[str, torch.Tensor], int]:
    """6 ranks on the 3 hosts that are left, cut otherwise."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3, 2))
    tier = Tier(folder, host=["h0", "h2", "h3"][rank // 2], deadline_s=30.0)
    cuts = {"rows": [Shard(1), Replicate()], "both": [Shard(1), Shard(0)], "same": [Shard(0), Shard(0)]}
    state = live(mesh, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, cuts, 0)
    report = tier.recover(state)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state["model"].items()}
    assert report.bytes_checked > 0
    assert state["rng"].value == rank
    tier.keep(state, 2)
    tier.clear()
    return report.step, full, state["step"]
