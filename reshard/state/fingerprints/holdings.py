"""What ranks hold of tensors, each part summed up, and how that is put together, by any number of ranks at a time.

Ranks that hold the same elements must have the same sums, which then count once. Where it is known how many hold them,
their part is added to the tensor's total as soon as all were heard, and forgotten; at the latest when all ranks were.
So what is put together for many ranks is no larger than for few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from reshard.errors import LayoutError, ReplicaDriftError, format_ranks
from reshard.state.fingerprints.keys import PUBLIC, Key
from reshard.state.fingerprints.parts import Partial

__all__ = ["Holding", "add_holdings", "conclude", "pack_holdings"]

_Runs = list[tuple[int, int]]
"""Ranks, in rows from a first to one past a last."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of one tensor: one product of intervals."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    place: bytes
    """8 bytes that are equal for ranks that hold the same elements; empty for none."""
    sums: bytes
    """`Partial.to_bytes()` of them."""
    holders: int = 0
    """How many ranks hold them, this one included; 0 if it is not known."""


class _Tensor(msgspec.Struct, array_like=True):
    """What some ranks hold of one tensor."""

    rank: int
    """The first of them."""
    dtype: str
    shape: tuple[int, ...]
    total: bytes
    """Of elements of which all holders were heard."""
    places: dict[bytes, tuple[int, dict[bytes, _Runs]]]
    """Of all others: how many holders there are, and by their sums, which were heard."""
    other: tuple[int, str, tuple[int, ...]] | None = None
    """A rank that says another dtype or shape."""

    def add(self, more: _Tensor) -> None:
        """What further ranks hold of it."""
        self.total = (Partial.from_bytes(self.total) + Partial.from_bytes(more.total)).to_bytes()
        if (more.dtype, more.shape) != (self.dtype, self.shape):
            self.other = self.other or (more.rank, more.dtype, more.shape)
        self.other = self.other or more.other
        for place, (holders, versions) in more.places.items():
            known = self.places.setdefault(place, (holders, {}))[1]
            for sums, runs in versions.items():
                known[sums] = _joined(known.get(sums, []), runs)

    def settle(self, *, is_all: bool) -> None:
        """Add up, and forget, what no further rank can hold; nothing where replicas differ."""
        done = {}
        for place, (holders, versions) in self.places.items():
            if len(versions) == 1:
                ((sums, runs),) = versions.items()
                if is_all or sum(stop - start for start, stop in runs) == holders:
                    done[place] = Partial.from_bytes(sums)
        self.total = Partial.total([Partial.from_bytes(self.total), *done.values()]).to_bytes()
        self.places = {place: row for place, row in self.places.items() if place not in done}


class _Told(msgspec.Struct, array_like=True):
    ranks: int
    """How many were heard."""
    tensors: dict[str, _Tensor]


def pack_holdings(held: Iterable[Holding], rank: int) -> bytes:
    """What one rank holds, for `add_holdings`."""
    tensors: dict[str, _Tensor] = {}
    for one in held:
        none = Partial().to_bytes()
        mine = _Tensor(rank, one.dtype, one.shape, none, {one.place: (one.holders, {one.sums: [(rank, rank + 1)]})})
        if one.fqn in tensors:
            tensors[one.fqn].add(mine)
        else:
            tensors[one.fqn] = mine
    return msgspec.msgpack.encode(_Told(1, tensors))


def add_holdings(packed: Sequence[bytes], world_size: int) -> bytes:
    """What several ranks, or several lots of them, hold together. `world_size`: how many ranks there are in all."""
    first, *rest = (msgspec.msgpack.decode(one, type=_Told) for one in packed)
    for told in rest:
        first.ranks += told.ranks
        for fqn, tensor in told.tensors.items():
            if fqn in first.tensors:
                first.tensors[fqn].add(tensor)
            else:
                first.tensors[fqn] = tensor
    for tensor in first.tensors.values():
        tensor.settle(is_all=first.ranks == world_size)
    return msgspec.msgpack.encode(first)


def conclude(packed: bytes, *, key: Key = PUBLIC) -> dict[str, str]:
    """The fingerprints that the holdings of all ranks make up, in the order of first mention.

    Raises:
        ReplicaDriftError: ranks that hold the same elements have different sums.
        LayoutError: dtypes or shapes differ, or parts are missing or overlap.
    """
    tensors = msgspec.msgpack.decode(packed, type=_Told).tensors
    for fqn, tensor in tensors.items():
        if tensor.other is not None:
            rank, dtype, shape = tensor.other
            raise LayoutError(
                f"tensor {fqn!r} is {tensor.dtype}{list(tensor.shape)} on rank {tensor.rank}, "
                f"but {dtype}{list(shape)} on rank {rank}"
            )
    drifted = [
        f"{fqn}: " + " differ from ".join(format_ranks(_ranks(runs)) for runs in versions.values())
        for fqn, tensor in tensors.items()
        for _, versions in tensor.places.values()
    ]
    if drifted:
        raise ReplicaDriftError(
            f"{len(drifted)} replicated parts of tensors do not have the same bits on all ranks that hold them: "
            + "; ".join(drifted[:8])
            + (" ..." if len(drifted) > 8 else "")
        )
    found = {}
    for fqn, tensor in tensors.items():
        try:
            found[fqn] = Partial.from_bytes(tensor.total).digest(tensor.dtype, tensor.shape, key=key)
        except LayoutError as error:
            raise LayoutError(f"tensor {fqn!r}: {error}") from None
    return found


def _joined(some: _Runs, more: _Runs) -> _Runs:
    out: _Runs = []
    for start, stop in sorted([*some, *more]):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def _ranks(runs: _Runs) -> list[int]:
    return [rank for start, stop in runs for rank in range(start, stop)]
