"""Re-exports torch's storage interfaces."""

from functools import partial

from torch.distributed.checkpoint import storage as _torch
from torch.distributed.checkpoint.storage import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
