"""How the checkpoint beside this was made, by DeepSpeed 0.19.8 on CPU: `torchrun --nproc-per-node=4 make.py`.

Two MLPs whose first layer is cut by rows and whose second by columns; two tensor parallel times two data parallel
ranks, ZeRO-1, bf16 with masters in float32. The learning rate is 0: the masters are `truth.pt`, rounded to bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TP = 2
HERE = Path(__file__).parent


class Mpu:
    """Which ranks belong together, as Megatron tells DeepSpeed."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp_rank, self.dp_rank, self.dp = rank % TP, rank // TP, world // TP
        tp_groups = [dist.new_group([d * TP + t for t in range(TP)]) for d in range(self.dp)]
        dp_groups = [dist.new_group([d * TP + t for d in range(self.dp)]) for t in range(TP)]
        answers = {
            "model_parallel": (self.tp_rank, TP, tp_groups[self.dp_rank]),
            "tensor_model_parallel": (self.tp_rank, TP, tp_groups[self.dp_rank]),
            "data_parallel": (self.dp_rank, self.dp, dp_groups[self.tp_rank]),
            "pipeline_model_parallel": (0, 1, None),
        }
        for name, values in answers.items():
            for what, value in zip(("rank", "world_size", "group"), values):
                setattr(self, f"get_{name}_{what}", lambda value=value: value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up_proj = nn.Linear(6, 8 // TP)
        self.down_proj = nn.Linear(8 // TP, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


def whole(net: nn.Module, tp_rank: int) -> dict[str, torch.Tensor]:
    """Gives each parameter its part of a whole one, and returns the whole ones."""
    full = {}
    for name, parameter in net.named_parameters():
        dim = 0 if "up_proj" in name else 1 if name.endswith("down_proj.weight") else None
        shape = [size * TP if d == dim else size for d, size in enumerate(parameter.shape)]
        full[name] = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))
        parameter.data.copy_(full[name] if dim is None else full[name].chunk(TP, dim)[tp_rank])
    return full


def main() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    mpu = Mpu()
    net = nn.Sequential()
    net.layers = nn.Sequential(Block(), Block())
    full = whole(net, mpu.tp_rank)
    adam: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}}
    config = {
        "train_batch_size": mpu.dp,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": adam,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config, mpu=mpu)
    engine.backward(engine(torch.ones(3, 6, dtype=torch.bfloat16)).pow(2).sum())
    engine.step()
    engine.save_checkpoint(str(HERE / "ckpt"), tag="global_step1")
    if dist.get_rank() == 0:
        torch.save(full, HERE / "truth.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
