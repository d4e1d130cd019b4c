"""Fingerprints of a state dict: each rank digests its own shards, and only digests are exchanged."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from planners.geometry.box import Box
from planners.geometry.layout import Part, ProductForm, StateLayout, TensorLayout
from planners.geometry.mesh import Replicate
from planners.units import format_count, format_some
from reshard.api.stateful_objects import saved_state
from reshard.api.task_shares import Opening, Share, shares
from reshard.api.tasks import check_executor, run_tasks
from reshard.arguments import check_options, renamed
from reshard.checkpoint import Checkpoint, all_names, open as open_checkpoint, unless_replaced
from reshard.errors import FormatError, LayoutError, OptionError
from reshard.live.fingerprint_arithmetic import PUBLIC, Key
from reshard.live.fingerprints import Fingerprinter, Holding, Partial, add_holdings, conclude, partials, sum_up
from reshard.live.tensor_classes import expanded
from reshard.live.tensors import OVERWRITTEN_BY, LiveTensor, is_tensor, layout_of, state_instead_of, this_rank
from reshard.live.tree import flatten
from reshard.ranks.group import Group
from reshard.state import key_of
from reshard.storage.base import Storage
from reshard.stored.streaming import Feed, Region, StreamedRows
from reshard.stored.tensor import LazyTensor

Exchange = Callable[[bytes], Sequence[bytes]]
"""Sends this rank's bytes to all ranks and returns those of all ranks, in rank order."""


@renamed()
def fingerprint(
    state_dict: Any,
    *,
    layouts: Mapping[str, TensorLayout] | None = None,
    rank: int | None = None,
    exchange: Exchange | None = None,
    key: Key = PUBLIC,
    executor: Executor | None = None,
) -> dict[str, str]:
    """Return the fingerprint of every tensor of a (nested) state dict or of a checkpoint, by key.

    For a state dict, the result is the same on every rank. With torch.distributed initialized, the
    call is collective over the default group. Each rank sums up its own shards of DTensors and
    ShardedTensors, and sends the key of each and about 60 bytes. No tensor is gathered. Replicas must
    be equal bit by bit, and so must plain tensors under the same key on several ranks.

    For a checkpoint, this process reads every tensor, in pieces. Other ranks take no part, and saved
    fingerprints are not used.

    Args:
        state_dict: tensors of any kind in nested containers, including `LazyTensor`s of a checkpoint.
            Or a checkpoint: a path, a `Storage`, or an open `Checkpoint`.
        layouts: layouts of plain tensors that hold only this rank's shard, by key. A plain tensor
            without one is a full tensor.
        rank: this process's rank in those layouts. Default: its rank in the default group, or 0.
        exchange: sends bytes to all ranks, and returns those of all ranks in order. Default: an
            exchange by the default group. `lambda data: [data]` uses this process only.
        key: see `Key`.
        executor: reads a checkpoint, given by its path, as tasks, as in `reshard.convert`.

    Raises:
        ReplicaDriftError: replicas differ. The message names the tensors and the ranks, on all
            ranks.
        LayoutError: ranks disagree about dtype or shape, or their shards do not cover a full
            tensor.
        OptionError: the argument is neither a state dict nor a checkpoint, or you passed layouts for a
            checkpoint.
    """
    if exchange is None and not isinstance(state_dict, str | os.PathLike | Storage | Checkpoint):
        return _of_all_ranks(state_dict, layouts, rank, key, executor)
    check_options(key=key)
    check_executor(executor, 1, state_dict)
    if isinstance(state_dict, str | os.PathLike | Storage):
        state_dict = open_checkpoint(state_dict)
    if isinstance(state_dict, Checkpoint):
        if layouts is not None or rank is not None or exchange is not None:
            raise OptionError("layouts, rank, and exchange are for state dicts: for a checkpoint, leave them out")
        return _of_checkpoint(state_dict, key, executor)
    assert exchange is not None
    state_dict = _checked_state(state_dict)
    held = holdings(state_dict, layouts, this_rank() if rank is None else rank, key)
    return join(exchange(msgspec.msgpack.encode(held)), key=key)


