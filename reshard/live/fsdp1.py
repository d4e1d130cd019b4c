"""FSDP1's flat parameters: which parameters they contain, where, and how each is sharded. Private names of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from planners.geometry.box import Range, Shape, flat_boxes
from reshard.errors import NormalizationError
from reshard.live.state import same_value
from reshard.live.tensors import dtype_of, global_shape, is_sharded
from reshard.live.tree import copy_containers, leaves_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# reads FSDP1's private names.
#
# Each FSDP1 unit puts its original parameters one after another into one flat tensor, padded so that
# every rank of the unit's group holds an equal range of it:
#
#     unsharded   | a a a a a a . . | b b b b | pad |        . is padding for alignment (use_orig_params=True only)
#     rank 0      | a a a a a
#     rank 1                a . . b   and so on
#
# So a rank holds one range, perhaps empty, of the row-major flattening of each parameter; see
# `FlatCut`.


@dataclass(frozen=True)
class FlatPiece:
    """One original parameter inside a flat parameter."""

    flat: torch.Tensor
    """The flat parameter of the FSDP unit."""
    parameter: torch.Tensor
    """The optimizer's parameter: the original one with use_orig_params=True, otherwise `flat`."""
    shape: Shape
    """Shape of the original parameter."""
    start: int
    """Where the parameter begins in the unsharded flat parameter, in elements."""
    shard_numel: int
    """Elements of the flat parameter that each rank holds, including padding."""
    group: Any
    """Process group of the unit. Each of its ranks holds one range."""
    sharded: bool
    """False with NO_SHARD: every rank holds all elements."""
    mesh: Any = None
    """FSDP's device mesh, if FSDP was given one."""
    is_dtensor: bool = False
    """True if the original parameter was a DTensor, as under tensor parallelism. `shape` is then its local one."""
    handle: Any = None
    """FSDP's handle of the unit."""

    @property
    def identity(self) -> tuple[int, int]:
        """Equal only for two names of one shared parameter."""
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

    @property
    def is_idle(self) -> bool:
        """True if the optimizer has none of the parameter's elements here, and so its step count does not grow."""
        return not self.parameter.numel() and 0 not in self.shape

    @property
    def lacks_ranks(self) -> bool:
        """Whether the optimizer of some rank has no state of the parameter because that rank holds
        none of its elements."""
        ranks = range(dist.get_world_size(self.group))
        return self.parameter is not self.flat and any(low == high for low, high in map(self.range_of, ranks))

    def range_of(self, position: int) -> Range:
        """Return the range of the flattened parameter that the group's member at `position` holds."""
        if not self.sharded:
            return 0, self.numel
        low = min(max(position * self.shard_numel - self.start, 0), self.numel)
        return low, min(max((position + 1) * self.shard_numel - self.start, 0), self.numel)

    def local_slice(self) -> slice:
        """Return where this rank's range is in its shard of the flat parameter."""
        position = dist.get_rank(self.group)
        low, high = self.range_of(position)
        at = self.start + low - (position * self.shard_numel if self.sharded else 0)
        return slice(at, at + high - low) if high > low else slice(0, 0)

    def value(self) -> torch.Tensor:
        """Return the parameter as a sharded tensor that shares memory with the flat one."""
        # before the first forward pass the parameter itself is the shard
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data) if self.sharded else self.flat.data
        return self.tensor(shard[self.local_slice()])

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the parameter's shape from this rank's range, whose memory it shares.
        Nothing is sent."""
        if self.is_dtensor:
            raise NormalizationError(
                f"FSDP1 has flattened the local part, of shape {self.shape}, of a parameter that tensor parallelism "
                "has sharded before: its state cannot be split here. Use fully_shard (FSDP2) over tensor parallelism"
            )
        if not self.sharded or not self.numel:
            return local.detach().view(self.shape)
        return self.cut().tensor(local.detach())

    def free_gathered(self) -> None:
        """Free what a forward pass has gathered and no backward pass has freed. The next forward
        pass would use it again, even if the shards have been written to since."""
        is_idle = self.sharded and self.handle._training_state.name == "IDLE"
        if is_idle and hasattr(self.flat, "_full_param_padded") and not self.handle.needs_unshard():
            self.handle.reshard(True)
            self.handle._prefetched = False

    def cut(self) -> FlatCut:
        """Return the ranges of the flattened parameter that the ranks of the unit's group hold."""
        ranges = tuple(self.range_of(position) for position in range(dist.get_world_size(self.group)))
        return FlatCut(self.shape, ranges, self.group, self.mesh)


