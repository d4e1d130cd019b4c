"""`verify_live`: do source and target of a running job hold the same, without gathering any of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import msgspec
import torch
import torch.distributed as dist

from planners.findings import Finding, Report
from planners.geometry.box import Box
from planners.geometry.layout_forms import Part
from planners.views.patches import Patch
from reshard.api.redistribute.agreement import Options, Side, TransferOptions, agree
from reshard.api.redistribute.lane_memory import part_tensors, turned
from reshard.api.redistribute.pairing import Pairing
from reshard.control.group import Group
from reshard.errors import LayoutError
from reshard.state.dtypes import dtype_from_name
from reshard.state.fingerprints import Partial, partial
from reshard.state.fingerprints.holdings import Holding, add_holdings, conclude, pack_holdings
from reshard.state.memory.arrays import raw_elements

__all__ = ["verify_live"]


def verify_live(
    source: Mapping[str, Any] | None,
    target: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[TransferOptions],
) -> Report:
    """Collective: compare every target tensor with what it is made of, by fingerprints: bit by bit, in any layouts.

    Every rank sums up its own parts, and says and hears some 60 bytes for each tensor. Arguments are those of
    `redistribute`. Where dtypes differ, sources are converted where they lie, and compared to the last bit of the
    target's dtype; but all NaNs count as one, since torch makes another one of the same element here and there.

    Returns the same report on all ranks, with a finding for each target that differs.

    Raises:
        ReplicaDriftError: ranks that should hold the same elements, of the source (as converted) or of the target, do
            not.
        KeyMismatchError, LayoutError: as `redistribute`.
    """
    group = Group(process_group, deadline_s=options.get("deadline_s", Options.deadline_s))
    rank = group.ranks[group.rank]
    with group.together("verify"):
        given = Options.of(options)
        mine, wanted = Side.read(source, given.source_layouts), Side.of(target, given.target_layouts)
        pairing = agree(mine, wanted, given, group, process_group).pair(given)
        there = [held for key in pairing.views for held in _as_it_is(pairing, key, wanted, rank)]
        here = [held for key in pairing.views for held in _as_target(pairing, key, mine, rank)]
        packed = msgspec.msgpack.encode((pack_holdings(here, rank), pack_holdings(there, rank)))

        def add(parts: list[bytes]) -> bytes:
            sides = zip(*(msgspec.msgpack.decode(part, type=tuple[bytes, bytes]) for part in parts))
            return msgspec.msgpack.encode([add_holdings(side, group.world_size) for side in sides])

        told = group.merge(packed, add, "fingerprints")
    before, after = map(conclude, msgspec.msgpack.decode(told, type=tuple[bytes, bytes]))
    findings = [
        Finding(f"is {after[key]} after, but {before[key]} before", key)
        for key in pairing.views
        if before[key] != after[key]
    ]
    covers = "the fingerprint of every target, computed now, is that of what it is made of"
    return Report("the redistributed state", tuple(findings), len(pairing.views), covers=covers)


def _as_it_is(pairing: Pairing, key: str, wanted: Side, rank: int) -> Iterator[Holding]:
    """What this rank's own part adds to the fingerprint of a target."""
    layout, tensor = pairing.after[key], wanted.state.tensors.get(key)
    if tensor is None:
        return
    spec = layout.spec
    yield Holding(key, spec.dtype, spec.shape, b"", Partial().to_bytes())
    parts = layout.parts(rank) if rank < layout.world_size else ()
    for elements, part in zip(part_tensors(key, tensor.local, layout, rank), parts):
        if part.numel:
            found = _one_nan(elements) if key in pairing.cast else elements
            yield _holding(key, spec.dtype, spec.shape, found, replace(part, flat_start=None))


def _as_target(pairing: Pairing, key: str, mine: Side, rank: int) -> Iterator[Holding]:
    """What this rank's sources add to the fingerprint of a target."""
    view, spec = pairing.views[key], pairing.after[key].spec
    dtype = dtype_from_name(spec.dtype)
    yield Holding(key, spec.dtype, spec.shape, b"", Partial().to_bytes())  # so that it is named by somebody
    for number, source in enumerate(view.sources):
        layout = pairing.before[source.fqn]
        tensor = mine.state.tensors.get(source.fqn)
        parts = layout.parts(rank) if rank < layout.world_size else ()
        local = part_tensors(source.fqn, tensor.local if tensor is not None else (), layout, rank)
        patches = [patch for patch in view.patches if patch.tensor == number]
        for elements, part in zip(local, parts):
            for piece, box in _pieces(elements, part, patches):
                converted = piece if piece.dtype == dtype else _one_nan(piece.to(dtype))
                yield _holding(key, spec.dtype, spec.shape, converted, box)
    for fill in view.fills:
        constant = torch.full((), fill.value, dtype=dtype, device="cpu")
        constant = (_one_nan(constant) if key in pairing.cast else constant).expand(fill.target.sizes)
        yield _holding(key, spec.dtype, spec.shape, constant, fill.target)


def _one_nan(elements: torch.Tensor) -> torch.Tensor:
    """The same with one NaN for all; of complex numbers in both parts. The very tensor where there is none.

    torch converts in vectors and what is left one by one, which make different NaNs of the same.
    """
    if elements.is_complex():
        parts = torch.view_as_real(elements.resolve_conj())
        made = _one_nan(parts)
        return elements if made is parts else torch.view_as_complex(made)
    if not elements.is_floating_point():
        return elements
    odd = torch.isnan(elements)
    if not bool(odd.any()):
        return elements
    nan = torch.full((), torch.nan, dtype=elements.dtype, device=elements.device)
    return torch.where(odd, raw_elements(nan), raw_elements(elements.resolve_neg())).view(elements.dtype)


def _pieces(elements: torch.Tensor, part: Part, patches: Sequence[Patch]) -> Iterator[tuple[torch.Tensor, Box]]:
    """(elements, where they are in the target) of a local tensor of a source."""
    for box, local in part.boxes():
        for patch in patches:
            common = box & patch.source
            if common is not None:
                at = common.relative_to(box).shift(local.offsets)
                yield turned(elements[at.slices], patch.dims), patch.to_target(common)


def _holding(key: str, dtype: str, shape: tuple[int, ...], piece: torch.Tensor, where: Box | Part) -> Holding:
    dims = where.dims if isinstance(where, Part) else where
    place = hashlib.blake2b(repr(dims).encode(), digest_size=8).digest()
    try:
        return Holding(key, dtype, shape, place, partial(piece, where, shape).to_bytes())
    except LayoutError as error:
        raise LayoutError(f"tensor {key!r}, {where}: {error}") from None
