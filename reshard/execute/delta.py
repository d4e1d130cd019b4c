"""An exchange for values that change little from run to run: only changes are sent."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from planners.geometry.box import Range
from planners.plans.transfer import TransferItem
from reshard.errors import ReshardError
from reshard.execute.exchange import DEPTH, Exchange, Waiter, go_through
from reshard.live.copy_streams import batches
from reshard.live.dtypes import raw_elements, resolved
from reshard.live.fingerprints import partials
from reshard.live.tensors import raw_bytes
from reshard.ranks.group import Group

# A sender keeps the last values that it sent of each piece, and compares them in blocks of 65,536
# elements:
#
#     block   0        1                2
#     sent    nothing  3 positions,     all of it, since a
#                      3 elements       fourth or more changed
#
# Two ranks exchange three messages. The receiver reports which run it holds. If that is the
# sender's last one, it gets differences, and otherwise everything. The sender then reports how many
# elements of each block it will send, and a digest of each complete piece. Finally, it sends the
# elements, in the rounds of the plan. A receiver whose result does not match the digest does not
# hold the run.
#
# Bits are compared in the dtype in which elements are sent. If the target has that dtype, its own
# bits are compared. A target of a wider dtype does not show which bits arrived, so the receiver
# keeps these as well, and converts all of them again in each run.


BLOCK = 1 << 16
"""Number of elements of a block. Positions within a block fit into two bytes."""
_POSITION_BYTES = 2
_ALL = -1
"""Count of a block that is sent in full."""
_LEAST_GAIN = 2
"""The differences of a block are sent if they have at least this many times fewer bytes than the block."""
TOGETHER_BYTES = 64 << 20
"""Bytes that are compared at once. The results take the same amount of memory."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _blocks(words: int) -> int:
    return -(-words // BLOCK)


def _length(block: int, words: int) -> int:
    return min(BLOCK, words - block * BLOCK)


@dataclass
class _ChangedPiece:
    """Elements of a local tensor that are sent, as words: integers of their size, or two for 16 bytes."""

    elements: torch.Tensor
    dtype: torch.dtype
    """The dtype in which the elements are sent."""

    @property
    def size(self) -> int:
        """Number of words."""
        return self.elements.numel() * max(self.dtype.itemsize // 8, 1)

    @property
    def word_bytes(self) -> int:
        """Bytes of a word."""
        return min(self.dtype.itemsize, 8)

    def words(self) -> torch.Tensor:
        """The current words in row-major order, in place if the memory has that order."""
        there = resolved(self.elements.to(self.dtype))
        return raw_bytes(raw_elements(there).contiguous()).view(_WORDS[self.dtype.itemsize])


def _digests(words: Sequence[torch.Tensor], *, on_device: bool) -> list[int]:
    """Return 63 bits for each piece, by which pieces are compared. These are fingerprints if a rank
    has words on a device: every device computes them where the words are, and is waited for once.
    Otherwise, they are a faster hash."""
    if not on_device:
        return [int(xxhash.xxh3_64_intdigest(one.numpy().data)) >> 1 for one in words]
    found = partials((one, None, None) for one in words)
    return [int(xxhash.xxh3_64_intdigest(one.to_bytes())) >> 1 for one in found]


@dataclass
class _Sent(_ChangedPiece):
    """The values that the other side has since the last run, and how the current ones differ."""

    last: torch.Tensor | None = None
    summed: int = 0
    counts: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    """Number of changed elements per block, on the host."""
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int16, device="cpu"))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int8, device="cpu"))

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return self.size * self.word_bytes

    def begin(self) -> None:
        """Start without earlier values: everything is sent."""
        self.last = self.words().clone()
        self.counts = torch.full((_blocks(self.size),), _ALL, dtype=torch.int64, device="cpu")

    def go_on(self, now: torch.Tensor, changed: torch.Tensor, counts: torch.Tensor) -> bool:
        """Use the changed elements, given their number in each block, and keep the values of `now`
        as those that were sent last. Return whether anything changed."""
        assert self.last is not None
        self.counts, self.positions, self.values = counts, self.positions[:0], now[:0]
        if not bool(counts.any()):
            return False
        sizes = torch.full_like(counts, BLOCK)
        sizes[-1] = _length(len(sizes) - 1, self.size)
        whole = counts * (_POSITION_BYTES + self.word_bytes) * _LEAST_GAIN > sizes * self.word_bytes
        for start, stop in _runs(whole):
            changed[start * BLOCK : stop * BLOCK] = False
        self.counts[whole] = _ALL
        at = changed.nonzero().flatten()
        self.positions, self.values = (at & BLOCK - 1).to(torch.int16), now[at]
        self.last.copy_(now)
        return True

    def fill(self, room: torch.Tensor, *, everything: bool, is_pinned: bool) -> int:
        """Write what the receiver needs into `room`, as bytes. Return the number of bytes."""
        assert self.last is not None
        if everything:
            parts = [self.last]
        else:
            runs = _runs(self.counts == _ALL)
            parts = [self.positions, self.values, *(self.last[a * BLOCK : b * BLOCK] for a, b in runs)]
        at = 0
        for part in parts:
            room[at : at + part.nbytes].copy_(part.view(torch.uint8), non_blocking=is_pinned)
            at += part.nbytes
        return at


