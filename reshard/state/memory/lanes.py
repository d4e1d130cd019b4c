"""Streams beside the caller's, and memory of the host that devices reach by themselves.

Of any accelerator that torch knows: all is asked of the device module of a tensor's own device (`torch.cuda`,
`torch.xpu`, ...). Devices whose module has no streams are waited for once, and then copied to and from as memory is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

__all__ = ["Event", "Lane", "Lanes", "has_lanes", "pinned"]

_log = logging.getLogger("reshard")


class Event(Protocol):
    """What a lane has done up to some point."""

    def synchronize(self) -> None:
        """The host waits until it is done."""


def pinned(nbytes: int) -> torch.Tensor:
    """New memory of the host, as bytes, that devices copy from and to while the host goes on.

    Where the system gives no such memory it is common memory: copies are right, and slower, and a warning is logged.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning("no pinned memory of %d bytes, so copies to and from devices are slow: %s", nbytes, error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def has_lanes(device: torch.device) -> bool:
    """Whether what is asked of the device is asked of streams."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


class Lane:
    """A stream of a device beside the caller's: what is asked of it comes after all that the caller's was asked."""

    def __init__(self, device: torch.device) -> None:
        """On the thread, and where the stream is current, that the lane is to come after."""
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_event(self._module.current_stream(device).record_event())

    def use(self) -> AbstractContextManager[Any]:
        """Within, on this thread, all that is asked of the device is asked of this lane."""
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def mark(self) -> Event:
        """What was asked until now."""
        event: Event = self._stream.record_event()
        return event

    def wait(self) -> None:
        """Until all that was asked is done."""
        self._stream.synchronize()


class Lanes:
    """A lane for each device that has streams, all from the moment that they are made.

    Before other threads touch tensors: a thread starts on the default stream, and where the caller is on another one,
    neither waits for the other. A save would read values that are still being computed, a load would write what a
    kernel under way overwrites. So devices without lanes are waited for here.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        for device in dict.fromkeys(devices):
            if has_lanes(device):
                self._lanes[device] = Lane(device)
            elif device.type not in ("cpu", "meta"):
                torch.get_device_module(device).synchronize()

    def __getitem__(self, device: torch.device) -> Lane | None:
        """None for a device without streams."""
        return self._lanes.get(device)

    def use(self, device: torch.device) -> AbstractContextManager[Any]:
        """As `Lane.use`; nothing where there is no lane."""
        lane = self._lanes.get(device)
        return nullcontext() if lane is None else lane.use()

    def wait(self) -> None:
        """Until all that was asked of any of them is done."""
        for lane in self._lanes.values():
            lane.wait()
