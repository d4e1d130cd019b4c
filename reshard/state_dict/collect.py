"""Builds state dicts as the options request: full, on the CPU, on one rank. Also yields full
tensors one by one.

Before a gather, the ranks compare the names to gather. If some rank lacks a name, all ranks raise
an error instead of waiting forever.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from planners.geometry.arrays import grouped
from reshard.arguments import renamed
from reshard.errors import NormalizationError, format_ranks
from reshard.live.copy_streams import to_host
from reshard.live.deepspeed import gather_partitioned, is_partitioned
from reshard.live.dtypes import lacks_memory
from reshard.live.fsdp1 import fill_absent
from reshard.live.tensors import (
    OVERWRITTEN_BY,
    LiveTensor,
    global_shape,
    is_dtensor,
    is_sharded,
    mark_overwritten,
    resolved_bytes,
    this_rank,
    with_local,
    world_size,
)
from reshard.live.tree import copy_containers, leaves_of, map_leaves
from reshard.ranks.group import Group, digest_of
from reshard.state_dict.gather import as_chunks, gather, joint_ranks, member_ranks, place_of, ranks_of
from reshard.state_dict.live_model import LiveModel, Models
from reshard.state_dict.model import read_model
from reshard.state_dict.optimizer_parameters import LiveOptimizers
from reshard.state_dict.options import StateDictOptions, as_options
from reshard.state_dict.saved_optimizer import is_zero_redundancy


def collect_model(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Return the state dict that the options request. With `full_state_dict`, this is collective
    and returns a new dict.
    """
    if not options.full_state_dict:
        state = as_chunks(state) if options.in_chunks else state
        return dict(zip(state, _all_to_cpu(list(state.values())))) if options.cpu_offload else state
    asked = options._shared()
    owner = _owners(state, asked) if options.cpu_offload else None
    agree_on_gathering(state, asked)
    whole = {name: _whole(state[name], name, owner) for name in sorted(state)}
    return {name: whole[name][0] for name in state if whole[name]}


def collect_optimizer(state: dict[str, Any], live: LiveOptimizers, options: StateDictOptions) -> dict[str, Any]:
    """Return the nested optimizer state dict that the options request, or {} if only another rank
    returns it.
    """
    if not options.full_state_dict:
        state = _optimizer_chunks(state, live) if options.in_chunks and live.live.pieces_of else state
        return _nest_to_cpu(state) if options.cpu_offload else state
    if live.live.pieces_of:
        state = {**state, "state": fill_absent(state["state"], live.pieces)}
    names = dict.fromkeys([*state["state"], *(name for group in state["param_groups"] for name in group["params"])])
    owner = _owners(names, options._shared()) if options.cpu_offload else None
    mine = {name for name in names if owner is None or owner(name) == this_rank()}
    for k, optimizer in enumerate(live.optimizers):
        if is_zero_redundancy(optimizer):
            state = {**state, "state": _state_of_all_ranks(state["state"], live, k, mine, options)}
    tensors = _tensors_in(state["state"])
    # other ranks may have state for parameters without state here
    places = {name: one.place for name in names if (one := live.by_name.get(name)) and one.place is not None}
    unsharded = _unsharded(state["state"], places)
    agree_on_gathering(tensors, options._shared(), places=places.values(), unsharded=unsharded)
    # ranks may iterate parameters in different orders, but must gather in the same one
    name_of = {_text(path): path[0] for path in leaves_of(state["state"])}
    whole = {path: _whole(tensors[path], name_of[path], owner) for path in sorted(tensors)}
    if names and not mine:
        return {}
    move = _nest_to_cpu if options.cpu_offload else copy_containers
    groups = [{**move(g), "params": [n for n in g["params"] if n in mine]} for g in state["param_groups"]]
    kept = [group for group, old in zip(groups, state["param_groups"]) if group["params"] or not old["params"]]
    held = {name: values for name, values in state["state"].items() if name in mine}
    found = {path: value for path, values in whole.items() for value in values}
    return {"state": _with_tensors(held, found), "param_groups": kept}


