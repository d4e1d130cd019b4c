"""Element types by name, with their size: all that geometry needs to know of a dtype."""

from __future__ import annotations

from planners.errors import PlanError

__all__ = ["ITEM_SIZES", "itemsize"]

ITEM_SIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two values a byte; torch counts the pair as one element
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element, keyed by torch's name of the dtype without the `torch.` in front."""


def itemsize(dtype: str) -> int:
    """Bytes per element of `dtype`, a name such as `"bfloat16"`.

    Raises:
        PlanError: for a name that is not in `ITEM_SIZES`.
    """
    try:
        return ITEM_SIZES[dtype]
    except (KeyError, TypeError):
        known = ", ".join(ITEM_SIZES)
        raise PlanError(f"unknown dtype {dtype!r}: give a name out of {known}") from None
