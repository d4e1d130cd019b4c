"""Where the elements of two tensors differ, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reshard.errors import FormatError
from reshard.live.copy_streams import to_host
from reshard.live.dtypes import dtype_name, raw_elements
from reshard.live.fingerprints import float64_is_exact
from reshard.live.tensors import raw_bytes


def number(element: torch.Tensor) -> Any:
    """Return an element as a Python number, or the bits of a packed one, such as float4, in hexadecimal."""
    try:
        return element.item()
    except NotImplementedError:
        return f"{raw_elements(element).item():#x}"


def shown(x: Any, y: Any) -> tuple[str, str]:
    """Format two numbers, with six digits if these show the difference, and otherwise with all digits."""
    short = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in (x, y)]
    return (str(x), str(y)) if short[0] == short[1] else (short[0], short[1])


def largest(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute and the largest relative difference of two finite elements.

    Differences are relative to the second element. Both are 0 for packed numbers, such as float4.
    """
    x, y = _on_one_device(x, y)
    try:
        if x.is_floating_point() and y.is_floating_point() and max(x.itemsize, y.itemsize) <= 4:
            x, y = x.float(), y.float()  # in a third of the time that exact distances take
            apart = (x - y).abs_()
        else:
            x, y, apart = wide(x, y)
        if not (most := apart.max()).isfinite():
            x, y, apart = wide(x, y)  # the distance of two finite elements can overflow float32
            most = apart.masked_fill_(~(x.isfinite() & y.isfinite()), 0.0).max()
    except (FormatError, NotImplementedError):
        return 0.0, 0.0
    ratio = apart.div_(y.abs())
    if (relative := ratio.max()).isnan():  # where both are 0, or one is NaN
        relative = ratio.nan_to_num_(0.0, torch.inf).max()
    return float(most), float(relative)


def _on_one_device(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    if x.device != y.device or not (x.device.type == "cpu" or float64_is_exact(x.device)):
        return to_host([x, y])
    return x, y


def wide(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both in a wide dtype, and their exact distances. Raises FormatError for packed numbers, such as float4."""
    dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    try:
        a, b = x.to(dtype), y.to(dtype)
    except NotImplementedError as error:
        raise FormatError(f"torch cannot convert {dtype_name(x.dtype)}: compare without rtol= and atol=") from error
    if a.is_complex() or not {x.dtype, y.dtype} & {torch.int64, torch.uint64}:
        return a, b, (a - b).abs()
    (high, low), (other_high, other_low) = _halves(x), _halves(y)
    return a, b, ((high - other_high).to(dtype) * 2**32 + (low - other_low)).abs()


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each number into `high` and `low`, so that it is `high * 2**32 + low`, and both are exact in float64."""
    if x.is_floating_point():
        low = torch.fmod(x.double(), 2**32)
        return (x.double() - low) / 2**32, low
    is_unsigned = x.dtype == torch.uint64
    whole = x.view(torch.int64) if is_unsigned else x.to(torch.int64)
    high = whole >> 32
    return high & 0xFFFF_FFFF if is_unsigned else high, whole & 0xFFFF_FFFF


def close(x: torch.Tensor, y: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> torch.Tensor:
    """Return where two tensors are equal within the tolerances.

    NaN equals NaN, in each part of a complex number.
    """
    found = torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    if not x.is_complex():
        return found
    parts = close(torch.view_as_real(x), torch.view_as_real(y), rtol, atol).all(dim=-1)
    return torch.where(x.isfinite() & y.isfinite(), found, parts)


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.device == y.device and torch.equal(raw_bytes(x.contiguous()), raw_bytes(y.contiguous()))


def differing(x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Return where two tensors of one shape differ, computed on their common device, or on the host."""
    x, y = _on_one_device(x, y)
    if rtol or atol:
        x, y, apart = wide(x, y)
        return ~close(x, y, rtol, atol) | (apart > atol + rtol * y.abs())
    raw = raw_bytes(x.contiguous()) != raw_bytes(y.contiguous())
    return raw.reshape(*x.shape, x.itemsize).any(dim=-1)
