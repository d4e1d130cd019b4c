"""Normalize, reshard, save, load, and verify the state of parallel PyTorch models.

Each name is imported on first use, so `import reshard` is fast and loads only what you use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Checkpoint": "checkpoint",
    "CheckpointManager": "api.manager",
    "CompareReport": "api.compare",
    "ConvertReport": "api.convert",
    "ElasticSampler": "api.manager",
    "Every": "api.manager",
    "FqnMap": "state_dict",
    "Keep": "api.manager",
    "LazyTensor": "checkpoint",
    "LoadReport": "api.load",
    "Mapping": "mapping",
    "NormalizedState": "checkpoint",
    "OptimizerReport": "state_dict",
    "PendingSave": "api.save",
    "PerRank": "live.state",
    "Preemption": "api.manager",
    "Prepared": "api.redistribute",
    "ReshardError": "errors",
    "RestoreReport": "api.manager",
    "SaveReport": "api.save",
    "SetReport": "state_dict",
    "Stage": "state_dict",
    "StateDictOptions": "state_dict",
    "Step": "api.retention",
    "StepReport": "api.manager",
    "TransferReport": "api.redistribute",
    "WeightBucket": "api.weights",
    "WeightSource": "api.weights",
    "__version__": "native.version",
    "async_save": "api.save",
    "compare": "api.compare",
    "convert": "api.convert",
    "dequantized": "live.tensor_classes",
    "fingerprint": "api.fingerprint",
    "fqn_map": "state_dict",
    "get_model_state_dict": "state_dict",
    "get_optimizer_state_dict": "state_dict",
    "get_state_dict": "state_dict",
    "iter_full": "state_dict",
    "latest_complete": "api.retention",
    "layout_of": "live.tensors",
    "load": "api.load",
    "normalize": "state_dict",
    "open": "checkpoint",
    "optimizer_destinations": "api.optimizer_destinations",
    "plan": "api.plan",
    "prepare": "api.redistribute",
    "prune": "api.retention",
    "redistribute": "api.redistribute",
    "register_tensor_class": "live.tensor_classes",
    "save": "api.save",
    "set_model_state_dict": "state_dict",
    "set_optimizer_state_dict": "state_dict",
    "set_state_dict": "state_dict",
    "steps": "api.retention",
    "trace_layout": "api.trace_layout",
    "verify": "api.verify",
    "verify_live": "api.redistribute",
}
"""Where each public name lives."""

_MODULES = ("dcp", "elastic", "errors", "mapping", "planners")
"""Public modules that are there without an import of their own."""

_ELSEWHERE = {
    "load_state_dict": "reshard.load fills a state dict, reshard.set_model_state_dict fills a model",
    "save_state_dict": "reshard.save, of a state dict by reshard.get_model_state_dict(model)",
    "state_dict": "reshard.get_model_state_dict makes the state dict of a model",
    "load_checkpoint": "reshard.load fills a state dict, reshard.open reads without one",
    "save_checkpoint": "reshard.save writes a checkpoint",
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
    from reshard.api.retention import (
        Step as Step,
        latest_complete as latest_complete,
        prune as prune,
        steps as steps,
    )
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
    from reshard.live.tensor_classes import (
        dequantized as dequantized,
        register_tensor_class as register_tensor_class,
    )
    from reshard.live.tensors import layout_of as layout_of
    from reshard.mapping import Mapping as Mapping
    from reshard.native.version import __version__ as __version__
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


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOME and name not in _MODULES:
            from reshard import dcp, errors, mapping, planners

            places = {"errors": errors, "planners": planners, "mapping": mapping, "dcp": dcp}
            known = [] if name[0] == "_" or name in _ELSEWHERE else places
            place = next((each for each in known if hasattr(places[each], name)), "")
            meant = f": it is reshard.{place}.{name}" if place else errors.did_you_mean(name, _HOME)
            meant = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else meant
            raise AttributeError(f"module 'reshard' has no attribute {name!r}{meant}")
        from reshard.live.garbage_collection import gc_paused

        with gc_paused():  # of what torch left there to go through, it would be the longest part of this
            module = importlib.import_module(f"reshard.{_HOME.get(name, name)}")
        value = globals()[name] = module if name in _MODULES else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES])
