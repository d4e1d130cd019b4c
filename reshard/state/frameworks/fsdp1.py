"""FSDP1 flat parameters: which original parameters are in them, and where. A border module, and the only one that
reads FSDP1's private names.

Each FSDP1 unit lays its original parameters one behind another in one flat tensor, padded so that every rank of the
unit's group holds an equal range of it:

    unsharded   | a a a a a a . . | b b b b | pad |        . is padding for alignment (use_orig_params=True only)
    rank 0      | a a a a a
    rank 1                a . . b   and so on

So a rank holds one range, perhaps empty, of the row-major flattening of each parameter; see `fsdp1_cuts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reshard.errors import NormalizationError
from reshard.state.frameworks.fsdp1_cuts import FlatCut

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
    mesh: Any = None
    """FSDP's device mesh, if it was given one."""
    is_dtensor: bool = False
    """Whether the original parameter was a DTensor before, as under tensor parallelism; `shape` is then its local
    one."""

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for two names of one shared parameter only."""
        return id(self.flat), self.start

    @property
    def numel(self) -> int:
        """Elements of the original parameter."""
        return torch.Size(self.shape).numel()

    @property
    def is_here(self) -> bool:
        """Whether this rank holds some of its elements."""
        low, high = self.range_of(dist.get_rank(self.group))
        return low < high

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
        """The parameter as a sharded tensor that shares memory with the flat one."""
        # before the first forward pass the parameter itself is the shard
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data) if self.sharded else self.flat.data
        return self.tensor(shard[self.local_slice()])

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape from this rank's range of its flattening, whose memory it shares; nothing
        is sent."""
        if self.is_dtensor:
            raise NormalizationError(
                f"FSDP1 has flattened the local part, of shape {self.shape}, of a parameter that tensor parallelism "
                "has cut before: its state cannot be taken apart here. Use fully_shard (FSDP2) over tensor parallelism"
            )
        if not self.sharded or not self.numel:
            return local.detach().view(self.shape)
        return self.cut().tensor(local.detach())

    def cut(self) -> FlatCut:
        """Which ranges of the parameter's flattening the ranks of the unit's group hold."""
        ranges = tuple(self.range_of(position) for position in range(dist.get_world_size(self.group)))
        return FlatCut(self.shape, ranges, self.group, self.mesh)


def flat_pieces(unit: nn.Module) -> dict[int, list[tuple[str, FlatPiece]]]:
    """Of one FSDP1 unit, by id of a module below it: the names of the module's own parameters that lie in the unit's
    flat parameter, shared ones too. Empty for a unit without parameters of its own."""
    found: dict[int, list[tuple[str, FlatPiece]]] = {}
    handle = unit.__dict__.get("_handle")
    if handle is not None:
        _add_unit(handle, unit.__dict__.get("_device_mesh"), found)
    return found


def is_flat(parameter: torch.Tensor) -> bool:
    """Whether the parameter is a flat one."""
    return bool(getattr(parameter, "_is_flat_param", False))


def group_of(tensor: Any) -> Any:
    """Process group of a ShardedTensor."""
    return tensor._process_group


def _add_unit(handle: Any, mesh: Any, found: dict[int, list[tuple[str, FlatPiece]]]) -> None:
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
                mesh=mesh,
                is_dtensor=flat._param_extensions[index] is not None,
            )
            pieces[id(info.module), info.param_name] = piece
            found.setdefault(id(info.module), []).append((info.param_name, piece))
            index += 1
        at += numel
    for info in flat._shared_param_infos:
        first = pieces[id(info.prim_module), info.prim_param_name]
        found.setdefault(id(info.module), []).append((info.param_name, first))
