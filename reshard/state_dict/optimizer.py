"""Reads, plans, checks, and sets optimizer state under canonical names."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from planners.geometry.arrays import grouped
from planners.units import format_some
from reshard.errors import KeyMismatchError, NormalizationError, format_names
from reshard.live.deepspeed import HOW_TO_SAVE
from reshard.live.dtypes import any_lacks_memory
from reshard.live.fsdp1 import split_state
from reshard.live.optimizer_state import SCALARS, PartialState, is_nested, listed_in, settings_of
from reshard.live.state import same_value
from reshard.live.tensor_classes import is_imported, registered_classes
from reshard.live.tensors import dtype_of, global_shape, identity_of, inner_names, is_dtensor, is_sharded, tensor_class
from reshard.live.tree import copy_containers, leaves_of, map_leaves
from reshard.live.wrappers import has_torchs_setstate
from reshard.state_dict import saved_optimizer
from reshard.state_dict.live_model import LiveModel, where
from reshard.state_dict.model import (
    Spans,
    all_apart,
    apart,
    is_expanded,
    is_shard_like,
    like,
    listed,
    overlapping,
    spans_of,
    tensors_in,
    write_all,
)
from reshard.state_dict.optimizer_parameters import (
    LiveOptimizers,
    OptimizedParameter,
    filled_names,
    joined_pieces,
    without_memory,
)
from reshard.state_dict.options import OptimizerReport, StateDictOptions
from reshard.state_dict.saved_optimizer import (
    GroupWrite,
    Misfit,
    SavedOptimizer,
    StateKind,
    misshapen,
    plan_groups,
    read_saved,
)


def read_optimizers(live: LiveOptimizers) -> dict[str, Any]:
    """Return `{"state": {name: {state name: value}}, "param_groups": [{field: value, "params":
    [names]}]}`, with the groups of all optimizers in order. Parameters without state are in a
    group, but not in `state`.

    The containers are new, and the tensors are the live ones. If several group fields share a
    tensor, such as a learning rate tensor, only the first field has it, because a load may have
    different values for them.
    """
    met: set[int] = set()

    def once(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in met:
            met.add(id(leaf))
            return leaf
        return leaf.detach().clone()

    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for k, optimizer in enumerate(live.optimizers):
        saved = saved_optimizer.saved_by(optimizer)
        if not is_nested(saved):
            cls, found = type(optimizer), format_some([*map(repr, saved)])
            raise NormalizationError(
                f"the state dict of optimizer {k} ({cls.__module__}.{cls.__qualname__}){where()} has {found} instead "
                "of 'state' and 'param_groups'. Pass the inner optimizer, if it holds the model's own parameters. If "
                "the keys of its state are names, as torchrec's, save and load its own state dict. "
                f"For DeepSpeed's optimizers, {HOW_TO_SAVE}"
            )
        # ids are positions, unless several parameters share an id
        plain = {} if live.live.pieces_of else {one.id: one.names[0] for one in live.parameters[k]}
        keys = listed_in(saved["param_groups"])
        named = {key: _names(key, live, k) for key in keys if type(key) is not int or key not in plain}
        for key, values in saved["state"].items():
            known = plain.get(key) if type(key) is int else None
            if known is not None and known not in state:
                if values:
                    state[known] = copy_containers(values)
            elif values:
                for i, (name, one) in enumerate(named.get(key) or _names(key, live, k)):
                    if name in state:
                        raise NormalizationError(f"two optimizers have state under the key {name!r}{where()}")
                    if one is not None and one.piece is not None:
                        if one.piece.is_idle:
                            continue
                        state[name] = split_state(one.piece, one.parameter, values, copy=i > 0)
                    else:
                        state[name] = copy_containers(values)
        extra = {saved_optimizer.EXTRA: beside} if (beside := saved_optimizer.extra_of(saved)) else {}
        for group in saved["param_groups"]:
            fields = map_leaves(once, settings_of({**group, **extra}))
            names = _listed(group["params"], plain, named)
            if "param_names" in group:  # torch's load of DCP checkpoints needs the names
                fields["param_names"] = [*names]
            groups.append({**fields, "params": names})
    return {"state": state, "param_groups": groups}


def initial_state(live: LiveOptimizers) -> dict[str, Any]:
    """Return the initial state, by name, of optimizers without state. Does not change the optimizers."""
    out: dict[str, Any] = {}
    for k, optimizer in enumerate(live.optimizers):
        kind = StateKind(optimizer)
        for one in () if optimizer.state else live.parameters[k]:
            if values := kind.initial(one):
                out[one.name] = (
                    values if one.piece is None else split_state(one.piece, one.parameter, values, copy=True)
                )
    return out


def _listed(
    keys: list[Any], plain: Mapping[int, str], named: Mapping[Any, list[tuple[Any, OptimizedParameter | None]]]
) -> list[Any]:
    if not named:
        return [plain[key] for key in keys]
    return [name for key in keys for name in ([plain[key]] if key not in named else [one for one, _ in named[key]])]


def _names(key: Any, live: LiveOptimizers, k: int) -> list[tuple[Any, OptimizedParameter | None]]:
    """Return the canonical names for a key of an optimizer's own state dict. Keys that are not
    parameters stay unchanged."""
    if isinstance(key, int) and not isinstance(key, bool):
        ones = live.by_id[k].get(key)
        if ones is None:
            raise NormalizationError(
                f"optimizer {k} has state under the id {key}{where()}, but only {len(live.by_id[k])} parameters"
            )
        return [(one.name, one) for one in ones]
    # optimizers that write names may use those of the wrapped modules
    name = live.live.by_live.get(key, key) if isinstance(key, str) and key not in live.by_name else key
    return [(name, None)]


# What setting optimizer state will do, found out and checked before anything is touched.


State = Mapping[Any, Any]
Entry = tuple[OptimizedParameter, State | None]
_Unused = tuple[OptimizedParameter, Any]
_NO_FIELDS: Mapping[str, Any] = {}


class OptimizerWrites(NamedTuple):
    """Everything that a call will write to optimizers, checked before anything is touched."""

    state: list[Entry]
    """New state of every parameter of the optimizers. None removes it."""
    other: list[tuple[int, Any, Any]]
    """(optimizer, key, state) under keys that are not parameters."""
    groups: list[GroupWrite]
    report: OptimizerReport
    places: Places
    """Parameters whose state is overwritten in place."""
    is_placed: bool
    """True if tensors keep their placements, because a load has chosen them."""


def plan_optimizers(
    live: LiveOptimizers, given: Mapping[str, Any], options: StateDictOptions, *, outlines: bool = False
) -> OptimizerWrites:
    """Match `given` with the live parameters. Changes nothing.

    Raises KeyMismatchError for incomplete or misshapen state and, if strict, also for missing
    parameters, unknown names, and unused state. Raises NormalizationError for contradictory groups
    and, if strict, also for groups of another kind of optimizer.
    """
    saved = saved_optimizer.with_state_of_others(read_saved(given, live), given, live)
    match = _OptimizerMatch(live, saved)
    state = match.state
    places = Places() if outlines else places_of(live, state)
    faults = match.faults
    if len(places.rows) < len(state):  # entries in `places` have the right classes and shapes
        fitting = {id(one) for one, _, _ in places.rows}
        faults = [*faults, *misshapen(state, fitting, live), *without_memory(state), *_apart(state, live)]
    if faults or any(match.refused(options)):
        raise KeyMismatchError(_message(live, match, faults, options))
    groups = [] if outlines else plan_groups(live, saved, strict=options.strict)
    report = OptimizerReport(
        missing=(*match.missing, *match.lost),
        without_state=tuple(match.without_state),
        unexpected=tuple(match.unexpected),
        outside=tuple(one.name for one in live.outside),
        unused=tuple(f"{one.name}.{key}" for one, key in match.unused),
        filled=tuple(filled_names(state)) if live.live.pieces_of else (),
        kept_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.kept),
        added_fields=tuple(f"{w.optimizer}.{w.group}.{field}" for w in groups for field in w.added),
    )
    state = [] if outlines else joined_pieces(state) if live.live.pieces_of else state
    is_placed = any(one.is_placed for one in (given, given.get("state")) if isinstance(one, PartialState))
    return OptimizerWrites(state, match.other, groups, report, places, is_placed)


def check_kind(live: LiveOptimizers, saved: SavedOptimizer, options: StateDictOptions) -> None:
    """Raise KeyMismatchError if the state lacks what an optimizer needs."""
    match = _OptimizerMatch(live, saved)
    if match.faults:
        raise KeyMismatchError(_message(live, match, match.faults, options))


class _OptimizerMatch:
    """Finds the saved state of each live parameter, and records mismatches."""

    def __init__(self, live: LiveOptimizers, saved: SavedOptimizer) -> None:
        self.live = live
        self.saved = saved
        self.state: list[Entry] = []
        self.missing: list[str] = []
        self.lost: list[str] = []
        self.without_state: list[str] = []
        self.unused: list[_Unused] = []
        self.faults: list[str] = []
        for k, own in enumerate(live.parameters):
            kind = StateKind(live.optimizers[k])
            usual: Any = None  # fields, group and keys of one before it that fits, whatever its parameter
            for one in own:
                name = one.names[0]
                values = saved.state.get(name)
                if values is None:
                    values = self._under_another_name(one, kind)
                if values is not None and not issubclass(type(values), Mapping):
                    self.faults.append(f"{name}: its state is a {type(values).__name__}, expected a dict")
                    values = None
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
            for key in (_other_keys(optimizer) or _new_keys(live, saved))
            if key in saved.state
        ]
        known = {key for _, key, _ in self.other}
        unread = [
            saved_optimizer.EXTRA
            for loads_itself, own in zip(live.loads_itself, live.parameters)
            if own and saved_optimizer.EXTRA in saved.fields.get(own[0].name, _NO_FIELDS) and not loads_itself
        ]
        strange = [name for names in (saved.state, saved.fields) for name in names if name not in live.by_name]
        self.unexpected = [name for name in dict.fromkeys(strange) if name not in known]
        self.strangers = [name for name in self.unexpected if not live.optimizers or name not in live.live.by_name]
        self.unexpected += unread[:1]

    def refused(self, options: StateDictOptions) -> tuple[list[str], list[str], list[str], list[_Unused]]:
        """Return missing, lost, unknown, and unused names that are errors under these options."""
        missing, lost = (
            [n for n in names if options._refuses(n, is_missing=True)] for names in (self.missing, self.lost)
        )
        refuses = functools.partial(options._refuses, is_missing=False)
        strangers = [name for name in self.strangers if refuses(name)]
        unused = [(one, key) for one, key in self.unused if refuses(f"{one.name}.{key}")]
        return missing, lost, strangers, unused

    def _under_another_name(self, one: OptimizedParameter, kind: StateKind) -> State | None:
        found = next((name for name in one.names if name in self.saved.state), None)
        if found is not None:
            return self.saved.state[found]
        listed = any(name in self.saved.fields for name in one.names)
        if listed and self._has_lost_state(one, kind):
            self.lost.append(one.name)
        elif one.parameter.requires_grad or listed:
            (self.without_state if listed else self.missing).append(one.name)
        return None

    def _has_lost_state(self, one: OptimizedParameter, kind: StateKind) -> bool:
        """Return True if a flat dict was saved with state of this parameter, but lacks it now."""
        told = self.saved.stateless
        if told is None or not self.saved.state or not (kind.keeps_state and one.parameter.requires_grad):
            return False
        return told.isdisjoint(one.names) and (one.piece is None or one.piece.is_here)

    def _useful(self, one: OptimizedParameter, values: State, misfit: Misfit, kind: StateKind) -> State | None:
        """Return the state without keys that the optimizer does not use."""
        self.faults += [f"{one.name}: its state lacks {key!r}, which {kind.name} needs" for key in misfit.lacking]
        self.unused += [(one, key) for key in misfit.unused]
        return {key: value for key, value in values.items() if key not in misfit.unused} or None


def _other_keys(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the keys of the optimizer's state that are not parameters. Some optimizers keep shared
    state there."""
    keys: list[Any] = list(optimizer.state)
    return [key for key in keys if not isinstance(key, torch.Tensor)]


