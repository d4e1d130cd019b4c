"""Dtypes: the only table of them, and CPU tensors as numpy arrays of raw elements."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch

from planners.geometry.arrays import Array
from planners.geometry.layout import ITEM_SIZES
from reshard.errors import FormatError, did_you_mean

DROPS = "a cast would drop fractions or imaginary parts"
BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "f8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Common short names of dtypes. "fp8" is the one in which weights are stored."""


_POWERS = "float8_e8m0fnu"


def refused_cast(old: object, new: object) -> str:
    """Return why elements of one dtype, or class of numbers, cannot be cast to another. Empty if they can."""
    old, new = (str(one).removeprefix("torch.") for one in (old, new))
    if old == new:
        return ""
    if new.endswith(_POWERS):
        return f"{_POWERS} cannot hold 0 or negative numbers"
    if "_x2" in f"{old} {new}":
        return "torch does not convert pairs of numbers"
    becomes_whole = "int" in new or new == "bool"
    return DROPS * (("float" in old and becomes_whole) or ("complex" in old and "complex" not in new))


def scales_of(name: str, known: Container[str]) -> list[str]:
    """Return the names of the scales of a quantized weight."""
    module = name.rpartition(".")[0]
    found = [f"{name}{end}" for end in ("_scale_inv", "_scale", ".absmax")]
    found += [f"{module}.scale", f"{module}.SCB"]
    return [name for name in found if name in known]


def refused_codes(name: str, old: str, new: str, known: Container[str]) -> str:
    """Return why a float8 tensor cannot be cast to another dtype: it has scales. Empty if it has none."""
    scales = scales_of(name, known) if old.startswith("float8") and old != new else []
    if not scales:
        return ""
    return (
        f"its values must be multiplied by {scales[0]!r}: dequantize it, by Dequantize in a Mapping, "
        "convert --dequantize, or reshard.dequantized(state) before it is saved"
    )


def overflowing(elements: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the number of elements, on any device, beyond the range of a dtype: a cast makes them
    infinite, NaN, the largest number, or another number. Infinite elements count if the dtype has
    no infinity. A complex element counts if either part does. Nothing is read if no element can be
    out of range."""
    least, most = _range(elements.dtype)
    low, high = max(_range(dtype)[0], least), min(_range(dtype)[1], most)
    stay = not _has_infinity(elements.dtype) or _has_infinity(dtype)
    if ((low, high) == (least, most) and stay) or not elements.numel():
        return 0
    numbers = torch.view_as_real(elements.resolve_conj()) if elements.is_complex() else elements
    name = dtype_name(numbers.dtype)
    if name.startswith(("uint", "float8")):  # which torch does not compare; large ones of uint64 become negative
        numbers = numbers.to(torch.int64 if "uint" in name else torch.float32)
    bottom, top = torch.stack(torch.aminmax(numbers)).tolist()
    if low <= bottom and top <= high:  # not where one is NaN
        return 0
    split = torch.split(numbers.reshape(-1), _COMPARED_AT_ONCE)
    parts = (part.float() if part.element_size() == 2 else part for part in split)
    beyond = (((part < low) | (part > high)) & (~part.isinf() | (not stay)) for part in parts)
    return sum(int((one.view(-1, 2).any(1) if elements.is_complex() else one).sum()) for one in beyond)


def holds(dtype: torch.dtype, value: float) -> bool:
    """Return whether a dtype can hold a number. Floats may be rounded, others may not."""
    try:
        made = torch.full((), value, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, TypeError):  # by far too large, or of another kind
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return not overflowing(torch.tensor(float(value), dtype=torch.float64, device="cpu"), dtype)
    return bool(made.item() == value)


_COMPARED_AT_ONCE = 1 << 20


@cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return dtype.is_complex or math.isinf(torch.tensor(math.inf, device="cpu").to(dtype).item())


@cache
def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return info.min, info.max


def full_name(dtype: str | torch.dtype) -> str:
    """Return torch's name of a dtype, also for `bf16`, `fp8`, and other short names. An unknown
    name stays unchanged."""
    name = str(dtype).lower().removeprefix("torch.")
    return SHORT_NAMES.get(name, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `"bfloat16"` for `torch.bfloat16`. Inverse of `dtype_from_name`. Raises FormatError
    for quantized and other dtypes whose elements are not plain numbers."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise FormatError(
            f"{dtype} is not supported: its elements are not plain numbers of 1 to 16 bytes. Of a quantized tensor, "
            "save q.int_repr(), its scale, and its zero point"
        ) from None


def dtype_from_name(name: str) -> torch.dtype:
    """`torch.bfloat16` of `"bfloat16"`. Inverse of `dtype_name`.

    Raises:
        FormatError: for a name that is unknown, or that this version of torch does not have.
    """
    try:
        return BY_NAME[name]
    except (KeyError, TypeError):
        meant = did_you_mean(str(name), [*BY_NAME, *SHORT_NAMES], 0.85)  # float99 is not float64
        near = meant or ": write the name of a torch dtype, such as 'bfloat16'"
        why = f": torch {torch.__version__} does not have it" if name in ITEM_SIZES else near
        raise FormatError(f"unknown dtype {name!r}{why}") from None


# CPU tensors as numpy arrays of raw elements, in which only the bytes matter.


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def item_dtype(itemsize: int) -> np.dtype[Any]:
    """Return a numpy dtype for elements of this number of bytes, for copies of raw bytes."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")


