"""torch's own: `Stateful`: what gives and takes a state dict of its own."""

from functools import partial

from torch.distributed.checkpoint import stateful as _torch
from torch.distributed.checkpoint.stateful import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
