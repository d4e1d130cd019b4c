"""Where a fresh optimizer's state is loaded to: memory for every state tensor of a checkpoint, with nothing stepped.

A new optimizer holds no state, so its state dict has no places to load into. What is to come is known all the same:
the checkpoint says which parameters have which state, and a state tensor of the parameter's shape lies where the
parameter lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from reshard.checkpoint import Checkpoint
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import KeyMismatchError
from reshard.normalization.api import get_model_state_dict, get_optimizer_state_dict
from reshard.normalization.names import Models
from reshard.tensors import global_shape

__all__ = ["optimizer_destinations"]


def optimizer_destinations(
    model: Models, optimizers: Optimizer | Iterable[Optimizer], source: Any, *, prefix: str = "optim"
) -> dict[str, Any]:
    """An optimizer state dict with memory for the state that `source` holds; give it to `load`, then to
    `set_optimizer_state_dict`. The optimizer is neither stepped nor changed.

    Args:
        source: the checkpoint, open or as a path.
        prefix: the key that the optimizer's state dict was saved under: "optim" for {"optim": ...}, "" for none.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [...]}`: state of the model's parameters that were saved with
        some; tensors of the parameter's shape are sharded like it, in the saved dtype; all others are whole. Groups
        are the live ones.

    Raises:
        KeyMismatchError: the checkpoint has nothing under `prefix`, or no nested optimizer state there.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    place = tuple(prefix.split(".")) if prefix else ()
    parameters = get_model_state_dict(model)
    state: dict[str, dict[str, Any]] = {}
    found = False
    for key in [*checkpoint, *checkpoint.objects]:
        path = checkpoint.contents.paths.get(key, (key,))
        if path[: len(place)] != place:
            continue
        found = True
        rest = path[len(place) :]
        if len(rest) == 3 and rest[0] == "state" and rest[1] in parameters:
            values = state.setdefault(rest[1], {})
            if key in checkpoint:
                values[rest[2]] = _memory(checkpoint, key, parameters[rest[1]])
            else:
                values[rest[2]] = checkpoint.objects[key]
    if not found:
        names = sorted({str(checkpoint.contents.paths.get(key, (key,))[0]) for key in checkpoint})[:8]
        raise KeyMismatchError(
            f"{checkpoint.url} has nothing under {prefix!r}; its keys begin with {', '.join(names)}. "
            "Give the key that the optimizer's state dict was saved under as prefix="
        )
    live = get_optimizer_state_dict(model, optimizers)
    return {"state": state, "param_groups": live.get("param_groups", [])}


def _memory(checkpoint: Checkpoint, key: str, parameter: Any) -> torch.Tensor:
    """An unfilled tensor for a saved one, placed like its parameter where the shapes are the same."""
    saved = checkpoint[key]
    if tuple(saved.shape) == global_shape(parameter):
        like: torch.Tensor = torch.empty_like(parameter, dtype=saved.dtype)
        return like
    return torch.empty(saved.shape, dtype=saved.dtype)