def _counted(changed: torch.Tensor) -> torch.Tensor:
    """Return the number of set elements in each block."""
    full = changed.numel() // BLOCK * BLOCK
    counts = [changed[:full].view(-1, BLOCK).sum(dim=1)] if full else []
    counts += [changed[full:].sum().view(1)] if full < changed.numel() else []
    return torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64, device=changed.device)


def _runs(which: torch.Tensor) -> list[Range]:
    """Return the set blocks as ranges; neighbors are joined."""
    edge = torch.zeros(1, dtype=torch.int8, device="cpu")
    edges = torch.diff(torch.cat((edge, which.to(torch.int8), edge)))
    return list(zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True))


@dataclass
class _Got(_ChangedPiece):
    """What arrives from the other side."""

    summed: int = 0
    counts: list[int] = field(default_factory=list)
    kept: torch.Tensor | None = field(init=False)
    """The received words, if the target has another dtype."""

    def __post_init__(self) -> None:
        words, device = _WORDS[self.dtype.itemsize], self.elements.device
        self.kept = None if self.elements.dtype == self.dtype else torch.empty(self.size, dtype=words, device=device)

    @property
    def nbytes(self) -> int:
        """The number of bytes that arrive."""
        each = _POSITION_BYTES + self.word_bytes
        return sum(
            count * each if count != _ALL else _length(block, self.size) * self.word_bytes
            for block, count in enumerate(self.counts)
        )

    def take(self, room: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        """Apply what arrived. Return the complete piece, in the dtype that was sent."""
        words = self.words() if self.kept is None else self.kept
        counts = torch.tensor(self.counts, dtype=torch.int64, device="cpu")
        few = counts.clamp(min=0)
        total, device = int(few.sum()), words.device
        if total:
            first = torch.repeat_interleave(torch.arange(len(few), device=device), few.to(device), output_size=total)
            positions = torch.empty(total, dtype=torch.int16, device=device)
            values = torch.empty(total, dtype=words.dtype, device=device)
            positions.view(torch.uint8).copy_(room[: positions.nbytes], non_blocking=is_pinned)
            values.view(torch.uint8).copy_(room[positions.nbytes :][: values.nbytes], non_blocking=is_pinned)
            words[first * BLOCK + (positions.to(torch.int64) & BLOCK - 1)] = values
        at = total * (_POSITION_BYTES + self.word_bytes)
        for start, stop in _runs(counts == _ALL):
            there = words[start * BLOCK : stop * BLOCK]
            there.view(torch.uint8).copy_(room[at : at + there.nbytes], non_blocking=is_pinned)
            at += there.nbytes
        if at or self.kept is not None:
            self.put(words)
        return words

    def put(self, words: torch.Tensor) -> None:
        """Set the target, unless `words` are its own memory."""
        came = words.view(torch.uint8)
        if self.kept is not None:
            self.elements.copy_(came.view(self.dtype).view(self.elements.shape))
        elif words.data_ptr() != self.elements.data_ptr():
            there = raw_elements(self.elements)
            there.copy_(came.view(there.dtype).view(there.shape))


class _DeltaMessage(NamedTuple):
    peer: int
    sent: list[_Sent]
    got: list[_Got]
    room: torch.Tensor
    """A buffer for all bytes of the message."""


class DeltaExchange(Exchange):
    """An `Exchange` that sends what changed since the last run, and reports what it sent.

    Pieces are compared, kept, and digested on their own devices. Only changes are copied to the
    device that sends.
    """

    def __init__(self, *args: Any, on_device: bool, **kwargs: Any) -> None:
        """`on_device`: whether a tensor of any rank is not on the CPU."""
        self._on_device = on_device
        super().__init__(*args, **kwargs)

    def _build_rounds(self) -> None:
        self._sent: dict[tuple[Any, ...], _Sent] = {}
        self._to: dict[int, list[_Sent]] = {}
        self._from: dict[int, list[_Got]] = {}
        self._run_sent = 0
        self._held: dict[int, int] = {}
        """Sender -> which of its runs this rank has."""
        sizes = [0] * DEPTH
        places: list[list[tuple[int, list[_Sent], list[_Got], int, int]]] = []
        for number, messages in enumerate(self.work.rounds):
            at = 0
            places.append([])
            for message in messages:
                items = [item for run in message.runs for item in run]
                sent = [self._outgoing(item) for item in items] if message.sends else []
                got = [self._incoming(item) for item in items] if not message.sends else []
                self._to.setdefault(message.peer, []).extend(sent)
                self._from.setdefault(message.peer, []).extend(got)
                nbytes = sum(piece.size * piece.word_bytes for piece in (*sent, *got))
                places[-1].append((message.peer, sent, got, at, at + nbytes))
                at += nbytes
            sizes[number % DEPTH] = max(sizes[number % DEPTH], at)
        pieces: list[_ChangedPiece] = [one for table in (self._to, self._from) for of in table.values() for one in of]
        if self._device.type == "cpu":
            self._elsewhere = {piece.elements.device for piece in pieces} - {self._device}
        self._make_buffers(sizes)
        self._messages = [
            [_DeltaMessage(peer, sent, got, self._buffers[n % DEPTH][a:b]) for peer, sent, got, a, b in messages]
            for n, messages in enumerate(places)
        ]
        self._to = {peer: pieces for peer, pieces in self._to.items() if pieces}
        self._from = {peer: pieces for peer, pieces in self._from.items() if pieces}

    def _outgoing(self, item: TransferItem) -> _Sent:
        key = (item.fqn, item.source_part, item.source)
        if key not in self._sent:  # a piece that several ranks get is compared once
            elements = self._source(item, raw=False)
            self._sent[key] = _Sent(elements, self._wires.get(item.fqn, elements.dtype))
        return self._sent[key]

    def _incoming(self, item: TransferItem) -> _Got:
        elements = self._target(item, raw=False)
        return _Got(elements, self._wires.get(item.fqn, elements.dtype))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory besides sources and targets: mostly what was sent last, and what was
        received and converted."""
        kept = (got.kept for pieces in self._from.values() for got in pieces)
        held = [*(sent.last for sent in self._sent.values()), *kept]
        return super().buffer_bytes + sum(words.nbytes for words in held if words is not None)

    def move(self, group: Group, waiter: Waiter, *, again: bool = False) -> None:
        """Send what changed. `wrong` then has the senders whose values differ; call `keep` with the
        outcome.

        `again`: this repeats the same run, and adds to its bytes.
        """
        if not again:
            self.sent_bytes = self.received_bytes = 0
        self.wrong: set[int] = set()
        """Senders whose values this rank does not have."""
        with torch.no_grad():
            held = self._tell(waiter, {p: [self._held.get(p, 0)] for p in self._from}, dict.fromkeys(self._to, 1))
            before, self._run_sent = self._run_sent, 0
            self._compare(group)
            self._run_sent = secrets.randbits(62) | 1
            everything = {peer for peer, (run,) in held.items() if run != before or not run}
            heads = {peer: self._head(pieces, peer in everything) for peer, pieces in self._to.items()}
            self._read_heads(
                self._tell(
                    waiter, heads, {p: 1 + sum(1 + _blocks(one.size) for one in got) for p, got in self._from.items()}
                )
            )
            self._move_bodies(waiter, everything)
            self._run_copies(iter(self._copies), group)

    def _compare(self, group: Group) -> None:
        """Find what changed, and digest the pieces. Wait for each device once per group of pieces."""
        for together in batches(self._sent.values(), lambda piece: piece.nbytes, TOGETHER_BYTES):
            old, new = ([piece for piece in together if (piece.last is None) == is_new] for is_new in (False, True))
            for piece in new:
                piece.begin()
            now = [piece.words() for piece in old]
            last = [piece.last for piece in old if piece.last is not None]
            changed = [words != before for words, before in zip(now, last, strict=True)]
            counts = _to_host([_counted(one) for one in changed])
            new += [one for one, *found in zip(old, now, changed, counts, strict=True) if one.go_on(*found)]
            words = [piece.last for piece in new if piece.last is not None]
            for piece, summed in zip(new, _digests(words, on_device=self._on_device), strict=True):
                piece.summed = summed
            group.check()

    def keep(self, *, ended_well: bool) -> None:
        """Keep what arrived as the last run, except for wrong pieces."""
        self._held = {peer: run for peer, run in self._runs.items() if peer not in self.wrong} if ended_well else {}

    def _head(self, pieces: Sequence[_Sent], everything: bool) -> list[int]:
        head = [self._run_sent]
        for piece in pieces:
            head.append(piece.summed)
            head += [_ALL] * len(piece.counts) if everything else piece.counts.tolist()
        return head

    def _read_heads(self, heads: dict[int, list[int]]) -> None:
        self._runs = {}
        for peer, (run, *rest) in heads.items():
            self._runs[peer], at = run, 0
            for piece in self._from[peer]:
                blocks = _blocks(piece.size)
                piece.summed, piece.counts = rest[at], rest[at + 1 : at + 1 + blocks]
                if not all(_ALL <= count <= BLOCK for count in piece.counts):
                    raise ReshardError(f"rank {peer} announced {piece.counts} elements: its message is malformed")
                at += 1 + blocks

    def _tell(self, waiter: Waiter, to: dict[int, list[int]], sizes: dict[int, int]) -> dict[int, list[int]]:
        """Send numbers to some ranks, and receive from others the number of them in `sizes`."""
        given = {peer: torch.tensor(numbers, device=self._device) for peer, numbers in to.items()}
        found = {p: torch.empty(size, dtype=torch.int64, device=self._device) for p, size in sizes.items()}
        ops = [self._op(dist.isend, numbers, peer) for peer, numbers in given.items()]
        ops += [self._op(dist.irecv, numbers, peer) for peer, numbers in found.items()]
        if ops:
            waiter.wait(waiter.post(ops), [op.peer for op in ops])
        self.sent_bytes += sum(numbers.nbytes for numbers in given.values())
        self.received_bytes += sum(numbers.nbytes for numbers in found.values())
        return {peer: numbers.tolist() for peer, numbers in found.items()}

    def _op(self, kind: Any, room: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, room, peer, self._process_group)

    def _move_bodies(self, waiter: Waiter, everything: set[int]) -> None:
        def fill(messages: list[_DeltaMessage]) -> list[dist.P2POp]:
            ops = []
            for message in messages:
                if message.sent:
                    nbytes = 0
                    for piece in message.sent:
                        nbytes += piece.fill(
                            message.room[nbytes:], everything=message.peer in everything, is_pinned=self._is_pinned
                        )
                    self.sent_bytes += nbytes
                else:
                    nbytes = sum(piece.nbytes for piece in message.got)
                    self.received_bytes += nbytes
                if nbytes:
                    ops.append(
                        self._op(dist.isend if message.sent else dist.irecv, message.room[:nbytes], message.peer)
                    )
            waiter.settle(self._elsewhere)  # filled, and what was in the buffer before is taken
            return ops

        go_through(self._messages, waiter, fill, self._take)

    def _take(self, messages: list[_DeltaMessage]) -> None:
        got, words = [], []
        for message in messages:
            at = 0
            for piece in message.got:
                got.append((message.peer, piece))
                words.append(piece.take(message.room[at : at + piece.nbytes], is_pinned=self._is_pinned))
                at += piece.nbytes
        for (peer, piece), summed in zip(got, _digests(words, on_device=self._on_device), strict=True):
            if summed != piece.summed:
                self.wrong.add(peer)


def _to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy 1-D tensors of one dtype to the host, all tensors of a device at once."""
    out = list(tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        numbers = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        there = torch.cat([tensors[i] for i in numbers]).cpu()
        for i, piece in zip(numbers, torch.split(there, [len(tensors[i]) for i in numbers]), strict=True):
            out[i] = piece
    return out
