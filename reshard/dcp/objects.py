"""Objects of DCP checkpoints: bytes of `torch.save`, read without running anything."""

from __future__ import annotations

from typing import Any

from reshard.formats.stored.source import BytesSource
from reshard.formats.torch_save.zip_archive import TorchArchive

__all__ = ["object_from_bytes"]


def object_from_bytes(data: bytes, key: str) -> Any:
    """The plain value that was saved under `key`. Raises UnsafeDataError or DamagedCheckpointError."""
    return TorchArchive(BytesSource(data, f"the object {key!r}")).object()
