"""The key-value store of a process group: access to torch's, a client of it, and what ranks write in it."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NoReturn, Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from reshard.errors import DeadlineError, RankFailedError, ReshardError
from reshard.ranks.liveness import PeerWatch

__all__ = [
    "PART_BYTES", "Failure", "LogEntry", "Outcome", "RoundOutcome", "SharedStore", "StaleKeys",
    "StoreClient", "decode_outcome", "store_of",
]  # fmt: skip


# `ProcessGroup.get_group_store` is there in newer releases of torch and undocumented; older ones
# (2.6 on) have only `torch.distributed.distributed_c10d._get_process_group_store`. Opening a store
# of our own instead would need an address that every rank can reach, which only the existing store
# is known to have.


class SharedStore:
    """A store that all ranks of a group share, under a prefix of ours, over clients of its own where it can.

    Clients of its own matter: each serves one call at a time, and a background save must not keep the training loop's
    next `new_group` waiting, nor another save. Mostly there is one.

    Attributes:
        peers: this process's place among those that watch over one another.
        stale_keys: keys that this rank deletes once no rank needs them.

    Raises ReshardError if the group has no store that answers, as a fake process group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._store = _raw_store(process_group)
        with self._answering():
            self._client = _client_of(self._store)
        self._idle = [self._open()]
        self.peers = PeerWatch(self._idle[0], dist.get_rank(process_group))
        self.stale_keys = StaleKeys()

    def lend(self) -> StoreClient:
        """A client that no other caller has until it is given back."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self._open()
        return StoreClient(store, self._open if self._client is not None else None)

    def give_back(self, client: StoreClient) -> None:
        """It may be lent again."""
        if client.is_idle:
            self._idle.append(client.store)

    def _open(self) -> KeyValueStore:
        with self._answering():
            prefixed: Any = PrefixStore("reshard", self._store if self._client is None else self._client())
            if prefixed.check(["probe"]):  # which no rank ever sets
                raise RuntimeError("it returned a key that was never stored")
        return cast(KeyValueStore, prefixed)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            raise ReshardError(
                f"ranks cannot communicate: the store of this process group ({type(self._store).__name__}) does not "
                "answer; a fake process group can describe layouts, but cannot save or load with more than one rank"
            ) from error


_stores: WeakKeyDictionary[Any, SharedStore] = WeakKeyDictionary()
_lock = threading.Lock()


def store_of(process_group: dist.ProcessGroup) -> SharedStore:
    """The store of a process group: the same for every session of this process. Raises as `SharedStore`."""
    with _lock:
        known = _stores.get(process_group)
        if known is None:
            known = _stores[process_group] = SharedStore(process_group)
    return known


def _raw_store(process_group: dist.ProcessGroup) -> Any:
    find = getattr(process_group, "get_group_store", None)
    if find is not None:
        return find()
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(process_group)


def _client_of(store: Any) -> Callable[[], Any] | None:
    """What opens another client of a store; None where one serves any number of threads."""
    if hasattr(store, "clone"):
        return cast(Callable[[], Any], store.clone)
    # older releases of torch cannot clone: 2.6, for one
    server: Any = store
    while isinstance(server, PrefixStore):
        server = server.underlying_store
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, and not exported by name
    if not isinstance(server, tcp):
        return None
    # nor does it expose prefixes, which separate groups and restarts: a key known only behind them replaces it
    name = bytes(store.compare_set("reshard", "", uuid.uuid4().hex)).decode()
    host, port, patience = server.host, server.port, server.timeout
    return lambda: PrefixStore(name, tcp(host, port, timeout=patience, wait_for_workers=False))


# A client of the key-value store of a process group: questions, values of any size, logs, and waiting
# without asking.
#
# A store's client serves one call at a time, and a wait is one call however long it takes. So it is
# a thread that waits, while the caller looks about, and what has to be said meanwhile (an error,
# mostly) goes through a second client. There is no polling: the store answers those who
# wait when there is something to report.


PART_BYTES = 4 << 20
"""Values are stored in parts of this size: the server of torch's TCPStore refuses values over 8 MiB."""
_ABSENT = b"?"
"""No rank stores this."""
_NAP_S = 0.01
_MAX_WAIT_S = 86_400.0 * 20
"""Longer waits are not what torch takes them for: it counts milliseconds in 32 bits."""
_INLINE, _PARTS = b"\0", b"\1"


