"""Copying one tensor's value into another, whatever their kinds; the inputs stay as they are.

A value fits a target if both have the same global shape. Where both are sharded alike, only local memory is touched;
everything else goes through `full`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.normalize.full import gather, is_sharded, scatter

__all__ = ["copy_containers", "is_reshape", "like", "materialised", "problem", "same_value", "write"]


def problem(value: Any, target: torch.Tensor) -> str | None:
    """Why `value` cannot be written into `target`, or None."""
    if not isinstance(value, torch.Tensor):
        return f"wanted a tensor of shape {tuple(target.shape)}, found {type(value).__name__}"
    if value.shape != target.shape and not is_reshape(value, target):
        return f"wanted shape {tuple(target.shape)}, found {tuple(value.shape)}"
    if value.is_meta and not target.is_meta:
        return "the given tensor is on the meta device and has no value"
    if _kind(value.dtype) > _kind(target.dtype):
        return f"wanted {_dtype(target)}, found {_dtype(value)}, which would lose data: cast it yourself if you mean it"
    return None


def is_reshape(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the two are one element each, one as () and one as (1,)."""
    return {tuple(value.shape), tuple(target.shape)} == {(), (1,)}


def write(value: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `value` into the memory of `target`, which it fits; collective only if they are sharded differently."""
    if type(value) is type(target) is torch.Tensor or not (is_sharded(value) or is_sharded(target)):
        _write_plain(value, target)
    elif _same_layout(value, target):
        _write_plain(value.to_local(), target.to_local())  # type: ignore[attr-defined]
    else:
        scatter(gather(value) if is_sharded(value) else value, target)


def like(value: torch.Tensor, model: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A new tensor with the elements and dtype of `value`, sharded as `model` is where the shapes are equal.

    Plain 0-d tensors stay on their device; others go to `device`, by default that of `model`. A tensor of another
    shape than a sharded `model` becomes a replicated one on its mesh, so that arithmetic between the two works.
    """
    device = model.device if device is None else device
    if not isinstance(model, DTensor) or value.dim() == 0:
        whole = gather(value) if is_sharded(value) else value
        return _clone(whole, whole.device if value.dim() == 0 else device)
    if (
        isinstance(value, DTensor)
        and value.device_mesh == model.device_mesh
        and (value.shape != model.shape or value.placements == model.placements)
    ):
        return _wrap(_clone(value.to_local(), device), value)
    whole = gather(value) if is_sharded(value) else value
    if value.shape != model.shape:
        return DTensor.from_local(_clone(whole, device), model.device_mesh, run_check=False)
    new = _wrap(torch.empty_like(model.to_local(), dtype=value.dtype, device=device), model)
    scatter(whole, new)
    return new


def materialised(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """A new tensor with the elements of `value` for the place of `model`, which is on the meta device: of its dtype
    and sharding, on the device of `value`."""
    local = value.to_local() if isinstance(value, DTensor) else value
    new = like(value, model, local.device)
    return new if new.dtype == model.dtype else new.to(model.dtype)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal as far as this rank can see."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = (a.to_local(), b.to_local()) if _same_layout(a, b) else (None, None)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype:
            return _same_memory(a, b) or a.is_meta or torch.equal(a, b)
        return False
    return bool(a == b)


def copy_containers(value: Any) -> Any:
    """Nested dicts, lists and tuples made anew; the leaves are shared."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(copy_containers, value))
    return value


def _write_plain(value: torch.Tensor, target: torch.Tensor) -> None:
    if value is target or (value.dtype == target.dtype and _same_memory(value, target)):
        return
    if type(value) is type(target) and hasattr(target, "__tensor_flatten__"):
        for name in target.__tensor_flatten__()[0]:
            write(getattr(value, name), getattr(target, name))
        return
    target.copy_(value.reshape(target.shape) if value.shape != target.shape else value)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if hasattr(a, "__tensor_flatten__"):
        return False
    return a.data_ptr() == b.data_ptr() != 0 and a.shape == b.shape and a.stride() == b.stride()


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        isinstance(a, DTensor)
        and isinstance(b, DTensor)
        and a.shape == b.shape
        and a.placements == b.placements
        and a.device_mesh == b.device_mesh
    )


def _wrap(local: torch.Tensor, model: DTensor) -> DTensor:
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def _clone(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = value.detach().to(device)
    return new.clone() if new.data_ptr() == value.data_ptr() else new


def _kind(dtype: torch.dtype) -> int:
    """Order of what can be held without a change of kind: integers < floats < complex."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
