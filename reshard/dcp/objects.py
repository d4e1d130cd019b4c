"""Objects of DCP checkpoints: bytes of `torch.save`, read without running anything."""

from __future__ import annotations

import io
from typing import Any

import torch

from reshard.formats.stored.source import BytesSource
from reshard.formats.torch_save.zip_archive import TorchArchive

__all__ = ["object_from_bytes", "object_to_bytes"]


def object_from_bytes(data: bytes, key: str) -> Any:
    """The plain value that was saved under `key`. Raises UnsafeDataError or DamagedCheckpointError."""
    return TorchArchive(BytesSource(data, f"the object {key!r}")).object()


def object_to_bytes(value: Any) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
