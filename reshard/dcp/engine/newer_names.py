"""Names from newer torch releases that also work with older ones, and names of our modules."""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed import checkpoint as _torch

__all__ = ["newer_or_torchs"]


def newer_or_torchs(name: str) -> Any:
    """Look up a name of `torch.distributed.checkpoint` that `reshard.dcp` does not define itself."""
    if name in ("FsspecReader", "FsspecWriter"):
        from reshard.dcp import fsspec_filesystem  # fsspec is optional

        return getattr(fsspec_filesystem, name)
    if name == "CheckpointableTensor":
        from reshard.dcp.protocol import CheckpointableTensor  # rarely needed

        return CheckpointableTensor
    if name == "state_dict":  # once torch's module was imported, torch's package has the name, but it is not ours
        return importlib.import_module("reshard.dcp.state_dict")
    return getattr(_torch, name)
