"""Whole tensors from sharded ones and back, one tensor at a time.

Who holds which elements comes from the layout, which every rank computes alike; only bytes travel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planners.geometry.layout_forms import Form, Part
from reshard.errors import NormalizationError
from reshard.execute.messages.wires import sending_device
from reshard.state.frameworks.fsdp1 import group_of
from reshard.state.frameworks.tensor_classes import is_dtensor, is_sharded
from reshard.state.tensors import (
    dtype_of,
    form_by_all,
    form_of,
    global_shape,
    lines_of,
    local_tensors,
    mesh_line,
    raw_bytes,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["gather", "member_ranks", "parts_of", "scatter"]


def parts_of(tensor: Any) -> list[tuple[Part, torch.Tensor]]:
    """What this rank holds of `tensor`: each part of its layout with the local tensor that holds it."""
    here = dist.get_rank() if dist.is_initialized() else 0
    parts, held = form_of(tensor).parts(global_shape(tensor), here), local_tensors(tensor)
    for part, local in zip(parts, held, strict=True):
        if part.sizes != tuple(local.shape):
            raise NormalizationError(
                f"a tensor of shape {global_shape(tensor)} should have a local shape {part.sizes} on rank {here}, but "
                f"has {tuple(local.shape)}"
            )
    return list(zip(parts, held))


def member_ranks(tensor: Any) -> list[int]:
    """The ranks that must take part in gathering `tensor`, in ascending order."""
    if is_dtensor(tensor):
        return sorted(tensor.device_mesh.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(group_of(tensor)))


def gather(tensor: Any, to_rank: int | None = None) -> Any:
    """The whole tensor on every rank that holds a part, or only on `to_rank`, one of them, and None on the others.

    Collective over these ranks; a tensor that is not sharded is returned as it is. Replicas are not sent.
    """
    if not is_sharded(tensor):
        return tensor
    form, shape, locals_ = form_by_all(tensor), global_shape(tensor), local_tensors(tensor)
    data = torch.cat([_bytes(local) for local in locals_]) if locals_ else _nothing(tensor)
    if is_dtensor(tensor):
        held = _along_axes(tensor, form, shape, data, to_rank)
    else:
        group = group_of(tensor)
        ranks = dist.get_process_group_ranks(group)
        pieces = _exchange(data, _sizes(tensor, form, shape, [[rank] for rank in ranks]), group, to_rank)
        held = None if pieces is None else list(zip(ranks, pieces))
    if held is None:
        return None
    whole = torch.empty(shape, dtype=dtype_of(tensor), device=data.device)
    for rank, piece in held:
        flat, at = piece.view(dtype_of(tensor)), 0
        for part in form.parts(shape, rank):
            local = flat[at : at + part.numel].view(part.sizes)
            at += part.numel
            for there, here in part.boxes():
                whole[there.slices].copy_(local[here.slices])
    return whole


def scatter(whole: torch.Tensor, target: Any) -> None:
    """Copy into `target` the elements of `whole` that this rank holds. Local: nothing is sent."""
    for part, local in parts_of(target):
        for there, here in part.boxes():
            local[here.slices].copy_(whole[there.slices])


def _along_axes(
    tensor: DTensor, form: Form, shape: tuple[int, ...], data: torch.Tensor, to_rank: int | None
) -> list[tuple[int, torch.Tensor]] | None:
    """The bytes of all distinct parts with a rank that holds each, collected along one mesh axis after another."""
    grid, me = tensor.device_mesh.mesh, dist.get_rank()
    lines = lines_of(tensor.device_mesh, me)
    here = (grid == me).nonzero()[0].tolist()
    goal = here if to_rank is None else (grid == to_rank).nonzero()[0].tolist()
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if any(here[axis] != goal[axis] for axis in range(grid.ndim) if axis not in cut):
        return None  # another replica group has the goal
    kept = {axis for axis, (line, group) in enumerate(lines) if group == line}
    for axis in reversed(cut):
        line, group = lines[axis]  # the group along this axis that I am in; who is at the goal's coordinate collects
        later = [a for a in cut if a > axis]
        sizes = _sizes(tensor, form, shape, [_collected(grid, rank, later, kept) for rank in group])
        goal_rank = None if to_rank is None else line[goal[axis]]
        pieces = _exchange(data, sizes, tensor.device_mesh.get_group(axis), goal_rank)
        if pieces is None:
            return None
        data = torch.cat(pieces)
    ranks = _collected(grid, me, cut, kept)
    return list(zip(ranks, data.split_with_sizes(_sizes(tensor, form, shape, [[rank] for rank in ranks]))))


def _collected(grid: torch.Tensor, rank: int, axes: Sequence[int], kept: Collection[int]) -> list[int]:
    """The ranks whose bytes `rank` has, in order, once they are collected along `axes`, the last of them first: in the
    order of the mesh along those that are `kept`, else ascending, as process groups are."""
    if not axes:
        return [rank]
    axis, *later = axes
    line = mesh_line(grid, rank, axis)
    members = line if axis in kept else sorted(line)
    return [held for member in members for held in _collected(grid, member, later, kept)]


def _sizes(tensor: Any, form: Form, shape: tuple[int, ...], ranks: Sequence[Sequence[int]]) -> list[int]:
    """Bytes that each list of ranks holds together."""
    return [sum(p.numel for rank in own for p in form.parts(shape, rank)) * dtype_of(tensor).itemsize for own in ranks]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return raw_bytes(tensor.detach().contiguous())


def _nothing(tensor: Any) -> torch.Tensor:
    """No bytes of a ShardedTensor of which this rank has no shard: on such a device as others have theirs on, for that
    is what their process group sends from."""
    placed = [shard.placement.device() for shard in tensor.metadata().shards_metadata if shard.placement is not None]
    return torch.empty(0, dtype=torch.uint8, device=placed[0].type if placed else "cpu")


def _exchange(data: torch.Tensor, sizes: Sequence[int], group: Any, to_rank: int | None) -> list[torch.Tensor] | None:
    """The bytes of every member of the group, in its order; None on all but `to_rank`, unless that is None."""
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
