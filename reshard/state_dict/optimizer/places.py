"""Where optimizers hold state already that has the very form of what is given, so that it can simply be written there:
on every load into a running optimizer that is all of it, and there is much of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from reshard.state.frameworks.torch_internals import loads_itself
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter

__all__ = ["Places", "all_plain", "places_of"]

State = Mapping[Any, Any]
_DTYPE = attrgetter("dtype")


class Places(NamedTuple):
    """Parameters whose state is written where it lies."""

    rows: Sequence[tuple[OptimizedParameter, dict[Any, Any], State]] = ()
    """Each with the state that it has, and what is given for it, under the same keys."""
    targets: Sequence[torch.Tensor] = ()
    """All that they have, one after another. Plain tensors."""
    values: Sequence[torch.Tensor] = ()
    """Of each target, a plain tensor of its shape and dtype."""


def places_of(live: LiveOptimizers, state: Iterable[tuple[OptimizedParameter, State | None]]) -> Places:
    """The places of all state under the same keys; of none, if one of them has another form than what is given."""
    held = [{} if loads_itself(optimizer) else optimizer.state for optimizer in live.optimizers]
    rows = []
    for one, values in state:
        if values and one.piece is None:
            old = held[one.optimizer].get(one.parameter)
            if old is not None and old.keys() == values.keys():
                rows.append((one, old, values))
    targets = [target for _, old, own in rows for target in map(old.__getitem__, own)]
    given = [value for _, _, own in rows for value in own.values()]
    # each question is asked of all at once: a loop over them would take longer than the copying
    alike = (
        all_plain(targets)
        and all_plain(given)
        and all(map(is_, map(_DTYPE, targets), map(_DTYPE, given)))
        and all(map(torch.Tensor.is_same_size, targets, given))
    )
    return Places(rows, targets, given) if alike else Places()


def all_plain(tensors: Iterable[Any]) -> bool:
    """Whether these are tensors of torch's own class, and neither parameters nor sharded."""
    return set(map(type, tensors)) <= {torch.Tensor}
