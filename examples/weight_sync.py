"""Send weights from an FSDP2 trainer to tensor-parallel replicas of an inference engine after every step.

    python examples/weight_sync.py                            # one process
    torchrun --nproc-per-node 6 examples/weight_sync.py       # two ranks train, and two replicas of two ranks serve

The trainer has separate projections, and the engine fused `qkv_proj` and `gate_up_proj`. Each `run` sends every byte
once, directly into the memory that the engine serves from; replicas pass it on to each other.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.mapping import Concat, Mapping
from reshard.planners import BlockShard, Mesh, Replicate, Shard, TensorLayout, TensorSpec

DIM, Q, KV, INNER, VOCAB, LAYERS = 32, 32, 16, 48, 64, 2
Q_KV, GATE_UP = (Q, KV, KV), (INNER, INNER)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, rows, bias=False) for rows in Q_KV)
        self.o_proj = nn.Linear(Q, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # stands for attention
        k, v = (p(x).repeat(1, Q // KV) for p in (self.k_proj, self.v_proj))
        return self.o_proj(self.q_proj(x) * k.sigmoid() + v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.RMSNorm(DIM)
        self.gate_proj, self.up_proj = (nn.Linear(DIM, rows, bias=False) for rows in GATE_UP)
        self.down_proj = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# from the trainer's names to the engine's; other tensors keep their names
ENGINE_NAMES = Mapping(
    [
        Concat([f"layers.{{i}}.attn.{p}_proj.weight" for p in "qkv"], "layers.{i}.attn.qkv_proj.weight"),
        Concat([f"layers.{{i}}.{p}_proj.weight" for p in ("gate", "up")], "layers.{i}.gate_up_proj.weight"),
    ]
)


def engine_layouts(mesh: Mesh) -> dict[str, TensorLayout]:
    """The layouts of the engine's tensors on a mesh with the axes replica and tp."""
    rows, columns, everywhere = Shard(0), Shard(1), Replicate()
    cuts = {"embed.weight": ((VOCAB, DIM), rows), "head.weight": ((VOCAB, DIM), rows)}
    for i in range(LAYERS):
        cuts |= {
            f"layers.{i}.attn.qkv_proj.weight": ((sum(Q_KV), DIM), BlockShard(0, Q_KV)),
            f"layers.{i}.attn.o_proj.weight": ((DIM, Q), columns),
            f"layers.{i}.gate_up_proj.weight": ((sum(GATE_UP), DIM), BlockShard(0, GATE_UP)),
            f"layers.{i}.down_proj.weight": ((DIM, INNER), columns),
            f"layers.{i}.norm.weight": ((DIM,), everywhere),
        }
    specs = {name: TensorSpec(name, shape, "bfloat16") for name, (shape, _) in cuts.items()}
    return {name: TensorLayout(specs[name], mesh, [Replicate(), cut]) for name, (_, cut) in cuts.items()}


if "RANK" in os.environ and not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
training = range(max(world // 3, 1))
serving = range(len(training) if world > 1 else 0, world)
tp = 2 if len(serving) % 2 == 0 else 1
layouts = engine_layouts(Mesh({"replica": len(serving) // tp, "tp": tp}, serving))

source = weights = None  # None on ranks that have no part of a side
trainers = DeviceMesh("cpu", torch.tensor(training)) if world > 1 else None  # created on all ranks
if rank in training:
    torch.manual_seed(0)
    model = Decoder()
    if trainers is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=trainers)
        fully_shard(model, mesh=trainers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = {"model": reshard.get_model_state_dict(model), "version": 0}
if rank in serving:  # as in an engine: plain tensors with this rank's shards
    weights = {name: torch.zeros(layout.parts(rank)[0].sizes, dtype=torch.bfloat16) for name, layout in layouts.items()}
    weights = {"model": weights, "version": -1}

options = {
    "mapping": ENGINE_NAMES,
    "target_layouts": {f"model.{name}": layout for name, layout in layouts.items()},
    "dtype_policy": "cast",  # from float32 to bfloat16, before sending
}
sync = reshard.prepare(source, weights, **options)
for step in range(1, 4):
    if rank in training:
        model(torch.arange(VOCAB)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        source["version"] = step
    report = sync.run()  # on all ranks; the engine must not serve during the call
    if rank in serving:
        assert weights["version"] == step

reshard.verify_live(source, weights, **options).raise_if_failed()
if world > 1:
    whole_bytes = sum(layout.spec.nbytes for layout in layouts.values())
    assert report.bytes_between_groups == whole_bytes  # once for any number of replicas
if rank == 0:
    print("3 updates sent; the engine's weights are the trainer's")