def _new_keys(live: LiveOptimizers, saved: SavedOptimizer) -> list[Any]:
    """Return such keys for an optimizer without state: those that no saved group lists."""
    if not live.may_have_own:
        return []
    known = (saved.fields, live.by_name, live.live.by_name)
    return [key for key in saved.state if not any(key in names for names in known)]


def _apart(state: list[Entry], live: LiveOptimizers) -> list[str]:
    """Return names of unusable state: dicts instead of tensors of a class, such as the parts of a
    quantized tensor, and quantized tensors for one of torch's own optimizers."""
    dicts = [(one, *item) for one, values in state for item in (values or {}).items() if type(item[1]) is dict]
    made: dict[tuple[int, Any], str] = {}
    for k, optimizer in enumerate(live.optimizers if dicts else ()):
        for own in optimizer.state.values():
            if isinstance(own, dict):
                made |= {(k, key): name for key, value in own.items() if (name := tensor_class(value))}
    known = [(of.parts.keys(), name) for name, of in registered_classes.items() if of.make and is_imported(name)]
    for one, key, value in dicts:
        if not live.optimizers[one.optimizer].state:
            made.update(((one.optimizer, key), name) for parts, name in known if parts <= value.keys())
    is_torchs = [type(optimizer).__module__.startswith("torch.optim.") for optimizer in live.optimizers]
    quantized = [
        (one, key, value)
        for one, values in state
        if values and is_torchs[one.optimizer]
        for key, value in values.items()
        if type(value) is not torch.Tensor and isinstance(value, torch.Tensor) and inner_names(value)
    ]
    return [
        f"{one.name}: its {key!r} is a {tensor_class(value)}, and {type(live.optimizers[one.optimizer]).__name__} "
        "keeps plain tensors: set reshard.dequantized(state)"
        for one, key, value in quantized
    ] + [
        f"{one.name}: its {key!r} is a dict, where optimizer {one.optimizer} has a {made[one.optimizer, key]}: step "
        "the optimizer if it has no state, then load into its own state dict, whose tensors are filled in place"
        for one, key, _ in dicts
        if (one.optimizer, key) in made
    ]


