"""A Llama under FSDP2 x tensor parallelism x pipeline stages, traced without a GPU: what would a new topology move?

python examples/llama_fsdp_tp_pp.py                 # 32 ranks onto 24, in one process, on meta tensors
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import planners
from reshard.trace import trace_layout


@dataclass(frozen=True)
class Config:
    dim: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 680
    vocab: int = 1003

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """All of the model, or the layers and ends of one pipeline stage."""

    def __init__(self, config: Config, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        layers = range(stage * config.layers // stages, (stage + 1) * config.layers // stages)
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
        self.norm = nn.RMSNorm(config.dim) if stage == stages - 1 else None
        self.output = nn.Linear(config.dim, config.vocab, bias=False) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


TP_PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
}


def build(config: Config, pp: int, dp: int, tp: int) -> Llama:
    """What one rank of the job has: its stage, cut by tensor parallelism first and by FSDP2 then."""
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    stage = Llama(config, mesh.get_local_rank("pp"), pp)
    if tp > 1:
        if stage.tok_embeddings is not None:
            parallelize_module(stage.tok_embeddings, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        if stage.output is not None:
            parallelize_module(stage.output, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        for block in stage.layers.values():
            parallelize_module(block, mesh["tp"], TP_PLAN)
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    return stage


def main() -> None:
    config = Config()
    before = trace_layout(lambda: build(config, pp=2, dp=8, tp=2), world_size=32)
    after = trace_layout(lambda: build(config, pp=1, dp=6, tp=4), world_size=24)
    plan = planners.plan_reads(before, after)
    planners.verify(plan).raise_if_failed()
    print(f"{len(before)} tensors, proved for all {plan.world_size} ranks")
    print(planners.format_plan(plan, limit=8))
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
