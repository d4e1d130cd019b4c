"""Waiting for messages such that the failure of a rank that is not even spoken to ends the waiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from reshard.control.group import Group
from reshard.errors import DeadlineError, ReshardError
from reshard.state.memory.lanes import device_module, has_lanes, wait_for

__all__ = ["Waiter"]

_LOOK_S = 0.05
"""How often a rank that waits looks whether another has failed."""
_DEVICE_LOOK_S = 0.0005
"""How often it looks whether a device is done."""
_VERDICT_S = 5.0
"""After a lost connection: how long to wait for news of which rank is the cause."""
_DRAIN_S = 1.0
"""After a failure: how long messages that are under way may still arrive."""


class Waiter:
    """Waits for works of `torch.distributed`, in the order given. A context: leaving it ends its thread.

    Gloo blocks in `Work.wait` and cannot be asked or interrupted, so this is done by a thread, while the caller looks
    for failures. Backends of devices wait on the device's stream: they return at once, and `settle` comes at the end.
    """

    def __init__(self, group: Group, device: torch.device, deadline_s: float) -> None:
        """`deadline_s`: how long all of the waiting may take, from now on."""
        self._group = group
        self._device = device
        self._deadline, self._allowed_s = time.monotonic() + deadline_s, deadline_s
        self._blocks = device.type == "cpu"
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Batch | None = None

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._last is not None:
            self._last.done.wait(_DRAIN_S)
        self._queue.put(None)

    def post(self, ops: list[dist.P2POp]) -> list[Any]:
        """Begin to send and to receive. Raises as `wait`: what is sent to a rank that has died may fail at once."""
        try:
            return dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            self._lost(error)

    def wait(self, works: Sequence[Any], peers: Sequence[int]) -> None:
        """Until all are complete; each is a message to or from the peer beside it.

        Raises the failure of another rank, ReshardError for a lost connection, DeadlineError for a peer that hangs.
        """
        if not self._blocks:
            for work in works:
                work.wait()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="reshard-wait", daemon=True)
            self._thread.start()
        self._last = batch = _Batch(works)
        self._queue.put(batch)
        while not batch.done.wait(_LOOK_S):
            self._look(f"a message to or from rank {peers[batch.at]} did not get through", "that rank hangs")
        if batch.error is not None:
            self._lost(batch.error)

    def _lost(self, error: Exception) -> NoReturn:
        until = time.monotonic() + _VERDICT_S
        while time.monotonic() < until:  # its own death, or error, says more than a connection that broke
            self._group.check()
            time.sleep(_LOOK_S)
        raise ReshardError(f"a message to or from another rank was lost: {error}") from error

    def _look(self, what: str, who: str) -> None:
        """Raises the failure of another rank, DeadlineError when the time is up."""
        self._group.check()
        if time.monotonic() > self._deadline:
            raise DeadlineError(f"{what} within {self._allowed_s:g} s. Look at what {who} in, or waits for")

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Until the current streams of these devices have done all that was asked, messages between devices included.

        Raises the failure of another rank, DeadlineError where a device waits for a message that does not come.
        """
        for device in dict.fromkeys(devices):
            if not has_lanes(device):
                wait_for(device)
                continue
            done: Any = device_module(device).current_stream(device).record_event()
            while not done.query():
                self._look(f"what {device} was asked, messages from other ranks included, did not end", "a rank hangs")
                time.sleep(_DEVICE_LOOK_S)

    def meet(self, process_group: dist.ProcessGroup | None) -> None:
        """Until all ranks have come here, and the device has done what was asked of it.

        The smallest collective of the backend, since who sleeps in it wakes as soon as the last has come. Raises as
        `wait`; a DeadlineError names the ranks that are not there.
        """
        if self._group.world_size > 1:
            self._sum_up(torch.zeros(1, dtype=torch.uint8, device=self._device), process_group)
        self.settle([self._device])

    def total(self, numbers: Sequence[int], process_group: dist.ProcessGroup | None) -> list[int]:
        """The sums of all ranks' numbers. Raises as `meet`."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        if self._group.world_size > 1:
            self._sum_up(found, process_group)
        return [int(number) for number in found.tolist()]

    def _sum_up(self, numbers: torch.Tensor, process_group: dist.ProcessGroup | None) -> None:
        try:
            work = dist.all_reduce(numbers, group=process_group, async_op=True)
        except RuntimeError as error:
            self._lost(error)
        try:
            self.wait([work], self._group.ranks)
        except DeadlineError:
            self._group.barrier()  # ends at once, and says who is missing
            raise


class _Batch:
    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works
        self.at = 0
        self.done = threading.Event()
        self.error: Exception | None = None


def _serve(batches: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        try:
            for at, work in enumerate(batch.works):
                batch.at = at
                work.wait()
        except Exception as error:
            batch.error = error
        batch.works = ()
        batch.done.set()
        del batch
