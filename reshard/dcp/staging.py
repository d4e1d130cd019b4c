"""Re-exports torch's stagers, which copy a state before it is saved in the background."""

from functools import partial

from torch.distributed.checkpoint import staging as _torch
from torch.distributed.checkpoint.staging import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
