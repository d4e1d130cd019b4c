"""Executes a transfer plan: copies within this rank, and messages between ranks in rounds of bounded size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from planners.geometry.layout import Form
from planners.plans.plan import verify
from planners.plans.read_once import ReadOncePlan, plan_read_once
from planners.plans.schedule import Message, Schedule, schedule
from planners.plans.transfer import TransferItem, TransferItems
from reshard.errors import DeadlineError, RankFailedError, ReshardError
from reshard.live.copy_streams import device_module, has_copy_streams, pinned, wait_for
from reshard.live.dtypes import is_resolved, raw_elements
from reshard.live.tensors import LiveTensor, raw_bytes
from reshard.ranks.global_layout import describe, join_layouts
from reshard.ranks.group import Group
from reshard.ranks.store import Answer, Worker
from reshard.stored.source import OnBytes

# Large contiguous pieces are sent directly from source to target memory. All others are packed,
# message by message, into a buffer that is allocated once. Two rounds are in flight at a time:
#
#     round 0   pack, post ........... unpack
#     round 1              pack, post ........... unpack
#     round 2                                pack, post ....       into the buffer of round 0


T = TypeVar("T")

Parts = Callable[[str], Sequence[torch.Tensor]]
"""Returns the local tensors of a name, one per part of its layout, in the coordinates of the plan's items."""

LARGE_BYTES = 256 << 10
"""A piece of at least this size is a separate message, and is not packed."""
DEPTH = 2
"""Rounds in flight at a time."""
_ALIGN_BYTES = 16


class _IntoTarget(dist.P2POp):
    """A message that is received where its elements go, in memory of the caller."""


