"""Megatron's distributed optimizers: flat buffers split into parameters again, and param groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planners.geometry.box import Shape
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import Canonical, Groups, Hints, Shapes, States, Tensors, settings_of
from reshard.formats.dcp.reader import DcpFacts
from reshard.formats.megatron.names import (
    Grid,
    chunk_names,
    is_expert,
    is_vocabulary,
    join_by_name,
    local_shape,
    orders,
    tp_dim,
)
from reshard.formats.torch_save.pickles import TensorRef
from reshard.formats.torch_save.reader import TorchFile, stored_tensor
from reshard.live.dtypes import dtype_name
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import cut

# optimizer.distributed.dp_group_idx_0.param_state/shard_0_1
#     [{0: {(param dtype, grad dtype): {param: flat, exp_avg: flat, exp_avg_sq: flat, numel_unpadded: n}}}]


_ByGrid = dict[str, dict[tuple[int, int], Tensors]]
_GATHERED_KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.param_state/shard_0_1"
)
BufferKey = tuple[str, int, int, str]
"""Chained optimizer, group of ranks, number of the buffer, and dtype of its parameters."""


def gathered_buffers(contents: Contents) -> Iterator[tuple[BufferKey, Tensors]]:
    """Yield the flat tensors of every buffer by state. Only the objects' pickles are read.

    Raises CorruptCheckpointError if Megatron cannot have written an object, FormatError for the
    form used before 2024.
    """
    facts = contents.known(DcpFacts)
    for key in contents.objects:
        match = _GATHERED_KEY.fullmatch(key)
        if match is None:
            continue
        file = facts.object_file(key)
        value = file.value[0] if isinstance(file.value, list | tuple) and len(file.value) == 1 else file.value
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{file.source.label}: the object {key!r} holds no optimizer states")
        for number in sorted(n for n in value if type(n) is int):
            for dtypes, flats in value[number].items():
                if not isinstance(flats, dict) or not value.get("buckets_coalesced"):
                    raise FormatError(
                        f"{file.source.label}: the buckets of {key!r} are saved apart, as Megatron-core did "
                        "before 0.7; load and save the checkpoint with a newer one"
                    )
                dtype = dtype_name(dtypes[0]) if isinstance(dtypes, tuple) else str(dtypes).removeprefix("torch.")
                yield (
                    (match["chained"] or "", int(match["group"]), number, dtype),
                    {str(k): _flat(f"{key}.{k}", file, v) for k, v in flats.items() if isinstance(v, TensorRef)},
                )


def _flat(key: str, file: TorchFile, ref: Any) -> StoredTensor:
    if len(ref.size) != 1:
        raise CorruptCheckpointError(f"{file.source.label}: {key!r} has shape {list(ref.size)}, but should be flat")
    return stored_tensor(key, file, ref)


# The buckets of Megatron's distributed optimizer (`dp_reshardable`), split into parameters again.
#
# Each model parallel rank has a flat buffer per chunk of the model and dtype, divided into buckets.
# Parameters are in reverse order of registration, and each begins at a multiple of 64 elements.
# Names are not stored ("-" is padding):
#
#     bucket_idx_0:  | output_layer.weight      | final_layernorm.weight | - | ...linear_fc2.weight  | - |
#                    0                        768                      792 832                     1504
#
# So the order is inferred from the model: from the order of its saved keys, or that of Megatron's own
# layers. An order is accepted only if every parameter fits and fills the buckets. If none is, pass
# the hint "param_order".
#
# Older versions (`dp_zero_gather_scatter`) joined the buckets of a buffer, without the padding at
# their ends, into one flat tensor in an object: see `gathered_buffers`.


_KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)


@dataclass
class _Buffer:
    """The buckets of one flat buffer, by state."""

    buckets: dict[int, Tensors] = field(default_factory=dict)
    limit: int | None = None
    """Number of elements that filled a bucket, if the buckets of the buffer were joined."""

    def lengths(self) -> list[int]:
        if sorted(self.buckets) != list(range(len(self.buckets))):
            raise CorruptCheckpointError(f"the buckets {sorted(self.buckets)} of a buffer are not all there")
        return [next(iter(self.buckets[b].values())).spec.numel for b in sorted(self.buckets)]

    def starts(self, bucket: int) -> set[int]:
        """Return where chunks begin in a bucket."""
        return {chunk.box.offsets[0] for chunk in next(iter(self.buckets[bucket].values())).chunks}


_Buffers = dict[BufferKey, _Buffer]


def cut_buckets(contents: Contents, model: Tensors, args: Mapping[str, Any], hints: Hints) -> States:
    """Return the states of all parameters in buckets; {} if there are none. `model` is in the order
    in which it was saved.

    Raises NormalizationError if no known order fits, and CorruptCheckpointError if ranks are
    missing.
    """
    buffers = _buffers(contents, args)
    if not buffers:
        return {}
    keys = list(model)
    locals_: _ByGrid = {}
    for chained in sorted({key[0] for key in buffers}):
        mine = {key: buffer for key, buffer in buffers.items() if key[0] == chained}
        grid = Grid.of(
            args, groups=len({key[1] for key in mine}), experts=_is_expert_part(chained, buffers, args), hints=hints
        )
        _check_groups(mine, grid)
        _cut_part(mine, grid, keys, model, hints, locals_)
    return _join(locals_, model, hints)


def _buffers(contents: Contents, args: Mapping[str, Any]) -> _Buffers:
    out: _Buffers = {}
    for key in contents.tensors:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        at = (match["chained"] or "", int(match["group"]), int(match["buffer"]), match["dtype"])
        out.setdefault(at, _Buffer()).buckets.setdefault(int(match["bucket"]), {})[match["state"]] = contents.tensors[
            key
        ]
    for place, flats in gathered_buffers(contents):
        if flats:
            out[place] = _Buffer({0: flats}, bucket_limit(args))
    return out


def _is_expert_part(chained: str, buffers: _Buffers, args: Mapping[str, Any]) -> bool | None:
    """Return whether an optimizer of several has the experts' parameters; None if there is one for all."""
    if int(args.get("expert_model_parallel_size") or 1) == 1:
        return None
    parts = sorted({key[0] for key in buffers})
    return None if len(parts) == 1 else chained == parts[-1]