_Pieces = dict[int, list[tuple[str, FlatPiece]]]


def flat_pieces(unit: nn.Module) -> _Pieces:
    """Return, for one FSDP1 unit and by id of a module below it, the names of the module's own
    parameters that are in the unit's flat parameter, including shared ones. Empty for a unit
    without parameters of its own."""
    handle = unit.__dict__.get("_handle")
    if handle is None:
        return {}
    found: _Pieces = {}
    flat, at, index = handle.flat_param, 0, 0
    pieces: dict[tuple[int, str], FlatPiece] = {}
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not is_padding:
            info, own = flat._param_infos[index], flat._params
            pieces[id(info.module), info.param_name] = FlatPiece(
                flat=flat,
                parameter=flat if own is None else own[index],
                shape=tuple(flat._shapes[index]),
                start=at,
                shard_numel=flat._sharded_size.numel(),
                group=handle.process_group,
                sharded=bool(handle.uses_sharded_strategy),
                mesh=unit.__dict__.get("_device_mesh"),
                is_dtensor=flat._param_extensions[index] is not None,
                handle=handle,
            )
            index += 1
        at += numel
    shared = {
        (id(info.module), info.param_name): pieces[id(info.prim_module), info.prim_param_name]
        for info in flat._shared_param_infos
    }
    for (module, name), piece in (*pieces.items(), *shared.items()):
        found.setdefault(module, []).append((name, piece))
    return found


def is_flat(parameter: torch.Tensor) -> bool:
    """Return whether the parameter is a flat one."""
    return bool(getattr(parameter, "_is_flat_param", False))


def group_of(tensor: Any) -> Any:
    """Process group of a ShardedTensor."""
    return tensor._process_group


# How FSDP1's flat parameters shard an original parameter, and the sharded tensor that says so.
# Uses private names of torch.
#
# Each rank holds a range of the parameter's row-major flattening, which may begin and end within
# rows:
#
#     4 x 3 on two ranks, as FSDP1 has it    rank 0: 0 1 2 / 3 4      rank 1: 5 / 6 7 8 / 9 10 11
#     as torch.chunk splits it               rank 0: 0 1 2 / 3 4 5    rank 1: 6 7 8 / 9 10 11
#
# torch's own state dicts of FSDP1 have the second, always, and what reads them relies on it: it
# takes the first shard of a rank for its chunk of rows, without a look at where the shard says it
# is. So a tensor in chunks is given as torch gives it, and any other is a
# `CutAcrossRows`, whose shards cannot be taken for chunks.


