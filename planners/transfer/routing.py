"""Which holder sends what to whom, for all tensors of one geometry.

A rank that holds an element itself copies it. Other ranks are served by a holder on their own host if there is one,
and else by all holders in turn: deliveries are dealt like cards, least loaded holder first, and each tensor of the
geometry starts where the one before it stopped. So the load is even without a search, and any rank can
work out its own part alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planners.geometry.dtypes import ITEM_SIZES
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.layout_forms import Form
from planners.geometry.ownership import Ints
from planners.transfer.intersection import Intersection

__all__ = ["PairGroup", "Route", "Traffic", "pair_groups", "total_traffic"]

_BLOCK_ENTRIES = 1 << 20
_DENSE_RANKS = 4096
"""For so many ranks traffic is summed in a table of all pairs."""


class Traffic(NamedTuple):
    """Bytes from senders to receivers, as columns; never from a rank to itself."""

    sender: Ints
    receiver: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Tensors of equal shape and item sizes, placed alike before and alike after."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    """Where each name stands among those that were grouped."""
    before: TensorLayout
    """The layout of the first of them, on the side that gives."""
    after: TensorLayout
    """The same on the side that takes."""

    def __len__(self) -> int:
        return len(self.names)


def pair_groups(before: StateLayout, after: StateLayout, names: Iterable[str]) -> tuple[PairGroup, ...]:
    """`names`, which both sides have, grouped by all that plans depend on: shape, item sizes and both forms.

    Groups come in the order of their first names, and names keep their order.
    """
    numbers: dict[int, int] = {}  # forms are mostly shared objects, so that each is hashed once
    distinct: dict[Form, int] = {}

    def number(form: Form) -> int:
        found = numbers.get(id(form))
        if found is None:
            found = numbers[id(form)] = distinct.setdefault(form, len(distinct))
        return found

    groups: dict[tuple[object, ...], tuple[list[str], list[int]]] = {}
    for position, fqn in enumerate(names):
        left, right = before[fqn], after[fqn]
        a, b = left.spec, right.spec
        key = (a.shape, b.shape, ITEM_SIZES[a.dtype], ITEM_SIZES[b.dtype], number(left.form), number(right.form))
        group = groups.get(key)
        if group is None:
            group = groups[key] = ([], [])
        group[0].append(fqn)
        group[1].append(position)
    return tuple(
        PairGroup(tuple(fqns), tuple(positions), before[fqns[0]], after[fqns[0]]) for fqns, positions in groups.values()
    )


class Route:
    """The deliveries of one group of tensors. Frozen."""

    def __init__(self, group: PairGroup, intersection: Intersection, loads: Ints, ranks_per_host: int | None) -> None:
        """`loads`: bytes that each rank sends already, for groups that come before this one."""
        self.group, self.intersection = group, intersection
        self._tensors, self._itemsize = len(group), group.before.spec.itemsize
        self._ranks_per_host = ranks_per_host
        holders = self.intersection.holders
        self._alone = bool(holders.counts.max(initial=0) <= 1)
        self.order = holders.ranks
        """The holders of each source, least loaded first; otherwise like `Holders.ranks`."""
        if not self._alone:
            order = np.lexsort((holders.ranks, loads[holders.ranks], holders.source_of))
            self.order = holders.ranks[order]
        self._far: dict[int, list[int]] = {}

    # --- one rank ---

    def senders(self, source: int, receiver: int) -> list[int]:
        """Who sends the part of `source` that `receiver` needs, for each tensor of the group; itself if it holds it."""
        holders = self.intersection.holders
        begin, end = int(holders.indptr[source]), int(holders.indptr[source + 1])
        if self._holds(source, receiver):
            return [receiver] * self._tensors
        if end - begin == 1:
            return [int(holders.ranks[begin])] * self._tensors
        near, past = self._near(source, receiver)
        if past > near:
            mates = holders.ranks[near:past].tolist()
            return [mates[(receiver + t) % len(mates)] for t in range(self._tensors)]
        far, dealt = self._far_receivers(source), self.order[begin:end].tolist()
        turn = far.index(receiver)
        return [dealt[(turn + _first_turn(t, len(far), len(dealt))) % len(dealt)] for t in range(self._tensors)]

    def served(self, source: int, rank: int) -> Iterator[tuple[int, int]]:
        """(tensor, receiver) of all that holder `rank` sends of `source` to others; receivers of a tensor ascend."""
        holders = self.intersection.holders
        begin, end = int(holders.indptr[source]), int(holders.indptr[source + 1])
        if end - begin == 1:
            others = [r for r in self.intersection.receivers(source).tolist() if r != rank]
            yield from ((t, r) for t in range(self._tensors) for r in others)
            return
        far, count = self._far_receivers(source), end - begin
        place = self.order[begin:end].tolist().index(rank)
        mates, near, my_place = self._served_near(source, rank)
        for t in range(self._tensors):
            found = far[(place - _first_turn(t, len(far), count)) % count :: count]
            yield from ((t, r) for r in sorted([*found, *(r for r in mates if (r + t) % near == my_place)]))

    def _served_near(self, source: int, rank: int) -> tuple[list[int], int, int]:
        """The ranks on the host of `rank` that holders there serve, how many these are, and the place of `rank`."""
        if self._ranks_per_host is None:
            return [], 1, 0
        near, past = self._near(source, rank)
        first = rank - rank % self._ranks_per_host
        receivers = self.intersection.receivers(source)
        receivers = receivers[(receivers >= first) & (receivers < first + self._ranks_per_host)]
        needy = receivers[~self.intersection.holders.hold(np.full(len(receivers), source, dtype=np.int64), receivers)]
        return needy.tolist(), past - near, self.intersection.holders.ranks[near:past].tolist().index(rank)

    def _holds(self, source: int, rank: int) -> bool:
        return bool(self.intersection.holders.hold(np.array([source]), np.array([rank]))[0])

    def _near(self, source: int, rank: int) -> tuple[int, int]:
        begin, end = self._near_all(np.array([source]), np.array([rank]))
        return int(begin[0]), int(end[0])

    def _near_all(self, sources: Ints, ranks: Ints) -> tuple[Ints, Ints]:
        """Where among the holders those on the host of each rank begin and end."""
        if self._ranks_per_host is None:
            nobody = np.zeros(len(ranks), dtype=np.int64)
            return nobody, nobody
        first = ranks - ranks % self._ranks_per_host
        return self.intersection.holders.between(sources, first, first + self._ranks_per_host)

    def _far_receivers(self, source: int) -> list[int]:
        """Receivers that all holders of `source` serve in turn, ascending."""
        found = self._far.get(source)
        if found is None:
            receivers = self.intersection.receivers(source)
            sources = np.full(len(receivers), source, dtype=np.int64)
            begin, end = self._near_all(sources, receivers)
            alien = ~self.intersection.holders.hold(sources, receivers) & (begin == end)
            found = self._far[source] = receivers[alien].tolist()
        return found

    # --- all ranks ---

    def traffic(self) -> Iterator[Traffic]:
        """Bytes of all tensors of the group between different ranks, in blocks; pairs may come up several times."""
        holders = self.intersection.holders
        for source, receiver, numel in self.intersection.blocks():
            nbytes = numel * self._itemsize
            alien = ~holders.hold(source, receiver)
            source, receiver, nbytes = source[alien], receiver[alien], nbytes[alien]
            if self._alone:
                yield Traffic(holders.ranks[holders.indptr[source]], receiver, nbytes * self._tensors)
                continue
            begin, end = self._near_all(source, receiver)
            near = end > begin
            yield from self._near_traffic(begin[near], end[near], receiver[near], nbytes[near])
            yield from self._far_traffic(source[~near], receiver[~near], nbytes[~near])

    def sent_bytes(self, world_size: int) -> Ints:
        """Bytes that each rank sends to others."""
        out = np.zeros(world_size, dtype=np.int64)
        whole = self.intersection.source_numels() if self._alone else None
        if whole is not None:
            numel, needed_by = whole
            out[self.intersection.holders.ranks] = numel * needed_by
            out -= self.intersection.local_numels(world_size)
            return np.asarray(out * (self._itemsize * self._tensors), dtype=np.int64)
        for sender, _, nbytes in self.traffic():
            np.add.at(out, sender, nbytes)
        return out

    def _near_traffic(self, begin: Ints, end: Ints, receiver: Ints, nbytes: Ints) -> Iterator[Traffic]:
        """Tensor t is sent by the (receiver + t)-th holder of the host, counted round and round."""
        for j in range(int((end - begin).max(initial=0))):
            some = end - begin > j
            mates, to = (end - begin)[some], receiver[some]
            times = (self._tensors - (j - to) % mates + mates - 1) // mates
            sent = times > 0
            senders = self.intersection.holders.ranks[begin[some] + j]
            yield Traffic(senders[sent], to[sent], (nbytes[some] * times)[sent])

    def _far_traffic(self, source: Ints, receiver: Ints, nbytes: Ints) -> Iterator[Traffic]:
        if not len(source):
            return
        holders = self.intersection.holders
        fresh = np.concatenate(([True], source[1:] != source[:-1]))
        start = np.flatnonzero(fresh)
        far = np.diff(np.append(start, len(source)))
        turn = np.arange(len(source)) - np.repeat(start, far)
        far = np.repeat(far, far)
        count = holders.counts[source]
        kinds, kind = np.unique(np.stack((count, far)), axis=1, return_inverse=True)
        for i, (holding, waiting) in enumerate(kinds.T.tolist()):
            turns = np.array([_first_turn(t, waiting, holding) % holding for t in range(self._tensors)])
            first, times = np.unique(turns, return_counts=True)
            rows = np.flatnonzero(kind.reshape(-1) == i)
            step = max(1, _BLOCK_ENTRIES // len(first))
            for at in range(0, len(rows), step):
                some = rows[at : at + step]
                place = (turn[some][:, None] + first) % holding
                senders = self.order[holders.indptr[source[some]][:, None] + place]
                sizes = nbytes[some][:, None] * times
                yield Traffic(senders.reshape(-1), np.repeat(receiver[some], len(first)), sizes.reshape(-1))


def total_traffic(blocks: Iterable[Traffic], world_size: int) -> Traffic:
    """The sum of blocks: every pair of ranks that comes up once, sorted by sender and receiver."""
    if world_size <= _DENSE_RANKS:
        table = np.zeros(world_size * world_size, dtype=np.int64)
        for sender, receiver, nbytes in blocks:
            np.add.at(table, sender * world_size + receiver, nbytes)
        pairs = np.flatnonzero(table)
        return Traffic(pairs // world_size, pairs % world_size, table[pairs])
    total = Traffic(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    waiting, entries = [total], 0
    for block in blocks:
        waiting.append(block)
        entries += len(block.sender)
        if entries > len(total.sender) + 4 * _BLOCK_ENTRIES:
            total, entries = _sum(waiting), 0
            waiting = [total]
    return _sum(waiting)


def _sum(blocks: list[Traffic]) -> Traffic:
    every = np.concatenate([block.sender << 32 | block.receiver for block in blocks])
    pairs, inverse = np.unique(every, return_inverse=True)
    nbytes = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(nbytes, inverse, np.concatenate([block.nbytes for block in blocks]))
    return Traffic(pairs >> 32, pairs & 0xFFFFFFFF, nbytes)


def _first_turn(tensor: int, waiting: int, holding: int) -> int:
    """At which holder the dealing of a tensor starts, if each tensor is dealt to `waiting` receivers by `holding`
    holders. It goes on where the last tensor stopped, and moves by one after each full circle, so that a receiver
    gets tensors from all holders: after `holding` tensors, from each once."""
    return tensor * waiting + tensor // (holding // math.gcd(holding, waiting))