class PeerMessage(NamedTuple):
    """What this rank sends to another one in a round, or receives from it."""

    peer: int
    sends: bool
    runs: tuple[tuple[TransferItem, ...], ...]
    """The items of the message, grouped in runs that are contiguous in it."""


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a transfer plan. It refers to no memory, so it serves all tensors of these
    layouts."""

    rank: int
    copies: tuple[TransferItem, ...]
    rounds: tuple[tuple[PeerMessage, ...], ...]
    """The rounds in which this rank sends or receives."""

    @classmethod
    def of(cls, rounds: Schedule, rank: int) -> RankWork:
        """Return the part of `rank` in a schedule. The rank may be beyond the ranks of the plan."""
        if rank >= rounds.plan.world_size:
            return cls(rank, (), ())
        messages: dict[int, list[PeerMessage]] = {}
        for planned in rounds.messages(rank):
            sends = planned.sender == rank
            message = PeerMessage(planned.receiver if sends else planned.sender, sends, _runs_of(planned))
            messages.setdefault(planned.round, []).append(message)
        copies = TransferItems(item for item in rounds.plan.items_to(rank) if item.is_local)
        return cls(rank, copies, tuple(tuple(messages[number]) for number in sorted(messages)))

    def nbytes(self, *, sends: bool) -> int:
        """Return the bytes that this rank sends, or receives."""
        messages = (message for messages in self.rounds for message in messages if message.sends == sends)
        return sum(piece.nbytes for message in messages for run in message.runs for piece in run)


def round_bytes(budget_bytes: int) -> int:
    """Return the bytes of one round, so that the buffers of all rounds in flight stay within the budget."""
    each = budget_bytes // DEPTH
    return each - each // LARGE_BYTES * _ALIGN_BYTES


def _runs_of(message: Message) -> tuple[tuple[TransferItem, ...], ...]:
    """Return large pieces one by one, then all small ones together. Depends on sizes only, so both ends agree."""
    pieces = [piece for piece in message.pieces if piece.nbytes]
    large = [(piece,) for piece in pieces if piece.nbytes >= LARGE_BYTES]
    small = [piece for piece in pieces if piece.nbytes < LARGE_BYTES]
    small.sort(key=lambda piece: -(piece.nbytes // piece.box.numel))  # so that every element is aligned
    return (*large, tuple(small)) if small else tuple(large)


class _Packed(NamedTuple):
    """Pieces that are sent through a buffer."""

    start: int
    nbytes: int
    pieces: list[tuple[torch.Tensor, int, int]]
    """(elements, first byte in the buffer, last)"""


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class _Round(NamedTuple):
    packs: _Pairs
    """(to, from), copied before the message is posted."""
    host_packs: _Pairs
    """Pairs that the host copies itself, into memory that no device uses at that time."""
    ops: list[dist.P2POp]
    unpacks: _Pairs
    """(to, from), copied when the message has arrived."""


class Exchange:
    """A rank's part of a transfer, bound to memory: built once and run any number of times, by all
    ranks together.

    Args:
        work: this rank's part.
        sources, targets: the local tensors by name; asked only for names of which there is
            something to do. They may share memory only if what is sent from it is not written to.
        wires: dtype in which tensors cross whose two sides have different ones; one side has it.
        device: where messages are packed: one that the process group's backend sends from.
        process_group: as in `torch.distributed`; None is the default group.
        is_discarded: whether the targets of a transfer that failed are used no more: what comes
            late does no harm.
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
        is_discarded: bool = False,
    ) -> None:
        self.work = work
        self._op_in_place = dist.P2POp if is_discarded else _IntoTarget
        self._wires = wires or {}
        self._device = torch.device(device)
        self._process_group = process_group
        self._pace: OnBytes | None = None
        self._sources, self._targets = _Memo(sources), _Memo(targets)
        self.copied_bytes = self.sent_bytes = self.received_bytes = 0
        """Bytes that one run copies or passes to the backend."""
        self._copies = [copy for item in work.copies if (copy := self._copy(item)) is not None]
        self._elsewhere: set[torch.device] = set()
        """Devices of tensors that are packed on the host."""
        self._build_rounds()
        self._sources = self._targets = _Memo(_nothing)  # the views keep what is needed

    def run(self, group: Group, pace: OnBytes | None = None) -> None:
        """Move everything. All ranks of `group` do so together, and before the deadline of their phase.

        Args:
            pace: called with the bytes of a round, sent and received, when it may begin: it returns
                when it shall.

        Raises what fails here, or the failure of another rank. Then targets are undefined, and the
        process group is as `Waiter` says.
        """
        self._pace = pace
        with Waiter(group, self._device) as waiter:
            self.move(group, waiter)
            waiter.settle([self._device, *self._elsewhere])

    def move(self, group: Group, waiter: Waiter) -> None:
        """Run as part of a longer operation, which has its own waiter. On a device, work may still
        be in progress afterwards.

        If the backend respects the streams of a device, nothing is waited for between rounds. If
        messages are packed on the host, and tensors are elsewhere, the host waits once per round.
        """
        copies = iter(self._copies)

        def steps() -> Iterator[_Round]:
            for number, step in enumerate(self._rounds):
                yield step
                if number == DEPTH - 1:
                    self._run_copies(copies, group)  # while the first messages travel
            self._run_copies(copies, group)

        def pack(step: _Round) -> list[dist.P2POp]:
            if self._pace is not None:
                self._pace(sum(op.tensor.nbytes for op in step.ops))
            for to, of in step.packs:
                to.copy_(of, non_blocking=self._is_pinned)
            waiter.settle(self._elsewhere)  # packed, and what was in the buffer before is unpacked
            for to, of in step.host_packs:
                to.copy_(of)
            return step.ops

        with torch.no_grad():
            go_through(steps(), waiter, pack, self._unpack)

    def _unpack(self, step: _Round) -> None:
        for to, of in step.unpacks:
            if self._is_pinned and to.dtype != of.dtype and has_copy_streams(to.device):
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

    def _source(self, item: TransferItem, *, raw: bool) -> torch.Tensor:
        """Return a view of the elements of an item, as integers of their size if only the bits matter."""
        return self._sources.local(item.fqn, raw)[item.source_part][item.source.slices]

    def _target(self, item: TransferItem, *, raw: bool) -> torch.Tensor:
        """Return a view of the place where they are written."""
        return self._targets.local(item.fqn, raw)[item.target_part][item.target.slices]

    def _copy(self, item: TransferItem) -> tuple[torch.Tensor, torch.Tensor] | None:
        raw = item.fqn not in self._wires
        of, to = self._source(item, raw=raw), self._target(item, raw=raw)
        if raw and of.dtype != to.dtype:  # one of them is conjugated or negated lazily: torch knows how
            of, to = self._source(item, raw=False), self._target(item, raw=False)
        if not to.numel() or _is_same(to, of):
            return None
        self.copied_bytes += item.nbytes
        return to, of

    def _build_rounds(self) -> None:
        drafts = [[(message, self._draft(message)) for message in messages] for messages in self.work.rounds]
        sizes = [0] * DEPTH
        placed: list[list[tuple[PeerMessage, list[torch.Tensor | _Packed]]]] = []
        for number, draft in enumerate(drafts):
            at = 0
            placed.append([])
            for message, runs in draft:
                there: list[torch.Tensor | _Packed] = []
                for run in runs:
                    if isinstance(run, _Packed):
                        at = -(-at // _ALIGN_BYTES) * _ALIGN_BYTES
                        run = run._replace(start=at)
                        at += run.nbytes
                    there.append(run)
                placed[-1].append((message, there))
            sizes[number % DEPTH] = max(sizes[number % DEPTH], at)
        self._make_buffers(sizes)
        self._rounds = [self._round(messages, self._buffers[number % DEPTH]) for number, messages in enumerate(placed)]

    def _make_buffers(self, sizes: Sequence[int]) -> None:
        self._is_pinned = any(map(has_copy_streams, self._elsewhere))
        self._buffers = [
            pinned(size) if self._is_pinned else torch.empty(size, dtype=torch.uint8, device=self._device)
            for size in sizes
        ]

    def _draft(self, message: PeerMessage) -> list[torch.Tensor | _Packed]:
        """Divide a message into runs in memory, which are sent directly or packed. Positions in a
        buffer follow later."""
        out: list[torch.Tensor | _Packed] = []
        where = self._source if message.sends else self._target
        for run in message.runs:
            pieces, at = [], 0
            for item in run:
                elements = where(item, raw=item.fqn not in self._wires)
                if self._device.type == "cpu" and elements.device.type != "cpu":
                    self._elsewhere.add(elements.device)
                pieces.append((elements, at, at + item.nbytes))
                at += item.nbytes
            straight = self._straight(run[0], pieces[0][0]) if len(run) == 1 else None
            out.append(_Packed(0, at, pieces) if straight is None else straight)
            if message.sends:
                self.sent_bytes += at
            else:
                self.received_bytes += at
        return out

    def _straight(self, item: TransferItem, elements: torch.Tensor) -> torch.Tensor | None:
        """Return the bytes of elements that can be sent directly from memory."""
        if elements.device != self._device or not (is_resolved(elements) and elements.is_contiguous()):
            return None
        if elements.dtype != self._wires.get(item.fqn, elements.dtype):
            return None
        return raw_bytes(elements)

    def _round(self, messages: list[tuple[PeerMessage, list[torch.Tensor | _Packed]]], buffer: torch.Tensor) -> _Round:
        step = _Round([], [], [], [])
        for message, runs in messages:
            send_or_receive = dist.isend if message.sends else dist.irecv
            for run, items in zip(runs, message.runs, strict=True):
                op = dist.P2POp
                if not isinstance(run, _Packed):
                    wire, op = run, op if message.sends else self._op_in_place
                else:
                    wire = buffer[run.start : run.start + run.nbytes]
                    for (elements, begin, end), item in zip(run.pieces, items, strict=True):
                        dtype = self._wires.get(item.fqn, elements.dtype)
                        there = wire[begin:end].view(dtype).view(elements.shape)
                        pair = (there, elements) if message.sends else (elements, there)
                        by_host = self._is_pinned and elements.device.type == "cpu"
                        packs = step.host_packs if by_host else step.packs
                        (packs if message.sends else step.unpacks).append(pair)
                step.ops.append(op(send_or_receive, wire, message.peer, self._process_group))
        return step


def go_through(
    steps: Iterable[T], waiter: Waiter, begin: Callable[[T], list[dist.P2POp]], end: Callable[[T], None]
) -> None:
    """Go through the steps with `DEPTH` of them in flight: post the result of `begin`, and call
    `end` when it has arrived."""
    under_way: deque[tuple[T, list[dist.P2POp], list[Any]]] = deque()

    def finish() -> None:
        step, ops, works = under_way.popleft()
        if works:
            waiter.wait(works, [op.peer for op in ops])
        end(step)

    for step in steps:
        if len(under_way) == DEPTH:
            finish()
        ops = begin(step)
        under_way.append((step, ops, waiter.post(ops)))
    while under_way:
        finish()


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if both are the same elements in memory."""
    alike = (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())
    return alike and a.data_ptr() == b.data_ptr() and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())


def _nothing(fqn: str) -> Sequence[torch.Tensor]:
    return ()


class _Memo:
    """Local tensors, cached by name."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def local(self, fqn: str, raw: bool) -> list[torch.Tensor]:
        """Return the local tensors of a name. `raw`: as integers of the same size."""
        found = self._found.get(fqn)
        if found is None:
            tensors = [tensor.detach() for tensor in self._parts(fqn)]
            found = self._found[fqn] = tensors, [raw_elements(tensor) for tensor in tensors]
        return found[raw]


# Waiting for messages such that the failure of a rank that is not even spoken to ends the waiting.


_LOOK_S = 0.05
"""How often a waiting rank checks whether another has failed."""
_DEVICE_LOOK_S = 0.0005
"""How often it checks whether a device is done."""
_VERDICT_S = 5.0
"""How long to wait for the cause after a lost connection."""
_DRAIN_S = 1.0
"""How long messages in flight may still arrive after a failure."""
_NO_LIMIT, _AT_ONCE = timedelta(days=10_000), timedelta(milliseconds=1)
"""Timeouts for messages of gloo."""


class Waiter:
    """Waits for works of `torch.distributed`, in the order given.

    Gloo blocks in `Work.wait` and cannot be interrupted, so a thread does this, while the caller
    looks for failures. Backends of devices wait on the device's stream: they return at once; see
    `settle`.

    A context. After an error, some messages are still in flight, and may arrive later or never.
    With gloo, those that are received into the caller's memory would change what is there later,
    and can only be ended with all connections of the process group, so they are. Without such
    messages, the process group may be used as before:

    - Collectives of the backend are in step. Gloo matches them by their number, and a rank that
      failed before one of ours would take what the others sent in it for a part of the job's next:
      so there is none.
    - Messages and their memory are kept until they end, or the process does. One whose memory is
      gone would block all that follows it between two ranks.
    - No message reaches its time limit, which would end all connections.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        """All waits end at the deadline of the group's phase."""
        self._group = group
        self._device = device
        self._blocks = device.type == "cpu"
        self._worker, self._at, self._peer = Worker(), 0, -1
        self._in_flight: deque[tuple[dist.P2POp, Any]] = deque()
        """Messages that have not been waited for."""
        self._is_over = False

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        if kind is None or not self._in_flight:
            return
        if self._worker.pending is not None:
            with suppress(Empty):
                self._worker.pending.get(timeout=_DRAIN_S)
        for op, work in list(self._in_flight):
            if isinstance(op, _IntoTarget) and not work.is_completed():
                with suppress(RuntimeError):  # it has ended then, well or not
                    work.wait(_AT_ONCE)
        self._worker.begin(_outlast, self._in_flight)

    def post(self, ops: list[dist.P2POp]) -> list[Any]:
        """Start to send and receive. Raises as `wait`: sending to a dead rank may fail at once."""
        try:
            if self._blocks:
                return self._begun(ops)
            for op in ops:
                op.tag = self._group.tag
            return dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            self._lost(error)

    def _begun(self, ops: list[dist.P2POp]) -> list[Any]:
        for op in ops:  # one that fails must not take those before it with it
            self._in_flight.append((op, op.op(op.tensor, op.peer, op.group, self._group.tag)))
        return [self._in_flight[i][1] for i in range(-len(ops), 0)]

    def wait(self, works: Sequence[Any], peers: Sequence[int]) -> None:
        """Wait until all are complete. Each is a message to or from the peer listed with it.

        Raises the failure of another rank, ReshardError for a lost connection, DeadlineError for a
        peer that hangs.
        """
        if not self._blocks:
            for work in works:
                work.wait()
            return
        self._at = 0  # until the worker begins
        pending = self._worker.begin(self._wait_each, works)
        words = "a message to or from rank {} was not delivered"
        self.outcome(pending, lambda: words.format(peers[self._at]), "that rank hangs")
        self._worker.pending = None
        for _ in works:
            self._in_flight.popleft()

    def _wait_each(self, works: Sequence[Any]) -> None:
        for self._at, work in enumerate(works):
            work.wait(_NO_LIMIT)

    def outcome(self, pending: SimpleQueue[Answer], what: Callable[[], str], who: str) -> Any:
        """Return the result of a worker that works together with the other ranks. Raises as `wait`.
        `what`, `who`: for the message if the time is up."""
        while True:
            with suppress(Empty):
                made, error = pending.get(timeout=_LOOK_S)
                break
            self._look(what(), who)
        if isinstance(error, RuntimeError):
            self._lost(error)
        if error is None:
            return made
        try:
            raise error
        finally:
            del error

    def _lost(self, error: Exception) -> NoReturn:
        until = time.monotonic() + _VERDICT_S
        while time.monotonic() < until:  # its own death, or error, says more than a connection that broke
            self._group.check()
            time.sleep(_LOOK_S)
        raise ReshardError(
            f"a message to or from another rank was lost: {error}. Look for an earlier error in the logs of the other "
            "ranks"
        ) from error

    def _look(self, what: str, who: str) -> None:
        """Raise the failure of another rank, or DeadlineError if the time is up."""
        self._group.check()
        if time.monotonic() > self._group.deadline:
            raise DeadlineError(f"{what} within {self._group.allowed_s:g} s. Check what {who} in, or waits for")

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait until the current streams of these devices have done all queued work, including
        messages between devices.

        Raises the failure of another rank, DeadlineError where a device waits for a message that
        does not come.
        """
        for device in dict.fromkeys(devices):
            if not has_copy_streams(device):
                wait_for(device)
                continue
            done: Any = device_module(device).current_stream(device).record_event()
            while not done.query():
                self._look(f"the work on {device}, including messages from other ranks, did not finish", "a rank hangs")
                time.sleep(_DEVICE_LOOK_S)

    def meet(self) -> None:
        """Wait until all ranks are here, and the device has done its queued work.

        Uses the smallest possible messages, from which ranks wake soonest. Raises as `wait`; a
        DeadlineError names the ranks that are not there.
        """
        self._sum_up(torch.zeros(1, dtype=torch.uint8, device=self._device))
        self.settle([self._device])

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of all ranks' numbers. Raises as `meet`."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return [int(number) for number in self._sum_up(found).tolist()]

    def _sum_up(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._group.world_size == 1:
            return numbers
        try:
            if self._blocks:
                pending = self._worker.begin(self._gathered, numbers)
                words = "the last message of rank {} was not delivered"
                rows: torch.Tensor = self.outcome(pending, lambda: words.format(self._peer), "that rank hangs")
                self._worker.pending = None
                self._in_flight.clear()
                return rows.sum(0)
            try:
                dist.all_reduce(numbers, group=self._group.process_group, async_op=True).wait()
            except RuntimeError as error:
                self._lost(error)
            return numbers
        except DeadlineError as late:
            try:
                self._group.barrier()  # ends at once, and names the missing rank
            except RankFailedError as gone:  # it had its part of the messages, and has gone on and ended since
                gone.args = (f"{gone}. Before that, {late}",)
                raise
            raise

    def _gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a row for each rank, starting with this one. Each step doubles the rows, with
        those of the rank at that distance. Runs on the worker's thread."""
        world, ranks, place = self._group.world_size, self._group.ranks, self._group.rank
        rows, known, within = numbers.repeat(world, 1), 1, self._group.process_group
        while known < world and not self._is_over:
            more = min(known, world - known)
            self._peer = ranks[(place + known) % world]
            ops = [
                dist.P2POp(dist.isend, rows[:more], ranks[(place - known) % world], within),
                dist.P2POp(dist.irecv, rows[known : known + more], self._peer, within),
            ]
            self._wait_each(self._begun(ops))
            known += more
        return rows


def _outlast(messages: deque[tuple[dist.P2POp, Any]]) -> None:
    """Keep abandoned messages until each has ended."""
    while messages:
        _, work = messages[0]
        if not work.is_completed():  # gloo would wait for another one
            with suppress(RuntimeError):
                work.wait(_NO_LIMIT)
        messages.popleft()


def new_group(group: Group) -> dist.ProcessGroup:
    """Collective: create another process group of the same ranks, with gloo, for messages beside
    those of the job.

    torch waits for all ranks inside and cannot be interrupted, so a thread does this, too.

    Raises the failure of another rank, ReshardError for a lost connection, DeadlineError when the
    phase's time is up.
    """
    waiter = Waiter(group, torch.device("cpu"))
    is_part = group.process_group is not None  # and only the ranks that are in it come here
    make = partial(dist.new_group, list(group.ranks), backend="gloo", use_local_synchronization=is_part)
    what = "a process group was not made by all ranks"
    made: dist.ProcessGroup = waiter.outcome(Worker().begin(make), lambda: what, "a rank hangs")
    return made


# Loads that read each byte once: the ranks that want the same elements share the reading, and pass
# them on.


BUDGET_BYTES = 256 << 20
"""Default limit for the memory of messages in flight."""


class SharedReading:
    """The plan of a load that reads no byte twice."""

    def __init__(self, plan: ReadOncePlan, rank: int) -> None:
        self.plan, self._rank = plan, rank
        self._boxes = plan.own_boxes(rank)

    @classmethod
    def agree(cls, tensors: Mapping[str, LiveTensor], group: Group) -> SharedReading:
        """Collective: plan what all ranks want. `tensors`: targets of this rank that are to be
        read, by key.

        Raises LayoutError, on every rank, if ranks disagree about a tensor. The plan is proved.
        """
        plan = plan_read_once(join_layouts(group.distinct_answers(describe(tensors))))
        verify(plan.transfers).raise_if_failed()
        return cls(plan, group.job_rank)

    def form(self, key: str) -> Form | None:
        """Return which rank reads what of a shared tensor; None for one that each rank reads for itself."""
        return self.plan.readers[key].form if key in self.plan.readers else None

    def parts(self, key: str, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what this rank reads of a shared tensor: views of its local tensors, one for each
        part of `form`."""
        return [local[own.part][own.box.slices] for own in self._boxes.get(key, ())]

    def pass_on(self, local: Callable[[str], Sequence[torch.Tensor]], group: Group) -> int:
        """Collective: send the other ranks what they want, after all have read. Return the bytes
        that this rank received.

        If a rank has failed, nothing is sent: the next load would receive such a message as one of
        its own.

        `local`: the local tensors of a key, on any device, which contain what was read.
        """
        rounds = schedule(self.plan.transfers, max_inflight_bytes=round_bytes(BUDGET_BYTES))
        exchange = Exchange(
            RankWork.of(rounds, self._rank),
            lambda key: self.parts(key, local(key)),
            local,
            process_group=group.process_group,
        )
        group.barrier()
        exchange.run(group)
        return exchange.received_bytes
