"""Convert between DCP's folders and single `torch.save` files."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import format_utils as _torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from planners.geometry.box import Box
from reshard.checkpoint import log_unchecked, open as open_checkpoint
from reshard.dcp import filesystem
from reshard.dcp.default_planner import DefaultLoadPlanner
from reshard.dcp.engine.states import MISFIT
from reshard.dcp.state_dict_saver import save
from reshard.errors import FormatError, KeyMismatchError, option_error
from reshard.formats.dcp.writer import chunk_of
from reshard.live.tensors import global_shape, is_tensor
from reshard.storage.base import AnyPath
from reshard.stored.tensor import whole

__all__ = [
    "BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save",
    "torch_save_to_dcp",
]  # fmt: skip


__getattr__ = partial(getattr, _torch)


def dcp_to_torch_save(dcp_checkpoint_dir: AnyPath, torch_save_path: AnyPath) -> None:
    """Convert a checkpoint folder to one `torch.save` file, with the nesting of the saved state.
    Memory use is bounded.
    """
    from reshard.api.convert import convert

    convert(dcp_checkpoint_dir, torch_save_path, format="torch_save", alone=True, overwrite=True)


def torch_save_to_dcp(torch_save_path: AnyPath, dcp_checkpoint_dir: AnyPath) -> None:
    """Convert one `torch.save` file to a checkpoint folder. No code in the file runs."""
    checkpoint = open_checkpoint(torch_save_path)
    nested = whole(checkpoint.nested())
    if not isinstance(nested, dict):
        raise FormatError(f"{torch_save_path} holds no dict, which DCP saves")
    log_unchecked(checkpoint)
    save(nested, checkpoint_id=dcp_checkpoint_dir, no_dist=True)


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """A planner that derives the metadata from the target, for readers that have none, such as
    `BroadcastingTorchSaveReader`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the target and derive metadata from it. Raises KeyMismatchError for a value that
        is not a tensor.
        """
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


class BroadcastingTorchSaveReader(filesystem.FileSystemReader):
    """Reads a `torch.save` file directly into sharded targets. Use it with
    `DynamicMetaLoadPlanner`.

    Each rank reads the bytes of its own shards from the file. Despite the name, which is torch's,
    nothing is broadcast.
    """

    def __init__(self, checkpoint_id: AnyPath | None = None, coordinator_rank: int = 0) -> None:
        super().__init__(checkpoint_id or "")
        self.coordinator_rank = coordinator_rank

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return empty metadata: the planner derives it from the target."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises OptionError, which is also an AssertionError as in torch, if no file was given."""
        self.is_coordinator = is_coordinator
        if not self.path:
            words = "BroadcastingTorchSaveReader needs the path of a file: give checkpoint_id"
            raise option_error(words, AssertionError)

    def prepare_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. torch names this argument differently than in its other
        reader.
        """
        return global_plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item from the file. Raises KeyMismatchError for an object, and for a tensor
        that the file does not contain, or has in another shape.
        """
        wanted = getattr(getattr(planner, "metadata", None), "state_dict_metadata", {})
        for item in plan.items:
            fqn = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                raise KeyMismatchError(f"{fqn!r}: this reader only supports loading Tensors")
            shape = self.checkpoint[fqn].shape
            if fqn in wanted and wanted[fqn].size != shape:
                raise MISFIT(f"{fqn!r} has shape {list(shape)} in {self.path}, wanted {list(wanted[fqn].size)}")
        return super().read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return True if this is a file."""
        return os.path.isfile(checkpoint_id)
