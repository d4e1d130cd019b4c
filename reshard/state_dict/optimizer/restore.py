"""Putting optimizer state back: what was planned is written, whatever the optimizer holds at the moment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from reshard.state.frameworks.tensor_classes import is_dtensor, is_sharded
from reshard.state.frameworks.torch_internals import copy_all, has_torchs_setstate, loads_itself
from reshard.state.tensors import global_shape, identity_of
from reshard.state_dict.memory import all_apart, apart, overlapping
from reshard.state_dict.names import LiveModel
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.optimizer.places import Places, all_plain
from reshard.state_dict.optimizer.plan import OptimizerWrites
from reshard.state_dict.optimizer.ties import GivenTies, ModelTensor, tensors_in
from reshard.state_dict.options import OptimizerReport
from reshard.state_dict.values import like, same_value, write_all

__all__ = ["apply_optimizers"]

Fields = Mapping[str, Any]


def apply_optimizers(
    live: LiveOptimizers, writes: OptimizerWrites, model_state: Mapping[str, Any] | None = None
) -> OptimizerReport:
    """Do what was planned. State keeps the dtype that it was saved with, and what shared memory when it was given does
    so again, with the model's tensors too, unless the optimizer already has places of their own for it.

    Args:
        model_state: what the model was set to in the same call, so that state that is tied to it can be told.
    """
    groups: list[list[Mapping[str, Any]]] = [[] for _ in live.optimizers]
    for group_write in writes.groups:
        groups[group_write.optimizer].append(group_write.fields)
    special = [loads_itself(optimizer) for optimizer in live.optimizers]
    # an optimizer that loads itself is given a dict of its own, the state of the others is written directly
    given: list[dict[Any, Any]] = [{} for _ in live.optimizers]
    merged = [
        [{**group, **fields} for group, fields in zip(optimizer.param_groups, own)]
        for optimizer, own in zip(live.optimizers, groups)
    ]
    places = Places() if _moves_a_step(writes.places, merged) else writes.places
    copies = _Copies(places)
    incomplete = len(places.rows) < len(writes.state)
    kept = {id(one) for one, _, _ in places.rows} if incomplete else set()
    for one, values in writes.state if incomplete else ():
        k = one.optimizer
        if id(one) in kept:
            continue
        if not special[k]:
            copies.add(live.optimizers[k].state, one, values, merged[k][one.group])
        elif values is not None:
            given[k][one.id] = copies.made(one, values)
    others = [(k, key, copy.deepcopy(values)) for k, key, values in writes.other]
    copies.finish(live.live, model_state or {})
    for k, key, values in others:
        (given[k] if special[k] else live.optimizers[k].state)[key] = values
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
        # where optimizer classes bring old state to their present form, as on every load; torch's own have nothing to
        # do there with state that kept its form
        if incomplete or not has_torchs_setstate(optimizer):
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return replace(writes.report, untied=(*copies.untied, *copies.ties.lost(live, writes)))


def _moves_a_step(places: Places, fields: list[list[dict[str, Any]]]) -> bool:
    """Whether a step that is held has to go to its parameter's device."""
    moving = [[_keeps_step_on_device(group) for group in own] for own in fields]
    return any(map(any, moving)) and any(
        moving[one.optimizer][one.group] and "step" in held and held["step"].device != one.parameter.device
        for one, held, _ in places.rows
    )


def _keeps_step_on_device(fields: Fields) -> bool:
    return bool(fields.get("fused") or fields.get("capturable"))


def _model_tensors(live: LiveModel, given: Mapping[str, Any]) -> list[ModelTensor]:
    """The model's tensors that state may be tied to, with what they were set to."""
    slots = [slot for slot in live.by_name.values() if slot.value is not None and slot.piece is None]
    return [ModelTensor(slot.name, slot.value, given.get(slot.name)) for slot in slots]


