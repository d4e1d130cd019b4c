"""Numbered rounds over a key-value store: every rank posts, the last to arrive closes the round,
all read its outcome.

A round is a tree of logs, each of which a limited number of ranks append to. Who is the last to
append to a log combines what is in it, and appends that to the log above; who does so at the top
writes the outcome. So no rank reads more than a few logs, however many ranks there are. The outcome
is written once, by the first of these: the rank that arrived last (success), a rank that failed, or
one whose deadline passed. All ranks read the same end, and one key is all they wait for.

    rank 0   post ──────────── wait ─┐
    rank 1        post ─────── wait ─┼─► outcome of round n: done, or the first failure
    rank 2               post, close ┘

What one rank has to say to another, or to those of its machine, goes into a box beside the logs,
which only they read.

Sessions (one for each `Rounds`) are numbered by a counter per rank in the store itself. A rank that
missed a session, since it failed before it got there, finds that the others gave up waiting for it,
and continues with the next number. Every rank deletes what it wrote, or closed, when all ranks have
met again; what is left at the end of a session, when they have met in a later one, and none of them
is in the former any more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from reshard.errors import RankFailedError, format_ranks
from reshard.ranks.liveness import Gone, PeerWatch
from reshard.ranks.store import (
    GRACE_S,
    PART_BYTES,
    Failure,
    LogEntry,
    Outcome,
    RoundOutcome,
    StaleKeys,
    StoreClient,
    decode_outcome,
)

FAN = 128
"""How many ranks, or groups of ranks, are joined at a time."""
_BOX_RANKS = 1024
"""The maximum number of ranks that put something into one box."""
_INLINE_BYTES = 32 << 10
"""A larger payload gets separate keys, so that logs stay small."""
_WATCH_GAP_S = 0.5
"""How often a rank checks whether the rank that it watches is alive."""
_LAST_CALL_S = 1.0
"""Even a rank that is past its deadline waits this long for an outcome."""
_VERDICT_S = 2.0
"""How long ranks let one rank find out which ranks missed the deadline."""
_HERE_S = 2.0
"""A rank that has waited this long records that it waits, so that others can find out which rank hangs."""
_SEEN_S = 2.0
"""How long the first rank, which usually hosts the store, stays so that the others can read the outcome."""
_MAX_LOOK_GAP_S = 4.0

Combine = Callable[[list[bytes]], bytes]
"""Combines several answers, in rank order, into one. It is called on ranks' answers, and then on
its own results."""


class Rounds:
    """One session of rounds among the ranks of a group. Every rank makes its sessions in the same
    order.

    Args:
        store: a client of a store that is shared by exactly these ranks, and used for nothing else.
        rank: this process's place in `ranks`.
        ranks: their ranks in the default group, for messages.
        peers: reports a rank on this machine that died.
        stale_keys: of this rank's sessions over this store.
    """

    fan = FAN

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        ranks: Sequence[int],
        peers: PeerWatch | None = None,
        stale_keys: StaleKeys | None = None,
    ) -> None:
        self.failure: Failure | None = None
        self.session = 0
        """The number of the session, which is the same on all ranks."""
        self._store = store
        self._peers = peers
        self._next_watch = self._next_look = 0.0
        self._lock = threading.Lock()
        self._rank = rank
        self._ranks = ranks
        self._round = 0
        # with many ranks each asks less often: some thousand questions a second in all
        self._look_gap_s = min(_MAX_LOOK_GAP_S, 0.1 + len(ranks) * 250e-6)
        self._stale_keys = StaleKeys() if stale_keys is None else stale_keys
        self._own_keys: list[str] = []
        self._missed = ""  # how a session ended to which this rank came too late
        while True:
            self.session = store.add(f"sessions/{rank}", 1)
            outcome = self._read()
            if not isinstance(outcome, Failure) or self._ranks[rank] not in outcome.missing:
                break
            self._missed = f". The other ranks had already given up on this rank: {outcome.message}"
        self._stale_keys.live.add(self.session)
        weakref.finalize(self, self._stale_keys.leave, self.session, self._own_keys)

    def take(
        self,
        label: str,
        data: bytes,
        combine: Combine,
        deadline: float,
        allowed_s: float,
        parcels: Mapping[str, bytes] | None = None,
        only: int | None = None,
    ) -> bytes:
        """Post `data`, wait for all others, and return what `combine` made of the data of all.

        Args:
            label: what this rank is doing; all ranks must say the same.
            combine: runs on the last to arrive of up to `FAN` ranks, and on the last of these, and
                so on.
            deadline: on the monotonic clock, in seconds.
            allowed_s: the time that the deadline allowed, for the message.
            parcels: box -> what those who `collect` it afterwards will find.
            only: the place of the one rank that gets what was made; the others get nothing.
                Default: all do.

        Raises:
            RankFailedError, DeadlineError, ReshardError: the session's failure, the same on all ranks.
        """
        with self._lock, self._noting_loss():
            if self.failure is not None:
                self.failure.raise_()
            self._store.limit = deadline, GRACE_S
            before = self._own_keys[:]
            self._own_keys.clear()  # what follows is of this round
            limit = min(_INLINE_BYTES, PART_BYTES // min(len(self._ranks), _BOX_RANKS))
            for box, parcel in (parcels or {}).items():
                name = self._key(f"parcel/{box}/{self._rank}")
                head = self._store.put(name, parcel, limit, self._own_keys)
                self._store.append(self._key(f"box/{box}"), self._rank, head)
            outcome = self._climb(label, data, combine, only) or self._wait(label, deadline, allowed_s)
            if isinstance(outcome, Failure):
                for box in parcels or ():  # no rank will collect them
                    self._own_keys += self._store.keys_of(self._key(f"box/{box}"), [self._rank])
                self._own_keys += before
                self._end(outcome)
                outcome.raise_()
            whole = self._store.fetch(outcome.head) if only in (None, self._rank) else b""
            self._round += 1
            self._store.delete((*before, *self._stale_keys.take(outcome.oldest)))
            return whole

    def collect(self, box: str, places: Sequence[int], *, owner: bool | None = None) -> dict[int, bytes]:
        """Return what was put into a box in the round that just ended, by place, in order.

        Args:
            places: who may have put something there.
            owner: whether this rank removes the box. Default: if it is the first rank that put
            something there.
        """
        with self._lock, self._noting_loss():
            log = f"{self.session}/{self._round - 1}/box/{box}"
            heads = self._store.entries(log, places)
            if owner or (owner is None and next(iter(heads), None) == self._rank):
                self._own_keys += self._store.keys_of(log, heads)
            return {place: self._store.fetch(head) for place, head in heads.items()}

    def look(self) -> None:
        """Check whether another rank has failed. This asks the store only occasionally. Call it
        from any thread."""
        now = time.monotonic()
        if self.failure is not None or now < self._next_look:
            return
        self._next_look = now + self._look_gap_s
        # a thread that is in a round will learn of it there, and must not have its keys read while
        # they are deleted
        if self._lock.acquire(blocking=False):
            try:
                with self._noting_loss():
                    # no rank can have closed with success what this rank has not posted: an outcome
                    # is a failure
                    outcome = self._read() or self._watch("its next step")
                    if isinstance(outcome, Failure):
                        self._end(outcome)
            finally:
                self._lock.release()

    def fail(self, failure: Failure) -> Failure:
        """End the session. Return the failure that all ranks see, which may be an earlier one."""
        with self._lock:
            if self.failure is None:
                with self._noting_loss():
                    outcome = self._settle(failure)
                    while not isinstance(outcome, Failure):  # we were interrupted in a round that was closed meanwhile
                        self._round += 1
                        outcome = self._settle(failure)
                    self._end(outcome)
            assert self.failure is not None
            return self.failure

    def seen(self) -> None:
        """Record that this rank knows the outcome of the latest round. The first rank briefly waits
        for the others.

        It often hosts the store: if its process ended, the outcome would be lost before the others
        have read it. A store that does not answer delays no rank further, because the outcome is
        known.
        """
        known = self.failure
        self._store.limit = time.monotonic(), _SEEN_S + self._look_gap_s
        try:
            self._acknowledge(self._round - (not known))
        except RankFailedError:  # the store is gone, but we know already how it ended
            self.failure = known

    def _end(self, outcome: Failure) -> None:
        self.failure = outcome
        self.seen()

    def _acknowledge(self, n: int) -> None:
        """Round n was the last one. The first rank removes its keys when all ranks know the
        outcome. A rank that missed the end of a session must find its outcome there."""
        count, everybody = f"{self.session}/{n}/seen", f"{self.session}/{n}/all"
        failed, missing = self.failure is not None, set(self.failure.missing if self.failure is not None else ())
        expected = len(self._ranks) - 1 - len(missing - {self._ranks[0]})
        own = self._own_keys[:]
        self._own_keys.clear()
        if self._rank:
            tree = tuple(f"{self.session}/{n}/{name}" for name in ("outcome", "count/", "log/"))
            self._stale_keys.leave(self.session, own if failed else [key for key in own if not key.startswith(tree)])
            if self._store.add(count, 1) >= expected:
                self._store.set(everybody, b"1")
            return
        if expected:
            for _ in self._store.awaited(everybody, time.monotonic() + _SEEN_S, _SEEN_S):
                pass
        keys = [*own, count, everybody]
        for ended in (n, n - 1) if failed and n else (n,):
            at = f"{self.session}/{ended}"
            keys.append(f"{at}/outcome")
            for level, sizes in enumerate(_levels(len(self._ranks))):
                for group, size in enumerate(sizes):
                    keys.append(f"{at}/count/{level}/{group}")
                    keys += self._store.keys_of(f"{at}/log/{level}/{group}", range(size))
        if not missing and (not expected or self._store.peek(everybody) is not None):
            self._store.delete(dict.fromkeys(keys))
            keys = []
        self._stale_keys.leave(self.session, dict.fromkeys(keys))

    def _climb(self, label: str, data: bytes, combine: Combine, only: int | None) -> Outcome | None:
        """Post to a log. As long as this rank is the last to post to a log, combine its entries and
        post the result to the log above."""
        place, oldest = self._rank, min(self._stale_keys.live, default=0)
        for level, sizes in enumerate(_levels(len(self._ranks))):
            group, slot = divmod(place, FAN)
            log, count = self._key(f"log/{level}/{group}"), self._key(f"count/{level}/{group}")
            name = self._key(f"data/{level}/{place}")
            head = self._store.put(name, data, _INLINE_BYTES, self._own_keys)
            entry = msgspec.msgpack.encode(LogEntry(label, head, oldest))
            if self._store.append(log, slot, entry, count) < sizes[group]:
                return None
            found = self._store.entries(log, range(sizes[group]))
            entries = {slot: msgspec.msgpack.decode(one, type=LogEntry) for slot, one in found.items()}
            self._own_keys += [count, *self._store.keys_of(log, entries)]
            if len({entry.label for entry in entries.values()}) > 1:
                return self._settle(self._diverged(entries, FAN**level, group))
            data = combine([self._store.fetch(entry.head) for entry in entries.values()])
            place, oldest = group, min(entry.oldest for entry in entries.values())
        self._own_keys.append(self._key("outcome"))
        limit = PART_BYTES if only is None else 0
        head = self._store.put(self._key("whole"), data, limit, self._own_keys)
        return self._settle(RoundOutcome(head, oldest))

    def _wait(self, label: str, deadline: float, allowed_s: float) -> Outcome:
        if self._peers is not None and not self._peers.knows_whom:
            self._peers.look(self._store, all_came=self._round > 0)  # while the store is there to be asked
        begun, is_known = time.monotonic(), False
        until = max(deadline, begun + _LAST_CALL_S)
        for _ in self._store.awaited(self._key("outcome"), until, _WATCH_GAP_S):
            if (gone := self._watch(label)) is not None:
                return gone
            if not is_known and time.monotonic() - begun >= min(_HERE_S, allowed_s / 2):
                is_known = self._say_here()
        if self._store.arrived is None and not is_known:
            self._say_here()
        arrived = self._store.arrived
        return self._read() or self._overdue(label, allowed_s) if arrived is None else decode_outcome(arrived)

    def _say_here(self) -> bool:
        """Record that this rank has posted and waits. A rank that posted without this record hangs,
        or died before it waited. It may be the one that should close a log, which nothing else
        would reveal."""
        group, slot = divmod(self._rank, FAN)
        log = self._key(f"here/{group}")
        self._store.append(log, slot, b"")
        self._own_keys += self._store.keys_of(log, [slot])
        return True

    def _silent(self) -> list[int]:
        """Return the ranks that have not recorded that they wait, although they had enough time."""
        until = time.monotonic() + _HERE_S + 2 * _WATCH_GAP_S
        for _ in self._store.awaited(self._key("outcome"), until, _WATCH_GAP_S):
            pass
        heard = self._in_logs("here")
        return [rank for rank in self._ranks if rank not in heard]

    def _in_logs(self, name: str) -> set[int]:
        """The ranks that have an entry in the logs of this name."""
        return {
            self._ranks[group * FAN + slot]
            for group, size in enumerate(_levels(len(self._ranks))[0])
            for slot in self._store.entries(self._key(f"{name}/{group}"), range(size))
        }

    def _watch(self, label: str) -> Outcome | None:
        """End the session if the watched rank died before there was an outcome. Even a rank that
        has posted may be the one that should have closed a log."""
        now = time.monotonic()
        if self._peers is None or now < self._next_watch:
            return None
        self._next_watch = now + _WATCH_GAP_S
        gone: Gone | None = self._peers.look(self._store, all_came=self._round > 0)
        if gone is None:
            return None
        rank = self._ranks[gone.place]
        why = f"it exited or was killed at or before {label}. Check its log, and the system log for out-of-memory kills"
        why += self._missed  # which may be why that rank ended
        return self._settle(Failure("error", rank, f"rank {rank} ({gone.where}) is gone: {why}", [rank]))

    def _diverged(self, entries: Mapping[int, LogEntry], span: int, group: int) -> Failure:
        """`span`: the number of ranks in each entry."""
        said: dict[str, list[int]] = {}
        for slot, entry in entries.items():
            first = (group * FAN + slot) * span
            said.setdefault(entry.label, []).extend(self._ranks[first : first + span])
        words = "; ".join(f"{label}: {format_ranks(ranks)}" for label, ranks in said.items())
        return Failure("diverged", -1, f"the ranks make different calls at the same time: {words}")

    def _overdue(self, label: str, allowed_s: float) -> Outcome:
        """At the deadline, let one rank find out for all which ranks are missing."""
        if self._store.add(self._key("overdue"), 1) > 1:
            until = time.monotonic() + _VERDICT_S + _HERE_S
            for _ in self._store.awaited(self._key("outcome"), until, _VERDICT_S):
                pass
            if (outcome := self._read()) is not None:
                return outcome
        self._own_keys.append(self._key("overdue"))
        arrived = self._in_logs("log/0")
        missing = [rank for rank in self._ranks if rank not in arrived]
        where = f"{label} within {allowed_s:g} s"
        if not missing:
            silent = self._silent()
            if (outcome := self._read()) is not None:  # a slow rank has closed the round
                return outcome
            why = f"all ranks reached {where}, but {format_ranks(silent)} did not start to wait for the others: check "
            why += "what hangs there, or whether a process died"
            return self._settle(Failure("deadline", silent[0] if silent else -1, why, silent))
        return self._settle(
            Failure(
                "deadline",
                missing[0],
                f"{format_ranks(missing)} did not reach {where}; waiting there: {format_ranks(arrived)}. All ranks "
                f"must make this call: check where the missing ones hang or died{self._missed}",
                missing,
            )
        )

    # --- the store ---

    def _key(self, name: str) -> str:
        return f"{self.session}/{self._round}/{name}"

    def _read(self) -> Outcome | None:
        packed = self._store.peek(self._key("outcome"))
        return None if packed is None else decode_outcome(packed)

    def _settle(self, outcome: Outcome) -> Outcome:
        """Write the outcome of this round unless there is one. Return the outcome that counts."""
        return decode_outcome(self._store.settle(self._key("outcome"), msgspec.msgpack.encode(outcome)))

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Note the loss of the store as the end of the session for this rank."""
        try:
            yield
        except RankFailedError as error:
            if self.failure is None:
                self.failure = Failure("error", error.rank, str(error))
            raise


def _levels(count: int) -> list[list[int]]:
    """Return the number of writers of a log at each level, from the ranks to the top."""
    levels = []
    while True:
        full, rest = divmod(count, FAN)
        levels.append([FAN] * full + [rest] * bool(rest))
        if len(levels[-1]) == 1:
            return levels
        count = len(levels[-1])
