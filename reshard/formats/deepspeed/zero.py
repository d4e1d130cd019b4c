"""Splits the flat pieces of ZeRO into parameters again.

Stages 1 and 2: the parameters of a group form one row, which is divided evenly among the ranks ("-" is padding).

    rank 0: p0 p0 p0 p1    rank 1: p1 p1 p2 -

Stage 3: each parameter is sharded separately, and a rank's slices form one row.

    rank 0: p0 p0 p1 p2    rank 1: p0 -- p1 --
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorSpec
from reshard.errors import CorruptCheckpointError
from reshard.formats.canonical import Groups, Shapes, States, Value, Values, is_single
from reshard.formats.torch_save.reader import TorchFile, stored_values
from reshard.stored.contents import Record
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import assemble, narrow, unflatten

MASTER = "fp32"
"""Name of the fp32 masters among the states."""


@dataclass
class Rank:
    """The contents of one rank's file of optimizer states: the values of each flat group, by name."""

    label: str
    flats: list[Values] = field(default_factory=list)
    groups: Groups = field(default_factory=list)
    """Settings of the param groups."""
    partition_counts: list[int] = field(default_factory=list)
    mappings: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Stages 1 and 2, newer versions: start and length of each parameter's part in the piece."""
    round_robin: bool = False
    """Stages 1 and 2: parameters were assigned to ranks in turn. The model's shapes are in that
    order, but `mappings` are as if they were not."""
    paddings: list[list[int]] = field(default_factory=list)
    """Stages 1 and 2: elements between a parameter of each group and the next."""
    stage: int = 0
    unread: list[str] = field(default_factory=list)
    """Names of states that are not flat: they differ between ranks, such as factors of a rank's piece."""


def read_rank(stem: str, file: TorchFile, rank: int) -> Rank:
    """Read a rank's file. Raises CorruptCheckpointError if DeepSpeed cannot have written it."""
    label = file.source.label
    value = file.entries.get("optimizer_state_dict")
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{label}: it holds no optimizer_state_dict of ZeRO")
    third = "fp32_flat_groups" in value
    out = Rank(label, stage=_number(value.get("zero_stage", 3 if third else 1), label))
    masters = value.get("fp32_flat_groups" if third else "single_partition_of_fp32_groups")
    base = value.get("optimizer_state_dict" if third else "base_optimizer_state")
    if not isinstance(masters, list | tuple):
        raise CorruptCheckpointError(
            f"{label}: it holds no flat fp32 groups, which every stage of ZeRO from 1 on writes"
        )
    states = _states(base)
    out.groups = [dict(group) for group in base.get("param_groups", ())] if isinstance(base, dict) else []
    for g, master in enumerate(masters):
        flats = stored_values(f"{stem}.{g}", {MASTER: master, **states.get(g, {})}, file, rank)
        out.flats.append({k: v for k, v in flats.items() if is_single(v) or _is_flat(v, flats[MASTER])})
        out.unread += flats.keys() - out.flats[-1].keys()
    counts = value.get("partition_count", ())
    out.partition_counts = (
        [int(c) for c in counts] if isinstance(counts, list | tuple) else [int(counts)] * len(masters)
    )
    config = file.value.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    out.round_robin = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    out.paddings = [list(map(int, of)) for of in value.get("param_alignment_paddings") or ()]
    mappings = value.get("param_slice_mappings")
    if isinstance(mappings, list | tuple):
        out.mappings = [{str(k): _fragment(v, label) for k, v in of.items()} for of in mappings]
    return out


def _states(base: Any) -> dict[int, dict[str, Any]]:
    """Return states by group: of a torch optimizer, or the list that elastic checkpoints have."""
    if isinstance(base, dict):
        return {int(g): dict(of) for g, of in base.get("state", {}).items()}
    return {g: dict(of) for g, of in enumerate(base or ()) if isinstance(of, dict)}


def _number(stage: Any, label: str) -> int:
    value = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    if not isinstance(value, int):
        raise CorruptCheckpointError(f"{label}: its zero_stage {value!r:.40} is not a number")
    return value


