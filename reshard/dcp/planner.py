"""torch's own: the interfaces of planners, and the items of plans."""

from functools import partial

from torch.distributed.checkpoint import planner as _torch
from torch.distributed.checkpoint.planner import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
