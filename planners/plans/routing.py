"""Which parts of two layouts overlap, and which holder sends what to which rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planners.errors import CoverageError
from planners.geometry.arrays import Flags, Ints, grouped, ints, ones, outer_sum, ravel, running_sums, unravel, zeros
from planners.geometry.box import Box, Shape
from planners.geometry.layout import Form, ProductGeometry, StateLayout, TensorLayout, local_boxes
from planners.geometry.overlap import ProductOverlap, Sweep, overlap_of
from planners.geometry.ownership import SegmentRow, Segments

# A *source* is a distinct region of the layout before, numbered from 0, with the ranks
# that hold it. A receiver is a rank of the layout after. Both kinds of intersection
# have the same methods; the product kind, which is made of the same overlap as loads
# are, does so without listing ranks.


_BLOCK_DELIVERIES = 1 << 20


class Common(NamedTuple):
    """One box of elements that a source and a receiver have in common."""

    box: Box
    """The common elements, in global coordinates."""
    source: Box
    """The same, in the coordinates of the holder's local tensor."""
    target: Box
    """The same, in the coordinates of the receiver's local tensor."""
    source_part: int
    """Index of the holder's local tensor."""
    target_part: int
    """Index of the receiver's local tensor."""


class Deliveries(NamedTuple):
    """Deliveries as columns, sorted by source and receiver; no source is divided among blocks."""

    source: Ints
    receiver: Ints
    numel: Ints


class Holders:
    """The ranks that hold each source."""

    def __init__(self, indptr: Ints, ranks: Ints) -> None:
        """Ranks of source s, ascending: `ranks[indptr[s]:indptr[s + 1]]`."""
        self.indptr, self.ranks = indptr, ranks
        self.counts = np.diff(indptr)

    @cached_property
    def source_of(self) -> Ints:
        """The source of each entry of `ranks`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def _keys(self) -> Ints:
        return self.source_of << 32 | self.ranks

    def between(self, sources: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Return where in `ranks` the holders of each source with first <= rank < last begin and end."""
        base = ints(sources) << 32
        return (
            ints(np.searchsorted(self._keys, base | first)),
            ints(np.searchsorted(self._keys, base | last)),
        )

    def hold(self, sources: Ints, ranks: Ints) -> Flags:
        """Return whether each rank holds the source at the same position."""
        begin, end = self.between(sources, ranks, ranks + 1)
        return end > begin


