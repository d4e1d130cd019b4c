"""Normalize, reshard, save, load, and verify the state of parallel PyTorch models.

Each name is imported on first use, so `import reshard` is fast and loads only what you use.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

_planners = os.path.join(os.path.dirname(os.path.dirname(__file__)), "planners")
_found = importlib.util.find_spec("planners")
if _found and os.path.realpath(os.path.dirname(_found.origin or "")) != os.path.realpath(_planners):
    _wrong = (
        f"reshard needs its own package planners, in {_planners}, but Python finds {_found.origin} first: rename "
        "that, or remove its folder from sys.path"
    )
    if sys.orig_argv[1:3] == ["-m", "reshard"] or os.path.basename(sys.argv[0]) == "reshard":  # the command line
        print(f"error: {_wrong}", file=sys.stderr)
        sys.exit(3)
    raise ImportError(_wrong)

_PUBLIC = {
    "api.compare": "CompareReport compare",
    "api.convert": "ConvertReport convert",
    "api.fingerprint": "fingerprint",
    "api.load": "LoadReport load",
    "api.manager": "CheckpointManager ElasticSampler Every Keep Preemption RestoreReport StepReport",
    "api.optimizer_destinations": "optimizer_destinations",
    "api.plan": "plan",
    "api.redistribute": "Prepared TransferReport prepare redistribute verify_live",
    "api.retention": "Step latest_complete prune steps",
    "api.save": "PendingSave SaveReport async_save save",
    "api.trace_layout": "trace_layout",
    "api.verify": "verify",
    "api.weights": "WeightBucket WeightSource",
    "checkpoint": "Checkpoint LazyTensor NormalizedState open",
    "errors": "ReshardError",
    "live.state": "PerRank",
    "live.tensor_classes": "dequantized register_tensor_class",
    "live.tensors": "layout_of",
    "mapping": "Mapping",
    "state_dict": (
        "FqnMap OptimizerReport SetReport Stage StateDictOptions fqn_map get_model_state_dict "
        "get_optimizer_state_dict get_state_dict iter_full normalize set_model_state_dict "
        "set_optimizer_state_dict set_state_dict"
    ),
    "version": "__version__",
}
"""The public names of each module."""

_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}

_MODULES = ("dcp", "elastic", "errors", "mapping", "planners")
"""Public modules that are there without an import of their own."""

_ELSEWHERE = {
    "load_state_dict": "reshard.load fills a state dict, reshard.set_model_state_dict fills a model",
    "save_state_dict": "reshard.save, of a state dict by reshard.get_model_state_dict(model)",
    "state_dict": "reshard.get_model_state_dict makes the state dict of a model",
    "load_checkpoint": "reshard.load fills a state dict, reshard.open reads without one",
    "save_checkpoint": "reshard.save writes a checkpoint",
    "async_load": "reshard.load fills a state dict; there is no asynchronous load",
    "restore": "reshard.load fills a state dict from a checkpoint",
    "resume": "CheckpointManager(root, every=...).restore(state) resumes a run",
    "save_file": "reshard.save writes a checkpoint, reshard.convert one file of another format",
    "load_file": "reshard.open(file) reads it lazily",
    "safe_open": "reshard.open(file) reads it lazily",
    "save_model": "reshard.save, of a state dict by reshard.get_model_state_dict(model)",
    "load_model": "reshard.load fills a state dict, reshard.set_model_state_dict fills a model",
    "Checkpointer": "reshard.CheckpointManager, or reshard.save and reshard.load",
    "StandardCheckpointer": "reshard.CheckpointManager, or reshard.save and reshard.load",
    "diff": "reshard.compare compares checkpoints, reshard.planners.diff plans",
    "to_html": "plans, checkpoints, and comparisons have it: plan.to_html()",
    "inspect": "reshard.open(path) reads a checkpoint without a model",
    "latest_checkpoint": "reshard.latest_complete(folder) returns its path",
    "Manager": "reshard.CheckpointManager saves and restores the checkpoints of a run",
}
"""Names that other libraries have for what is called otherwise here."""

__all__ = [name for name in _HOME if name not in ("__version__", "open")]  # which would replace the builtin open

if TYPE_CHECKING:
    from reshard import dcp as dcp, elastic as elastic, errors as errors, mapping as mapping, planners as planners
    from reshard.api.compare import CompareReport as CompareReport, compare as compare
    from reshard.api.convert import ConvertReport as ConvertReport, convert as convert
    from reshard.api.fingerprint import fingerprint as fingerprint
    from reshard.api.load import LoadReport as LoadReport, load as load
    from reshard.api.manager import (
        CheckpointManager as CheckpointManager,
        ElasticSampler as ElasticSampler,
        Every as Every,
        Keep as Keep,
        Preemption as Preemption,
        RestoreReport as RestoreReport,
        StepReport as StepReport,
    )
    from reshard.api.optimizer_destinations import optimizer_destinations as optimizer_destinations
    from reshard.api.plan import plan as plan
    from reshard.api.redistribute import (
        Prepared as Prepared,
        TransferReport as TransferReport,
        prepare as prepare,
        redistribute as redistribute,
        verify_live as verify_live,
    )
    from reshard.api.retention import Step as Step, latest_complete as latest_complete, prune as prune, steps as steps
    from reshard.api.save import (
        PendingSave as PendingSave,
        SaveReport as SaveReport,
        async_save as async_save,
        save as save,
    )
    from reshard.api.trace_layout import trace_layout as trace_layout
    from reshard.api.verify import verify as verify
    from reshard.api.weights import WeightBucket as WeightBucket, WeightSource as WeightSource
    from reshard.checkpoint import (
        Checkpoint as Checkpoint,
        LazyTensor as LazyTensor,
        NormalizedState as NormalizedState,
        open as open,
    )
    from reshard.errors import ReshardError as ReshardError
    from reshard.live.state import PerRank as PerRank
    from reshard.live.tensor_classes import dequantized as dequantized, register_tensor_class as register_tensor_class
    from reshard.live.tensors import layout_of as layout_of
    from reshard.mapping import Mapping as Mapping
    from reshard.state_dict import (
        FqnMap as FqnMap,
        OptimizerReport as OptimizerReport,
        SetReport as SetReport,
        Stage as Stage,
        StateDictOptions as StateDictOptions,
        fqn_map as fqn_map,
        get_model_state_dict as get_model_state_dict,
        get_optimizer_state_dict as get_optimizer_state_dict,
        get_state_dict as get_state_dict,
        iter_full as iter_full,
        normalize as normalize,
        set_model_state_dict as set_model_state_dict,
        set_optimizer_state_dict as set_optimizer_state_dict,
        set_state_dict as set_state_dict,
    )
    from reshard.version import __version__ as __version__


if not TYPE_CHECKING:  # type checkers would accept any attribute

    def __getattr__(name: str) -> Any:
        if name not in _HOME and name not in _MODULES:
            from reshard import dcp, errors, mapping, planners

            places = {"errors": errors, "planners": planners, "mapping": mapping, "dcp": dcp}
            known = [] if name[0] == "_" or name in _ELSEWHERE else places
            place = next((each for each in known if hasattr(places[each], name)), "")
            meant = errors.did_you_mean(name.partition("_checkpoint")[0], _HOME)
            meant = f": it is reshard.{place}.{name}" if place else meant
            meant = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else meant
            raise AttributeError(f"module 'reshard' has no attribute {name!r}{meant}")
        from reshard.live.garbage_collection import gc_paused

        with gc_paused():  # of what torch left there to go through, it would be the longest part of this
            module = importlib.import_module(f"reshard.{_HOME.get(name, name)}")
        value = globals()[name] = module if name in _MODULES else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES])
