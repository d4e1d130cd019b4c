"""State dicts as DCP sees them: flat keys, the regions that this rank holds, and torch's metadata for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # its rule for lists decides the keys on disk
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.stateful import Stateful

from planners.box import Box
from reshard.tensors import form_of, is_tensor, local_tensors, spec_of

__all__ = ["Region", "chunk_of", "flat_state", "put_state_back", "regions_of", "unwrapped"]


@dataclass(frozen=True)
class Region:
    """A box of a tensor that this rank holds, and its memory."""

    box: Box
    tensor: torch.Tensor

    def index(self, fqn: str) -> MetadataIndex:
        """What DCP calls this region."""
        return MetadataIndex(fqn, self.box.offsets)


def regions_of(fqn: str, tensor: Any) -> Iterator[Region]:
    """The regions of a Tensor, DTensor or ShardedTensor on this rank, empty ones left out.

    A strided shard has several: DCP's own answer, a single offset, would be wrong for it.
    """
    spec, form = spec_of(fqn, tensor), form_of(tensor, fqn)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for part, local in zip(form.parts(spec.shape, rank), local_tensors(tensor)):
        for box, place in part.boxes():
            yield Region(box, local[place.slices] if place.ndim else local)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """torch's record of a box."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def unwrapped(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with every `Stateful` replaced by what its `state_dict()` gives."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) and not is_tensor(value) else value
        for key, value in state_dict.items()
    }


def put_state_back(state_dict: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Give what was loaded to the `Stateful`s, and put everything else in its place in `state_dict`."""
    for key, value in loaded.items():
        original = state_dict[key]
        if isinstance(original, Stateful) and not is_tensor(original):
            original.load_state_dict(value)
        else:
            state_dict[key] = value


def flat_state(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by flat key, and the path of each key in the nest, by torch's own rule."""
    flat, paths = flatten_state_dict(dict(state_dict))
    return flat, paths