def _fragment(value: Any, label: str) -> tuple[int, int]:
    fields = value.fields if isinstance(value, Record) else {}
    try:
        return int(fields["start"]), int(fields["numel"])
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpointError(
            f"{label}: a fragment of a parameter without start and numel: {value!r:.80}"
        ) from None


def _is_flat(value: Value, master: Value) -> bool:
    """Return True if a state has an element for each of the masters (but for padding), rather than
    one for the group."""
    if not isinstance(value, StoredTensor) or not isinstance(master, StoredTensor):
        return False
    return len(value.spec.shape) == 1 and (value.spec.numel >= master.spec.numel)


def _check_ranks(ranks: Sequence[Rank], group: int) -> None:
    counts = {rank.partition_counts[group] for rank in ranks if group < len(rank.partition_counts)}
    if counts and counts != {len(ranks)}:
        raise CorruptCheckpointError(
            f"{ranks[0].label}: group {group} is for {max(counts)} data parallel ranks, but there are files of "
            f"{len(ranks)}: the file of a rank is missing, or does not belong here"
        )


def cut_stage12(ranks: Sequence[Rank], shapes: Sequence[Shapes]) -> States:
    """Return the states of every parameter, and its fp32 master as the state `MASTER`.

    Raises CorruptCheckpointError if a rank's file is missing, or pieces are too short for the
    parameters.
    """
    out: States = {}
    for g, group in enumerate(shapes):
        if any(g >= len(rank.flats) for rank in ranks):
            raise CorruptCheckpointError(f"{ranks[0].label}: it has no group {g}, which the model's parameters need")
        for mine, shift in _sharers(ranks, g, group):
            _check_ranks(mine, g)
            mapped = all(g < len(rank.mappings) for rank in mine) and not mine[0].round_robin
            parts = _mapped_parts(mine, g, group) if mapped else _even_parts(mine, g, group)
            flats = [rank.flats[g] for rank in mine]
            for fqn, shape in group.items():
                out[shifted(fqn, shift)] = _gather_all(fqn, shape, flats, parts[fqn])
    return out


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)", re.DOTALL)


def shifted(fqn: str, by: int) -> str:
    """Return the name of an expert's parameter in the full model, if `by` experts come before those
    of its rank."""
    match = _EXPERT.fullmatch(fqn)
    return fqn if match is None else f"{match[1]}{int(match[2]) + by}{match[3]}"


