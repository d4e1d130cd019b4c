"""A training loop under accelerate. Its checkpoints resume on any number of processes; it also reads accelerate's own.

    python examples/accelerate_loop.py --folder ckpt
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --folder ckpt                    # resumes on two processes
    python examples/accelerate_loop.py --folder new --old state_of_accelerate                # from `save_state`

`reshard.integrations.accelerate` has `save_state` and `load_state`, which replace the methods of `Accelerator`, and
`state_of`, which a `reshard.CheckpointManager` saves. Names do not contain wrappers (DDP, FSDP2, compiled or not).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import reshard
from reshard.integrations.accelerate import load_state, save_state, state_of


def build(accelerator: Accelerator) -> tuple[nn.Module, Any, Any]:
    """The prepared model, optimizer, and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    return accelerator.prepare(model, optimizer, schedule)


def read_old(path: Path, accelerator: Accelerator, converted: Path) -> None:
    """Load the model and optimizer that `Accelerator.save_state` wrote on any number of processes.

    accelerate stores optimizer state under numbers. The live optimizer knows whose they are.
    """
    state = state_of(accelerator)
    names = reshard.fqn_map(state["model"], state["optim"][0]).parameter_order()
    if accelerator.is_main_process:
        reshard.convert(path, converted, normalized=True, hints={"param_names": names})
    accelerator.wait_for_everyone()
    reshard.load({"model": state["model"], "optim": state["optim"][0]}, converted, strict="subset")  # without the rest


def train(folder: Path, steps: int, old: Path | None = None) -> tuple[int, nn.Module, Any, Accelerator]:
    """Train up to `steps`. Return the first step and the final state."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, schedule = build(accelerator)
    first = 0
    if reshard.latest_complete(folder) is not None:
        first = load_state(accelerator, folder)["step"]
    elif old is not None:
        read_old(old, accelerator, folder.with_name(f"{folder.name}-converted"))
    for step in range(first, steps):
        batch = torch.sin(torch.arange(32.0).reshape(4, 8) * (step + 1)).to(accelerator.device)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            save_state(accelerator, folder / f"step-{step + 1}", {"step": step + 1})
    return first, model, optimizer, accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--old", type=Path)
    options = parser.parse_args()
    first, _, _, accelerator = train(options.folder, options.steps, options.old)
    accelerator.print(f"number of processes: {accelerator.num_processes}, steps {first} to {options.steps}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
