"""Re-exports torch's fsspec storages, which require fsspec. torch made this module public in 2.14;
here it works with every torch version.
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
