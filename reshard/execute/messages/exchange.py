"""Obeys a transfer plan: copies within this rank, and messages to and from other ranks in rounds of bounded size.

Large pieces that lie in one run of memory travel from where they are to where they go; all others are packed, those of
a message one behind another, into a buffer that is made once. Two rounds are under way at a time:

    round 0   pack, post ........... unpack
    round 1              pack, post ........... unpack
    round 2                                pack, post ....       into the buffer of round 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planners.transfer.plan import TransferItem, TransferItems
from planners.transfer.rounds import Message, Schedule
from reshard.control.group import Group
from reshard.execute.messages.waiting import Waiter
from reshard.state.memory.arrays import raw_elements
from reshard.state.memory.lanes import has_lanes, pinned
from reshard.state.tensors import raw_bytes

__all__ = ["DEPTH", "LARGE_BYTES", "TAG", "Exchange", "Leg", "Parts", "RankWork", "round_bytes"]

Parts = Callable[[str], Sequence[torch.Tensor]]
"""The local tensors of a name, one for each part of its layout, in the coordinates of the plan's items."""

LARGE_BYTES = 256 << 10
"""A piece of at least so many bytes is a message of its own, and need not be packed."""
DEPTH = 2
"""Rounds under way at a time."""
_ALIGN_BYTES = 16
TAG = 0x52_53


class Leg(NamedTuple):
    """What this rank sends to, or gets from, another one in a round."""

    peer: int
    sends: bool
    bursts: tuple[tuple[TransferItem, ...], ...]
    """Each is one run of bytes on the wire."""


@dataclass(frozen=True)
class RankWork:
    """What one rank does for a transfer plan. It names no memory, so it serves all tensors of these layouts."""

    rank: int
    copies: tuple[TransferItem, ...]
    rounds: tuple[tuple[Leg, ...], ...]
    """Only those in which this rank sends or receives."""

    @classmethod
    def of(cls, rounds: Schedule, rank: int) -> RankWork:
        """The part of `rank` in a schedule, which may be beyond the ranks of the plan."""
        if rank >= rounds.plan.world_size:
            return cls(rank, (), ())
        legs: dict[int, list[Leg]] = {}
        for message in rounds.messages(rank):
            sends = message.sender == rank
            leg = Leg(message.receiver if sends else message.sender, sends, _bursts(message))
            legs.setdefault(message.round, []).append(leg)
        copies = TransferItems(item for item in rounds.plan.items_to(rank) if item.is_local)
        return cls(rank, copies, tuple(tuple(legs[number]) for number in sorted(legs)))

    def nbytes(self, *, sends: bool) -> int:
        """Bytes that this rank sends, or receives."""
        legs = (leg for legs in self.rounds for leg in legs if leg.sends == sends)
        return sum(piece.nbytes for leg in legs for burst in leg.bursts for piece in burst)


def round_bytes(budget_bytes: int) -> int:
    """The bytes in flight of one round, such that the buffers of all rounds under way are within the budget."""
    each = budget_bytes // DEPTH
    return each - each // LARGE_BYTES * _ALIGN_BYTES


