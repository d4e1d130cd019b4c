"""Get canonical state dicts from live models and optimizers, and set them again."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from reshard.arguments import renamed
from reshard.errors import NormalizationError
from reshard.live.garbage_collection import gc_paused
from reshard.live.optimizer_state import LazyOptimizerState, PartialState, flatten_optimizer, listed_in
from reshard.live.tensors import LiveTensor, is_sharded, this_rank, world_size
from reshard.live.tree import leaves_of
from reshard.state_dict.broadcast import expect_model, receive_optimizer, setting
from reshard.state_dict.collect import collect_model, collect_optimizer
from reshard.state_dict.gather import joint_ranks, place_of
from reshard.state_dict.live_model import LiveModel, Models
from reshard.state_dict.model import apply_model, part_of, plan_model, read_model
from reshard.state_dict.optimizer import apply_optimizers, check_kind, initial_state, plan_optimizers, read_optimizers
from reshard.state_dict.optimizer_parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.options import OptimizerReport, SetReport, StateDictOptions, as_options
from reshard.state_dict.saved_optimizer import StateKind, elsewhere_of, read_saved

Optimizers = Optimizer | Iterable[Optimizer]
_SWAPPED = "model_state_dict and optim_state_dict are swapped"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Disable autograd and garbage collection."""
    with gc_paused(), torch.no_grad():
        yield


