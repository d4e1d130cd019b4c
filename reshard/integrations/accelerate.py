"""Save and load everything that an `Accelerator` has prepared, on any number of processes.

    from reshard.integrations.accelerate import load_state, save_state

    save_state(accelerator, "run/step-10", {"step": 10})       # instead of accelerator.save_state
    step = load_state(accelerator, "run")["step"]              # instead of accelerator.load_state
    manager.save(10, state_of(accelerator, {"step": 10}))      # with a reshard.CheckpointManager

Names have no wrapper prefixes, so a checkpoint from a DDP, FSDP2, or compiled model loads into any
other of them. Data loaders and the random states of Python and NumPy are not saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reshard.api.load import load
from reshard.api.save import SaveReport, save
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import FormatError, OptionError, ReshardError, framework
from reshard.live.tensors import is_dtensor
from reshard.stored.tensor import whole

with framework("accelerate>=1"):
    from accelerate import Accelerator

__all__ = ["load_state", "save_state", "state_of"]


def save_state(
    accelerator: Accelerator, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
) -> SaveReport:
    """Save the model, optimizers, schedulers, the gradient scaler, registered objects, torch's
    random states, and `extra`. `extra` contains plain values and tensors. All processes must call
    it.

    Raises ReshardError if the accelerator has no model or several. Save several models with
    `reshard.save`, under names of your choice.
    """
    return save(state_of(accelerator, extra), path)


def load_state(accelerator: Accelerator, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore all prepared objects from a checkpoint of `save_state`, or from the newest complete
    one of a run. Return the saved `extra`. All processes must call it. To get the report, call
    `reshard.load(state, path)` with `state = state_of(accelerator)` instead. If the saved `extra` has no tensors,
    it is then `state["extra"]`.

    Raises the errors of `reshard.load`, and ReshardError if the accelerator has no model or
    several.
    """
    state, checkpoint = state_of(accelerator), open_checkpoint(path)
    if checkpoint.format == "accelerate":
        fix = "convert it once, see docs/migrate/from-accelerate.md"
        raise FormatError(f"{checkpoint.url} was written by Accelerate: {fix}")
    del state["extra"]
    extra = checkpoint.nested()["extra"]
    load(state, checkpoint, strict={"extra*": "subset", "*": "strict"} if extra else "strict")
    found: dict[str, Any] = whole(extra)
    return found


def state_of(accelerator: Accelerator, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all prepared and registered objects, and `extra`, as a state that a
    `reshard.CheckpointManager` can save and restore.

    Raises ReshardError if the accelerator has no model or several.
    """
    if isinstance(accelerator, str | os.PathLike):
        raise OptionError(f"the accelerator is the first argument, got {os.fspath(accelerator)!r}")
    models = accelerator._models
    if len(models) != 1:
        raise ReshardError(
            f"the accelerator has prepared {len(models)} models, not one: call prepare(model, optimizer) first, "
            "or save several models with reshard.save"
        )
    optimizers = [wrapped.optimizer for wrapped in accelerator._optimizers]
    return {
        "schedules": [wrapped.scheduler for wrapped in accelerator._schedulers],
        "registered": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        "rng": torch.default_generator,
        "model": _with_its_buffers(accelerator, models[0]),
        "optim": optimizers or {"state": {}, "param_groups": []},
        "extra": dict(extra or {}),
    }


class _InDDP(DistributedDataParallel):
    """Has the attributes by which reshard recognizes the buffers of a `DistributedDataParallel`
    model. accelerate does not keep the real wrapper."""

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        self.module = model
        self.broadcast_buffers = settings.get("broadcast_buffers", True)
        self.process_group = dist.group.WORLD  # type: ignore[assignment]  # there is one
        self.parameters_to_ignore = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _with_its_buffers(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel` if accelerate trains it so. Ranks then load
    the first rank's buffers, such as running means."""
    parameters = list(model.parameters())
    is_wrapped = accelerator.distributed_type.startswith("MULTI_") and any(one.requires_grad for one in parameters)
    if not is_wrapped or isinstance(model, DistributedDataParallel) or any(map(is_dtensor, parameters)):
        return model
    handler = accelerator.ddp_handler
    return _InDDP(model, handler.to_kwargs() if handler is not None else {})
