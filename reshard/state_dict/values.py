"""Copying one tensor's value into another, whatever their kinds; the inputs stay as they are.

A value fits a target if both have the same global shape. Where both are sharded alike, only local memory is touched;
everything else goes through `full`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from reshard.state.frameworks.tensor_classes import dtensor_like, is_dtensor, is_sharded
from reshard.state.tensors import dtype_of, form_of, global_shape, local_tensors
from reshard.state_dict.chunks import exchange_rows
from reshard.state_dict.gather import gather, scatter

__all__ = ["copy_containers", "is_meta", "like", "materialised", "problem", "same_value", "write", "write_all"]


def problem(value: Any, shape: tuple[int, ...], dtype: torch.dtype, on_meta: bool = False) -> str | None:
    """Why `value` cannot be written into a tensor of this shape and dtype, or None. () and (1,) go together."""
    if not isinstance(value, torch.Tensor):
        return f"wanted a tensor of shape {shape}, found {type(value).__name__}"
    found = global_shape(value)
    if found != shape and {found, shape} != {(), (1,)}:
        return f"wanted shape {shape}, found {found}"
    if is_meta(value) and not on_meta:
        return "the given tensor is on the meta device and has no value"
    if _kind(dtype_of(value)) > _kind(dtype):
        return f"wanted {dtype}, found {dtype_of(value)}, which would lose data: cast it yourself if you mean it"
    return None


def is_meta(value: torch.Tensor) -> bool:
    """Whether the tensor has no values."""
    return value.is_meta if is_dtensor(value) or not is_sharded(value) else False


def write(value: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `value` into the memory of `target`, which it fits; collective only if they are sharded differently."""
    if not (is_sharded(value) or is_sharded(target)):
        _write_plain(value, target)
    elif _same_layout(value, target):
        for mine, its in zip(local_tensors(target), local_tensors(value), strict=True):
            _write_plain(its, mine)
    else:
        scatter(gather(value) if is_sharded(value) else value, target)


def write_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`write` the first of each pair into the second; what FSDP1 cuts across rows is sent together where it can be."""
    for value, target in exchange_rows(pairs):
        write(value, target)


def like(value: torch.Tensor, model: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A new tensor with the elements and dtype of `value`, sharded as `model` is where the shapes are equal.

    Plain 0-d tensors stay on their device; others go to `device`, by default that of `model`. A tensor of another
    shape than a sharded `model` becomes a replicated one on its mesh, so that arithmetic between the two works.
    """
    device = model.device if device is None else device
    if not is_dtensor(model) or value.dim() == 0:
        whole = gather(value) if is_sharded(value) else value
        return _clone(whole, whole.device if value.dim() == 0 else device)
    if (
        is_dtensor(value)
        and value.device_mesh == model.device_mesh
        and (value.shape != model.shape or value.placements == model.placements)
    ):
        return dtensor_like(_clone(value.to_local(), device), value)
    whole = gather(value) if is_sharded(value) else value
    if value.shape != model.shape:
        from torch.distributed.tensor import DTensor  # the model is one

        return DTensor.from_local(_clone(whole, device), model.device_mesh, run_check=False)
    new = dtensor_like(torch.empty_like(model.to_local(), dtype=value.dtype, device=device), model)
    scatter(whole, new)
    return new


def materialised(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """A new tensor with the elements of `value` for the place of `model`, which is on the meta device: of its dtype
    and sharding, on the device of `value`."""
    local = value.to_local() if is_dtensor(value) else value
    new = like(value, model, local.device)
    return new if new.dtype == model.dtype else new.to(model.dtype)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal as far as this rank can see."""
    if is_sharded(a) or is_sharded(b):
        return _same_layout(a, b) and all(map(torch.equal, local_tensors(a), local_tensors(b)))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype:
            return _same_memory(a, b) or a.is_meta or torch.equal(a, b)
        return False
    return bool(a == b)


def copy_containers(value: Any) -> Any:
    """Nested dicts, lists and tuples made anew; the leaves are shared."""
    if isinstance(value, dict):
        if set(map(type, value.values())) == {torch.Tensor}:
            return dict(value)  # nearly always, and there are many
        return {key: item if isinstance(item, torch.Tensor) else copy_containers(item) for key, item in value.items()}
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
    if is_dtensor(a) and is_dtensor(b):
        return a.shape == b.shape and a.placements == b.placements and a.device_mesh == b.device_mesh
    if is_dtensor(a) or is_dtensor(b) or not (is_sharded(a) and is_sharded(b)):
        return False
    return global_shape(a) == global_shape(b) and form_of(a) == form_of(b)


def _clone(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = value.detach().to(device)
    return new.clone() if new.data_ptr() == value.data_ptr() else new


def _kind(dtype: torch.dtype) -> int:
    """Order of what can be held without a change of kind: integers < floats < complex."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0