@dataclass(frozen=True)
class FlatCut:
    """The consecutive ranges of a flattened tensor that the ranks of a process group hold."""

    shape: Shape
    ranges: tuple[Range, ...]
    """The range of elements of each position in the group: the first, and one past the last. Equal
    if the range is empty."""
    group: Any
    mesh: Any = None
    """FSDP's device mesh, of which the group is an axis. None without a mesh."""

    @property
    def is_chunks(self) -> bool:
        """Whether every rank holds the rows that `torch.chunk` along dim 0 would assign to it,
        along the last axis of the mesh. torch's state dicts have them there, even if FSDP shards
        along another axis."""
        return self.ranges == self.chunks().ranges and (self.mesh is None or self.axis() == self.mesh.ndim - 1)

    def axis(self) -> int:
        """The axis of the mesh that is the group."""
        ranks = sorted(dist.get_process_group_ranks(self.group))
        axes = range(self.mesh.ndim - 1, -1, -1)
        return next(axis for axis in axes if sorted(dist.get_process_group_ranks(self.mesh.get_group(axis))) == ranks)

    def chunks(self) -> FlatCut:
        """Return the same tensor on the same ranks, split by `torch.chunk` along dim 0."""
        rows, per_row = self.shape[0], prod(self.shape[1:])
        step = -(-rows // len(self.ranges)) * per_row
        ends = [min(i * step, rows * per_row) for i in range(len(self.ranges) + 1)]
        return FlatCut(self.shape, tuple(pairwise(ends)), self.group, self.mesh)

    def here(self) -> int:
        """Return the number of elements that this rank holds."""
        low, high = self.ranges[dist.get_rank(self.group)]
        return high - low

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the sharded tensor of which this rank holds `local`, 1-D, whose memory it shares.
        Nothing is sent, because every rank can compute what the others hold. The result is a
        DTensor or ShardedTensor if the shards are chunks."""
        if self.is_chunks:
            return self.chunk(local)
        from reshard.live.fsdp1_across_rows import CutAcrossRows  # ShardedTensor is deprecated upstream

        return CutAcrossRows.of(self, local, _sharded_tensor(self, local))

    def chunk(self, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor that torch's state dicts have, from a chunk of rows. Collective if FSDP
        shards along another axis of its mesh than the last one."""
        mesh = self.mesh
        if mesh is None or mesh.device_type != local.device.type:  # DTensor would move it to the mesh's device
            return _sharded_tensor(self, local)
        axis, last = self.axis(), mesh.ndim - 1
        made = _chunk_dtensor(self.shape, local, mesh, axis)
        return made if axis == last else made.redistribute(placements=_along(last, mesh.ndim))


def cut_of(tensor: Any) -> tuple[FlatCut, torch.Tensor] | None:
    """Return how a `CutAcrossRows` is sharded, and this rank's range of it; None for any other tensor."""
    cut = getattr(type(tensor), "_is_cut_across_rows", False)
    return (tensor.flat_cut, tensor.flat_local) if cut else None


def remade_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized memory for a tensor of another dtype with the layout of `tensor`,
    sharded or not."""
    found = cut_of(tensor)
    if found is None:
        return torch.empty_like(tensor, dtype=dtype)
    cut, local = found
    return cut.tensor(torch.empty_like(local, dtype=dtype))


def _along(axis: int, ndim: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(0) if each == axis else Replicate() for each in range(ndim)]


def _chunk_dtensor(shape: Shape, flat: torch.Tensor, mesh: Any, axis: int) -> DTensor:
    from torch.distributed.tensor import DTensor

    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    local = flat.view(flat.numel() // stride[0], *shape[1:])
    placements = _along(axis, mesh.ndim)
    # newer torch takes the offset in memory over, and then fails to deepcopy the DTensor: it is
    # made without one
    outline = local if not local.storage_offset() else local.new_empty([1] * local.dim()).expand(local.shape)
    made = DTensor.from_local(outline, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    made._local_tensor = local
    return made


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
    """Return where another rank has its part: on the device that FSDP expects."""
    kind = local.device.type
    count = 0 if kind in ("cpu", "meta") else torch.get_device_module(kind).device_count()
    return f"{kind}:{rank % count}" if count else kind


# Optimizer state of flat parameters: split into the state of the original parameters, and joined
# again.
#
# A flat parameter has one state for all that it consists of: 1-D tensors of the shard's length, and
# scalars that all of them share.


def split_state(piece: FlatPiece, parameter: torch.Tensor, values: Mapping[Any, Any], copy: bool) -> dict[Any, Any]:
    """Extract the state of one original parameter from that of `parameter`, which is the flat one
    or, with use_orig_params=True, this rank's range of the original. Tensors of its length become
    tensors of the original's shape that share memory. `copy`: copy the others, because an earlier
    parameter already has them, and no optimizer of the original parameters shares one step count
    among several."""
    out: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == _held_shape(piece, parameter):
            out[key] = piece.tensor(value[piece.local_slice()] if parameter is piece.flat else value)
        else:
            out[key] = deepcopy(value) if copy else copy_containers(value)
    return out


def join_state(
    parameter: torch.Tensor,
    together: Sequence[tuple[str, FlatPiece, Mapping[str, Any] | None]],
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[Any, Any] | None:
    """Combine the states of all original parameters, by name, that are pieces of `parameter` into
    one. For tensors that must still be written, `pairs` gets each given value and its place.

    Raises NormalizationError if they were saved with different scalars, of which a flat parameter
    has only one.
    """
    out: dict[Any, Any] = {}
    for name, piece, values in together:
        for key, value in (values or {}).items():
            if isinstance(value, torch.Tensor) and piece.shape and global_shape(value) == piece.shape:
                if key not in out:
                    # what no original parameter covers is padding, and those without
                    # state start from zero
                    out[key] = torch.zeros(
                        _held_shape(piece, parameter), dtype=dtype_of(value), device=parameter.device
                    )
                whole = out[key]
                local = whole[piece.local_slice()] if parameter is piece.flat else whole
                pairs.append((value, piece.tensor(local)))
            elif piece.sharded and not isinstance(value, torch.Tensor) and _holds(value, piece.shape):
                raise NormalizationError(
                    f"the state {key!r} of {name!r} holds a tensor of the parameter's shape {list(piece.shape)} in a "
                    f"{type(value).__name__}, beside others whose sharding is unknown. FSDP1 shards the parameter: use "
                    "FSDP2, DDP, or ShardingStrategy.NO_SHARD for this optimizer"
                )
            elif key not in out:
                out[key] = value
            elif not same_value(out[key], value):
                raise NormalizationError(
                    f"{name!r} was saved with {key!r} = {value}, but shares an FSDP1 flat parameter with "
                    f"{together[0][0]!r}, which has {out[key]}: use_orig_params=True keeps them apart"
                )
    return None if together[0][1].is_idle else out or None


def _holds(nest: Any, shape: Shape) -> bool:
    """Return whether a nest has a tensor of this shape."""
    return any(isinstance(leaf, torch.Tensor) and global_shape(leaf) == shape for leaf in leaves_of(nest).values())


def _held_shape(piece: FlatPiece, parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a state tensor that covers everything that the optimizer has."""
    if parameter is piece.flat:
        return torch.Size([piece.shard_numel])
    return parameter.shape


def fill_absent(
    state: Mapping[str, Mapping[Any, Any]], pieces: Mapping[str, FlatPiece]
) -> dict[str, Mapping[Any, Any]]:
    """Add state that only some ranks have, as empty parts on the others, which hold no element of
    an original parameter, so that all ranks can gather it together. Collective over the ranks of
    each unit."""
    sharded = {name: piece for name, piece in pieces.items() if piece.sharded}
    mine = {
        name: {key: dtype_of(value) if is_sharded(value) else value for key, value in state[name].items()}
        for name in sharded
        if name in state
    }
    groups = {tuple(dist.get_process_group_ranks(piece.group)): piece.group for piece in sharded.values()}
    outlines: dict[str, Mapping[Any, Any]] = {}
    for ranks in sorted(groups):
        told: list[Any] = [None] * len(ranks)
        dist.all_gather_object(told, mine, group=groups[ranks])
        for theirs in reversed(told):
            outlines.update(theirs)
    out = dict(state)
    for name, piece in sharded.items():
        if name not in out and name in outlines:
            low, high = piece.range_of(dist.get_rank(piece.group))
            out[name] = {key: _filled(value, piece, high - low) for key, value in outlines[name].items()}
    return out


def _filled(outline: Any, piece: FlatPiece, numel: int) -> Any:
    if not isinstance(outline, torch.dtype):
        return outline
    return piece.tensor(torch.zeros(numel, dtype=outline, device=piece.flat.device))
