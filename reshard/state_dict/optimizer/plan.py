"""What setting optimizer state will do, found out and checked before anything is touched."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch

from reshard.errors import KeyMismatchError
from reshard.state.frameworks.tensor_subclasses import tensor_class
from reshard.state.tensors import global_shape
from reshard.state_dict.names import where
from reshard.state_dict.optimizer.flat_parameters import filled_names, joined_pieces
from reshard.state_dict.optimizer.groups import GroupWrite, plan_groups
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.optimizer.places import Places, places_of
from reshard.state_dict.optimizer.saved import SavedOptimizer, read_saved
from reshard.state_dict.optimizer.schemas import Misfit, StateKind
from reshard.state_dict.options import OptimizerReport, StateDictOptions

__all__ = ["OptimizerWrites", "plan_optimizers"]

State = Mapping[Any, Any]
Entry = tuple[OptimizedParameter, State | None]
_NO_FIELDS: Mapping[str, Any] = {}


class OptimizerWrites(NamedTuple):
    """All that setting optimizer state will do, checked before anything is touched."""

    state: list[Entry]
    """Every parameter of the optimizers; None where it shall have no state."""
    other: list[tuple[int, Any, Any]]
    """(optimizer, key, state) under keys that are no parameter."""
    groups: list[GroupWrite]
    report: OptimizerReport
    places: Places
    """Of which parameters the state is written where it lies."""


def plan_optimizers(
    live: LiveOptimizers, given: Mapping[str, Any], options: StateDictOptions, *, outlines: bool = False
) -> OptimizerWrites:
    """Match `given` with the live parameters; touches nothing. `outlines`: its tensors are on the meta device for now,
    so that only names and shapes can be checked.

    Raises KeyMismatchError for parameters that the dict says nothing about, names that the model does not have and
    state that an optimizer has no use for (all three only if strict), and for state that is incomplete or of a wrong
    shape; NormalizationError for groups that contradict each other.
    """
    saved = read_saved(given, live)
    match = _Match(live, saved)
    places = Places() if outlines else places_of(live, match.state)
    # what has places has their shapes
    others = len(places.rows) < len(match.state)
    shapes = _misshapen(match.state, {id(one) for one, _, _ in places.rows}) if others else []
    faults = [*match.faults, *shapes, *_apart(match.state, live)]
    if faults or (options.strict and (match.missing or match.lost or match.strangers or match.foreign)):
        raise KeyMismatchError(_message(live, match, faults, options.strict))
    groups = [] if outlines else plan_groups(live, saved)
    report = OptimizerReport(
        missing=(*match.missing, *match.lost),
        cold=tuple(match.cold),
        unexpected=tuple(match.unexpected),
        outside=tuple(one.name for one in live.outside),
        foreign=tuple(f"{one.name}.{key}" for one, key in match.foreign),
        filled=tuple(filled_names(match.state)) if live.live.pieces_of else (),
        kept_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.kept),
        added_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.added),
    )
    state = [] if outlines else joined_pieces(match.state) if live.live.pieces_of else match.state
    return OptimizerWrites(state, match.other, groups, report, places)


class _Match:
    """Finds the saved state of each live parameter, and keeps account."""

    def __init__(self, live: LiveOptimizers, saved: SavedOptimizer) -> None:
        self.live = live
        self.saved = saved
        self.state: list[Entry] = []
        self.missing: list[str] = []
        self.lost: list[str] = []
        self.cold: list[str] = []
        self.foreign: list[tuple[OptimizedParameter, Any]] = []
        self.faults: list[str] = []
        for k, own in enumerate(live.parameters):
            kind = StateKind(live.optimizers[k])
            usual: Any = None  # fields, group and keys of one before it that fits, whatever its parameter
            for one in own:
                name = one.names[0]
                values = saved.state.get(name)
                if values is None:
                    values = self._under_another_name(one, kind)
                if values is not None:
                    fields = saved.fields.get(name, _NO_FIELDS)
                    if usual is None or fields is not usual[0] or one.group != usual[1] or list(values) != usual[2]:
                        misfit = kind.check(values, one, fields)
                        usual = (fields, one.group, kind.fitting) if kind.fitting else None
                        values = values if misfit is None else self._useful(one, values, misfit, kind)
                self.state.append((one, values))
        self.other = [
            (k, key, saved.state[key])
            for k, optimizer in enumerate(live.optimizers)
            for key in _other_keys(optimizer)
            if key in saved.state
        ]
        known = {key for _, key, _ in self.other}
        strange = [name for names in (saved.state, saved.fields) for name in names if name not in live.by_name]
        self.unexpected = [name for name in dict.fromkeys(strange) if name not in known]
        self.strangers = [name for name in self.unexpected if name not in live.live.by_name]

    def _under_another_name(self, one: OptimizedParameter, kind: StateKind) -> State | None:
        found = next((name for name in one.names if name in self.saved.state), None)
        if found is not None:
            return self.saved.state[found]
        listed = any(name in self.saved.fields for name in one.names)
        if listed and self._has_lost_state(one, kind):
            self.lost.append(one.name)
        elif one.parameter.requires_grad or listed:
            (self.cold if listed else self.missing).append(one.name)
        return None

    def _has_lost_state(self, one: OptimizedParameter, kind: StateKind) -> bool:
        """Whether a flat dict was made with state of this parameter, and lacks it now."""
        told = self.saved.stateless
        if told is None or not self.saved.state or not (kind.keeps_state and one.parameter.requires_grad):
            return False
        return told.isdisjoint(one.names) and (one.piece is None or one.piece.is_here)

    def _useful(self, one: OptimizedParameter, values: State, misfit: Misfit, kind: StateKind) -> State | None:
        """The state without what the optimizer has no use for."""
        self.faults += [f"{one.name}: its state lacks {key!r}, which {kind.name} needs" for key in misfit.lacking]
        self.foreign += [(one, key) for key in misfit.foreign]
        return {key: value for key, value in values.items() if key not in misfit.foreign} or None


def _other_keys(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keys of its state that are no parameter: some optimizers keep state of the whole there."""
    keys: list[Any] = list(optimizer.state)
    return [key for key in keys if not isinstance(key, torch.Tensor)]


