"""Numbered rounds over a key-value store: every rank posts, the last to arrive closes the round, all read its outcome.

A round has three keys however many ranks there are: a log to which each rank appends its frame, a count of the
arrivals, and the outcome. The outcome is written once, by whoever is first: the rank that arrived last (success), a
rank that failed, or one whose deadline passed. So all ranks read the same end, and one key is all they wait for.

    rank 0   post ──────────── wait ─┐
    rank 1        post ─────── wait ─┼─► outcome of round n: done, or the first failure
    rank 2               post, close ┘

Sessions (one for each `Rounds`) are numbered by a counter per rank in the store itself. A rank that missed a session,
since it failed before it got there, finds that the others gave up waiting for it, and goes on to the next number.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, Protocol

import msgspec

from reshard.control.liveness import Gone, Ring
from reshard.errors import DeadlineError, RankFailedError, ReshardError, format_ranks

__all__ = ["Failure", "KeyValueStore", "Rounds"]

_PART_BYTES = 4 << 20
"""Values are stored in parts of this size: the server of torch's TCPStore refuses values over 8 MiB."""
_INLINE_BYTES = 32 << 10
"""A larger payload gets keys of its own, so that the log stays small."""
_WATCH_GAP_S = 0.5
"""How often a rank looks whether the one that it watches is alive."""
_LAST_CALL_S = 1.0
"""Even a rank that is itself past the deadline looks this long for an outcome."""
_SEEN_S = 2.0
"""How long the first rank, which mostly hosts the store, stays so that the others can read how it all ended."""


