"""The save planner: what this rank holds, and who of those that hold the same writes it."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner import WriteItem as TorchWriteItem

from planners.geometry.box import Box
from planners.geometry.cover import tiling_fault
from reshard.dcp.state import Region, flat_state, regions_of
from reshard.errors import KeyMismatchError, LayoutError
from reshard.formats.dcp.metadata import chunk_of
from reshard.state.tensors import global_shape, is_sharded, is_tensor

__all__ = ["DefaultSavePlanner"]

_VERSION = "1.0.0"


class DefaultSavePlanner(SavePlanner):
    """Plans one item for each region of each tensor and for each object; regions that several ranks hold are written
    by the rank that has least to write, or, with `dedup_save_to_lowest_rank`, by the lowest.

    The global plan is proved: the regions of every tensor tile it exactly once.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        """The arguments of torch's planner. Sharded tensors are always flat and replicas always written once; plans
        are cheap enough not to be cached."""
        del flatten_sharded_tensors, dedup_replicated_tensors, enable_plan_caching
        self.flatten_state_dict = flatten_state_dict
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self._regions: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict apart."""
        self.state_dict, self.mappings = flat_state(state_dict) if self.flatten_state_dict else (dict(state_dict), {})
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """An item for everything that this rank holds."""
        items: list[TorchWriteItem] = []
        for fqn, value in self.state_dict.items():
            if not is_tensor(value):
                items.append(TorchWriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO))
                continue
            kind = WriteItemType.SHARD if is_sharded(value) else WriteItemType.TENSOR
            for region in _with_empty(fqn, value):
                self._regions[region.index(fqn)] = region.tensor
                properties = TensorProperties.create_from_tensor(region.tensor)
                data = TensorWriteData(chunk_of(region.box), properties, torch.Size(global_shape(value)))
                items.append(TorchWriteItem(index=region.index(fqn), type=kind, tensor_data=data))
        return SavePlan(items, planner_data=self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each item once, balanced in bytes over those that hold it; and the metadata of the whole.

        Raises KeyMismatchError or LayoutError where ranks disagree or the regions do not tile a tensor.
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
            if data is None:
                if not isinstance(table.setdefault(fqn, BytesStorageMetadata()), BytesStorageMetadata):
                    raise KeyMismatchError(f"the key {fqn!r} is a tensor on some ranks and an object on others")
                continue
            entry = table.setdefault(fqn, TensorStorageMetadata(data.properties, data.size, []))
            if not isinstance(entry, TensorStorageMetadata):
                raise KeyMismatchError(f"the key {fqn!r} is a tensor on some ranks and an object on others")
            if entry.size != data.size:
                raise LayoutError(f"tensor {fqn!r} has shapes {list(entry.size)} and {list(data.size)} on two ranks")
            entry.chunks.append(data.chunk)
        for fqn, entry in table.items():
            if isinstance(entry, TensorStorageMetadata):
                boxes = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
                fault = tiling_fault([Box.full(entry.size)], boxes)
                if fault is not None:
                    raise LayoutError(f"tensor {fqn!r} would not be saved whole: {fault}")
        mappings: dict[str, Any] = {}
        for plan in all_plans:
            mappings.update(plan.planner_data or {})
        return Metadata(state_dict_metadata=table, planner_data=mappings or None, version=_VERSION)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What came back from the coordinator."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: TorchWriteItem) -> torch.Tensor | io.BytesIO:
        """The elements of a region, or the bytes of an object."""
        found: torch.Tensor | io.BytesIO = self.transform_object(write_item, self.lookup_object(write_item.index))
        return found

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value behind an index: to be overridden."""
        return self._regions[index] if index in self._regions else self.state_dict[index.fqn]

    def transform_object(self, write_item: TorchWriteItem, object: Any) -> Any:
        """What is written of a value: to be overridden."""
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(object, buffer)
            buffer.seek(0)
            return buffer
        return object


def _with_empty(fqn: str, value: Any) -> list[Region]:
    """The regions of a tensor; of a tensor without any element, one empty region, so that it is not lost."""
    regions = list(regions_of(fqn, value))
    if not regions and 0 in global_shape(value):
        shape = global_shape(value)
        regions = [Region(Box.full(shape), torch.empty(shape, dtype=value.dtype))]
    return regions


def _same(a: TorchWriteItem, b: TorchWriteItem) -> bool:
    """Whether two items are of one region, one shape and one dtype; the rest of the properties may differ."""
    x, y = a.tensor_data, b.tensor_data
    return (
        x is not None
        and y is not None
        and (x.chunk, x.size, x.properties.dtype) == (y.chunk, y.size, y.properties.dtype)
    )


def _nbytes(item: TorchWriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
