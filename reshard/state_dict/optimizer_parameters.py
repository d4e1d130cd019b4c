"""The parameters that live optimizers hold, by canonical name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from reshard.errors import NormalizationError
from reshard.live.deepspeed import HOW_TO_SAVE, WHOSE_OPTIMIZERS
from reshard.live.fsdp1 import FlatPiece
from reshard.live.state import same_value
from reshard.live.tensors import dtype_of, global_shape, is_sharded
from reshard.state_dict.model import copy_containers, write_all
from reshard.state_dict.names import LiveModel, where

__all__ = [
    "LiveOptimizers", "OptimizedParameter", "as_optimizers", "fill_absent", "filled_names",
    "joined_pieces", "split_state",
]  # fmt: skip


OUTSIDE = "outside_model"
"""First segment of the name of a parameter that the model does not have; then optimizer, group and
position follow."""


class OptimizedParameter(NamedTuple):
    """A parameter at its place in an optimizer."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """Its canonical names; its state is stored under the first one."""
    optimizer: int
    group: int
    position: int
    """In its group."""
    id: int
    """In `optimizer.state_dict()`."""
    piece: FlatPiece | None = None
    """Set for a parameter inside an FSDP1 flat parameter, which several of these may share."""

    @property
    def name(self) -> str:
        """The name of its state."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the parameter."""
        return self.parameter.shape if self.piece is None else self.piece.shape


class LiveOptimizers:
    """The parameters of one or several optimizers, by canonical name.

    Raises NormalizationError for a parameter that two optimizers have, and for optimizers that have
    none of the model's.
    """

    def __init__(self, live: LiveModel, optimizers: Sequence[Optimizer]) -> None:
        if optimizers:
            live.refuse_partitioned(WHOSE_OPTIMIZERS)
        self.live = live
        self.optimizers = tuple(optimizers)
        self.by_name: dict[str, OptimizedParameter] = {}
        """By every name, aliases too."""
        self.outside: list[OptimizedParameter] = []
        """Those that the model does not have."""
        self.parameters = [list(self._parameters(k, optimizer)) for k, optimizer in enumerate(self.optimizers)]
        """Per optimizer, in the order of its ids."""
        for found in self.parameters:
            self.by_name.update((one.names[0], one) for one in found)
        if len(self.by_name) < sum(map(len, self.parameters)) or live.tied or self.outside:
            self._look_at_shared()
        if self.outside and len(self.outside) == sum(map(len, self.parameters)):
            raise NormalizationError(_none_of_this_model(self.optimizers))

    def _look_at_shared(self) -> None:
        """Find parameters with several names, and refuse those with several owners."""
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

    @functools.cached_property
    def by_id(self) -> list[dict[int, list[OptimizedParameter]]]:
        """Per optimizer and id in its own state dict: one parameter, or all that an FSDP1 flat one
        consists of."""
        found: list[dict[int, list[OptimizedParameter]]] = []
        for own in self.parameters:
            found.append({})
            for one in own:
                found[-1].setdefault(one.id, []).append(one)
        return found

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
        "fully_shard, to_empty and their like put new parameters in the place of the old ones, which it goes on to "
        "train in vain. Make it of model.parameters() after wrapping; if it was made for another model, give that one. "
        f"Of an optimizer that DeepSpeed's ZeRO has taken over, whose parameters are flat partitions now, {HOW_TO_SAVE}"
    )


def as_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """One optimizer or several, as a tuple; raises NormalizationError for anything else."""
    found = (given,) if hasattr(given, "param_groups") else tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(hasattr(one, "param_groups") for one in found):
        raise NormalizationError(f"optimizers must be an optimizer or several, got {type(given).__name__}")
    return found


# Optimizer state of FSDP1 flat parameters: cut into the state of the original parameters, and laid
# together again.
#
# A flat parameter has one state for all that it consists of: 1-D tensors of the shard's length, and
# scalars that all of them share.


Entry = tuple[OptimizedParameter, Mapping[str, Any] | None]


def split_state(piece: FlatPiece, parameter: torch.Tensor, values: Mapping[Any, Any], copy: bool) -> dict[Any, Any]:
    """The state of one original parameter out of that of `parameter`, the flat one or, with
    use_orig_params=True, this
    rank's range of the original. Tensors of its length become tensors of the original's shape,
    memory shared. `copy`: others are copied, since those of a parameter before this one are they
    themselves, and no optimizer of the original parameters has one step count for several."""
    out: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == _held_shape(piece, parameter):
            out[key] = piece.tensor(value[piece.local_slice()] if parameter is piece.flat else value)
        else:
            out[key] = deepcopy(value) if copy else copy_containers(value)
    return out