def _check_groups(buffers: _Buffers, grid: Grid) -> None:
    found = {key[1] for key in buffers}
    missing = sorted(set(range(grid.size)) - found)
    if missing:
        raise CorruptCheckpointError(
            f"the optimizer states of model parallel rank {missing[0]} are missing: there are those of "
            f"{sorted(found)}, but the model was sharded for {grid}"
        )


def _cut_part(
    buffers: _Buffers,
    grid: Grid,
    keys: Sequence[str],
    model: Tensors,
    hints: Hints,
    out: _ByGrid,
) -> None:
    """Add the local parts of every parameter, by (tensor parallel, expert parallel) rank."""
    shapes = {name: tensor.spec.shape for name, tensor in model.items()}
    for group in sorted({key[1] for key in buffers}):
        tp, ep, pp = grid.coordinates(group)
        for dtype in sorted({key[3] for key in buffers if key[1] == group}):
            mine = [buffers[key] for key in sorted(buffers) if key[1] == group and key[3] == dtype]
            for chunk, buffer in enumerate(mine):
                names = chunk_names(keys, grid, pp, chunk, len(mine), ep)
                typed = [name for name in names if model[name].spec.dtype == dtype]
                for slot in _find_slots(buffer, typed, shapes, grid, hints):
                    local = _local_shape(slot.name, shapes, grid, hints)
                    for state, bucket in buffer.buckets[slot.bucket].items():
                        part = cut(bucket, slot.start, local, f"{slot.name}.{state}")
                        out.setdefault(slot.name, {}).setdefault((tp, ep), {})[state] = part


def _local_shape(name: str, shapes: Shapes, grid: Grid, hints: Hints) -> Shape:
    return local_shape(shapes[name], tp_dim(name, hints, grid.tp), grid.tp, name)


