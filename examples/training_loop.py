"""A training loop like torchtitan's: FSDP2, saves in the background, and resuming on any number of ranks.

    torchrun --nproc-per-node 4 examples/training_loop.py --folder ckpt --steps 20
    torchrun --nproc-per-node 3 examples/training_loop.py --folder ckpt --steps 40     # resumes on three ranks

It saves the parameters, the optimizer, the schedule, the step, and the random state of each rank as `PerRank`. It keeps
the last three complete checkpoints. A run that is killed at any moment resumes from the newest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, step: int) -> dict[str, Any]:
    """Everything that is needed to resume."""
    model_state, optim_state = reshard.get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optim": optim_state,
        "schedule": schedule.state_dict(),
        "step": step,
        "rng": reshard.PerRank(torch.get_rng_state(), on_change="keep"),
    }


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> int:
    """Load the newest complete checkpoint, if there is one. Return the step to resume from."""
    newest = reshard.latest_complete(folder)
    if newest is None:
        return 0
    state = state_of(model, optimizer, schedule, 0)
    reshard.load(state, newest)
    reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"].value)
    return int(state["step"])


def train(folder: Path, steps: int, every: int) -> list[float]:
    """Train up to `steps`, and save at regular intervals. Return the losses of this run."""
    model, optimizer, schedule = build()
    torch.manual_seed(100 + dist.get_rank())
    first = resume(folder, model, optimizer, schedule)
    losses: list[float] = []
    pending = None
    for step in range(first, steps):
        batch = torch.randn(16, 48)
        loss = (model(batch).squeeze(-1) - batch[:, 0]).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            if pending is not None:
                pending.result()
            pending = reshard.async_save(state_of(model, optimizer, schedule, step + 1), folder / f"step-{step + 1}")
    if pending is not None:
        pending.result()
    if dist.get_rank() == 0 and folder.exists():
        reshard.prune(folder, keep_last=3)
    dist.barrier()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train(options.folder, options.steps, options.every)
    if dist.get_rank() == 0:
        done = options.steps - len(losses)
        began = f"resumed at step {done}; {len(losses)} more steps" if done else f"{len(losses)} steps"
        print(began + (f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