def joined_pieces(entries: Iterable[Entry]) -> list[Entry]:
    """The entries as the optimizers want them: the original parameters of one flat parameter become
    one entry.

    Raises NormalizationError if they were saved with different scalars, of which a flat parameter
    has only one.
    """
    out: list[Entry] = []
    waiting: dict[int, list[Entry]] = {}
    for one, values in entries:
        if one.piece is None:
            out.append((one, values))
        else:
            waiting.setdefault(id(one.parameter), []).append((one, values))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for together in waiting.values():
        first = together[0][0]
        out.append((first, _join(first.parameter, together, pairs)))
    write_all([target for _, target in pairs], [value for value, _ in pairs], [False] * len(pairs))
    return out


def filled_names(entries: Iterable[Entry]) -> list[str]:
    """Original parameters without state that share a flat parameter with others that have some: a
    flat parameter has one state for all, so that theirs becomes zeros."""
    units: dict[int, list[Entry]] = {}
    for one, values in entries:
        if one.piece is not None and one.parameter is one.piece.flat:
            units.setdefault(id(one.parameter), []).append((one, values))
    return [one.name for unit in units.values() if any(v for _, v in unit) for one, values in unit if not values]


def _join(
    parameter: torch.Tensor, together: Sequence[Entry], pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[Any, Any] | None:
    """One entry, of tensors that are still to be written: `pairs` has each given value and its
    place."""
    out: dict[Any, Any] = {}
    for one, values in together:
        piece = one.piece
        assert piece is not None
        for key, value in (values or {}).items():
            if isinstance(value, torch.Tensor) and piece.shape and global_shape(value) == piece.shape:
                if key not in out:
                    # what no original parameter covers is padding, and those without state start from zero
                    out[key] = torch.zeros(_held_shape(piece, parameter), dtype=value.dtype, device=parameter.device)
                whole = out[key]
                local = whole[piece.local_slice()] if parameter is piece.flat else whole
                pairs.append((value, piece.tensor(local)))
            elif key not in out:
                out[key] = value
            elif not same_value(out[key], value):
                raise NormalizationError(
                    f"{one.name!r} was saved with {key!r} = {value}, but shares an FSDP1 flat parameter with "
                    f"{together[0][0].name!r}, which has {out[key]}: use_orig_params=True keeps them apart"
                )
    if not parameter.numel() and 0 not in together[0][0].shape:
        return None  # without elements here it gets no gradient here, so that a step count would stay behind
    return out or None


def _held_shape(piece: FlatPiece, parameter: torch.Tensor) -> torch.Size:
    """Shape of a state tensor that covers the whole of what the optimizer has."""
    if parameter is piece.flat:
        return torch.Size([piece.shard_numel])
    return parameter.shape


def fill_absent(state: Mapping[str, Mapping[Any, Any]], live: LiveOptimizers) -> dict[str, Mapping[Any, Any]]:
    """State that only some ranks have, since the others hold no element of an original parameter,
    as an empty part on those others; so that all can gather it together. Collective over all
    ranks."""
    mine: dict[str, dict[Any, Any]] = {}
    for name, values in state.items():
        one = live.by_name.get(name)
        if one is not None and one.piece is not None and one.piece.sharded:
            mine[name] = {key: _outline(value) for key, value in values.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    out = dict(state)
    for name, one in live.by_name.items():
        piece = one.piece
        if name in out or name != one.name or piece is None:
            continue
        ranks = dist.get_process_group_ranks(piece.group)
        outline = next((everyone[rank][name] for rank in ranks if name in everyone[rank]), None)
        if outline is not None:
            low, high = piece.range_of(dist.get_rank(piece.group))
            out[name] = {key: _filled(value, piece, high - low) for key, value in outline.items()}
    return out


def _outline(value: Any) -> Any:
    return dtype_of(value) if is_sharded(value) else value


def _filled(outline: Any, piece: FlatPiece, numel: int) -> Any:
    if not isinstance(outline, torch.dtype):
        return outline
    return piece.tensor(torch.zeros(numel, dtype=outline, device=piece.flat.device))
