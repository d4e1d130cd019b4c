"""Re-exports torch's planner helpers."""

from functools import partial

from torch.distributed.checkpoint import planner_helpers as _torch
from torch.distributed.checkpoint.planner_helpers import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
