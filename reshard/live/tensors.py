"""Layouts, local tensors, and placements of Tensors, DTensors, and ShardedTensors. Private names of torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from planners.geometry.box import Box, Shape
from planners.geometry.layout import BoxesForm, Form, ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from reshard.errors import FormatError, LayoutError, OptionError
from reshard.live.dtypes import NO_MEMORY, PLAIN, any_lacks_memory, dtype_name, resolved
from reshard.live.tree import class_name, flatten
from reshard.state import KeyPath, cached_property, key_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import (
        _StridedShard,  # torch has no public name for what FSDP2 over TP uses
    )
    from typing_extensions import TypeIs

# Only this module (with the other border modules) knows torch's private names for them.


Forms = tuple[ProductForm, ...]

NEWEST_TRIED = (2, 15)
"""The newest release of torch with which all tests have run."""


def warn_if_untried(version: str) -> None:
    """Warn if torch is newer than `NEWEST_TRIED`."""
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) > NEWEST_TRIED:
        tried = ".".join(map(str, NEWEST_TRIED))
        warnings.warn(
            f"reshard was tested with torch 2.6 to {tried}, not with {version}. If layouts or state dicts look wrong, "
            "use a tested version, or report the problem with this version",
            stacklevel=2,
        )


warn_if_untried(torch.__version__)


def this_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks of the job; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_tensor(value: object) -> bool:
    """Return True if `value` has a layout: a Tensor (DTensor included) or a ShardedTensor."""
    return isinstance(value, torch.Tensor) or is_sharded_tensor(value)


def global_shape(tensor: Any) -> Shape:
    """Return the shape of the full tensor."""
    # every attribute of a ShardedTensor that a plain tensor has too warns of its age; its metadata does not
    return tuple(tensor.metadata().size) if is_sharded_tensor(tensor) else tuple(tensor.shape)


def dtype_of(tensor: Any) -> torch.dtype:
    """Return the dtype of its elements."""
    dtype: torch.dtype = tensor.metadata().tensor_properties.dtype if is_sharded_tensor(tensor) else tensor.dtype
    return dtype


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a state dict, under its key. Each fact is determined once, on first access."""

    key: str
    value: Any
    """A Tensor, DTensor or ShardedTensor."""

    @cached_property
    def spec(self) -> TensorSpec:
        """Name, global shape, and dtype. Raises LayoutError for a tensor whose elements are not a
        plain array in memory."""
        tensor = self.value
        dense = type(tensor) in PLAIN or is_dtensor(tensor)  # nearly always
        if not dense or tensor.layout is not torch.strided or tensor.is_nested:
            self._refuse_others()
        shape, dtype = (tensor.shape, tensor.dtype) if dense else (global_shape(tensor), dtype_of(tensor))
        try:
            return TensorSpec(self.key, shape, dtype_name(dtype))
        except FormatError as error:
            raise FormatError(f"tensor {self.key!r}: {error}") from None

    def _refuse_others(self) -> None:
        tensor, name = self.value, f"tensor {self.key!r}"
        if is_lazy(tensor):
            raise LayoutError(
                f"{name} is a parameter of a lazy module that has no shape yet: run the module once, then try again"
            )
        if not is_sharded_tensor(tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").strip("_")
            raise LayoutError(
                f"{name} is {kind}: only dense tensors can be saved, loaded, and planned; use .to_dense(), or its "
                "indices and values as tensors of their own"
            )
        if isinstance(tensor, torch.masked.MaskedTensor):
            raise LayoutError(
                f"{name} is a MaskedTensor, of which only some elements have a value: give .get_data() and "
                ".get_mask() as tensors of their own"
            )

    @cached_property
    def form(self) -> Form:
        """How the tensor is placed. A plain tensor is full on every rank of the job, or on the one
        rank without a job.

        Raises LayoutError for a DTensor with pending reductions (`Partial`), an unknown placement,
        or a placement that allows several layouts, if the local tensor does not determine which.
        """
        if len(self.forms) > 1:
            here, shape = _rank(), global_shape(self.value)
            if len({form.parts(shape, here) for form in self.forms}) > 1:
                raise LayoutError(f"tensor {self.key!r} {explain_ambiguity(shape, self.forms, here)}")
        return self.forms[0]

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """All layouts that the tensor may have, given what this rank holds of it; the most likely
        first. Usually there is one. There are several if a strided shard is uneven: then all ranks
        together decide, see `agreed_form`.

        Raises LayoutError as `form` does, except for the last reason.
        """
        tensor, key = self.value, self.key
        if is_sharded_tensor(tensor):
            return (_sharded_tensor_form(tensor, key),)
        if not is_dtensor(tensor):
            return (_whole_everywhere(world_size()),)
        here, shape, local = _rank(), tuple(tensor.shape), tuple(tensor._local_tensor.shape)
        if not (found := _forms_held(self._possible, shape, here, local)):
            (due,) = self._possible[-1].parts(shape, here)
            raise LayoutError(
                f"tensor {key!r}: the local tensor of rank {here} has shape {local}, but shape {shape} placed as "
                f"{self._possible[-1]} gives {due.sizes}; a DTensor made of uneven local tensors must follow "
                "torch.chunk, in the order of its process groups"
            )
        return found

    @cached_property
    def _possible(self) -> Forms:
        """Return the possible meanings of a DTensor's placements, the most likely first."""
        tensor: DTensor = self.value
        mesh = tensor.device_mesh
        groups = tuple(getattr(mesh, "_dim_group_names", ()))
        try:
            return _readings(mesh, _rank(), groups, tuple(tensor.placements), tensor.ndim)
        except LayoutError as error:
            raise LayoutError(f"tensor {self.key!r} {error}") from None

    @property
    def is_ambiguous(self) -> bool:
        """True if the placements can mean several forms, so that only the local tensors of all
        ranks decide. The same on all ranks of its mesh."""
        if not is_dtensor(self.value) or not any(map(is_strided_shard, self.value.placements)):
            return False
        return len(matching_shards(self._possible, tuple(self.value.shape), {})) > 1

    def form_by_all(self) -> Form:
        """Return the form that all ranks of the tensor agree on: collective over them, unless no
        rank can be in doubt.

        Raises LayoutError as `form` does, on all ranks if several forms are possible.
        """
        tensor = self.value
        ways = matching_shards(self._possible, tuple(tensor.shape), {}) if is_dtensor(tensor) else self.forms
        if len(ways) == 1 or tensor.device_mesh.get_coordinate() is None:
            return self.forms[0]
        kinds = dist.get_backend_config(tensor.device_mesh.get_group(0))
        here = tensor._local_tensor.device  # or, if its groups can send only from there, the device of its mesh
        here = here if f"{here.type}:" in kinds else tensor.device_mesh.device_type
        possible = torch.tensor([way in self.forms for way in ways], dtype=torch.int32, device=here)
        for axis in range(tensor.device_mesh.ndim):
            dist.all_reduce(possible, dist.ReduceOp.MIN, group=tensor.device_mesh.get_group(axis))
        form = agreed_form(tuple(tensor.shape), [[way for way, fits in zip(ways, possible.tolist()) if fits]])
        if form is None:
            raise LayoutError(f"the local tensors of the ranks do not form one layout of shape {tuple(tensor.shape)}")
        return form

    def settle(self, layout: TensorLayout, rank: int) -> None:
        """Set `form` to the one that all ranks agreed on: among the forms that are possible for
        this rank, the one in which `rank` holds its elements in `layout`."""
        for form in self.forms:
            if layout.boxes(rank) == TensorLayout.of(self.spec, form).boxes(rank):
                self.__dict__["form"] = form

    @cached_property
    def local(self) -> tuple[torch.Tensor, ...]:
        """The local tensors of this rank, detached and sharing memory, one for each part of the
        layout. () if there are none.

        For a DTensor or plain tensor, this is one tensor. For a ShardedTensor, it is one for each
        local shard, in the order of its metadata. Raises LayoutError if their memory was freed.
        """
        tensor = self.value
        if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:
            return ()
        held = [holder(tensor)]
        if is_sharded_tensor(tensor):
            shards, here = tensor.metadata().shards_metadata, this_rank()
            order = [tuple(shard.shard_offsets) for shard in shards if int(shard.placement.rank()) == here]
            at = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor._local_shards}
            held = [at[offsets] for offsets in order if offsets in at]
        if any_lacks_memory(held):
            raise LayoutError(f"tensor {self.key!r} {NO_MEMORY}")
        return tuple([part.detach() for part in held])

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return dtype_of(self.value)

    @cached_property
    def shape(self) -> Shape:
        """Shape of the full tensor. It works for every kind of tensor, while `spec` refuses some."""
        return global_shape(self.value)

    @cached_property
    def device(self) -> torch.device:
        """Where this rank's elements are; "cpu" for a ShardedTensor of which it has none."""
        held = held_tensors(self.value) if is_sharded_tensor(self.value) else [self.value]
        return held[0].device if held else torch.device("cpu")

    @cached_property
    def is_sharded(self) -> bool:
        """True if it may hold only a part of its tensor: it is a DTensor or ShardedTensor."""
        return is_sharded(self.value)

    @cached_property
    def is_meta(self) -> bool:
        """True if it is on the meta device and has no memory."""
        return self.device.type == "meta" if is_sharded_tensor(self.value) else bool(self.value.is_meta)

    @property
    def is_elsewhere(self) -> bool:
        """True if it is sharded and this rank holds no element of it, so it cannot find aliases."""
        return self.is_sharded and not any(local.numel() for local in self.local)

    def is_sharded_like(self, other: LiveTensor) -> bool:
        """Return True if both are sharded and each rank holds the same elements of both."""
        one, two = self.value, other.value
        if is_dtensor(one) and is_dtensor(two):
            return (one.shape, one.placements, one.device_mesh) == (two.shape, two.placements, two.device_mesh)
        if is_dtensor(one) or is_dtensor(two) or not (self.is_sharded and other.is_sharded):
            return False
        return self.shape == other.shape and self.form == other.form


