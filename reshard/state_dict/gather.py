"""Gathers full tensors from sharded ones and scatters them again, one at a time. Also moves row
chunks of tensors that are sharded across rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planners.geometry.box import Box, Range, Shape
from planners.geometry.layout import Form, Part
from reshard.errors import LayoutError, NormalizationError
from reshard.live.copy_streams import batches
from reshard.live.fsdp1 import FlatCut, cut_of, group_of
from reshard.live.tensors import (
    LiveTensor,
    inner_names,
    is_dtensor,
    is_sharded,
    lines_of,
    mesh_line,
    raw_bytes,
    resolved_bytes,
    tensor_class,
    this_rank,
)
from reshard.ranks.group import Group, sending_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Each rank computes from the layout which rank holds which elements, so only bytes are sent.


def parts_of(tensor: LiveTensor) -> list[tuple[Part, torch.Tensor]]:
    """Return each part of the layout that this rank holds, with the local tensor that contains it."""
    here = this_rank()
    parts, held = tensor.form.parts(tensor.shape, here), tensor.local
    for part, local in zip(parts, held, strict=True):
        if part.sizes != tuple(local.shape):
            raise NormalizationError(
                f"a tensor of shape {tensor.shape} should have a local shape {part.sizes} on rank {here}, but "
                f"has {tuple(local.shape)}"
            )
    return list(zip(parts, held))


def member_ranks(tensor: Any) -> list[int]:
    """Return the ranks that must take part in gathering `tensor`, in ascending order."""
    return ranks_of(place_of(tensor))


def place_of(tensor: Any) -> Any:
    """Return the device mesh or process group of a sharded tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else group_of(tensor)


def joint_ranks(places: Iterable[Any]) -> list[tuple[int, ...]]:
    """Return the ranks of each device mesh or process group that this rank shares with others,
    unless another one contains them. All these ranks get the same result, in the same order."""
    every = [
        ranks for ranks in {tuple(ranks_of(place)) for place in {*places}} if this_rank() in ranks[1:] + ranks[:-1]
    ]
    return sorted(ranks for ranks in every if not any({*ranks} < {*others} for others in every))


def ranks_of(place: Any) -> list[int]:
    """Return the ranks of a device mesh or process group, in ascending order."""
    is_group = isinstance(place, dist.ProcessGroup)
    ranks = dist.get_process_group_ranks(place) if is_group else place.mesh.flatten().tolist()
    return sorted(ranks)


def gather(tensor: LiveTensor, to_rank: int | None = None) -> Any:
    """Return the full tensor on every rank that holds a part, or only on `to_rank`, one of them,
    and None on the others.

    Collective over these ranks. A tensor that is not sharded is returned unchanged. Replicas are
    not sent.
    """
    value = tensor.value
    if not tensor.is_sharded:
        return value
    if inner_names(value):
        raise LayoutError(
            f"a sharded {tensor_class(value)} of {tensor.key!r} cannot be gathered: save the sharded state, and read "
            "full tensors with reshard.open; or get a sharded state and pass it to reshard.dequantized"
        )
    form, shape, dtype = tensor.form_by_all(), tensor.shape, tensor.dtype
    data = torch.cat([resolved_bytes(local) for local in tensor.local]) if tensor.local else _nothing(value)
    if is_dtensor(value):
        held = _along_axes(value, form, shape, data, to_rank)
    else:
        group = group_of(value)
        ranks = dist.get_process_group_ranks(group)
        pieces = _exchange(data, _sizes(dtype, form, shape, [[rank] for rank in ranks]), group, to_rank)
        held = None if pieces is None else list(zip(ranks, pieces))
    if held is None:
        return None
    whole = torch.empty(shape, dtype=dtype, device=data.device)
    for rank, piece in held:
        flat, at = piece.view(dtype), 0
        for part in form.parts(shape, rank):
            local = flat[at : at + part.numel].view(part.sizes)
            at += part.numel
            for there, here in part.boxes():
                whole[there.slices].copy_(local[here.slices])
    return whole


def scatter(whole: torch.Tensor, target: LiveTensor) -> None:
    """Copy the elements of `whole` that this rank holds into `target`. Local: nothing is sent."""
    for part, local in parts_of(target):
        for there, here in part.boxes():
            local[here.slices].copy_(whole[there.slices])


