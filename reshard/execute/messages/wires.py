"""Where a process group sends from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["device_of_kind", "sending_device", "sending_kinds"]

_FROM_HOST = ("gloo", "mpi")
"""Backends that send from memory of the CPU only, whatever they are registered for."""


def sending_kinds(process_group: dist.ProcessGroup | None) -> list[str]:
    """The kinds of device that the backends of a group send from, on this machine: "cpu", "cuda", "xpu" and so on."""
    if not (dist.is_available() and dist.is_initialized()):
        return ["cpu"]
    backends = _backends(process_group)
    kinds = [kind for kind, backend in backends.items() if kind == "cpu" or backend not in _FROM_HOST]
    return [kind for kind in kinds if kind == "cpu" or _is_here(kind)]


def _backends(process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """By kind of device."""
    config = dist.get_backend_config(process_group)
    return dict(row.split(":") for row in config.split(",")) if ":" in config else {"cpu": config}


def _is_here(kind: str) -> bool:
    """A backend may be registered for devices that this machine has none of."""
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def device_of_kind(kind: str, tensors: Iterable[torch.Tensor] = ()) -> torch.device:
    """The one of this process: where most of its tensors of that kind lie, whatever device is the current one; without
    any, the current one. It has a number, as tensors say theirs, and what is compared with them must."""
    if kind == "cpu":
        return torch.device("cpu")
    held: Counter[torch.device] = Counter()
    for tensor in tensors:
        if tensor.device.type == kind:
            held[tensor.device] += tensor.nbytes
    if held:
        return held.most_common(1)[0][0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def sending_device(device: torch.device, process_group: dist.ProcessGroup | None) -> torch.device:
    """Where elements on `device` are taken by the collectives of a group: there, or on one that its backends know, as
    those of the CPU have to be where there is only NCCL."""
    kinds = sending_kinds(process_group)
    return device if device.type in _backends(process_group) or not kinds else device_of_kind(kinds[0])
