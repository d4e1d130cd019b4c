"""What this rank makes of a dict that rank 0 broadcasts: the same dict with tensors as this rank's model holds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.state.fsdp1 import FlatPiece
from reshard.state_dict.broadcast import Outline, fill, revive, share_outline, together
from reshard.state_dict.model import plan_model
from reshard.state_dict.names import LiveModel, Region, Slot
from reshard.state_dict.optimizer.live import LiveOptimizers, OptimizedParameter
from reshard.state_dict.optimizer.restore import plan_optimizers
from reshard.state_dict.optimizer.saved import read_saved
from reshard.state_dict.options import StateDictOptions

__all__ = ["receive_model", "receive_optimizer"]


def receive_model(live: LiveModel, given: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The model state dict of rank 0, restricted to what this rank's model has, its tensors sharded as the live ones.

    Where the live tensor has the dtype of the given one it is written directly, and stands in the returned dict
    itself. Collective. Raises, on all ranks and with nothing changed, if the dict does not fit some rank's model.
    """
    outline, sources = share_outline(given)
    prefixes = tuple(item.prefix for item in live.items if isinstance(item, Region))
    mine = {name: value for name, value in outline.items() if name in live.by_name or name.startswith(prefixes)}
    once: dict[Any, str] = {}
    for name in list(mine):
        slot = live.by_name.get(name)
        # one name of a tied tensor is enough, and two would write the same memory
        if slot is not None and slot.value is not None and once.setdefault(slot.identity, name) != name:
            del mine[name]
    together(lambda: plan_model(live, revive(mine, Outline.meta), options, outlines=True), active=True)
    device = next((s.value.device for s in live.slots if s.value is not None and not s.value.is_meta), None)
    in_regions = {slot.name for item in live.items if isinstance(item, Region) for slot in item.slots}
    targets: dict[str, torch.Tensor] = {}

    def target(one: Outline) -> torch.Tensor:
        slot = live.by_name.get(one.path[1:])
        targets[one.path] = _model_target(one, slot, device or torch.device("cpu"), one.path[1:] in in_regions)
        return targets[one.path]

    made: dict[str, Any] = revive(mine, target)
    known = {f"/{name}" for name in outline if name in live.by_name or name.startswith(prefixes)}
    fill(targets, sources, known, options.strict)
    return made


def receive_optimizer(live: LiveOptimizers, given: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The optimizer state dict of rank 0 in nested form, restricted to this rank's parameters, its tensors in new
    memory and sharded as the parameters are where they have their shape. Collective; raises like `receive_model`."""
    outline, sources = share_outline(given)
    saved = read_saved(outline, live) if outline else read_saved({"state": {}, "param_groups": []}, live)
    state = {name: values for name, values in saved.state.items() if name in live.by_name}
    groups: dict[int, dict[str, Any]] = {}
    for name, fields in saved.fields.items():
        if name in live.by_name:
            groups.setdefault(id(fields), {**fields, "params": []})["params"].append(name)
    mine = {"state": state, "param_groups": [*groups.values(), *({**f, "params": []} for f in saved.empty)]}
    together(lambda: plan_optimizers(live, revive(mine, Outline.meta), options, outlines=True), active=True)
    targets: dict[str, torch.Tensor] = {}

    def target(one: Outline, owner: OptimizedParameter | None) -> torch.Tensor:
        targets[one.path] = _optimizer_target(one, owner)
        return targets[one.path]

    made: dict[str, Any] = {
        "state": {
            name: revive(values, functools.partial(target, owner=live.by_name[name])) for name, values in state.items()
        },
        "param_groups": revive(mine["param_groups"], functools.partial(target, owner=None)),
    }
    # of what is left to other optimizers of this model the rank knows at least the name
    known = {path for path in _paths(outline) if _names_any(path, live)}
    fill(targets, sources, known | set(targets), options.strict)
    return made


def _paths(outline: Any) -> list[str]:
    found: list[str] = []
    revive(outline, lambda one: found.append(one.path))
    return found


def _names_any(path: str, live: LiveOptimizers) -> bool:
    """Whether a path of a nested or flat dict is about a parameter of the model, or about a group."""
    parts = path.split("/")
    if parts[1] == "param_groups" or parts[1].startswith("param_groups."):
        return True
    name = parts[2] if parts[1] == "state" else parts[1].removeprefix("state.")
    while name and name not in live.by_name and name not in live.live.by_name:
        name = name.rpartition(".")[0]
    return bool(name)


def _optimizer_target(one: Outline, owner: OptimizedParameter | None) -> torch.Tensor:
    if owner is None or not one.shape:
        return torch.empty(one.shape, dtype=one.dtype)
    device = owner.parameter.device
    if one.shape == owner.shape:
        return _like(owner.parameter, owner.piece, one.dtype, device)
    return torch.empty(one.shape, dtype=one.dtype, device=device)


def _model_target(one: Outline, slot: Slot | None, device: torch.device, in_region: bool) -> torch.Tensor:
    if slot is None or slot.value is None or one.shape != slot.shape:
        return torch.empty(one.shape, dtype=one.dtype, device=device)
    if not slot.value.is_meta and slot.value.dtype == one.dtype and not in_region:
        return slot.tensor()
    return _like(slot.value, slot.piece, one.dtype, device if slot.value.is_meta else slot.value.device)


def _like(model: torch.Tensor, piece: FlatPiece | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """New memory, sharded as `model` or `piece` is."""
    if piece is not None:
        where = piece.local_slice()
        return piece.tensor(torch.empty(where.stop - where.start, dtype=dtype, device=device))
    if isinstance(model, DTensor):
        local = torch.empty(model.to_local().shape, dtype=dtype, device=device)
        return DTensor.from_local(
            local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
        )
    return torch.empty(model.shape, dtype=dtype, device=device)
