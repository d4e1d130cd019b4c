"""Re-exports torch's planner interfaces and plan items."""

from functools import partial

from torch.distributed.checkpoint import planner as _torch
from torch.distributed.checkpoint.planner import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
