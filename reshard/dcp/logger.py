"""Re-exports torch's logging."""

from functools import partial

from torch.distributed.checkpoint import logger as _torch
from torch.distributed.checkpoint.logger import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
