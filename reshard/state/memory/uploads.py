"""To devices: what the host reads goes into a ring of pinned memory, and on while the next piece is read.

read 0 -> slot 0 ... copy to the device ... strided kernel
read 1 -> slot 1      ... copy to the device ... strided kernel
read 2 ....................... waits until slot 0 has arrived, -> slot 0
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reshard.state.memory.arrays import item_dtype
from reshard.state.memory.lanes import Event, Lane, Lanes, has_lanes, pinned

__all__ = ["Uploads"]

Array = npt.NDArray[Any]


@dataclass
class _Slot:
    memory: torch.Tensor | None = None
    arrived: Event | None = None


class Uploads:
    """A ring of `slots` pieces of pinned memory, made when they are first needed. Any thread may put; a context: when
    it is left, everything has arrived, and the memory is free.

    Args:
        slots: at least one for each thread that puts, so that none waits for another.
        slot_bytes: the largest piece.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._free: queue.Queue[_Slot] = queue.Queue()
        for _ in range(slots):
            self._free.put(_Slot())
        self._devices: set[torch.device] = set()
        self._lanes = Lanes()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self._lanes.wait()
        self._free = queue.Queue()

    def take_in(self, device: torch.device) -> bool:
        """Whether pieces for this device go this way. Before `begin`."""
        self._devices.add(device)
        return has_lanes(device)

    def begin(self) -> None:
        """On the caller's thread: what is put from here on comes after what the caller's streams were asked."""
        self._lanes = Lanes(self._devices)

    @contextmanager
    def in_order(self, device: torch.device) -> Iterator[None]:
        """Within, what is put comes after what the caller's stream was asked, and before what it is asked next. On a
        device that is met now, and not before `begin`."""
        lane = self._lanes.follow(device)
        yield
        lane.lead()

    def put(
        self, target: torch.Tensor, saved: torch.dtype, sizes: Sequence[int], read: Callable[[Array], None]
    ) -> None:
        """Have `read` fill an array of `sizes`, whose elements of dtype `saved` then go into `target`.

        They cross as they are, in one run. What is strided, of another dtype or lazily conjugated on the other side is
        put in its place there.
        """
        lane = self._lanes[target.device]
        assert lane is not None, f"{target.device} was not taken in"
        slot = self._free.get()
        try:
            if slot.arrived is not None:
                slot.arrived.synchronize()
            slot.arrived = None
            if slot.memory is None:
                slot.memory = pinned(self.slot_bytes)
            whole = slot.memory[: target.numel() * saved.itemsize]
            read(np.ndarray(sizes, item_dtype(saved.itemsize), whole.numpy()))
            slot.arrived = _send(whole.view(saved).view(list(sizes)), target, lane)
        finally:
            self._free.put(slot)


def _send(elements: torch.Tensor, target: torch.Tensor, lane: Lane) -> Event:
    as_is = target.dtype == elements.dtype and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    with torch.no_grad(), lane.use():
        if as_is:
            target.copy_(elements, non_blocking=True)
        else:
            target.copy_(torch.empty_like(elements, device=target.device).copy_(elements, non_blocking=True))
        return lane.mark()
