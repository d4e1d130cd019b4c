"""The border to torch's sharded tensors: what a Tensor, DTensor or ShardedTensor is, as a layout and local tensors.

Only this module (with the other border modules) knows torch's private names for them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # torch has no public name for what FSDP2 over TP uses
)
from torch.nn.parameter import is_lazy

from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.layout_forms import BoxesForm, Form, ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Placement, Replicate, Shard, StridedShard
from reshard.errors import LayoutError
from reshard.state.dtypes import dtype_name
from reshard.state.tree import flatten, key_of

__all__ = [
    "device_of",
    "dtype_of",
    "form_of",
    "global_shape",
    "identity_of",
    "is_sharded",
    "is_tensor",
    "layout_of",
    "local_tensors",
    "mesh_of",
    "raw_bytes",
    "spec_of",
]


def is_tensor(value: object) -> bool:
    """Whether `value` is something with a layout: a Tensor (DTensor included) or a ShardedTensor."""
    return isinstance(value, torch.Tensor) or _is_sharded_tensor(value)


def is_sharded(value: object) -> bool:
    """Whether `value` may hold only a part of its tensor: a DTensor or ShardedTensor."""
    return isinstance(value, DTensor) or _is_sharded_tensor(value)


def _is_sharded_tensor(value: object) -> bool:
    cls: Any = type(value)  # mypy holds that type[object] is not hashable
    return _is_sharded_class(cls)


@lru_cache(maxsize=256)
def _is_sharded_class(cls: type) -> bool:
    # by name, so that the module, deprecated upstream, is imported only by those who use it
    return any(k.__name__ == "ShardedTensor" and "_shard" in k.__module__ for k in cls.__mro__)


def global_shape(tensor: Any) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    # every attribute of a ShardedTensor that a plain tensor has too warns of its age; its metadata does not
    return tuple(tensor.metadata().size) if _is_sharded_tensor(tensor) else tuple(tensor.shape)


def dtype_of(tensor: Any) -> torch.dtype:
    """Type of its elements."""
    dtype: torch.dtype = tensor.metadata().tensor_properties.dtype if _is_sharded_tensor(tensor) else tensor.dtype
    return dtype


def device_of(tensor: Any) -> torch.device:
    """Where this rank's elements are; "cpu" for a ShardedTensor of which it has none."""
    if _is_sharded_tensor(tensor):
        return next((shard.tensor.device for shard in tensor.local_shards()), torch.device("cpu"))
    device: torch.device = tensor.device
    return device


def spec_of(fqn: str, tensor: Any) -> TensorSpec:
    """Name, global shape and dtype. Raises LayoutError for a tensor whose elements are no plain array in memory."""
    if is_lazy(tensor):
        raise LayoutError(
            f"tensor {fqn!r} is a parameter of a lazy module that has no shape yet: run the module once, then try again"
        )
    if not _is_sharded_tensor(tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").strip("_")
        raise LayoutError(
            f"tensor {fqn!r} is {kind}: only dense tensors can be saved, loaded and planned; use .to_dense(), or its "
            "indices and values as tensors of their own"
        )
    return TensorSpec(fqn, global_shape(tensor), dtype_name(dtype_of(tensor)))


def identity_of(tensor: Any) -> tuple[Any, ...] | None:
    """Equal for tied tensors: the same memory seen alike, also memory that is yet to be made. None where nothing can
    be said."""
    local = getattr(tensor, "_local_tensor", None if is_sharded(tensor) else tensor)
    if not isinstance(local, torch.Tensor) or is_lazy(local) or local.is_nested or local.numel() == 0:
        return None
    at: tuple[Any, ...]
    try:
        if local.device.type == "meta":
            at = local.untyped_storage()._cdata, local.storage_offset()
        else:
            at = (local.data_ptr(),)
    except RuntimeError:  # tensor subclasses may have no memory of their own
        return None
    seen_as = local.dtype, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg()
    return *at, *seen_as, tuple(tensor.shape), is_sharded(tensor)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The planners' mesh of a device mesh; axes without a name are called `axis0`, `axis1`, ..."""
    ranks = _mesh_ranks(device_mesh)
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(ranks.ndim))
    return Mesh(list(zip(names, ranks.shape)), ranks.reshape(-1).tolist())