def _state_of_all_ranks(
    state: dict[str, Any], live: LiveOptimizers, k: int, mine: Container[str], options: StateDictOptions
) -> dict[str, Any]:
    """Return the state with the parts of `mine` that other ranks have, added in rank order.
    Collective over the process group of a ZeroRedundancyOptimizer."""
    optimizer: Any = live.optimizers[k]
    parameters = {one.name: one.parameter for one in live.parameters[k]}
    own = {name: values for name, values in state.items() if name in parameters}
    found = dict(state)
    for rank in _meeting(options._shared(), optimizer.process_group).ranks:
        devices = {path: tensor.device.type for path, tensor in _tensors_in(own).items()}
        sent: list[Any] = [(_nest_to_cpu(own), devices) if rank == this_rank() else None]
        dist.broadcast_object_list(sent, src=rank, group=optimizer.process_group)
        theirs, there = sent[0]
        for name, values in theirs.items():
            if name in mine and name not in found:
                tensors = _tensors_in({name: values})
                to = {path: "cpu" if there[path] == "cpu" else parameters[name].device for path in tensors}
                placed = {path: tensor.to(to[path]) for path, tensor in tensors.items()}
                found |= _with_tensors({name: values}, placed)
    order = {name: number for number, name in enumerate(parameters)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _optimizer_chunks(state: dict[str, Any], live: LiveOptimizers) -> dict[str, Any]:
    filled = fill_absent(state["state"], live.pieces)
    # in the same order on all ranks, because they are gathered in this order
    names = dict.fromkeys([*(name for name in live.by_name if name in filled), *filled])
    chunks = as_chunks(_tensors_in(filled))
    return {**state, "state": _with_tensors({name: filled[name] for name in names}, chunks)}


@renamed()
def iter_full(
    model: Models,
    *,
    to_rank: int | None = None,
    cpu_offload: bool = True,
    options: StateDictOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (FQN, full value) pairs one at a time, in the order of the FQNs.

    Collective if the model is sharded: every rank must iterate to the end. In addition to the model's
    own memory, a rank holds at most one gathered tensor at a time and, while it gathers, the shards of
    that tensor.

    Args:
        model: a module, or a list of modules.
        to_rank: yield only on this rank of the default group. On other ranks, the iterator is empty,
            but they must also iterate to the end. If this rank does not hold a tensor, such as one of
            another pipeline stage, the lowest rank that holds it yields it.
        cpu_offload: yield tensors on the CPU.
        options: a `StateDictOptions`.
        process_group: the ranks that call this. Default: all. All ranks that hold shards of this
            rank's model must be members. Other ranks of the job need not take part.

    Raises:
        NormalizationError: on all ranks, if a rank lacks a tensor that it should gather with others,
            or if such a rank or `to_rank` is not in `process_group`.
    """
    opts = as_options(options)
    with torch.no_grad():
        state = read_model(LiveModel(model, opts.dsd_fqn_modifiers), whole=True)
    asked = {**vars(opts), "to_rank": to_rank}
    owner = _owners(state, asked, prefer=to_rank, process_group=process_group) if to_rank is not None else None
    agree_on_gathering(state, asked, process_group)
    for name in sorted(state):
        with torch.no_grad():
            found = _whole(state.pop(name), name, owner)
        if found:
            yield name, _to_cpu(found.pop()) if cpu_offload else found.pop()


def agree_on_gathering(
    tensors: Mapping[str, Any],
    options: Mapping[str, object],
    process_group: dist.ProcessGroup | None = None,
    *,
    places: Iterable[Any] = (),
    unsharded: Iterable[_Row] = (),
) -> None:
    """Check that every rank that holds a part of a tensor is about to gather it,
    and that `unsharded` values are equal.

    Collective over `process_group`, if any tensor is sharded; by default, over the ranks that the
    sharded tensors, and other `places`, are on. Raises NormalizationError, the same on all ranks,
    that names the tensor and the ranks. Raises LayoutError if ranks use different options.
    """
    sharded = sorted((name, value) for name, value in tensors.items() if is_sharded(value))
    mine: list[_Row] = [(name, list(global_shape(value)), member_ranks(value)) for name, value in sharded]
    mine += unsharded
    if process_group is None:
        for ranks in joint_ranks([*places, *(place_of(value) for _, value in sharded)]):
            _compare([row for row in mine if {*row[2]} <= {*ranks}], _meeting(options, ranks=ranks))
    elif sharded:
        _compare(mine, _meeting(options, process_group))


_Row = tuple[str, list[int] | bytes, list[int]]
"""A name, the shape of a sharded tensor or the digest of another value,
and the ranks that have it."""


def _unsharded(state: Mapping[str, Any], places: Mapping[str, Any]) -> Iterator[_Row]:
    """State of sharded parameters that is not sharded:
    the full state dict has one value for all ranks."""
    for path, leaf in leaves_of(state).items():
        data = repr(leaf).encode() if isinstance(leaf, bool | int | float | str) else b""
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not (leaf.is_meta or lacks_memory(leaf)):
            data = resolved_bytes(leaf).cpu().numpy().tobytes()
        if data and path[0] in places:
            yield _text(path), digest_of(data), ranks_of(places[path[0]])


def _compare(mine: list[_Row], group: Group) -> None:
    answers = group.distinct_answers(mine)
    for name, _, ranks in (row for held, _ in answers for row in held):
        if outside := set(ranks).difference(group.ranks):
            raise NormalizationError(
                f"{name!r} is sharded over ranks {ranks}, but {format_ranks(outside)} are not in process_group: "
                "pass a group of all ranks that hold the model"
            )
    if len(answers) == 1:
        return
    parties = [({name: (shape, ranks) for name, shape, ranks in held}, who) for held, who in answers]
    holders = {rank: held for held, who in parties for rank in who}
    for held, who in parties:
        for name, (shape, ranks) in held.items():
            lacking = [rank for rank in ranks if name not in holders[rank]]
            other = next((rank for rank in ranks if holders[rank].get(name, (shape,))[0] != shape), None)
            if isinstance(shape, bytes):
                if other is not None:
                    raise NormalizationError(
                        f"{name!r} is not sharded, and rank {other} has another value than {format_ranks(who)}: leave "
                        "full_state_dict out, and wrap what differs on purpose in reshard.PerRank"
                    )
            elif lacking:
                raise NormalizationError(
                    f"{name!r} is sharded over ranks {ranks}, but ranks {lacking} do not have it: all ranks of a mesh "
                    "must hold the same state to gather it"
                )
            elif other is not None:
                raise NormalizationError(
                    f"{name!r} has shape {tuple(shape)} on some ranks and {tuple(holders[other][name][0])} "
                    f"on rank {other}"
                )


def _meeting(
    options: Mapping[str, object], process_group: dist.ProcessGroup | None = None, ranks: tuple[int, ...] = ()
) -> Group:
    """Return a group of all ranks, after checking that they use the same options. Different options
    raise an error here, so that no rank mistakes the values of another gather for its own.
    """
    group = Group(process_group, ranks=ranks)
    group.same_options("the getters of state dicts", options)
    return group


def _owners(
    names: Iterable[str],
    options: Mapping[str, object],
    prefer: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Callable[[str], int]:
    """Return which rank returns each name: `prefer` if it holds it, otherwise the lowest rank that
    does.
    """
    if world_size() == 1:
        return lambda name: 0
    group = _meeting(options, process_group)
    if prefer not in group.ranks:
        raise NormalizationError(f"to_rank={prefer} is not among the ranks of this call, {format_ranks(group.ranks)}")
    answers = group.distinct_answers(sorted(names))
    if len(answers) == 1:
        return lambda name: prefer
    holders = grouped((name, rank) for held, ranks in answers for name in held for rank in ranks)
    return {name: min(ranks, key=lambda rank: (rank != prefer, rank)) for name, ranks in holders.items()}.__getitem__


def _whole(value: Any, name: str, owner: Callable[[str], int] | None) -> list[Any]:
    """Return [the full value], or [] on ranks that do not return it."""
    if is_partitioned(value):
        mine = owner is None or owner(name) == this_rank()
        found = gather_partitioned(value, keep=mine)
        return [found if owner is None else _to_cpu(found)] if mine else []
    if owner is None:
        return [gather(LiveTensor(name, value))]
    goal = owner(name)
    if not is_sharded(value):
        return [_to_cpu(value)] if goal == this_rank() else []
    if goal not in member_ranks(value):
        return []  # the owner has this name on another mesh, and gathers it there
    found = gather(LiveTensor(name, value), to_rank=goal)
    return [] if found is None else [_to_cpu(found)]


def _to_cpu(value: Any) -> Any:
    return _all_to_cpu([value])[0]


def _all_to_cpu(values: Sequence[Any]) -> list[Any]:
    """Copy this rank's elements of tensors to the CPU. Other values are returned unchanged."""
    held = [
        value.to_local() if is_dtensor(value) else value if isinstance(value, torch.Tensor) else None
        for value in values
    ]
    plain = [i for i, local in enumerate(held) if local is not None and local.device.type != "cpu"]
    out = list(values)
    for i, local in zip(plain, to_host([held[i].detach() for i in plain])):  # type: ignore[union-attr]
        rank = getattr(values[i], OVERWRITTEN_BY, None)
        local = local if rank is None else mark_overwritten(local, rank)
        out[i] = with_local(values[i], local) if is_dtensor(values[i]) else local
    return out


def _nest_to_cpu(nest: dict[str, Any]) -> Any:
    tensors = _tensors_in(nest)
    return _with_tensors(nest, dict(zip(tensors, _all_to_cpu(list(tensors.values())))))


def _tensors_in(nest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors inside containers by their paths, as text: the parent's name and the
    key."""
    return {_text(path): leaf for path, leaf in leaves_of(nest).items() if isinstance(leaf, torch.Tensor)}


def _with_tensors(nest: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """Return copies of the containers with other tensors in the places of `_tensors_in`."""
    return map_leaves(lambda path, leaf: tensors.get(_text(path), leaf), nest)


def _text(path: Sequence[Any]) -> str:
    return "/".join([path[0], *map(repr, path[1:])])
