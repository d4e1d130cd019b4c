"""Tensors that FSDP1's flat parameters cut across rows, as chunks of rows: each rank is sent what it lacks of its own.

torch gathers every parameter whole on every rank and cuts it anew. Here only elements that lie on another rank than
`torch.chunk` would give them to are sent, once each, several tensors in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from reshard.control.group import Group
from reshard.errors import NormalizationError
from reshard.state.frameworks.flat_cuts import FlatCut, cut_of
from reshard.state.tensors import raw_bytes

__all__ = ["as_chunks"]

DEADLINE_S = 300.0
"""How long ranks wait for each other to agree on what to send."""

MESSAGES_BYTES = 64 << 20
"""Of one tensor after another, until each rank holds about so much of them, what crosses is sent together."""

_Piece = tuple[str, FlatCut, torch.Tensor]


def as_chunks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, with each `CutAcrossRows` as a new DTensor or ShardedTensor, cut as `torch.chunk` along dim 0 cuts.

    Collective over the ranks of each process group that has some. Raises NormalizationError, on all of them, where not
    all have the same ones.
    """
    out = dict(tensors)
    groups: dict[Any, list[_Piece]] = {}
    for name, value in sorted(tensors.items()):
        found = cut_of(value)
        if found is not None:
            groups.setdefault(found[0].group, []).append((name, *found))
    for group, pieces in groups.items():
        _agree(pieces, group)
        for together in _batches(pieces):
            locals_ = _exchange(together, group)
            out.update((name, cut.chunks().chunk(local)) for (name, cut, _), local in zip(together, locals_))
    return out


def _agree(pieces: list[_Piece], group: Any) -> None:
    mine = sorted((name, list(cut.shape), str(local.dtype)) for name, cut, local in pieces)
    said = Group(group, deadline_s=DEADLINE_S).parties(msgspec.msgpack.encode(mine))
    if len(said) > 1:
        held = [({name for name, *_ in msgspec.msgpack.decode(one)}, ranks) for one, ranks in said.items()]
        name = min(
            set().union(*(names for names, _ in held)) - set.intersection(*(names for names, _ in held)), default=""
        )
        lacking = sorted(rank for names, ranks in held if name not in names for rank in ranks)
        what = f"ranks {lacking} do not have {name!r}, which" if name else "a tensor of another shape or dtype is what"
        raise NormalizationError(f"{what} others are about to cut into chunks: all ranks must hold the same state")


def _batches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Alike on all ranks, since they are made of what all know."""
    batch: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        _, cut, local = piece
        size = max(high - low for low, high in cut.ranges) * local.itemsize
        if batch and (nbytes + size > MESSAGES_BYTES or local.device != batch[0][2].device):
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += size
    if batch:
        yield batch


def _exchange(pieces: list[_Piece], group: Any) -> list[torch.Tensor]:
    """The 1-D chunks of this rank."""
    here, world = dist.get_rank(group), dist.get_world_size(group)
    made = [torch.empty(cut.chunks().here(), dtype=local.dtype, device=local.device) for _, cut, local in pieces]
    sent: list[list[torch.Tensor]] = [[] for _ in range(world)]
    wanted: list[list[torch.Tensor]] = [[] for _ in range(world)]
    crosses = False
    for (_, cut, local), new in zip(pieces, made):
        chunks = cut.chunks().ranges
        crosses = crosses or any(low < high for low, high in _kept_elsewhere(cut))
        for peer in range(world):
            low, high = _overlap(cut.ranges[here], chunks[peer])
            sent[peer].append(local[low - cut.ranges[here][0] : high - cut.ranges[here][0]])
            low, high = _overlap(cut.ranges[peer], chunks[here])
            wanted[peer].append(new[low - chunks[here][0] : high - chunks[here][0]])
    for mine, place in zip(sent[here], wanted[here]):
        place.copy_(mine)
    sent[here], wanted[here] = [], []
    if not crosses:
        return made
    sizes = [[sum(part.nbytes for part in parts) for parts in side] for side in (sent, wanted)]
    got, nothing = (torch.empty(n, dtype=torch.uint8, device=made[0].device) for n in (sum(sizes[1]), 0))
    data = torch.cat([nothing, *(raw_bytes(part) for parts in sent for part in parts)])
    dist.all_to_all_single(got, data, sizes[1], sizes[0], group=group)
    places = [place for parts in wanted for place in parts]
    for place, piece in zip(places, got.split_with_sizes([place.nbytes for place in places])):
        raw_bytes(place).copy_(piece)
    return made


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Common elements; the same number twice where there are none."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def _kept_elsewhere(cut: FlatCut) -> Iterator[tuple[int, int]]:
    """Ranges that lie on a rank whose chunk they are not in."""
    for held, chunk in zip(cut.ranges, cut.chunks().ranges):
        yield held[0], min(held[1], chunk[0])
        yield max(held[0], chunk[1]), held[1]