def _bursts(message: Message) -> tuple[tuple[TransferItem, ...], ...]:
    """Large pieces alone, then all small ones. Of the sizes only, so that both ends find the same."""
    pieces = [piece for piece in message.pieces if piece.nbytes]
    large = [(piece,) for piece in pieces if piece.nbytes >= LARGE_BYTES]
    small = [piece for piece in pieces if piece.nbytes < LARGE_BYTES]
    small.sort(key=lambda piece: -(piece.nbytes // piece.box.numel))  # so that every element is aligned
    return (*large, tuple(small)) if small else tuple(large)


class _Packed(NamedTuple):
    """Pieces that travel through a buffer."""

    start: int
    nbytes: int
    pieces: list[tuple[torch.Tensor, int, int]]
    """(elements, first byte in the buffer, last)"""


class _Round(NamedTuple):
    packs: list[tuple[torch.Tensor, torch.Tensor]]
    """(to, from), before it is posted."""
    host_packs: list[tuple[torch.Tensor, torch.Tensor]]
    """Of these, what the host does itself, into memory that devices have done with by then."""
    ops: list[dist.P2POp]
    unpacks: list[tuple[torch.Tensor, torch.Tensor]]
    """(to, from), when it has arrived."""


class Exchange:
    """The work of a rank bound to memory: built once, run as often as one likes. Ranks that run it do so together.

    Args:
        work: this rank's part.
        sources, targets: the local tensors by name; asked only for names of which there is something to do. They may
            share memory only if what is sent from it is not written to.
        wires: dtype in which tensors cross whose two sides have different ones; one side has it.
        device: where messages are packed: one that the process group's backend sends from.
        process_group: as in `torch.distributed`; None is the default group.
    """

    def __init__(
        self,
        work: RankWork,
        sources: Parts,
        targets: Parts,
        *,
        wires: Mapping[str, torch.dtype] | None = None,
        device: torch.device | str = "cpu",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.work = work
        self._wires = wires or {}
        self._device = torch.device(device)
        self._process_group = process_group
        self._sources, self._targets = _Memo(sources), _Memo(targets)
        self.copied_bytes = self.sent_bytes = self.received_bytes = 0
        """Bytes of one run, as counted on what is really copied and given to the backend."""
        self._copies = [copy for item in work.copies if (copy := self._copy(item)) is not None]
        self._elsewhere: set[torch.device] = set()
        """Devices of tensors that are packed on the host."""
        self._build_rounds()
        self._sources = self._targets = _Memo(_nothing)  # the views keep what is needed

    def run(self, group: Group, deadline_s: float = 1800.0) -> None:
        """Move everything. All ranks of `group` do so together, and within `deadline_s` seconds.

        Raises what fails here, or the failure of another rank; targets are undefined then, and so is what the process
        group still has under way: make a new one.
        """
        with Waiter(group, self._device, deadline_s) as waiter:
            self.move(group, waiter)
            waiter.settle([self._device, *self._elsewhere])

    def move(self, group: Group, waiter: Waiter) -> None:
        """The same as part of something longer, which has its own waiter: on a device the work may be under way yet.

        On devices whose streams the backend keeps to, nothing is waited for between the rounds. Where messages are
        packed on the host, and tensors are not there, the host waits once a round.
        """
        under_way: deque[tuple[_Round, list[Any]]] = deque()
        with torch.no_grad():
            copies = iter(self._copies)
            for number, step in enumerate(self._rounds):
                if len(under_way) == DEPTH:
                    self._finish(waiter, *under_way.popleft())
                for to, of in step.packs:
                    to.copy_(of, non_blocking=self._is_pinned)
                waiter.settle(self._elsewhere)  # packed, and what was in the buffer before is unpacked
                for to, of in step.host_packs:
                    to.copy_(of)
                under_way.append((step, waiter.post(step.ops)))
                if number == DEPTH - 1:
                    self._run_copies(copies, group)  # while the first messages travel
            self._run_copies(copies, group)
            while under_way:
                self._finish(waiter, *under_way.popleft())

    def _finish(self, waiter: Waiter, step: _Round, works: list[Any]) -> None:
        waiter.wait(works, [op.peer for op in step.ops])
        for to, of in step.unpacks:
            if self._is_pinned and to.dtype != of.dtype and has_lanes(to.device):
                of = of.to(to.device, non_blocking=True)  # or torch converts it on the host
            to.copy_(of, non_blocking=self._is_pinned)

    def _run_copies(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], group: Group) -> None:
        for to, of in copies:
            to.copy_(of)
            group.check()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that this exchange holds besides sources and targets."""
        return sum(buffer.numel() for buffer in self._buffers)

    # --- building ---

    def _copy(self, item: TransferItem) -> tuple[torch.Tensor, torch.Tensor] | None:
        raw = item.fqn not in self._wires
        of = self._sources.elements(item.fqn, item.source_part, item.source.slices, raw=raw)
        to = self._targets.elements(item.fqn, item.target_part, item.target.slices, raw=raw)
        if raw and of.dtype != to.dtype:  # one of them is conjugated or negated lazily: torch knows how
            of = self._sources.elements(item.fqn, item.source_part, item.source.slices, raw=False)
            to = self._targets.elements(item.fqn, item.target_part, item.target.slices, raw=False)
        if not to.numel() or _is_same(to, of):
            return None
        self.copied_bytes += item.nbytes
        return to, of

    def _build_rounds(self) -> None:
        drafts = [[(leg, self._draft(leg)) for leg in legs] for legs in self.work.rounds]
        sizes = [0] * DEPTH
        placed: list[list[tuple[Leg, list[torch.Tensor | _Packed]]]] = []
        for number, draft in enumerate(drafts):
            at = 0
            placed.append([])
            for leg, bursts in draft:
                there: list[torch.Tensor | _Packed] = []
                for burst in bursts:
                    if isinstance(burst, _Packed):
                        at = -(-at // _ALIGN_BYTES) * _ALIGN_BYTES
                        burst = burst._replace(start=at)
                        at += burst.nbytes
                    there.append(burst)
                placed[-1].append((leg, there))
            sizes[number % DEPTH] = max(sizes[number % DEPTH], at)
        self._make_buffers(sizes)
        self._rounds = [self._round(legs, self._buffers[number % DEPTH]) for number, legs in enumerate(placed)]

    def _make_buffers(self, sizes: Sequence[int]) -> None:
        self._is_pinned = any(map(has_lanes, self._elsewhere))
        self._buffers = [
            pinned(size) if self._is_pinned else torch.empty(size, dtype=torch.uint8, device=self._device)
            for size in sizes
        ]

    def _draft(self, leg: Leg) -> list[torch.Tensor | _Packed]:
        """The runs of memory of a leg, as they are or to be packed; where in a buffer comes later."""
        out: list[torch.Tensor | _Packed] = []
        for burst in leg.bursts:
            pieces, at = [], 0
            for item in burst:
                elements = self._piece(item, leg.sends)
                if self._device.type == "cpu" and elements.device.type != "cpu":
                    self._elsewhere.add(elements.device)
                pieces.append((elements, at, at + item.nbytes))
                at += item.nbytes
            straight = self._straight(burst[0], pieces[0][0]) if len(burst) == 1 else None
            out.append(_Packed(0, at, pieces) if straight is None else straight)
            if leg.sends:
                self.sent_bytes += at
            else:
                self.received_bytes += at
        return out

    def _piece(self, item: TransferItem, sends: bool) -> torch.Tensor:
        raw = item.fqn not in self._wires
        if sends:
            return self._sources.elements(item.fqn, item.source_part, item.source.slices, raw=raw)
        return self._targets.elements(item.fqn, item.target_part, item.target.slices, raw=raw)

    def _straight(self, item: TransferItem, elements: torch.Tensor) -> torch.Tensor | None:
        """The bytes of elements that can travel as they lie in memory."""
        if elements.device != self._device or elements.is_conj() or elements.is_neg() or not elements.is_contiguous():
            return None
        if elements.dtype != self._wires.get(item.fqn, elements.dtype):
            return None
        return raw_bytes(elements)

    def _round(self, legs: list[tuple[Leg, list[torch.Tensor | _Packed]]], buffer: torch.Tensor) -> _Round:
        step = _Round([], [], [], [])
        for leg, bursts in legs:
            send_or_receive = dist.isend if leg.sends else dist.irecv
            for burst, items in zip(bursts, leg.bursts, strict=True):
                if not isinstance(burst, _Packed):
                    wire = burst
                else:
                    wire = buffer[burst.start : burst.start + burst.nbytes]
                    for (elements, begin, end), item in zip(burst.pieces, items, strict=True):
                        dtype = self._wires.get(item.fqn, elements.dtype)
                        there = wire[begin:end].view(dtype).view(elements.shape)
                        pair = (there, elements) if leg.sends else (elements, there)
                        by_host = self._is_pinned and elements.device.type == "cpu"
                        packs = step.host_packs if by_host else step.packs
                        (packs if leg.sends else step.unpacks).append(pair)
                step.ops.append(dist.P2POp(send_or_receive, wire, leg.peer, self._process_group, TAG))
        return step


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the very same elements in memory."""
    alike = (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())
    return alike and a.data_ptr() == b.data_ptr() and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())


def _nothing(fqn: str) -> Sequence[torch.Tensor]:
    return ()


class _Memo:
    """Local tensors that were asked for before."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def elements(self, fqn: str, part: int, slices: tuple[slice, ...], *, raw: bool) -> torch.Tensor:
        """Some elements of a local tensor; as integers of their size if only the bits matter."""
        found = self._found.get(fqn)
        if found is None:
            tensors = [tensor.detach() for tensor in self._parts(fqn)]
            found = self._found[fqn] = tensors, [raw_elements(tensor) for tensor in tensors]
        return found[raw][part][slices]
