"""Tensors that FSDP1's flat parameters cut across rows, as chunks of rows and back: each rank is sent what it lacks.

torch gathers every parameter whole on every rank and cuts it anew. Here only elements that lie on another rank than
they are wanted on are sent, once each, several tensors in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from planners.geometry.box import Box
from reshard.control.group import Group
from reshard.errors import NormalizationError
from reshard.execute.messages.wires import sending_device
from reshard.state.frameworks.fsdp1 import group_of
from reshard.state.frameworks.fsdp1_cuts import FlatCut, cut_of
from reshard.state.frameworks.tensor_classes import is_dtensor, is_sharded
from reshard.state.memory.downloads import batches
from reshard.state.tensors import form_of, global_shape, lines_of, local_tensors, raw_bytes

__all__ = ["as_chunks", "exchange_rows"]

DEADLINE_S = 300.0
"""How long ranks wait for each other to agree on what to send."""

MESSAGES_BYTES = 64 << 20
"""Of one tensor after another, until each rank holds about so much of them, what crosses is sent together."""

_Ranges = tuple[tuple[int, int], ...]
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Move:
    """A tensor's flattening, from ranges that the ranks of a group hold to ranges that they want."""

    name: str
    shape: tuple[int, ...]
    held: _Ranges
    wanted: _Ranges
    local: torch.Tensor
    """What this rank holds, 1-D."""
    made: torch.Tensor
    """What this rank is to have, 1-D."""

    @property
    def kept_elsewhere(self) -> bool:
        """Whether a rank holds what another wants."""
        return any(
            have[0] < have[1] and not (want[0] <= have[0] and have[1] <= want[1])
            for have, want in zip(self.held, self.wanted)
        )


def as_chunks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, with each `CutAcrossRows` as a new DTensor or ShardedTensor, cut as `torch.chunk` along dim 0 cuts.

    Collective over the ranks of each process group that has some. Raises NormalizationError, on all of them, where not
    all have the same ones.
    """
    out = dict(tensors)
    groups: dict[Any, list[_Move]] = {}
    cuts: dict[str, FlatCut] = {}
    for name, value in sorted(tensors.items()):
        found = cut_of(value)
        if found is not None:
            cut, local = found
            cuts[name] = chunks = cut.chunks()
            move = _Move(name, cut.shape, cut.ranges, chunks.ranges, local, local.new_empty(chunks.here()))
            groups.setdefault(cut.group, []).append(move)
    for group, moves in groups.items():
        _exchange(moves, group)
        out.update((move.name, cuts[move.name].chunk(move.made)) for move in moves)
    return out


def exchange_rows(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Copy the first of each pair into the second where one is a `CutAcrossRows` and the other is cut otherwise, across
    rows or into chunks of them, among the same ranks; the pairs that are not so, in their order, untouched.

    Collective over the ranks of each process group that has some. Raises NormalizationError, on all of them, where not
    all have the same ones.
    """
    left: list[_Pair] = []
    groups: dict[Any, list[_Move]] = {}
    for number, (value, target) in enumerate(pairs):
        if cut_of(value) is None and cut_of(target) is None:
            left.append((value, target))
            continue
        one, other = _flattened(value), _flattened(target)
        if one is None or other is None or not _go_together(one, other):
            left.append((value, target))
            continue
        (cut, local), (wanted, made) = one, other
        move = _Move(f"tensor {number}", cut.shape, cut.ranges, wanted.ranges, local, made)
        groups.setdefault((wanted if cut_of(value) is None else cut).group, []).append(move)
    for group, moves in groups.items():
        _exchange(moves, group)
    return left


def _go_together(one: tuple[FlatCut, torch.Tensor], other: tuple[FlatCut, torch.Tensor]) -> bool:
    (a, local), (b, made) = one, other
    if a.ranges == b.ranges:
        return False  # nothing is to be sent, so that nobody need wait for anybody
    alike = a.shape == b.shape and (local.dtype, local.device) == (made.dtype, made.device)
    return alike and dist.get_process_group_ranks(a.group) == dist.get_process_group_ranks(b.group)


