"""Each rank's own value out of those that all ranks saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from reshard.checkpoint.checkpoint import Checkpoint
from reshard.control.group import Group
from reshard.errors import KeyMismatchError
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.lazy_tensor import LazyTensor
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.container_types import needs_class, retyped, unmade
from reshard.state.per_rank import PerRank

__all__ = ["own_values"]


def own_values(
    targets: Mapping[str, PerRank], keys: Iterable[str], checkpoint: Checkpoint, group: Group
) -> dict[str, PerRank]:
    """What each of `keys` becomes on this rank, by the rule of its target.

    Raises KeyMismatchError where another number of ranks saved, and the target has no rule for that, or where the value
    is of a class that the target has none of.
    """
    saved = checkpoint.contents.per_rank
    rank = group.ranks[group.rank]
    job_size = dist.get_world_size() if dist.is_initialized() else 1
    native = checkpoint.contents.facts_of(NativeFacts)
    saved_size = int(native.manifest.layout["world_size"]) if native is not None else 0
    out = {}
    for key in keys:
        values, wrapper = _OfRanks(saved[key]), targets[key]
        # who loads alone in a job of as many ranks as saved is still the rank that it was
        is_same = group.world_size == 1 and job_size in (len(values), saved_size)
        world = job_size if is_same else group.world_size
        value = retyped(wrapper.choose(key, values, rank, world, saved_size), wrapper.value)
        if (name := unmade(value)) is not None:
            raise KeyMismatchError(f"each rank's own {key!r} was {needs_class(name)}")
        out[key] = replace(wrapper, value=value)
    return out


class _OfRanks(Mapping[int, Any]):
    """The values of all ranks, each read when it is asked for: mostly one is."""

    def __init__(self, stored: Mapping[int, Any]) -> None:
        self._stored = stored

    def __getitem__(self, rank: int) -> Any:
        value = self._stored[rank]
        return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value

    def __contains__(self, rank: object) -> bool:
        return rank in self._stored

    def __iter__(self) -> Iterator[int]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
