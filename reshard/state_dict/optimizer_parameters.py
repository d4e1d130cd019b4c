"""The parameters that live optimizers hold, by canonical name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from planners.geometry.arrays import grouped
from planners.geometry.box import Shape
from reshard.errors import NormalizationError
from reshard.live.deepspeed import HOW_TO_SAVE, WHOSE_OPTIMIZERS
from reshard.live.dtypes import NO_MEMORY, any_lacks_memory
from reshard.live.fsdp1 import FlatPiece, join_state
from reshard.live.tensors import LiveTensor, global_shape, held_tensors, is_dtensor, is_sharded
from reshard.live.wrappers import loads_itself
from reshard.state_dict.gather import place_of
from reshard.state_dict.live_model import LiveModel, where
from reshard.state_dict.model import write_all

OUTSIDE = "outside_model"
"""First segment of the name of a parameter outside the model. Optimizer, group, and position follow."""


class OptimizedParameter(NamedTuple):
    """A parameter at its position in an optimizer."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """Its canonical names. Its state is stored under the first one."""
    optimizer: int
    group: int
    position: int
    """Position in its group."""
    id: int
    """Id in `optimizer.state_dict()`."""
    piece: FlatPiece | None = None
    """Set for a parameter inside a flat parameter, which several of these may share."""

    @property
    def name(self) -> str:
        """The name of its state."""
        return self.names[0]

    @property
    def place(self) -> Any:
        """The device mesh or process group across which it is sharded, or None."""
        if self.piece is not None:
            return self.piece.group
        return place_of(self.parameter) if is_sharded(self.parameter) else None

    def may_hold(self, value: torch.Tensor, optimizers: Sequence[Optimizer]) -> bool:
        """Return True if its state can become a sharded `value` without communication."""
        model = self.parameter if self.piece is None else self.piece.value()
        held = optimizers[self.optimizer].state.get(self.parameter, {}) if self.piece is None else {}
        places = [LiveTensor("", one) for one in (model, *held.values()) if is_sharded(one)]
        if any(map(LiveTensor("", value).is_sharded_like, places)):
            return True
        return is_dtensor(value) and place_of(value) == self.place and global_shape(value) != self.shape

    @property
    def shape(self) -> Shape:
        """Global shape of the parameter."""
        return self.parameter.shape if self.piece is None else self.piece.shape


class LiveOptimizers:
    """The parameters of one or more optimizers, by canonical name.

    Raises NormalizationError if two optimizers have the same parameter, or no parameter of the
    optimizers is in the model.
    """

    def __init__(self, live: LiveModel, optimizers: Any) -> None:
        """`optimizers`: an optimizer, or several."""
        self.optimizers = _as_optimizers(optimizers)
        if self.optimizers:
            live.refuse_partitioned(WHOSE_OPTIMIZERS)
        self.live = live
        self.by_name: dict[str, OptimizedParameter] = {}
        """Parameters by every name, including aliases."""
        self.outside: list[OptimizedParameter] = []
        """Parameters that are not in the model."""
        self.parameters = [list(self._parameters(k, optimizer)) for k, optimizer in enumerate(self.optimizers)]
        """Per optimizer, in the order of its ids."""
        for found in self.parameters:
            self.by_name.update((one.names[0], one) for one in found)
        if len(self.by_name) < sum(map(len, self.parameters)) or live.tied or self.outside:
            self._look_at_shared()
        if self.outside and len(self.outside) == sum(map(len, self.parameters)):
            raise NormalizationError(_none_of_this_model(self.optimizers))

    def _look_at_shared(self) -> None:
        """Find parameters with several names. Raise NormalizationError for parameters in several
        optimizers."""
        self.by_name.clear()
        owners: dict[int, OptimizedParameter] = {}
        for k, found in enumerate(self.parameters):
            for one in found:
                other = owners.setdefault(id(one.parameter), one)
                if other is not one and (other.optimizer, other.id) != (k, one.id):
                    raise NormalizationError(
                        f"parameter {one.name!r} is in optimizer {other.optimizer} (group {other.group}) and in "
                        f"optimizer {k} (group {one.group}){where()}: its state would have two owners"
                    )
                for name in one.names:
                    self.by_name.setdefault(name, one)

    @property
    def pieces(self) -> dict[str, FlatPiece]:
        """Parameters that are pieces of a flat parameter, by the names of their states."""
        return {one.name: one.piece for own in self.parameters for one in own if one.piece is not None}

    @functools.cached_property
    def loads_itself(self) -> list[bool]:
        """For each optimizer, True if its class or the user's hooks customize how its state is loaded."""
        return [loads_itself(optimizer) for optimizer in self.optimizers]

    @property
    def may_have_own(self) -> bool:
        """True if it is known which optimizer may keep state under keys that are not parameters,
        such as a shared table: there is one optimizer, of a user-defined class. torch's own
        optimizers keep none."""
        return len(self.optimizers) == 1 and not type(self.optimizers[0]).__module__.startswith("torch.optim.")

    @functools.cached_property
    def by_id(self) -> list[dict[int, list[OptimizedParameter]]]:
        """For each optimizer, the parameters by id in its state dict: one parameter, or all pieces
        of an FSDP1 flat parameter."""
        return [grouped((one.id, one) for one in own) for own in self.parameters]

    def _parameters(self, k: int, optimizer: Optimizer) -> Iterator[OptimizedParameter]:
        names_of, pieces_of, number, make = self.live.names_of, self.live.pieces_of, 0, tuple.__new__
        for g, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                names = names_of.get(id(parameter))
                if names is not None:
                    # three times as fast as OptimizedParameter(...), and there are many
                    yield make(OptimizedParameter, (parameter, tuple(names), k, g, position, number, None))
                elif id(parameter) in pieces_of:
                    for piece in pieces_of[id(parameter)]:
                        own = tuple(names_of[piece.identity])
                        yield OptimizedParameter(parameter, own, k, g, position, number, piece)
                else:
                    outside = (f"{OUTSIDE}.{k}.{g}.{position}",)
                    self.outside.append(OptimizedParameter(parameter, outside, k, g, position, number))
                    yield self.outside[-1]
                number += 1


