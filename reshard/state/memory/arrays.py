"""CPU tensors as numpy arrays of raw elements, in which only the bytes matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["as_array", "item_dtype", "raw_elements", "row_major_bytes"]

Array = npt.NDArray[Any]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def item_dtype(itemsize: int) -> np.dtype[Any]:
    """A numpy dtype for elements of this many bytes, of which only the bytes matter."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")


def as_array(tensor: torch.Tensor) -> Array:
    """A CPU tensor of any dtype and strides as an array of `item_dtype`, sharing memory.

    A lazily conjugated or negated tensor is resolved, and then shares none.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    itemsize = tensor.element_size()
    if itemsize == 16:
        return tensor.numpy().view(item_dtype(16))
    return tensor.view(_INTS[itemsize]).numpy().view(item_dtype(itemsize))


def row_major_bytes(array: Array) -> memoryview:
    """The elements in row-major order; a copy only where they do not lie so already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def raw_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size, sharing memory on any device: what `copy_` does to them changes no bit.

    Elements of 16 bytes, and lazily conjugated or negated ones, stay as they are: copying resolves the latter.
    """
    if tensor.element_size() not in _INTS or tensor.is_conj() or tensor.is_neg():
        return tensor
    return tensor.view(_INTS[tensor.element_size()])
