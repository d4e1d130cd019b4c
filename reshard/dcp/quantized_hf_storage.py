"""Re-exports torch's storage for quantized safetensors files, which does not detect changed bytes."""

from functools import partial

from torch.distributed.checkpoint import quantized_hf_storage as _torch
from torch.distributed.checkpoint.quantized_hf_storage import *  # noqa: F403

__getattr__ = partial(getattr, _torch)