def _none_of_this_model(optimizers: Sequence[Optimizer]) -> str:
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    return (
        f"{names} has no parameter of the model{where()}. Perhaps it was made before the model was wrapped: "
        "fully_shard, to_empty, and similar calls replace parameters, and the optimizer still has the old ones. "
        "Create it from model.parameters() after wrapping. If it belongs to another model, pass that one. "
        f"If DeepSpeed's ZeRO has replaced its parameters by flat partitions, {HOW_TO_SAVE}"
    )


def _as_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple. Raises NormalizationError for anything else."""
    found = (given,) if hasattr(given, "param_groups") else tuple(given) if isinstance(given, Iterable) else None
    wrong = [one for one in found or () if not hasattr(one, "param_groups")]
    if found is None or wrong:
        got = type(given).__name__
        got = f"a {got} with {type(wrong[0]).__name__}" if wrong else got
        raise NormalizationError(f"optimizers must be an optimizer or a list of optimizers, got {got}")
    return found


# State of parameters that are pieces of flat ones, which have one state for all of them.


Entry = tuple[OptimizedParameter, Mapping[str, Any] | None]


def joined_pieces(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the form that optimizers need: the entries of the pieces of a flat
    parameter are joined into one. See `join_state`."""
    out: list[Entry] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for together in _by_flat_parameter(entries, out):
        first = together[0][0]
        named = [(one.name, piece, values) for one, values in together if (piece := one.piece) is not None]
        out.append((first, join_state(first.parameter, named, pairs)))
    write_all([target for _, target in pairs], [value for value, _ in pairs], [False] * len(pairs))
    return out


def filled_names(entries: Iterable[Entry]) -> list[str]:
    """Return the parameters without state that share a flat parameter with others that have state.
    Their state becomes zeros, because a flat parameter has one state."""
    units = [unit for unit in _by_flat_parameter(entries, []) if any(values for _, values in unit)]
    return [one.name for unit in units for one, values in unit if not values]


def _by_flat_parameter(entries: Iterable[Entry], others: list[Entry]) -> Iterable[list[Entry]]:
    """Group pieces by flat parameter. Append all other parameters to `others`."""
    found: dict[int, list[Entry]] = {}
    for one, values in entries:
        (others if one.piece is None else found.setdefault(id(one.parameter), [])).append((one, values))
    return found.values()


def without_memory(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield a sentence for each state tensor whose memory was freed."""
    for one, values in entries:
        for key, value in (values or {}).items():
            if isinstance(value, torch.Tensor) and any_lacks_memory(held_tensors(value)):
                yield f"{one.name}: its {key!r} {NO_MEMORY}"
