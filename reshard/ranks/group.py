"""The control plane: a few collective verbs over small values, in which the first error of any rank
reaches all ranks.

    group = Group(process_group)
    with group.together("plan", deadline_s=60):
        kept = group.merge({"a"}, lambda parts: set().union(*parts), "names")
        ...                                     # a rank that raises here ends the phase on every rank

Nothing here touches a tensor, a device or a collective of the backend: ranks talk through the store
that the process group was made with, so a group that has only NCCL serves as well as gloo, and a
background thread may talk while the training loop runs its own collectives. With no process group
at all everything works for a single rank.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import LayoutError, OptionError, ReshardError, format_ranks
from reshard.ranks.progress import phase

if TYPE_CHECKING:  # imported where there is more than one rank
    from reshard.ranks.rounds import Rounds

T = TypeVar("T")
S = TypeVar("S")

DEADLINE_S = 1800.0
"""Default limit for a collective call."""

MEETING_S = 300.0
"""How long ranks wait for each other at the start of a call that some ranks may never make, for
example if only one rank calls `convert`."""

_MESSAGE_CHARS = 20_000
"""Most characters of a traceback that are sent to other ranks. The end is kept, which says most."""

_FIRST_TAG = 1 << 30

_VALUE_CHARS = 200
"""Most characters of an option's value in a message."""


class _GroupPhase(NamedTuple):
    name: str
    deadline: float  # on the monotonic clock
    allowed_s: float


