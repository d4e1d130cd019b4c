"""Schedules: the transfers of a plan, grouped into rounds, with proofs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.findings import Finding
from planners.geometry.arrays import Ints, grouped, ints, running_sums, zeros
from planners.geometry.box import Box, Shape, flat_boxes
from planners.geometry.layout import ITEM_SIZES
from planners.plans.transfer import TransferItem, TransferPlan

# What one rank sends to another is one stream of bytes: the items between the two, in
# their order, each row-major. A stream is divided into messages that are small enough
# for the budget, and the messages are assigned to rounds by edge coloring, so that
# there are as few rounds as the busiest rank has messages. A schedule is a few columns
# of numbers; what is in a message is worked out for the rank that asks, in the same way
# by sender and receiver.


MAX_INFLIGHT_BYTES = 512 << 20
"""Default limit for the bytes that a rank sends and receives in one round."""
_SLACK = max(ITEM_SIZES.values())
_SLACK_SHARE = 64


class Message(NamedTuple):
    """What one rank sends to another rank in one round."""

    round: int
    sender: int
    receiver: int
    pieces: tuple[TransferItem, ...]
    """Parts of transfer items, without gaps. Each part is in row-major order of its box."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class Schedule:
    """The messages of a transfer plan, in rounds. Immutable. Copies within a rank are in no round.

    The columns `round`, `sender`, `receiver`, `start`, and `stop` have one entry per message,
    sorted by round and sender. A message is the bytes `[start, stop)` of the stream from sender to
    receiver. A position inside an element means the first byte of the element. A position inside a
    small row or block of rows (see `slack_bytes`) means its first element, so that a message is one
    box where possible.
    """

    covers: ClassVar[str] = (
        "its plan is correct, every byte is sent once, and each round stays within its budget and pairs each rank at "
        "most once"
    )

    def __init__(
        self, plan: TransferPlan, max_inflight_bytes: int, columns: tuple[Ints, Ints, Ints, Ints, Ints]
    ) -> None:
        """Use `schedule` to create one. `columns`: round, sender, receiver, start, stop."""
        self.plan, self.max_inflight_bytes = plan, max_inflight_bytes
        order = np.lexsort((columns[1], columns[0]))
        self.round, self.sender, self.receiver, self.start, self.stop = (column[order] for column in columns)
        for column in self.columns():
            column.flags.writeable = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that move."""
        return self.plan.names

    def __len__(self) -> int:
        """Number of messages."""
        return len(self.round)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.round.max()) + 1 if len(self) else 0

    @property
    def sizes(self) -> Ints:
        """Bytes of each message."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return int(self.sizes.sum())

    def round_bytes(self) -> Ints:
        """The largest message of each round in bytes, which determines the round's time."""
        out = zeros(self.rounds)
        np.maximum.at(out, self.round, self.sizes)
        return out

    def inflight_bytes(self) -> Ints:
        """The maximum of bytes that each rank sends and receives in one round."""
        world, sizes = self.plan.world_size, self.sizes
        keys = np.concatenate((self.round * world + self.sender, self.round * world + self.receiver))
        spots, inverse = np.unique(keys, return_inverse=True)
        total = zeros(len(spots))
        np.add.at(total, inverse, np.concatenate((sizes, sizes)))
        out = zeros(world)
        np.maximum.at(out, spots % world, total)
        return out

    def messages(self, rank: int) -> tuple[Message, ...]:
        """Return what `rank` sends and receives, round by round. Within a round, sends come first.

        Raises PlanError for a rank outside the job.
        """
        mine = np.flatnonzero((self.sender == rank) | (self.receiver == rank))
        items = (*self.plan.items_from(rank), *self.plan.items_to(rank))
        streams = grouped(((item.sender, item.receiver), item) for item in items if not item.is_local)
        rows = zip(*(column[mine].tolist() for column in self.columns()[:3]), mine.tolist())
        found: dict[int, Message] = {}
        by_stream = grouped(((sender, receiver), (number, row)) for number, sender, receiver, row in rows)
        slack = slack_bytes(self.max_inflight_bytes)
        for (sender, receiver), places in by_stream.items():
            cuts = [(int(self.start[row]), int(self.stop[row])) for _, row in places]
            for (number, row), pieces in zip(places, _cut_stream(streams.get((sender, receiver), []), cuts, slack)):
                found[row] = Message(number, sender, receiver, pieces)
        return tuple(sorted(found.values(), key=lambda m: (m.round, m.sender != rank)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, its = self.columns(), other.columns()
        same = all(map(np.array_equal, mine, its))
        return same and self.plan == other.plan and self.max_inflight_bytes == other.max_inflight_bytes

    __hash__ = None  # type: ignore[assignment]  # holds a plan and columns of numbers

    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """round, sender, receiver, start, stop."""
        return self.round, self.sender, self.receiver, self.start, self.stop

    def findings(self) -> Iterator[Finding]:
        """Yield all problems of the schedule or its plan."""
        yield from self.plan.findings()
        number, sender, receiver = self.columns()[:3]
        if not len(number):
            if self.plan.bytes_moved:
                yield Finding(f"no message carries the {self.plan.bytes_moved} bytes")
            return
        world = self.plan.world_size
        outside = np.flatnonzero((number < 0) | (sender < 0) | (sender >= world) | (receiver < 0) | (receiver >= world))
        if len(outside):
            yield Finding(f"message {int(outside[0])} is in no round, or of a rank outside the job")
            return
        for column, verb in ((sender, "sends to"), (receiver, "receives from")):
            keys, count = np.unique(number * world + column, return_counts=True)
            for key in keys[count > 1][:1].tolist():
                yield Finding(f"{verb} several ranks in round {key // world}", None, key % world)
        limit = self.max_inflight_bytes - 2 * slack_bytes(self.max_inflight_bytes)
        most = self.inflight_bytes()
        for rank in np.flatnonzero(most > limit)[:1].tolist():
            yield Finding(f"has {int(most[rank])} bytes in flight, but {limit} are allowed", None, rank)
        yield from _stream_findings(self, np.lexsort((number, self.start, receiver, sender)))

    def __repr__(self) -> str:
        return f"Schedule(rounds={self.rounds}, messages={len(self)}, bytes={self.nbytes}, {self.plan!r})"


def slack_bytes(max_inflight_bytes: int) -> int:
    """A message can start earlier than its nominal position by fewer bytes than this."""
    return max(_SLACK, max_inflight_bytes // _SLACK_SHARE)


def schedule(plan: TransferPlan, *, max_inflight_bytes: int = MAX_INFLIGHT_BYTES) -> Schedule:
    """Schedule all messages of `plan` in rounds. The number of rounds equals the number of messages
    of the busiest rank. Every rank computes the same schedule.

    Args:
        plan: what to send.
        max_inflight_bytes: limit for the bytes that a rank sends and receives in one round. If a
            rank waits for the end of each round, this also limits its buffers.

    Raises PlanError if `max_inflight_bytes` is below 128.
    """
    if not isinstance(plan, TransferPlan):
        raise PlanError(f"schedule takes a transfer plan, got {plan!r:.80}")
    limit = max_inflight_bytes // 2 - slack_bytes(max_inflight_bytes)
    if limit < 3 * _SLACK:
        raise PlanError(f"max_inflight_bytes must be at least {8 * _SLACK}, got {max_inflight_bytes}")
    sender, receiver, nbytes = plan.traffic()
    count = -(-nbytes // limit)
    edge = np.repeat(np.arange(len(nbytes)), count)
    color = ints(color_edges(sender[edge].tolist(), receiver[edge].tolist()))
    order = np.lexsort((color, edge))  # a stream goes out from its first byte to its last
    edge, color = edge[order], color[order]
    step = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count)
    # messages of one stream are of nearly equal size; divided like this, products stay
    # below 2**63
    size, longer = np.divmod(nbytes, np.maximum(count, 1))
    start = step * size[edge] + np.minimum(step, longer[edge])
    stop = start + size[edge] + (step < longer[edge])
    return Schedule(plan, max_inflight_bytes, (color, sender[edge], receiver[edge], start, stop))


def _cut_stream(
    items: list[TransferItem], cuts: list[tuple[int, int]], slack: int
) -> Iterator[tuple[TransferItem, ...]]:
    """Split the stream of all items at these ascending byte positions. Return the pieces between
    each two of them.
    """
    ends = running_sums([item.nbytes for item in items])[1:]
    for start, stop in cuts:
        pieces: list[TransferItem] = []
        for i in range(int(np.searchsorted(ends, start, side="right")), len(items)):
            item = items[i]
            begin = int(ends[i]) - item.nbytes
            if begin >= stop:
                break
            itemsize = item.nbytes // item.box.numel
            run = _run(item.box.sizes, slack // itemsize)
            low = max(start - begin, 0) // itemsize // run * run
            high = item.box.numel if stop - begin >= item.nbytes else (stop - begin) // itemsize // run * run
            pieces.extend(_elements(item, low, high, itemsize))
        yield tuple(pieces)


def _run(sizes: Shape, limit: int) -> int:
    """Return the number of elements in the largest row, or block of rows, that has at most `limit`
    elements.
    """
    run = 1
    for size in reversed(sizes):
        if run * size > limit:
            break
        run *= size
    return run


def _elements(item: TransferItem, low: int, high: int, itemsize: int) -> Iterator[TransferItem]:
    """Yield elements `[low, high)` of an item, in row-major order, as boxes."""
    if low == 0 and high == item.box.numel:
        yield item
        return
    for piece in flat_boxes(item.box.sizes, low, high):
        yield item._replace(
            box=_within(piece, item.box),
            source=_within(piece, item.source),
            target=_within(piece, item.target),
            nbytes=piece.numel * itemsize,
        )


def _within(piece: Box, outer: Box) -> Box:
    """Convert a box from coordinates inside `outer` to the coordinates of `outer` itself."""
    return piece.shift(outer.offsets)


def color_edges(senders: Sequence[int], receivers: Sequence[int]) -> list[int]:
    """Return a color for each edge, so that no two edges of a sender and no two edges of a receiver
    share a color.

    By König's theorem, the largest number of edges at a node is enough colors. Each edge gets the
    lowest color that is free at both ends. If there is none, it gets the color a that is free at
    the sender, after the path of colors a and b that starts at the receiver has swapped its colors:

        u ─?─ v ═a═ x ─b─ y ═a═ z    b is free at v:    u ═a═ v ─b─ x ═a═ y ─b─ z

    Colors are 0, 1, 2, .... The result is deterministic. Raises PlanError if the two lists differ
    in length.
    """
    if len(senders) != len(receivers):
        raise PlanError(f"an edge has two ends, but {len(senders)} senders and {len(receivers)} receivers were given")
    coloring = _Coloring(senders, receivers)
    for edge in range(len(senders)):
        coloring.add(edge)
    return coloring.colors


class _Coloring:
    """Colors the edges of a bipartite multigraph one by one. Each edge joins a sender and a
    receiver.
    """

    def __init__(self, senders: Sequence[int], receivers: Sequence[int]) -> None:
        # nodes: senders and receivers under different numbers, since a rank may do both at once
        self._ends = [(2 * u, 2 * v + 1) for u, v in zip(senders, receivers)]
        degree = Counter(node for ends in self._ends for node in ends)
        every = (1 << max(degree.values(), default=0)) - 1
        self._free = dict.fromkeys(degree, every)
        """node -> the colors that are free there, as bits"""
        self._edge: dict[int, dict[int, int]] = {node: {} for node in degree}
        """node -> color -> the edge that has it"""
        self.colors = [-1] * len(self._ends)

    def add(self, edge: int) -> None:
        u, v = self._ends[edge]
        free_u, free_v = self._free[u], self._free[v]
        common = free_u & free_v
        if not common:
            a, b = _lowest(free_u), _lowest(free_v)
            self._swap(v, a, b)
            self._give(edge, a)
        else:
            self._give(edge, _lowest(common))

    def _give(self, edge: int, color: int) -> None:
        self.colors[edge] = color
        for node in self._ends[edge]:
            self._free[node] &= ~(1 << color)
            self._edge[node][color] = edge

    def _swap(self, node: int, a: int, b: int) -> None:
        """Swap the colors of the path a, b, a, ... that starts at `node`, where b is free."""
        path, color = [], a
        edge = self._edge[node].get(color)
        while edge is not None:
            path.append(edge)
            u, v = self._ends[edge]
            node = v if node == u else u
            color = b if color == a else a
            edge = self._edge[node].get(color)
        for edge in path:
            for end in self._ends[edge]:
                del self._edge[end][self.colors[edge]]
                self._free[end] |= 1 << self.colors[edge]
        for edge in path:
            self._give(edge, b if self.colors[edge] == a else a)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


# What is wrong with a schedule.


def _stream_findings(rounds: Schedule, order: Ints) -> Iterator[Finding]:
    """Check that every stream is split from 0 to its end without a gap, and that its pieces travel
    in order.
    """
    number, sender, receiver, start, stop = (column[order] for column in rounds.columns())
    fresh = np.concatenate(([True], (sender[1:] != sender[:-1]) | (receiver[1:] != receiver[:-1])))
    due = np.where(fresh, 0, np.concatenate(([0], stop[:-1])))
    for i in np.flatnonzero((start != due) | (stop <= start))[:1].tolist():
        what = f"bytes {int(start[i])} to {int(stop[i])} to rank {int(receiver[i])} follow byte {int(due[i])}"
        yield Finding(what, None, int(sender[i]))
    for i in np.flatnonzero(~fresh & (number <= np.concatenate(([0], number[:-1]))))[:1].tolist():
        yield Finding(f"bytes to rank {int(receiver[i])} are sent out of order", None, int(sender[i]))
    traffic = rounds.plan.traffic()
    last = np.append(np.flatnonzero(fresh)[1:] - 1, len(order) - 1)
    found = dict(zip((sender[last] << 32 | receiver[last]).tolist(), stop[last].tolist()))
    wanted = dict(zip((traffic.sender << 32 | traffic.receiver).tolist(), traffic.nbytes.tolist()))
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key, 0) != wanted.get(key, 0):
            what = f"{found.get(key, 0)} bytes to rank {key & 0xFFFFFFFF} are scheduled, not {wanted.get(key, 0)}"
            yield Finding(what, None, key >> 32)
            return
