"""Reads optimizer state dicts in any form, matches param groups, and determines which state
optimizers keep."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from planners.geometry.box import Shape
from reshard.errors import NormalizationError
from reshard.live.dtypes import PLAIN
from reshard.live.fsdp1 import FlatPiece, fill_absent
from reshard.live.optimizer_state import SCALARS, PartialState, is_nested, listed_in, settings_of, split_flat_key
from reshard.live.state import same_value
from reshard.live.tensors import global_shape, is_dtensor, is_sharded, tensor_class
from reshard.live.tree import leaves_of
from reshard.live.wrappers import WrapperNames, loads_itself
from reshard.state_dict.live_model import where
from reshard.state_dict.optimizer_parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.options import StateDictOptions

EXTRA = "extra_state"
"""Field of each group for entries of the optimizer's own state dict besides state and groups."""


def extra_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an optimizer's own state dict besides state and groups, such as a
    global step count."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def is_zero_redundancy(optimizer: Any) -> bool:
    """Return True for a ZeroRedundancyOptimizer: each rank of its process group has the state of
    some parameters."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer) and hasattr(optimizer, "optim")


def saved_by(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict. A ZeroRedundancyOptimizer that was not consolidated
    returns the state of this rank's parameters. Together, all ranks have everything."""
    try:
        return optimizer.state_dict()
    except RuntimeError:
        if not is_zero_redundancy(optimizer):
            raise
    ids = {p: number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    inner: Any = optimizer
    local = {ids[p]: values for p, values in inner.optim.state.items()}
    return {**Optimizer.state_dict(optimizer), "state": local}


def elsewhere_of(live: LiveOptimizers, state: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Return the arguments of `PartialState` for the state that this rank has."""
    pieces = {} if options.in_chunks else live.pieces
    found: dict[str, Any] = {name: piece for name, piece in pieces.items() if piece.lacks_ranks}
    sharded = [name for name in state if (one := live.by_name.get(name)) and is_dtensor(one.parameter)]
    found |= {name: None for name in sharded if _has_unsharded(state[name])}
    for optimizer, own in zip(live.optimizers, live.parameters):
        if is_zero_redundancy(optimizer):
            zero: Any = optimizer
            ranks = {one.name: zero._param_to_rank[one.parameter] for one in own if one.name not in state}
            found |= {name: rank for name, rank in ranks.items() if rank != zero.rank}
    return found


def _has_unsharded(values: Any) -> bool:
    """Return True if the state of a sharded parameter includes unsharded tensors that are not 0-d."""
    kept = leaves_of(values).values()
    return any(isinstance(value, torch.Tensor) and value.dim() and not is_sharded(value) for value in kept)


@dataclass(frozen=True)
class SavedOptimizer:
    """A given optimizer state dict, by parameter name."""

    state: Mapping[Any, Mapping[str, Any]]
    """State of each parameter that has any."""
    fields: Mapping[str, Mapping[str, Any]]
    """Group fields of each parameter in a group. Parameters of one group share one object."""
    empty: Sequence[Mapping[str, Any]]
    """Fields of the groups without parameters, in order."""
    stateless: frozenset[str] | None = None
    """In the flat form, the parameters that are recorded as having no state. If there is any state,
    all other parameters without state have lost it. None in other forms, which list all state that
    there is."""


def read_saved(given: Mapping[str, Any], live: LiveOptimizers) -> SavedOptimizer:
    """Read a nested dict, a flat one, or an optimizer's own dict of integer ids (for a single
    optimizer).

    Raises NormalizationError for anything else.
    """
    if not isinstance(given, Mapping):
        raise NormalizationError(
            f"an optimizer state dict must be a mapping, got {type(given).__name__}. To set a checkpoint, load it: "
            "state = reshard.get_optimizer_state_dict(model, optimizer); reshard.load(state, path)"
        )
    if "param_groups" not in given and "state" not in given:
        return _read_flat(given, live)
    state, groups = given.get("state", {}), given.get("param_groups", [])
    if not isinstance(groups, list | tuple) or not is_nested({"state": state, "param_groups": groups}):
        raise NormalizationError(
            "an optimizer state dict must hold a dict 'state' and a list 'param_groups' of dicts with 'params'"
        )
    by_id = any(isinstance(key, int) for key in listed_in(groups))
    names: dict[Any, str] = _names_of_ids(groups, live) if by_id else {}
    extra = extra_of(given)
    fields: dict[str, Mapping[str, Any]] = {}
    empty: list[Mapping[str, Any]] = []
    for group in groups:
        own = settings_of(group)
        if extra:
            own.setdefault(EXTRA, extra)
        if not group["params"]:
            empty.append(own)
        for key in group["params"]:
            name = names.get(key, key)
            if name in fields:
                raise NormalizationError(f"parameter {name!r} is in two groups of the given optimizer state dict")
            fields[name] = own
    held: Any = {names.get(key, key): value for key, value in state.items() if isinstance(value, torch.Tensor) or value}
    return SavedOptimizer(held, fields, empty)


def with_state_of_others(saved: SavedOptimizer, given: Mapping[str, Any], live: LiveOptimizers) -> SavedOptimizer:
    """Return `saved`, with an empty part of the state of each parameter whose elements only other
    ranks hold. `saved` was read from `given`. Collective over the ranks of each unit, unless the
    live parameters are sharded in the same way.

    Raises NormalizationError if another rank has all of a parameter's state.
    """
    held = given if isinstance(given, PartialState) else given.get("state")
    pieces: dict[str, FlatPiece] = {}
    for name, at in held.elsewhere.items() if isinstance(held, PartialState) else ():
        if at is None:
            continue
        one = live.by_name.get(name)
        if isinstance(at, FlatPiece):
            mine = None if one is None else one.piece
            if mine is None or mine.parameter is mine.flat or mine.cut() != at.cut():
                pieces[name] = at
            continue
        zero: Any = None if one is None else live.optimizers[one.optimizer]
        alike = one is not None and is_zero_redundancy(zero) and zero._param_to_rank[one.parameter] == at
        if not alike and name not in saved.state:
            raise NormalizationError(
                f"only rank {at} has the state of {name!r}, because a ZeroRedundancyOptimizer divided its state among "
                f"ranks{where()}; the optimizer to be set needs it on other ranks, too. Pass full_state_dict=True to "
                "get_optimizer_state_dict, or save the state and load it"
            )
    return replace(saved, state=fill_absent(saved.state, pieces)) if pieces else saved


def _names_of_ids(groups: Sequence[Mapping[str, Any]], live: LiveOptimizers) -> dict[Any, str]:
    if len(live.optimizers) != 1:
        raise NormalizationError(
            f"the optimizer state dict names parameters by integer ids, which say nothing about {len(live.optimizers)} "
            "optimizers: give each its own dict, or one by parameter names"
        )
    ids = listed_in(groups)
    own = live.by_id[0]
    if len(ids) != len(own):
        raise NormalizationError(
            f"the optimizer state dict lists {len(ids)} parameter ids, but the optimizer has {len(own)} parameters: "
            "ids fit only the optimizer that they come from, see reshard.normalize(state_dict, order=[names])"
        )
    stored = [str(name) for group in groups for name in group.get("param_names") or ()]
    for names in (stored, [*map(WrapperNames(stored), stored)]):  # of the model, or of a wrapped one
        if len(ids) == len(names) and live.by_name.keys() & names:
            return dict(zip(ids, names))
    return {key: own[number][0].name for number, key in enumerate(ids)}


def _read_flat(given: Mapping[str, Any], live: LiveOptimizers) -> SavedOptimizer:
    if not all(issubclass(kind, str) for kind in set(map(type, given))):
        raise NormalizationError("an optimizer state dict must have 'state' and 'param_groups', or names as keys")
    # torch saves names per group, and live groups may be split differently
    keys = [key for key in given if not (key.endswith(".param_names") and key.startswith("param_groups."))]
    flat = _FlatReader(live)
    flat.read(keys, [*map(given.__getitem__, keys)])
    for name in flat.singly[id(flat.state)]:
        values = flat.state[name]
        if not any(isinstance(value, dict) for value in values.values()):
            continue
        one = live.by_name.get(name)
        now = live.optimizers[one.optimizer].state.get(one.parameter, {}) if one is not None else {}
        flat.state[name] = {key: _typed_keys(item, now.get(key)) for key, item in values.items()}
    return SavedOptimizer(flat.state, flat.fields, [], frozenset(flat.stateless))


class _FlatReader:
    """Reads the flat form key by key. A parameter with the same keys as the previous one is read in
    one step."""

    def __init__(self, live: LiveOptimizers) -> None:
        self.state: dict[str, dict[Any, Any]] = {}
        self.fields: dict[str, dict[Any, Any]] = {}
        self.stateless: set[str] = set()
        self.singly: dict[int, set[str]] = {id(self.state): set(), id(self.fields): set()}
        """For both dicts, the parameters whose keys were read one by one. All others have no nested
        state, and share the fields of their group."""
        self._known = live.live.by_name | live.by_name
        self._places: dict[str, dict[Any, Any]] = {}
        """The dict for the front of a key, if that is a known name."""
        self._front: str | None = None
        """The front of the last key that was read one by one."""
        self._tails: dict[str, list[str]] = {}
        """By section, the last parts of the keys of one parameter that were read one by one, in order."""
        self._latest: tuple[list[str], Sequence[Any], dict[Any, Any]] = ([], [], {})
        """Tails and values of fields that were read at once, and their dict."""

    def read(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Read all keys."""
        at, last = 0, None
        while at < len(keys):
            front, _, tail = keys[at].rpartition(".")
            count = self._row(front, keys, values, at) if front != last else 0
            if not count:
                self._one(keys[at], front, tail, values[at])
            at, last = at + (count or 1), front

    def _row(self, front: str, keys: Sequence[str], values: Sequence[Any], at: int) -> int:
        """Read all keys of a parameter if they are those of an earlier one. Return their number, or
        0."""
        section, _, name = front.partition(".")
        goal, tails = self._goal(section), self._tails.get(section)
        if not tails or name in goal or name not in self._known:
            return 0
        end, dotted = at + len(tails), f"{front}."
        own = values[at:end]
        if keys[at:end] != [dotted + tail for tail in tails] or not _LEAVES.issuperset(map(type, own)):
            return 0
        if goal is self.state:
            goal[name] = dict(zip(tails, own))
            return len(tails)
        known, before, fields = self._latest
        # `tails` grows while keys are read one by one
        is_same = known is tails and len(before) == len(own)
        if not is_same or not (all(map(is_, before, own)) or all(map(_is_alike, before, own))):
            fields = dict(zip(tails, own))
            self._latest = tails, own, fields
        goal[name] = fields
        return len(tails)

    def _one(self, key: str, front: str, tail: str, value: Any) -> None:
        """Read one key."""
        bare = key.removeprefix("state.")
        if type(value) is dict and not value and bare in self._known:
            self.stateless.add(bare)
            return
        head = front.partition(".")[0]
        if front != self._front:
            self._front, self._tails[head] = front, []
        self._tails[head].append(tail)
        place = self._places.get(front)
        if place is not None:
            place[tail] = value
            return
        if front == "state":  # state of the optimizer itself
            self.state[tail] = value
            return
        section, name, path = split_flat_key(key, self._known)
        goal = self._goal(section)
        if name not in self.singly[id(goal)]:
            self.singly[id(goal)].add(name)
            goal[name] = dict(goal.get(name, {}))
        inner = goal[name]
        if len(path) == 1:
            self._places[front] = inner
        if section == "param_groups":
            inner[".".join(path)] = value
            return
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if type(inner) is not dict:
                raise NormalizationError(f"{key!r} is part of a value that the optimizer state dict also has as one")
        inner[path[-1]] = value

    def _goal(self, section: str) -> dict[str, dict[Any, Any]]:
        return self.fields if section == "param_groups" else self.state


_LEAVES = frozenset([torch.Tensor, bool, int, float, str, tuple, type(None)])
"""Types of values that are not dicts, which nearly all are."""


def _is_alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (bool, int, float, str) and a == b)