NO_MEMORY = (
    "has no memory: it is on the meta device or a FakeTensor, or its storage was freed, as while a model is offloaded. "
    "Give it memory first"
)


PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])
"""Classes of tensors that are just an array in memory."""


def lacks_memory(local: torch.Tensor) -> bool:
    """Return True if a plain tensor has no memory although its device has some. Reading or writing
    its elements may end the process."""
    if type(local) not in PLAIN:
        return type(local).__name__ == "FakeTensor"
    if local.layout is not torch.strided or local.is_meta or not local.numel():
        return False
    try:  # a part of freed memory still has an address; a functional tensor has a size but no address, as on XLA
        return not local.untyped_storage().nbytes() or not (local.device.type == "xla" or local.data_ptr())
    except NotImplementedError:  # within torch.func.vmap and the like
        return True


def any_lacks_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if one of these tensors lacks memory. Much faster than one by one if none does."""
    with suppress(RuntimeError):  # there are tensors without a storage or an address
        storages = map(torch.Tensor.untyped_storage, tensors)
        if all(map(torch.UntypedStorage.nbytes, storages)) and all(map(torch.Tensor.data_ptr, tensors)):
            return False
    return any(map(lacks_memory, tensors))


def is_resolved(tensor: torch.Tensor) -> bool:
    """Return True if memory holds the tensor's values: it is neither lazily conjugated nor lazily negated."""
    return not (tensor.is_conj() or tensor.is_neg())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its gradient, and with its values in memory. This is a copy only if
    they were not."""
    return tensor.detach().resolve_conj().resolve_neg()


def as_array(tensor: torch.Tensor) -> Array:
    """A CPU tensor of any dtype and strides as an array of `item_dtype`, sharing memory.

    A lazily conjugated or negated tensor is resolved, and then shares none.
    """
    if tensor.requires_grad or not is_resolved(tensor):
        tensor = resolved(tensor)
    itemsize = tensor.element_size()
    if itemsize == 16:
        return tensor.numpy().view("V16")
    return tensor.view(_INTS[itemsize]).numpy().view(f"u{itemsize}")


def row_major_bytes(array: Array) -> memoryview:
    """Return the elements in row-major order. This is a copy only if they have another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def raw_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of the same size, which share memory on any device: `copy_`
    then changes no bit.

    Elements of 16 bytes, and lazily conjugated or negated ones, stay unchanged: copying resolves
    the latter.
    """
    if tensor.element_size() not in _INTS or not is_resolved(tensor):
        return tensor
    return tensor.view(_INTS[tensor.element_size()])