class KeyValueStore(Protocol):
    """What is used of a `torch.distributed` store: TCPStore, FileStore, HashStore, PrefixStore over any of them.

    Keys are text and values bytes. `add` and `compare_set` (which writes only if the key is absent, expecting "") are
    atomic; so is `append` where `has_extended_api` says so.
    """

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def append(self, key: str, value: Any, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def has_extended_api(self) -> bool: ...


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a session ended, in ranks of the default group: who failed first (-1: nobody special), who was missed."""

    kind: Literal["error", "deadline", "diverged"]
    rank: int
    message: str
    missing: list[int] = []

    def raise_(self) -> NoReturn:
        """Raise it as the error that every rank gets."""
        if self.kind == "deadline":
            raise DeadlineError(self.message)
        if self.kind == "error":
            raise RankFailedError(self.message, rank=self.rank)
        raise ReshardError(self.message)


class _Done(msgspec.Struct, frozen=True, tag=True):
    data: bytes
    parts: int
    litter: list[str]
    """Keys of this round that the next one deletes, when all ranks have left this one."""


_Outcome = Failure | _Done
_decoder: msgspec.msgpack.Decoder[_Outcome] = msgspec.msgpack.Decoder(Failure | _Done)


class Rounds:
    """One session of rounds among the ranks of a group. Every rank makes its sessions in the same order.

    Args:
        store: shared by exactly these ranks, and used for nothing else.
        rank: this process's place in `ranks`.
        ranks: their ranks in the default group, for messages.
        ring: tells of a rank on this machine that died.
    """

    def __init__(self, store: KeyValueStore, rank: int, ranks: Sequence[int], ring: Ring | None = None) -> None:
        self.failure: Failure | None = None
        self._ring = ring
        self._next_watch = 0.0
        self._lock = threading.Lock()
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._round = 0
        self._appends = store.has_extended_api()
        # with many ranks each asks less often: about 20,000 questions a second in all
        self._longest_nap_s = 0.02 + len(ranks) * 50e-6
        self._next_look = 0.0
        self._litter: list[str] = []
        self._missed = ""  # how a session ended to which this rank came too late
        while True:
            self._session = self._call(store.add, f"sessions/{rank}", 1)
            outcome = self._read()
            if not isinstance(outcome, Failure) or self._ranks[rank] not in outcome.missing:
                break
            self._missed = f". Before, the others had given this rank up: {outcome.message}"

    def take(
        self, label: str, data: bytes, combine: Callable[[list[bytes]], bytes], deadline: float, allowed_s: float
    ) -> bytes:
        """Post `data`, wait for all others, and return what `combine` made of everybody's data, in rank order.

        Args:
            label: what this rank is doing; all ranks must say the same.
            combine: runs on the last rank to arrive only.
            deadline: on the monotonic clock, in seconds.
            allowed_s: the time that the deadline allowed, for the message.

        Raises:
            RankFailedError, DeadlineError, ReshardError: the session's failure, the same on all ranks.
        """
        with self._lock:
            self._learn("its next step")
            if self.failure is not None:
                self.failure.raise_()
            outcome = self._meet(label, data, combine, deadline, allowed_s)
            if isinstance(outcome, Failure):
                self.failure = outcome
                self.seen()
                outcome.raise_()
            whole = self._load(outcome.data, outcome.parts, "whole")
            self._litter = outcome.litter
            self._round += 1
            return whole

    def look(self) -> None:
        """Learn of a failure of another rank, if there is one; asks the store only now and then. From any thread."""
        now = time.monotonic()
        if self.failure is not None or now < self._next_look:
            return
        self._next_look = now + 5 * self._longest_nap_s
        # a thread that is in a round will learn of it there, and must not have its keys read while they are deleted
        if self._lock.acquire(blocking=False):
            try:
                self._learn("its next step")
            finally:
                self._lock.release()

    def fail(self, failure: Failure) -> Failure:
        """End the session; returns the failure that all ranks see, which is another one if that came first."""
        with self._lock:
            if self.failure is None:
                outcome = self._settle(failure)
                while not isinstance(outcome, Failure):  # we were interrupted in a round that was closed meanwhile
                    self._round += 1
                    outcome = self._settle(failure)
                self.failure = outcome
                self.seen()
            return self.failure

    def seen(self) -> None:
        """Say that this rank knows the outcome of the latest round. The first rank waits for the others, briefly.

        It often hosts the store, and with its process the outcome would be gone before the others have read it.
        """
        known = self.failure
        try:
            self._acknowledge(self._round - (known is None))
        except RankFailedError:  # the store is gone, but we know already how it ended
            self.failure = known

    def _acknowledge(self, n: int) -> None:
        count, everybody = f"{self._session}/{n}/seen", f"{self._session}/{n}/everybody"
        missing = () if self.failure is None else self.failure.missing
        expected = len(set(self._ranks[1:]).difference(missing))
        if self._rank:
            if self._call(self._store.add, count, 1) >= expected:
                self._call(self._store.set, everybody, b"1")
            return
        for _ in self._naps(time.monotonic() + _SEEN_S):
            if not expected or self._call(self._store.check, [everybody]):
                self._delete([count, everybody, *self._litter])
                self._litter = []
                break

    def _meet(
        self, label: str, data: bytes, combine: Callable[[list[bytes]], bytes], deadline: float, allowed_s: float
    ) -> _Outcome:
        self._post(label, data)
        if self._call(self._store.add, self._key("count"), 1) == len(self._ranks):
            return self._close(combine)
        until = max(deadline, time.monotonic() + _LAST_CALL_S)
        for _ in self._naps(until):
            outcome = self._read() or self._watch(label, combine)
            if outcome is not None:
                return outcome
        return self._settle(self._overdue(label, allowed_s))

    def _learn(self, label: str) -> None:
        """Before this rank has posted, nobody can have closed the round with success: an outcome is a failure."""
        if self.failure is None:
            outcome = self._read() or self._watch(label)
            if isinstance(outcome, Failure):
                self.failure = outcome
                self.seen()

    def _watch(self, label: str, combine: Callable[[list[bytes]], bytes] | None = None) -> _Outcome | None:
        """If the watched rank died before it posted this round, the end of the session. If it had posted, and all
        others have, it may have died as the one that was to close the round: then this rank closes it, by `combine`."""
        now = time.monotonic()
        if self._ring is None or now < self._next_watch:
            return None
        self._next_watch = now + _WATCH_GAP_S
        gone: Gone | None = self._call(self._ring.look)
        if gone is None:
            return None
        posted = self._frames()
        if gone.place in posted:
            return self._close(combine) if combine is not None and len(posted) == len(self._ranks) else None
        rank = self._ranks[gone.place]
        why = f"it exited or was killed before it reached {label}. Look at its log, and at the system's for memory"
        return self._settle(Failure("error", rank, f"rank {rank} ({gone.where}) is gone: {why}", [rank]))

    def _close(self, combine: Callable[[list[bytes]], bytes]) -> _Outcome:
        frames = self._frames()
        labels: dict[str, list[int]] = {}
        for place, frame in sorted(frames.items()):
            labels.setdefault(frame[0], []).append(self._ranks[place])
        if len(labels) > 1:
            words = "; ".join(f"{label}: {format_ranks(ranks)}" for label, ranks in labels.items())
            return self._settle(Failure("diverged", -1, f"the ranks do different things at the same time: {words}"))
        whole = combine(
            [self._load(inline, parts, f"data/{place}") for place, (_, inline, parts) in sorted(frames.items())]
        )
        inline, parts = self._save(whole, "whole", _PART_BYTES)
        litter = [self._key("log"), self._key("count"), *self._part_keys("whole", parts)]
        for place, (_, _, count) in frames.items():
            litter += self._part_keys(f"data/{place}", count)
            litter += [] if self._appends else [self._key(f"log/{place}")]
        outcome = self._settle(_Done(inline, parts, litter))
        self._delete(self._litter)
        if self._round:
            self._delete([f"{self._session}/{self._round - 1}/outcome"])
        return outcome

    def _overdue(self, label: str, allowed_s: float) -> Failure:
        arrived = {self._ranks[place] for place in self._frames()}
        missing = [rank for rank in self._ranks if rank not in arrived]
        where = f"{label} within {allowed_s:g} s"
        if not missing:
            return Failure("deadline", -1, f"all ranks reached {where}, but the last of them died before it said so")
        return Failure(
            "deadline",
            missing[0],
            f"{format_ranks(missing)} did not reach {where}; "
            f"there waited: {format_ranks(arrived)}. Look at what the missing hang in, or whether they died"
            f"{self._missed}",
            missing,
        )

    # --- the store ---

    def _key(self, name: str) -> str:
        return f"{self._session}/{self._round}/{name}"

    def _post(self, label: str, data: bytes) -> None:
        limit = min(_INLINE_BYTES, _PART_BYTES // len(self._ranks))
        inline, parts = self._save(data, f"data/{self._rank}", limit)
        frame = msgspec.msgpack.encode((self._rank, label, inline, parts))
        if self._appends:
            self._call(self._store.append, self._key("log"), struct.pack("<I", len(frame)) + frame)
        else:
            self._call(self._store.set, self._key(f"log/{self._rank}"), frame)

    def _frames(self) -> dict[int, tuple[str, bytes, int]]:
        """Of the ranks that have posted this round: place -> label, data in the frame, number of parts outside it."""
        packed: list[bytes] = []
        if self._appends:
            key = self._key("log")
            log = bytes(self._call(self._store.get, key)) if self._call(self._store.check, [key]) else b""
            start = 0
            while start < len(log):
                (length,) = struct.unpack_from("<I", log, start)
                packed.append(log[start + 4 : start + 4 + length])
                start += 4 + length
        else:
            keys = [self._key(f"log/{place}") for place in range(len(self._ranks))]
            packed = [bytes(self._call(self._store.get, key)) for key in keys if self._call(self._store.check, [key])]
        decoded = (msgspec.msgpack.decode(frame, type=tuple[int, str, bytes, int]) for frame in packed)
        return {place: (label, inline, parts) for place, label, inline, parts in decoded}

    def _read(self) -> _Outcome | None:
        key = self._key("outcome")
        if not self._call(self._store.check, [key]):
            return None
        return _decode(self._call(self._store.get, key))

    def _settle(self, outcome: _Outcome) -> _Outcome:
        """Write the outcome of this round unless there is one; the one that stands."""
        stands = self._call(self._store.compare_set, self._key("outcome"), "", msgspec.msgpack.encode(outcome))
        return _decode(stands)

    def _save(self, data: bytes, name: str, limit: int) -> tuple[bytes, int]:
        """What goes into the frame: the data itself, or how many keys hold its parts."""
        if len(data) <= limit:
            return data, 0
        keys = self._part_keys(name, -(-len(data) // _PART_BYTES))
        for i, key in enumerate(keys):
            self._call(self._store.set, key, data[i * _PART_BYTES : (i + 1) * _PART_BYTES])
        return b"", len(keys)

    def _load(self, inline: bytes, parts: int, name: str) -> bytes:
        return b"".join(bytes(self._call(self._store.get, key)) for key in self._part_keys(name, parts)) or inline

    def _part_keys(self, name: str, parts: int) -> list[str]:
        return [self._key(f"{name}/{i}") for i in range(parts)]

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call(self._store.delete_key, key)

    def _naps(self, until: float) -> Any:
        """Yields at once and then after ever longer pauses, a last time when the time is over."""
        pause = 0.0002
        while True:
            yield
            left = until - time.monotonic()
            if left <= 0.0:
                return
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self._longest_nap_s)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:  # torch raises DistNetworkError, DistStoreError or the bare class
            lost = Failure(
                "error",
                0,
                "the store through which the ranks talk is gone; the process that hosts it, mostly rank 0, has "
                f"probably exited or died: look at its log first ({str(error).splitlines()[0][:200]})",
            )
            self.failure = lost
            raise RankFailedError(lost.message, rank=0) from error


def _decode(packed: bytes) -> _Outcome:
    return _decoder.decode(bytes(packed))