def _flattened(tensor: torch.Tensor) -> tuple[FlatCut, torch.Tensor] | None:
    """How a tensor is cut, and this rank's range of its flattening, its memory shared; None if a rank has no range."""
    found = cut_of(tensor)
    group = _group_along_rows(tensor) if found is None else None
    if group is None:
        return found
    shape, ranks, locals_ = global_shape(tensor), dist.get_process_group_ranks(group), local_tensors(tensor)
    cut = FlatCut(shape, ((0, 0),) * len(ranks), group).chunks()
    per_row, form = prod(shape[1:]), form_of(tensor)
    for rank, (low, high) in zip(ranks, cut.ranges):
        boxes = [box for part in form.parts(shape, rank) for box, _ in part.boxes() if not box.is_empty]
        rows = [(low // per_row, (high - low) // per_row)] if low < high else []
        if boxes != [Box((first, *[0] * (len(shape) - 1)), (count, *shape[1:])) for first, count in rows]:
            return None
    if len(locals_) > 1 or not all(local.is_contiguous() for local in locals_):
        return None
    return cut, locals_[0].view(-1) if locals_ else torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _group_along_rows(tensor: torch.Tensor) -> Any:
    """The process group whose ranks have a tensor's rows, in its order; None if there is no one such group."""
    if not is_sharded(tensor) or not tensor.dim():
        return None
    if not is_dtensor(tensor):
        return group_of(tensor)
    from torch.distributed.tensor import Shard  # there is a DTensor

    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(tensor.placements[cut[0]]) is not Shard or tensor.placements[cut[0]] != Shard(0):
        return None
    lines = lines_of(tensor.device_mesh, dist.get_rank())
    if not lines or lines[cut[0]][0] != lines[cut[0]][1]:
        return None
    return tensor.device_mesh.get_group(cut[0])


def _exchange(moves: list[_Move], group: Any) -> None:
    """Fill what this rank is to have of all of them."""
    _agree(moves, group)
    for together in batches(moves, _nbytes, MESSAGES_BYTES, lambda move: move.local.device):
        _send(together, group)


def _agree(moves: list[_Move], group: Any) -> None:
    mine = sorted((move.name, list(move.shape), str(move.local.dtype)) for move in moves)
    said = Group(group, deadline_s=DEADLINE_S).parties(msgspec.msgpack.encode(mine))
    if len(said) > 1:
        held = [({name for name, *_ in msgspec.msgpack.decode(one)}, ranks) for one, ranks in said.items()]
        name = min(
            set().union(*(names for names, _ in held)) - set.intersection(*(names for names, _ in held)), default=""
        )
        lacking = sorted(rank for names, ranks in held if name not in names for rank in ranks)
        what = f"ranks {lacking} do not have {name!r}, which" if name else "a tensor of another shape or dtype is what"
        raise NormalizationError(f"{what} others are about to cut anew: all ranks must hold the same state")


def _nbytes(move: _Move) -> int:
    """Of the largest part, so that all ranks say the same."""
    return max(high - low for low, high in move.held) * move.local.itemsize


def _send(moves: list[_Move], group: Any) -> None:
    here, world = dist.get_rank(group), dist.get_world_size(group)
    sent: list[list[torch.Tensor]] = [[] for _ in range(world)]
    wanted: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for move in moves:
        have, want = move.held[here], move.wanted[here]
        for peer in range(world):
            low, high = _overlap(have, move.wanted[peer])
            sent[peer].append(move.local[low - have[0] : high - have[0]])
            low, high = _overlap(move.held[peer], want)
            wanted[peer].append(move.made[low - want[0] : high - want[0]])
    for mine, place in zip(sent[here], wanted[here]):
        place.copy_(mine)
    sent[here], wanted[here] = [], []
    if not any(move.kept_elsewhere for move in moves):
        return
    sizes = [[sum(part.nbytes for part in parts) for parts in side] for side in (sent, wanted)]
    home = moves[0].made.device
    wire = sending_device(home, group)
    got, nothing = (torch.empty(n, dtype=torch.uint8, device=at) for n, at in ((sum(sizes[1]), wire), (0, home)))
    data = torch.cat([nothing, *(raw_bytes(part) for parts in sent for part in parts)]).to(wire)
    dist.all_to_all_single(got, data, sizes[1], sizes[0], group=group)
    places = [place for parts in wanted for place in parts]
    for place, piece in zip(places, got.split_with_sizes([place.nbytes for place in places])):
        raw_bytes(place).copy_(piece)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Common elements; the same number twice where there are none."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))
