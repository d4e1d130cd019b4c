"""Re-exports torch's `CheckpointException`, which says what failed on which rank."""

from functools import partial

from torch.distributed.checkpoint import api as _torch
from torch.distributed.checkpoint.api import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