class Group:
    """The ranks that do one thing together, a save or a load: a new one for each, made by all ranks
    in the same order.

    The verbs are collective: all ranks call the same ones in the same order, one at a time. Making
    a group is not: it does not wait. Once a phase has failed, every later verb raises that same
    failure.

    Args:
        process_group: default: the default group if torch.distributed is initialized, else this
            process alone.
        ranks: only these of the default group, in ascending order. Each set of ranks meets by itself.
        alone: this process by itself, even if torch.distributed is initialized: it does not ask or
            wait for others.
        deadline_s: how long a verb or a phase may take, in seconds, where `together` does not say
            otherwise.

    Attributes:
        rank: this process's place in the group, from 0.
        world_size: number of ranks in the group.
        job_rank: this process's rank in the default group, by which plans are numbered.
        ranks: the ranks in the default group of these processes, in group order; messages name these.
        process_group: as it was given.
        writes: whether a load of the group has begun to write into its targets.
        tag: of the messages over `torch.distributed`. Each group has its own, so that none that a
            failed one left in flight reaches the next. Gloo obeys tags; NCCL does not know them.

    Raises:
        ReshardError: this process is no member of the process group, the group has no store that
            answers, or this is one process of a job that has not been initialized: all of them
            would act at once, each for itself; a timeout that is none, or a group for a process
            alone, which all members then raise.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ranks: tuple[int, ...] = (),
        alone: bool = False,
        deadline_s: float | timedelta = DEADLINE_S,
    ) -> None:
        wrong = None
        if alone not in (True, False):
            wrong = OptionError(f"alone must be True or False, got {alone!r:.80}")
        if alone and process_group is not None:
            wrong = OptionError("alone=True means that this process acts by itself: leave process_group out")
        if hasattr(process_group, "get_group"):
            raise OptionError(
                "process_group is a DeviceMesh: pass mesh.get_group(), or mesh.get_group('dp') for one axis"
            )
        allowed_s = deadline_s.total_seconds() if isinstance(deadline_s, timedelta) else deadline_s
        if not (isinstance(allowed_s, int | float) and allowed_s > 0):
            wrong = OptionError(f"timeout must be a positive number of seconds, or a timedelta, got {deadline_s!r:.80}")
            allowed_s = DEADLINE_S
        self.process_group, self._deadline_s = process_group, allowed_s
        self._phases: list[_GroupPhase] = []
        self.writes = False
        self._common: Callable[[], BaseException | None] = lambda: None
        self._rounds: Rounds | None = None
        self.rank = self.tag = 0
        self.ranks: Sequence[int] = (0,)
        joined = dist.is_available() and dist.is_initialized()
        if alone and process_group is None:
            self.ranks = (dist.get_rank() if joined else 0,)
        elif joined:
            self._join(dist.group.WORLD if process_group is None else process_group, ranks)
        elif process_group is not None:
            raise wrong or ReshardError(
                "a process group was given, but torch.distributed is not initialized (or was destroyed)"
            )
        else:
            refuse_unjoined()
        self.world_size, self.job_rank = len(self.ranks), self.ranks[self.rank]
        if wrong is not None:
            try:
                with self.together("the call"):  # the other ranks wait for this one
                    raise wrong
            finally:
                del wrong

    def _join(self, process_group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> None:
        ranks = ranks if len(ranks) < dist.get_world_size() else ()
        self.rank = ranks.index(dist.get_rank()) if ranks else dist.get_rank(process_group)
        if process_group is None or self.rank < 0:
            raise ReshardError(
                f"rank {dist.get_rank()} is not a member of this process group: call this only on its members, or "
                "omit process_group to use the default group"
            )
        self.ranks = ranks or tuple(dist.get_process_group_ranks(process_group))
        if len(self.ranks) > 1:
            from reshard.ranks.rounds import Rounds
            from reshard.ranks.store import store_of

            until = time.monotonic() + self._deadline_s
            shared = store_of(process_group, until, ranks)
            client = shared.lend(until)
            self._rounds = Rounds(client, self.rank, self.ranks, shared.peers, shared.stale_keys)
            self.tag = _FIRST_TAG + self._rounds.session % _FIRST_TAG
            weakref.finalize(self._rounds, shared.give_back, client)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.merge(b"", b"".join, "a barrier")

    def merge(
        self,
        value: T,
        combine: Callable[[list[T]], T],
        what: str,
        *,
        kind: Any = None,
        in_phase: bool = True,
        parcels: Mapping[str, bytes] | None = None,
        only: int | None = None,
    ) -> T:
        """Combine the values of all ranks into one answer, which all ranks get.

        Args:
            combine: combines several values, in rank order, into one. It is called on ranks' values, and then on
                its own results. The result should not grow with the number of ranks.
            what: what is combined, for the message about ranks that do different things.
            kind: the type of the values, for msgspec. Default: the class of this value, which is
                sufficient for bytes (sent unchanged), numbers, strings, and structs.
            in_phase: whether ranks may be in different phases.
            parcels: what to put into boxes, for the ranks that open them: see `Rounds.take`.
            only: the place of the one rank that gets the answer. The others get their own value back.
        """
        if self._rounds is None:
            return combine([value])
        if self._phases:
            name, deadline, allowed_s = self._phases[-1]
            what += f" in '{name}'" if in_phase else ""
        else:
            deadline, allowed_s = time.monotonic() + self._deadline_s, self._deadline_s
        kind = kind or type(value)

        def joined(parts: list[bytes]) -> bytes:
            return _encode(combine([_decode(part, kind) for part in parts]))

        with phase(what, waits=True):
            whole = self._rounds.take(what, _encode(value), joined, deadline, allowed_s, parcels, only)
        return _decode(whole, kind) if only in (None, self.rank) else value

    def merge_within(
        self, value: T, combine: Callable[[list[T]], T], what: str, name: str, told: bytes = b""
    ) -> tuple[T, dict[int, bytes]]:
        """Like `merge`. Also return what was sent by the ranks that passed the same `name`, such as
        that of their machine, by place in the group, in order. At most 1,024 ranks may pass one
        name."""
        if self._rounds is None:
            return combine([value]), {0: told}
        box = f"among/{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        merged = self.merge(value, combine, what, parcels={box: told})
        return merged, self._rounds.collect(box, range(self.world_size))

    def exchange_within(self, name: str, value: T, *, kind: Any = None) -> dict[int, T]:
        """Return the values of the ranks that pass the same name: see `merge_within`."""
        _, found = self.merge_within(b"", b"".join, "an exchange among some", name, _encode(value))
        return {place: _decode(data, kind or type(value)) for place, data in found.items()}

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on all ranks. Equal values are sent once."""
        if self._rounds is None:
            return [value]
        pool = self.merge(DistinctValues([_encode(value)]), DistinctValues.join, "an exchange")
        distinct = [_decode(data, type(value)) for data in pool.distinct]
        return [distinct[number] for number in pool.numbers()]

    def gather(self, value: T, root: int = 0, *, kind: Any = None) -> list[T] | None:
        """Return the values of all ranks, in rank order, on the rank `root` (its place in the
        group), and None on the others."""
        found = self.gather_and_sum(value, b"", b"".join, root, kind=kind)
        return None if found is None else found[0]

    def gather_and_sum(
        self, value: T, summed: S, add: Callable[[list[S]], S], root: int = 0, *, kind: Any = None
    ) -> tuple[list[T], S] | None:
        """`gather`, and the sum of what adds up, added on the way: for the root, too.

        Args:
            add: makes one of several, which are in the order of the ranks; called on what it made, too.
        """
        self._check_root(root, "gather on")
        if self._rounds is None:
            return [value], add([summed])
        fan = self._rounds.fan
        parcels = {f"gather/{self.rank // fan}": _encode(value)}
        total = self.merge(summed, add, f"a gathering on rank {root}", parcels=parcels, only=root)
        if self.rank != root:
            return None
        found: dict[int, bytes] = {}
        for first in range(0, self.world_size, fan):
            places = range(first, min(first + fan, self.world_size))
            found |= self._rounds.collect(f"gather/{first // fan}", places, owner=True)
        return [_decode(found[place], kind or type(value)) for place in range(self.world_size)], total

    def scatter(self, data: Sequence[bytes] | None, root: int = 0, *, common: bytes = b"") -> tuple[bytes, bytes]:
        """Return what the rank `root` passes for this rank, and what it passes for all ranks. The
        others pass None."""
        self._check_root(root, "scatter from")
        if self.rank == root and (data is None or len(data) != self.world_size):
            raise ReshardError(f"rank {root} is to give each of {self.world_size} ranks its data")
        if self._rounds is None:
            return data[0] if data else b"", common
        is_root = self.rank == root
        parcels = {f"for/{place}": one for place, one in enumerate(data or ())} if is_root else {}
        known = self.merge(common if is_root else b"", b"".join, f"a scattering from rank {root}", parcels=parcels)
        return self._rounds.collect(f"for/{self.rank}", [root], owner=True)[root], known

    def distinct_answers(
        self, value: T, *, kind: Any = None, known: DistinctValues | None = None
    ) -> list[tuple[T, Sequence[int]]]:
        """Return each distinct value, and the ranks that passed it, in rank order.

        Ranks first send digests, unless the pool of all `digest_of` is `known`. If all digests are
        equal, nothing else is sent; otherwise, each distinct value is sent once.
        """
        if self._rounds is None:
            return [(value, self.ranks)]
        data = _encode(value)
        digest = digest_of(data)
        pool = known or self.merge(DistinctValues([digest]), DistinctValues.join, "an exchange of digests")
        if len(pool.distinct) == 1:
            return [(value, self.ranks)]
        parties: list[list[int]] = [[] for _ in pool.distinct]
        for rank, number in zip(self.ranks, pool.numbers(), strict=True):
            parties[number].append(rank)
        speaks = parties[pool.distinct.index(digest)][0] == self.job_rank
        answers = self.merge(
            [data] * speaks, lambda parts: [*chain(*parts)], "an exchange of what differs", kind=list[bytes]
        )
        return [(_decode(one, kind or type(value)), ranks) for one, ranks in zip(answers, parties, strict=True)]

    def share(self, value: T | None, *, kind: Any = bytes) -> T:
        """Return the value of the first rank; the others may pass None."""
        if self.rank == 0 and value is None:
            raise ReshardError("rank 0 is to share its data, but gave None")
        mine = b"" if self.rank else _encode(value)
        return cast(T, _decode(self.merge(mine, b"".join, "a share from rank 0"), kind))

    def _check_root(self, root: int, what: str) -> None:
        if not 0 <= root < self.world_size:
            raise ReshardError(f"there is no rank {root} to {what} in a group of {self.world_size}")

    def agree(self, value: object, what: str, *, error: type[ReshardError] = LayoutError) -> None:
        """Make sure that all ranks have the same value.

        Args:
            what: what it is, or is a digest of, for the message: "the layout of the state dict".
            error: raised on all ranks if they differ; it names the ranks. The group stays usable.
        """
        if len(answers := self.distinct_answers(value)) == 1:
            return
        parties = sorted((ranks for _, ranks in answers), key=lambda ranks: (-len(ranks), ranks))  # largest first
        words = [format_ranks(ranks) for ranks in parties[:10]]
        more = f", and {len(parties) - 10} more parties" if len(parties) > 10 else ""
        self.refuse(error(f"the ranks differ in {what}: {' vs. '.join(words)}{more}"))

    def same_options(self, verb: str, options: Mapping[str, object]) -> None:
        """Make sure that all ranks were called with equal options.

        Args:
            verb: what they were called, for the message: "save".
            options: values by name; only their `repr` counts.

        Raises LayoutError, on all ranks: each option that differs, its values, and the ranks that
        gave them.
        """
        answers = self.distinct_answers({name: repr(value) for name, value in options.items()})
        if len(answers) == 1:
            return
        given: dict[str, dict[str, list[int]]] = {}
        for answer, ranks in answers:
            for name, value in answer.items():
                given.setdefault(name, {}).setdefault(value, []).extend(ranks)
        lines = [
            f"{name}: " + ", ".join(f"{value[:_VALUE_CHARS]} on {format_ranks(ranks)}" for value, ranks in by.items())
            for name, by in given.items()
            if len(by) > 1
        ]
        self.refuse(
            LayoutError(f"the ranks call {verb} with different options. Pass the same on all ranks: {'; '.join(lines)}")
        )

    def refuse(self, error: ReshardError) -> NoReturn:
        """Raise an error that every rank raises in the same way. The group stays usable."""
        self._common = weakref.ref(error)
        try:
            raise error
        finally:
            del error

    def raised_alike(self, error: BaseException) -> bool:
        """Return True if every rank has raised this error in the same way: see `refuse`."""
        return error is self._common()

    @property
    def deadline(self) -> float:
        """When the current phase must end, on the monotonic clock. Outside of phases, never."""
        return self._phases[-1].deadline if self._phases else float("inf")

    @property
    def allowed_s(self) -> float:
        """How long the current phase may take, in seconds."""
        return self._phases[-1].allowed_s if self._phases else self._deadline_s

    @property
    def failed(self) -> bool:
        """Whether a phase has failed. Then every collective method raises its error, and only a new
        group can continue."""
        return self._rounds is not None and self._rounds.failure is not None

    def check(self) -> None:
        """Raise an error if another rank has failed. Cheap and not collective: call it during long
        work, from any thread."""
        if self._rounds is not None:
            self._rounds.look()
            if self._rounds.failure is not None:
                self._rounds.failure.raise_()

    @contextmanager
    def together(self, name: str, *, deadline_s: float | None = None, meet: bool = True) -> Iterator[None]:
        """A phase that ends in the same way on all ranks: all leave it when all are done, or with
        an error.

        The rank that fails raises its own error at once. The others raise a `RankFailedError` with
        its rank, message and traceback as soon as they reach a verb, a `check` or the end of the
        phase; so they do, within a second or two, if a rank on the same machine as another died. A
        rank that does not get there in time, hanging or dead far away, makes a `DeadlineError` on
        all others that names it.

        Args:
            name: for messages: "write".
            deadline_s: how long the whole phase may take, counted from when this rank entered it,
                in seconds; a phase inside another has no longer than that one has left.
            meet: False lets a rank leave as soon as it is done: the caller makes sure otherwise
                that all ranks are.
        """
        allowed_s = self._deadline_s if deadline_s is None else deadline_s
        together = _GroupPhase(name, time.monotonic() + allowed_s, allowed_s)
        if self._phases and self._phases[-1].deadline < together.deadline:
            together = _GroupPhase(name, *self._phases[-1][1:])
        self._phases.append(together)
        try:
            yield
            if meet:
                self.merge(b"", b"".join, f"the end of '{name}'", in_phase=False)
                if self._rounds is not None and len(self._phases) == 1:
                    self._rounds.seen()
        except BaseException as error:
            self._report(error, together)
            raise
        finally:
            self._phases.pop()

    def _report(self, error: BaseException, phase: _GroupPhase) -> None:
        """Report the error to the other ranks, unless they know it or fail in the same way. Report
        to the user which rank failed."""
        rounds = self._rounds
        if rounds is None or rounds.failure is not None or error is self._common():
            return
        from reshard.ranks.store import Failure

        rank = self.job_rank
        trace = "".join(traceback.format_exception(error))[-_MESSAGE_CHARS:]
        headline = f"rank {rank} failed in '{phase.name}': {type(error).__name__}: {error}"[:_MESSAGE_CHARS]
        if not isinstance(error, ReshardError):  # which may say little by itself
            last = traceback.extract_tb(error.__traceback__)[-1]
            headline += f" ({last.filename}:{last.lineno} in {last.name}; .traceback of this error has all frames)"
        mine = Failure("error", rank, headline, traceback=trace)
        try:
            first = rounds.fail(mine)
        except ReshardError as lost:
            error.add_note(f"the other ranks could not be notified: {lost}")
            return
        if first != mine:
            error.add_note(f"before that, {first.message}")


