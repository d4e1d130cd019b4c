"""Each rank's own value out of those that all ranks saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from reshard.checkpoint.checkpoint import Checkpoint
from reshard.control.group import Group
from reshard.errors import KeyMismatchError
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.contents import LazyMapping
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
        # mostly one is asked for
        values, wrapper = LazyMapping({of: partial(_value, saved[key], of) for of in saved[key]}), targets[key]
        # who loads alone in a job of as many ranks as saved is still the rank that it was
        is_same = group.world_size == 1 and job_size in (len(values), saved_size)
        world = job_size if is_same else group.world_size
        value = retyped(wrapper.choose(key, values, rank, world, saved_size), wrapper.value)
        if (name := unmade(value)) is not None:
            raise KeyMismatchError(f"each rank's own {key!r} was {needs_class(name)}")
        out[key] = replace(wrapper, value=value)
    return out


def _value(saved: Mapping[int, Any], rank: int) -> Any:
    value = saved[rank]
    return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value
