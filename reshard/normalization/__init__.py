"""Canonical state dicts: names without wrappers, optimizer state by name, sharded or whole, out of any live model."""

from __future__ import annotations

from reshard.normalization.api import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from reshard.normalization.collect import iter_full
from reshard.normalization.fqn_map import FqnEntry, FqnMap, fqn_map
from reshard.normalization.names import Stage
from reshard.normalization.options import StateDictOptions
from reshard.normalization.raw import Normalized, NormalizeReport, normalize
from reshard.normalization.report import Cast, OptimizerReport, SetReport

__all__ = [
    "Cast",
    "FqnEntry",
    "FqnMap",
    "NormalizeReport",
    "Normalized",
    "OptimizerReport",
    "SetReport",
    "Stage",
    "StateDictOptions",
    "fqn_map",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "iter_full",
    "normalize",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