def _find_slots(buffer: _Buffer, names: Sequence[str], shapes: Shapes, grid: Grid, hints: Hints) -> list[BufferSlot]:
    """Return where the parameters `names` are, by the first order in which they fill the buckets exactly."""
    numels = {n: math.prod(_local_shape(n, shapes, grid, hints)) for n in names}
    for grouped in dict.fromkeys((grid.grouped, None)):  # options may be wrong about the experts
        candidates = list(orders(names, hints, grouped))
        if fitting := _fitting(candidates, numels, buffer):
            break
    else:
        hints.missing(
            "param_order",
            f"the optimizer states are in buckets of {buffer.lengths()} elements without names, and the {len(names)} "
            "parameters of the model do not fill them in any order that is known"
            + (" (if stages have other layers than these, the hint 'layer_offsets' says it)" if grid.pp > 1 else ""),
            '["embedding.word_embeddings.weight", ...]',
        )
    # chunks end where parameters end, so only the right order has parameters that begin where
    # chunks do
    exact = [s for s in fitting if all(slot.start in buffer.starts(slot.bucket) for slot in s)] or fitting
    if len(exact) == 1 or "param_order" in hints:
        return exact[0]
    first, *others = exact
    differing = [a.name for other in others for a, b in zip(first, other) if a != b]
    if grid.grouped is not None or not any(map(is_expert, differing)):  # stacks do not show how experts were registered
        if all(
            {(s.bucket, s.start, s.stop) for s in first} == {(s.bucket, s.start, s.stop) for s in o} for o in others
        ):
            return first  # parameters of equal size: the file's order, which comes first, decides
        if candidates[0] in candidates[1:] and first == fitting[0] and first in _place(candidates[0], numels, buffer):
            return first  # the file's order is that of one kind of Megatron's layers
    raise NormalizationError(
        f"two orders of the parameters fill the optimizer's buckets, and differ from {differing[0]!r} on: give the "
        "right one by the hint 'param_order'"
    )


def _fitting(orders: Sequence[Sequence[str]], numels: Mapping[str, int], buffer: _Buffer) -> list[list[BufferSlot]]:
    """Return the different ways in which parameters in any of these orders fill the buffer."""
    found: list[list[BufferSlot]] = []
    for order in orders:
        found += [slots for slots in _place(order, numels, buffer) if slots not in found]
    return found


def _place(order: Sequence[str], numels: Mapping[str, int], buffer: _Buffer) -> list[list[BufferSlot]]:
    """Return every way in which parameters in this order fill the buffer."""
    params = [(name, numels[name]) for name in reversed(order)]
    lengths = buffer.lengths()
    if buffer.limit is not None:
        return list(place_joined(params, lengths[0], buffer.limit))
    slots = place_params(params, lengths)
    return [] if slots is None else [slots]


def _join(
    parts: Mapping[str, Mapping[tuple[int, int], Tensors]],
    model: Tensors,
    hints: Hints,
) -> States:
    """Return full states from the parts of all tensor parallel ranks."""
    shapes = {name: tensor.spec.shape for name, tensor in model.items()}
    out: States = {}
    for name, by_rank in parts.items():
        ranks = sorted({tp for tp, _ in by_rank})
        holder = {tp: by_rank[min(at for at in by_rank if at[0] == tp)] for tp in ranks}
        for state in holder[0]:
            shards = [holder[tp][state] for tp in ranks]
            out.setdefault(name, {})[state] = join_by_name(name, shards, shapes, hints, state)
        if out[name] and next(iter(out[name].values())).spec.shape != shapes[name]:
            raise CorruptCheckpointError(f"{name!r}: the parts of its optimizer states do not make up {shapes[name]}")
    return out


# Where parameters are in the flat buffers of Megatron's optimizers, given their order and numbers of
# elements.


ALIGNMENT = 64
"""Every parameter begins at a multiple of this many elements."""


@dataclass(frozen=True)
class BufferSlot:
    """Where a parameter's local part is: its bucket, and the elements in it."""

    name: str
    bucket: int
    start: int
    stop: int


