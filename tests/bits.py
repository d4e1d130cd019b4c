"""Tensors of every dtype with any bits, and parts of them, for tests that compare bit by bit."""

from __future__ import annotations

import math

import torch

from reshard.live.dtypes import dtype_from_name

__all__ = ["DTYPES", "INTS", "random_bits", "select"]

DTYPES = [
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64",
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
DTYPES = [dtype_from_name(name) for name in " ".join(DTYPES).split() if hasattr(torch, name)]
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of random bits, including all kinds of NaN. Bools are 0 and 1."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(math.prod((*shape, 0)), dtype=torch.uint8).view(dtype).view(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).view(shape)


def select(tensor: torch.Tensor, dims: list[list[tuple[int, int]]]) -> torch.Tensor:
    """Return the local tensor of a product of intervals. Copies bits as ints, which no kernel normalizes."""
    dtype, wide = tensor.dtype, tensor.itemsize == 16
    bits = torch.view_as_real(tensor).view(torch.int64) if wide else tensor.view(INTS[tensor.itemsize])
    for d, intervals in enumerate(dims):
        bits = bits.index_select(d, torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long))
    return torch.view_as_complex(bits.view(torch.float64)) if wide else bits.view(dtype)
