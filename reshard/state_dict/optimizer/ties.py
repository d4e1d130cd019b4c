"""State that shares memory: with other state, as one step count for all, or with the model, as a master copy that is
the parameter. Which of the given tensors do, and which of those that were given so are so no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from reshard.state.tensors import dtype_of, global_shape, identity_of
from reshard.state_dict.memory import overlapping
from reshard.state_dict.optimizer.parameters import LiveOptimizers
from reshard.state_dict.optimizer.plan import OptimizerWrites

__all__ = ["GivenTies", "ModelTensor", "tensors_in"]


class ModelTensor(NamedTuple):
    """A parameter or buffer of the model."""

    name: str
    live: Any
    given: Any
    """What it was set to; None if to nothing."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


class GivenTies:
    """Which tensors of the given state share memory with one another, or with what the model is or was set to."""

    def __init__(self, given: Sequence[torch.Tensor], model: Sequence[ModelTensor]) -> None:
        self._first: dict[int, int] = {}
        """By id of a given tensor, the id of the first that is the very same memory."""
        self._model: dict[int, ModelTensor] = {}
        """By that id, the model's tensor that is the same memory."""
        self._cluster: dict[int, int] = {}
        """By id of a given tensor that shares memory, which others it hangs together with."""
        ours = [each for each in model if isinstance(each.given, torch.Tensor)]
        pool = [*given, *(each.given for each in ours), *(each.live for each in model)]
        of_model = [*ours, *model]
        for number, cluster in enumerate(overlapping(pool) if given else ()):
            seen: dict[Any, int] = {}
            for i in cluster:
                first = seen.setdefault(identity_of(pool[i]), id(pool[i]))
                if i < len(given):
                    self._first[id(pool[i])] = first
                    self._cluster[id(pool[i])] = number
                else:
                    self._model.setdefault(first, of_model[i - len(given)])

    def same(self, value: torch.Tensor) -> int:
        """Equal for given tensors that are the same memory seen alike."""
        return self._first.get(id(value), id(value))

    def model_tensor(self, value: torch.Tensor) -> torch.Tensor | None:
        """The model's own tensor, where the given one is the same memory as it or as what it was set to."""
        if not self._model:
            return None
        found = self._model.get(self.same(value))
        if found is None or found.live.is_meta or dtype_of(found.live) != dtype_of(value):
            return None
        live: torch.Tensor = found.live.detach()
        return live if type(live) is type(value) and global_shape(live) == global_shape(value) else None

    def lost(self, live: LiveOptimizers, writes: OptimizerWrites) -> list[str]:
        """Entries that shared memory when they were given and do not now, as "<parameter>.<key>"."""
        if not self._cluster:
            return []
        now: dict[int, list[tuple[str, int, Any]]] = {}
        for one, values in writes.state:
            state = live.optimizers[one.optimizer].state.get(one.parameter, {})
            for key, value in (values or {}).items():
                for given, here in zip(tensors_in(value), tensors_in(state.get(key))):
                    if id(given) in self._cluster:
                        entry = (f"{one.name}.{key}", self.same(given), here)
                        now.setdefault(self._cluster[id(given)], []).append(entry)
        out: list[str] = []
        for entries in now.values():
            tied = self._model.get(entries[0][1])
            first = tied.live if tied is not None else entries[0][2]
            for name, same, here in entries:
                if same != entries[0][1] or identity_of(here) != identity_of(first):
                    out.append(name)
        return list(dict.fromkeys(out))