@renamed()
@_quietly()
def get_model_state_dict(
    model: Models, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the model's state dict by FQN. Its tensors share memory with the model unless the
    options move or gather them.

    Args:
        model: a module with any wrappers and parallelisms that docs/normalization.md lists, or a list
            of modules (the pipeline stages of this rank).
        submodules: return only the state of these modules.
        options: a `StateDictOptions`.

    Raises:
        NormalizationError: two tensors have the same FQN.
    """
    opts = as_options(options)
    live = LiveModel(model, opts.dsd_fqn_modifiers)
    return collect_model(_model_state(live, submodules, opts), opts)


@renamed()
@_quietly()
def get_optimizer_state_dict(
    model: Models,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of one or more optimizers by FQN, without stepping or initializing them.

    Args:
        model: as in `get_model_state_dict`.
        optimizers: an optimizer, or a list of optimizers.
        submodules: return only the state of the parameters of these modules.
        options: a `StateDictOptions`.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [{field: value, "params": [fqn]}]}`, or the
        flat form. A parameter that never had a gradient is in its group, but not in `state`.
        Parameters outside the model are called `outside_model.<optimizer>.<group>.<position>`. If no
        parameter has state, `reshard.load` can still fill the dict. It allocates the state that the
        checkpoint has.

    Raises:
        NormalizationError: a parameter is in two optimizers, or two tensors of the model have the
            same FQN.
    """
    opts = as_options(options)
    live = LiveModel(model, opts.dsd_fqn_modifiers)
    return _optimizer_state(LiveOptimizers(live, optimizers), submodules, opts)


@renamed()
@_quietly()
def get_state_dict(
    model: Models,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of a model and its optimizers, by FQN.

        model_state, optim_state = reshard.get_state_dict(model, optimizer)
        reshard.save({"model": model_state, "optim": optim_state}, "checkpoint")

    Args:
        model: as in `get_model_state_dict`.
        optimizers: an optimizer, or a list of optimizers.
        submodules: return only the state of these modules.
        options: a `StateDictOptions`.

    Returns:
        The results of `get_model_state_dict` and `get_optimizer_state_dict`.
    """
    opts = as_options(options)
    live = LiveModel(model, opts.dsd_fqn_modifiers)
    live_optimizers = LiveOptimizers(live, optimizers)
    model_state = collect_model(_model_state(live, submodules, opts), opts)
    return model_state, _optimizer_state(live_optimizers, submodules, opts)


@renamed()
@_quietly()
def set_model_state_dict(
    model: Models, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> SetReport:
    """Copy a state dict into the model. The dict does not change, and shares no memory with the
    model.

    Each rank shards full tensors by itself. Sharded tensors are copied if both sides have the same
    layout. Otherwise, they are gathered one at a time. Of a tied tensor, the dict needs only one FQN.

    Args:
        model: as in `get_model_state_dict`.
        model_state_dict: values by FQN, as `get_model_state_dict` returns them.
        options: a `StateDictOptions`.

    Returns:
        A `SetReport`. It unpacks to (missing_keys, unexpected_keys), as torch's result does.

    Raises:
        KeyMismatchError: FQNs are missing or unexpected (if strict), or values do not fit. The
            message lists all of them. Nothing was changed.
    """
    return _set("model", model, (), model_state_dict, {}, options)[0]


@renamed()
@_quietly()
def set_optimizer_state_dict(
    model: Models,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> OptimizerReport:
    """Replace the state of the optimizers by that of a dict, nested or flat.

    State keeps its saved dtype. Group fields keep the type that they have in the optimizer: a float
    lr stays a float. Fields that the dict lacks keep their values. Parameters that were saved without
    state have none afterwards.

    Args:
        model: as in `get_model_state_dict`.
        optimizers: an optimizer, or a list of optimizers.
        optim_state_dict: a dict as `get_optimizer_state_dict` returns it.
        options: a `StateDictOptions`.

    Raises:
        KeyMismatchError: a state tensor has a wrong shape. If strict, also if the dict lacks a
            parameter, has state for a parameter that the model does not have, or has any state
            although there is no optimizer. Nothing was changed.
        NormalizationError: the saved groups contradict those of the optimizer, or the dict has an
            unknown form.
    """
    return _set("optimizers", model, optimizers, {}, optim_state_dict, options)[1]


@renamed()
@_quietly()
def set_state_dict(
    model: Models,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> SetReport:
    """Set the model and its optimizers. Both are checked before either is written.

    If you loaded into the result of `get_model_state_dict`, the load has already filled the model,
    even if this call raises.

    Args:
        model: as in `get_model_state_dict`.
        optimizers: an optimizer, or a list of optimizers.
        model_state_dict: as in `set_model_state_dict`. An empty dict leaves the model unchanged.
        optim_state_dict: as in `set_optimizer_state_dict`.
        options: a `StateDictOptions`.

    Returns:
        The report of `set_model_state_dict`. Its `optimizer` is the report of
        `set_optimizer_state_dict`.

    Raises the errors of both. In that case nothing was changed, except by a module's own
    `load_state_dict` or hooks, which run first.
    """
    report, optimizer = _set("both", model, optimizers, model_state_dict, optim_state_dict, options)
    return replace(report, optimizer=optimizer)


@_quietly()
def optimizer_to_restore(model: Models, optimizers: Optimizers, options: StateDictOptions) -> dict[str, Any]:
    """Return a state dict to load into. After the load, only parameters with saved state have
    state, and those whose state the options allow to be missing."""
    return _optimizer_state(LiveOptimizers(LiveModel(model), optimizers), None, options, forgets=True)


def refuse_optimizers(
    model: Models, optimizers: Optimizers, given: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Raise NormalizationError if an optimizer would refuse saved param groups, and
    KeyMismatchError if required state is missing.

    Changes nothing.
    """
    live = LiveOptimizers(LiveModel(model), optimizers)
    plan_optimizers(live, {"param_groups": given["param_groups"]}, options)
    check_kind(live, read_saved(given, live), options)


def group_orders(
    model: Models, optimizers: Optimizers, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Optimizer, list[int]]]:
    """Yield each optimizer whose param groups were saved in a different order, with the saved
    position of each of its groups."""
    live = LiveOptimizers(LiveModel(model), optimizers)
    places: list[dict[int, int]] = [{} for _ in live.optimizers]
    for place, group in enumerate(groups):
        for name in group.get("params", ()):
            if (one := live.by_name.get(name)) is not None:
                places[one.optimizer].setdefault(one.group, place)
    for optimizer, found in zip(live.optimizers, places):
        saved = sorted(found.values())
        order = [saved.index(found[g]) for g in sorted(found)]
        if len({*saved}) == len(optimizer.param_groups) and order != sorted(order):
            yield optimizer, order


def _set(
    what: Literal["model", "optimizers", "both"],
    model: Models,
    optimizers: Optimizers,
    of_model: Mapping[Any, Any],
    of_optimizers: Mapping[str, Any],
    options: StateDictOptions | None,
) -> tuple[SetReport, OptimizerReport]:
    """Check everything before anything is written. If both are set, an empty dict for the model
    leaves it unchanged."""
    opts = as_options(options)
    receives = opts.broadcast_from_rank0 and world_size() > 1
    with setting(opts, together=((),) if receives else ()):
        live = LiveModel(model, opts.dsd_fqn_modifiers)
        live_optimizers = None if what == "model" else LiveOptimizers(live, optimizers)
        of_model = {} if receives and this_rank() else _by_name(live, of_model)
        if {*of_model} == {"state", "param_groups"}:
            raise NormalizationError(
                "model_state_dict has 'state' and 'param_groups', as the state dict of an optimizer has: "
                f"{_SWAPPED if what == 'both' and 'state' not in of_optimizers else 'use set_optimizer_state_dict'}"
            )
    writes = None
    if receives:
        of_model, fill = ({}, None) if what == "optimizers" else expect_model(live, of_model, opts)
        writes = None if live_optimizers is None else receive_optimizer(live_optimizers, of_optimizers, opts)
        if fill is not None:
            fill()
    has_model = what == "model" or (what == "both" and bool(of_model))
    shared = [*_shared(live, of_model, opts)] if world_size() > 1 else []
    if live_optimizers is not None and writes is None and world_size() > 1:
        shared += _moved_state(live_optimizers, of_optimizers)
    with setting(opts, together=joint_ranks(shared)):
        model_writes = plan_model(live, of_model, opts) if has_model else None
        if live_optimizers is not None and writes is None:
            writes = plan_optimizers(live_optimizers, of_optimizers, opts)
    report = SetReport(model_unchanged=True) if model_writes is None else apply_model(model_writes, opts.strict)
    if live_optimizers is None or writes is None:
        return report, OptimizerReport()
    if has_model:
        _refuse_replaced(live, live_optimizers)
    return report, apply_optimizers(live_optimizers, writes, of_model)


def _refuse_replaced(live: LiveModel, optimizers: LiveOptimizers) -> None:
    """Raise NormalizationError if a parameter on the meta device was replaced by a new one, because
    other references to it exist."""
    for one in (one for own in optimizers.parameters for one in own if one.parameter.is_meta):
        slot = live.by_name.get(one.name)
        if slot is not None and getattr(slot.owner, slot.attr) is not one.parameter:
            raise NormalizationError(
                f"the model has a new parameter {one.name!r}, because a weak reference to the one on the meta device "
                "kept it from being filled, and the optimizer still has the old one. The model is set, but the "
                "optimizer is not: create it again, and set its state by set_optimizer_state_dict"
            )


def _shared(live: LiveModel, given: Mapping[str, Any], options: StateDictOptions) -> Iterator[Any]:
    """Yield the device meshes and process groups whose ranks set values together: full tensors into
    a sharded model, or tensors that are sharded differently. If one rank refuses, all must."""
    for slot in live.slots if options.full_state_dict else ():
        if slot.piece is not None:
            yield slot.piece.group
        elif is_sharded(slot.value):
            yield place_of(slot.value)
    for name, value in given.items():
        found = live.by_name.get(name) if is_sharded(value) else None
        target = None if found is None or found.value is None else found.tensor()
        if target is not None and not LiveTensor("", value).is_sharded_like(LiveTensor("", target)):
            yield place_of(value)


def _moved_state(live: LiveOptimizers, given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the device meshes and process groups of optimizer state that is sharded differently
    from the live state."""
    for path, value in leaves_of(given).items():
        name = ".".join(map(str, path)).removeprefix("state.") if is_sharded(value) else ""
        while name and name not in live.by_name:
            name = name.rpartition(".")[0]
        if name and not live.by_name[name].may_hold(value, live.optimizers):
            yield place_of(value)


def _model_state(live: LiveModel, submodules: Iterable[nn.Module] | None, options: StateDictOptions) -> dict[str, Any]:
    state = read_model(live, whole=options.full_state_dict)
    if options.ignore_frozen_params:
        frozen = {
            slot.name for slot in live.of_kind("parameter") if slot.value is not None and not slot.value.requires_grad
        }
        state = {name: value for name, value in state.items() if name not in frozen and not part_of(name, frozen)}
    if submodules:
        state = {short: state[name] for short, name in _of_modules(live, submodules, state, options).items()}
    return state


def _optimizer_state(
    live: LiveOptimizers,
    submodules: Iterable[nn.Module] | None,
    options: StateDictOptions,
    *,
    forgets: bool = False,
) -> dict[str, Any]:
    whole = read_optimizers(live)
    names = whole["state"] if forgets else ()
    forgotten = {name for name in names if name in live.by_name and options._refuses(name, is_missing=True)}
    kept = {name: values for name, values in whole["state"].items() if name not in forgotten}
    cold = _without_state({"state": kept}, live)
    made = initial_state(live) if options.in_chunks and not submodules else {}
    whole["state"].update(made)
    offered = {*made, *forgotten}
    elsewhere = {} if options.full_state_dict else elsewhere_of(live, whole["state"], options)
    if submodules:
        found = _of_modules(live.live, submodules, live.by_name, options)
        short = {live.by_name[name].name: short for short, name in found.items()}  # of a tied parameter: its first name

        def shortened(named: Mapping[str, Any]) -> dict[str, Any]:
            return {short[name]: value for name, value in named.items() if name in short}

        cold, elsewhere = shortened(cold), shortened(elsewhere)
        whole = {
            "state": shortened(whole["state"]),
            "param_groups": [
                {**group, "params": [short[name] for name in group["params"] if name in short]}
                for group in whole["param_groups"]
            ],
        }
    whole = collect_optimizer(whole, live, options)
    if not whole:
        return {}
    out = _in_form(whole, elsewhere, options)
    if not cold:
        return out
    with_state = whole["state"].keys() - offered
    named = set(listed_in(whole["param_groups"]))
    listed = named - with_state
    if options.flatten_optimizer_state_dict:
        # to distinguish it from lost state
        keeps = [StateKind(optimizer).keeps_state and bool(whole["state"]) for optimizer in live.optimizers]
        lacking = listed - offered
        out.update({f"state.{name}": {} for name, one in cold.items() if name in lacking and keeps[one.optimizer]})
    cold = {n: one for n, one in cold.items() if one.name in (named if live.loads_itself[one.optimizer] else listed)}
    return _awaiting(out, cold, offered, options, live.may_have_own) if cold and not submodules else out


def _in_form(whole: dict[str, Any], elsewhere: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    if options.flatten_optimizer_state_dict:
        flat = flatten_optimizer(whole)
        return PartialState(flat, elsewhere) if elsewhere else flat
    return {**whole, "state": PartialState(whole["state"], elsewhere)} if elsewhere else whole


def _without_state(whole: dict[str, Any], live: LiveOptimizers) -> dict[str, OptimizedParameter]:
    """Return the parameters that never had a gradient, under all their names. Omits those without
    elements on this rank. For optimizers that load their own state, returns all parameters: they
    may have created only a part of their state."""
    if not any(live.loads_itself) and live.by_name.keys() <= whole["state"].keys():
        return {}
    found = {
        name: one
        for name, one in live.by_name.items()
        if one.name not in whole["state"] or live.loads_itself[one.optimizer]
    }
    return {name: one for name, one in found.items() if one.piece is None or one.piece.is_here or not whole["state"]}


def _awaiting(
    state: dict[str, Any],
    cold: Mapping[str, OptimizedParameter],
    offered: Container[str],
    options: StateDictOptions,
    has_own: bool,
) -> dict[str, Any]:
    """Return the optimizer's state dict in a form into which a load can add state for the
    parameters in `cold`."""
    parameters: dict[str, Any] = {}
    for one in cold.values():
        if options.full_state_dict:
            parameters[one.name] = torch.empty(one.shape, dtype=one.parameter.dtype, device="meta")
        else:
            parameters[one.name] = one.parameter.detach() if one.piece is None else one.piece.value()
    if options.flatten_optimizer_state_dict:
        return LazyOptimizerState(state, parameters, offered, has_own=has_own)
    return {**state, "state": LazyOptimizerState(state["state"], parameters, offered, has_own=has_own)}


def _of_modules(
    live: LiveModel, modules: Iterable[nn.Module], names: Iterable[str], options: StateDictOptions
) -> dict[str, str]:
    """Return {name to return: full name} for the names that belong to the modules."""
    found: dict[str, str] = {}
    pairs = ((prefix, name) for prefix in live.prefixes(modules) for name in names if name.startswith(prefix))
    for prefix, name in pairs:
        short = name if options.keep_submodule_prefixes else name.removeprefix(prefix)
        if (other := found.setdefault(short, name)) != name:
            raise NormalizationError(
                f"{other!r} and {name!r} would both be called {short!r}: get one submodule at a time, or pass "
                "keep_submodule_prefixes=True"
            )
    return found


def _by_name(live: LiveModel, given: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the dict by full names. Accepts torch's form {submodule: its state dict}, too."""
    if not isinstance(given, Mapping):
        raise NormalizationError(
            f"a model state dict must be a mapping, got {type(given).__name__}. To set a checkpoint, load it: "
            "state = reshard.get_model_state_dict(model); reshard.load(state, path)"
        )
    if not any(isinstance(key, nn.Module) for key in given):
        return given
    return {
        prefix + name: value
        for module, state in given.items()
        for prefix in live.prefixes([module])[:1]
        for name, value in state.items()
    }
