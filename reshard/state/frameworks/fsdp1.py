"""FSDP1 flat parameters: which original parameters are in them, and where. A border module, and the only one that
reads FSDP1's private names.

Each FSDP1 unit lays its original parameters one behind another in one flat tensor, padded so that every rank of the
unit's group holds an equal range of it:

    unsharded   | a a a a a a . . | b b b b | pad |        . is padding for alignment (use_orig_params=True only)
    rank 0      | a a a a a
    rank 1                a . . b   and so on

So a rank holds one range, perhaps empty, of the row-major flattening of each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planners.geometry.box import flat_boxes

__all__ = ["FlatPiece", "flat_pieces", "group_of", "is_flat"]


@dataclass(frozen=True)
class FlatPiece:
    """One original parameter inside a flat parameter."""

    flat: torch.Tensor
    """The unit's flat parameter."""
    parameter: torch.Tensor
    """What the optimizer has: the original parameter with use_orig_params=True, else `flat`."""
    shape: tuple[int, ...]
    """Of the original parameter."""
    start: int
    """Where the parameter begins in the unsharded flat parameter, in elements."""
    shard_numel: int
    """Elements of the flat parameter that each rank holds, with padding."""
    group: Any
    """Process group of the unit; every rank of it holds one range."""
    sharded: bool
    """False with NO_SHARD: every rank holds the whole."""

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for two names of one shared parameter only."""
        return id(self.flat), self.start

    @property
    def numel(self) -> int:
        """Elements of the original parameter."""
        return torch.Size(self.shape).numel()

    def range_of(self, position: int) -> tuple[int, int]:
        """The range of the parameter's flattening that the group's member at `position` holds."""
        if not self.sharded:
            return 0, self.numel
        low = min(max(position * self.shard_numel - self.start, 0), self.numel)
        return low, min(max((position + 1) * self.shard_numel - self.start, 0), self.numel)

    def local_slice(self) -> slice:
        """Where this rank's range lies in its shard of the flat parameter."""
        position = dist.get_rank(self.group)
        low, high = self.range_of(position)
        at = self.start + low - (position * self.shard_numel if self.sharded else 0)
        return slice(at, at + high - low) if high > low else slice(0, 0)

    def value(self) -> torch.Tensor:
        """The parameter as a tensor that shares memory with the flat one: a ShardedTensor of this rank's boxes."""
        # before the first forward pass the parameter itself is the shard
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data) if self.sharded else self.flat.data
        return self.tensor(shard[self.local_slice()])

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape from this rank's range of its flattening, whose memory it shares; nothing
        is sent, since every rank can tell what the others hold."""
        if not self.sharded or not self.numel:
            return local.detach().view(self.shape)
        return _sharded_tensor(self, local.detach())


def flat_pieces(unit: nn.Module) -> dict[int, list[tuple[str, FlatPiece]]]:
    """Of one FSDP1 unit, by id of a module below it: the names of the module's own parameters that lie in the unit's
    flat parameter, shared ones too. Empty for a unit without parameters of its own."""
    found: dict[int, list[tuple[str, FlatPiece]]] = {}
    handle = unit.__dict__.get("_handle")
    if handle is not None:
        _add_unit(handle, found)
    return found


def is_flat(parameter: torch.Tensor) -> bool:
    """Whether the parameter is a flat one."""
    return bool(getattr(parameter, "_is_flat_param", False))


def group_of(tensor: Any) -> Any:
    """Process group of a ShardedTensor."""
    return tensor._process_group


def _add_unit(handle: Any, found: dict[int, list[tuple[str, FlatPiece]]]) -> None:
    flat, at, index = handle.flat_param, 0, 0
    pieces: dict[tuple[int, str], FlatPiece] = {}
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not is_padding:
            info, own = flat._param_infos[index], flat._params
            parameter = flat if own is None else own[index]
            piece = FlatPiece(
                flat=flat,
                parameter=parameter,
                shape=tuple(flat._shapes[index]),
                start=at,
                shard_numel=flat._sharded_size.numel(),
                group=handle.process_group,
                sharded=bool(handle.uses_sharded_strategy),
            )
            pieces[id(info.module), info.param_name] = piece
            found.setdefault(id(info.module), []).append((info.param_name, piece))
            index += 1
        at += numel
    for info in flat._shared_param_infos:
        first = pieces[id(info.prim_module), info.prim_param_name]
        found.setdefault(id(info.module), []).append((info.param_name, first))


def _sharded_tensor(piece: FlatPiece, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    here, shards, metadata = dist.get_rank(piece.group), [], []
    for position, rank in enumerate(dist.get_process_group_ranks(piece.group)):
        at = 0
        for box in flat_boxes(piece.shape, *piece.range_of(position)):
            one = ShardMetadata(list(box.offsets), list(box.sizes), placement=f"rank:{rank}/{local.device}")
            metadata.append(one)
            if position == here:
                shards.append(Shard(local[at : at + box.numel].view(box.sizes), one))
                at += box.numel
    properties = TensorProperties(dtype=local.dtype, requires_grad=False)
    whole = ShardedTensorMetadata(metadata, torch.Size(piece.shape), properties)
    made: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=whole, process_group=piece.group
    )
    return made
