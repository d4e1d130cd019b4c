"""The one dtype table: torch's dtypes, their names and their codes in safetensors. Sizes are in `planners`."""

from __future__ import annotations

import torch

from planners.geometry.dtypes import ITEM_SIZES
from reshard.errors import FormatError

__all__ = ["SAFETENSORS_CODES", "dtype_from_code", "dtype_from_name", "dtype_name", "safetensors_code"]

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}

SAFETENSORS_CODES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",  # the header counts half-byte values: the last dim is twice torch's
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""dtype names by the code that stands in a safetensors header."""

_CODE_BY_NAME = {name: code for code, name in SAFETENSORS_CODES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`"bfloat16"` of `torch.bfloat16`. Inverse of `dtype_from_name`. Raises FormatError for quantized and other
    dtypes whose elements are not plain numbers."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise FormatError(f"{dtype} is not supported: its elements are no plain numbers of 1 to 16 bytes") from None


def dtype_from_name(name: str) -> torch.dtype:
    """`torch.bfloat16` of `"bfloat16"`. Inverse of `dtype_name`.

    Raises:
        FormatError: for a name that is unknown, or that this version of torch does not have.
    """
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        why = f"torch {torch.__version__} has no such dtype" if name in ITEM_SIZES else "no such dtype is known"
        raise FormatError(f"unknown dtype {name!r}: {why}") from None


def dtype_from_code(code: str) -> str:
    """dtype name of a safetensors code: `"bfloat16"` of `"BF16"`. Inverse of `safetensors_code`. Raises FormatError."""
    try:
        return SAFETENSORS_CODES[code]
    except (KeyError, TypeError):
        raise FormatError(f"unknown safetensors dtype {code!r}: known are {', '.join(SAFETENSORS_CODES)}") from None


def safetensors_code(name: str) -> str:
    """Safetensors code of a dtype name: `"BF16"` of `"bfloat16"`. Inverse of `dtype_from_code`. Raises FormatError."""
    try:
        return _CODE_BY_NAME[name]
    except (KeyError, TypeError):
        raise FormatError(f"safetensors cannot hold the dtype {name!r}") from None
