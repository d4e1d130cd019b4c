"""The functions that get and set the state dicts of live models. The getters and setters are ours;
the other names are torch's.

The getters return FSDP1's sharded parameters in chunks of rows, as torch does, regardless of how
the flat parameters are sharded: see `reshard.state_dict.options.InChunks`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.distributed.checkpoint import state_dict as _torch

from reshard.state_dict import api
from reshard.state_dict.api import (
    set_optimizer_state_dict as set_optimizer_state_dict,
    set_state_dict as set_state_dict,
)
from reshard.state_dict.live_model import Models
from reshard.state_dict.options import InChunks, SetReport, StateDictOptions as StateDictOptions, as_options

__getattr__ = partial(getattr, _torch)


P = ParamSpec("P")
R = TypeVar("R")


def _in_chunks(getter: Callable[P, R]) -> Callable[P, R]:
    """Wrap one of our getters so that it returns row chunks."""

    @wraps(getter)
    def get(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("submodules"):
            warnings.warn(
                "Getting submodules only model/optim state_dict is deprecated upstream. Filter what get_state_dict "
                "gives",
                FutureWarning,
                stacklevel=2,
            )
        options: Any = kwargs.get("options")
        kwargs["options"] = InChunks(**asdict(as_options(options)))
        return getter(*args, **kwargs)

    return get


get_model_state_dict = _in_chunks(api.get_model_state_dict)
get_optimizer_state_dict = _in_chunks(api.get_optimizer_state_dict)
get_state_dict = _in_chunks(api.get_state_dict)


def set_model_state_dict(
    model: Models, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> SetReport:
    """`reshard.set_model_state_dict`."""
    if any(isinstance(key, nn.Module) for key in model_state_dict):
        warnings.warn(
            "Passing model_state_dict as a dict of modules is deprecated upstream. Take the names of the whole model",
            FutureWarning,
            stacklevel=2,
        )
    return api.set_model_state_dict(model, model_state_dict, options=options)