def _encode(value: object) -> bytes:
    """Encode a value for another rank; bytes stay as they are."""
    return value if isinstance(value, bytes) else msgspec.msgpack.encode(value)


def _decode(data: bytes, kind: Any) -> Any:
    return data if kind is bytes else msgspec.msgpack.decode(data, type=kind)


# Flags that all ranks have, a bit each and compressed: what is so on any of them, whichever that
# is.
#
# received = group.merge(pack_flags(mine), either, "names in use") unpack_flags(received, len(mine))


def pack_flags(flags: Sequence[bool]) -> bytes:
    """Pack flags for `either`."""
    return zlib.compress(np.packbits(np.array(flags, dtype=bool)).tobytes())


def either(parts: Iterable[bytes]) -> bytes:
    """Combine packed flags of equal number: set if set in any."""
    first, *others = dict.fromkeys(parts)
    if not others:
        return first
    bits = np.frombuffer(zlib.decompress(first), np.uint8)
    for other in others:
        bits = bits | np.frombuffer(zlib.decompress(other), np.uint8)
    return zlib.compress(bits.tobytes())


def unpack_flags(data: bytes, count: int) -> list[bool]:
    """Inverse of `pack_flags`."""
    bits = np.frombuffer(zlib.decompress(data), np.uint8)
    return np.unpackbits(bits, count=count).astype(bool).tolist()


