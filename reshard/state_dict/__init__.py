"""Canonical state dicts of live models: names without wrappers, optimizer state by name, tensors
sharded or full."""

from __future__ import annotations

from reshard.state_dict.api import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from reshard.state_dict.collect import iter_full
from reshard.state_dict.fqn_map import FqnEntry, FqnMap, fqn_map
from reshard.state_dict.live_model import Stage
from reshard.state_dict.normalize import Normalized, NormalizeReport, normalize
from reshard.state_dict.options import Cast, OptimizerReport, SetReport, StateDictOptions

__all__ = [
    "Cast", "FqnEntry", "FqnMap", "NormalizeReport", "Normalized", "OptimizerReport", "SetReport", "Stage",
    "StateDictOptions", "fqn_map", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict",
    "iter_full", "normalize", "set_model_state_dict", "set_optimizer_state_dict", "set_state_dict",
]  # fmt: skip
