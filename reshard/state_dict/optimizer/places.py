"""Where optimizers hold state already that has the very form of what is given, so that it can simply be written there:
on every load into a running optimizer that is all of it, and there is much of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reshard.state.frameworks.torch_internals import loads_itself
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter

__all__ = ["Places", "all_plain", "places_of"]

State = Mapping[Any, Any]


class Places(NamedTuple):
    """Parameters whose state is written where it lies."""

    rows: Sequence[tuple[OptimizedParameter, dict[Any, Any], State]] = ()
    """Each with the state that it has, and what is given for it, under the same keys."""
    targets: Sequence[torch.Tensor] = ()
    """All that they have, one after another. Plain tensors."""
    values: Sequence[torch.Tensor] = ()
    """Of each target, a plain tensor of its shape and dtype."""
    storages: Sequence[int] = ()
    """Addresses of the storages of all these tensors."""


def places_of(live: LiveOptimizers, state: Iterable[tuple[OptimizedParameter, State | None]]) -> Places:
    """The places of all state under the same keys; of none, if one of them has another form than what is given."""
    held = [{} if loads_itself(optimizer) else optimizer.state for optimizer in live.optimizers]
    rows: list[tuple[OptimizedParameter, dict[Any, Any], State]] = []
    targets: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    storages: list[int] = []
    plain, alike = torch.Tensor, torch.Tensor.is_same_size
    storage_of, address_of = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
    for one, values in state:
        old = held[one.optimizer].get(one.parameter) if values and one.piece is None else None
        if old is None or values is None or old.keys() != values.keys():
            continue
        rows.append((one, old, values))
        # a tensor is asked everything while it is in the processor's cache: to fetch them all from memory again for
        # each question takes longer than the answers
        for key, value in values.items():
            target = old[key]
            if type(value) is not plain or type(target) is not plain:
                return Places()
            if value.dtype is not target.dtype or not alike(target, value):
                return Places()
            targets.append(target)
            given.append(value)
            try:
                storages += address_of(storage_of(target)), address_of(storage_of(value))
            except (RuntimeError, NotImplementedError):
                return Places()  # sparse tensors have several
    return Places(rows, targets, given, storages)


def all_plain(tensors: Iterable[Any]) -> bool:
    """Whether these are tensors of torch's own class, and neither parameters nor sharded."""
    return set(map(type, tensors)) <= {torch.Tensor}
