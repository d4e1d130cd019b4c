"""The functions that get and set state dicts of live models: ours; the rest is torch's own.

The getters give FSDP1's sharded parameters as torch does, in chunks of rows, whatever the flat
parameters hold: see `reshard.state_dict.options.InChunks`.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as _torch
from torch.optim import Optimizer

from reshard.state_dict import api
from reshard.state_dict.api import set_optimizer_state_dict as set_optimizer_state_dict
from reshard.state_dict.api import set_state_dict as set_state_dict
from reshard.state_dict.names import Models
from reshard.state_dict.options import InChunks, SetReport, as_options
from reshard.state_dict.options import StateDictOptions as StateDictOptions

__getattr__ = partial(getattr, _torch)


def get_model_state_dict(
    model: Models, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """`reshard.get_model_state_dict`, in chunks."""
    _deprecate(submodules)
    return api.get_model_state_dict(model, submodules=submodules, options=_in_chunks(options))


def get_optimizer_state_dict(
    model: Models,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """`reshard.get_optimizer_state_dict`, in chunks."""
    _deprecate(submodules)
    return api.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=_in_chunks(options))


def get_state_dict(
    model: Models,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`reshard.get_state_dict`, in chunks."""
    _deprecate(submodules)
    return api.get_state_dict(model, optimizers, submodules=submodules, options=_in_chunks(options))


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


def _deprecate(submodules: set[nn.Module] | None) -> None:
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated upstream. Filter what get_state_dict gives",
            FutureWarning,
            stacklevel=3,
        )


def _in_chunks(options: StateDictOptions | None) -> StateDictOptions:
    return InChunks(**asdict(as_options(options)))