def identity_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return a value that is equal for tied tensors: the same view of the same memory, even if it
    is not allocated yet. None if this is unknown, as on a rank that holds no element."""
    if type(tensor) in PLAIN:  # nearly always
        own = _memory_of(tensor)
        return (own, tuple(tensor.shape), ()) if own else None
    if is_lazy(tensor):
        return None
    if is_sharded_tensor(tensor):
        shape, held = tensor.metadata().size, held_tensors(tensor)
        placed: Any = tuple(tuple(shard.metadata.shard_offsets) for shard in tensor._local_shards)
    else:
        shape, held, placed = tensor.shape, [holder(tensor)], tensor.placements if is_dtensor(tensor) else ()
    memory = [_memory_of(part) for part in held]
    if not any(memory) or None in memory:
        return None
    return *memory, tuple(shape), placed


def held_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors whose memory contains this rank's elements. See also `LiveTensor.local`."""
    if is_sharded_tensor(tensor):
        return [shard.tensor for shard in tensor._local_shards]
    return [holder(tensor)]


def holder(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that contains this rank's elements: for a DTensor, its local tensor."""
    return value._local_tensor if is_dtensor(value) else value


def reach_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element in memory to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


OVERWRITTEN_BY = "_reshard_overwritten_by"
"""Attribute of a tensor: the rank whose elements will overwrite those of this rank."""


def mark_overwritten(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the same elements as a tensor for which a save takes those of `rank`."""
    marked = tensor.detach()
    setattr(marked, OVERWRITTEN_BY, rank)
    return marked


def _memory_of(local: torch.Tensor) -> tuple[Any, ...] | None:
    """Return where a local tensor is in memory, with its view. () without elements, None if it is unknown."""
    if local.is_nested:
        return None
    if local.numel() == 0:
        return ()
    try:
        at = (local.untyped_storage()._cdata, local.storage_offset()) if local.is_meta else (local.data_ptr(),)
    except RuntimeError:  # tensor subclasses may have no memory of their own
        return None
    return *at, local.dtype, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg()


def _mesh_ranks(device_mesh: DeviceMesh) -> torch.Tensor:
    """Return ranks by coordinate. This also works without a process group, when `.mesh` of a
    submesh asks for this process's rank."""
    layout, ranks = getattr(device_mesh, "_layout", None), getattr(device_mesh, "_rank_map", None)
    if layout is not None and ranks is not None and not dist.is_initialized():
        whole: torch.Tensor = layout.remap_to_tensor(ranks)
        return whole[0]
    mesh: torch.Tensor = device_mesh.mesh
    return mesh


def lines_of(device_mesh: DeviceMesh, here: int) -> list[tuple[list[int], list[int]]]:
    """Return the ranks along each axis through `here`, in the order of the mesh and in that of
    their process group.

    The ranks of process groups ascend, unless `new_group(..., sort_ranks=False)` made them. Groups
    that cannot be asked are assumed to ascend: a mesh may have none, or outlive them, and other
    groups may have their names now.
    """
    grid = _mesh_ranks(device_mesh)
    lines: list[tuple[list[int], list[int]]] = []
    for axis in range(grid.ndim) if (grid == here).any() else ():
        line = mesh_line(grid, here, axis)
        try:
            group = dist.get_process_group_ranks(device_mesh.get_group(axis))
        except (RuntimeError, LookupError, ValueError, AssertionError, TypeError):  # the last is the text of torch 2.6
            group = []
        lines.append((line, group if sorted(group) == sorted(line) else sorted(line)))
    return lines


def mesh_line(grid: torch.Tensor, rank: int, axis: int) -> list[int]:
    """Return the ranks along an axis of a mesh through `rank`, in the order of the mesh."""
    at = (grid == rank).nonzero()[0].tolist()
    line: list[int] = grid[(*at[:axis], slice(None), *at[axis + 1 :])].tolist()
    return line


UNSHARDED = ("world",)
"""Names of the axes of the mesh that is recorded for a tensor without a mesh."""


@lru_cache(maxsize=8)
def _whole_everywhere(world_size: int) -> ProductForm:
    return ProductForm.make(Mesh(dict.fromkeys(UNSHARDED, world_size)), (Replicate(),))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


@lru_cache(maxsize=4096)  # of a state with many tensors, few differ in this
def _forms_held(forms: Forms, shape: Shape, here: int, local: Shape) -> Forms:
    """Return the forms that fit the local tensor of this rank, because metadata do not say how the
    tensor was sharded."""
    return matching_shards(forms, shape, {here: local} if here in forms[-1].mesh else {})


@lru_cache(maxsize=1024)
def _readings(
    device_mesh: DeviceMesh, here: int, groups: tuple[str, ...], placements: tuple[object, ...], ndim: int
) -> Forms:
    """Return what the placements may mean, the most likely first.

    The same slice of a mesh has other ranks for another process, yet the meshes compare equal, so
    `here` is part of the key. So are the names of its groups: they distinguish meshes that differ
    only in the order of the groups' ranks.
    """
    kept = set()
    for axis, (line, group) in enumerate(lines_of(device_mesh, here)):
        if group == line != sorted(line):
            kept.add(axis)
        elif group != sorted(line):
            raise LayoutError(
                f"is on a mesh with the ranks {line} along axis {axis}, but its group has them as {group}"
            )
    ranks = _mesh_ranks(device_mesh)
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(ranks.ndim))
    mesh = Mesh(list(zip(names, ranks.shape)), ranks.reshape(-1).tolist())
    return candidate_layouts(mesh, tuple(_placement(p, ndim) for p in placements), frozenset(kept))


def _placement(placement: Any, ndim: int) -> Placement:
    if is_strided_shard(placement):  # before Shard, of which it is a kind in some torch versions
        strided: _StridedShard = placement
        return StridedShard(strided.dim % max(ndim, 1), int(strided.split_factor))
    if is_pending(placement):
        raise LayoutError(f"has a pending reduction ({placement}): redistribute it to Replicate() or Shard first")
    if type(placement).__name__ == "Shard":
        return Shard(placement.dim % max(ndim, 1))
    if type(placement).__name__ == "Replicate":
        return Replicate()
    raise LayoutError(f"has the placement {placement}, which is not supported: redistribute it first")


def _sharded_tensor_form(tensor: Any, fqn: str) -> Form:
    boxes: dict[int, list[Box]] = {}
    for shard in tensor.metadata().shards_metadata:
        if shard.placement is None or shard.placement.rank() is None:
            raise LayoutError(f"tensor {fqn!r}: a shard of this ShardedTensor does not say on which rank it is")
        boxes.setdefault(int(shard.placement.rank()), []).append(Box(shard.shard_offsets, shard.shard_sizes))
    return BoxesForm.make(boxes)


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return the same DTensor over another local tensor of equal sizes, which stays on its device:
    `from_local` would move it to that of the mesh."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


@overload
def layout_of(state: torch.Tensor, fqn: str = "") -> TensorLayout: ...


@overload
def layout_of(state: Mapping[Any, Any] | Sequence[Any], fqn: str = "") -> StateLayout: ...


def layout_of(state: Any, fqn: str = "") -> TensorLayout | StateLayout:
    """Return the layout of a state dict (`StateLayout`, by dotted key) or of one tensor
    (`TensorLayout`, named `fqn`).

    Values that are not tensors are skipped. Plain tensors count as full tensors on every rank.

    Raises OptionError for modules, optimizers, and other values that are not a state dict.
    """
    if is_tensor(state):
        tensor = LiveTensor(fqn, state)
        return TensorLayout.of(tensor.spec, tensor.form)
    if not isinstance(state, Mapping | list | tuple):
        raise OptionError(f"layout_of takes a state dict or a tensor, got {state_instead_of(state)}")
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            raise OptionError(f"layout_of takes a state dict, but the value under {key!r} is {state_instead_of(value)}")
    world = world_size()
    flat = flatten(state, is_leaf=is_tensor)
    found = (LiveTensor(key_of(path), value) for path, value in flat.leaves.items() if is_tensor(value))
    tensors = {tensor.key: TensorLayout.of(tensor.spec, tensor.form) for tensor in found}
    return StateLayout(tensors, max([world, *(layout.world_size for layout in tensors.values())]))


def state_instead_of(given: object) -> str:
    """Return, for an error, the type of a value that is not a state dict, and the call that makes
    one from a module or an optimizer."""
    fix = ""
    if isinstance(given, torch.nn.Module):
        fix = ": pass reshard.get_model_state_dict(model)"
    elif isinstance(given, torch.optim.Optimizer):
        fix = ": pass reshard.get_optimizer_state_dict(model, optimizer)"
    elif isinstance(given, str | os.PathLike):
        fix = ": for a checkpoint, reshard.open(path) reads it, and its .layout has the layouts"
    return f"{type(given).__name__}{fix}"


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, sharing memory, on any device.

    A contiguous tensor may have any stride in a dim of size 1, but torch then refuses to view it as
    bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def resolved_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of any tensor in row-major order. This is a copy only if its memory has
    another order."""
    return raw_bytes(resolved(tensor).contiguous())


# Which of torch's distributed tensors a value is, by the names of its classes: none is imported to
# find that out.
#
# `torch.distributed.tensor` takes longer to import than a small checkpoint takes to save, and where
# no DTensor was made it is not needed. A DTensor can only exist where its class does, and then the
# class says so itself, whichever path it was imported by, before this package or after it, and
# whatever another thread imports meanwhile. Where one is made after another, its class is there,
# and to import it is to look into a table.


def _named(*names: str) -> Callable[[object], bool]:
    """Return a function that tests whether a value's class, or one of its base classes, is a class
    of torch.distributed with such a name."""

    @lru_cache(maxsize=1024)  # programs that make classes as they go have them forgotten
    def known(cls: type) -> bool:
        # its module differs from release to release, but not the package
        named = (c for c in cls.__mro__ if c.__name__ in names)
        return any(c.__module__.startswith("torch.distributed.") for c in named)

    return lambda value: known(type(value))  # type: ignore[arg-type]  # a class has a hash


is_dtensor = cast("Callable[[object], TypeIs[DTensor]]", _named("DTensor"))
is_sharded_tensor = _named("ShardedTensor")
is_sharded = _named("DTensor", "ShardedTensor")
"""Return whether a value may hold only a part of its tensor."""
is_strided_shard = _named("_StridedShard")
"""Return whether a placement is that of FSDP2 over tensor parallelism, for which torch has no
public name. In some releases of torch, it is a subclass of `Shard`."""
is_pending = _named("Partial")
"""Return whether a placement of a DTensor is a pending reduction."""


def dtensor_of(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any] | None = None, **whole: Any) -> DTensor:
    """Return a DTensor of this local tensor, which stays on its device: `DTensor.from_local` would
    move it to that of the mesh. FSDP2 with CPU offload has parameters on the host, on a mesh of
    devices. `whole`: shape and stride."""
    from torch.distributed.tensor import DTensor

    stays = local.device.type in (mesh.device_type, "meta")
    outline = local if stays else torch.empty(local.shape, dtype=local.dtype, device="meta")
    made = DTensor.from_local(outline, mesh, placements, run_check=False, **whole)
    return made if stays else with_local(made, local)


def dtensor_like(local: torch.Tensor, model: DTensor) -> DTensor:
    """Return a DTensor of this local tensor with the shape, mesh, and placements of `model`."""
    return dtensor_of(local, model.device_mesh, model.placements, shape=model.shape, stride=model.stride())


# What DTensor's placements on a mesh can mean: which elements each rank holds. The metadata alone
# do not say it.
#
# torch shards and gathers along an axis in the order of that axis's process groups, and these mostly
# ascend, whatever the mesh says: on `DeviceMesh("cpu", [1, 0])`, FSDP2, `distribute_tensor` and
# `full_tensor` give rank 0 the first rows. And FSDP2 over tensor parallelism shards the inner axes
# first, which placements read from left to right do not say:
#
#     7 rows, (_S(0, 2), S(0)) on (dp=3, tp=2)     rank (dp, tp)    0,0   0,1   1,0   1,1   2,0   2,1
#     as FSDP2 shards: tp, then dp                                  0 1   4     2 3   5     -     6
#     as `distribute_tensor` shards: dp, then tp                    0 1   4     2 3   5     6     -
#
# If rows divide evenly, all orders give the same result; otherwise, only what ranks
# hold can decide.


@lru_cache(maxsize=1024)
def candidate_layouts(mesh: Mesh, placements: tuple[Placement, ...], kept: frozenset[int] = frozenset()) -> Forms:
    """Return the possible forms of tensors with these placements, each once, the most likely first:
    as FSDP2 shards what tensor parallelism (by `distribute_tensor`) leaves; as all axes shard that
    a strided shard leaves for later; and as the placements say literally. The shapes of local
    tensors decide, see `matching_shards`.

    Args:
        kept: axes whose process groups have their ranks in the order of the mesh. The ranks of all
        others ascend.

    Raises LayoutError, without the tensor's name, if the groups would assign elements to no rank.
    """
    grouped = _mesh_in_group_order(mesh, placements, kept)
    if grouped is None:
        raise LayoutError(
            "is sharded over several axes of a mesh whose ranks do not ascend: torch shards in the order of each "
            "axis's process group, which gives some elements to two ranks and others to none. Use a mesh whose "
            f"ranks ascend along every axis; this one is {mesh}"
        )
    literal = ProductForm.make(grouped, placements)
    outermost = [
        next(axis for axis, p in enumerate(placements) if isinstance(p, StridedShard) and p.dim == dim)
        for dim in {p.dim for p in placements if isinstance(p, StridedShard)}
    ]
    every = [axis for axis, placement in enumerate(placements) if isinstance(placement, StridedShard)]
    return tuple(dict.fromkeys((_cut_later(literal, outermost), _cut_later(literal, every), literal)))


def matching_shards(forms: Sequence[ProductForm], shape: Shape, held: Mapping[int, Shape]) -> Forms:
    """Return the `forms` whose local tensors have the shapes that some ranks hold (rank -> shape),
    in order. Of several forms that give every rank the same elements, the last one stays, which
    matches the placements literally."""
    found: list[ProductForm] = []
    for form in forms:
        if all(_local_shape(form, shape, rank) == sizes for rank, sizes in held.items()):
            alike = next((i for i, other in enumerate(found) if same_parts(form, other, shape)), len(found))
            found[alike : alike + 1] = [form]
    return tuple(found)


def agreed_form(shape: Shape, said: Iterable[Collection[Form]]) -> Form | None:
    """Return the one form that is possible on all ranks, from the forms that each rank considers
    possible. None if there is none.

    Raises LayoutError, without the tensor's name, if several are possible that differ in some
    element.
    """
    parties = list(said)
    found = [form for form in parties[0] if all(form in other for other in parties[1:])]
    if len(found) > 1:
        raise LayoutError(explain_ambiguity(shape, found, None))
    return found[0] if found else None


def explain_ambiguity(shape: Shape, forms: Sequence[Form], rank: int | None) -> str:
    """Explain why the layout of a tensor of this shape is unknown: all these forms fit what `rank`
    holds, or all ranks."""
    who = "all ranks hold" if rank is None else f"rank {rank} holds, and it cannot determine which one"
    return (
        f"of shape {shape} may be sharded in {len(forms)} ways that fit what {who}: {'; '.join(map(str, forms))}. "
        "FSDP2 shards after tensor parallelism, `distribute_tensor` shards from left to right, and uneven shards "
        "then differ. Pad the dim to a multiple of the ranks that shard it, or redistribute to plain shards first"
    )


@lru_cache(maxsize=4096)
def _local_shape(form: ProductForm, shape: Shape, rank: int) -> Shape:
    return form.parts(shape, rank)[0].sizes


@lru_cache(maxsize=4096)
def same_parts(a: ProductForm, b: ProductForm, shape: Shape) -> bool:
    """Return True if both give every rank the same elements in the same order."""
    return a == b or all(a.parts(shape, rank) == b.parts(shape, rank) for rank in a.ranks())


def _mesh_in_group_order(mesh: Mesh, placements: Sequence[Placement], kept: Collection[int]) -> Mesh | None:
    """Return the mesh with each rank at its place in its process groups, along the sharding axes.
    None if two ranks would be at one place, as on `[[0, 3], [2, 1]]`."""
    grid = mesh.ranks.reshape(mesh.shape)
    cut = [a for a, placement in enumerate(placements) if not isinstance(placement, Replicate) and a not in kept]
    if all((np.diff(grid, axis=axis) > 0).all() for axis in cut):
        return mesh
    places = list(np.indices(grid.shape))
    for axis in cut:
        places[axis] = grid.argsort(axis=axis).argsort(axis=axis)
    out = np.full_like(grid, -1)
    out[tuple(places)] = grid
    return None if (out < 0).any() else Mesh(mesh.axes, out.reshape(-1).tolist())


def _cut_later(form: ProductForm, axes: Collection[int]) -> ProductForm:
    """Return a form with the same shards, in which the strided shards on `axes` come after the
    inner axes whose product is their split factor, on a mesh with its axes in that order.

    `(_S(0, 2), S(0))` on (dp, tp=2) becomes `(S(0), S(0))` on (tp=2, dp). A strided shard whose
    split factor is no such product is meant literally, and stays.
    """
    mesh, placements = form.mesh, form.placements
    order: list[int] = []  # the axes, in the order in which they shard
    out = list(placements)
    for axis in reversed(range(mesh.ndim)):
        placement, at = placements[axis], 0
        if axis in axes and isinstance(placement, StridedShard):
            pieces = 1
            for place, other in enumerate(order):
                cut = placements[other]
                if not isinstance(cut, Replicate) and cut.dim == placement.dim:
                    pieces *= mesh.shape[other]
                    if pieces == placement.split_factor:
                        at, out[axis] = place + 1, Shard(placement.dim)
                        break
        order.insert(at, axis)
    if order == list(range(mesh.ndim)):
        return form
    return ProductForm.make(mesh.submesh(*(mesh.names[a] for a in order)), tuple(out[a] for a in order))


# Tensor subclasses that are made of plain tensors: what they are made of, and what that is called.


_TRAINING = "torchao.prototype.quantized_training"
wrappers: dict[str, str] = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    f"{_TRAINING}.bitnet.BitNetTrainingLinearWeight": "_data",
    f"{_TRAINING}.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
}
"""Full names of classes that only change how a tensor is used in computations, and the attribute
with the tensor."""


def inner_names(value: Any) -> list[str]:
    """Return the attributes with the tensors that make up a tensor, or a DTensor's local one. Empty
    for a plain one."""
    local = holder(value)
    if is_plain(value) or class_name(local) in wrappers or not hasattr(local, "__tensor_flatten__"):
        return []
    return list(local.__tensor_flatten__()[0])


def tensor_class(value: Any) -> str:
    """Return the class of a tensor, or of a DTensor's local one, if it matters. "" for plain ones."""
    local = holder(value)
    if is_plain(value) or is_sharded_tensor(local) or class_name(local) in wrappers:
        return ""  # how a tensor is sharded, or multiplied, is no class of its values
    return "" if type(local).__module__.startswith("torch.") and not inner_names(local) else class_name(local)


def is_plain(value: object) -> bool:
    """Return False if a value is a tensor of a custom class, or a DTensor whose local tensor is one."""
    return not isinstance(value, torch.Tensor) or type(holder(value)) in PLAIN


def class_kinds(leaves: Mapping[KeyPath, Any]) -> dict[KeyPath, str]:
    """Return "tensor:app.Quantized" by path, for tensors of custom classes, and for tensors of such
    classes inside them."""
    out: dict[KeyPath, str] = {}
    for path, value in leaves.items():
        if is_plain(value):
            continue
        value = settled(value)
        if name := tensor_class(value):
            out[path] = f"tensor:{name}"
            out |= class_kinds({(*path, part): getattr(holder(value), part) for part in inner_names(value)})
    return out


def settled(value: Any) -> Any:
    """Return the value itself. For the result of a collective that may be in progress, return the
    plain tensor after it has arrived; for a wrapper, the tensor inside."""
    if is_plain(value):
        return value
    local = holder(value)
    inner: torch.Tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        inner = local.trigger_wait()  # type: ignore[attr-defined]
    elif attribute := wrappers.get(class_name(local)):
        inner = getattr(local, attribute)
    else:
        return value
    return dtensor_like(inner, value) if is_dtensor(value) else inner


def wrapped_like(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return `value`, inside a wrapper of the same class if `model` is one."""
    local, inner = holder(model), holder(value)
    attribute = wrappers.get(class_name(local))
    if attribute is None:
        return value
    context = local.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    made = type(local).__tensor_unflatten__({attribute: inner}, context, inner.shape, inner.stride())  # type: ignore[attr-defined]
    return with_local(value, made) if is_dtensor(value) else made


def forget_derived(value: torch.Tensor) -> None:
    """Set what a wrapper has computed from the tensor inside, such as a scale, to None, because the
    tensor changed."""
    local = holder(value)
    attribute = wrappers.get(class_name(local))
    if attribute is not None:
        for name in set(local.__tensor_flatten__()[0]) - {attribute}:  # type: ignore[attr-defined]
            setattr(local, name, None)
