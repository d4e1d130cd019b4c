"""A backend of torch.distributed that sends from the memory of the simulated device, in the order of its streams.

As NCCL does: what is asked comes after what the current stream was asked, on a stream of the backend's own; `wait` has
the current stream come after it, and the host wait for nothing. Below, bytes travel over gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.simulated import streams
from tests.simulated.kernels import NAME
from tests.simulated.memory import hidden, saw

__all__ = ["BACKEND", "register"]

BACKEND = "simccl"


def register() -> None:
    """With torch.distributed, for as long as the process lives."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _made, devices=[NAME])


def _made(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _Group(dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, timeout), store, rank, size)


class _Work(dist._Work):
    def __init__(self, done: streams.Event, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._done, self._tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        streams.current().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()


class _Group(dist.ProcessGroup):
    def __init__(self, below: Any, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._below, self._store, self._rank, self._size = below, store, rank, size
        self._stream = streams.Stream()
        self._sent: list[Any] = []

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def get_group_store(self) -> Any:
        return self._store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _ask(self, tensors: list[torch.Tensor], call: Any) -> _Work:
        for tensor in tensors:
            assert tensor.device.type == NAME, f"{BACKEND} cannot send from {tensor.device}"
            assert tensor.is_contiguous(), "it sends one run of memory"
        memory = [hidden(tensor) for tensor in tensors]
        here = streams.current()
        self._stream.after(here, here.asked)  # its own: no line of the library waits
        self._stream.ask(lambda: call(memory))
        return _Work(self._stream.record_event(), tensors)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        def call(memory: list[torch.Tensor]) -> None:
            data = [one.clone() for one in memory]
            self._sent.append((self._below.send(data, to, tag), data))  # on its way, whoever else waits for whom

        saw("sent", sum(tensor.nbytes for tensor in tensors))
        return self._ask(tensors, call)

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> _Work:
        return self._ask(tensors, lambda memory: self._below.recv(memory, of, tag).wait())

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._ask(tensors, lambda memory: self._below.allreduce(memory, opts).wait())

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._ask(tensors, lambda memory: self._below.broadcast(memory, opts).wait())

    def barrier(self, opts: Any = None) -> Any:
        return self._below.barrier()