def _typed_keys(value: Any, live: Any) -> Any:
    """Restore the types of integer keys in nested state, which flattening turned into strings: keys
    get the types of the live state's keys. Without live state, keys of a dict become ints if all
    are digits."""
    if not isinstance(value, dict):
        return value
    if not isinstance(live, dict):
        live = dict.fromkeys(map(int, value)) if all(map(str.isdecimal, value)) else {}
    keys = {str(key): key for key in live}
    return {keys.get(key, key): _typed_keys(item, live.get(keys.get(key, key))) for key, item in value.items()}


# The fields that live parameter groups will have, out of those that were saved.
#
# Groups are matched by the names of their parameters, never by their number, so that groups may be
# split, merged or reordered, and pipeline stages may each have their own.


@dataclass(frozen=True)
class GroupWrite:
    """The fields that a live group will have."""

    optimizer: int
    group: int
    fields: Mapping[str, Any]
    kept: tuple[str, ...]
    """Fields that the saved group lacks."""
    added: tuple[str, ...]
    """Fields that the live group lacked."""


_OF_ONE_KIND = frozenset([
    "alpha", "beta2_decay", "betas", "centered", "dampening", "etas", "history_size", "lambd", "lr_decay", "max_iter",
    "momentum", "nesterov", "rho", "step_sizes", "t0",
])  # fmt: skip
"""Fields that some of torch's optimizers have and others do not, in every release of torch."""
_DECOUPLED = "decoupled_weight_decay"
"""The field in which AdamW differs from Adam, its base class."""


