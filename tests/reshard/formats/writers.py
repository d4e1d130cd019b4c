"""Writes checkpoints the way other frameworks do, in one process, so that they can be bent and broken; counts reads."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Chunks = Sequence[tuple[tuple[int, ...], torch.Tensor]]


def archive(value: Any) -> bytes:
    """The bytes of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def copy_saved_as(file: Path, target: Path) -> None:
    """A copy of a file of `torch.save`, as if it had been saved under that name."""
    with zipfile.ZipFile(file) as saved, zipfile.ZipFile(target, "w") as copy:
        for record in saved.infolist():
            copy.writestr(f"{target.stem}/{record.filename.partition('/')[2]}", saved.read(record))


class DcpWriter:
    """A DCP checkpoint of the given tensors, in chunks, one file a chunk's turn: `__<turn % files>_0.distcp`."""

    def __init__(self, tensors: Mapping[str, Chunks], objects: Mapping[str, Any] | None = None, files: int = 2) -> None:
        self.data = {f"__{i}_0.distcp": bytearray(b"x" * i) for i in range(files)}  # unaligned, as in real files
        self.metadata = Metadata({}, None, {})
        turn = 0
        for key, chunks in tensors.items():
            shape = [0] * chunks[0][1].ndim
            boxes = []
            for offsets, tensor in chunks:
                shape = [max(s, o + n) for s, o, n in zip(shape, offsets, tensor.shape)]
                boxes.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
                self._item(MetadataIndex(key, torch.Size(offsets)), archive(tensor), turn % files)
                turn += 1
            properties = TensorProperties(dtype=chunks[0][1].dtype)
            self.metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for key, value in (objects or {}).items():
            self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
            self._item(MetadataIndex(key), value if isinstance(value, bytes) else archive(value), 0)

    def _item(self, index: MetadataIndex, data: bytes, file: int) -> None:
        name = f"__{file}_0.distcp"
        self.metadata.storage_data[index] = _StorageInfo(name, len(self.data[name]), len(data))
        self.data[name] += data

    def write(self, folder: Path) -> Path:
        """Write all files; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.data.items():
            (folder / name).write_bytes(data)
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata, 4))
        return folder


def grid(tensor: torch.Tensor, *pieces: int) -> Chunks:
    """The chunks that `torch.chunk` makes in each dim."""
    result: list[tuple[tuple[int, ...], torch.Tensor]] = [((0,) * tensor.ndim, tensor)]
    for d, n in enumerate(pieces):
        cut = []
        for offsets, part in result:
            start = offsets[d]
            for piece in part.chunk(n, d):
                cut.append(((*offsets[:d], start, *offsets[d + 1 :]), piece))
                start += piece.shape[d]
        result = cut
    return [(offsets, part.clone()) for offsets, part in result]


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