def _mesh_ranks(device_mesh: DeviceMesh) -> torch.Tensor:
    """Ranks by coordinate; also without a process group, where `.mesh` of a submesh asks for this process's rank."""
    layout, ranks = getattr(device_mesh, "_layout", None), getattr(device_mesh, "_rank_map", None)
    if layout is not None and ranks is not None and not dist.is_initialized():
        whole: torch.Tensor = layout.remap_to_tensor(ranks)
        return whole[0]
    mesh: torch.Tensor = device_mesh.mesh
    return mesh


def form_of(tensor: Any, fqn: str = "") -> Form:
    """How `tensor` is placed. A plain tensor is whole on every rank of the job, or on the one rank without a job.

    Raises LayoutError for a DTensor with pending reductions (`Partial`) or a placement that is not known here.
    """
    if isinstance(tensor, DTensor):
        return _dtensor_form(tensor, fqn)
    if _is_sharded_tensor(tensor):
        return _sharded_tensor_form(tensor, fqn)
    world = dist.get_world_size() if dist.is_initialized() else 1
    return ProductForm.make(Mesh({"world": world}), (Replicate(),))


def _dtensor_form(tensor: DTensor, fqn: str) -> Form:
    here = dist.get_rank() if dist.is_initialized() else -1
    try:
        literal, nested = _readings(tensor.device_mesh, here, tuple(tensor.placements), tensor.ndim)
    except LayoutError as error:
        raise LayoutError(f"tensor {fqn!r} {error}") from None
    shape = tuple(tensor.shape)
    if nested is not None and _same_parts(nested, literal, shape):
        nested = None
    if here not in literal.mesh:
        return nested or literal
    # FSDP2 over TP with uneven sizes: its local tensors were cut by TP first, which DTensor's placements, read
    # from left to right, do not say. What this rank really holds decides; where it cannot, FSDP2's way is taken.
    local = tuple(tensor._local_tensor.shape)
    for form in (nested, literal):
        if form is not None and local_shape(form, shape, here) == local:
            return form
    raise LayoutError(
        f"tensor {fqn!r}: the local tensor of rank {here} has shape {local}, but shape {shape} placed as {literal} "
        f"gives {local_shape(literal, shape, here)}; a DTensor made of uneven local tensors must follow torch.chunk"
    )


@lru_cache(maxsize=1024)
def _readings(
    device_mesh: DeviceMesh, here: int, placements: tuple[object, ...], ndim: int
) -> tuple[ProductForm, ProductForm | None]:
    """The form that the placements say, and the one that FSDP2 over TP would mean by them, if it can be meant.

    The same slice of a mesh has other ranks for another process, yet compares equal: `here` tells them apart.
    """
    mesh = mesh_of(device_mesh)
    ours = tuple(_placement(p, ndim) for p in placements)
    return ProductForm.make(mesh, ours), _right_to_left(mesh, ours)


@lru_cache(maxsize=4096)
def _same_parts(a: ProductForm, b: ProductForm, shape: tuple[int, ...]) -> bool:
    """Whether both give every rank the same elements in the same order."""
    return all(a.parts(shape, int(rank)) == b.parts(shape, int(rank)) for rank in a.mesh.ranks)


