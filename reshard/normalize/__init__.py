"""Canonical state dicts: names without wrappers, optimizer state by name, sharded or whole, out of any live model."""

from __future__ import annotations

from reshard.normalize.api import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from reshard.normalize.names import Stage
from reshard.normalize.options import StateDictOptions
from reshard.normalize.report import Cast, OptimizerReport, SetReport

__all__ = [
    "Cast",
    "OptimizerReport",
    "SetReport",
    "Stage",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
