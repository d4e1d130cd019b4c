"""Which writer and reader a call means: those it was given, ours, or torch's for URLs that fsspec alone knows."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from reshard.dcp.reader import FileSystemReader
from reshard.dcp.writer import FileSystemWriter
from reshard.errors import CheckpointError
from reshard.storage.opening import is_known

__all__ = ["reader_for", "writer_for"]

Id = str | os.PathLike[str]


def writer_for(checkpoint_id: Id | None, writer: StorageWriter | None) -> StorageWriter:
    """The writer, told of `checkpoint_id`. Raises CheckpointError if there is neither."""
    if writer is not None:
        if checkpoint_id is not None:
            writer.reset(checkpoint_id)
        return writer
    if not checkpoint_id:
        raise CheckpointError("say where to save: give checkpoint_id or storage_writer")
    found: StorageWriter = _of_fsspec(checkpoint_id, "FsspecWriter") or FileSystemWriter(checkpoint_id)
    return found


def reader_for(checkpoint_id: Id | None, reader: StorageReader | None) -> StorageReader:
    """The reader, told of `checkpoint_id`. Raises CheckpointError if there is neither."""
    if reader is not None:
        if checkpoint_id is not None:
            reader.reset(checkpoint_id)
        return reader
    if not checkpoint_id:
        raise CheckpointError("say what to load: give checkpoint_id or storage_reader")
    found: StorageReader = _of_fsspec(checkpoint_id, "FsspecReader") or FileSystemReader(checkpoint_id)
    return found


def _of_fsspec(checkpoint_id: Id, name: str) -> Any:
    """torch's storage over fsspec, for a URL that we have no storage for and fsspec has."""
    if is_known(checkpoint_id):
        return None
    try:
        from torch.distributed.checkpoint import _fsspec_filesystem  # fsspec is optional
    except ImportError:
        return None
    kind = getattr(_fsspec_filesystem, name)
    return kind(checkpoint_id) if kind.validate_checkpoint_id(checkpoint_id) else None
