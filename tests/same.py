"""Compares tensors and nested states: types, shapes, dtypes, keys in order, and every bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = ["assert_same", "bits", "differences", "same"]


def bits(tensor: torch.Tensor) -> bytes:
    """Return all bytes of a tensor, row-major. For a DTensor, those of this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # clone, because contiguous() keeps an odd stride of a dim of size 1
    made = local.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return made.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found: Any, wanted: Any) -> bool:
    """Return True if two tensors, numbers, or nested values are equal in every bit."""
    return next(differences(found, wanted), None) is None


def assert_same(found: Any, wanted: Any, close: bool = False) -> None:
    """Assert that `found` equals `wanted` in every bit, or up to rounding if `close`."""
    wrong = list(differences(found, wanted, close=close))
    assert not wrong, "\n".join(wrong[:20])


def differences(found: Any, wanted: Any, path: str = "it", *, close: bool = False) -> Iterator[str]:
    """Yield a line for each difference of two nested values. Mappings count as dicts, parameters as tensors."""
    if isinstance(wanted, np.ndarray) and isinstance(found, np.ndarray):
        found, wanted = torch.from_numpy(found), torch.from_numpy(wanted)
    if isinstance(wanted, torch.Tensor):
        yield from _in_tensors(found, wanted, path, close)
    elif isinstance(wanted, Mapping) and isinstance(found, Mapping):
        if list(found) != list(wanted):
            yield f"{path} has the keys {list(found)}, not {list(wanted)}"
        for key in wanted:
            if key in found:
                yield from differences(found[key], wanted[key], f"{path}[{key!r}]", close=close)
    elif type(found) is not type(wanted):
        yield f"{path} is {found!r} of {type(found).__name__}, not {wanted!r} of {type(wanted).__name__}"
    elif isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            yield f"{path} has {len(found)} items, not {len(wanted)}"
        for i, (a, b) in enumerate(zip(found, wanted)):
            yield from differences(a, b, f"{path}[{i}]", close=close)
    elif not (found == wanted or (found != found and wanted != wanted)):
        yield f"{path} is {found!r}, not {wanted!r}"


def _in_tensors(found: Any, wanted: torch.Tensor, path: str, close: bool) -> Iterator[str]:
    a, b = (_kind(found), _kind(wanted))
    if a != b:
        yield f"{path} is {a}, not {b}"
    elif close:
        try:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        except AssertionError as error:
            yield f"{path}: {error}"
    elif bits(found) != bits(wanted):
        yield f"{path} is {found}, not {wanted}"


def _kind(value: Any) -> tuple[Any, ...]:
    """Return what must agree before bits can be compared: type, shape, dtype, and sharding."""
    kind = torch.Tensor if isinstance(value, torch.nn.Parameter) and type(value) is torch.nn.Parameter else type(value)
    if not isinstance(value, torch.Tensor):
        return (kind.__name__,)
    cut = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
    return (kind.__name__, tuple(value.shape), value.dtype, *cut)