class KeyValueStore(Protocol):
    """What is used of a `torch.distributed` store: TCPStore, FileStore, HashStore, PrefixStore over any of them.

    Keys are text and values bytes. `add` and `compare_set` (which writes only if the value is the expected one, or the
    key is absent and "" expected, and gives the value that stands, or what was expected if there is none) are atomic;
    so is `append` where `has_extended_api` says so.
    """

    def set(self, key: str, value: Any, /) -> None: ...
    def add(self, key: str, value: int, /) -> int: ...
    def append(self, key: str, value: Any, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def has_extended_api(self) -> bool: ...


class StoreClient:
    """One rank's way to the store, for one thread at a time.

    Args:
        store: a client that no other caller uses meanwhile.
        reopen: makes a second one, for requests while the first one waits; None if one serves many threads.

    All methods raise RankFailedError if the store is gone.
    """

    def __init__(self, store: KeyValueStore, reopen: Callable[[], KeyValueStore] | None = None) -> None:
        self.store = store
        self._reopen = reopen
        self._spare: KeyValueStore | None = None
        self.arrived: bytes | None = None
        self._over: threading.Event | None = None
        self._found = ""
        self._appends = store.has_extended_api()

    @property
    def is_idle(self) -> bool:
        """Whether no wait is in progress, not even an abandoned one."""
        return self._over is None or self._over.is_set()

    def awaited(self, key: str, until: float, gap_s: float) -> Iterator[None]:
        """Ends when the key is there, its value in `arrived`, or, on the monotonic clock, it is `until`; yields every
        `gap_s` seconds before."""
        self.arrived = None
        while (left := until - time.monotonic()) > 0.0:
            over = threading.Event()
            waiter = threading.Thread(target=self._wait, args=(key, left, over), name="reshard-wait", daemon=True)
            try:
                waiter.start()
            except RuntimeError:  # no more threads are allowed here: ask now and then
                time.sleep(_NAP_S)
                if (value := self.peek(key)) is not None:
                    self.arrived = value
                    return
                yield
                continue
            self._over = over
            while not over.wait(max(_NAP_S, min(gap_s, until - time.monotonic()))):
                if time.monotonic() >= until + gap_s:
                    return
                yield
            self.arrived = self.peek(key) if self._found == key else None
            if self._found != key or self.arrived is not None:
                return
            time.sleep(_NAP_S)  # the server wakes ranks that wait for a key also when one only compares it

    def _wait(self, key: str, seconds: float, over: threading.Event) -> None:
        # the time is over, or the store gone: the next request will show which
        with contextlib.suppress(RuntimeError):
            self.store.wait([key], timedelta(seconds=min(seconds, _MAX_WAIT_S)))
            self._found = key
        over.set()

    def peek(self, key: str) -> bytes | None:
        """The value, None if there is none."""
        # to compare gives the value without a wait on the way; but to compare what is not there wakes who waits for it
        if key != self._found and not self._call("check", [key]):
            return None
        value = bytes(self._call("compare_set", key, _ABSENT.decode(), _ABSENT.decode()))
        return None if value == _ABSENT else value

    def settle(self, key: str, value: bytes) -> bytes:
        """Store the value unless there is one; the one that stands."""
        return bytes(self._call("compare_set", key, "", value))

    def add(self, key: str, value: int) -> int:
        """The number after adding to it."""
        return int(self._call("add", key, value))

    def set(self, key: str, value: bytes) -> None:
        """Store the value."""
        self._call("set", key, value)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove values that no rank will ask for."""
        for key in keys:
            self._call("delete_key", key)

    def append(self, log: str, place: int, entry: bytes) -> None:
        """Add an entry to a log."""
        if self._appends:
            packed = msgspec.msgpack.encode((place, entry))
            self._call("append", log, struct.pack("<I", len(packed)) + packed)
        else:
            self.set(f"{log}/{place}", entry)

    def entries(self, log: str, places: Iterable[int]) -> dict[int, bytes]:
        """Those of a log, by place, in order. `places`: who may have made any."""
        if not self._appends:
            found = {place: self.peek(f"{log}/{place}") for place in places}
            return {place: entry for place, entry in found.items() if entry is not None}
        whole, start, rows = self.peek(log) or b"", 0, []
        while start < len(whole):
            (length,) = struct.unpack_from("<I", whole, start)
            rows.append(msgspec.msgpack.decode(whole[start + 4 : start + 4 + length], type=tuple[int, bytes]))
            start += 4 + length
        return dict(sorted(rows))

    def keys_of(self, log: str, places: Iterable[int]) -> list[str]:
        """Under which keys a log is, to delete it."""
        return [log] if self._appends else [f"{log}/{place}" for place in places]

    def put(self, name: str, data: bytes, limit: int) -> tuple[bytes, list[str]]:
        """A few bytes that stand for the data, by `fetch`, and the keys that were stored for it: none up to `limit`."""
        if len(data) <= limit:
            return _INLINE + data, []
        keys = [f"{name}/{i}" for i in range(-(-len(data) // PART_BYTES))]
        for i, key in enumerate(keys):
            self.set(key, data[i * PART_BYTES : (i + 1) * PART_BYTES])
        return _PARTS + msgspec.msgpack.encode((name, len(keys))), keys

    def fetch(self, head: bytes) -> bytes:
        """The data for what `put` gave."""
        if head[:1] == _INLINE:
            return head[1:]
        name, count = msgspec.msgpack.decode(head[1:], type=tuple[str, int])
        parts = [self.peek(f"{name}/{i}") for i in range(count)]
        if None in parts:  # only where the ranks have given up, and one of them has gone on to the next save or load
            raise RankFailedError(
                "a message of another rank was removed, because the ranks have ended the call", rank=-1
            )
        return b"".join(part for part in parts if part is not None)

    def _call(self, name: str, *args: Any) -> Any:
        store = self.store
        if not self.is_idle and self._reopen is not None:
            store = self._spare = self._spare or self._reopen()
        try:
            return getattr(store, name)(*args)
        except RuntimeError as error:  # torch raises DistNetworkError, DistStoreError or the bare class
            raise RankFailedError(
                "the store of the process group is gone: the process that hosts it, usually rank 0, has probably "
                f"exited. Look at its log first ({str(error).splitlines()[0][:200]})",
                rank=0,
            ) from error


# What the ranks of a session write down: what each posts, how a round ended, and which keys are to
# be removed.


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a session ended, in ranks of the default group: which failed first (-1: none), which were missed."""

    kind: Literal["error", "deadline", "diverged"]
    rank: int
    message: str
    missing: list[int] = []
    traceback: str = ""

    def raise_(self) -> NoReturn:
        """Raise it as the error that every rank gets."""
        if self.kind == "deadline":
            raise DeadlineError(self.message)
        if self.kind == "error":
            raise RankFailedError(self.message, rank=self.rank, traceback=self.traceback)
        raise ReshardError(self.message)


class RoundOutcome(msgspec.Struct, frozen=True, tag=True):
    head: bytes
    """Stands for what the ranks' answers were combined to."""
    oldest: int
    """No rank is in a session before this one."""


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """What one rank, or those of one log, have posted to a log."""

    label: str
    head: bytes
    oldest: int


Outcome = Failure | RoundOutcome
decode_outcome: Callable[[bytes], Outcome] = msgspec.msgpack.Decoder(Failure | RoundOutcome).decode
"""What stands under the key of an outcome."""


class StaleKeys:
    """Keys that this rank deletes as soon as no rank is in their session any more."""

    def __init__(self) -> None:
        self._keys: dict[int, list[str]] = {}
        self._live: set[int] = set()

    def enter(self, session: int) -> None:
        """This rank is in the session."""
        self._live.add(session)

    def leave(self, session: int, keys: Iterable[str]) -> None:
        """This rank is in it no more, and has left these keys."""
        self._live.discard(session)
        self._keys.setdefault(session, []).extend(keys)

    def oldest(self) -> int:
        """The first session that this rank is in."""
        return min(self._live, default=0)

    def take(self, oldest: int) -> list[str]:
        """What may be deleted where no rank is in a session before `oldest`."""
        return [key for session in sorted(self._keys) if session < oldest for key in self._keys.pop(session)]