@lru_cache(maxsize=4096)
def local_shape(form: ProductForm, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Shape of the local tensor of `rank`."""
    return form.parts(shape, rank)[0].sizes


def _placement(placement: object, ndim: int) -> Placement:
    if isinstance(placement, _StridedShard):  # before Shard, of which it is a kind in some torch versions
        return StridedShard(placement.dim % max(ndim, 1), int(placement.split_factor))
    if isinstance(placement, Partial):
        raise LayoutError(f"has a pending reduction ({placement}): redistribute it to Replicate() or Shard first")
    if type(placement).__name__ == "Shard":
        return Shard(placement.dim % max(ndim, 1))  # type: ignore[attr-defined]
    if type(placement).__name__ == "Replicate":
        return Replicate()
    raise LayoutError(f"has the placement {placement}, which is not known here: redistribute it first")


def _right_to_left(mesh: Mesh, placements: tuple[Placement, ...]) -> ProductForm | None:
    """The same cuts applied in the order that FSDP2 over TP really takes: inner axes first, on the transposed mesh.

    `(_S(0, 2), S(0))` on (dp, tp=2) becomes `(S(0), S(0))` on (tp=2, dp). None where no strided shard has a split
    factor that is the product of the later axes that cut its dim: then the placements mean what they say.
    """
    order = list(range(mesh.ndim))
    out = list(placements)
    changed = False
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, StridedShard):
            continue
        later = [
            a
            for a in range(axis + 1, mesh.ndim)
            if not isinstance(placements[a], Replicate) and placements[a].dim == placement.dim  # type: ignore[union-attr]
        ]
        if not later or math.prod(mesh.shape[a] for a in later) != placement.split_factor:
            return None
        out[axis] = Shard(placement.dim)
        order.remove(axis)
        order.insert(max(order.index(a) for a in later) + 1, axis)
        changed = True
    if not changed:
        return None
    turned = mesh.submesh(*(mesh.names[a] for a in order))
    return ProductForm.make(turned, tuple(out[a] for a in order))


def _sharded_tensor_form(tensor: Any, fqn: str) -> Form:
    boxes: dict[int, list[Box]] = {}
    for shard in tensor.metadata().shards_metadata:
        if shard.placement is None or shard.placement.rank() is None:
            raise LayoutError(f"tensor {fqn!r}: a shard of this ShardedTensor does not say on which rank it is")
        boxes.setdefault(int(shard.placement.rank()), []).append(Box(shard.shard_offsets, shard.shard_sizes))
    return BoxesForm.make(boxes)


def local_tensors(tensor: Any) -> tuple[torch.Tensor, ...]:
    """The local tensors of this rank, detached and sharing memory, one for each part of the layout; () where none.

    For a DTensor or plain tensor that is one tensor; for a ShardedTensor, one for each local shard, in the order
    of its metadata.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return ()
        return (tensor._local_tensor.detach(),)
    if _is_sharded_tensor(tensor):
        here = dist.get_rank() if dist.is_initialized() else 0
        order = [
            tuple(shard.shard_offsets)
            for shard in tensor.metadata().shards_metadata
            if int(shard.placement.rank()) == here
        ]
        held = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in tensor.local_shards()}
        return tuple(held[offsets] for offsets in order if offsets in held)
    return (tensor.detach(),)


def layout_of(state: Any, fqn: str = "") -> Any:
    """The layout of a state dict (`StateLayout`, by dotted key) or of one tensor (`TensorLayout`, named `fqn`).

    Of a state dict, everything that is no tensor is passed over. Plain tensors count as whole on every rank.
    """
    if is_tensor(state):
        return TensorLayout.of(spec_of(fqn, state), form_of(state, fqn))
    world = dist.get_world_size() if dist.is_initialized() else 1
    flat = flatten(state, is_leaf=is_tensor)
    layouts = {key_of(path): value for path, value in flat.leaves.items() if is_tensor(value)}
    tensors = {key: TensorLayout.of(spec_of(key, value), form_of(value, key)) for key, value in layouts.items()}
    return StateLayout(tensors, max([world, *(layout.world_size for layout in tensors.values())]))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing memory on any device.

    A dim of size 1 may have any stride and be contiguous all the same, but torch refuses to see it as bytes then.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
