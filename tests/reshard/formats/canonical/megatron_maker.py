"""Megatron models of any size as numbers, and their checkpoints by the rules of its parallelism, in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from reshard.formats.dcp.reader import DcpIndex
from reshard.formats.megatron.files import MegatronFacts
from reshard.formats.torch_save.reader import TorchFile
from reshard.live.dtypes import dtype_name
from reshard.stored.contents import Contents
from reshard.stored.source import BytesSource
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

Tensors = dict[str, torch.Tensor]
VOCAB, PADDED = 50, 64


@dataclass(frozen=True)
class Shape:
    """What the model is like."""

    layers: int = 4
    hidden: int = 24
    ffn: int = 56
    experts: int = 0
    fused_norms: bool = False
    """Whether a norm is a part of the linear layer behind it, and so registered there."""
    gated: bool = True
    dtype: torch.dtype = torch.float32
    tied: bool = False

    def params(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and whole shapes in the order of registration."""
        out: list[tuple[str, tuple[int, ...]]] = [("embedding.word_embeddings.weight", (PADDED, self.hidden))]
        for layer in range(self.layers):
            out += [(f"decoder.layers.{layer}.{name}", shape) for name, shape in self._layer()]
        out.append(("decoder.final_layernorm.weight", (self.hidden,)))
        return out if self.tied else [*out, ("output_layer.weight", (PADDED, self.hidden))]

    def _layer(self) -> list[tuple[str, tuple[int, ...]]]:
        h = self.hidden
        norm1, norm2 = [("input_layernorm.weight", (h,))], [("pre_mlp_layernorm.weight", (h,))]
        proj = [("self_attention.linear_proj.weight", (h, h))]
        qkv = [("self_attention.linear_qkv.weight", (2 * h, h)), ("self_attention.linear_qkv.bias", (2 * h,))]
        wide = 2 * self.ffn if self.gated else self.ffn
        attention = [*proj, *norm1, *qkv] if self.fused_norms else [*norm1, *proj, *qkv]
        if not self.experts:
            return [*attention, *norm2, ("mlp.linear_fc1.weight", (wide, h)), ("mlp.linear_fc2.weight", (h, self.ffn))]
        out = [*attention, *norm2, ("mlp.router.weight", (self.experts, h))]
        for expert in range(self.experts):
            front = f"mlp.experts.local_experts.{expert}"
            out += [(f"{front}.linear_fc1.weight", (wide, h)), (f"{front}.linear_fc2.weight", (h, self.ffn))]
        return out


def tensors(shape: Shape, seed: int, dtype: torch.dtype | None = None) -> Tensors:
    """Random values for every parameter, the vocabulary's padding too."""
    generator = torch.Generator().manual_seed(seed)
    kind = dtype or shape.dtype
    return {name: torch.randn(size, generator=generator).to(kind) for name, size in shape.params()}


def cropped(values: Tensors) -> Tensors:
    """The same without the padding."""
    return {n: t[:VOCAB] if "word_embeddings" in n or "output_layer" in n else t for n, t in values.items()}


def cut_dim(name: str) -> int | None:
    """The dim that tensor parallelism cuts."""
    if "layernorm" in name or "router" in name:
        return None
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0


def shard(name: str, tensor: torch.Tensor, tp: int, rank: int, gated: bool) -> torch.Tensor:
    """What a tensor parallel rank has of a parameter."""
    dim = cut_dim(name)
    if dim is None:
        return tensor
    halves = tensor.chunk(2, 0) if gated and "linear_fc1" in name else (tensor,)
    return torch.cat([half.chunk(tp, dim)[rank] for half in halves], dim)


def stored(key: str, tensor: torch.Tensor, boxes: Iterable[Box] | None = None) -> StoredTensor:
    """A tensor in memory as a stored one, in chunks."""
    chunks = []
    whole = tensor.contiguous()
    for box in boxes or [Box.full(tensor.shape)]:
        part = whole[box.slices].clone(memory_format=torch.contiguous_format)
        data = part.reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b""
        window = Window.row_major(0, box.sizes, tensor.element_size())
        chunks.append(StoredChunk(box, Extent(BytesSource(data, key), window)))
    return StoredTensor(TensorSpec(key, tuple(tensor.shape), dtype_name(tensor.dtype)), tuple(chunks))