def _of_all_ranks(
    state_dict: Any,
    layouts: Mapping[str, TensorLayout] | None,
    rank: int | None,
    key: Key,
    executor: Executor | None,
) -> dict[str, str]:
    """Collective: return the fingerprints of what all ranks hold."""
    group = Group()
    with group.together("fingerprint"):
        check_options(key=key)
        check_executor(executor, 1, state_dict)
        state_dict = _checked_state(state_dict)
        group.same_options("fingerprint", {"key": key.name})
        held = holdings(state_dict, layouts, this_rank() if rank is None else rank, key, ranks=group.ranks)
        mine = sum_up(held, group.job_rank)
        told = group.merge(mine, lambda parts: add_holdings(parts, group.world_size), "fingerprints")
    return conclude(told, key=key)


def _checked_state(state_dict: Any) -> Any:
    if not (isinstance(state_dict, Mapping | list | tuple) or is_tensor(state_dict)):
        raise OptionError(
            f"fingerprint takes a state dict, a path or an open Checkpoint, got {state_instead_of(state_dict)}"
        )
    return saved_state(state_dict)


@dataclass(frozen=True)
class FingerprintWork:
    """Sums over parts of the tensors of a checkpoint."""

    checkpoint: Opening
    key: Key

    def begin(self) -> Callable[[Share], list[bytes]]:
        """Open the checkpoint."""
        return functools.partial(_sums, self.checkpoint.open(), self.key)


def _of_checkpoint(checkpoint: Checkpoint, key: Key, executor: Executor | None) -> dict[str, str]:
    tensors = all_names(checkpoint)
    totals = dict.fromkeys(tensors, Partial())

    def on_done(share: Share, sums: list[bytes]) -> None:
        for (name, _), found in zip(share, sums):
            totals[name] += Partial.from_bytes(found)

    work = FingerprintWork(Opening.of(checkpoint), key) if executor is not None else None
    boxes = ((name, Box.full(tensor.shape), tensor.dtype.itemsize) for name, tensor in tensors.items())
    asked = shares(boxes, checkpoint)
    with unless_replaced("read", checkpoint):
        run_tasks(work, asked, executor, on_done, here=functools.partial(_sums, checkpoint, key))
    return {name: totals[name].digest(tensor.dtype, tensor.shape, key=key) for name, tensor in tensors.items()}


def _sums(checkpoint: Checkpoint, key: Key, share: Share) -> list[bytes]:
    """Return what each box of a share adds to the fingerprint of its tensor."""
    regions = [Region(checkpoint[name].stored, box) for name, box in share]
    return [found.to_bytes() for found in _sum_up(regions, key)]


def _sum_up(regions: Sequence[Region], key: Key) -> list[Partial]:
    """Return the sum over each region, which is read in pieces."""
    digests = [Fingerprinter(region.stored.spec.dtype, region.stored.spec.shape, key=key) for region in regions]
    with Feed(is_near=any(region.is_near for region in regions[:1])) as feed:
        for region, digest in zip(regions, digests, strict=True):
            feed.add(region, functools.partial(_add, digest))
    return [digest.partial for digest in digests]


def _add(digest: Fingerprinter, piece: StreamedRows) -> None:
    digest.add_bytes(piece.data, piece.box)


