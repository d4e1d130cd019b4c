"""Tensor subclasses that are made of plain tensors, such as quantized weights: saved and filled as these.

    {"w": Quantized(data, scale)}    ->    w.data, w.scale

What the class says beside its tensors is code, and stays with the target: a load fills the inner tensors of a target
of the same kind in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reshard.errors import KeyMismatchError, LayoutError
from reshard.state.container_types import class_name
from reshard.state.frameworks.tensor_classes import dtensor_like, is_dtensor
from reshard.state.tree import KeyPath, key_of

__all__ = ["class_kinds", "expanded", "holder", "inner_names", "tensor_class"]

_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])


def holder(value: torch.Tensor) -> torch.Tensor:
    """The tensor whose attributes the inner tensors are: of a DTensor, its local tensor."""
    return value._local_tensor if is_dtensor(value) else value


def inner_names(value: object) -> list[str]:
    """The attributes with the tensors that a tensor, or a DTensor's local one, is made of; none of a plain one."""
    local = holder(value) if isinstance(value, torch.Tensor) else value
    if not isinstance(local, torch.Tensor) or type(local) is torch.Tensor:
        return []
    names: list[str] = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
    return list(names)


def tensor_class(value: object) -> str:
    """The class of a tensor, or of a DTensor's local one, if it says more than its elements; "" for plain ones."""
    local = holder(value) if isinstance(value, torch.Tensor) else value
    cls = type(local)
    if not isinstance(local, torch.Tensor) or cls in _PLAIN:
        return ""
    return "" if cls.__module__.startswith("torch.") and not inner_names(local) else class_name(local)


def class_kinds(leaves: Mapping[KeyPath, Any]) -> dict[KeyPath, str]:
    """ "tensor:app.Quantized" by path, for tensors of classes of their own, and for such that these are made of."""
    out: dict[KeyPath, str] = {}
    for path, value in leaves.items():
        if not isinstance(value, torch.Tensor) or type(value) in _PLAIN or type(holder(value)) in _PLAIN:
            continue
        value = _settled(value)
        if name := tensor_class(value):
            out[path] = f"tensor:{name}"
            out |= class_kinds({(*path, part): getattr(holder(value), part) for part in inner_names(value)})
    return out


def _settled(value: Any) -> Any:
    """The value itself, but for the result of a collective that may be under way: that, plain, when it has arrived."""
    if not isinstance(value, torch.Tensor) or type(holder(value)).__name__ != "AsyncCollectiveTensor":
        return value
    arrived: torch.Tensor = holder(value).trigger_wait()  # type: ignore[attr-defined]
    if not is_dtensor(value):
        return arrived
    return dtensor_like(arrived, value)


def _inner(value: torch.Tensor, name: str, path: KeyPath) -> torch.Tensor:
    """An inner tensor; of a DTensor, cut as that is, which only an inner tensor of the same shape is known to be."""
    local = holder(value)
    part: torch.Tensor = getattr(local, name)
    if not is_dtensor(value):
        return part
    if part.shape != local.shape:
        raise LayoutError(
            f"{key_of(path)!r} is a {type(local).__name__} inside a DTensor: its part {name!r} has shape "
            f"{list(part.shape)}, the local tensor {list(local.shape)}, so nothing says how the part is cut. Give its "
            "parts as DTensors of their own, or plain values (dequantized)"
        )
    return dtensor_like(part.detach(), value)


def expanded(leaves: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """`leaves`, with the inner tensors in the place of a tensor that is made of them, at its path and their attribute.

    Raises KeyMismatchError if something else has such a key; LayoutError for a part of a DTensor's local tensor that
    has another shape than that.
    """
    leaves = {path: _settled(value) for path, value in leaves.items()}
    made_of = {path: names for path, value in leaves.items() if (names := inner_names(value))}
    if not made_of:
        return leaves
    keys: set[str] = set()
    out: dict[KeyPath, Any] = {}
    for path, value in leaves.items():
        inner = {(*path, name): _inner(value, name, path) for name in made_of.get(path, ())}
        for place, part in (expanded(inner) if inner else {path: value}).items():
            if key_of(place) in keys:
                raise KeyMismatchError(f"the key {key_of(place)!r} is a part of a tensor, and something else as well")
            keys.add(key_of(place))
            out[place] = part
    return out
