"""Which of torch's distributed tensors a value is, by the names of its classes: none is imported to find that out.

`torch.distributed.tensor` takes longer to import than a small checkpoint takes to save, and where no DTensor was made
nobody needs it. A DTensor can only exist where its class does, and then the class says so itself, whichever path it was
imported by, before this package or after it, and whatever another thread imports meanwhile. Where one is made after
another, its class is there, and to import it is to look into a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = [
    "dtensor_like",
    "is_dtensor",
    "is_pending",
    "is_sharded",
    "is_sharded_tensor",
    "is_strided_shard",
]

_KNOWN = 1024
"""Classes that are remembered; programs that make classes as they go have them forgotten."""


class _Named(dict[type, bool]):
    """Whether a class is one of torch.distributed's with such a name, or derived from one. Each is looked at once."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = frozenset(names)

    def __missing__(self, cls: type) -> bool:
        if len(self) >= _KNOWN:
            self.clear()
        # its module differs from release to release, but not the package
        found = any(c.__name__ in self.names and c.__module__.startswith("torch.distributed.") for c in cls.__mro__)
        self[cls] = found
        return found


_DTENSORS = _Named("DTensor")
_SHARDED_TENSORS = _Named("ShardedTensor")
_SHARDED = _Named("DTensor", "ShardedTensor")
_STRIDED_SHARDS = _Named("_StridedShard")
_PENDING = _Named("Partial")


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor."""
    return _DTENSORS[type(value)]


def is_sharded_tensor(value: object) -> bool:
    """Whether `value` is a ShardedTensor."""
    return _SHARDED_TENSORS[type(value)]


def is_sharded(value: object) -> bool:
    """Whether `value` may hold only a part of its tensor: a DTensor or ShardedTensor."""
    return _SHARDED[type(value)]


def is_strided_shard(placement: object) -> bool:
    """Whether a placement of a DTensor is what FSDP2 over tensor parallelism uses, for which torch has no public name;
    a kind of `Shard` in some of its releases."""
    return _STRIDED_SHARDS[type(placement)]


def is_pending(placement: object) -> bool:
    """Whether a placement of a DTensor is a reduction that was not done yet, a `Partial`."""
    return _PENDING[type(placement)]


def dtensor_like(local: torch.Tensor, model: DTensor) -> DTensor:
    """A DTensor of this local tensor, of the shape of `model`, on its mesh and placed as it is there."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
