"""Load planners: which parts of which saved chunks go where, with the truth about all keys at once."""

from __future__ import annotations

import difflib
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem as TorchReadItem

from planners.geometry.box import Box
from planners.geometry.cover import tiling_fault
from planners.geometry.overlap import Sweep
from reshard.api.load.matching import needs_code
from reshard.dcp.objects import object_from_bytes
from reshard.dcp.state import flat_state, put_at, regions_of
from reshard.errors import DamagedCheckpointError, KeyMismatchError, UnsafeDataError
from reshard.formats.dcp.metadata import chunk_of
from reshard.formats.pickles.record import unknown_class
from reshard.state.container_types import retyped
from reshard.state.tensors import global_shape, is_tensor

__all__ = ["DefaultLoadPlanner", "DynamicMetaLoadPlanner"]


class DefaultLoadPlanner(LoadPlanner):
    """Reads exactly the overlaps of what is saved with what this rank holds, and proves that they fill it.

    `allow_partial_load` leaves what is not saved as it is; otherwise all missing keys are named in one error.
    """

    def __init__(
        self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True, allow_partial_load: bool = False
    ) -> None:
        """The arguments of torch's planner; sharded tensors are always flat."""
        del flatten_sharded_tensors
        self.flatten_state_dict = flatten_state_dict
        self.allow_partial_load = allow_partial_load
        self.original_state_dict: dict[str, Any] = {}
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.metadata: Metadata | None = None
        self._regions: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target apart."""
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat_state(state_dict) if self.flatten_state_dict else (state_dict, {})
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """An item for every overlap.

        Raises KeyMismatchError with all keys that are missing or of another shape; DamagedCheckpointError where the
        saved chunks do not hold what is wanted exactly once.
        """
        if self.metadata is None:
            raise KeyMismatchError("set_up_planner was not given the metadata of a checkpoint")
        known = self.metadata.state_dict_metadata
        self._join_what_was_saved_whole(known)
        missing = [key for key in self.state_dict if key not in known]
        wrong = [text for key, value in self.state_dict.items() if (text := _misfit(key, value, known.get(key)))]
        if wrong or (missing and not self.allow_partial_load):
            raise KeyMismatchError(_complaint([] if self.allow_partial_load else missing, wrong, list(known)))
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
        """Before torch 2.4, a dict of plain values was one object: have it as one where it was saved so."""
        for key in [key for key in self.state_dict if key not in known and not is_tensor(self.state_dict[key])]:
            path = self.mappings.get(key, ())
            for depth in range(len(path) - 1, 0, -1):
                above = ".".join(map(str, path[:depth]))
                if isinstance(known.get(above), BytesStorageMetadata):
                    del self.state_dict[key]
                    self.state_dict[above], self.mappings[above] = None, path[:depth]
                    break

    def _tensor_items(self, fqn: str, value: Any, entry: TensorStorageMetadata) -> list[TorchReadItem]:
        sweep = Sweep(enumerate(_chunks(fqn, entry)))
        out = []
        for region in regions_of(fqn, value):
            index = region.index(fqn)
            self._regions[index] = region.tensor
            found = list(sweep.meeting(region.box))
            fault = tiling_fault([region.box], [common for _, _, common in found])
            if fault is not None:
                raise DamagedCheckpointError(f"tensor {fqn!r}: in the saved chunks, {fault}")
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
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """What came back from the coordinator."""
        return new_plan

    def load_bytes(self, read_item: TorchReadItem, value: io.BytesIO) -> None:
        """Put an object in its place. It is read by the restricted reader: nothing in it runs.

        Raises UnsafeDataError for an object whose class is not known here.
        """
        fqn = read_item.dest_index.fqn
        found = object_from_bytes(value.read(), fqn)
        kind = unknown_class(found)
        if kind is not None:
            raise UnsafeDataError(f"{fqn}: {needs_code(kind)}")
        found = retyped(found, self.state_dict[fqn])
        self.state_dict[fqn] = found
        if self.flatten_state_dict:
            put_at(self.original_state_dict, self.mappings[fqn], found)

    def resolve_tensor(self, read_item: TorchReadItem) -> torch.Tensor:
        """The memory that an item goes into."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: TorchReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: `resolve_tensor` gave the target's own memory."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor behind an index: to be overridden."""
        return self._regions[index]

    def transform_tensor(self, read_item: TorchReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor that an item goes into: to be overridden."""
        return tensor[Box(read_item.dest_offsets, read_item.lengths).slices] if tensor.ndim else tensor


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """For readers without metadata, such as `BroadcastingTorchSaveReader`: the target itself says what is saved."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target apart, and make metadata of it. Raises KeyMismatchError for anything that is no tensor."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        objects = [key for key, value in self.state_dict.items() if not is_tensor(value)]
        if objects:
            raise KeyMismatchError(f"only tensors can be read this way, but {objects[0]!r} is an object")
        table: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            shape = global_shape(value)
            table[fqn] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), torch.Size(shape), [chunk_of(Box.full(shape))]
            )
        self.metadata = Metadata(state_dict_metadata=table)


def _chunks(fqn: str, entry: TensorStorageMetadata) -> list[Box]:
    """Where each chunk is in the tensor.

    Readers that dequantize give the shape after it, and may leave the one chunk of the tensor with that of its blocks.
    Raises DamagedCheckpointError if there are several of another number of dims.
    """
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    if all(box.ndim == len(entry.size) for box in boxes):
        return boxes
    if len(boxes) == 1 and not any(boxes[0].offsets):
        return [Box.full(entry.size)]
    raise DamagedCheckpointError(
        f"tensor {fqn!r} has {len(entry.size)} dims and shape {list(entry.size)}, its saved chunks have "
        f"{sorted({box.ndim for box in boxes})} dims"
    )


def _misfit(key: str, value: Any, entry: Any) -> str:
    if entry is None or not is_tensor(value):
        return ""
    if not isinstance(entry, TensorStorageMetadata):
        return f"{key}: saved as an object, wanted as a tensor"
    if tuple(entry.size) != global_shape(value):
        return f"{key}: saved with shape {list(entry.size)}, wanted with {list(global_shape(value))}"
    return ""


def _complaint(missing: list[str], wrong: list[str], known: list[str]) -> str:
    lines = ["the checkpoint does not fit what is to be loaded:"]
    for key in missing:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.75) if len(missing) < 20 else []
        lines.append(f"  missing: {key}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    lines += [f"  mismatched: {text}" for text in wrong]
    if missing:
        lines.append("  (DefaultLoadPlanner(allow_partial_load=True) leaves what is not saved as it is)")
    return "\n".join(lines)
