"""Re-exports torch's functions that load optimizer state without a target."""

from functools import partial

from torch.distributed.checkpoint import optimizer as _torch
from torch.distributed.checkpoint.optimizer import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
