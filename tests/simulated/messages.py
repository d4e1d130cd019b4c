"""A backend of torch.distributed that sends from the memory of the simulated device, in the order of its streams.

As NCCL does: what is asked comes after what the current stream was asked, on a stream of the backend's own; `wait` has
the current stream come after it, and the host wait for nothing. Below, bytes travel over gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.simulated import streams
from tests.simulated.kernels import NAME
from tests.simulated.memory import hidden, saw

__all__ = ["BACKEND", "EAGER", "register"]

BACKEND = "simccl"
EAGER = False
"""Whether collectives of torch's own happen when they are asked for, in the order of the program: those of several
groups that run late may wait for one another, as they may with NCCL."""


def register() -> None:
    """With torch.distributed, for as long as the process lives."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _made, devices=[NAME])
        _functional.append(torch.library.Library("_c10d_functional", "IMPL"))
        for call in (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
            _functional[0].impl(call.__name__, call, "PrivateUse1")


_functional: list[torch.library.Library] = []


def all_gather_into_tensor(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """What torch's operation of this name would ask of a method that no group written in Python has; so those below."""
    out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    _group(group)._at_once("_allgather_base", out, tensor.contiguous())
    return out


def reduce_scatter_tensor(tensor: torch.Tensor, reduce_op: str, size: int, group: str) -> torch.Tensor:
    out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG if reduce_op == "avg" else getattr(dist.ReduceOp, reduce_op.upper())
    _group(group)._at_once("_reduce_scatter_base", out, tensor.contiguous(), options)
    return out


def all_to_all_single(tensor: torch.Tensor, outs: list[int], ins: list[int], group: str) -> torch.Tensor:
    out = tensor.new_empty((sum(outs), *tensor.shape[1:]))
    _group(group)._at_once("alltoall_base", out, tensor.contiguous(), outs, ins)
    return out


def _group(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)


def _made(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _Group(dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, timeout), store, rank, size)


class _Work(dist._Work):
    def __init__(self, done: streams.Event, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._done, self._tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        streams.current().wait_event(self._done)
        return True

    def get_future(self) -> Any:
        found: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        found.set_result(self._tensors)
        return found

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

    def _get_backend(self, device: torch.device) -> Any:
        return self  # torch 2.15 asks before it sends several together

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

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        if not _on_device(tensors):
            return self._below.send(tensors, to, tag)

        def call(memory: list[torch.Tensor]) -> None:
            data = [one.clone() for one in memory]
            self._sent.append((self._below.send(data, to, tag), data))  # on its way, whoever else waits for whom

        saw("sent", sum(tensor.nbytes for tensor in tensors))
        return self._ask(tensors, call)

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Any:
        if not _on_device(tensors):
            return self._below.recv(tensors, of, tag)
        return self._ask(tensors, lambda memory: self._below.recv(memory, of, tag).wait())

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._collective("allreduce", tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._collective("broadcast", tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._below.barrier()

    def _collective(self, name: str, tensors: list[torch.Tensor], opts: Any) -> Any:
        if EAGER or not _on_device(tensors):
            return self._at_once(name, tensors, opts)
        return self._ask(tensors, lambda memory: getattr(self._below, name)(memory, opts).wait())

    def _at_once(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self._below, name)
        if not _on_device(args):
            return call(*args, **kwargs)
        streams.run_all()
        call(*tree_map_only(torch.Tensor, hidden, args), **kwargs).wait()
        return _Work(streams.current().record_event(), [])


def _at_once(name: str) -> Any:
    name = _OTHER_NAMES.get(name, name)
    return lambda self, *args, **kwargs: self._at_once(name, *args, **kwargs)


_OTHER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Of methods, in newer torch, and what gloo calls them."""

for _name in (
    *_OTHER_NAMES,
    *("allgather", "_allgather_base", "allgather_coalesced", "alltoall", "alltoall_base", "gather", "scatter"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "monitored_barrier"),
):
    setattr(_Group, _name, _at_once(_name))


def _on_device(nest: Any) -> bool:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, nest)
    return any(tensor.device.type == NAME for tensor in found)
