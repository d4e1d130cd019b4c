"""Training frameworks that import `reshard.dcp` instead of torch's DCP, with no other change.

    torchrun --nproc-per-node 2 examples/changed_import.py lightning --folder ckpt --engine reshard --mesh fsdp=2
    torchrun --nproc-per-node 2 examples/changed_import.py lightning --folder ckpt --engine torch --mesh tp=2

The framework's own code saves and resumes: torchtitan's `CheckpointManager` with its own optimizers and schedules,
accelerate's `save_state` and `load_state` for sharded models, Lightning's `Trainer` with its `ModelParallelStrategy`.
`--engine reshard` imports the framework's modules as if this import had been edited in them. Each engine resumes what
the other saved, in any layout and on any number of processes. Equal digests in the last line mean equal bits.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

IMPORTERS = {
    "torchtitan": ["torchtitan.components.checkpointer.dcp"],
    "accelerate": ["accelerate.utils.fsdp_utils"],
    "lightning": [
        "lightning.fabric.strategies.fsdp",
        "lightning.fabric.strategies.model_parallel",
        "lightning.pytorch.strategies.model_parallel",
    ],
}
"""The modules in which each framework imports DCP."""

Trained = tuple[int, nn.Module, torch.optim.Optimizer]


class ChangedImports:
    """An import hook that replaces torch's public DCP with `reshard.dcp` in the named modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name in self.modules else None
        if found is None or found.origin is None:
            return None
        return spec_from_file_location(name, found.origin, loader=ChangedSource(name, found.origin))


class ChangedSource(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        changed, count = re.subn(r"\btorch\.distributed\.checkpoint\b(?!\._)", "reshard.dcp", source)
        assert count, f"{fullname} does not import torch.distributed.checkpoint"
        return compile(changed, self.path, "exec", dont_inherit=True)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard along the axes of the mesh."""
    axes = mesh.mesh_dim_names or ()
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "fsdp" in axes:
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.sin(torch.arange(32.0).reshape(4, 8) * (step + 1))


def torchtitan(folder: Path, mesh: dict[str, int], steps: int) -> Trained:
    """Its `Trainer` needs triton and data sets. This is the part that saves checkpoints."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    class TrainState:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": torch.tensor(self.step)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = int(state["step"])

    model, state = sharded(built(), init_device_mesh("cpu", (*mesh.values(),), mesh_dim_names=(*mesh,))), TrainState()
    config = default_adamw()
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=100)
    manager = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False, keep_latest_k=0).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(folder),
    )
    manager.load()
    for _ in range(steps):
        model(batch(state.step)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
        schedules.step()
        state.step += 1
    if steps:
        manager.save(state.step)
    [optimizer] = optimizers
    return state.step, model, optimizer


def accelerate(folder: Path, mesh: dict[str, int], steps: int) -> Trained:
    """accelerate shards nothing on CPUs, so this shards the model and marks it as sharded by accelerate."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    class Steps:
        done = 0

        def state_dict(self) -> dict[str, Any]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.done = state["done"]

    accelerator, counter = Accelerator(cpu=True), Steps()
    model = sharded(built(), init_device_mesh("cpu", (*mesh.values(),), mesh_dim_names=(*mesh,)))
    accelerator.prepare_model(model, evaluation_mode=True)  # leaves the model unchanged
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    accelerator.register_for_checkpointing(counter)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    if (folder / "state").exists():
        accelerator.load_state(str(folder / "state"))
    for _ in range(steps):
        accelerator.backward(model(batch(counter.done)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        counter.done += 1
    if steps:
        accelerator.save_state(str(folder / "state"))
    return counter.done, model, optimizer.optimizer


def lightning(folder: Path, mesh: dict[str, int], steps: int) -> Trained:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = built()

        def configure_model(self) -> None:
            sharded(self.net, init_device_mesh("cpu", (*mesh.values(),), mesh_dim_names=(*mesh,)))

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(rows).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    earlier = max((int(path.stem.partition("=")[2]) for path in folder.glob("step=*.ckpt")), default=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(mesh.get("fsdp", 1), mesh.get("tp", 1)),
        max_steps=earlier + steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    rows = DataLoader(torch.cat([batch(step) for step in range(100)]), batch_size=4)
    trainer.fit(module, rows, ckpt_path=folder / f"step={earlier}.ckpt" if earlier else None)
    if steps:
        trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")
    return trainer.global_step, module, trainer.optimizers[0]


FRAMEWORKS: dict[str, Callable[[Path, dict[str, int], int], Trained]] = {
    "torchtitan": torchtitan,
    "accelerate": accelerate,
    "lightning": lightning,
}


def run(framework: str, engine: str, folder: Path, mesh: dict[str, int], steps: int) -> Trained:
    """Resume from the folder, train `steps` more steps, save, and return what was trained.

    A process can use one framework and engine."""
    if engine == "reshard" and not any(isinstance(finder, ChangedImports) for finder in sys.meta_path):
        if early := sys.modules.keys() & IMPORTERS[framework]:
            raise ImportError(f"{sorted(early)} are imported already: change their imports in a fresh process")
        sys.meta_path.insert(0, ChangedImports(IMPORTERS[framework]))
    return FRAMEWORKS[framework](folder, mesh, steps)


def main() -> None:
    import reshard

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", choices=["reshard", "torch"], default="reshard")
    parser.add_argument("--mesh", default="fsdp=2", help="fsdp=N or tp=N; torchtitan and accelerate: both, too")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    axes = dict(axis.split("=") for axis in options.mesh.split(","))
    mesh = {name: int(size) for name, size in axes.items()}
    done, model, optimizer = run(options.framework, options.engine, options.folder, mesh, options.steps)
    prints = sorted(reshard.fingerprint(reshard.get_state_dict(model, optimizer)).items())
    if dist.get_rank() == 0:
        digest = hashlib.sha256(repr(prints).encode()).hexdigest()[:16]
        print(f"{options.framework} with {options.engine}: {options.mesh}, {done} steps are done, {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