def _misshapen(state: list[Entry], fitting: Container[int]) -> list[str]:
    """State tensors that should have the shape of their parameter and do not; of no parameter whose id is `fitting`.

    No schema says which state has that shape; a name counts as such if most parameters' tensors of that name have it.
    """
    misfits: dict[Any, list[str]] = {}
    for one, values in state:
        if values is None or id(one) in fitting:
            continue
        parameter = one.parameter
        plain = one.piece is None and type(parameter) in (torch.Tensor, torch.nn.Parameter)
        for key, value in values.items():
            if plain and type(value) is torch.Tensor and (not value.dim() or value.is_same_size(parameter)):
                continue  # nearly always
            if not isinstance(value, torch.Tensor):
                continue
            shape = global_shape(value)
            if shape and shape != one.shape:
                misfits.setdefault(key, []).append(
                    f"{one.name}: its {key!r} in optimizer {one.optimizer} has shape {shape}, "
                    f"which fits no layout of the parameter's shape {tuple(one.shape)}"
                )
    fits = {
        key: sum(isinstance(v, torch.Tensor) and global_shape(v) == one.shape for one, v in _entries(state, key))
        for key in misfits
    }
    return [line for key, lines in misfits.items() if fits[key] > len(lines) for line in lines]


def _apart(state: list[Entry], live: LiveOptimizers) -> list[str]:
    """Dicts in the place of tensors of a class, such as the parts of a quantized one, which no step could use."""
    dicts = [
        (one, key)
        for one, values in state
        if values and dict in map(type, values.values())
        for key, value in values.items()
        if type(value) is dict
    ]
    made: dict[tuple[int, Any], str] = {}
    for k, optimizer in enumerate(live.optimizers if dicts else ()):
        for own in optimizer.state.values():
            if isinstance(own, dict):
                made |= {(k, key): name for key, value in own.items() if (name := tensor_class(value))}
    return [
        f"{one.name}: its {key!r} is a dict, where optimizer {one.optimizer} has a {made[one.optimizer, key]}: load "
        "into the state dict of the optimizer as it is, whose tensors are filled in place"
        for one, key in dicts
        if (one.optimizer, key) in made
    ]


def _entries(state: list[Entry], key: Any) -> list[tuple[OptimizedParameter, Any]]:
    return [(one, values[key]) for one, values in state if values and key in values]


def _message(live: LiveOptimizers, match: _Match, faults: list[str], strict: bool) -> str:
    lines = [f"the optimizer state dict does not fit the optimizers{where()}:"]
    if strict:
        lines += [f"  Missing key: {name} (optimizer {live.by_name[name].optimizer})" for name in match.missing]
        told = "an empty dict under 'state.<fqn>' would say that there was none"
        lines += [f"  Missing optimizer state: {name}; {told}" for name in match.lost]
        lines += [f"  Unexpected key: {name}, the model has no parameter of this name" for name in match.strangers]
        for one, key in match.foreign:
            kind = type(live.optimizers[one.optimizer]).__name__
            lines.append(f"  Unexpected key: state {key!r} of {one.name}, for which {kind} has no use")
    lines += [f"  misfit: {fault}" for fault in faults]
    if strict and (match.missing or match.lost or match.strangers or match.foreign):
        lines.append("pass StateDictOptions(strict=False) to set what fits and have the rest reported")
    return "\n".join(lines)
