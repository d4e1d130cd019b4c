"""Converts models, optimizers, schedules, data loaders, and generators to the state that is saved, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from reshard.api.options import LoadOptions
from reshard.errors import CheckpointError, FormatError, NormalizationError, OptionError, RankFailedError, ReshardError
from reshard.live.state import CheckedState, OwnState, PerRank, in_order, is_long, is_object, put_at, same_value
from reshard.live.tensors import identity_of, is_sharded, is_tensor, world_size
from reshard.live.tree import flatten, leaves_of, rebuilt
from reshard.state import KeyPath, key_of
from reshard.state_dict.api import (
    get_model_state_dict,
    get_optimizer_state_dict,
    group_orders,
    optimizer_to_restore,
    refuse_optimizers,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from reshard.state_dict.live_model import Stage
from reshard.state_dict.options import StateDictOptions

_Set = Callable[[Any], object]


@dataclass(frozen=True)
class _Taken:
    """The replacement of an object in the state."""

    state: Any
    put: _Set


@dataclass(frozen=True)
class _Options(StateDictOptions):
    """The options for an optimizer under `key`. Each parameter is as strict as the load is."""

    key: str = ""
    load: LoadOptions = field(default_factory=LoadOptions)

    def _refuses(self, name: str, *, is_missing: bool) -> bool:
        return "partial" not in self._modes_of(name) and (is_missing or not self.is_subset(name))

    def is_subset(self, name: str) -> bool:
        """Return True if the load ignores what only the checkpoint has of this parameter."""
        return "subset" in self._modes_of(name)

    def _modes_of(self, name: str) -> set[str]:
        path = f"{self.key}.state.{name}"  # a glob may be of fields of its state
        return {self.load.mode_of(path), self.load.mode_of(f"{path}.")}

    def _lenient(self, *, is_missing: bool) -> str:
        given = self.load.strict
        if given is True and not is_missing:
            return 'strict="subset"'
        others = given if isinstance(given, Mapping) else {} if given is True else {"*": given}
        return f"strict={ {f'{self.key}.*': 'partial' if is_missing else 'subset', **others} }"


class LiveObjects:
    """A user's state, taken apart. `state` is `user`, in which what is saved of them replaces
    models, optimizers, generators, and other objects with `state_dict` and `load_state_dict`. All
    other values are the same. `put_back` gives each object what was loaded, and puts plain values
    into the user's containers.

    Raises FormatError for what is no dict, and for objects in tuples; NormalizationError for an
    optimizer without its model.

    Args:
        to_fill: for a load, and not to be saved.
        strict: as of `load`.
    """

    missing: tuple[str, ...] = ()
    """After `put_back`, keys of parameters that an optimizer has and the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """The reverse, and keys of state that an optimizer does not use."""
    uninitialized: tuple[str, ...] = ()
    """After `put_back`, keys of models that are still on the meta device."""

    def __init__(self, user: Any, *, to_fill: bool = False, strict: Any = True) -> None:
        if not isinstance(user, MutableMapping):
            raise FormatError(
                f"the state of a run is a dict, such as {{'model': model, 'optim': optimizer, 'step': 0}}, got "
                f"{type(user).__name__}"
            )
        self._user, self._to_fill, self._options = user, to_fill, LoadOptions(strict=strict)
        leaves = flatten(user, is_leaf=is_object, whole_at=is_long).leaves if is_object(user, within=True) else {}
        self._models = [
            (value, isinstance(value, Stage) or any(type(part) is int for part in path))
            for path, value in leaves.items()
            if isinstance(value, nn.Module | Stage)
        ]
        """Each model, and whether it is a stage of a pipeline."""
        self._taken: dict[int, _Taken] = {}
        self._paths: list[KeyPath] = []
        self._model_paths: list[KeyPath] = []
        self._optimizer_paths: list[KeyPath] = []
        self._done: list[str] = []
        self._stateful: dict[KeyPath, Any] = {}
        self._untied: dict[KeyPath, torch.Tensor] = {}
        self._checks = dict[KeyPath, _Set]()
        self._orders = dict[int, list[int]]()
        self._optimizers: list[tuple[KeyPath, Any, Any]] = []
        self.state: Any = CheckedState(self._take(user, ()))
        self.state.checks = self._checks
        self.state.apart, self.state.models, self.state.optimizers = (
            self._paths,
            self._model_paths,
            self._optimizer_paths,
        )
        if to_fill and self._stateful:
            self._untie()

    def put_back(self, tied: Mapping[str, str]) -> None:
        """Give the loaded values to the objects, after `state` was filled. Raises CheckpointError,
        which says what was restored before, if an object refuses its value.

        Args:
            tied: keys that were saved as the tensor of another key, and the name of that.
        """
        for path, owners, optimizers in self._optimizers if self._stateful else ():
            groups = reduce(getitem, path, self.state).get("param_groups", ())
            self._orders.update((id(one), order) for one, order in group_orders(owners, optimizers, groups))
        shared, first = set(tied.values()), dict[str, Any]()
        for path, live in self._untied.items():
            key = key_of(path)
            if (name := tied.get(key, key)) in shared:
                value, other = reduce(getitem, path, self.state), first.get(name, live)
                first[name] = other if same_value(other, value) else value
                put_at(self.state, path, first[name])
        self._put(self._user, self.state, "")

    def refuse_sharded(self) -> None:
        """Raise OptionError, in a job of several ranks, if this rank would have to set a sharded
        model alone."""
        if world_size() > 1 and any(map(is_sharded, leaves_of(self.state).values())):
            raise OptionError(
                "all ranks set a sharded model or optimizer together: omit alone=True, or pass their state from "
                "reshard.get_state_dict"
            )

    def _untie(self) -> None:
        """Give a tensor of an object separate memory if another key has the same memory.

        Their saved values can differ, and the object gets its own from the state.
        """
        leaves = {path: leaf for path, leaf in leaves_of(self.state).items() if is_tensor(leaf)}
        ours = (path for path in leaves if not any(path[: len(at)] == at for at in self._stateful))
        seen = {identity_of(leaves[path]) for path in ours}
        for at, state in self._stateful.items():
            put_at(self.state, at, self._apart(state, at, seen))

    def _apart(self, value: Any, path: KeyPath, seen: set[Any]) -> Any:
        if isinstance(value, torch.Tensor) and (identity := identity_of(value)) is not None:
            if identity not in seen:
                seen.add(identity)
                return value
            self._untied[path] = value
            return value.detach().clone()
        if not isinstance(value, MutableMapping | list | tuple):
            return value
        items = dict(value if isinstance(value, MutableMapping) else enumerate(value))
        new = {key: self._apart(item, (*path, key), seen) for key, item in items.items()}
        if all(new[key] is item for key, item in items.items()):
            return value
        if isinstance(value, tuple):
            return rebuilt(value, new.values())
        made: Any = copy(value)  # the object keeps its own
        for key, item in new.items():
            made[key] = item
        return made

    def _take(self, value: Any, path: KeyPath) -> Any:
        taken = self._object(value, path)
        if taken is not None:
            self._taken[id(value)] = taken
            self._paths.append(path)
            return taken.state
        if not is_object(value, within=True):
            return value
        if isinstance(value, MutableMapping):
            return {name: self._take(each, (*path, name)) for name, each in value.items()}
        if isinstance(value, MutableSequence):
            return [self._take(each, (*path, place)) for place, each in enumerate(value)]
        raise FormatError(
            f"{key_of(path)!r} is a {type(value).__name__} that contains a model or another stateful object: use a "
            "dict or a list"
        )

    def _object(self, value: Any, path: KeyPath) -> _Taken | None:
        key = key_of(path)
        if isinstance(value, torch.Generator):
            value = PerRank(value, on_change="keep")
        if isinstance(value, PerRank):
            return self._own(value)
        if models := _all(nn.Module | Stage, value):
            self._model_paths.append(path)

            def put_model(got: Any) -> None:
                report = set_model_state_dict(models, got)
                self.uninitialized += tuple(f"{key}.{name}" for name in report.uninitialized)

            return _Taken(get_model_state_dict(models), put_model)
        if optimizers := _all(Optimizer, value):
            found = self._models_of(optimizers, key)
            owners = [model for model, _ in found]
            options = _Options(
                strict=self._options.mode_of(f"{key}.state") != "partial",
                flatten_optimizer_state_dict=any(is_stage for _, is_stage in found),  # ranks have other groups each
                key=key,
                load=self._options,
            )

            def check(groups: Any) -> None:
                filled = {**reduce(getitem, path, self.state), "param_groups": groups}
                refuse_optimizers(owners, optimizers, filled, options)

            self._checks[*path, "param_groups"] = check
            self._optimizers.append((path, owners, optimizers))
            self._optimizer_paths.append(path)

            def put(got: Any) -> None:
                report = set_optimizer_state_dict(owners, optimizers, got, options=options)
                self.missing += tuple(f"{key}.state.{name}" for name in report.missing)
                odd = (name for name in (*report.unexpected, *report.unused) if not options.is_subset(name))
                self.unexpected += tuple(f"{key}.state.{name}" for name in odd)

            read = optimizer_to_restore if self._to_fill else get_optimizer_state_dict
            return _Taken(read(owners, optimizers, options=options), put)
        if is_object(value):
            state = self._stateful[path] = OwnState.of(value)
            return _Taken(state, partial(self._put_stateful, value))
        return None

    def _put_stateful(self, value: Any, got: Any) -> None:
        """Set the object. A scheduler's lists by param group follow the groups, which are
        identified by their parameters."""
        order = self._orders.get(id(getattr(value, "optimizer", None)))
        value.load_state_dict(got if order is None else in_order(got, order))

    def _own(self, wrapper: PerRank) -> _Taken | None:
        """Prepare an object with a value per rank. Asking a data loader for its state may start its
        workers, so this is done only if a value was loaded for it."""
        its = wrapper.value
        if isinstance(its, torch.Generator):
            get, put = its.get_state, its.set_state
        elif is_object(its):
            get, put = its.state_dict, its.load_state_dict
        else:
            return None
        held = replace(wrapper, value=None if self._to_fill else get())
        return _Taken(held, lambda got: got.value is None or put(got.value))

    def _models_of(self, optimizers: list[Any], key: str) -> list[tuple[nn.Module | Stage, bool]]:
        its = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        found = [
            (model, is_stage) for model, is_stage in self._models if any(id(p) in its for p in parameters_of(model))
        ]
        if not found:
            raise NormalizationError(
                f"{key!r} is an optimizer whose model is not in the state: optimizer state has the names of the "
                "model's parameters. Add the model: {'model': model, 'optim': optimizer}"
            )
        return found

    def _put(self, user: Any, filled: Any, above: str) -> None:
        places = user.items() if isinstance(user, Mapping) else enumerate(user)
        for key, value in list(places):
            name = f"{above}{key}"
            if (taken := self._taken.get(id(value))) is not None:
                self._give(taken, filled[key], name)
            elif is_object(value, within=True):
                self._put(value, filled[key], f"{name}.")
            else:
                user[key] = filled[key]

    def _give(self, taken: _Taken, state: Any, name: str) -> None:
        try:
            taken.put(state)
        except RankFailedError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, ReshardError) else f"{type(error).__name__}: "
            raise (type(error) if isinstance(error, ReshardError) else CheckpointError)(
                f"{name!r} could not be restored: {kind}{error}\nAlready overwritten: "
                f"{', '.join(['tensors that the state itself holds', *map(repr, self._done)])}. Not restored: "
                f"{name!r} and what follows it. To restore the rest, leave it out of the state and pass "
                'strict="subset", or give it the settings it was saved with'
            ) from error
        self._done.append(name)


def _all(kind: Any, value: Any) -> list[Any]:
    """Return a value of that kind, or a list of only such values: the stages of a pipeline, or
    their optimizers."""
    if isinstance(value, kind):
        return [value]
    is_list = isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)
    return list(value) if is_list else []


def saved_state(given: Any) -> Any:
    """Return what is saved of a state with models and other objects, and other values unchanged."""
    return LiveObjects(given).state if isinstance(given, MutableMapping) and is_object(given, within=True) else given


def parameters_of(value: Any) -> list[torch.Tensor]:
    """Return the parameters of a model or optimizer. Empty for other values."""
    if isinstance(value, nn.Module | Stage):
        return [*(value.module if isinstance(value, Stage) else value).parameters()]
    groups = value.param_groups if isinstance(value, Optimizer) else ()
    return [parameter for group in groups for parameter in group["params"]]


def refuse_objects(call: str, *states: Any) -> None:
    """Raise OptionError for a state with models or other objects, which `call` does not take."""
    if any(is_object(state, within=True) for state in states if not is_object(state)):
        raise OptionError(
            f"{call} takes state dicts, and no models or other objects: pass {{'model': "
            "reshard.get_model_state_dict(model)}, whose tensors are those of the model"
        )