def _message(live: LiveOptimizers, match: _OptimizerMatch, faults: list[str], options: StateDictOptions) -> str:
    lines = [f"the optimizer state dict does not fit the optimizers{where()}:"]
    missing, lost, strangers, not_used = match.refused(options)
    lines += listed("Missing key", [f"{name} (optimizer {live.by_name[name].optimizer})" for name in missing])
    told = "an empty dict under 'state.<fqn>' means that it has none"
    lines += listed("Missing optimizer state", [f"{name}; {told}" for name in lost])
    why = "the model has no parameter of this name" if live.optimizers else "no optimizer was passed"
    odd = [f"{name}, {why}" for name in strangers]
    kinds = [type(optimizer).__name__ for optimizer in live.optimizers]
    unused = grouped(((key, kinds[one.optimizer]), one.name) for one, key in not_used)
    odd += [f"state {key!r} of {format_names(of)}, which {kind} does not use" for (key, kind), of in unused.items()]
    lines += listed("Unexpected key", odd)
    lines += listed("Mismatched", faults)
    if match.strangers and live.optimizers and not match.saved.fields.keys() & live.by_name.keys():
        lines.append(
            "no group of the dict lists a parameter of these optimizers: groups of pipeline stages have one key, under "
            "which one stage's were saved. Save with StateDictOptions(flatten_optimizer_state_dict=True)"
        )
    if (missing or lost or strangers or not_used) and not faults:
        allowed = options._lenient(is_missing=bool(missing or lost))
        lines.append(f"  fix: pass {allowed} to set only the entries that match and report the rest")
    return "\n".join(lines)


