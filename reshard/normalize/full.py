"""Whole tensors from sharded ones and back, one tensor at a time.

Who holds which elements comes from the layout, which every rank computes alike; only bytes travel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planners.forms import Part, ProductForm
from planners.mesh import Mesh
from planners.placement import Placement, Replicate, Shard, StridedShard
from reshard.errors import NormalizationError
from reshard.normalize.options import StateDictOptions

__all__ = ["collected", "gather", "is_sharded", "parts_of", "scatter"]


def is_sharded(value: Any) -> bool:
    """Whether the value is a tensor whose elements may live on several ranks."""
    return isinstance(value, DTensor)


def parts_of(tensor: DTensor) -> tuple[Part, ...]:
    """What this rank holds of `tensor`: at most one part, whose boxes are in the order of the local tensor."""
    return _parts(tuple(tensor.shape), *_form(tensor), dist.get_rank())


def gather(tensor: torch.Tensor, to_first: bool = False) -> Any:
    """The whole tensor on every rank of its mesh, or only on the mesh's first rank and None on the others.

    Collective over the mesh. Every rank must hold what its placements say; replicas are taken from the rank's own
    replica group. Raises NormalizationError for a tensor that holds summands.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    device_mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise NormalizationError(f"rank {dist.get_rank()} is no part of the mesh {device_mesh} of this tensor")
    mesh, placements = _form(tensor)
    local = tensor.to_local()
    cut = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if to_first and any(coordinate[axis] for axis in range(mesh.ndim) if axis not in cut):
        return None
    held, data = [dist.get_rank()], _bytes(local)
    for axis in reversed(cut):
        members = [[_moved(mesh, rank, axis, k) for rank in held] for k in range(mesh.shape[axis])]
        sizes = [
            sum(_numel(shape, mesh, placements, rank) for rank in ranks) * local.element_size() for ranks in members
        ]
        group = device_mesh.get_group(axis)
        pieces = _exchange(data, sizes, group, to_first)
        if pieces is None:
            return None
        held, data = [rank for ranks in members for rank in ranks], torch.cat(pieces)
    return _assemble(data.view(local.dtype), shape, [(r, _parts(shape, mesh, placements, r)) for r in held])


def scatter(whole: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into `target` the elements of `whole` that this rank holds. Local: nothing is sent."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    for part in parts_of(target):
        if part.sizes != tuple(local.shape):
            raise NormalizationError(
                f"a tensor of shape {tuple(target.shape)} and placements {target.placements} should have a local shape "
                f"{part.sizes} on rank {dist.get_rank()}, but has {tuple(local.shape)}"
            )
        for there, here in part.boxes():
            local[here.slices].copy_(whole[there.slices])


def _form(tensor: DTensor) -> tuple[Mesh, tuple[Placement, ...]]:
    """Mesh and placements in the order in which they were really applied."""
    device_mesh = tensor.device_mesh
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
    mesh = Mesh(list(zip(names, device_mesh.mesh.shape)), device_mesh.mesh.flatten().tolist())
    placements: list[Placement] = []
    for placement in tensor.placements:
        if placement.is_partial():
            raise NormalizationError(f"a tensor with placements {tensor.placements} holds sums, no elements: reduce it")
        dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", None)
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(Shard(dim) if factor is None else StridedShard(dim, factor))
    return mesh, tuple(placements)


@functools.lru_cache(maxsize=4096)
def _parts(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int) -> tuple[Part, ...]:
    return ProductForm.make(mesh, placements).parts(shape, rank)


def _numel(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int) -> int:
    return sum(part.numel for part in _parts(shape, mesh, placements, rank))


def _moved(mesh: Mesh, rank: int, axis: int, to: int) -> int:
    """The rank at the coordinate of `rank`, but at `to` along one axis."""
    coordinate = list(mesh.coordinate(rank))
    coordinate[axis] = to
    return mesh.rank_at(coordinate)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _exchange(data: torch.Tensor, sizes: Sequence[int], group: Any, to_first: bool) -> list[torch.Tensor] | None:
    """The bytes of every member of the group, in order; None on all but the first if `to_first`."""
    longest = max(sizes)
    if longest == 0:
        return [data[:0] for _ in sizes]
    padded = data if len(data) == longest else torch.cat((data, data.new_zeros(longest - len(data))))
    first = not to_first or dist.get_rank(group) == 0
    out = [torch.empty_like(padded) for _ in sizes] if first else None
    if to_first:
        dist.gather(padded, out, group=group, group_dst=0)
    else:
        dist.all_gather(out, padded, group=group)
    return None if out is None else [piece[:size] for piece, size in zip(out, sizes)]


def _assemble(data: torch.Tensor, shape: tuple[int, ...], holders: list[tuple[int, tuple[Part, ...]]]) -> torch.Tensor:
    whole = data.new_empty(shape)
    at = 0
    for _, parts in holders:
        for part in parts:
            local = data[at : at + part.numel].view(part.sizes)
            at += part.numel
            for there, here in part.boxes():
                whole[there.slices].copy_(local[here.slices])
    return whole


def collected(state_dict: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The dict as the options ask for it: gathered, on the CPU, both or as it is. Containers are made anew."""
    if not (options.full_state_dict or options.cpu_offload):
        return state_dict
    move = to_cpu if options.cpu_offload else None
    return {key: _each(value, options.full_state_dict, move) for key, value in state_dict.items()}


def _each(value: Any, full: bool, move: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = gather(value) if full else value
        return move(value) if move is not None else value
    if isinstance(value, dict):
        return {key: _each(item, full, move) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_each(item, full, move) for item in value)
    return value


def to_cpu(value: torch.Tensor) -> torch.Tensor:
    """The value on the CPU, sharded as before; itself if it is there already."""
    if isinstance(value, DTensor):
        local = value.to_local().cpu()
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.cpu()
