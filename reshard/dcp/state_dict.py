"""The functions that get and set state dicts of live models: ours; the rest is torch's own."""

from functools import partial

from torch.distributed.checkpoint import state_dict as _torch

from reshard.state_dict.api import get_model_state_dict as get_model_state_dict
from reshard.state_dict.api import get_optimizer_state_dict as get_optimizer_state_dict
from reshard.state_dict.api import get_state_dict as get_state_dict
from reshard.state_dict.api import set_model_state_dict as set_model_state_dict
from reshard.state_dict.api import set_optimizer_state_dict as set_optimizer_state_dict
from reshard.state_dict.api import set_state_dict as set_state_dict
from reshard.state_dict.options import StateDictOptions as StateDictOptions

__getattr__ = partial(getattr, _torch)
