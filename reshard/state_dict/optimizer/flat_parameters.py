"""Optimizer state of FSDP1 flat parameters: cut into the state of the original parameters, and laid together again.

A flat parameter has one state for all that it consists of: 1-D tensors of the shard's length, and scalars that all
of them share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import NormalizationError
from reshard.state.frameworks.fsdp1 import FlatPiece
from reshard.state.frameworks.tensor_classes import is_sharded
from reshard.state.tensors import dtype_of, global_shape
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.values import copy_containers, same_value, write_all

__all__ = ["fill_absent", "filled_names", "joined_pieces", "split_state"]

Entry = tuple[OptimizedParameter, Mapping[str, Any] | None]


def split_state(piece: FlatPiece, parameter: torch.Tensor, values: Mapping[Any, Any], copy: bool) -> dict[Any, Any]:
    """The state of one original parameter out of that of `parameter`, the flat one or, with use_orig_params=True, this
    rank's range of the original. Tensors of its length become tensors of the original's shape, memory shared. `copy`:
    others are copied, since those of a parameter before this one are they themselves, and no optimizer of the original
    parameters has one step count for several."""
    out: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == _held_shape(piece, parameter):
            out[key] = piece.tensor(value[piece.local_slice()] if parameter is piece.flat else value)
        else:
            out[key] = deepcopy(value) if copy else copy_containers(value)
    return out


def joined_pieces(entries: Iterable[Entry]) -> list[Entry]:
    """The entries as the optimizers want them: the original parameters of one flat parameter become one entry.

    Raises NormalizationError if they were saved with different scalars, of which a flat parameter has only one.
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
    write_all(pairs)
    return out


def filled_names(entries: Iterable[Entry]) -> list[str]:
    """Original parameters without state that share a flat parameter with others that have some: a flat parameter has
    one state for all, so that theirs becomes zeros."""
    units: dict[int, list[Entry]] = {}
    for one, values in entries:
        if one.piece is not None and one.parameter is one.piece.flat:
            units.setdefault(id(one.parameter), []).append((one, values))
    return [one.name for unit in units.values() if any(v for _, v in unit) for one, values in unit if not values]


def _join(
    parameter: torch.Tensor, together: Sequence[Entry], pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[Any, Any] | None:
    """One entry, of tensors that are still to be written: `pairs` has each given value and its place."""
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
    """State that only some ranks have, since the others hold no element of an original parameter, as an empty part on
    those others; so that all can gather it together. Collective over all ranks."""
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
