"""Re-exports torch's `.metadata` records."""

from functools import partial

from torch.distributed.checkpoint import metadata as _torch
from torch.distributed.checkpoint.metadata import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
