"""What a plain local tensor says of its place in a global one: torch's own from 2.15 on, and the same under any."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["CheckpointableTensor"]


@runtime_checkable
class _CheckpointableTensor(Protocol):
    """Attributes of a tensor of which one or several parts, perhaps not all of it, are parts of a global tensor."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    """Where each part begins in the global tensor."""
    local_offsets: tuple[tuple[int, ...], ...]
    """Where it begins in this one."""
    local_sizes: tuple[tuple[int, ...], ...]


try:
    from torch.distributed.checkpoint import protocol as _torch  # type: ignore[attr-defined]

    CheckpointableTensor: Any = _torch.CheckpointableTensor
except ImportError:
    _torch, CheckpointableTensor = None, _CheckpointableTensor


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
