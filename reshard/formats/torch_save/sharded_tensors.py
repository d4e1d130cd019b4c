"""ShardedTensors in pickles: each rank's file has its shards and says where they lie; all together are the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError
from reshard.formats.pickles.record import Record
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.formats.stored.tensor import StoredChunk, StoredTensor
from reshard.formats.torch_save.file import TorchFile, stored_tensor
from reshard.state.dtypes import dtype_name

__all__ = ["is_sharded_tensor", "join_sharded", "sharded_ranks"]


def is_sharded_tensor(value: object) -> bool:
    """Whether a value of a pickle is a ShardedTensor."""
    return isinstance(value, Record) and value.name == "ShardedTensor"


def join_sharded(name: str, values: Mapping[int, Any], files: Mapping[int, TorchFile]) -> StoredTensor:
    """A ShardedTensor from the records in the files of all ranks.

    Raises DamagedCheckpointError if the records make no sense or disagree.
    """
    specs: set[tuple[tuple[int, ...], str]] = set()
    chunks: dict[Box, StoredChunk] = {}
    for rank, value in sorted(values.items()):
        label = files[rank].source.label
        if not is_sharded_tensor(value):
            raise DamagedCheckpointError(f"{label}: {name!r} is no ShardedTensor there, as it is on other ranks")
        try:
            locals_, metadata = value.state[0], value.state[1].fields
            shape = tuple(int(n) for n in metadata["size"])
            dtype = _dtype(metadata["tensor_properties"])
            specs.add((shape, dtype))
            for shard in locals_:
                ref, at = shard.fields["tensor"], shard.fields["metadata"].fields
                box = Box(at["shard_offsets"], at["shard_sizes"])
                _add_shard(chunks, name, box, shape, ref, files[rank], rank)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, DamagedCheckpointError):
                raise
            raise DamagedCheckpointError(f"{label}: the ShardedTensor {name!r} makes no sense: {error}") from None
    if len(specs) != 1:
        raise DamagedCheckpointError(f"{name!r}: the ranks disagree about its shape or dtype: {sorted(specs)}")
    shape, dtype = specs.pop()
    return StoredTensor(TensorSpec(name, shape, dtype), tuple(chunks.values()))


def sharded_ranks(name: str, record: Record, file: TorchFile) -> list[int]:
    """The ranks that hold shards of a ShardedTensor, by what one of them wrote.

    Raises DamagedCheckpointError if the record makes no sense.
    """
    try:
        placed = [shard.fields["placement"].fields["_rank"] for shard in record.state[1].fields["shards_metadata"]]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise DamagedCheckpointError(
            f"{file.source.label}: the ShardedTensor {name!r} makes no sense: {error}"
        ) from None
    return sorted({rank for rank in placed if type(rank) is int})


def _dtype(properties: Any) -> str:
    value = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r:.40} is no dtype")
    return dtype_name(value)


def _add_shard(
    chunks: dict[Box, StoredChunk],
    name: str,
    box: Box,
    shape: tuple[int, ...],
    ref: Any,
    file: TorchFile,
    rank: int,
) -> None:
    if not isinstance(ref, TensorRef):
        raise TypeError("a shard without a tensor")
    if ref.size != box.sizes:
        raise DamagedCheckpointError(
            f"{file.source.label}: a shard of {name!r} has shape {list(ref.size)}, but its metadata says {box}"
        )
    inside = Box.full(shape) & box  # a flat parameter's last shard may be padded
    if inside is not None:
        whole = stored_tensor(name, file, ref, rank).chunks[0].shift(box.offsets)
        chunks[inside] = whole.crop(inside)
