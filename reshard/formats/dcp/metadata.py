"""torch's own records of a DCP checkpoint: what `.metadata` says of tensors, chunks and keys, and items of objects."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.state.dtypes import dtype_from_name
from reshard.state.tree import IntKey, KeyPath

__all__ = ["chunk_of", "object_to_bytes", "paths_of", "tensor_metadata", "versioned"]


def versioned(version: str | None = "1.0.0") -> dict[str, Any]:
    """The version as an argument of torch's `Metadata`; {} where it has no such field, as in torch 2.6."""
    return {"version": version} if "version" in Metadata.__dataclass_fields__ else {}


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """torch's record of a box."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def tensor_metadata(spec: TensorSpec, boxes: Iterable[Box] = ()) -> TensorStorageMetadata:
    """torch's record of a tensor that is stored in these chunks."""
    properties = TensorProperties(dtype=dtype_from_name(spec.dtype))
    return TensorStorageMetadata(properties, torch.Size(spec.shape), [chunk_of(box) for box in boxes])


def paths_of(keys: Iterable[str], paths: Mapping[str, KeyPath]) -> dict[str, tuple[Any, ...]]:
    """What torch calls `planner_data`: the path of each key in the nested state."""
    return {
        key: tuple(part.value if isinstance(part, IntKey) else part for part in paths.get(key, (key,))) for key in keys
    }


def object_to_bytes(value: Any) -> bytes:
    """An object as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
