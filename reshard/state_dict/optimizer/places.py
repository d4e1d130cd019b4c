"""Where optimizers hold state already that has the very form of what is given, so that it can simply be written there:
on every load into a running optimizer that is all of it, and there is much of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from reshard.state.frameworks.torch_internals import loads_itself
from reshard.state_dict.memory import Spans, spans_of
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
    spans: Spans = Spans()
    """Where all these tensors lie."""


_ROWS = 32
"""Parameters that are asked about together."""


def places_of(live: LiveOptimizers, state: Sequence[tuple[OptimizedParameter, State | None]]) -> Places:
    """The places of all state under the same keys; of none, if one of them has another form than what is given."""
    # not by the parameters themselves, whose hash is a function of Python
    held = [
        {} if loads_itself(optimizer) else dict(zip(map(id, optimizer.state), optimizer.state.values()))
        for optimizer in live.optimizers
    ]
    rows: list[tuple[OptimizedParameter, dict[Any, Any], State]] = []
    targets: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    starts: list[int] = []
    sizes: list[int] = []
    # tensors are asked everything while they are in the processor's cache: to fetch them all from memory again for each
    # question takes longer than the answers
    for first in range(0, len(state), _ROWS):
        here: list[Any] = []
        wanted: list[Any] = []
        for one, values in state[first : first + _ROWS]:
            old = held[one.optimizer].get(id(one.parameter)) if values and one.piece is None else None
            if old is None or values is None or old.keys() != values.keys():
                continue
            rows.append((one, old, values))
            here += map(old.__getitem__, values)
            wanted += values.values()
        lying = spans_of([*here, *wanted], alike=2) if _alike(here, wanted) else None
        if lying is None:
            return Places()
        starts += lying.starts
        sizes += lying.sizes
        targets += here
        given += wanted
    return Places(rows, targets, given, Spans(starts, sizes))


def _alike(targets: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether all are plain tensors, and each value has the dtype and the shape of its target."""
    return (
        all_plain(targets)
        and all_plain(values)
        and list(map(_DTYPE, targets)) == list(map(_DTYPE, values))
        and all(map(torch.Tensor.is_same_size, targets, values))
    )


_DTYPE = attrgetter("dtype")


def all_plain(tensors: Iterable[Any]) -> bool:
    """Whether these are tensors of torch's own class, and neither parameters nor sharded."""
    return set(map(type, tensors)) <= {torch.Tensor}