def experts_shifts(ranks: Sequence[Rank], g: int, group: Shapes) -> list[int]:
    """Return how many experts come before those of each expert parallel rank; [0] for a group that
    all ranks share."""
    numbers = {int(m[2]) for m in map(_EXPERT.fullmatch, group) if m is not None}
    count = ranks[0].partition_counts[g] if g < len(ranks[0].partition_counts) else len(ranks)
    if not numbers or not 0 < count < len(ranks) or len(ranks) % count:
        return [0]
    return [e * (max(numbers) + 1) for e in range(len(ranks) // count)]


def _sharers(ranks: Sequence[Rank], g: int, group: Shapes) -> list[tuple[Sequence[Rank], int]]:
    """Return the ranks that share the parameters of a group: all, or those with the same experts.
    With two expert parallel ranks, ranks 0, 2, 4, ... share the first experts."""
    shifts = experts_shifts(ranks, g, group)
    return [(ranks[e :: len(shifts)], shift) for e, shift in enumerate(shifts)]


_Held = list[tuple[int, int, int, int]]
"""The pieces of a parameter: (rank, start in the rank's piece, length, start in the flattened parameter)."""
_Parts = dict[str, _Held]


def _mapped_parts(ranks: Sequence[Rank], g: int, group: Shapes) -> _Parts:
    """Return the parts that the files list. Consecutive ranks hold consecutive elements of a parameter."""
    parts: _Parts = {fqn: [] for fqn in group}
    done = dict.fromkeys(group, 0)
    for r, rank in enumerate(ranks):
        for fqn, (start, length) in rank.mappings[g].items():
            if fqn in parts:
                parts[fqn].append((r, start, length, done[fqn]))
                done[fqn] += length
    for fqn, shape in group.items():
        if done[fqn] != math.prod(shape):
            raise CorruptCheckpointError(
                f"{fqn!r} of shape {list(shape)}: the files of {len(ranks)} ranks hold {done[fqn]} of its "
                f"{math.prod(shape)} elements; the file of a rank is missing"
            )
    return parts


def _even_parts(ranks: Sequence[Rank], g: int, group: Shapes) -> _Parts:
    """Return parts of equal length, except for the last one. The parameters are consecutive."""
    piece = _numel(ranks[0].flats[g][MASTER])
    parts: _Parts = {}
    start = stop = 0
    paddings = ranks[0].paddings[g] if g < len(ranks[0].paddings) else []
    for at, (fqn, shape) in enumerate(group.items()):
        stop = start + math.prod(shape)
        parts[fqn] = []
        for r in range(len(ranks)):
            low, high = max(start, r * piece), min(stop, (r + 1) * piece)
            if low < high:
                parts[fqn].append((r, low - r * piece, high - low, low - start))
        start = stop + (paddings[at] if at < len(paddings) else 0)
    if stop > piece * len(ranks):
        raise CorruptCheckpointError(
            f"{ranks[0].label}: the parameters of group {g} have {stop} elements, but its {len(ranks)} pieces hold "
            f"{piece * len(ranks)}: the file of a rank is missing"
        )
    return parts


def _gather_all(fqn: str, shape: Shape, flats: Sequence[Values], held: _Held) -> Values:
    """Return the states of a parameter from parts of each rank's flat states. States that are not
    flat are the same on all ranks."""
    states = flats[0]
    return {
        name: _gather(f"{fqn}.{name}", shape, [of.get(name) for of in flats], held)
        if _is_flat(value, states[MASTER])
        else value
        for name, value in states.items()
    }


def _gather(fqn: str, shape: Shape, flats: Sequence[Value], held: _Held) -> StoredTensor:
    numel = math.prod(shape)
    pieces, dtype = [], "float32"
    for rank, start, length, at in held:
        flat = flats[rank]
        if not isinstance(flat, StoredTensor) or len(flat.spec.shape) != 1:
            raise CorruptCheckpointError(f"{fqn!r}: a rank has no flat tensor for it, but others have")
        if start + length > flat.spec.numel or at + length > numel:
            raise CorruptCheckpointError(
                f"{fqn!r} of shape {list(shape)}: its elements {at} to {at + length} should be the elements {start} to "
                f"{start + length} of {flat.fqn!r}, which has {flat.spec.numel}"
            )
        dtype = flat.spec.dtype
        pieces.append((Box((at,), (length,)), narrow(flat, 0, start, start + length)))
    if not pieces:
        if numel:
            raise CorruptCheckpointError(f"{fqn!r} of shape {list(shape)}: no rank holds any part of it")
        return StoredTensor(TensorSpec(fqn, shape, dtype), ())
    return unflatten(assemble(fqn, (numel,), pieces), shape, fqn)


def cut_stage3(ranks: Sequence[Rank], shapes: Sequence[Shapes]) -> States:
    """Return the same for stage 3. Sub-groups are consecutive, like the parameters of all groups."""
    _check_ranks(ranks, 0)
    world = len(ranks)
    out: States = {}
    sizes = [_numel(flat[MASTER]) for flat in ranks[0].flats]
    sub, at = 0, 0  # sub-group and position in it
    for group in shapes:
        for fqn, shape in group.items():
            numel = math.prod(shape)
            part = -(-numel // world)
            while sub < len(sizes) and part and at >= sizes[sub]:
                sub, at = sub + 1, 0
            if part and (sub >= len(sizes) or at + part > sizes[sub]):
                raise CorruptCheckpointError(
                    f"{ranks[0].label}: {fqn!r} needs {part} elements from {at} on in sub-group {sub}, which is more "
                    "than the file holds; it was truncated, or belongs to another model"
                )
            held = [(r, at, min(part, numel - r * part), r * part) for r in range(world) if r * part < numel]
            flats = [rank.flats[min(sub, len(sizes) - 1)] for rank in ranks]
            out[fqn] = _gather_all(fqn, shape, flats, held)
            at += part
    return out


def _numel(value: Value) -> int:
    return value.spec.numel if isinstance(value, StoredTensor) else 0
