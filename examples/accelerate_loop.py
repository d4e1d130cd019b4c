"""A training loop under accelerate. Its checkpoints resume on any number of processes; it also reads accelerate's own.

    python examples/accelerate_loop.py --folder ckpt
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --folder ckpt                    # resumes on two processes
    python examples/accelerate_loop.py --folder new --old state_of_accelerate                # from `save_state`

`save` and `load` replace `Accelerator.save_state` and `load_state`. Pass the model as accelerate wrapped it (DDP,
FSDP2, compiled or not): names do not contain wrappers. Pass the optimizer inside accelerate's wrapper.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import reshard


def build(accelerator: Accelerator) -> tuple[nn.Module, Any, Any]:
    """The prepared model, optimizer, and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    return accelerator.prepare(model, optimizer, schedule)


def save(folder: Path, model: nn.Module, optimizer: Any, schedule: Any, step: int) -> None:
    """All processes must call this."""
    model_state, optim_state = reshard.get_state_dict(model, optimizer.optimizer)
    state = {"model": model_state, "optim": optim_state, "schedule": schedule.state_dict(), "step": step}
    state["rng"] = reshard.PerRank(torch.get_rng_state(), on_change="keep")
    reshard.save(state, folder / f"step-{step}")


def load(folder: Path, model: nn.Module, optimizer: Any, schedule: Any) -> int:
    """Fill them from the newest complete checkpoint. Return the number of finished steps."""
    newest = reshard.latest_complete(folder)
    if newest is None:
        return 0
    model_state, optim_state = reshard.get_state_dict(model, optimizer.optimizer)
    state = {"model": model_state, "optim": optim_state, "schedule": schedule.state_dict(), "step": 0}
    state["rng"] = reshard.PerRank(torch.get_rng_state(), on_change="keep")
    reshard.load(state, newest)
    reshard.set_state_dict(model, optimizer.optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"].value)
    return int(state["step"])


def read_old(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Load the model and optimizer that `Accelerator.save_state` wrote on any number of processes.

    accelerate stores the optimizer by integer ids; the live one knows which parameters these are.
    """
    order = reshard.fqn_map(model, optimizer.optimizer).parameter_order()
    saved = reshard.open(path).normalized(hints={"param_names": order})
    reshard.set_state_dict(
        model,
        optimizer.optimizer,
        model_state_dict=whole(saved["model"]),
        optim_state_dict=whole(saved["optim"]),
    )


def whole(value: Any) -> Any:
    """Read the lazy tensors."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    return value[...] if hasattr(value, "stored") else value


def train(folder: Path, steps: int, old: Path | None = None) -> tuple[int, nn.Module, Any, Accelerator]:
    """Train up to `steps`. Return the first step and the final state."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, schedule = build(accelerator)
    first = load(folder, model, optimizer, schedule)
    if first == 0 and old is not None:
        read_old(old, model, optimizer)
    for step in range(first, steps):
        batch = torch.sin(torch.arange(32.0).reshape(4, 8) * (step + 1)).to(accelerator.device)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            save(folder, model, optimizer, schedule, step + 1)
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
