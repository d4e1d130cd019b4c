"""Re-exports torch's `Stateful`: an object that returns and loads its own state dict."""

from functools import partial

from torch.distributed.checkpoint import stateful as _torch
from torch.distributed.checkpoint.stateful import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
