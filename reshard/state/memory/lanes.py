"""Streams beside the caller's, and memory of the host that devices reach by themselves.

Of any accelerator that torch knows: all is asked of the device module of a tensor's own device (`torch.cuda`,
`torch.xpu`, ...). Devices whose module has no streams are waited for once, and then copied to and from as memory is.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

__all__ = ["Event", "Lane", "Lanes", "device_module", "has_lanes", "of_caller", "pinned", "wait_for"]

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
        return _pin(nbytes)
    except RuntimeError as error:
        _log.warning("no pinned memory of %d bytes, so copies to and from devices are slow: %s", nbytes, error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pin(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def device_module(device: torch.device) -> Any:
    """torch's module of such devices, or None: the CPU, and devices that other libraries know how to wait for."""
    try:
        return None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    except RuntimeError:  # such as "xla" has none
        return None


def has_lanes(device: torch.device) -> bool:
    """Whether what is asked of the device is asked of streams."""
    return hasattr(device_module(device), "Stream")


def wait_for(device: torch.device) -> None:
    """Until a device has done all that it was asked by anybody. It need not be the current one."""
    module = device_module(device)
    if hasattr(module, "Stream"):
        module.synchronize(device)
    elif module is not None:
        module.synchronize()


_unused: defaultdict[torch.device, list[Any]] = defaultdict(list)
"""Streams of lanes that are no more. Allocators keep freed memory for the stream that it was made on: with a new stream
for each lane, as much as a lane ever took would stay with each of them."""


class Lane:
    """A stream of a device beside the caller's: what is asked of it comes after all that the caller's was asked."""

    def __init__(self, device: torch.device) -> None:
        """On the thread, and where the stream is current, that the lane is to come after."""
        self._module: Any = device_module(device)
        try:
            self._stream = _unused[device].pop()
        except IndexError:
            self._stream = self._module.Stream(device)
        weakref.finalize(self, _unused[device].append, self._stream).atexit = False
        self._device = device
        self.follow()

    def follow(self) -> None:
        """What is asked from here on comes after what the calling thread's stream was asked until now."""
        self._stream.wait_event(self._module.current_stream(self._device).record_event())

    def lead(self) -> None:
        """What the calling thread's stream is asked from here on comes after what this lane was asked until now."""
        self._module.current_stream(self._device).wait_event(self._stream.record_event())

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
            else:
                wait_for(device)

    def __getitem__(self, device: torch.device) -> Lane | None:
        """None for a device without streams."""
        return self._lanes.get(device)

    def follow(self, device: torch.device) -> Lane:
        """The lane of a device with streams, after what the calling thread's stream was asked until now."""
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = Lane(device)
        else:
            lane.follow()
        return lane

    def use(self, device: torch.device) -> AbstractContextManager[Any]:
        """As `Lane.use`; nothing where there is no lane."""
        lane = self._lanes.get(device)
        return nullcontext() if lane is None else lane.use()

    @contextmanager
    def use_all(self) -> Iterator[None]:
        """As `use` of each device that has a lane."""
        with ExitStack() as stack:
            for lane in self._lanes.values():
                stack.enter_context(lane.use())
            yield

    def wait(self) -> None:
        """Until all that was asked of any of them is done."""
        for lane in self._lanes.values():
            lane.wait()


def of_caller() -> Lanes:
    """A lane after the caller's stream of the current device, if this process has used one: for threads that meet
    tensors only later. On other devices they must `wait_for` all that was asked."""
    kind = torch.accelerator.current_accelerator()
    module = torch.cpu if kind is None else torch.get_device_module(kind)
    if kind is None or not has_lanes(kind) or not module.is_initialized():
        return Lanes()
    return Lanes([torch.device(kind.type, module.current_device())])