class _Copies:
    """Writes the state of parameters: first all that has no place yet is made, then the places there are are filled;
    what can simply be copied is copied in one call."""

    def __init__(self, places: Places) -> None:
        self.targets: list[Any] = list(places.targets)
        """What the optimizers hold now and keep, to be written into."""
        self.values: list[Any] = list(places.values)
        self.later: list[tuple[OptimizedParameter, dict[Any, Any], Any, Any, Any, Fields]] = []
        """Each further entry: whose it is, its dict, key, value, what it holds now, and the fields of its group."""
        self.untied: list[str] = []
        self.ties = GivenTies([], [])
        self._places = places
        self._found: list[tuple[OptimizedParameter, dict[Any, Any], Any]] = []
        """Of each target that was found for an entry of `later`: whose it is, its dict and its key."""
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, state: Any, one: OptimizedParameter, values: Mapping[Any, Any] | None, fields: Fields) -> None:
        """Give the parameter the state `values`, or none; `fields` are those of its group."""
        if values is None:
            state.pop(one.parameter, None)
            return
        old = state.get(one.parameter) or {}
        # a dict of the same keys is written in place
        new = old if old.keys() == values.keys() else dict.fromkeys(values)
        self.later += [(one, new, key, value, old.get(key), fields) for key, value in values.items()]
        state[one.parameter] = new

    def made(self, one: OptimizedParameter, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """A dict that will have `values` made anew, once all is known."""
        new: dict[Any, Any] = dict.fromkeys(values)
        self.later += [(one, new, key, value, None, {}) for key, value in values.items()]
        return new

    def finish(self, live: LiveModel, model_state: Mapping[str, Any]) -> None:
        """Make and write everything."""
        given = [tensor for entry in self.later for tensor in tensors_in(entry[3])]
        held = [tensor for entry in self.later for tensor in tensors_in(entry[4])]
        set_to = {id(value): value for value in model_state.values() if isinstance(value, torch.Tensor)}
        others = [*given, *held, *set_to.values(), *live.tensors()]
        shares_nothing = all_apart(others, self._places.spans)  # nearly always
        model = [] if shares_nothing else _model_tensors(live, model_state)
        if not shares_nothing:
            self.ties = GivenTies([*self.values, *given], model)
        for one, holder, key, value, old, fields in self.later:
            holder[key] = self._restored(value, old, one, holder, key, fields)
        if not shares_nothing:
            self._give_apart([each.live for each in model])
            self.values = apart(self.targets, self.values)
        if not self.later:
            copy_all(self.targets, self.values)
            return
        pairs = list(zip(self.targets, self.values))
        plain = list(filter(all_plain, pairs))
        copy_all([target for target, _ in plain], [value for _, value in plain])
        write_all((value, target) for target, value in itertools.filterfalse(all_plain, pairs))

    def _give_apart(self, model: list[torch.Tensor]) -> None:
        """Memory of their own for values that would be written where another value, or the model's, is to be."""
        moved: set[int] = set()
        pool = [*self.targets, *model]
        places = [(one, old, key) for one, old, values in self._places.rows for key in values] + self._found
        for cluster in overlapping(pool):
            known = [(pool[i], pool[i].detach()) for i in cluster if i >= len(self.targets)]
            for i in (i for i in cluster if i < len(self.targets)):
                target, value = self.targets[i], self.values[i]
                where = identity_of(target)
                if all(identity_of(memory) == where and same_value(value, other) for memory, other in known):
                    known.append((target, value))
                    continue
                one, holder, key = places[i]
                holder[key] = like(value, target) if is_sharded(value) else value.detach().clone()
                moved.add(i)
                self.untied.append(f"{one.name}.{key}")
        kept = [i for i in range(len(self.targets)) if i not in moved] if moved else None
        if kept is not None:
            self.targets, self.values = [self.targets[i] for i in kept], [self.values[i] for i in kept]

    def _restored(
        self, value: Any, old: Any, one: OptimizedParameter, holder: dict[Any, Any], key: Any, fields: Mapping[str, Any]
    ) -> Any:
        """One entry of a parameter's state, made anew or, where `old` has its very form, `old`, to be written into."""
        parameter = one.parameter
        if isinstance(value, torch.Tensor):
            on_device = key == "step" and _keeps_step_on_device(fields)
            if (
                type(old) is type(value)
                and old.dtype == value.dtype
                and old.shape == value.shape
                and (not on_device or old.device == parameter.device)
            ):
                self.targets.append(old)
                self.values.append(value)
                self._found.append((one, holder, key))
                return old
            lies = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else parameter.device
            same = (self.ties.same(value), key == "step", on_device, parameter.dim() > 0, lies)
            if same not in self._made:
                tied = self.ties.model_tensor(value)
                self._made[same] = tied if tied is not None else _made_anew(value, parameter, key, on_device)
            return self._made[same]
        if isinstance(value, dict):
            known = old if isinstance(old, dict) else {}
            out: dict[Any, Any] = {}
            for k, item in value.items():
                out[k] = self._restored(item, known.get(k), one, out, k, fields)
            return out
        if type(value) is list or type(value) is tuple:
            return type(value)(self._restored(item, None, one, {}, None, fields) for item in value)
        return value if isinstance(value, (bool, int, float, str, type(None))) else copy.deepcopy(value)


def _made_anew(value: torch.Tensor, parameter: torch.Tensor, key: Any, on_device: bool) -> torch.Tensor:
    if on_device:
        return value.detach().to(parameter.device, torch.float32, copy=True)
    if not global_shape(value) and (key == "step" or parameter.dim() > 0):
        return value.detach().clone()
    return like(value, parameter)


def _own_dict(live: LiveOptimizers, k: int, state: dict[Any, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the optimizer's own `load_state_dict` takes: integer ids, in the order of its groups."""
    optimizer, packed, ids = live.optimizers[k], [], itertools.count()
    for group, fields in zip(optimizer.param_groups, groups):
        kept = {field: value for field, value in group.items() if field != "params"}
        packed.append({**kept, **fields, "params": [next(ids) for _ in group["params"]]})
    return {"state": state, "param_groups": packed}
