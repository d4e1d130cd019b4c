"""`FileSystemReader`: any checkpoint that `reshard.open` reads, behind torch's `StorageReader`."""

from __future__ import annotations

import io
import os
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem as TorchReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from planners.geometry.box import Box
from reshard.checkpoint.checkpoint import Checkpoint
from reshard.errors import DamagedCheckpointError, StorageError
from reshard.formats.dcp import reader as dcp
from reshard.formats.dcp.metadata import object_to_bytes, paths_of, tensor_metadata
from reshard.formats.dcp.reader import DcpFacts
from reshard.formats.opening import open_contents
from reshard.formats.stored.copying import copy_place
from reshard.formats.stored.tensor import Place, StoredChunk
from reshard.state.arrays import as_array
from reshard.state.dtypes import dtype_from_name

__all__ = ["FileSystemReader"]


class FileSystemReader(StorageReader):
    """Reads just the bytes that a plan asks for, in order of their position. Runs no pickle.

    `path` may be a folder, a file or a URL, of any format that `reshard.open` knows. Where there are files of several,
    those of DCP count.
    """

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        """Raises StorageError for an `_extension_registry`: the transforms that are read are known beforehand."""
        if _extension_registry is not None:
            raise StorageError(
                "_extension_registry would run code that the checkpoint names; zstandard is read without it, and for "
                "others there is torch.distributed.checkpoint.FileSystemReader, which works here as well"
            )
        self.path = path
        self.load_id = uuid.uuid4().hex
        self._checkpoint: Checkpoint | None = None
        self._chunks: dict[str, dict[tuple[int, ...], StoredChunk]] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it reads."""
        return self.path

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, opened when first needed."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(*open_contents(self.path, preferred=dcp))
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was opened; from now on read `checkpoint_id`, if given."""
        self._checkpoint = None
        self._chunks = {}
        self.load_id = uuid.uuid4().hex
        if checkpoint_id:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's metadata of whatever is there."""
        checkpoint = self.checkpoint
        table: dict[str, Any] = {}
        for name, tensor in checkpoint.items():
            table[name] = tensor_metadata(tensor.stored.spec, tensor.stored.boxes)
        table.update({key: BytesStorageMetadata() for key in checkpoint.objects})
        planner_data = paths_of(table, checkpoint.contents.paths)
        facts = checkpoint.contents.facts_of(DcpFacts)
        save_id = None if facts is None else facts.save_id
        meta = StorageMeta(checkpoint_id=self.path, save_id=save_id, load_id=self.load_id)
        return Metadata(state_dict_metadata=table, planner_data=planner_data, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: where bytes are is asked of the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Obey `plan`: find all bytes first, then read them in order of file and position.

        Raises DamagedCheckpointError, before anything is written, if bytes are not there.
        """
        found: list[tuple[str, int, TorchReadItem, Place]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.checkpoint.objects[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(object_to_bytes(value)))
                continue
            place = self._place(item)
            found.append((place.source.label, place.window.offset, item, place))
        for _, _, item, place in sorted(found, key=lambda row: row[:2]):
            target = planner.resolve_tensor(item).detach()
            dtype = dtype_from_name(self.checkpoint[item.storage_index.fqn].stored.spec.dtype)
            if target.dtype == dtype and target.device.type == "cpu" and not target.is_conj():
                copy_place(place, as_array(target))
            else:
                staged = torch.empty(tuple(item.lengths), dtype=dtype)
                copy_place(place, as_array(staged))
                target.copy_(staged)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: TorchReadItem) -> Place:
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        if fqn not in self._chunks:
            chunks = self.checkpoint[fqn].stored.chunks
            self._chunks[fqn] = {chunk.box.offsets: chunk for chunk in chunks if not chunk.box.is_empty}
        at = tuple(offset) if offset is not None else (0,) * len(item.lengths)
        chunk = self._chunks[fqn].get(at)
        if chunk is None:
            raise DamagedCheckpointError(f"tensor {fqn!r}: no chunk at {at} is stored in {self.path}")
        window = chunk.window.crop(Box(item.storage_offsets, item.lengths))
        chunk.source.check(window.offset, window.stop)
        return chunk.place.with_window(window)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a place to read from."""
        return bool(os.fspath(checkpoint_id))