# Putting optimizer state back: what was planned is written, whatever the optimizer holds at the
# moment.


Fields = Mapping[str, Any]


def apply_optimizers(
    live: LiveOptimizers, writes: OptimizerWrites, model_state: Mapping[str, Any] | None
) -> OptimizerReport:
    """Execute the planned writes.

    Args:
        model_state: the values that the model was set to in the same call, to recognize state that
            is tied to them.
    """
    groups: list[list[Mapping[str, Any]]] = [[] for _ in live.optimizers]
    for group_write in writes.groups:
        groups[group_write.optimizer].append(group_write.fields)
    special = live.loads_itself
    # an optimizer that loads itself is given a dict of its own, the state of the others is written directly
    given: list[dict[Any, Any]] = [{} for _ in live.optimizers]
    own = [saved_optimizer.saved_by(one).get("state", {}) if k else {} for one, k in zip(live.optimizers, special)]
    merged = [
        [{**group, **fields} for group, fields in zip(optimizer.param_groups, own)]
        for optimizer, own in zip(live.optimizers, groups)
    ]
    places = Places() if _moves_a_step(writes.places, merged) else writes.places
    copies = _Copies(places, writes.is_placed)
    incomplete = len(places.rows) < len(writes.state)
    kept = {id(one) for one, _, _ in places.rows} if incomplete else set()
    for one, values in writes.state if incomplete else ():
        k = one.optimizer
        if id(one) in kept:
            continue
        if not special[k]:
            copies.add(live.optimizers[k].state, one, values, merged[k][one.group])
        elif values is not None:
            given[k][one.id] = copies.made(one, values, own[k].get(one.id, {}))
    others = [(k, key, copy.deepcopy(values)) for k, key, values in writes.other]
    copies.finish(live.live, model_state or {})
    for k, key, values in others:
        (given[k] if special[k] else live.optimizers[k].state)[key] = values
    parting = saved_optimizer.tensors_that_part(live, groups)
    for k, optimizer in enumerate(live.optimizers):
        if special[k]:
            optimizer.load_state_dict(_own_dict(live, k, given[k], groups[k]))
            continue
        for group, fields in zip(optimizer.param_groups, groups[k]):
            for field, value in fields.items():
                if field == saved_optimizer.EXTRA:  # this optimizer does not read it
                    continue
                known = group.get(field)
                if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and id(known) not in parting:
                    known.copy_(value)
                else:
                    group[field] = value
        # where optimizer classes bring old state to their present form, as on every load; torch's own have nothing to
        # do there with state that kept its form
        if incomplete or not has_torchs_setstate(optimizer):
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return replace(writes.report, untied=(*copies.untied, *copies.ties.lost(live, writes)))