def place_params(params: Sequence[tuple[str, int]], lengths: Sequence[int]) -> list[BufferSlot] | None:
    """Return where parameters with these numbers of elements are in buckets of these lengths. None
    if they do not fill them.

    Every parameter begins at a multiple of `ALIGNMENT`, and a bucket ends where its last parameter
    does.

        >>> place_params([("b", 24), ("a", 100)], [164])
        [BufferSlot(name='b', bucket=0, start=0, stop=24), BufferSlot(name='a', bucket=0, start=64, stop=164)]
    """
    slots: list[BufferSlot] = []
    bucket, end = 0, 0
    for name, numel in params:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if bucket < len(lengths) and start + numel > lengths[bucket]:
            if not _is_full(end, lengths[bucket]):
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(lengths) or start + numel > lengths[bucket]:
            return None
        end = start + numel
        slots.append(BufferSlot(name, bucket, start, end))
    return slots if bucket == len(lengths) - 1 and _is_full(end, lengths[bucket]) else None


def _is_full(end: int, length: int) -> bool:
    """Return True if a bucket of `length` may end with a parameter that ends at `end`, with or
    without padding after it."""
    return end == length or (length % 128 == 0 and 0 < length - end < 128)


def place_joined(params: Sequence[tuple[str, int]], total: int, limit: int) -> Iterator[list[BufferSlot]]:
    """Yield the same for buckets that were joined without the padding at their ends; every way in
    which they fill `total`.

    A bucket is full when it has `limit` elements (see `bucket_limit`), or there is only one; an
    embedding that the last stage shares with the first has one to itself there, and comes first.

        >>> list(place_joined([("b", 24), ("a", 100)], 124, 10))
        [[BufferSlot(name='b', bucket=0, start=0, stop=24), BufferSlot(name='a', bucket=0, start=24, stop=124)]]
    """
    found: list[list[BufferSlot]] = []
    for most, alone in ((total + 1, False), (limit, False), (total + 1, True), (limit, True)):
        slots: list[BufferSlot] = []
        begin = end = 0  # the bucket's range in the joined buffer, and the end of its parameters
        for name, numel in params:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + numel
            slots.append(BufferSlot(name, 0, begin + start, begin + end))
            if end >= most or (alone and len(slots) == 1):
                begin, end = begin + end, 0
        if begin + end == total and slots not in found:
            found.append(slots)
            yield slots


def bucket_limit(args: Mapping[str, Any]) -> int:
    """Return how many elements fill a bucket, by the program's arguments."""
    data_parallel = int(args.get("data_parallel_size") or 1)
    return int(args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * data_parallel))


# Param groups of Megatron's optimizers. Their settings are stored. Their parameters follow from rules:
# biases and one-dimensional parameters have no weight decay (wd_mult 0), experts have separate groups
# under expert parallelism, and embeddings and the output layer may have a separate learning rate
# (is_decoupled_lr).


def decays(name: str, ndim: int) -> bool:
    """Return True if, by Megatron's default rule, a parameter has weight decay."""
    return not (name.endswith(".bias") or ndim == 1)


def find_groups(contents: Contents, common: Mapping[str, Any]) -> Groups:
    """Return the settings of all groups, each once. Ranks store the same settings."""
    groups: Groups = []
    found = list(_search(common.get("optimizer")))
    for key in contents.objects:
        if ".optimizer/shard_" in key and "optimizer.distributed." in key:
            found += _search(contents.objects[key])
    for group in found:
        bare = settings_of(group)
        if bare not in groups:
            groups.append(bare)
    return groups


