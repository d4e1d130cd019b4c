"""A training loop for `torch.distributed.checkpoint` that runs on reshard after changing one import.

    torchrun --nproc-per-node 4 examples/one_import.py --folder ckpt --engine torch --mesh fsdp=4
    torchrun --nproc-per-node 4 examples/one_import.py --folder ckpt --engine reshard --mesh fsdp=2,tp=2   # resumes

Each engine resumes what the other saved, on any number of processes and in any layout.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ENGINES = {"torch": "torch.distributed.checkpoint", "reshard": "reshard.dcp"}


class App:
    """The state to save, as in torch's tutorial: an object with `state_dict` and `load_state_dict`."""

    def __init__(self, dcp: Any, mesh: dict[str, int]) -> None:
        self.dcp, self.step = dcp, 0
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        if "tp" in mesh:
            parallelize_module(self.model, devices["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if "fsdp" in mesh:
            fully_shard(self.model, mesh=devices["fsdp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        functions = importlib.import_module(f"{self.dcp.__name__}.state_dict")
        model, optimizer = functions.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        functions = importlib.import_module(f"{self.dcp.__name__}.state_dict")
        functions.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]

    def train(self) -> None:
        batch = torch.sin(torch.arange(32.0).reshape(4, 8) * (self.step + 1))
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def run(engine: str, folder: Path, mesh: dict[str, int], steps: int) -> App:
    """Resume from the folder, train `steps` more steps, save, and return the state."""
    dcp = importlib.import_module(ENGINES[engine])  # your program imports one of the two
    app = App(dcp, mesh)
    if (folder / ".metadata").exists():
        dcp.load({"app": app}, checkpoint_id=folder)
    dist.barrier()
    for _ in range(steps):
        app.train()
    if steps:
        dcp.save({"app": app}, checkpoint_id=folder, planner=dcp.DefaultSavePlanner())
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="reshard")
    parser.add_argument("--mesh", default="fsdp=1", help="such as fsdp=2,tp=2")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    axes = dict(axis.split("=") for axis in options.mesh.split(","))
    app = run(options.engine, options.folder, {name: int(size) for name, size in axes.items()}, options.steps)
    if dist.get_rank() == 0:
        print(f"{options.engine}: {options.mesh}, {app.step} steps are done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
