"""Re-exports torch's logging handlers."""

from functools import partial

from torch.distributed.checkpoint import logging_handlers as _torch
from torch.distributed.checkpoint.logging_handlers import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