def plan_groups(live: LiveOptimizers, saved: SavedOptimizer, *, strict: bool) -> list[GroupWrite]:
    """Return the fields of every live group. Changes nothing.

    Raises NormalizationError if parameters of one live group were saved with different values of a
    field. If strict, also raises it for groups of another kind of optimizer: some of its own fields
    are missing, and fields of the other kind are present. AdamW and Adam count as different kinds.
    """
    empties = [
        (k, g)
        for k, one in enumerate(live.optimizers)
        for g, group in enumerate(one.param_groups)
        if not group["params"]
    ]
    # groups without parameters cannot be matched by name. If their number is equal, they are taken
    # to be the same ones
    matched = dict(zip(empties, saved.empty)) if len(empties) == len(saved.empty) else {}
    writes = []
    for k, optimizer in enumerate(live.optimizers):
        members: list[list[OptimizedParameter]] = [[] for _ in optimizer.param_groups]
        for one in live.parameters[k]:
            members[one.group].append(one)
        for g, group in enumerate(optimizer.param_groups):
            given = (_common(members[g], saved) if members[g] else matched.get((k, g))) or {}
            write = _group_write(k, g, group, given)
            if EXTRA not in given and loads_itself(optimizer) and extra_of(saved_by(optimizer)):
                write = replace(write, kept=(*write.kept, EXTRA))
            writes.append(write)
        extras = [write.fields[EXTRA] for write in writes if write.optimizer == k and EXTRA in write.fields]
        if any(not _is_same(extras[0], extra) for extra in extras):
            raise NormalizationError(
                f"the groups of optimizer {k}{where()} were saved by optimizers with different state beside that of "
                f"their parameters ({EXTRA!r}): {extras}. Give each optimizer its own state dict"
            )
    for write in writes if strict else ():
        _refuse_another_kind(live.optimizers[write.optimizer], write)
    return writes


