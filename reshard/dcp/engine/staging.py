"""A copy of a state on the CPU, so that it can be saved while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.dcp.engine.states import copied_like
from reshard.state.frameworks.tensor_classes import is_sharded
from reshard.state.memory.downloads import to_host
from reshard.state.memory.lanes import has_lanes

__all__ = ["on_the_cpu"]


def on_the_cpu(state: Any) -> Any:
    """The state with every tensor copied to the CPU, and everything else that may change copied as well."""
    found: dict[int, torch.Tensor] = {}
    _find_on_devices(state, found)
    with torch.no_grad():
        sent = to_host([tensor.detach() for tensor in found.values()])
    return _copy(state, dict(zip(found, sent)))


def _find_on_devices(value: Any, found: dict[int, torch.Tensor]) -> None:
    if isinstance(value, DTensor):
        _find_on_devices(value._local_tensor, found)
    elif isinstance(value, torch.Tensor) and not is_sharded(value):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and has_lanes(value.device):
            found[id(value)] = value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _find_on_devices(item, found)


def _copy(value: Any, on_host: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        copied = copy.copy(value)
        # `to_local` makes a view, which not all of its kinds have
        copied._local_tensor = _copy(value._local_tensor, on_host)
        return copied
    if is_sharded(value):  # a ShardedTensor: its copies know their shards
        return value.detach().clone().cpu()
    if isinstance(value, torch.Tensor):
        there = on_host.get(id(value))
        return copied_like(value.detach().to("cpu", copy=True) if there is None else there, value)
    if isinstance(value, dict):
        return {key: _copy(item, on_host) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item, on_host) for item in value)
    return copy.deepcopy(value)
