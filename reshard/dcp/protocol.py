"""`CheckpointableTensor`, which torch has from 2.15 on: a local tensor declares its place in a global one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["CheckpointableTensor"]


@runtime_checkable
class _CheckpointableTensor(Protocol):
    """Attributes of a local tensor that contains parts of a global tensor."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    """Start of each part in the global tensor."""
    local_offsets: tuple[tuple[int, ...], ...]
    """Start of each part in the local tensor."""
    local_sizes: tuple[tuple[int, ...], ...]


try:
    from torch.distributed.checkpoint import protocol as _torch  # type: ignore[attr-defined]

    CheckpointableTensor: Any = _torch.CheckpointableTensor
except ImportError:
    _torch, CheckpointableTensor = None, _CheckpointableTensor


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