def refuse_unjoined() -> None:
    """Raise ReshardError if the environment, such as torchrun's, says that there are more processes
    than this one."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise ReshardError(
            f"this is one of {size} processes (WORLD_SIZE={size} in the environment), but torch.distributed is "
            "not initialized, so each process would act alone, and saves would collide: call "
            "torch.distributed.init_process_group() first. If this process is meant to act alone, pass "
            "alone=True (no_dist=True in reshard.dcp), or unset WORLD_SIZE"
        )


# Where a process group sends from.


_FROM_HOST = ("gloo", "mpi")
"""Backends that send from memory of the CPU only, whatever they are registered for."""


def sending_kinds(process_group: dist.ProcessGroup | None) -> list[str]:
    """Return the kinds of device that the backends of a group send from, on this machine: "cpu",
    "cuda", "xpu", and so on."""
    if not (dist.is_available() and dist.is_initialized()):
        return ["cpu"]
    backends = _backends(process_group)
    kinds = [kind for kind, backend in backends.items() if kind == "cpu" or backend not in _FROM_HOST]
    return [kind for kind in kinds if kind == "cpu" or _is_here(kind)]


def _backends(process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each kind of device."""
    config = dist.get_backend_config(process_group)
    return dict(row.split(":") for row in config.split(",")) if ":" in config else {"cpu": config}


