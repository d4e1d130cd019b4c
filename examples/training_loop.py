"""A training loop with FSDP2 that saves in the background and resumes on any number of ranks.

    torchrun --nproc-per-node 4 examples/training_loop.py --folder run --steps 20
    torchrun --nproc-per-node 3 examples/training_loop.py --folder run --steps 40     # resumes on three ranks

The state holds the model, the optimizer, the schedule, the step, and each rank's random state. The manager keeps the
last three complete checkpoints. A run that is killed at any moment resumes from the newest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A sharded model with its optimizer and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(4)), nn.Linear(48, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))  # on GPUs: "cuda"
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def train(folder: Path, steps: int, every: int) -> list[float]:
    """Train up to `steps`, and save at regular intervals. Return the losses of this run."""
    model, optimizer, schedule = build()
    torch.manual_seed(100 + dist.get_rank())  # each rank has its own batches
    state = {"model": model, "optim": optimizer, "sched": schedule, "rng": torch.default_generator, "step": 0}
    losses: list[float] = []
    with reshard.CheckpointManager(folder, every=every, keep=reshard.Keep(last=3)) as manager:
        manager.restore(state)  # the newest complete checkpoint, if there is one
        while state["step"] < steps:
            batch = torch.randn(16, 48)
            loss = (model(batch).squeeze(-1) - batch[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            state["step"] += 1
            if manager.save(state["step"], state).preempted:  # saved after SIGTERM: end the job
                return losses
        manager.save(state["step"], state, force=True)  # the last step, even if it is not due
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")  # on GPUs: "nccl"
    losses = train(options.folder, options.steps, options.every)
    if dist.get_rank() == 0:
        done = options.steps - len(losses)
        began = f"resumed at step {done}; {len(losses)} more steps" if done else f"{len(losses)} steps"
        print(began + (f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
