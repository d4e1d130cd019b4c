"""A Llama under FSDP2, tensor parallelism, and pipeline stages: traced without a GPU, and trained in any topology.

python examples/llama_fsdp_tp_pp.py                 # what 24 ranks would read from 32, on meta tensors

torchrun --nproc-per-node 4 examples/llama_fsdp_tp_pp.py --folder out --tp 2     # train on 2 x 2 ranks, and save
torchrun --nproc-per-node 3 examples/llama_fsdp_tp_pp.py --folder out            # resume on 3

`reshard demo` runs the same training on processes of one machine, and compares every bit.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import planners
import reshard
from reshard.trace import trace_layout


@dataclass(frozen=True)
class Config:
    dim: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 680
    vocab: int = 1003
    context: int = 64
    """The maximum sequence length."""

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

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        # -1: under tensor parallelism, a rank has only some of the heads
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs), rotate(k, freqs)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate neighboring pairs of each head by the angles of their position: [..., time, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = freqs.cos(), freqs.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


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

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The full model, or the part of one pipeline stage."""

    def __init__(self, config: Config, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        layers = range(stage * config.layers // stages, (stage + 1) * config.layers // stages)
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
        self.norm = nn.RMSNorm(config.dim) if stage == stages - 1 else None
        self.output = nn.Linear(config.dim, config.vocab, bias=False) if stage == stages - 1 else None
        inv_freq = 10_000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.register_buffer("freqs", torch.outer(torch.arange(config.context), inv_freq), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        freqs = self.freqs[: x.shape[1]]
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x, freqs)
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
    """The part of one rank: its stage, sharded by tensor parallelism and then by FSDP2."""
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


# Training on any number of ranks. Each topology resumes what another one saved.

SMALL = Config(layers=4, hidden=688, vocab=256)
"""For text as bytes. The hidden size is not a multiple of three, so three ranks get uneven parts."""
SEQUENCES = 12
"""The batch size of all ranks together, divisible by two and by three."""


class Training:
    """One rank of a job, with its parts of the model, the optimizer, and the text."""

    def __init__(self, dp: int, tp: int, seed: int, on_step: Callable[[int, float], None] = lambda step, loss: None):
        """`on_step` is called with the number and loss of each step."""
        torch.manual_seed(seed)
        self.model = build(SMALL, pp=1, dp=dp, tp=tp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), foreach=False)
        self.dp, self.dp_rank = dp, dist.get_rank() // tp  # ranks along tp get the same sequences
        self.on_step, self.step = on_step, 0
        text = read_text()
        self.text, self.held_back = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self._loss(self.text, self.step, SEQUENCES)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.on_step(self.step, self._mean(loss))
            self.step += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on held-out text."""
        return self._mean(self._loss(self.held_back, 0, 4 * SEQUENCES))

    def save(self, path: str) -> reshard.SaveReport:
        return reshard.save(self.state(), path)

    def state(self) -> dict[str, Any]:
        model, optim = reshard.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "step": self.step}

    def resume(self, path: str) -> reshard.LoadReport:
        """Load a checkpoint of any topology."""
        state = self.state()
        report = reshard.load(state, path)
        reshard.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.step = state["step"]
        return report

    def _loss(self, text: torch.Tensor, seed: int, sequences: int) -> torch.Tensor:
        """The loss of this rank's part of a batch. The batch is the same in every topology."""
        starts = torch.randint(
            len(text) - SMALL.context - 1, (sequences,), generator=torch.Generator().manual_seed(seed)
        )
        rows = [text[int(start) : int(start) + SMALL.context + 1] for start in starts.chunk(self.dp)[self.dp_rank]]
        tokens = torch.stack(rows).long()
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def _mean(self, loss: torch.Tensor) -> float:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def read_text(most: int = 4 << 20) -> torch.Tensor:
    """Text that every machine has, as bytes: the sources of Python's standard library."""
    folder, found = Path(sysconfig.get_path("stdlib")), bytearray()
    for file in sorted(folder.glob("*.py")):
        found += file.read_bytes()
        if len(found) >= most:
            break
    if len(found) < 100_000:
        raise reshard.ReshardError(
            f"{folder} holds {len(found)} bytes of Python sources, too few to train on: "
            "run this with a Python that has its standard library as files"
        )
    return torch.frombuffer(found, dtype=torch.uint8)


def train(folder: str, tp: int, steps: int) -> None:
    """Under torchrun: resume from the folder if it has a checkpoint, train, and save there."""
    dist.init_process_group("gloo")
    training = Training(dist.get_world_size() // tp, tp, seed=0)
    if newest := reshard.latest_complete(folder):
        training.resume(newest)
    training.train(steps)
    report, loss = training.save(f"{folder}/step-{training.step}"), training.evaluate()
    if dist.get_rank() == 0:
        print(f"step {training.step}, loss {loss:.3f}, {report}")
    dist.destroy_process_group()


def trace() -> None:
    """In one process: print what another topology would read."""
    config = Config()
    before = trace_layout(lambda: build(config, pp=2, dp=8, tp=2), world_size=32)
    after = trace_layout(lambda: build(config, pp=1, dp=6, tp=4), world_size=24)
    plan = planners.plan_reads(before, after)
    planners.verify(plan).raise_if_failed()
    print(f"{len(before)} tensors, proved for all {plan.world_size} ranks")
    print(planners.format_plan(plan, limit=8))
    assert not dist.is_initialized()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="train, under torchrun, and save here; otherwise only trace")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.folder is None:
        trace()
    else:
        train(options.folder, options.tp, options.steps)


if __name__ == "__main__":
    main()