def _moves_a_step(places: Places, fields: list[list[dict[str, Any]]]) -> bool:
    """Return True if the optimizer's step must move to its parameter's device."""
    moving = [[_keeps_step_on_device(group) for group in own] for own in fields]
    return any(map(any, moving)) and any(
        moving[one.optimizer][one.group] and "step" in held and held["step"].device != one.parameter.device
        for one, held, _ in places.rows
    )


def _keeps_step_on_device(fields: Fields) -> bool:
    return bool(fields.get("fused") or fields.get("capturable"))


class _Copies:
    """Writes the state of parameters: creates missing tensors first, then fills all of them, in few
    calls where possible."""

    def __init__(self, places: Places, is_placed: bool) -> None:
        self._is_placed = is_placed
        self._placed: set[int] = set()
        """Ids of parameters whose given state keeps its placement."""
        self.targets: list[Any] = list(places.targets)
        """The optimizers' current tensors, which are kept and written into."""
        self.values: list[Any] = list(places.values)
        self.later: list[tuple[OptimizedParameter, dict[Any, Any], Any, Any, Any, Fields | None]] = []
        """Each further entry: its parameter, dict, key, value, current value (None if that may not
        be written into), and the fields of its group."""
        self.untied: list[str] = []
        self.ties = GivenTies([], [])
        self._places = places
        self._found: list[tuple[OptimizedParameter, dict[Any, Any], Any]] = []
        """For each target of an entry in `later`: its parameter, dict, and key."""
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, state: Any, one: OptimizedParameter, values: Mapping[Any, Any] | None, fields: Fields) -> None:
        """Set the parameter's state to `values`, or remove it. `fields` are those of its group."""
        if values is None:
            state.pop(one.parameter, None)
            return
        self._note_placed(one, values)
        old = state.get(one.parameter) or {}
        # a dict of the same keys is written in place
        new = old if old.keys() == values.keys() else dict.fromkeys(values)
        self.later += [(one, new, key, value, old.get(key), fields) for key, value in values.items()]
        state[one.parameter] = new

    def made(self, one: OptimizedParameter, values: Mapping[Any, Any], held: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a dict that `finish` fills with new `values`, sharded like those in `held`."""
        self._note_placed(one, values)
        new: dict[Any, Any] = dict.fromkeys(values)
        self.later += [(one, new, key, value, held.get(key), None) for key, value in values.items()]
        return new

    def _note_placed(self, one: OptimizedParameter, values: Mapping[Any, Any]) -> None:
        """If some state was given as shards of the parameter, keep the rest of it as given."""
        if self._is_placed or any(is_shard_like(value, one.parameter) for value in leaves_of(values).values()):
            self._placed.add(id(one.parameter))

    def finish(self, live: LiveModel, model_state: Mapping[str, Any]) -> None:
        """Create and write everything."""
        given = [tensor for entry in self.later for tensor in tensors_in(entry[3])]
        held = [tensor for entry in self.later for tensor in tensors_in(entry[4])]
        set_to = {id(value): value for value in model_state.values() if isinstance(value, torch.Tensor)}
        others = [*given, *held, *set_to.values(), *live.tensors()]
        shares_nothing = all_apart(others, self._places.spans)  # nearly always
        if not shares_nothing:
            slots = [slot for slot in live.by_name.values() if slot.value is not None and slot.piece is None]
            model = [ModelTensor(slot.name, slot.value, model_state.get(slot.name)) for slot in slots]
            self.ties = GivenTies([*self.values, *given], model)
        for one, holder, key, value, old, fields in self.later:
            holder[key] = self._restored(value, old, one, holder, key, fields)
        if not shares_nothing:
            self._give_apart([each.live for each in model])
            self.values = apart(self.targets, self.values)
        plain = map(all_plain, zip(self.targets, self.values)) if self.later else [True] * len(self.targets)
        write_all(self.targets, self.values, list(plain))

    def _give_apart(self, model: list[torch.Tensor]) -> None:
        """Give a target its own memory if it shares memory with another target or with the model,
        and their values differ."""
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
        self, value: Any, old: Any, one: OptimizedParameter, holder: dict[Any, Any], key: Any, fields: Fields | None
    ) -> Any:
        """Return one entry of a parameter's state: `old`, to be overwritten in place, if it has the
        same form, and otherwise a new tensor."""
        parameter = one.parameter
        if isinstance(value, torch.Tensor):
            on_device = key == "step" and _keeps_step_on_device(fields or {})
            if (
                fields is not None
                and type(old) is type(value)
                and old.dtype == value.dtype
                and old.shape == value.shape
                and tensor_class(old) == tensor_class(value)
                and not (is_expanded(old) or any(without_memory([(one, {key: old})])))
                and (not on_device or old.device == parameter.device)
            ):
                self.targets.append(old)
                self.values.append(value)
                self._found.append((one, holder, key))
                return old
            has_form = _has_form(old, value)
            model = old if has_form else parameter
            lies = (model.device_mesh, model.placements) if is_dtensor(model) else model.device
            same = (self.ties.same(value), key in SCALARS, on_device, model.dim() > 0, lies, has_form)
            if same not in self._made:
                tied = self.ties.model_tensor(value)
                is_placed = id(parameter) in self._placed and not has_form
                if is_placed and not is_dtensor(value) and is_dtensor(parameter):
                    model = parameter.to_local()
                self._made[same] = tied if tied is not None else _made_anew(value, model, key, on_device, is_placed)
            return self._made[same]
        if isinstance(value, dict):
            known = old if isinstance(old, dict) else {}
            out: dict[Any, Any] = {}
            for k, item in value.items():
                out[k] = self._restored(item, known.get(k), one, out, k, fields)
            return out
        if type(value) is list or type(value) is tuple:
            held = old if type(old) is type(value) and len(old) == len(value) else [None] * len(value)
            return type(value)(self._restored(item, was, one, {}, None, None) for item, was in zip(value, held))
        return value if isinstance(value, (bool, int, float, str, type(None))) else copy.deepcopy(value)


def _has_form(old: Any, value: torch.Tensor) -> bool:
    """Return True if the optimizer has a tensor or DTensor with the shape of `value`, and its next
    step expects the same form."""
    return (
        (type(old) is torch.Tensor or is_dtensor(old))
        and not old.is_meta
        and old.shape == global_shape(value)
        and tensor_class(old) == tensor_class(value)
    )


def _made_anew(
    value: torch.Tensor, parameter: torch.Tensor, key: Any, on_device: bool, is_placed: bool
) -> torch.Tensor:
    if on_device:
        return value.detach().to(parameter.device, torch.float32, copy=True)
    if not global_shape(value) and (key in SCALARS or parameter.dim() > 0):
        return value.detach().clone()
    return like(value, parameter, is_placed=is_placed)


def _own_dict(live: LiveOptimizers, k: int, state: dict[Any, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a dict for the optimizer's own `load_state_dict`, with integer ids in the order of its
    groups. Entries besides state and groups have their saved values, or else their current ones."""
    optimizer, packed, ids = live.optimizers[k], [], itertools.count()
    extra = copy.deepcopy(saved_optimizer.extra_of(saved_optimizer.saved_by(optimizer)))
    for group, fields in zip(optimizer.param_groups, groups):
        kept = {field: value for field, value in group.items() if field != "params"}
        extra |= fields.get(saved_optimizer.EXTRA, {})
        own = {field: value for field, value in fields.items() if field != saved_optimizer.EXTRA}
        packed.append({**kept, **own, "params": [next(ids) for _ in group["params"]]})
    return {**extra, "state": state, "param_groups": packed}


# Where optimizers hold state already that has the same form as what is given, so that it can simply
# be written there: on every load into a running optimizer that is all of it, and there is much of
# it.


class Places(NamedTuple):
    """Parameters whose state is written in place."""

    rows: Sequence[tuple[OptimizedParameter, dict[Any, Any], State]] = ()
    """Each parameter with its current state, and the given state, under the same keys."""
    targets: Sequence[torch.Tensor] = ()
    """All current tensors, in order. They are plain tensors."""
    values: Sequence[torch.Tensor] = ()
    """A plain tensor of the same shape and dtype for each target."""
    spans: Spans = Spans()
    """The memory ranges of all these tensors."""


_ROWS = 32
"""Number of parameters that are compared together."""


def places_of(live: LiveOptimizers, state: Sequence[tuple[OptimizedParameter, State | None]]) -> Places:
    """Return the places of all state whose keys equal those of the given state. Returns no places
    if a tensor has another form."""
    # not by the parameters themselves, whose hash is a function of Python
    held = [
        {} if loads_itself else dict(zip(map(id, optimizer.state), optimizer.state.values()))
        for optimizer, loads_itself in zip(live.optimizers, live.loads_itself)
    ]
    rows: list[tuple[OptimizedParameter, dict[Any, Any], State]] = []
    targets: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    starts: list[int] = []
    sizes: list[int] = []
    # all checks of a tensor run while it is in the CPU cache: to fetch all tensors from memory again for each
    # check would take longer than the checks
    for first in range(0, len(state), _ROWS):
        here: list[Any] = []
        wanted: list[Any] = []
        for one, values in state[first : first + _ROWS]:
            old = held[one.optimizer].get(id(one.parameter)) if values and one.piece is None else None
            if old is None or values is None or old.keys() != values.keys():
                continue
            rows.append((one, old, values))
            here += map(old.__getitem__, values)
            wanted += values.values()
        lying = spans_of([*here, *wanted], runs=2) if _alike(here, wanted) else None
        if lying is None:
            return Places()
        starts += lying.starts
        sizes += lying.sizes
        targets += here
        given += wanted
    return Places(rows, targets, given, Spans(starts, sizes))


def _alike(targets: Sequence[Any], values: Sequence[Any]) -> bool:
    """Return True if all are plain tensors, and each value has the dtype and shape of its target."""
    both = [*targets, *values]
    return (
        all_plain(both)
        and list(map(_DTYPE, targets)) == list(map(_DTYPE, values))
        and all(map(torch.Tensor.is_same_size, targets, values))
        and not any_lacks_memory(both)
        and (all(map(torch.Tensor.is_contiguous, targets)) or not any(map(is_expanded, targets)))
    )


_DTYPE = attrgetter("dtype")


def all_plain(tensors: Iterable[Any]) -> bool:
    """Return True if all are tensors of torch's own class, and neither parameters nor sharded."""
    return set(map(type, tensors)) <= {torch.Tensor}


# State that shares memory: with other state, as one step count for all, or with the model, as a
# master copy that is the parameter. Which of the given tensors do, and which of those that were
# given so are so no more.


class ModelTensor(NamedTuple):
    """A parameter or buffer of the model."""

    name: str
    live: Any
    given: Any
    """The value that it was set to, or None."""


class GivenTies:
    """Finds which given tensors share memory with each other, or with the old or new values of the model."""

    def __init__(self, given: Sequence[torch.Tensor], model: Sequence[ModelTensor]) -> None:
        self._first: dict[int, int] = {}
        """Maps the id of a given tensor to the id of the first one with the same memory."""
        self._model: dict[int, ModelTensor] = {}
        """Maps that id to the model's tensor with the same memory."""
        self._cluster: dict[int, int] = {}
        """Maps the id of a given tensor that shares memory to the number of its group of
        overlapping tensors."""
        ours = [each for each in model if isinstance(each.given, torch.Tensor)]
        pool = [*given, *(each.given for each in ours), *(each.live for each in model)]
        of_model = [*ours, *model]
        for number, cluster in enumerate(overlapping(pool) if given else ()):
            seen: dict[Any, int] = {}
            for i in cluster:
                own = id(pool[i])
                first = seen.setdefault(identity_of(pool[i]), own)
                if i < len(given):
                    self._first[own], self._cluster[own] = first, number
                else:
                    self._model.setdefault(first, of_model[i - len(given)])

    def same(self, value: torch.Tensor) -> int:
        """Return a number that is equal for given tensors that are the same view of the same memory."""
        return self._first.get(id(value), id(value))

    def model_tensor(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the model's own tensor if `value` shares its memory, or the memory of the value
        that it was set to."""
        if not self._model:
            return None
        found = self._model.get(self.same(value))
        if found is None or found.live.is_meta or dtype_of(found.live) != dtype_of(value):
            return None
        live: torch.Tensor = found.live.detach()
        return live if type(live) is type(value) and global_shape(live) == global_shape(value) else None

    def lost(self, live: LiveOptimizers, writes: OptimizerWrites) -> list[str]:
        """Return entries that shared memory when they were given and no longer do, as "<parameter>.<key>"."""
        if not self._cluster:
            return []
        now: dict[int, list[tuple[str, int, Any]]] = {}
        for one, values in writes.state:
            state = live.optimizers[one.optimizer].state.get(one.parameter, {})
            for key, value in (values or {}).items():
                for given, here in zip(tensors_in(value), tensors_in(state.get(key))):
                    if id(given) in self._cluster:
                        entry = (f"{one.name}.{key}", self.same(given), here)
                        now.setdefault(self._cluster[id(given)], []).append(entry)
        out: list[str] = []
        for entries in now.values():
            tied = self._model.get(entries[0][1])
            first = tied.live if tied is not None else entries[0][2]
            for name, same, here in entries:
                if same != entries[0][1] or identity_of(here) != identity_of(first):
                    out.append(name)
        return list(dict.fromkeys(out))
