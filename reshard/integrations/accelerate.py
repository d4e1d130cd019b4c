"""What an `Accelerator` has prepared, saved and loaded on this engine, on any number of processes.

    from reshard.integrations.accelerate import load_state, save_state

    save_state(accelerator, "run/step-10", {"step": 10})       # in place of accelerator.save_state
    step = load_state(accelerator, "run")["step"]              # in place of accelerator.load_state
    manager.save(10, state_of(accelerator, {"step": 10}))      # by a reshard.CheckpointManager, which decides when

Names have no wrappers in them: DDP, FSDP2, compiled or plain, saved by one and loaded by another.
Data loaders and the states of Python's and numpy's random numbers are not in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from reshard.api.load import load
from reshard.api.manager.live_objects import LiveObjects
from reshard.api.save import SaveReport, save
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import ReshardError
from reshard.stored.tensor import LazyTensor

__all__ = ["load_state", "save_state", "state_of"]


def save_state(
    accelerator: Accelerator, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
) -> SaveReport:
    """Save model, optimizers, schedules, the gradient scaler, what was registered for
    checkpointing, torch's random numbers and `extra`, which is of plain values and tensors. All
    processes call it.

    Raises ReshardError for none or several models: save these by `reshard.save`, under names of
    your choice.
    """
    return save(LiveObjects(state_of(accelerator, extra)).state, path)


def load_state(accelerator: Accelerator, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fill what is prepared from a checkpoint of `save_state`, or the newest complete one of a run,
    and give the `extra` that was saved. All processes call it.

    Raises as `reshard.load` does, and ReshardError for none or several models.
    """
    checkpoint, state = open_checkpoint(path), state_of(accelerator)
    del state["extra"]
    live = LiveObjects(state, to_fill=True)
    load(live.state, checkpoint, strict={"extra*": "subset", "*": "strict"})
    live.put_back()
    extra = checkpoint.nested()["extra"]
    return {key: value[...] if isinstance(value, LazyTensor) else value for key, value in extra.items()}


def state_of(accelerator: Accelerator, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that is prepared and registered, and `extra`, as a `reshard.CheckpointManager` saves and restores it.

    Raises ReshardError for none or several models.
    """
    models = accelerator._models
    if len(models) != 1:
        raise ReshardError(
            f"the accelerator has prepared {len(models)} models, and one is wanted: save several by reshard.save, each "
            "under a name of its own"
        )
    optimizers = [wrapped.optimizer for wrapped in accelerator._optimizers]
    return {
        "schedules": accelerator._schedulers,
        "registered": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        "rng": torch.default_generator,
        "model": models[0],
        "optim": optimizers or {"state": {}, "param_groups": []},
        "extra": dict(extra or {}),
    }