def _search(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "param_groups" and isinstance(inner, list | tuple):
                yield from (group for group in inner if isinstance(group, dict))
            else:
                yield from _search(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _search(inner)


def assign_groups(result: Canonical, settings: Groups, own_rate: Any) -> None:
    """Add the groups to the result, each with its parameters, and its `step` to their states.

    Args:
        own_rate: the learning rate that the program uses for embeddings and the output layer.
    """
    known = all("params" in group for group in settings)
    result.groups = [{**group, "params": list(group.get("params", ()))} for group in settings]
    if not known:
        _by_rule(result, own_rate)
    steps = [group.get("step") for group in result.groups]
    for group in result.groups:
        step = group.pop("step", None)
        for fqn in group["params"] if step is not None else ():
            if "step" not in result.state.get(fqn, {"step": 0}):
                result.add_state(fqn, "step", step)
    if steps and steps[0] is not None and all(step == steps[0] for step in steps):
        result.add_step(steps[0])  # also for parameters without a known group


def _has_own_rate(group: Mapping[str, Any], own_rate: Any) -> bool:
    """Return True if a group has embeddings and the output layer. Newer versions only record that
    it is not a default group."""
    told = own_rate is not None and group.get("default_config") is False and group.get("max_lr") == own_rate
    return bool(group.get("is_decoupled_lr")) or told


def _by_rule(result: Canonical, own_rate: Any) -> None:
    separate = any(group.get("is_expert_parallel") for group in result.groups)
    lost = []
    for fqn, states in result.state.items():
        shapes = [v.spec.shape for k, v in states.items() if k != "step" and isinstance(v, StoredTensor)]
        if fqn in result.model:
            shapes = [result.model[fqn].spec.shape]
        wanted = decays(fqn, len(shapes[0]) if shapes else 0)
        fitting = [
            group
            for group in result.groups
            if bool(group.get("wd_mult", 1.0)) == wanted
            and bool(group.get("is_expert_parallel")) == (separate and is_expert(fqn))
        ]
        if len(fitting) > 1 and any(_has_own_rate(group, own_rate) for group in fitting):
            fitting = [group for group in fitting if _has_own_rate(group, own_rate) == is_vocabulary(fqn)]
        if len(fitting) == 1:
            fitting[0]["params"].append(fqn)
        else:
            lost.append(fqn)
    if lost and result.groups:
        result.notes.append(
            f"{len(lost)} parameters are in no param group, such as {lost[0]!r}: their group is not stored, and "
            "Megatron's default rules do not determine it"
        )


_KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The settings by which Megatron finds the group that corresponds to its own."""


def groups_to_save(found: Canonical, own_experts: bool) -> tuple[Groups, list[str]]:
    """Return the settings of Megatron's groups, and notes about differences.

    Groups of other programs are divided by Megatron's rules: with and without weight decay and,
    with `own_experts`, separately for experts.

    Raises FormatError if parameters that Megatron puts into one group have different settings.
    """
    made: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    notes: list[str] = []
    for number, group in enumerate(found.groups):
        settings = settings_of(group)
        for kind in dict.fromkeys(_kinds(found, group, own_experts)):
            if not kind[0] and settings.get("weight_decay") and "wd_mult" not in settings:
                notes.append(
                    f"param group {number} has weight decay for biases or one-dimensional parameters; Megatron has none"
                )
            first, known = made.setdefault(kind, (number, settings))
            if known != settings:
                differs = next(k for k in (*known, *settings) if known.get(k) != settings.get(k))
                raise FormatError(
                    f"Megatron has the parameters with {dict(zip(_KINDS, kind))} in one group, but the param groups "
                    f"{first} and {number} have {differs} {known.get(differs)!r} and {settings.get(differs)!r}: make "
                    "them equal, or leave the optimizer out with model_only=True"
                )
    return [{**settings, **dict(zip(_KINDS, kind))} for kind, (_, settings) in made.items()], notes


def _kinds(found: Canonical, group: Mapping[str, Any], own_experts: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the kind of group that Megatron would use for each parameter."""
    is_theirs = "wd_mult" in group
    decided = group.get("wd_mult", 1.0), group.get("lr_mult", 1.0), bool(group.get("is_decoupled_lr"))
    if is_theirs and not group.get("params"):
        yield decided[0], decided[1], own_experts and bool(group.get("is_expert_parallel")), decided[2]
    for fqn in group.get("params", ()):
        tensor = found.model.get(fqn)
        decay = decided[0] if is_theirs or tensor is None else float(decays(fqn, len(tensor.spec.shape)))
        yield decay, decided[1], own_experts and is_expert(fqn), decided[2]
