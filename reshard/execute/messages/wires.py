"""Where a process group sends from, and waiting for the devices that it does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from reshard.control.group import Group
from reshard.state.memory.lanes import has_lanes

__all__ = ["device_of_kind", "sending_kinds", "settle"]

_FROM_HOST = ("gloo", "mpi")
"""Backends that send from memory of the CPU only, whatever they are registered for."""
_LOOK_S = 0.0005


def sending_kinds(process_group: dist.ProcessGroup | None) -> list[str]:
    """The kinds of device that the backends of a group send from, on this machine: "cpu", "cuda", "xpu" and so on."""
    if not (dist.is_available() and dist.is_initialized()):
        return ["cpu"]
    config = dist.get_backend_config(process_group)
    backends = dict(row.split(":") for row in config.split(",")) if ":" in config else {"cpu": config}
    kinds = [kind for kind, backend in backends.items() if kind == "cpu" or backend not in _FROM_HOST]
    return [kind for kind in kinds if kind == "cpu" or _is_here(kind)]


def _is_here(kind: str) -> bool:
    """A backend may be registered for devices that this machine has none of."""
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def device_of_kind(kind: str) -> torch.device:
    """The one of this process: tensors say which of several they are on, and so must what is compared with them."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def settle(devices: Iterable[torch.device], group: Group) -> None:
    """Until the current streams of these devices have done all that was asked. Raises the failure of another rank."""
    for device in dict.fromkeys(devices):
        if has_lanes(device):
            done: Any = torch.get_device_module(device).current_stream(device).record_event()
            while not done.query():
                group.check()
                time.sleep(_LOOK_S)
        elif device.type not in ("cpu", "meta"):
            torch.get_device_module(device).synchronize()
