"""torch's own: storages over fsspec, which is needed. A public module of torch from 2.14 on, and here under any."""

from functools import partial
from typing import Any

_torch: Any
try:
    from torch.distributed.checkpoint import fsspec_filesystem as _torch  # type: ignore[attr-defined, no-redef]
except ImportError:
    from torch.distributed.checkpoint import _fsspec_filesystem as _torch

__all__ = ["FsspecReader", "FsspecWriter"]

FsspecReader = _torch.FsspecReader
FsspecWriter = _torch.FsspecWriter

__getattr__ = partial(getattr, _torch)
