"""Small models under every parallel layout, and the unparallelized truth that each is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.torch_releases import UNEVEN_STRIDES

HIDDEN = 9 if UNEVEN_STRIDES else 8
"""Rows that FSDP2 over tensor parallelism cuts."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


class Block(nn.Module):
    """A gated MLP with a norm and a counter; hidden sizes divide by nothing in particular."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scratch


class Net(nn.Module):
    """Blocks between an embedding and a head, which may be tied."""

    def __init__(self, dim: int = 6, hidden: int = HIDDEN, depth: int = 2, vocab: int = 11, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(seed: int = 0, **sizes: Any) -> Net:
    """The model that this seed gives on every rank."""
    torch.manual_seed(seed)
    return Net(**sizes)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """The same tokens on every rank, so that averaging over ranks changes nothing."""
    for step in range(steps):
        tokens = torch.arange(4) * (step + 1) % 11
        out = model(tokens)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def truth(optimizer: str = "adamw", seed: int = 0, steps: int = 2, **sizes: Any) -> tuple[dict, dict]:
    """State dicts of a plain model and optimizer; names of the optimizer by the order of its parameters."""
    model = make(seed, **sizes)
    opt = OPTIMIZERS[optimizer](model.parameters())
    train(model, opt, steps)
    names = [name for name, _ in model.named_parameters()]
    raw = opt.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in raw["param_groups"]]
    return model.state_dict(), {"state": {names[i]: s for i, s in raw["state"].items()}, "param_groups": groups}


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, TP_PLAN)
    return model


def tp_all(model: nn.Module) -> nn.Module:
    """Column, row, embedding and sequence parallelism; not meant to be run."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"embed": RowwiseParallel(), "head": ColwiseParallel(), "layers.*.norm": SequenceParallel()}
    return parallelize_module(model, mesh, {**plan, **{f"layers.*.{name}": style for name, style in TP_PLAN.items()}})


def fsdp2_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], TP_PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def fsdp1(strategy: str, use_orig_params: bool) -> Callable[[nn.Module], nn.Module]:
    """FSDP1 with one unit per block; the hybrid strategies on a mesh of two groups."""

    def apply(model: nn.Module) -> nn.Module:
        mesh = None
        if "HYBRID" in strategy:
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
        )

    apply.__name__ = f"fsdp1 {strategy} use_orig_params={use_orig_params}"
    return apply


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_parts(model: nn.Module) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return model


def nested(*layouts: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """One layout around another, the first one innermost."""

    def apply(model: nn.Module) -> nn.Module:
        for layout in layouts:
            model = layout(model)
        return model

    apply.__name__ = "+".join(layout.__name__ for layout in layouts)
    return apply


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A deep copy of all that a get function might change."""
    local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()  # noqa: E731
    return {
        "values": {name: local(t) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "grads": {name: None if p.grad is None else local(p.grad) for name, p in model.named_parameters()},
        "state": [{k: local(v) if torch.is_tensor(v) else v for k, v in s.items()} for s in optimizer.state.values()],
        "groups": copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
        "rng": torch.get_rng_state(),
        "ids": [id(p) for g in optimizer.param_groups for p in g["params"]],
    }
