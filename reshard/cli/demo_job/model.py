"""A small Llama-style transformer: rotary embeddings, grouped queries, gated feed-forward, root-mean-square norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Config", "Transformer", "build"]


@dataclass(frozen=True)
class Config:
    """Sizes; the hidden size is no multiple of three on purpose, so that three ranks get uneven parts."""

    vocab: int = 256  # bytes
    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    context: int = 64
    """Longest sequence, in bytes."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, width, bias=False)
        self.wv = nn.Linear(config.dim, width, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """`x`: [batch, time, dim]; `turns`: [time, head_dim / 2] complex numbers of length 1."""
        batch, time, _ = x.shape
        # -1: under tensor parallelism a rank has only some of the heads
        q = _rotate(self.wq(x).view(batch, time, -1, self.head_dim), turns)
        k = _rotate(self.wk(x).view(batch, time, -1, self.head_dim), turns)
        v = self.wv(x).view(batch, time, -1, self.head_dim)
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        projected: torch.Tensor = self.wo(out.transpose(1, 2).reshape(batch, time, -1))
        return projected


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of every head by the angles of their position."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turns.real[:, None], turns.imag[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, dim] to the same."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """[batch, time, dim] to the same."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    turns: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        speeds = 10_000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.context), speeds)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: [batch, time] to [batch, time, vocab]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns[: tokens.shape[1]])
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def build(config: Config, seed: int) -> Transformer:
    """The model that this seed gives, on every rank."""
    torch.manual_seed(seed)
    model = Transformer(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model
