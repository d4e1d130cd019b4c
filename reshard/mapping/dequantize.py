"""Weights that are dequantized while they are read: block-scaled ones and MXFP4."""

from __future__ import annotations

from dataclasses import replace

import torch

from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorSpec
from reshard.errors import NormalizationError
from reshard.mapping.mapped_tensors import check_cast, computed
from reshard.stored.tensor import LazyTensor, StoredTensor


def dequantized(weight: StoredTensor, scale: StoredTensor, fqn: str, *, block: Shape, dtype: str) -> StoredTensor:
    """Return `weight * scale`, with one scale for each block of shape `block`, computed in float32
    and cast to `dtype`.

    Raises NormalizationError unless there is one scale per block.
    """
    shape = weight.spec.shape
    wanted = tuple(-(-n // b) for n, b in zip(shape, block))
    if len(block) != len(shape) or scale.spec.shape != wanted:
        raise NormalizationError(
            f"{weight.fqn!r} of shape {list(shape)} in blocks of {list(block)} needs scales of shape {list(wanted)}, "
            f"but {scale.fqn!r} has {list(scale.spec.shape)}"
        )
    check_cast(weight.spec, "float32")
    check_cast(replace(weight.spec, dtype="float32"), dtype)
    values, scales = LazyTensor(weight), LazyTensor(scale)

    def compute(box: Box) -> torch.Tensor:
        low = [o // b for o, b in zip(box.offsets, block)]
        high = [-(-stop // b) for stop, b in zip(box.stops, block)]
        factors = scales[tuple(map(slice, low, high))].to(torch.float32)
        for d, (offset, size, b) in enumerate(zip(box.offsets, box.sizes, block)):
            index = torch.arange(offset, offset + size, device="cpu") // b - offset // b
            factors = factors.index_select(d, index)
        return values[box.slices].to(torch.float32) * factors

    return computed(TensorSpec(fqn, shape, dtype), compute, f"{weight.fqn} dequantized", weight, scale)


_FP4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], device="cpu"
)
"""The values of the 4-bit codes: a sign, two exponent bits, one mantissa bit."""


def mxfp4(blocks: StoredTensor, scales: StoredTensor, fqn: str, *, dtype: str) -> StoredTensor:
    """Return dequantized MXFP4: 4-bit floats, two per byte with the lower half first, times a power
    of two per block.

        blocks uint8 [..., rows, groups, bytes], scales uint8 [..., rows, groups]  ->  [..., groups * bytes * 2, rows]

    Raises NormalizationError for other dtypes, or unless there is one scale per block.
    """
    shape = blocks.spec.shape
    is_right = (blocks.spec.dtype, scales.spec.dtype) == ("uint8", "uint8") and len(shape) >= 3
    if not is_right or scales.spec.shape != shape[:-1]:
        raise NormalizationError(
            f"{blocks.fqn!r}, {blocks.spec.dtype} {list(shape)}, needs scales of uint8 {list(shape[:-1])}, but "
            f"{scales.fqn!r} is {scales.spec.dtype} {list(scales.spec.shape)}"
        )
    rows, groups, width = shape[-3], shape[-2], shape[-1] * 2
    check_cast(replace(blocks.spec, dtype="float32"), dtype)
    values, exponents = LazyTensor(blocks), LazyTensor(scales)

    def compute(box: Box) -> torch.Tensor:
        *outer, column, row = box.slices
        first, stop = column.start // width, -(-column.stop // width)
        part = (*outer, row, slice(first, stop))
        packed = values[part].long()
        numbers = torch.stack([_FP4[packed & 15], _FP4[packed >> 4]], dim=-1).flatten(-2)
        exponent = exponents[part].int().unsqueeze(-1) - 127
        whole = torch.ldexp(numbers, exponent).flatten(-2)
        return whole[..., column.start - first * width : column.stop - first * width].transpose(-1, -2)

    spec = TensorSpec(fqn, (*shape[:-3], groups * width, rows), dtype)
    return computed(spec, compute, f"{blocks.fqn} dequantized", blocks, scales)
