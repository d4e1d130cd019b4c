"""What the processes of the round-trip tests do: train a model in some topology, save it, load it elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from tests.torch_releases import UNEVEN_STRIDES

STEPS = 2


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that nothing divides: 13 rows of embedding, 10 wide, 9 hidden where torch can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(Block(10, 9 if UNEVEN_STRIDES else 8) for _ in range(2))
        self.head = nn.Linear(10, 13, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def build(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def parallelize(net: Net, topology: str) -> nn.Module:
    """Put a whole model into a topology: `plain`, `ddp`, `fsdp`, `hsdp`, `tp`, `fsdp_tp`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if topology == "plain":
        return net
    if topology == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if topology == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        return _fsdp(net, mesh)
    if topology == "hsdp":
        return _fsdp(net, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    if topology == "tp":
        return _tp(net, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    if topology == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return _fsdp(_tp(net, mesh["tp"]), mesh["dp"])
    raise AssertionError(topology)


def _fsdp(net: nn.Module, mesh: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _tp(net: nn.Module, mesh: Any) -> nn.Module:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def fill_as_trained(model: nn.Module, optimizer: torch.optim.Optimizer, truth: dict[str, Any]) -> None:
    """Give model and optimizer the values of a model trained in one process, through our own setters."""
    reshard.set_state_dict(
        model,
        optimizer,
        model_state_dict=truth["model"],
        optim_state_dict=truth["optim"],
        options=reshard.StateDictOptions(full_state_dict=True),
    )


def train_truth(seed: int = 0) -> dict[str, Any]:
    """Model and AdamW state of the unparallelized model after a few steps."""
    net = build(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        net(torch.randint(0, 13, (4, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.seen += 20
    return whole(net, optimizer)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state, gathered on every rank by torch itself."""
    state = sharded(model, optimizer)
    return _gather(state)


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optim_state = reshard.get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def _gather(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _gather(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_gather(v) for v in value)
    return value


def save_job(topology: str, path: str, truth: dict[str, Any]) -> dict[str, Any]:
    """Save the truth out of `topology`; returns what the report says."""
    model = parallelize(build(7), topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fill_as_trained(model, optimizer, truth)
    report = reshard.save(sharded(model, optimizer), path)
    return {"total": report.total_bytes, "written": report.bytes_written}


def load_job(topology: str, path: str) -> dict[str, Any]:
    """Load into a differently initialized model in `topology`; returns the gathered state and the report."""
    model = parallelize(build(8), topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fill_as_trained(model, optimizer, train_truth(seed=1))  # other values, so that there is something to overwrite
    state = sharded(model, optimizer)
    report = reshard.load(state, path)
    model_state, optim_state = state["model"], state["optim"]
    reshard.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return {"state": whole(model, optimizer), "needed": report.bytes_needed, "read": report.bytes_read}


def save_tensors(path: str, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], placements: list[Any]) -> None:
    """Save tensors as DTensors on a mesh of this shape."""
    mesh = init_device_mesh("cpu", shape)
    reshard.save({k: distribute_tensor(t, mesh, _fitting(t, placements)) for k, t in tensors.items()}, path)


def load_tensors(path: str, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], placements: list[Any]) -> Any:
    """Load into zeroed DTensors on a mesh of this shape; the gathered tensors and the bytes needed and read."""
    mesh = init_device_mesh("cpu", shape)
    state = {k: distribute_tensor(torch.zeros_like(t), mesh, _fitting(t, placements)) for k, t in tensors.items()}
    report = reshard.load(state, path)
    return {k: t.full_tensor() for k, t in state.items()}, report.bytes_needed, report.bytes_read


def _fitting(tensor: torch.Tensor, placements: list[Any]) -> list[Any]:
    return [p if isinstance(p, Shard) and p.dim < tensor.ndim else Replicate() for p in placements]
