"""How FSDP1's flat parameters cut an original parameter, and the sharded tensor that says so. A border module.

Each rank holds a range of the parameter's row-major flattening, which may begin and end within rows:

    4 x 3 on two ranks, as it lies     rank 0: 0 1 2 / 3 4      rank 1: 5 / 6 7 8 / 9 10 11
    as torch.chunk cuts                rank 0: 0 1 2 / 3 4 5    rank 1: 6 7 8 / 9 10 11

torch's own state dicts of FSDP1 have the second, always, and what reads them relies on it: it takes the first shard of
a rank for its chunk of rows, without a look at where the shard says it is. So whatever lies as chunks is given as torch
gives it, and whatever does not is a `CutAcrossRows`, which lets nobody take its shards for chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planners.geometry.box import flat_boxes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["FlatCut", "cut_of", "remade_like"]


@dataclass(frozen=True)
class FlatCut:
    """The ranges of a tensor's flattening that the ranks of a process group hold, one behind another."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    """By position in the group: first element, and the one after the last; equal where there is none."""
    group: Any
    mesh: Any = None
    """FSDP's device mesh, of which the group is an axis; None if it has none."""

    @property
    def is_chunks(self) -> bool:
        """Whether every rank holds the rows that `torch.chunk` along dim 0 would give it, along the last axis of the
        mesh, which is where torch's state dicts have them, also where FSDP shards along another."""
        return self.ranges == self.chunks().ranges and (self.mesh is None or self.axis() == self.mesh.ndim - 1)

    def axis(self) -> int:
        """The axis of the mesh that the group is."""
        ranks = sorted(dist.get_process_group_ranks(self.group))
        axes = range(self.mesh.ndim - 1, -1, -1)
        return next(axis for axis in axes if sorted(dist.get_process_group_ranks(self.mesh.get_group(axis))) == ranks)

    def chunks(self) -> FlatCut:
        """The same tensor on the same ranks, as `torch.chunk` along dim 0 cuts it."""
        rows, per_row = self.shape[0], prod(self.shape[1:])
        step = -(-rows // len(self.ranges)) * per_row
        ends = [min(i * step, rows * per_row) for i in range(len(self.ranges) + 1)]
        return FlatCut(self.shape, tuple(pairwise(ends)), self.group, self.mesh)

    def here(self) -> int:
        """Elements that this rank holds."""
        low, high = self.ranges[dist.get_rank(self.group)]
        return high - low

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """The sharded tensor of which `local`, 1-D, is what this rank holds, and whose memory it shares; nothing is
        sent, since every rank can tell what the others hold. A DTensor or ShardedTensor if it lies in chunks."""
        return self.chunk(local) if self.is_chunks else _across_rows(self, local)

    def chunk(self, local: torch.Tensor) -> torch.Tensor:
        """The tensor that torch's state dicts have, of a chunk of rows; collective where FSDP shards along another axis
        of its mesh than the last."""
        mesh = self.mesh
        if mesh is None or mesh.device_type != local.device.type:  # DTensor would move it to the mesh's device
            return _sharded_tensor(self, local)
        axis, last = self.axis(), mesh.ndim - 1
        made = _chunk_dtensor(self.shape, local, mesh, axis)
        return made if axis == last else made.redistribute(placements=_along(last, mesh.ndim))


def cut_of(tensor: Any) -> tuple[FlatCut, torch.Tensor] | None:
    """How a `CutAcrossRows` is cut, and this rank's range of it; None for any other tensor."""
    cut = getattr(type(tensor), "_is_cut_across_rows", False)
    return (tensor.flat_cut, tensor.flat_local) if cut else None


def remade_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unfilled memory for a tensor of another dtype that lies as `tensor` does, sharded or not."""
    found = cut_of(tensor)
    if found is None:
        return torch.empty_like(tensor, dtype=dtype)
    cut, local = found
    return cut.tensor(torch.empty_like(local, dtype=dtype))


def _along(axis: int, ndim: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(0) if each == axis else Replicate() for each in range(ndim)]


def _chunk_dtensor(shape: tuple[int, ...], flat: torch.Tensor, mesh: Any, axis: int) -> DTensor:
    from torch.distributed.tensor import DTensor

    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    local = flat.view(flat.numel() // stride[0], *shape[1:])
    placements = _along(axis, mesh.ndim)
    # newer torch takes the offset in memory over, and then fails to deepcopy the DTensor: it is made without one
    outline = local if not local.storage_offset() else local.new_empty([1] * local.dim()).expand(local.shape)
    made = DTensor.from_local(outline, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    made._local_tensor = local
    return made


def _across_rows(cut: FlatCut, local: torch.Tensor) -> torch.Tensor:
    from reshard.state.frameworks.fsdp1_across_rows import CutAcrossRows  # ShardedTensor is deprecated upstream

    return CutAcrossRows.of(cut, local, _sharded_tensor(cut, local))


def _sharded_tensor(cut: FlatCut, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    here, shards, metadata = dist.get_rank(cut.group), [], []
    for position, rank in enumerate(dist.get_process_group_ranks(cut.group)):
        at = 0
        for box in flat_boxes(cut.shape, *cut.ranges[position]):
            placement = f"rank:{rank}/{_device_of(rank, local) if position != here else local.device}"
            one = ShardMetadata(list(box.offsets), list(box.sizes), placement=placement)
            metadata.append(one)
            if position == here:
                shards.append(Shard(local[at : at + box.numel].view(box.sizes), one))
                at += box.numel
    properties = TensorProperties(dtype=local.dtype, requires_grad=False)
    whole = ShardedTensorMetadata(metadata, torch.Size(cut.shape), properties)
    made: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=whole, process_group=cut.group
    )
    return made


def _device_of(rank: int, local: torch.Tensor) -> str:
    """Where another rank has its part: on the device that FSDP takes it to have."""
    kind = local.device.type
    count = 0 if kind in ("cpu", "meta") else torch.get_device_module(kind).device_count()
    return f"{kind}:{rank % count}" if count else kind
