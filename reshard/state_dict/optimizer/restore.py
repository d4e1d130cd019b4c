"""Putting optimizer state back: what was planned is written, whatever the optimizer holds at the moment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.state.frameworks.torch_internals import copy_all, loads_itself
from reshard.state.tensors import global_shape, identity_of
from reshard.state_dict.optimizer.parameters import LiveOptimizers
from reshard.state_dict.optimizer.plan import OptimizerWrites
from reshard.state_dict.options import OptimizerReport
from reshard.state_dict.values import like, write

__all__ = ["apply_optimizers"]


def apply_optimizers(live: LiveOptimizers, writes: OptimizerWrites) -> OptimizerReport:
    """Do what was planned. State keeps the dtype that it was saved with."""
    groups: list[list[Mapping[str, Any]]] = [[] for _ in live.optimizers]
    for group_write in writes.groups:
        groups[group_write.optimizer].append(group_write.fields)
    special = [loads_itself(optimizer) for optimizer in live.optimizers]
    # an optimizer that loads itself is given a dict of its own, the state of the others is written directly
    given: list[dict[Any, Any]] = [{} for _ in live.optimizers]
    copies = _Copies()
    merged = [
        [{**group, **fields} for group, fields in zip(optimizer.param_groups, own)]
        for optimizer, own in zip(live.optimizers, groups)
    ]
    states = [optimizer.state for optimizer in live.optimizers]
    on_device = [[bool(fields.get("fused") or fields.get("capturable")) for fields in own] for own in merged]
    for one, values in writes.state:
        k = one.optimizer
        if not special[k]:
            copies.add(states[k], one.parameter, values, merged[k][one.group], on_device[k][one.group])
        elif values is not None:
            items = values.items()
            given[k][one.id] = {key: copies.restored(value, None, one.parameter, key, {}) for key, value in items}
    copy_all(copies.targets, copies.values)
    for k, key, values in writes.other:
        (given[k] if special[k] else live.optimizers[k].state)[key] = copy.deepcopy(values)
    for k, optimizer in enumerate(live.optimizers):
        if special[k]:
            optimizer.load_state_dict(_own_dict(live, k, given[k], groups[k]))
            continue
        for group, fields in zip(optimizer.param_groups, groups[k]):
            for field, value in fields.items():
                if isinstance(group.get(field), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[field].copy_(value)
                else:
                    group[field] = value
        # where optimizer classes bring old state to their present form, as on every load
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return writes.report


class _Copies:
    """Writes the state of parameters; what can simply be copied is gathered up, to be copied in one call.

    A tensor that is given for several entries is made once for those that it lies alike in; one that is the memory of
    the parameter itself, such as a master copy of the same dtype, stays that.
    """

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(
        self, state: Any, parameter: torch.Tensor, values: Mapping[Any, Any] | None, fields: Any, moves_step: bool
    ) -> None:
        """Give `parameter` the state `values`, or none; `fields` are those of its group, and `moves_step` is whether
        they keep the step on the parameter's device."""
        if values is None:
            state.pop(parameter, None)
            return
        old = state.get(parameter)
        # a dict of the same keys is written in place
        new = old if old is not None and old.keys() == values.keys() else {}
        old = old or {}
        targets, sources, live_value = self.targets, self.values, old.get
        for key, value in values.items():
            live = live_value(key)
            # by far the most common case, and there are many of them
            if (
                type(value) is type(live) is torch.Tensor
                and value.dtype is live.dtype
                and value.is_same_size(live)
                and not (moves_step and key == "step")
            ):
                targets.append(live)
                sources.append(value)
                if new is not old:
                    new[key] = live
            else:
                new[key] = self.restored(value, live, parameter, key, fields)
        if new is not old:
            state[parameter] = new

    def restored(self, value: Any, old: Any, parameter: torch.Tensor, key: Any, fields: Mapping[str, Any]) -> Any:
        """One entry of a parameter's state, made anew or, where `old` has its very form, written into `old`."""
        if isinstance(value, torch.Tensor):
            on_device = bool(key == "step" and (fields.get("fused") or fields.get("capturable")))
            if (
                type(old) is type(value)
                and old.dtype == value.dtype
                and old.shape == value.shape
                and (not on_device or old.device == parameter.device)
            ):
                write(value, old)
                return old
            lies = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else parameter.device
            same = (id(value), key == "step", on_device, parameter.dim() > 0, lies)
            if same not in self._made:
                self._made[same] = _made_anew(value, parameter, key, on_device)
            return self._made[same]
        if isinstance(value, dict):
            known = old if isinstance(old, dict) else {}
            return {k: self.restored(item, known.get(k), parameter, k, fields) for k, item in value.items()}
        if type(value) is list or type(value) is tuple:
            return type(value)(self.restored(item, None, parameter, None, fields) for item in value)
        return value if isinstance(value, (bool, int, float, str, type(None))) else copy.deepcopy(value)


def _made_anew(value: torch.Tensor, parameter: torch.Tensor, key: Any, on_device: bool) -> torch.Tensor:
    if on_device:
        return value.detach().to(parameter.device, torch.float32, copy=True)
    shape = global_shape(value)
    if shape == global_shape(parameter) and (memory := identity_of(value)) and memory == identity_of(parameter):
        return parameter.detach()
    if not shape and (key == "step" or parameter.dim() > 0):
        return value.detach().clone()
    return like(value, parameter)


def _own_dict(live: LiveOptimizers, k: int, state: dict[Any, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the optimizer's own `load_state_dict` takes: integer ids, in the order of its groups."""
    optimizer, packed, ids = live.optimizers[k], [], itertools.count()
    for group, fields in zip(optimizer.param_groups, groups):
        kept = {field: value for field, value in group.items() if field != "params"}
        packed.append({**kept, **fields, "params": [next(ids) for _ in group["params"]]})
    return {"state": state, "param_groups": packed}
