"""Tensor subclasses that are made of plain tensors, such as quantized weights: saved and filled as these.

    {"w": Quantized(data, scale)}    ->    w.data, w.scale

What the class says beside its tensors is code, and stays with the target: a load fills the inner tensors of a target
of the same kind in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.errors import KeyMismatchError
from reshard.tree import KeyPath, key_of

__all__ = ["expanded", "inner_names"]


def inner_names(value: object) -> list[str]:
    """The attributes that hold the tensors which a tensor is made of; none of a plain tensor or DTensor."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or type(value) is torch.Tensor:
        return []
    names: list[str] = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
    return list(names)


def expanded(leaves: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """`leaves`, with the inner tensors in the place of a tensor that is made of them, at its path and their attribute.

    Raises KeyMismatchError if something else has such a key.
    """
    made_of = {path: names for path, value in leaves.items() if (names := inner_names(value))}
    if not made_of:
        return dict(leaves)
    keys: set[str] = set()
    out: dict[KeyPath, Any] = {}
    for path, value in leaves.items():
        inner = {(*path, name): getattr(value, name) for name in made_of.get(path, ())}
        for place, part in (expanded(inner) if inner else {path: value}).items():
            if key_of(place) in keys:
                raise KeyMismatchError(f"the key {key_of(place)!r} is a part of a tensor, and something else as well")
            keys.add(key_of(place))
            out[place] = part
    return out