@dataclass(frozen=True)
class ProductIntersection:
    """Both sides are products: one table per dim of the owners that have elements in common."""

    overlap: ProductOverlap
    """The tables of all dims."""

    @property
    def before(self) -> ProductGeometry:
        """The layout that holds the sources."""
        return self.overlap.saved

    @property
    def after(self) -> ProductGeometry:
        """The layout of the receivers."""
        return self.overlap.wanted

    @cached_property
    def shape(self) -> Shape:
        """Owners of each dim before: sources are numbered row-major over them."""
        return tuple(own.owners for own in self.before.dims)

    @cached_property
    def holders(self) -> Holders:
        ranks = self.before.holders(slice(None) for _ in self.shape)
        return Holders(np.arange(len(ranks) + 1) * ranks.shape[1], ranks.reshape(-1))

    @cached_property
    def tables(self) -> tuple[_DimTable, ...]:
        """Per dim: which owners have elements in common."""
        return tuple(_DimTable(segments) for segments in self.overlap.dims)

    def sources(self, receiver: int) -> Sequence[int]:
        """Sources that `receiver` needs something of, ascending."""
        if receiver not in self.after.mesh:
            return ()
        found = [table.givers(o) for table, o in zip(self.tables, self.after.owners_of(receiver))]
        return [ravel(combo, self.shape) for combo in itertools.product(*found)]

    def sources_of(self, rank: int) -> Sequence[int]:
        """Sources that `rank` holds, ascending."""
        return (ravel(self.before.owners_of(rank), self.shape),) if rank in self.before.mesh else ()

    def receivers(self, source: int) -> Ints:
        """Ranks that need something of `source`, ascending."""
        found = [
            positions[table.takers(o)]
            for table, positions, o in zip(self.tables, self.after.dim_positions, unravel(source, self.shape))
        ]
        base = outer_sum(found)
        return np.sort(self.after.mesh.ranks[(base[:, None] + self.after.replica_positions).reshape(-1)])

    def commons(self, source: int, receiver: int) -> tuple[Common, ...]:
        """Return what they have in common, in the order of the receiver's local elements."""
        owners = zip(unravel(source, self.shape), self.after.owners_of(receiver))
        return tuple(_commons([table.rows(s, w) for table, (s, w) in zip(self.tables, owners)]))

    def blocks(self) -> Iterator[Deliveries]:
        """Every (source, receiver) with the elements between them, those that the receiver holds
        itself included."""
        source = outer_sum([table.giver * step for table, step in zip(self.tables, _steps(self.shape))])
        base = outer_sum([at[table.taker] for table, at in zip(self.tables, self.after.dim_positions)])
        numel = ones(1)
        for table in self.tables:
            numel = (numel[:, None] * table.length).reshape(-1)
        order = np.argsort(source, kind="stable")
        source, base, numel = source[order], base[order], numel[order]
        limit = _BLOCK_DELIVERIES // len(self.after.replica_positions)
        ends = [*(np.flatnonzero(source[1:] != source[:-1]) + 1).tolist(), len(source)]
        begin = 0
        for end, following in itertools.pairwise([*ends, ends[-1] + limit + 1]):
            if following - begin > limit and end > begin:
                yield self._block(source[begin:end], base[begin:end], numel[begin:end])
                begin = end

    def _block(self, source: Ints, base: Ints, numel: Ints) -> Deliveries:
        replicas = self.after.replica_positions
        receiver = self.after.mesh.ranks[(base[:, None] + replicas).reshape(-1)]
        sources, numels = np.repeat(source, len(replicas)), np.repeat(numel, len(replicas))
        order = np.lexsort((receiver, sources))
        return Deliveries(sources[order], receiver[order], numels[order])

    def counts(self, world_size: int) -> Ints:
        """Return how many boxes each rank has in common with sources, its own included."""
        numbers = ones(self.after.mesh.size)
        for segments, owner in zip(self.overlap.dims, self.after.rank_owners):
            numbers *= np.diff(segments.indptr)[owner]
        out = zeros(world_size)
        out[self.after.mesh.ranks] = numbers
        return out

    def local_numels(self, world_size: int) -> Ints:
        """Elements that each rank needs and holds itself."""
        out = zeros(world_size)
        ranks = np.intersect1d(self.before.mesh.ranks, self.after.mesh.ranks)
        was, will = self.before.mesh.positions(ranks), self.after.mesh.positions(ranks)
        numel = ones(len(ranks))
        for d, table in enumerate(self.tables):
            numel *= table.lengths(self.before.rank_owners[d][was], self.after.rank_owners[d][will])
        out[ranks] = numel
        return out

    def source_numels(self) -> tuple[Ints, int]:
        """(elements of each source, how many ranks need each), if that is all that there is to
        know, else None."""
        numel = ones(1)
        for own, table in zip(self.before.dims, self.tables):
            wanted = zeros(own.owners)
            np.add.at(wanted, table.giver, table.length)
            numel = (numel[:, None] * wanted).reshape(-1)
        return numel, len(self.after.replica_positions)


class _DimTable:
    """Which owners of a dim have elements in common, sorted by giver and taker, and how many."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._takers = max(segments.wanted.owners, 1)
        keys, inverse = np.unique(segments.saved_owner * self._takers + segments.wanted_owner, return_inverse=True)
        self._keys = keys
        self.giver, self.taker = np.divmod(keys, self._takers)
        self.length = zeros(len(keys))
        np.add.at(self.length, inverse, segments.stops - segments.starts)
        self._from = np.searchsorted(self.giver, np.arange(segments.saved.owners + 1))
        self._by_taker = np.argsort(self.taker, kind="stable")
        self._to = np.searchsorted(self.taker[self._by_taker], np.arange(segments.wanted.owners + 1))
        self._rows: dict[tuple[int, int], list[SegmentRow]] = {}

    def takers(self, giver: int) -> Ints:
        return ints(self.taker[self._from[giver] : self._from[giver + 1]])

    def givers(self, taker: int) -> list[int]:
        rows = self._by_taker[self._to[taker] : self._to[taker + 1]]
        return [int(giver) for giver in self.giver[rows]]

    def lengths(self, givers: Ints, takers: Ints) -> Ints:
        """Elements between each giver and the taker beside it; 0 where they do not meet."""
        if not len(self._keys):
            return zeros(len(givers))
        wanted = givers * self._takers + takers
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return ints(np.where(self._keys[at] == wanted, self.length[at], 0))

    def rows(self, giver: int, taker: int) -> list[SegmentRow]:
        """Return the segments that `giver` has of what `taker` wants, in the order of the taker's local dim."""
        if (giver, taker) not in self._rows:
            self._rows |= grouped(((row.saved_owner, taker), row) for row in self._segments.rows(taker))
        return self._rows[giver, taker]


