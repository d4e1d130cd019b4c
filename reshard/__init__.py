"""Normalize, reshard, save, load and verify the state of parallel PyTorch models.

Names are imported when first used, so that `import reshard` is quick and pulls in only what is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Checkpoint": "checkpoint",
    "ConvertReport": "converting",
    "FqnMap": "normalization",
    "LoadReport": "loading",
    "Mapping": "mapping",
    "PerRank": "per_rank",
    "ReshardError": "errors",
    "SaveReport": "saving",
    "Stage": "normalization",
    "StateDictOptions": "normalization",
    "TransferReport": "live",
    "async_save": "saving",
    "compare": "checking",
    "convert": "converting",
    "fingerprint": "fingerprints",
    "fqn_map": "normalization",
    "get_model_state_dict": "normalization",
    "get_optimizer_state_dict": "normalization",
    "get_state_dict": "normalization",
    "iter_full": "normalization",
    "latest_complete": "generations",
    "layout_of": "tensors",
    "load": "loading",
    "normalize": "normalization",
    "open": "checkpoint",
    "optimizer_destinations": "destinations",
    "plan": "planning",
    "prepare": "live",
    "prune": "generations",
    "redistribute": "live",
    "save": "saving",
    "set_model_state_dict": "normalization",
    "set_optimizer_state_dict": "normalization",
    "set_state_dict": "normalization",
    "trace_layout": "trace",
    "verify": "checking",
    "verify_live": "live",
}
"""Where each public name lives."""

__all__ = list(_HOME)

if TYPE_CHECKING:
    from reshard import dcp as dcp
    from reshard.checking import compare as compare
    from reshard.checking import verify as verify
    from reshard.checkpoint import Checkpoint as Checkpoint
    from reshard.checkpoint import open as open
    from reshard.converting import ConvertReport as ConvertReport
    from reshard.converting import convert as convert
    from reshard.destinations import optimizer_destinations as optimizer_destinations
    from reshard.errors import ReshardError as ReshardError
    from reshard.fingerprints import fingerprint as fingerprint
    from reshard.generations import latest_complete as latest_complete
    from reshard.generations import prune as prune
    from reshard.live import TransferReport as TransferReport
    from reshard.live import prepare as prepare
    from reshard.live import redistribute as redistribute
    from reshard.live import verify_live as verify_live
    from reshard.loading import LoadReport as LoadReport
    from reshard.loading import load as load
    from reshard.mapping import Mapping as Mapping
    from reshard.normalization import FqnMap as FqnMap
    from reshard.normalization import Stage as Stage
    from reshard.normalization import StateDictOptions as StateDictOptions
    from reshard.normalization import fqn_map as fqn_map
    from reshard.normalization import get_model_state_dict as get_model_state_dict
    from reshard.normalization import get_optimizer_state_dict as get_optimizer_state_dict
    from reshard.normalization import get_state_dict as get_state_dict
    from reshard.normalization import iter_full as iter_full
    from reshard.normalization import normalize as normalize
    from reshard.normalization import set_model_state_dict as set_model_state_dict
    from reshard.normalization import set_optimizer_state_dict as set_optimizer_state_dict
    from reshard.normalization import set_state_dict as set_state_dict
    from reshard.per_rank import PerRank as PerRank
    from reshard.planning import plan as plan
    from reshard.saving import SaveReport as SaveReport
    from reshard.saving import async_save as async_save
    from reshard.saving import save as save
    from reshard.tensors import layout_of as layout_of
    from reshard.trace import trace_layout as trace_layout


def __getattr__(name: str) -> Any:
    if name == "dcp":
        return importlib.import_module("reshard.dcp")
    if name not in _HOME:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"reshard.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