def _along_axes(
    tensor: DTensor, form: Form, shape: Shape, data: torch.Tensor, to_rank: int | None
) -> list[tuple[int, torch.Tensor]] | None:
    """Collect the bytes of all distinct parts, one mesh axis after another. Return (rank that holds
    the part, bytes) pairs."""
    grid, me = tensor.device_mesh.mesh, dist.get_rank()
    lines = lines_of(tensor.device_mesh, me)
    here = (grid == me).nonzero()[0].tolist()
    goal = here if to_rank is None else (grid == to_rank).nonzero()[0].tolist()
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if any(here[axis] != goal[axis] for axis in range(grid.ndim) if axis not in cut):
        return None  # `to_rank` is in another replica group
    kept = {axis for axis, (line, group) in enumerate(lines) if group == line}
    for axis in reversed(cut):
        line, group = lines[axis]  # this rank's group along the axis; the rank at the goal's coordinate collects
        later = [a for a in cut if a > axis]
        sizes = _sizes(tensor.dtype, form, shape, [_collected(grid, rank, later, kept) for rank in group])
        goal_rank = None if to_rank is None else line[goal[axis]]
        pieces = _exchange(data, sizes, tensor.device_mesh.get_group(axis), goal_rank)
        if pieces is None:
            return None
        data = torch.cat(pieces)
    ranks = _collected(grid, me, cut, kept)
    return list(zip(ranks, data.split_with_sizes(_sizes(tensor.dtype, form, shape, [[rank] for rank in ranks]))))


def _collected(grid: torch.Tensor, rank: int, axes: Sequence[int], kept: Collection[int]) -> list[int]:
    """Return the ranks whose bytes `rank` has, in order, after collecting along `axes`, last axis
    first. Along axes in `kept`, ranks are in mesh order, otherwise in ascending order, as in
    process groups."""
    if not axes:
        return [rank]
    axis, *later = axes
    line = mesh_line(grid, rank, axis)
    members = line if axis in kept else sorted(line)
    return [held for member in members for held in _collected(grid, member, later, kept)]


def _sizes(dtype: torch.dtype, form: Form, shape: Shape, ranks: Sequence[Sequence[int]]) -> list[int]:
    """Return the total bytes that each list of ranks holds."""
    return [sum(part.numel for rank in own for part in form.parts(shape, rank)) * dtype.itemsize for own in ranks]


def _nothing(tensor: Any) -> torch.Tensor:
    """Return an empty tensor for a ShardedTensor without a shard on this rank, on the device from
    which the process group sends."""
    placed = [shard.placement.device() for shard in tensor.metadata().shards_metadata if shard.placement is not None]
    return torch.empty(0, dtype=torch.uint8, device=placed[0].type if placed else "cpu")


def _exchange(data: torch.Tensor, sizes: Sequence[int], group: Any, to_rank: int | None) -> list[torch.Tensor] | None:
    """Return the bytes of every member of the group, in its order. If `to_rank` is given, return
    None on all other ranks."""
    longest, home = max(sizes), data.device
    if longest == 0:
        return [data[:0] for _ in sizes] if to_rank in (None, dist.get_rank()) else None
    padded = data if len(data) == longest else torch.cat((data, data.new_zeros(longest - len(data))))
    padded = padded.to(sending_device(home, group))
    wanted = to_rank in (None, dist.get_rank())
    out = [torch.empty_like(padded) for _ in sizes] if wanted else None
    if to_rank is None:
        dist.all_gather(out, padded, group=group)
    else:
        dist.gather(padded, out, dst=to_rank, group=group)
    return None if out is None else [piece[:size].to(home) for piece, size in zip(out, sizes)]


# Tensors that FSDP1's flat parameters shard across rows, as chunks of rows and back: each rank
# receives what it lacks.
#
# torch gathers every full parameter on every rank and shards it again. Here only elements that another rank
# needs are sent, once each, several tensors in one message.


MESSAGES_BYTES = 64 << 20
"""Tensors are sent together until each rank would hold about this many bytes."""

_Ranges = tuple[Range, ...]
_Pair = tuple[LiveTensor, LiveTensor]


@dataclass(frozen=True, slots=True)
class _Move:
    """A move of a flattened tensor, from the ranges that the ranks of a group hold to the ranges
    that they want."""

    name: str
    shape: Shape
    held: _Ranges
    wanted: _Ranges
    local: torch.Tensor
    """What this rank holds, 1-D."""
    made: torch.Tensor
    """What this rank will have, 1-D."""

    @property
    def kept_elsewhere(self) -> bool:
        """True if a rank holds what another rank wants."""
        return any(
            have[0] < have[1] and not (want[0] <= have[0] and have[1] <= want[1])
            for have, want in zip(self.held, self.wanted)
        )


def as_chunks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with each `CutAcrossRows` as a new DTensor or ShardedTensor, sharded along
    dim 0 like `torch.chunk`.

    Collective over the ranks of each process group with such tensors. Raises NormalizationError on
    all these ranks if they do not have the same tensors.
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
        _exchange_rows(moves, group)
        out.update((move.name, cuts[move.name].chunk(move.made)) for move in moves)
    return out