def _commons(rows: list[list[SegmentRow]]) -> Iterator[Common]:
    for combo in itertools.product(*rows):
        sizes = tuple(row.size for row in combo)
        yield Common(
            Box.of(tuple(row.start for row in combo), sizes),
            Box.of(tuple(row.saved_local_start for row in combo), sizes),
            Box.of(tuple(row.local_start for row in combo), sizes),
            0,
            0,
        )


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


class SweepIntersection:
    """The intersection of two forms, of which at least one is no product. It sweeps each receiver's
    boxes over all held boxes, and has the methods of `ProductIntersection`."""

    overlap = None

    def __init__(self, shape: Shape, before: Form, after: Form) -> None:
        """Raises CoverageError (with rank and region) if no rank holds what a receiver needs."""
        # ranks are replicas of one source if the same box is at the same place of the
        # same local tensor
        found = grouped(
            ((box, index, local), rank)
            for rank in before.ranks()
            for index, box, local in local_boxes(before, shape, rank)
        )
        self._sources = list(found)
        self._held = grouped((rank, s) for s, ranks in enumerate(found.values()) for rank in ranks)
        indptr = running_sums([*map(len, found.values())])
        self.holders = Holders(indptr, ints([r for ranks in found.values() for r in sorted(ranks)]))
        sweep = Sweep((s, box) for s, (box, _, _) in enumerate(self._sources))
        self._commons: dict[int, dict[int, list[Common]]] = {}
        for rank in after.ranks():
            mine: dict[int, list[Common]] = {}
            own = set(self._held.get(rank, ()))
            for index, box, local in local_boxes(after, shape, rank):
                try:
                    pieces = sweep.covering(box, prefer=own)
                except CoverageError as error:
                    raise CoverageError("no rank holds the needed elements", rank=rank, box=error.box) from None
                for s, chunk, common in pieces:
                    _, source_part, at = self._sources[s]
                    source, target = common.moved_with(chunk, at), common.moved_with(box, local)
                    mine.setdefault(s, []).append(Common(common, source, target, source_part, index))
            if mine:
                self._commons[rank] = mine
        rows = sorted((s, rank) for rank, mine in self._commons.items() for s in mine)
        self._source = ints([s for s, _ in rows])
        self._receiver = ints([rank for _, rank in rows])
        numels = [sum(c.box.numel for c in self._commons[rank][s]) for s, rank in rows]
        self._numel = ints(numels)

    def sources(self, receiver: int) -> Sequence[int]:
        return sorted(self._commons.get(receiver, ()))

    def sources_of(self, rank: int) -> Sequence[int]:
        return self._held.get(rank, ())

    def receivers(self, source: int) -> Ints:
        low, high = np.searchsorted(self._source, [source, source + 1])
        return self._receiver[low:high]

    def commons(self, source: int, receiver: int) -> tuple[Common, ...]:
        return tuple(self._commons[receiver][source])

    def blocks(self) -> Iterator[Deliveries]:
        if len(self._source):
            yield Deliveries(self._source, self._receiver, self._numel)

    def counts(self, world_size: int) -> Ints:
        out = zeros(world_size)
        for rank, mine in self._commons.items():
            out[rank] = sum(map(len, mine.values()))
        return out

    def local_numels(self, world_size: int) -> Ints:
        out = zeros(world_size)
        own = self.holders.hold(self._source, self._receiver)
        np.add.at(out, self._receiver[own], self._numel[own])
        return out

    def source_numels(self) -> None:
        return None


Intersection = ProductIntersection | SweepIntersection
"""All that the transfers of one geometry need."""


@lru_cache(maxsize=256)
def intersection_of(shape: Shape, before: Form, after: Form) -> Intersection:
    """The intersection of two forms for one shape; computed once for each."""
    overlap = overlap_of(shape, before, after)
    if isinstance(overlap, ProductOverlap):
        return ProductIntersection(overlap)
    return SweepIntersection(shape, before, after)


# Which holder sends what to whom, for all tensors of one geometry.
#
# A rank that holds an element itself copies it. Other ranks are served by a holder on their own
# host if there is one, and else by all holders in turn: deliveries go around like cards, least
# loaded holder first, and each tensor of the geometry starts where the one before it stopped. So
# the load is even without a search, and any rank can work out its own part alone.


_BLOCK_ENTRIES = 1 << 20
_DENSE_RANKS = 4096
"""Up to this number of ranks, traffic is summed in a table of all pairs."""


