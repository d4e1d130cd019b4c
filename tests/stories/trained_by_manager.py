"""A training script as a user would write it, for `torchrun`: tests kill it and start it again in other layouts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard import Every, Keep

EVERY, KEEP = 4, Keep(last=2, every=25)


def train(root: str, memory: str, layout: str, steps: int, told: str) -> None:
    dp, tp = (int(size) for size in layout.split("x"))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    state = {"model": model, "optim": optimizer, "schedule": schedule, "step": 0}
    tier = reshard.elastic.Tier(memory, copies=0)
    with reshard.CheckpointManager(
        root, every=Every(steps=EVERY), keep=KEEP, full_every=3, memory=tier, memory_every=Every(steps=2)
    ) as manager:
        manager.restore(state)
        while state["step"] < steps:
            data = torch.randn(24, 16, generator=torch.Generator().manual_seed(state["step"]))
            mine = data.chunk(dp)[mesh.get_local_rank("dp")]
            loss = (model(mine) - mine.sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
            losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
            dist.all_gather(losses, loss.detach())
            if dist.get_rank() == 0:
                with Path(told).open("a") as file:
                    file.write(f"{state['step']} {torch.stack(losses).double().mean().item().hex()}\n")
            if manager.save(state["step"], state).preempted:
                break


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    dist.destroy_process_group()