def exchange_rows(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Copy the first of each pair into the second if one is a `CutAcrossRows`, and the other has
    different row ranges or chunks on the same ranks. Return all other pairs, unchanged and in
    order.

    Collective over the ranks of each process group with such pairs. Raises NormalizationError on
    all these ranks if they do not have the same pairs.
    """
    left: list[_Pair] = []
    groups: dict[Any, list[_Move]] = {}
    for number, (value, target) in enumerate(pairs):
        across = cut_of(value.value) or cut_of(target.value)
        one, other = (_flattened(value), _flattened(target)) if across else (None, None)
        if across is None or one is None or other is None or not _go_together(one, other):
            left.append((value, target))
            continue
        (cut, local), (wanted, made) = one, other
        move = _Move(f"tensor {number}", cut.shape, cut.ranges, wanted.ranges, local, made)
        groups.setdefault(across[0].group, []).append(move)
    for group, moves in groups.items():
        _exchange_rows(moves, group)
    return left


def _go_together(one: tuple[FlatCut, torch.Tensor], other: tuple[FlatCut, torch.Tensor]) -> bool:
    (a, local), (b, made) = one, other
    if a.ranges == b.ranges:
        return False  # nothing to send
    alike = a.shape == b.shape and (local.dtype, local.device) == (made.dtype, made.device)
    return alike and dist.get_process_group_ranks(a.group) == dist.get_process_group_ranks(b.group)


def _flattened(tensor: LiveTensor) -> tuple[FlatCut, torch.Tensor] | None:
    """Return how a tensor is sharded, and this rank's range of the flattened tensor, as a view.
    Return None if a rank has no range."""
    found = cut_of(tensor.value)
    group = _group_along_rows(tensor.value) if found is None else None
    if group is None:
        return found
    shape, ranks, per_row = tensor.shape, dist.get_process_group_ranks(group), prod(tensor.shape[1:])
    cut = FlatCut(shape, ((0, 0),) * len(ranks), group).chunks()
    for rank, (low, high) in zip(ranks, cut.ranges):
        boxes = [box for part in tensor.form.parts(shape, rank) for box, _ in part.boxes() if not box.is_empty]
        rows = [(low // per_row, (high - low) // per_row)] if low < high else []
        if boxes != [Box((first, *[0] * (len(shape) - 1)), (count, *shape[1:])) for first, count in rows]:
            return None
    if len(tensor.local) > 1 or not all(local.is_contiguous() for local in tensor.local):
        return None
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.value.device)
    return cut, tensor.local[0].view(-1) if tensor.local else nothing


def _group_along_rows(tensor: torch.Tensor) -> Any:
    """Return the process group whose ranks have a tensor's rows, in its order. None if there is no
    single group."""
    if not is_sharded(tensor) or not tensor.dim():
        return None
    if not is_dtensor(tensor):
        return group_of(tensor)
    from torch.distributed.tensor import Shard  # already loaded, because a DTensor exists

    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(tensor.placements[cut[0]]) is not Shard or tensor.placements[cut[0]] != Shard(0):
        return None
    lines = lines_of(tensor.device_mesh, dist.get_rank())
    if not lines or lines[cut[0]][0] != lines[cut[0]][1]:
        return None
    return tensor.device_mesh.get_group(cut[0])


def _exchange_rows(moves: list[_Move], group: Any) -> None:
    """Send and receive the missing ranges of all tensors."""
    _agree(moves, group)
    for together in batches(moves, _nbytes, MESSAGES_BYTES, lambda move: move.local.device):
        _send(together, group)


def _agree(moves: list[_Move], group: Any) -> None:
    mine = sorted((move.name, list(move.shape), str(move.local.dtype)) for move in moves)
    said = Group(group).distinct_answers(mine)
    if len(said) > 1:
        held = [({name for name, _, _ in one}, ranks) for one, ranks in said]
        every = [names for names, _ in held]
        name = min(every[0].union(*every) - every[0].intersection(*every), default="")
        lacking = sorted(rank for names, ranks in held if name not in names for rank in ranks)
        what = f"ranks {lacking} do not have {name!r}, which" if name else "a tensor of another shape or dtype is what"
        raise NormalizationError(f"{what} other ranks are about to reshard: all ranks must hold the same state")


def _nbytes(move: _Move) -> int:
    """Return the bytes of the largest part. The result is the same on all ranks."""
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


def _overlap(a: Range, b: Range) -> Range:
    """Return the range of common elements. Both ends are equal if there are none."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))
