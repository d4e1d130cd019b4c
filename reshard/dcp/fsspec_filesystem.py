"""Re-exports torch's fsspec storages, under every torch version. They require fsspec.

The reader does not compare checksums. `reshard.dcp.FileSystemReader` does, and takes URLs, too.
"""

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
