"""Re-exports torch's helpers for planners that reshard."""

from functools import partial

from torch.distributed.checkpoint import resharding as _torch
from torch.distributed.checkpoint.resharding import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
