"""`FileSystemWriter` writes DCP's files so that torch can read them, and keeps an older checkpoint
intact until the new one is complete. `FileSystemReader` reads every checkpoint that `reshard.open`
reads, through torch's `StorageReader` interface.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as _torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what torch's reader looks for in .metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem as TorchReadItem,
    SavePlan,
    SavePlanner,
    WriteItem as TorchWriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from planners.geometry.box import Box
from reshard.api.load_matching import needs_code
from reshard.api.task_shares import absolute
from reshard.checkpoint import Checkpoint, log_unchecked
from reshard.dcp.engine.states import on_the_cpu
from reshard.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    FormatError,
    LayoutError,
    StorageError,
    UnsafeDataError,
)
from reshard.execute.reading import Copy, Staged, in_pieces
from reshard.formats.dcp.reader import FORMAT, DcpFacts, open_folder
from reshard.formats.dcp.writer import object_to_bytes, paths_of, tensor_metadata, versioned
from reshard.formats.detect import kind_beside, open_contents
from reshard.formats.torch_save.writer import save_tensor
from reshard.live.copy_streams import CopyStreams, Uploads, has_copy_streams, of_caller, to_host, wait_for
from reshard.live.dtypes import NO_MEMORY, as_array, dtype_from_name, is_resolved
from reshard.live.tensors import LiveTensor, this_rank
from reshard.native.manifest import MANIFEST
from reshard.storage.base import AnyPath, Storage, Writer
from reshard.storage.opening import open_storage
from reshard.stored.contents import unknown_class
from reshard.stored.tensor import Extent, StoredChunk, copy_place

__all__ = ["FileSystemReader", "FileSystemWriter"]


__all__ += _torch.__all__

_METADATA = ".metadata"
_PIECE_BYTES = 16 << 20
"""Size of the buffer for copies to devices and other dtypes, in bytes. There are two."""
__getattr__ = partial(getattr, _torch)


class FileSystemWriter(StorageWriter):
    """Writes `__<rank>_<n>.distcp` files, and then publishes them by writing `.metadata` in one
    atomic step.

    If you overwrite a checkpoint, the new files get new names, and the old files are deleted after
    the new `.metadata` is written.
    """

    fs = _torch.FileSystem()
    """The file system that classes derived from torch's use to open local files."""

    def __init__(
        self,
        path: AnyPath,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = "torch_save",
    ) -> None:
        """Take the arguments of torch's writer. Files are always synced.

        Args:
            single_file_per_rank: if False, each item gets its own file.
            thread_count: how many files a rank writes at the same time.
            _extensions: transform the bytes of each item, the last one first.

        Raises StorageError if `thread_count` is below 1 or `serialization_format` is not supported.
        """
        del sync_files, cache_staged_state_dict
        self.per_thread_copy_ahead = per_thread_copy_ahead  # has no effect, but callers may read it
        if thread_count < 1:
            raise StorageError(f"thread_count must be >= 1, got {thread_count}")
        if getattr(serialization_format, "value", serialization_format) != "torch_save":  # 2.6 has no enum
            raise StorageError(
                f"{serialization_format} would write files that no DCP reader can read. For safetensors, use "
                "reshard.save, or reshard.convert afterwards"
            )
        self.single_file_per_rank = single_file_per_rank
        self._go_to(path)
        self.thread_count, self.overwrite = thread_count, overwrite
        self.extensions = tuple(_extensions or ())
        self.save_id = uuid.uuid4().hex
        self.rank, self._each_for_itself = 0, False

    @property
    def storage(self) -> Storage:
        """The storage that it writes to. A relative path refers to the working directory when it was set."""
        path, place = self._place
        return open_storage(place if path is self.path else self.path)

    def _go_to(self, path: AnyPath) -> None:
        self.path, self._place = path, (path, absolute(path))

    @property
    def checkpoint_id(self) -> AnyPath:
        """Where it writes, as you passed it."""
        return self.path

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """Prepare for another save, at `checkpoint_id` if given."""
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the storage. Raises StorageError if a checkpoint exists and `overwrite` is off."""
        self.is_coordinator = is_coordinator
        rank = kwargs.get("rank")
        self.rank = this_rank() if rank is None else rank
        self._each_for_itself = not kwargs.get("use_collectives", True)  # only torch's `save` passes False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the prefix of its files.

        Raises CheckpointExistsError if a checkpoint exists and `overwrite` is off. Raises
        StorageError if each rank saves for itself into a folder with a checkpoint of all ranks,
        because a load would read that one, or into a folder that would open as another format.
        """
        names = self.storage.list()
        if self._metadata_name in names and not self.overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists in {self.path}: pass overwrite=True to the writer to replace it"
            )
        if self._each_for_itself and _METADATA in names:
            raise StorageError(
                f"{self.path} has a checkpoint of all ranks, which loads would read instead of the ones that each "
                "rank saves for itself (use_collectives=False): save elsewhere, or delete it first"
            )
        if MANIFEST in names:
            raise StorageError(
                f"{self.path} has a native checkpoint, and reshard does not open a folder with both: save elsewhere"
            )
        if "common.pt" in names and (kind := kind_beside(self.storage, names, "dcp", ())):
            raise StorageError(
                f"{self.path} has a checkpoint of the format {kind}, and would open as that: save elsewhere"
            )
        mine = f"__{self.rank}_" if self._each_for_itself else ""
        self._old = [name for name in names if name.endswith(".distcp") and name.startswith(mine)]
        # every attempt gets a new name, even if `reset` is not called between them
        mark = f"{uuid.uuid4().hex[:12]}_" if self._old else ""
        first = self.rank if self._each_for_itself else 0
        return [dataclasses.replace(p, storage_data=f"__{rank}_{mark}") for rank, p in enumerate(plans, first)]

    @property
    def _metadata_name(self) -> str:
        return f"__{self.rank}{_METADATA}" if self._each_for_itself else _METADATA

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank."""
        storage, prefix = self.storage, plan.storage_data
        if storage.has(f"{prefix}0.distcp"):  # the planner reused a plan of an earlier save
            prefix = f"{prefix}{uuid.uuid4().hex[:12]}_"
        files = self._files(plan.items)
        callers = of_caller()

        def write(numbered: tuple[int, list[TorchWriteItem]]) -> list[WriteResult]:
            number, items = numbered
            return write_items(storage, f"{prefix}{number}.distcp", items, planner, self.extensions, callers)

        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="reshard-dcp-write") as pool:
            results = [result for rows in pool.map(write, enumerate(files)) for result in rows]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _files(self, items: Sequence[TorchWriteItem]) -> list[list[TorchWriteItem]]:
        if not self.single_file_per_rank:
            return [[item] for item in items]
        return [list(items[k :: self.thread_count]) for k in range(self.thread_count) if items[k :: self.thread_count]]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. The coordinator calls it after all ranks have written."""
        metadata.storage_data = {row.index: row.storage_data for rows in results for row in rows}
        metadata.storage_meta = self.storage_meta()
        storage = self.storage
        storage.publish(self._metadata_name, pickle.dumps(metadata, protocol=4))
        for name in set(self._old) - {place.relative_path for place in metadata.storage_data.values()}:
            storage.delete(name)

    def storage_meta(self) -> StorageMeta | None:
        """Return the location and ID of this save."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    # a stager, like torch's writer: subclasses change how `async_save` copies
    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return True if `async_save` should wait for `synchronize_staging`."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Return a copy of the state on the CPU. The copy is complete when this returns."""
        self.per_thread_copy_ahead = 0
        return on_the_cpu(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns only when the copy is complete."""

    def close(self) -> None:
        """Do nothing: the writer holds no resources."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return True if this could be a location to write to."""
        return bool(os.fspath(checkpoint_id))


def _stored_at(name: str, start: int, nbytes: int, transforms: Sequence[str]) -> _StorageInfo:
    return _StorageInfo(name, start, nbytes, *([transforms] if transforms else []))


class FileSystemReader(StorageReader):
    """Reads only the bytes that a plan needs, in order of their position. It never unpickles
    arbitrary objects.

    `path` can be a folder, a file, or a URL, in any format that `reshard.open` reads. If a folder
    contains several formats, DCP takes precedence.
    """

    fs = FileSystemWriter.fs

    def __init__(self, path: AnyPath, _extension_registry: Any = None) -> None:
        """Create a reader.

        Args:
            _extension_registry: undoes your own transforms. zstandard needs no registration. Only
                registered transforms run, even if the checkpoint names others.
        """
        self.path, self.extension_registry = path, _extension_registry
        self.load_id = uuid.uuid4().hex
        self._checkpoint: Checkpoint | None = None
        self._chunks: dict[str, dict[tuple[int, ...], StoredChunk]] = {}

    @property
    def checkpoint_id(self) -> AnyPath:
        """Where it reads."""
        return self.path

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, opened on first access."""
        if self._checkpoint is None:
            undo = None if self.extension_registry is None else partial(_undo, self.extension_registry)
            format = dataclasses.replace(FORMAT, open=lambda files: open_folder(files, "", undo))
            self._checkpoint = Checkpoint(*open_contents(self.path, preferred=format), self.path)
        return self._checkpoint

    @cached_property
    def storage_data(self) -> dict[MetadataIndex, _StorageInfo]:
        """File, offset, and length of each item, as torch's reader has them; empty for other formats than DCP."""
        facts = self.checkpoint.contents.details(DcpFacts)
        return {
            MetadataIndex(fqn, None if at is None else torch.Size(at)): _stored_at(
                item.file, item.offset, item.length, item.transforms
            )
            for fqn, items in (facts.index.items if facts is not None else {}).items()
            for at, item in items.items()
        }

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """Close the checkpoint. From now on, read `checkpoint_id`, if given."""
        self._checkpoint = None
        self._chunks = {}
        self.__dict__.pop("storage_data", None)
        self.load_id = uuid.uuid4().hex
        if checkpoint_id:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata of the checkpoint, whatever its format."""
        checkpoint = self.checkpoint
        table: dict[str, Any] = {
            name: tensor_metadata(tensor.stored.spec, tensor.stored.boxes) for name, tensor in checkpoint.items()
        }
        table.update({key: BytesStorageMetadata() for key in checkpoint.objects})
        planner_data = paths_of(table, checkpoint.contents.paths)
        facts = checkpoint.contents.details(DcpFacts)
        save_id, version = (None, None) if facts is None else (facts.index.save_id, facts.index.version)
        meta = StorageMeta(checkpoint_id=self.path, save_id=save_id, load_id=self.load_id)
        return Metadata(table, planner_data, self.storage_data, meta, **versioned(version))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint itself knows where its bytes are."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out `plan`: locate all bytes, then read them in order of file and position.

        Raises CorruptCheckpointError, before anything is written, if bytes are missing;
        UnsafeDataError for an object that only code can rebuild.
        """
        found: list[tuple[str, int, TorchReadItem, Extent]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.checkpoint.objects[item.storage_index.fqn]
                if (kind := unknown_class(value)) is not None:
                    raise UnsafeDataError(f"{item.storage_index.fqn}: {needs_code(kind)}")
                planner.load_bytes(item, io.BytesIO(object_to_bytes(value)))
                continue
            place = self._place(item)
            found.append((place.source.label, place.window.offset, item, place))
        with Uploads(2, _PIECE_BYTES) as uploads:
            for _, _, item, place in sorted(found, key=lambda row: row[:2]):
                (target,) = LiveTensor(item.dest_index.fqn, planner.resolve_tensor(item)).local
                dtype = dtype_from_name(self.checkpoint[item.storage_index.fqn].stored.spec.dtype)
                _fill(target, dtype, place, uploads)
                planner.commit_tensor(item, target)
        log_unchecked(self.checkpoint)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: TorchReadItem) -> Extent:
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        if fqn not in self._chunks:
            chunks = self.checkpoint[fqn].stored.chunks
            self._chunks[fqn] = {chunk.box.offsets: chunk for chunk in chunks if not chunk.box.is_empty}
        at = tuple(offset) if offset is not None else (0,) * len(item.lengths)
        chunk = self._chunks[fqn].get(at)
        if chunk is None:
            raise CorruptCheckpointError(f"tensor {fqn!r}: no chunk at {at} is stored in {self.path}")
        window = chunk.window.crop(Box(item.storage_offsets, item.lengths))
        chunk.source.check(window.offset, window.stop)
        return chunk.place.with_window(window)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return True if this could be a location to read from."""
        return bool(os.fspath(checkpoint_id))


def _fill(target: torch.Tensor, saved: torch.dtype, place: Extent, uploads: Uploads) -> None:
    """Read the bytes at `place` into a tensor on any device. Work that its stream is given later
    runs after the read.
    """
    device = target.device
    if target.dtype == saved and device.type == "cpu" and is_resolved(target):
        copy_place(place, as_array(target))
        return
    on_lane = has_copy_streams(device)
    with uploads.in_order(device) if on_lane else nullcontext():
        out = Staged(target, saved, uploads if on_lane else None)
        for there, piece in in_pieces(Copy(place, out), _PIECE_BYTES):
            assert isinstance(piece, Staged)
            piece.fill(there, _PIECE_BYTES)


def _undo(registry: Any, transforms: tuple[str, ...], most_bytes: int, data: bytes) -> bytes:
    """Undo transforms. Raises FormatError for transforms that are not registered, and
    CorruptCheckpointError if the result is too large.
    """
    try:
        extensions = registry.from_descriptor_list(transforms)
    except ValueError as error:
        raise FormatError(f"the transforms {list(transforms)} are not all registered: {error}") from None
    stream: Any = io.BytesIO(data)
    for extension in extensions:
        stream = extension.transform_from(stream)
    pieces, left = [], most_bytes
    while left >= 0 and (piece := stream.read(left + 1)):
        pieces.append(bytes(piece))
        left -= len(piece)
    if left < 0:
        raise CorruptCheckpointError(f"an item holds more than the {most_bytes} bytes that it may need")
    return b"".join(pieces)


# One of DCP's files: items one after another, each as `torch.save` writes it, or raw bytes.


_TOGETHER_BYTES = 1 << 18  # pieces up to this size are written together


class _Gathered:
    """A file object that buffers small writes. An item consists of dozens of small pieces, which
    are written together.
    """

    def __init__(self, out: Writer) -> None:
        self._out, self._waiting, self.nbytes = out, bytearray(), 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size + len(self._waiting) > _TOGETHER_BYTES:
            self.write_buffer()
        if size > _TOGETHER_BYTES:
            self._out.write(data)
        else:
            self._waiting += data
        self.nbytes += size
        return size

    def write_buffer(self) -> None:
        """Write the buffer."""
        self._out.write(self._waiting)
        self._waiting.clear()

    def flush(self) -> None:
        """Do nothing: the buffer is written when it is full or at the end."""

    close = flush


def write_items(
    storage: Storage,
    name: str,
    items: Iterable[TorchWriteItem],
    planner: SavePlanner,
    extensions: Sequence[Any],
    callers: CopyStreams,
) -> list[WriteResult]:
    """Write the data that `planner` returns for `items`, through `extensions`. Return where each
    item is stored.

    Copies from devices wait for work on the caller's streams, in every thread: see `of_caller`.
    """
    rows = []
    transforms = [extension.get_descriptor() for extension in reversed(extensions)]
    with storage.create(name) as file, callers.use_all():
        out = _Gathered(file)
        for item in items:
            start = out.nbytes
            data = planner.resolve_data(item)
            stream: Any = out
            for extension in extensions:
                stream = extension.transform_to(stream)
            if item.type == WriteItemType.BYTE_IO:
                stream.write(data.getbuffer())  # type: ignore[union-attr]  # the planner returned bytes
            else:
                (local,) = LiveTensor(item.index.fqn, data).local
                if local.is_meta:
                    raise LayoutError(f"tensor {item.index.fqn!r} {NO_MEMORY}")
                save_tensor(_compact(local, callers), stream)
            stream.close()
            info = _stored_at(name, start, out.nbytes - start, transforms)
            rows.append(WriteResult(index=item.index, size_in_bytes=out.nbytes - start, storage_data=info))
        out.write_buffer()
    return rows


def _compact(tensor: torch.Tensor, callers: CopyStreams) -> torch.Tensor:
    """Return the tensor on the CPU, as a view of no more memory than it shows: `torch.save` writes
    all of it.
    """
    if callers[tensor.device] is None:
        wait_for(tensor.device)
    tensor = to_host([tensor])[0].resolve_conj().resolve_neg()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
    return tensor if whole else tensor.contiguous().clone()
