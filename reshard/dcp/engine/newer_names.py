"""Names of newer releases of torch, under any: looked up here before torch's own."""

from __future__ import annotations

from typing import Any

from torch.distributed import checkpoint as _torch

__all__ = ["newer_or_torchs"]


def newer_or_torchs(name: str) -> Any:
    """A name of `torch.distributed.checkpoint` that `reshard.dcp` does not define itself."""
    if name in ("FsspecReader", "FsspecWriter"):
        from reshard.dcp import fsspec_filesystem  # fsspec is optional

        return getattr(fsspec_filesystem, name)
    if name == "CheckpointableTensor":
        from reshard.dcp.protocol import CheckpointableTensor  # mostly nobody asks

        return CheckpointableTensor
    return getattr(_torch, name)