def saved_name(name: str) -> str:
    """The key under which Megatron-core stores a parameter, with its layer's number."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def stacked(shape: Shape, values: Tensors) -> Tensors:
    """Whole stacks of layers, and of layers and experts."""
    out: Tensors = {}
    first = [n for n in values if n.startswith("decoder.layers.0.")]
    for name in values:
        if ".layers." not in name:
            out[name] = values[name]
        elif name in first:
            tail = name.removeprefix("decoder.layers.0.")
            if "local_experts" not in tail:
                rows = [values[f"decoder.layers.{layer}.{tail}"] for layer in range(shape.layers)]
                out["decoder.layers." + saved_name(tail)] = torch.stack(rows)
            elif ".local_experts.0." in tail:
                end = tail.partition(".local_experts.0.")[2]
                every = [
                    torch.stack(
                        [
                            values[name.replace("layers.0", f"layers.{n}").replace("_experts.0", f"_experts.{e}")]
                            for e in range(shape.experts)
                        ]
                    )
                    for n in range(shape.layers)
                ]
                out[f"decoder.layers.mlp.experts.experts.{end}"] = torch.stack(every)
    return out


def numbered(values: Tensors) -> Tensors:
    """One key a parameter, gates and ups apart, behind a wrapper's prefix: the other generation of names."""
    out: Tensors = {}
    for name, tensor in values.items():
        key = "module." + saved_name(name).replace("experts.local_experts.", "experts.experts.")
        if "linear_fc1.weight" in key:
            out[key + "_w"], out[key + "_v"] = tensor.chunk(2, 0)
        else:
            out[key] = tensor
    return out


def rows(tensor: torch.Tensor, parts: int) -> list[Box]:
    """Chunks along dim 0."""
    at, boxes = 0, []
    for piece in tensor.chunk(parts, 0) if tensor.ndim and tensor.shape[0] else [tensor]:
        sizes = tuple(piece.shape)
        boxes.append(Box((at, *(0,) * (len(sizes) - 1)) if sizes else (), sizes))
        at += sizes[0] if sizes else 0
    return boxes


def gridded(key: str, tensor: torch.Tensor, grid: Sequence[int], cuts: int) -> StoredTensor:
    """A tensor in cells that are flattened, each cell in several pieces."""
    cell = [n // g for n, g in zip(tensor.shape, grid)]
    size = math.prod(cell)
    flat = torch.empty((*grid, size), dtype=tensor.dtype)
    boxes = []
    for at in itertools.product(*map(range, grid)):
        part = tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, cell))]
        flat[at] = part.reshape(-1)
        edges = np.linspace(0, size, cuts + 1).astype(int).tolist()
        ones = (1,) * len(at)
        boxes += [Box((*at, a), (*ones, b - a)) for a, b in itertools.pairwise(edges) if a < b]
    return stored(key, flat, boxes)


def place(sizes: Sequence[int], bucket_size: int | None, dp: int) -> list[list[tuple[int, int]]]:
    """Where Megatron puts parameters of these sizes: by bucket, start and stop of each within it."""
    unit = math.lcm(dp, 128)
    buckets: list[list[tuple[int, int]]] = [[]]
    start = begin = 0
    for n in sizes:
        start = -(-start // 64) * 64
        stop = start + n
        buckets[-1].append((start - begin, stop - begin))
        if bucket_size is not None and stop - begin >= bucket_size:
            start = begin = -(-stop // unit) * unit
            buckets.append([])
        else:
            start = stop
    return buckets if buckets[-1] else buckets[:-1]


def buckets(
    front: str, names: Sequence[str], local: Mapping[str, Mapping[str, torch.Tensor]], bucket_size: int | None, dp: int
) -> dict[str, StoredTensor]:
    """The flat buckets of one buffer: `local` has the states of each parameter as this rank has them."""
    order = list(reversed(names))
    out: dict[str, StoredTensor] = {}
    places = place([next(iter(local[n].values())).numel() for n in order], bucket_size, dp)
    at = 0
    for b, inside in enumerate(places):
        here = order[at : at + len(inside)]
        at += len(inside)
        for state in next(iter(local.values())):
            flat = torch.full((inside[-1][1],), 7.0)
            for name, (start, stop) in zip(here, inside):
                flat[start:stop] = local[name][state].reshape(-1)
            edges = sorted({0, len(flat), *(e for pair in inside for e in pair), *range(0, len(flat), 333 * dp)})
            boxes = [Box((a,), (z - a,)) for a, z in itertools.pairwise(edges)]
            key = f"{front}.bucket_idx_{b}.{state}"
            out[key] = stored(key, flat, boxes)
    return out


def _no_object(key: str) -> TorchFile:
    raise AssertionError(key)


def contents(tensors_: Mapping[str, StoredTensor], args: Mapping[str, Any], **facts: Any) -> Contents:
    """What the reader of `torch_dist` would find."""
    common = {"args": {"vocab_size": VOCAB, "padded_vocab_size": PADDED, **args}, "optimizer": {}}
    index = DcpIndex(mcore_data=facts.pop("mcore_data", None))
    return Contents(dict(tensors_), format="megatron", facts=MegatronFacts(_no_object, index, common=common, **facts))
