"""Where a fresh optimizer's state is loaded to: memory for every state tensor of a checkpoint, with nothing stepped.

A new optimizer holds no state, so its state dict has no places to load into. What is to come is known all the same:
the checkpoint says which parameters have which state, and a state tensor of the parameter's shape lies where the
parameter lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from reshard.checkpoint.checkpoint import Checkpoint
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.errors import KeyMismatchError
from reshard.formats.stored.lazy_tensor import LazyTensor
from reshard.state.deferred_optimizer import place_like
from reshard.state.optimizer_forms import is_flat_key, owner_of
from reshard.state.tree import KeyPath, unflatten
from reshard.state_dict.api import get_model_state_dict, get_optimizer_state_dict
from reshard.state_dict.names import Models

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
        are the live ones. Where the flat form was saved, the flat form: `state.<fqn>.<name>` and
        `param_groups.<fqn>.<field>` of the model's parameters.

    Raises:
        KeyMismatchError: the checkpoint has nothing under `prefix`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    place = tuple(prefix.split(".")) if prefix else ()
    parameters = get_model_state_dict(model)
    leaves: dict[str, dict[KeyPath, Any]] = {}
    found = False
    for key in [*checkpoint, *checkpoint.objects]:
        path = checkpoint.contents.paths.get(key, (key,))
        if path[: len(place)] != place:
            continue
        found = True
        rest = path[len(place) :]
        if len(rest) >= 3 and rest[0] == "state" and rest[1] in parameters:
            saved = checkpoint[key] if key in checkpoint else checkpoint.objects[key]
            leaves.setdefault(rest[1], {})[rest[2:]] = _place(saved, parameters[rest[1]])
        elif rest and is_flat_key(rest[0]):
            return _flat(checkpoint, place, parameters)
    if not found:
        names = sorted({str(checkpoint.contents.paths.get(key, (key,))[0]) for key in checkpoint})[:8]
        raise KeyMismatchError(
            f"{checkpoint.url} has nothing under {prefix!r}; its keys begin with {', '.join(names)}. "
            "Give the key that the optimizer's state dict was saved under as prefix="
        )
    live = get_optimizer_state_dict(model, optimizers)
    state = {fqn: unflatten(values, _containers(checkpoint, (*place, "state", fqn))) for fqn, values in leaves.items()}
    return {"state": state, "param_groups": live.get("param_groups", [])}


def _containers(checkpoint: Checkpoint, above: KeyPath) -> dict[KeyPath, str]:
    """The kinds of the containers below a path, such as LBFGS's lists, by the rest of theirs."""
    known = checkpoint.contents.containers.items()
    return {path[len(above) :]: kind for path, kind in known if path[: len(above)] == above and len(path) > len(above)}


def _flat(checkpoint: Checkpoint, place: tuple[str, ...], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The saved flat form at `place`, of these parameters."""
    saved = checkpoint.nested()
    for part in place:
        saved = saved[part]
    owners = {key: owner_of(key.partition(".")[2], parameters) for key in saved}
    return {key: _place(saved[key], parameters[owner]) for key, owner in owners.items() if owner is not None}


def _place(saved: Any, parameter: Any) -> Any:
    """For a tensor, unfilled memory, placed like its parameter where the shapes are the same; all else as saved, with
    such memory inside containers, too: an optimizer's betas may be two tensors."""
    if isinstance(saved, dict):
        return {key: _place(item, parameter) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_place(item, parameter) for item in saved)
    if not isinstance(saved, LazyTensor):
        return saved
    return place_like(parameter, tuple(saved.shape), saved.dtype)
