"""Default planners: what each rank writes, and which parts of the saved chunks each rank reads."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner as _torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem as TorchReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem as TorchWriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from planners.geometry.box import Box
from planners.geometry.overlap import Sweep, tiling_fault
from reshard.api.load_matching import needs_code
from reshard.api.overlapping_targets import refuse_overlaps
from reshard.dcp.engine.states import (
    HeldRegion,
    StateDict,
    copied_like,
    flat_state,
    is_checkpointable,
    is_placed,
    put_at,
    refuse_misfits,
    regions_of,
    shape_of,
)
from reshard.errors import CorruptCheckpointError, KeyMismatchError, LayoutError, UnsafeDataError
from reshard.formats.dcp.writer import chunk_of, versioned
from reshard.formats.torch_save.archive import TorchArchive
from reshard.live.state import like_fresh
from reshard.live.tensors import OVERWRITTEN_BY, LiveTensor, identity_of, is_sharded, is_tensor
from reshard.live.tree import needs_class, restore_types, unresolved_class
from reshard.stored.contents import unknown_class
from reshard.stored.source import BytesSource

__all__ = ["DefaultLoadPlanner", "DefaultSavePlanner"]


__all__ += _torch.__all__

__getattr__ = partial(getattr, _torch)


class DefaultLoadPlanner(LoadPlanner):
    """Reads exactly the elements that this rank needs, and proves that they fill its target.

    With `allow_partial_load`, values that are missing from the checkpoint stay unchanged. Without
    it, one error lists all missing keys.
    """

    def __init__(
        self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True, allow_partial_load: bool = False
    ) -> None:
        """Take the arguments of torch's planner. `flatten_sharded_tensors` is ignored: sharded
        tensors are always flattened.
        """
        del flatten_sharded_tensors
        self.flatten_state_dict = flatten_state_dict
        self.allow_partial_load = allow_partial_load
        self.original_state_dict: StateDict = {}
        self.state_dict: StateDict = {}
        self.mappings: dict[str, Any] = {}
        self.metadata: Metadata | None = None
        self._regions: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: StateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the target state dict."""
        self._regions = {}
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat_state(state_dict) if self.flatten_state_dict else (state_dict, {})
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return a read item for every overlap between a saved chunk and this rank's target.

        Raises:
            LayoutError: targets overlap in memory.
            KeyMismatchError: keys are missing or have another shape; the error lists all of them.
                It is also a ValueError if a shape or kind differs.
            CorruptCheckpointError: the saved chunks do not contain every wanted element exactly
                once.
        """
        if self.metadata is None:
            raise KeyMismatchError("set_up_planner was not given the metadata of a checkpoint")
        known = self.metadata.state_dict_metadata
        self._join_what_was_saved_whole(known)
        refuse_misfits(self.state_dict, known, partial=self.allow_partial_load)
        self._give_memory(known)
        items: list[TorchReadItem] = []
        for fqn, value in self.state_dict.items():
            entry = known.get(fqn)
            if isinstance(entry, TensorStorageMetadata):
                items += self._tensor_items(fqn, value, entry)
            elif entry is not None:
                index = MetadataIndex(fqn)
                nothing = torch.Size((0,))
                items.append(TorchReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def _join_what_was_saved_whole(self, known: Mapping[str, Any]) -> None:
        """Read a dict of plain values as one object, if DCP before torch 2.4 saved it as one."""
        for key in [key for key in self.state_dict if key not in known and not is_tensor(self.state_dict[key])]:
            path = self.mappings.get(key, ())
            for depth in range(len(path) - 1, 0, -1):
                above = ".".join(map(str, path[:depth]))
                if isinstance(known.get(above), BytesStorageMetadata):
                    del self.state_dict[key]
                    self.state_dict[above], self.mappings[above] = None, path[:depth]
                    break

    def _give_memory(self, known: Mapping[str, Any]) -> None:
        """Replace targets on the meta device by tensors on the CPU. Raises LayoutError for targets that overlap."""
        wanted = {key: LiveTensor(key, value) for key, value in self.state_dict.items() if key in known}
        wanted = {key: t for key, t in wanted.items() if is_tensor(t.value) and not is_checkpointable(t.value)}
        made: dict[int, Any] = {}
        for key, tensor in wanted.items():
            if tensor.is_meta:
                fresh = tuple(torch.empty_like(local, device="cpu") for local in tensor.local)
                new = made.setdefault(id(tensor.value), like_fresh(tensor.value, fresh, key))
                self.state_dict[key] = copied_like(new, tensor.value)
                if self.flatten_state_dict:
                    put_at(self.original_state_dict, self.mappings[key], new)
        refuse_overlaps({identity_of(t.value) or key: t for key, t in wanted.items()}.values())

    def _tensor_items(self, fqn: str, value: Any, entry: TensorStorageMetadata) -> list[TorchReadItem]:
        sweep = Sweep(enumerate(_chunks(fqn, entry)))
        out = []
        for region in regions_of(fqn, value):
            if region.tensor.is_meta:
                raise LayoutError(f"{fqn!r} is on the meta device: give it memory first")
            index = region.index(fqn)
            self._regions[index] = region.tensor
            found = list(sweep.meeting(region.box))
            fault = tiling_fault([region.box], [common for _, _, common in found])
            if fault is not None:
                raise CorruptCheckpointError(f"tensor {fqn!r}: in the saved chunks, {fault}")
            for number, chunk, common in found:
                out.append(
                    TorchReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=index,
                        dest_offsets=torch.Size(common.relative_to(region.box).offsets),
                        storage_index=MetadataIndex(fqn, entry.chunks[number].offsets, number),
                        storage_offsets=torch.Size(common.relative_to(chunk).offsets),
                        lengths=torch.Size(common.sizes),
                    )
                )
        return out

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: each rank reads for itself."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return the plan that the coordinator sent back."""
        return new_plan

    def load_bytes(self, read_item: TorchReadItem, value: io.BytesIO) -> None:
        """Store an object in the target. A restricted unpickler reads it, so no code in the file
        runs.

        Raises UnsafeDataError for an object of an unknown class.
        """
        fqn = read_item.dest_index.fqn
        found = TorchArchive(BytesSource(value.read(), f"the object {fqn!r}")).object()
        kind = unknown_class(found)
        if kind is not None:
            raise UnsafeDataError(f"{fqn}: {needs_code(kind)}")
        found = restore_types(found, self.state_dict[fqn])
        if (name := unresolved_class(found)) is not None:
            raise KeyMismatchError(f"{fqn}: {needs_class(name)}")
        self.state_dict[fqn] = found
        if self.flatten_state_dict:
            put_at(self.original_state_dict, self.mappings[fqn], found)

    def resolve_tensor(self, read_item: TorchReadItem) -> torch.Tensor:
        """Return the memory that a read item fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: TorchReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: `resolve_tensor` already returned the target's own memory."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local tensor for an index. Override it to load into other tensors."""
        found: torch.Tensor = _found(self._regions, self.state_dict, index)
        return found

    def transform_tensor(self, read_item: TorchReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a local tensor that a read item fills. Override it to transform the
        target.
        """
        offsets, ndim = tuple(read_item.dest_offsets), len(read_item.lengths)
        if not any(offsets[ndim:]):  # other planners may append zeros for dims that do not exist
            offsets = offsets[:ndim]
        return tensor[Box(offsets, read_item.lengths).slices] if tensor.ndim else tensor


def _chunks(fqn: str, entry: TensorStorageMetadata) -> list[Box]:
    """Return the box of each chunk in the tensor.

    Readers that dequantize report the dequantized shape, and may leave the shape of the quantized
    blocks in the only chunk. Raises CorruptCheckpointError if there are several chunks with another
    number of dims.
    """
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    if all(box.ndim == len(entry.size) for box in boxes):
        return boxes
    if len(boxes) == 1 and not any(boxes[0].offsets):
        return [Box.full(entry.size)]
    raise CorruptCheckpointError(
        f"tensor {fqn!r} has {len(entry.size)} dims and shape {list(entry.size)}, its saved chunks have "
        f"{sorted({box.ndim for box in boxes})} dims"
    )


class DefaultSavePlanner(SavePlanner):
    """Plans one write item for each box of each tensor and for each object. If several ranks
    hold a box, the rank with the fewest bytes so far writes it, or the lowest rank with
    `dedup_save_to_lowest_rank`.

    The planner proves its global plan: the boxes of each tensor contain every element exactly
    once.
    """

    ranks: Collection[int] = ()
    """The ranks that save together. A value that another rank will overwrite is not saved here."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        """Take the arguments of torch's planner. Sharded tensors are always flattened, replicas are
        always written once, and plans are never cached, because they are cheap to compute.
        """
        del flatten_sharded_tensors, dedup_replicated_tensors, enable_plan_caching
        self.flatten_state_dict = flatten_state_dict
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.state_dict: StateDict = {}
        self.mappings: dict[str, Any] = {}
        self._regions: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state dict."""
        self._regions = {}
        self.state_dict, self.mappings = flat_state(state_dict) if self.flatten_state_dict else (dict(state_dict), {})
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return a write item for everything that this rank holds."""
        items: list[TorchWriteItem] = []
        same: dict[Any, TensorWriteData] = {}  # one per sharding, so that it is pickled once
        for fqn, value in self.state_dict.items():
            if getattr(value, OVERWRITTEN_BY, None) in self.ranks:  # that rank saves it
                continue
            if is_checkpointable(value):
                items += self._own_items(fqn, value)
                continue
            if not is_tensor(value):
                items.append(TorchWriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO))
                continue
            kind = WriteItemType.SHARD if is_sharded(value) or is_placed(value) else WriteItemType.TENSOR
            for region in _with_empty(fqn, value):
                index, tensor, shape = region.index(fqn), region.tensor, shape_of(value)
                self._regions[index] = tensor
                key = region.box, shape, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.is_pinned()
                if key not in same:
                    properties = TensorProperties.create_from_tensor(tensor)
                    same[key] = TensorWriteData(chunk_of(region.box), properties, torch.Size(shape))
                items.append(TorchWriteItem(index=index, type=kind, tensor_data=same[key]))
        return SavePlan(items, planner_data=self.mappings)

    def _own_items(self, fqn: str, value: Any) -> Iterator[TorchWriteItem]:
        """Yield the write items that a checkpointable value declares for this rank."""
        for item in value.__create_write_items__(fqn, value):
            data = item.tensor_data
            if data is None or 0 not in data.chunk.sizes or 0 in data.size:
                self._regions[item.index] = value.__get_tensor_shard__(item.index)
                yield item

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each item to one of the ranks that hold it, balanced by bytes. Return the plans
        and the global metadata.

        Raises KeyMismatchError if ranks disagree, and LayoutError if the regions of a tensor
        overlap or leave a gap.
        """
        holders: dict[MetadataIndex, list[int]] = defaultdict(list)
        item_of: dict[MetadataIndex, TorchWriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                first = item_of.setdefault(item.index, item)
                if first.tensor_data is not None and first.tensor_data != item.tensor_data and not _same(first, item):
                    raise LayoutError(f"ranks disagree about {item.index.fqn!r}: {first}, {item}")
                holders[item.index].append(rank)
        loads = [0] * len(all_plans)
        kept: list[list[TorchWriteItem]] = [[] for _ in all_plans]
        for index in sorted(item_of, key=lambda i: -_nbytes(item_of[i])):
            ranks = holders[index]
            rank = ranks[0] if self.dedup_save_to_lowest_rank else min(ranks, key=lambda r: (loads[r], r))
            loads[rank] += _nbytes(item_of[index])
            kept[rank].append(item_of[index])
        metadata = self._metadata(item_of.values(), all_plans)
        plans = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, kept)]
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def _metadata(self, items: Iterable[TorchWriteItem], all_plans: list[SavePlan]) -> Metadata:
        table: dict[str, Any] = {}
        for item in items:
            fqn, data = item.index.fqn, item.tensor_data
            made: Any = BytesStorageMetadata()
            if data is not None:
                made = TensorStorageMetadata(data.properties, data.size, [])
            entry = table.setdefault(fqn, made)
            if type(entry) is not type(made):
                raise KeyMismatchError(f"the key {fqn!r} is a tensor on some ranks and an object on others")
            if data is None:
                continue
            if entry.size != data.size:
                raise LayoutError(f"tensor {fqn!r} has shapes {list(entry.size)} and {list(data.size)} on two ranks")
            entry.chunks.append(data.chunk)
        proved = set()
        for fqn, entry in table.items():
            if isinstance(entry, TensorStorageMetadata):
                cuts = Box.full(entry.size), *(Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks)
                fault = None if cuts in proved else tiling_fault(cuts[:1], cuts[1:])
                if fault is not None:
                    raise LayoutError(f"tensor {fqn!r} would not be saved completely: {fault}")
                proved.add(cuts)
        mappings: dict[str, Any] = {}
        for plan in all_plans:
            mappings.update(plan.planner_data or {})
        return Metadata(state_dict_metadata=table, planner_data=mappings or None, **versioned())

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan that the coordinator sent back."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: TorchWriteItem) -> torch.Tensor | io.BytesIO:
        """Return the elements of a region, or the bytes of an object."""
        found: torch.Tensor | io.BytesIO = self.transform_object(write_item, self.lookup_object(write_item.index))
        return found

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value for an index. Override it to save other values."""
        return _found(self._regions, self.state_dict, index)

    def transform_object(self, write_item: TorchWriteItem, object: Any) -> Any:
        """Return what to write for a value. Override it to transform values before they are saved."""
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(object, buffer)
            buffer.seek(0)
            return buffer
        return object


def _found(regions: dict[MetadataIndex, torch.Tensor], state: StateDict, index: MetadataIndex) -> Any:
    """Return the value for an index. The plan of a subclass can name regions that are not
    registered yet.
    """
    value = state.get(index.fqn)
    if index not in regions and (is_tensor(value) or is_checkpointable(value)):
        regions.update({region.index(index.fqn): region.tensor for region in regions_of(index.fqn, value)})
    return regions[index] if index in regions else find_state_dict_object(state, index)


def _with_empty(fqn: str, value: Any) -> list[HeldRegion]:
    """Return the regions of a tensor. A tensor without elements gets one empty region, so that it
    is saved.
    """
    regions = list(regions_of(fqn, value))
    shape = shape_of(value)
    if not regions and 0 in shape:
        regions = [HeldRegion(Box.full(shape), torch.empty(shape, dtype=value.dtype, device="cpu"))]
    return regions


def _same(a: TorchWriteItem, b: TorchWriteItem) -> bool:
    """Return True if two items have the same region, shape, and dtype. Other properties may differ."""
    x, y = a.tensor_data, b.tensor_data
    return (
        x is not None
        and y is not None
        and (x.chunk, x.size, x.properties.dtype) == (y.chunk, y.size, y.properties.dtype)
    )


def _nbytes(item: TorchWriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