def _is_here(kind: str) -> bool:
    """Return True if this machine has the device. A backend may be registered without it."""
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def device_of_kind(kind: str, tensors: Iterable[torch.Tensor] = ()) -> torch.device:
    """Return the device of this process: the one that has most of its tensors of that kind,
    regardless of the current device. If it has none, the current device. The device has an index,
    like those of tensors, so that it can be compared with them."""
    if kind == "cpu":
        return torch.device("cpu")
    held: Counter[torch.device] = Counter()
    for tensor in tensors:
        if tensor.device.type == kind:
            held[tensor.device] += tensor.nbytes
    if held:
        return held.most_common(1)[0][0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def sending_device(device: torch.device, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which the collectives of a group take elements of `device`: itself, or
    one that its backends support."""
    kinds = sending_kinds(process_group)
    return device if device.type in _backends(process_group) or not kinds else device_of_kind(kinds[0])


# The distinct answers of many ranks, in pools that can be joined.


def digest_of(data: bytes) -> bytes:
    """The key of an answer in a pool, 16 bytes, since the answer may be long."""
    return hashlib.sha256(data).digest()[:16]


class DistinctValues(msgspec.Struct, frozen=True, array_like=True):
    """The distinct answers of consecutive ranks."""

    distinct: list[bytes]
    count: int = 1
    """The number of these ranks."""
    places: bytes = b""
    """For each rank, the index of its answer as a 32-bit number. Compressed, because few distinct
    answers recur. Empty if all ranks gave the same answer."""

    @staticmethod
    def join(pools: list[DistinctValues]) -> DistinctValues:
        """Join several pools, in order."""
        known: dict[bytes, int] = {}
        for pool in pools:
            for answer in pool.distinct:
                known.setdefault(answer, len(known))
        places = array("I")
        for pool in pools if len(known) > 1 else ():
            mine = [known[answer] for answer in pool.distinct]
            places.extend(mine[place] for place in pool.numbers())
        count = sum(pool.count for pool in pools)
        return DistinctValues(list(known), count, zlib.compress(places.tobytes(), 1) if places else b"")

    def numbers(self) -> Sequence[int]:
        """The index of each rank's answer."""
        return array("I", zlib.decompress(self.places)) if self.places else [0] * self.count
