"""Re-exports torch's storage helpers."""

from functools import partial

from torch.distributed.checkpoint import utils as _torch
from torch.distributed.checkpoint.utils import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
