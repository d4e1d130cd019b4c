"""A mixture of experts: the axis ep distributes the experts, and FSDP2 shards them; both axes shard all other tensors.

python examples/moe_expert_parallel.py              # 16 ranks, from ep 8 to ep 4, in one process, on meta tensors
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import planners
from reshard.trace import trace_layout


@dataclass(frozen=True)
class Config:
    dim: int = 128
    hidden: int = 192
    layers: int = 4
    experts: int = 16
    chosen: int = 2


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` is (tokens, dim), `weights` is (tokens, experts). Every expert sees every token; most weights are 0."""
        hidden = F.silu(torch.einsum("td,ehd->teh", x, self.w1))
        return torch.einsum("teh,edh,te->td", hidden, self.w2, weights)


class MoEBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.norm = nn.RMSNorm(config.dim)
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scores = self.router(y).softmax(-1)
        top = scores.topk(self.chosen, -1)
        weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        return x + self.experts(y, weights)


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoEBlock(config) for _ in range(config.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


def deal_experts(experts: Experts, ep: DeviceMesh) -> None:
    """Each rank of the axis keeps its part of the experts."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, ep, [Shard(0)])))


def build(config: Config, dp: int, ep: int) -> MoE:
    """The part of one rank. Experts are distributed first; FSDP2 then shards those of a rank."""
    world = init_device_mesh("cpu", (dp * ep,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    model = MoE(config)
    for block in model.layers:
        deal_experts(block.experts, grid["ep"])
        fully_shard(block.experts, mesh=grid["dp"])
        fully_shard(block, mesh=world)
    fully_shard(model, mesh=world)
    return model


def main() -> None:
    config = Config()
    before = trace_layout(lambda: build(config, dp=2, ep=8), world_size=16)
    after = trace_layout(lambda: build(config, dp=4, ep=4), world_size=16)
    plan = planners.plan_reads(before, after)
    planners.verify(plan).raise_if_failed()
    for fqn in list(after)[:4]:
        print(f"{fqn:24} {before[fqn].form}  ->  {after[fqn].form}")
    print(planners.format_plan(plan, limit=4))


if __name__ == "__main__":
    main()