def holdings(
    state_dict: Mapping[str, Any],
    layouts: Mapping[str, TensorLayout] | None,
    rank: int,
    key: Key = PUBLIC,
    *,
    ranks: Sequence[int] = (),
) -> list[Holding]:
    """Return the sums of what `rank` holds. A tensor of which it holds no element is still named.
    Not collective.

    `ranks`: all ranks that take part, if known. What another of them will overwrite is omitted.

    Raises LayoutError for a tensor whose layout is not given, or whose local shape differs from the
    layout's.
    """
    leaves = expanded(flatten(state_dict, is_leaf=lambda v: is_tensor(v) or isinstance(v, LazyTensor)).leaves)
    lazy = {key_of(path): value for path, value in leaves.items() if isinstance(value, LazyTensor)}
    tensors = {
        key_of(path): value
        for path, value in leaves.items()
        if is_tensor(value) and getattr(value, OVERWRITTEN_BY, None) not in ranks
    }
    given: StateLayout = layout_of(tensors) if layouts is None else _pick(layouts, tensors)
    held = {fqn: _matched(fqn, LiveTensor(fqn, tensors[fqn]).local, given.parts(fqn, rank)) for fqn in given}
    sums = iter(_summed(given, held, rank, key))
    found = []
    for fqn, layout in given.items():
        spec = layout.spec
        for _, part in held[fqn]:
            holders = _holders(layout, rank, len(ranks))
            found.append(Holding(fqn, spec.dtype, spec.shape, _place(part), next(sums).to_bytes(), holders))
        if not held[fqn]:
            found.append(Holding.nothing(spec))
    for fqn, stored in lazy.items():
        shape, read = tuple(stored.shape), _sum_up([Region.whole(stored.stored)], key)[0].to_bytes()
        found.append(Holding(fqn, stored.stored.spec.dtype, shape, _place(Part.of_box(Box.full(shape))), read))
    return found


def _summed(
    given: StateLayout, held: Mapping[str, Sequence[tuple[Any, Part]]], rank: int, key: Key
) -> Sequence[Partial]:
    """Return the partial sums of all parts of all tensors, in order. Devices compute theirs, and
    are waited for once."""
    fqn = ""

    def parts() -> Iterator[tuple[Any, Part, Sequence[int]]]:
        nonlocal fqn
        for fqn, layout in given.items():
            for tensor, part in held[fqn]:
                yield tensor, part, layout.spec.shape

    try:
        return partials(parts(), key=key)
    except (LayoutError, FormatError) as error:
        raise type(error)(f"tensor {fqn!r} on rank {rank}: {error}") from None


def _pick(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, Any]) -> StateLayout:
    missing = sorted(tensors.keys() - layouts.keys())
    if missing:
        raise LayoutError(f"no layout is given for {format_count(len(missing), 'tensor')}: {format_some(missing)}")
    return StateLayout({fqn: layouts[fqn] for fqn in tensors})


def _matched(fqn: str, local: Sequence[Any], parts: Sequence[Part]) -> list[tuple[Any, Part]]:
    """Return each part with the local tensor that it places: a separate tensor for each, or one
    flat tensor for all."""
    if len(local) == 1 and parts and all(part.flat_start is not None for part in parts):
        return [(local[0], part) for part in parts]
    if not parts and all(not tensor.numel() for tensor in local):
        return []
    if len(local) != len(parts):
        raise LayoutError(f"tensor {fqn!r}: the layout has {len(parts)} parts on this rank, but there are {len(local)}")
    return list(zip(local, parts))


def _holders(layout: TensorLayout, rank: int, world_size: int) -> int:
    """Return how many ranks hold what this rank holds; 0 if this layout does not say whether others do."""
    form = layout.form
    if not isinstance(form, ProductForm) or form.mesh.size != world_size or rank not in form.mesh:
        return 0
    copies = (size for size, placement in zip(form.mesh.shape, form.placements) if isinstance(placement, Replicate))
    return math.prod(copies)


def _place(part: Part) -> bytes:
    """Return a digest of the set of elements. Their local order does not matter."""
    if not part.numel:
        return b""
    return hashlib.blake2b(repr([sorted(dim) for dim in part.dims]).encode(), digest_size=8).digest()


def join(payloads: Sequence[bytes], *, ranks: Sequence[int] | None = None, key: Key = PUBLIC) -> dict[str, str]:
    """Return the fingerprints from the holdings of all ranks (packed, in rank order): see `conclude`."""
    told = [
        sum_up(msgspec.msgpack.decode(payload, type=list[Holding]), rank)
        for payload, rank in zip(payloads, range(len(payloads)) if ranks is None else ranks)
    ]
    return conclude(add_holdings(told, len(told)), key=key)