def _refuse_another_kind(optimizer: Optimizer, write: GroupWrite) -> None:
    theirs, own = (sorted(_OF_ONE_KIND.intersection(names)) for names in (write.added, write.kept))
    decays = [fields.get(_DECOUPLED) for fields in (write.fields, optimizer.param_groups[write.group])]
    if isinstance(optimizer, torch.optim.Adam) and {*decays} == {True, False}:
        theirs, own = ([f"{_DECOUPLED}={decay}"] for decay in decays)
    if theirs and own:
        name = type(optimizer).__name__
        raise NormalizationError(
            f"param group {write.group} of optimizer {write.optimizer}{where()} was saved by another class of "
            f"optimizer: it has {', '.join(theirs)}, and {name} needs {', '.join(own)}. Use the class that was "
            "saved, or leave this optimizer out"
        )


def _group_write(k: int, g: int, group: Mapping[str, Any], given: Mapping[str, Any]) -> GroupWrite:
    own = settings_of(group)
    fields = {}
    for field, value in given.items():
        try:
            fields[field] = _as_live(group[field], value) if field in group else copy.deepcopy(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NormalizationError(
                f"field {field!r} of group {g} of optimizer {k}{where()} is {group[field]!r}, "
                f"and cannot become {value!r}"
            ) from error
    kept = tuple(field for field in own if field not in given)
    return GroupWrite(k, g, fields, kept, tuple(field for field in given if field not in group and field != EXTRA))


def tensors_that_part(live: LiveOptimizers, groups: Sequence[Sequence[Mapping[str, Any]]]) -> set[int]:
    """Return the ids of tensors that several group fields share now, such as a learning rate
    tensor, and that will get different values."""
    values: dict[int, Any] = {}
    found = set()
    for optimizer, own in zip(live.optimizers, groups):
        for group, fields in zip(optimizer.param_groups, own):
            for field, known in group.items():
                value = fields.get(field, known)
                if isinstance(known, torch.Tensor) and not same_value(values.setdefault(id(known), value), value):
                    found.add(id(known))
    return found


def _common(members: Sequence[OptimizedParameter], saved: SavedOptimizer) -> Mapping[str, Any] | None:
    """Return the fields with which all parameters of a group were saved. None if none was saved."""
    first: tuple[str, Mapping[str, Any]] | None = None
    comparable = False
    for one in members:
        name = one.name
        fields = saved.fields.get(name)
        if fields is None:
            name = next((alias for alias in one.names if alias in saved.fields), "")
            if not name:
                continue
            fields = saved.fields[name]
        if first is None:
            first = name, fields
            comparable = not any(hasattr(value, "shape") for value in leaves_of(fields).values())
        elif fields is not first[1] and not (comparable and fields == first[1]):
            _agree(first, (name, fields), one)
    return None if first is None else first[1]


def _agree(a: tuple[str, Mapping[str, Any]], b: tuple[str, Mapping[str, Any]], one: OptimizedParameter) -> None:
    for field in a[1].keys() | b[1].keys():
        x, y = a[1].get(field, _ABSENT), b[1].get(field, _ABSENT)
        if x is not y and not _is_same(x, y):
            raise NormalizationError(
                f"{a[0]!r} and {b[0]!r} are in one group of optimizer {one.optimizer}{where()}, but were saved with "
                f"different values of {field!r}: {x} and {y}. Give them two groups, or make the values equal"
            )


def _is_same(a: Any, b: Any) -> bool:
    """Return True if two values, or nested containers of values, are equal."""
    one, two = leaves_of(a), leaves_of(b)
    return one.keys() == two.keys() and all(same_value(leaf, two[path]) for path, leaf in one.items())


def _as_live(live: Any, value: Any) -> Any:
    """Convert `value` to the type of the live field, if they differ only in form."""
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor):
            return value.detach().to(live).reshape(live.shape).clone()
        return value.item() if isinstance(live, bool | int | float) else value.detach().clone()
    if isinstance(live, torch.Tensor):
        return torch.full_like(live, value)
    if isinstance(live, int | float) and isinstance(value, str):
        raise TypeError("text is not a number")
    if isinstance(live, list | tuple) and isinstance(value, int | float | str):
        raise TypeError("one value is not a list of values")
    if isinstance(live, float) and isinstance(value, list | tuple):
        raise TypeError("a list of values is not a number")
    if isinstance(live, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(live, list | tuple) and isinstance(value, list | tuple):
        items = [_as_live(live[i], item) if i < len(live) else copy.deepcopy(item) for i, item in enumerate(value)]
        return items if isinstance(live, list) else tuple(items)
    return copy.deepcopy(value)


_ABSENT = object()


# Which state an optimizer keeps of a parameter: what it needs to continue, and what it has any
# use for.
#
# For torch's own optimizers both are known. What others need is unknown; what they
# use follows from the state that they already hold, if they hold any.


class _Schema(NamedTuple):
    """The state that an optimizer of torch keeps for each parameter."""

    always: tuple[str, ...] = ()
    under: Mapping[str, str] = {}
    """Group field -> the key that it adds if it is set."""
    at_will: tuple[str, ...] = ()
    """Optional keys, which the optimizer creates if they are missing."""


_LBFGS = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss")
"""What LBFGS has from its first iteration on."""

_SCHEMAS = {
    "Adadelta": _Schema(("step", "square_avg", "acc_delta")),
    "Adafactor": _Schema(("step",), at_will=("row_var", "col_var", "variance")),
    "Adagrad": _Schema(("step", "sum")),
    "Adam": _Schema(("step", "exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "AdamW": _Schema(("step", "exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "Adamax": _Schema(("step", "exp_avg", "exp_inf")),
    "ASGD": _Schema(("step", "eta", "mu", "ax")),
    "LBFGS": _Schema(("func_evals", "n_iter"), at_will=(*_LBFGS, "al")),
    "Muon": _Schema(("momentum_buffer",)),
    "NAdam": _Schema(("step", "mu_product", "exp_avg", "exp_avg_sq")),
    "RAdam": _Schema(("step", "exp_avg", "exp_avg_sq")),
    "RMSprop": _Schema(("step", "square_avg"), {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "Rprop": _Schema(("step", "prev", "step_size")),
    "SGD": _Schema(at_will=("momentum_buffer",)),
    "SparseAdam": _Schema(("step", "exp_avg", "exp_avg_sq")),
}


class Misfit(NamedTuple):
    """Problems with the keys of one parameter's saved state."""

    lacking: tuple[str, ...]
    """Keys without which the optimizer's next step would fail, or start over."""
    unused: tuple[Any, ...]
    """Keys that the optimizer does not use."""


_FITS = Misfit((), ())


class StateKind:
    """The kind of state that one live optimizer keeps.

    Attributes:
        name: class of the optimizer.
        fitting: keys that are right for every parameter of the group, with the fields of the last
            check, or None.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__
        self._optimizer, self._loads_itself = optimizer, loads_itself(optimizer)
        self._base = _torch_class(optimizer)
        self._schema = _SCHEMAS.get(self._base)
        self._asked = tuple(self._schema.under) if self._schema is not None else ()
        self._fields: Mapping[str, Any] | None = None
        self._group = 0
        self._are_set: tuple[bool, ...] = ()
        """Whether these fields were set, for the fields that were requested last."""
        self.fitting: list[Any] | None = None
        self._checked: dict[Any, Misfit] = {}

    def check(self, values: Mapping[Any, Any], one: OptimizedParameter, fields: Mapping[str, Any]) -> Misfit | None:
        """Return the problems of the keys of `values`, saved for a parameter in a group with
        `fields`, or None."""
        # fast path: consecutive parameters usually have the same group and the same kind of
        # state
        known = fields is self._fields and one.group == self._group
        if self._loads_itself or (known and list(values) == self.fitting):
            return None
        if not known:
            self._fields, self._group, self.fitting = fields, one.group, None
            self._are_set = self._settings(fields, one.group)
        is_matrix = self._base == "Adafactor" and one.parameter.dim() > 1
        kind = (self._are_set, is_matrix, *values)
        found = self._checked.get(kind)
        if found is None or self._base == "LBFGS":
            needed = self._needed(values, is_matrix)
            lacking = tuple(name for name in needed if name not in values)
            unused = tuple(key for key in values if self._has_no_use_for(str(key)))
            found = self._checked[kind] = Misfit(lacking, unused) if lacking or unused else _FITS
        if found is _FITS and self._base not in ("Adafactor", "LBFGS"):  # their state also depends on shapes and steps
            self.fitting = list(values)
        return None if found is _FITS else found

    def _settings(self, fields: Mapping[str, Any], group: int) -> tuple[bool, ...]:
        """Return the values of the fields that add keys to the state: saved ones, or else current ones."""
        live = self._optimizer.param_groups[group]
        return tuple(_is_set(fields[name] if name in fields else live.get(name)) for name in self._asked)

    def initial(self, one: OptimizedParameter) -> dict[str, Any]:
        """Return the state that the optimizer's first step creates for the parameter, or {} if that
        is unknown."""
        parameter, group = one.parameter.detach(), self._optimizer.param_groups[one.group]
        unknown = self._schema is None or not self.keeps_state or self._base == "Adafactor" or tensor_class(parameter)
        if self._schema is None or unknown or not one.parameter.requires_grad:
            return {}
        keys = [*self._schema.always, *(key for field, key in self._schema.under.items() if _is_set(group.get(field)))]
        begins = {"eta": group["lr"], "step_size": group["lr"], "mu": 1.0, "mu_product": 1.0}
        device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"

        def value(key: str) -> Any:
            begin = float(begins.get(key, 0.0))
            return torch.full((), begin, device=device) if key in SCALARS else torch.full_like(parameter, begin)

        return {key: 0 if (self._base, key) == ("SparseAdam", "step") else value(key) for key in keys}

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Return True if the optimizer is known to keep state for every parameter that it has stepped."""
        has_state_of_all = self._schema is not None and bool(self._schema.always) and self._base != "LBFGS"
        return has_state_of_all and not self._loads_itself

    def _has_no_use_for(self, key: str) -> bool:
        """Return True if the optimizer neither knows the key nor has state under it. False if that
        is unknown."""
        schema = self._schema
        if schema is not None and (key in schema.always or key in schema.under.values() or key in schema.at_will):
            return False
        if key in self._held:
            return False
        # a class of the user's own may keep what it likes beside torch's state, but hardly what
        # another of torch's does
        is_own = schema is None or not _is_torchs(type(self._optimizer)) or _has_step_hooks(self._optimizer)
        return bool(self._held) or not is_own or (schema is not None and key in _keys_of_torch())

    @functools.cached_property
    def _held(self) -> Collection[str]:
        """Return the keys under which the optimizer has state of any parameter."""
        state: Mapping[Any, Any] = self._optimizer.state  # other keys may have state of the optimizer itself
        owned = (own for of, own in state.items() if isinstance(of, torch.Tensor) and isinstance(own, dict))
        return {str(key) for own in owned for key in own}

    def _needed(self, values: Mapping[Any, Any], is_matrix: bool) -> list[str]:
        if self._schema is None:
            return []
        needed = list(self._schema.always)
        needed += [key for key, is_set in zip(self._schema.under.values(), self._are_set) if is_set]
        if self._base == "Adafactor":
            needed += ["row_var", "col_var"] if is_matrix else ["variance"]
        if self._base == "LBFGS" and values.get("n_iter", 1):
            needed += _LBFGS
        return needed


def misshapen(
    state: Sequence[tuple[OptimizedParameter, Mapping[Any, Any] | None]], fitting: Container[int], live: LiveOptimizers
) -> list[str]:
    """Return state tensors that should have the shape of their parameter, but do not. Omits the
    parameters in `fitting`, by id.

    A state name counts as having the parameter's shape if most tensors of that name in a param
    group have it. Only parameters with the same number of dims are compared, because row-wise state
    has the shape of a vector. These shapes are accepted: the shape of the optimizer's current
    state, the same dims of all parameters, and tables of one shape, like those that the optimizer
    has.
    """
    misfits: dict[Any, list[str]] = {}
    for one, values in state:
        if values is None or id(one) in fitting:
            continue
        parameter = one.parameter
        plain = one.piece is None and type(parameter) in PLAIN
        for key, value in values.items():
            if plain and type(value) is torch.Tensor and (not value.dim() or value.is_same_size(parameter)):
                continue  # the usual case
            if not isinstance(value, torch.Tensor):
                continue
            shape = global_shape(value)
            held = live.optimizers[one.optimizer].state.get(parameter, {}).get(key)
            if shape and shape != one.shape and not (isinstance(held, torch.Tensor) and global_shape(held) == shape):
                misfits.setdefault((key, one.optimizer, one.group, len(one.shape)), []).append(
                    f"{one.name}: its {key!r} in optimizer {one.optimizer} has shape {shape}, "
                    f"which fits no layout of the parameter's shape {tuple(one.shape)}"
                )
    found = []
    for (key, *place), lines in misfits.items():
        beside = [(one, values[key]) for one, values in state if values and isinstance(values.get(key), torch.Tensor)]
        shapes = [
            (one.shape, global_shape(value))
            for one, value in beside
            if place == [one.optimizer, one.group, len(one.shape)]
        ]
        fits = sum(own == shape for own, shape in shapes)
        held = [own.get(key) for own in live.optimizers[place[0]].state.values() if isinstance(own, dict)]
        sizes = {global_shape(value) for value in held if isinstance(value, torch.Tensor)}
        is_table = key not in _keys_of_torch() and len(sizes | {shape for _, shape in shapes}) == 1
        found += lines if fits > len(lines) and not (is_table or _are_dims_of_parameters(shapes)) else []
    return found


def _are_dims_of_parameters(shapes: list[tuple[Shape, Shape]]) -> bool:
    """Return True if each size of a state is the size of one dim of its parameter, the same dim for
    all states. A preconditioner of shape [rows, rows] also fits a square parameter."""
    (own, first), *_ = shapes
    return all(len(shape) == len(first) for _, shape in shapes) and all(
        any(all(shape[i] == own[dim] for own, shape in shapes) for dim in range(len(own))) for i in range(len(first))
    )


def _torch_class(optimizer: Optimizer) -> str:
    """Return the name of the class in torch.optim whose state the optimizer has. "" if its steps
    are customized."""
    cls = type(optimizer)
    if not all(_is_torchs(getattr(cls, method, None)) for method in ("step", "_init_group", "__setstate__")):
        return ""
    return next((c.__name__ for c in cls.__mro__ if _is_torchs(c)), "")


@functools.cache
def _keys_of_torch() -> frozenset[str]:
    """Return all keys under which some optimizer of torch keeps state."""
    rows = _SCHEMAS.values()
    return frozenset(key for row in rows for key in (*row.always, *row.under.values(), *row.at_will))


def _has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if the user registered hooks on each step, which may keep state."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def _is_torchs(thing: Any) -> bool:
    return thing is None or f"{thing.__module__}.".startswith("torch.optim.")


def _is_set(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_meta and bool(value.any())
    return bool(value)
