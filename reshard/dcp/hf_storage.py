"""torch's own: storages of safetensors files in Hugging Face's layout."""

from functools import partial

from torch.distributed.checkpoint import hf_storage as _torch
from torch.distributed.checkpoint.hf_storage import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
