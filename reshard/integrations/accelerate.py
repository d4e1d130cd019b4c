"""What an `Accelerator` has prepared, saved and loaded on this engine, on any number of processes.

    from reshard.integrations.accelerate import load_state, save_state

    save_state(accelerator, "run/step-10", {"step": 10})       # in place of accelerator.save_state
    step = load_state(accelerator, "run")["step"]              # in place of accelerator.load_state

Names have no wrappers in them: DDP, FSDP2, compiled or plain, saved by one and loaded by another.
Data loaders and the states of Python's and numpy's random numbers are not in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from reshard.api.load import load
from reshard.api.optimizer_destinations import optimizer_destinations
from reshard.api.save import SaveReport, save
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import ReshardError
from reshard.live.state import PerRank
from reshard.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from reshard.stored.tensor import LazyTensor

__all__ = ["load_state", "save_state"]


def save_state(
    accelerator: Accelerator, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
) -> SaveReport:
    """Save model, optimizers, schedules, the gradient scaler, what was registered for
    checkpointing, torch's random numbers and `extra`, which is of plain values and tensors. All
    processes call it.

    Raises ReshardError for none or several models: save these by `reshard.save`, under names of
    your choice.
    """
    model, optimizers = _prepared(accelerator)
    state = _rest(accelerator)
    state["model"], state["optim"] = get_state_dict(model, optimizers)
    return save({**state, "extra": dict(extra or {})}, path)


def load_state(accelerator: Accelerator, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fill what is prepared from a checkpoint of `save_state`, or the newest complete one of a run,
    and give the `extra` that was saved. All processes call it.

    Raises as `reshard.load` does, and ReshardError for none or several models.
    """
    model, optimizers = _prepared(accelerator)
    checkpoint = open_checkpoint(path)
    state: dict[str, Any] = {**_rest(accelerator), "model": get_model_state_dict(model)}
    state["optim"] = optimizer_destinations(model, optimizers, checkpoint)
    load(state, checkpoint, strict={"extra*": "subset", "*": "strict"})
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for kind, objects in _stateful(accelerator).items():
        for one, its in zip(objects, state[kind], strict=True):
            one.load_state_dict(its)
    torch.set_rng_state(state["rng"].value)
    extra = checkpoint.nested()["extra"]
    return {key: value[...] if isinstance(value, LazyTensor) else value for key, value in extra.items()}


def _prepared(accelerator: Accelerator) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    models = accelerator._models
    if len(models) != 1:
        raise ReshardError(
            f"the accelerator has prepared {len(models)} models, and one is wanted: save several by reshard.save, each "
            "under a name of its own"
        )
    return models[0], [wrapped.optimizer for wrapped in accelerator._optimizers]


def _stateful(accelerator: Accelerator) -> dict[str, list[Any]]:
    scaler = [accelerator.scaler] if accelerator.scaler is not None else []
    return {"schedules": accelerator._schedulers, "registered": accelerator._custom_objects, "scaler": scaler}


def _rest(accelerator: Accelerator) -> dict[str, Any]:
    state: dict[str, Any] = {
        kind: [one.state_dict() for one in objects] for kind, objects in _stateful(accelerator).items()
    }
    state["rng"] = PerRank(torch.get_rng_state(), on_change="keep")
    return state