class Traffic(NamedTuple):
    """Bytes from senders to receivers, as columns; never from a rank to itself."""

    sender: Ints
    receiver: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Tensors of equal shape and item sizes, with the same layouts before and after."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    """Index of each name among those that were grouped."""
    before: TensorLayout
    """The layout of the first of them, on the side that gives."""
    after: TensorLayout
    """The layout on the receiving side."""

    def __len__(self) -> int:
        return len(self.names)


def pair_groups(before: StateLayout, after: StateLayout, names: Iterable[str]) -> tuple[PairGroup, ...]:
    """`names`, which both sides have, grouped by all that plans depend on: shape, item sizes and
    both forms.

    Groups come in the order of their first names, and names keep their order.
    """
    numbers: dict[int, int] = {}  # forms are mostly shared objects, so that each is hashed once
    distinct: dict[Form, int] = {}

    def number(form: Form) -> int:
        found = numbers.get(id(form))
        if found is None:
            found = numbers[id(form)] = distinct.setdefault(form, len(distinct))
        return found

    pairs = ((before[fqn], after[fqn], fqn) for fqn in names)
    groups = grouped(
        (
            (a.spec.shape, b.spec.shape, a.spec.itemsize, b.spec.itemsize, number(a.form), number(b.form)),
            (fqn, position),
        )
        for position, (a, b, fqn) in enumerate(pairs)
    )
    out = []
    for rows in groups.values():
        fqns, positions = zip(*rows)
        out.append(PairGroup(fqns, positions, before[fqns[0]], after[fqns[0]]))
    return tuple(out)


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
        """The holders of each source, least loaded first. Otherwise as `Holders.ranks`."""
        if not self._alone:
            order = np.lexsort((holders.ranks, loads[holders.ranks], holders.source_of))
            self.order = holders.ranks[order]
        self._far: dict[int, list[int]] = {}

    # --- one rank ---

    def senders(self, source: int, receiver: int) -> list[int]:
        """Return which rank sends the part of `source` that `receiver` needs, for each tensor of
        the group: the receiver itself if it holds the part."""
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
        """The ranks on the host of `rank` that holders there serve, how many these are, and the
        place of `rank`."""
        if self._ranks_per_host is None:
            return [], 1, 0
        near, past = self._near(source, rank)
        first = rank - rank % self._ranks_per_host
        receivers = self.intersection.receivers(source)
        receivers = receivers[(receivers >= first) & (receivers < first + self._ranks_per_host)]
        needy = receivers[~self.intersection.holders.hold(np.full(len(receivers), source), receivers)]
        return needy.tolist(), past - near, self.intersection.holders.ranks[near:past].tolist().index(rank)

    def _holds(self, source: int, rank: int) -> bool:
        return bool(self.intersection.holders.hold(np.array([source]), np.array([rank]))[0])

    def _near(self, source: int, rank: int) -> tuple[int, int]:
        begin, end = self._near_all(np.array([source]), np.array([rank]))
        return int(begin[0]), int(end[0])

    def _near_all(self, sources: Ints, ranks: Ints) -> tuple[Ints, Ints]:
        """Return where among the holders those on the host of each rank begin and end."""
        if self._ranks_per_host is None:
            nobody = zeros(len(ranks))
            return nobody, nobody
        first = ranks - ranks % self._ranks_per_host
        return self.intersection.holders.between(sources, first, first + self._ranks_per_host)

    def _far_receivers(self, source: int) -> list[int]:
        """Receivers that all holders of `source` serve in turn, ascending."""
        found = self._far.get(source)
        if found is None:
            receivers = self.intersection.receivers(source)
            sources = np.full(len(receivers), source)
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
        out = zeros(world_size)
        whole = self.intersection.source_numels() if self._alone else None
        if whole is not None:
            numel, needed_by = whole
            out[self.intersection.holders.ranks] = numel * needed_by
            out -= self.intersection.local_numels(world_size)
            return ints(out * (self._itemsize * self._tensors))
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
        table = zeros(world_size * world_size)
        for sender, receiver, nbytes in blocks:
            np.add.at(table, sender * world_size + receiver, nbytes)
        pairs = np.flatnonzero(table)
        return Traffic(pairs // world_size, pairs % world_size, table[pairs])
    total = Traffic(*(zeros(0) for _ in range(3)))
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
    nbytes = zeros(len(pairs))
    np.add.at(nbytes, inverse, np.concatenate([block.nbytes for block in blocks]))
    return Traffic(pairs >> 32, pairs & 0xFFFFFFFF, nbytes)


def _first_turn(tensor: int, waiting: int, holding: int) -> int:
    """The first holder of a tensor's deliveries, if each tensor is delivered to `waiting` receivers
    by `holding` holders. It continues where the last tensor stopped, and moves by one after each
    full circle, so that a receiver gets tensors from all holders: after `holding` tensors, from
    each once."""
    return tensor * waiting + tensor // (holding // math.gcd(holding, waiting))
