"""Which writer and reader a call means: those it was given, ours, or torch's for URLs that fsspec alone knows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from reshard.dcp.filesystem import FileSystemReader, FileSystemWriter
from reshard.errors import CheckpointError, StorageError
from reshard.storage.opening import is_known, open_storage

__all__ = ["reader_for", "storage_by_position", "writer_for"]

Id = str | os.PathLike[str]
Call = TypeVar("Call", bound=Callable[..., Any])


def storage_by_position(call: Call) -> Call:
    """Let `call` take its storage as second argument, too: that was its place before torch 2.2, which warns of it."""
    name = next(name for name in inspect.signature(call).parameters if name.startswith("storage_"))

    @functools.wraps(call)
    def either_way(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and name not in kwargs:
            warnings.warn(f"{call.__name__} takes the storage by name: {name}=...", stacklevel=2)
            return call(args[0], **{name: args[1]}, **kwargs)
        return call(*args, **kwargs)

    return cast("Call", either_way)


def writer_for(checkpoint_id: Id | None, writer: StorageWriter | None) -> StorageWriter:
    """The writer, told of `checkpoint_id`. Raises NowhereError if there is neither."""
    if writer is not None:
        if checkpoint_id is not None:
            writer.reset(checkpoint_id)
        return writer
    if not checkpoint_id:
        raise NowhereError("`checkpoint_id` must be specified where there is no storage_writer: say where to save")
    found: StorageWriter = _of_fsspec(checkpoint_id, "FsspecWriter") or FileSystemWriter(checkpoint_id)
    return found


def reader_for(checkpoint_id: Id | None, reader: StorageReader | None) -> StorageReader:
    """The reader, told of `checkpoint_id`. Raises NowhereError if there is neither."""
    if reader is not None:
        if checkpoint_id is not None:
            reader.reset(checkpoint_id)
        return reader
    if not checkpoint_id:
        raise NowhereError("`checkpoint_id` must be specified where there is no storage_reader: say what to load")
    found: StorageReader = _of_fsspec(checkpoint_id, "FsspecReader") or FileSystemReader(checkpoint_id)
    return found


class NowhereError(CheckpointError, RuntimeError):
    """A call does not say where: torch raises a RuntimeError."""


class UnknownStorageError(StorageError, RuntimeError):
    """Nobody has a storage for a URL: torch raises a RuntimeError."""


def _of_fsspec(checkpoint_id: Id, name: str) -> Any:
    """torch's storage over fsspec, for a URL that we have no storage for and fsspec has; None for one that we have.

    Raises UnknownStorageError if neither has one.
    """
    if is_known(checkpoint_id):
        return None
    with contextlib.suppress(ImportError):
        from reshard.dcp import fsspec_filesystem  # fsspec is optional

        kind = getattr(fsspec_filesystem, name)
        if kind.validate_checkpoint_id(checkpoint_id):
            return kind(checkpoint_id)
    try:
        return open_storage(checkpoint_id) and None
    except StorageError as error:
        raise UnknownStorageError(f"Cannot detect which storage to use: {error}") from error
