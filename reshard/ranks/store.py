"""The key-value store of a process group: access to torch's, a client of it, and what ranks write in it."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from reshard.errors import DeadlineError, RankFailedError, ReshardError
from reshard.ranks.liveness import PeerWatch

# `ProcessGroup.get_group_store` is there in newer releases of torch and undocumented;
# older ones (2.6 on) have only
# `torch.distributed.distributed_c10d._get_process_group_store`. Opening a store of our
# own instead would need an address that every rank can reach, which only the existing
# store is known to have.


T = TypeVar("T")


class SharedStore:
    """A store that all ranks of a group share, under its own prefix and, if possible, over its own
    clients. A client serves one call at a time, and a background save must not delay the training
    loop's next `new_group`, or another save. Usually, one client is enough.

    Attributes:
        peers: this process's place among those that watch over one another.
        stale_keys: keys that this rank deletes once no rank needs them.

    Args:
        until: on the monotonic clock: see `StoreClient`.
        ranks: those of the group that share it, if not all do.

    Raises ReshardError if the group has no store that answers, as a fake process group;
    RankFailedError if its host says nothing.
    """

    def __init__(self, process_group: dist.ProcessGroup, until: float, ranks: Sequence[int] = ()) -> None:
        self._store = _raw_store(process_group)
        self._prefix = f"reshard/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}" if ranks else "reshard"
        self._client: Callable[[], Any] | None = None
        self._idle: list[StoreClient] = []
        client = self.lend(until)
        self.peers = PeerWatch(client, ranks.index(dist.get_rank()) if ranks else dist.get_rank(process_group))
        self.stale_keys = StaleKeys()
        self.give_back(client)

    def lend(self, until: float) -> StoreClient:
        """Return a client that no other caller uses until it is given back."""
        try:
            client = self._idle.pop()
        except IndexError:
            server = _server_of(self._store)
            where = "" if server is None else f" at {server.host}:{server.port}"
            try:
                store = Worker().call(until, GRACE_S, self._open)
            except TimeoutError as error:
                raise RankFailedError(_SILENT.format(where, error), rank=0) from None
            except (RuntimeError, NotImplementedError) as error:
                raise ReshardError(
                    f"ranks cannot communicate: the store of this process group ({type(self._store).__name__}) does "
                    "not answer; a fake process group can describe layouts, but cannot save or load with more than one "
                    "rank"
                ) from error
            client = StoreClient(store, self._open, where)
        client.limit = until, GRACE_S
        return client

    def give_back(self, client: StoreClient) -> None:
        """Take a client back. It is lent again only if the store has answered every request,
        including abandoned ones."""
        if client.worker.is_idle and client.second.is_idle and not client.silent_for:
            self._idle.append(client)

    def _open(self) -> KeyValueStore:
        self._client = self._client or _client_of(self._store)
        prefixed: Any = PrefixStore(self._prefix, self._client())
        if prefixed.check(["probe"]):  # which no rank ever sets
            raise RuntimeError("it returned a key that was never stored")
        return cast(KeyValueStore, prefixed)


_stores: WeakKeyDictionary[Any, dict[tuple[int, ...], SharedStore]] = WeakKeyDictionary()
_lock = threading.Lock()


def store_of(process_group: dist.ProcessGroup, until: float, ranks: tuple[int, ...] = ()) -> SharedStore:
    """The store of a process group: the same for every session of this process. Args and errors:
    see `SharedStore`."""
    with _lock:
        known = _stores.setdefault(process_group, {})
        if ranks not in known:
            known[ranks] = SharedStore(process_group, until, ranks)
        return known[ranks]


def _raw_store(process_group: dist.ProcessGroup) -> Any:
    find = getattr(process_group, "get_group_store", None)
    if find is not None:
        return find()
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(process_group)


def _client_of(store: Any) -> Callable[[], Any]:
    """Return a function that opens another client of a store. It returns the same one if that
    serves any number of threads."""
    if hasattr(store, "clone"):
        return cast(Callable[[], Any], store.clone)
    # older releases of torch cannot clone: 2.6, for one
    server = _server_of(store)
    if server is None:
        return lambda: store
    # nor do they expose prefixes, which separate groups and restarts: a key known only behind
    # them replaces it
    name = bytes(store.compare_set("reshard", "", uuid.uuid4().hex)).decode()
    host, port, patience = server.host, server.port, server.timeout
    return lambda: PrefixStore(name, type(server)(host, port, timeout=patience, wait_for_workers=False))


def _server_of(store: Any) -> Any:
    """The TCPStore behind prefixes; None if it is another one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, and not exported by name
    return store if isinstance(store, tcp) else None


# A client of the key-value store of a process group: questions, values of any size, logs, and waiting
# without asking.
#
# A store's client serves one call at a time, and a wait is one call however long it takes. So what
# has to be sent meanwhile (mostly an error) goes through a second client. There is no polling: the
# store answers a waiting client when the key is set.
#
# Each client has a thread that asks, while the caller looks about. Torch's client cannot be
# interrupted, and has no limit of its own: if the host of the store is disconnected or frozen, it blocks
# in the kernel. The caller leaves it there.


Answer = tuple[Any, Exception | None]
"""What a call returned, or the error that it raised."""


class Worker:
    """A thread for calls that may block forever, one after another. It ends with this object, or
    with the process."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending: SimpleQueue[Answer] | None = None
        """The queue for the answer of the latest call, until the answer is taken."""

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress, including abandoned calls."""
        return self.pending is None or not self.pending.empty()

    def begin(self, call: Callable[..., Any], *args: Any) -> SimpleQueue[Answer]:
        """Start a call. Raises RuntimeError if the system allows no more threads."""
        if self._thread is None or not self._thread.is_alive():  # a fork has none
            self._asked = SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._asked,), name="reshard-wait", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._asked.put, None)
        self.pending = SimpleQueue()
        self._asked.put((self.pending, call, args))
        return self.pending

    def call(self, until: float, grace_s: float, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of the call. Raises TimeoutError if there is none `grace_s` seconds
        after `until`, on the monotonic clock. These seconds do not pass while this process itself
        is stopped."""
        begun = time.monotonic()
        try:
            pending = self.begin(call, *args)
        except RuntimeError:
            return call(*args)
        for seconds in (min(max(0.0, until - begun), _MAX_WAIT_S), *[_SLICE_S] * int(grace_s / _SLICE_S)):
            with suppress(Empty):
                value, error = pending.get(timeout=seconds)
                self.pending = None
                if error is None:
                    return value
                try:
                    raise error
                finally:
                    del error
        raise TimeoutError(f"{time.monotonic() - begun:.0f} s")


def _serve(asked: SimpleQueue[tuple[Any, ...] | None]) -> None:
    while (question := asked.get()) is not None:
        pending, call, args = question
        try:
            pending.put((call(*args), None))
        except Exception as error:
            pending.put((None, error))
        del question, pending, call, args


PART_BYTES = 4 << 20
"""Values are stored in parts of this size: the server of torch's TCPStore refuses values over 8 MiB."""
_ABSENT = b"?"
"""A value that no rank stores."""
_NAP_S = 0.01
_MAX_WAIT_S = 1_728_000.0
"""Longer waits would overflow: torch counts milliseconds in 32 bits."""
_INLINE, _PARTS = b"\0", b"\1"
GRACE_S, _SLICE_S = 6.0, 0.5
"""Time that the store may take to answer after the deadline of a call."""
_SILENT = (
    "the store of the process group{} has not answered for {}: its host, or the network to it, is down or frozen. "
    "This rank cannot communicate with the others: restart the job"
)


class KeyValueStore(Protocol):
    """What is used of a `torch.distributed` store: TCPStore, FileStore, HashStore, PrefixStore over
    any of them.

    Keys are text and values bytes. `add` and `compare_set` (which writes only if the value is the
    expected one, or the key is absent and "" expected, and gives the value that stands, or what was
    expected if there is none) are atomic; so is `append` where `has_extended_api` says so.
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
        reopen: makes a second one, for calls while the first one waits; default: the same one
            serves both.
        address: where it is, for messages.

    Attributes:
        limit: when the call that asks must be over, on the monotonic clock, and how many seconds
            more a question waits.
        arrived: see `awaited`.
        worker, second: ask by the first client, and by the second.

    All methods raise RankFailedError if the store is gone, or does not answer; then all later ones
    do so at once.
    """

    def __init__(
        self, store: KeyValueStore, reopen: Callable[[], KeyValueStore] | None = None, address: str = ""
    ) -> None:
        self.store, self.limit = store, (0.0, GRACE_S)
        self.arrived: bytes | None = None
        self._reopen = reopen or (lambda: store)
        self._spare: KeyValueStore | None = None
        self._address, self.silent_for = address, ""
        self.worker, self.second = Worker(), Worker()
        self._appends = store.has_extended_api()

    def awaited(self, key: str, until: float, gap_s: float) -> Iterator[None]:
        """Wait until the key exists, with its value in `arrived`, or until the monotonic clock
        reaches `until`. Yields every `gap_s` seconds meanwhile."""
        self.arrived = None
        while (left := until - time.monotonic()) > 0.0:
            try:
                pending = self.worker.begin(_arrival, self.store, key, timedelta(seconds=min(left, _MAX_WAIT_S)))
            except RuntimeError:  # no more threads are allowed here: ask now and then
                time.sleep(_NAP_S)
                self.arrived = self.peek(key)
                if self.arrived is not None:
                    return
                yield
                continue
            ended: Answer | None = None
            while ended is None:
                with suppress(Empty):
                    ended = pending.get(timeout=max(_NAP_S, min(gap_s, until - time.monotonic())))
                if ended is None:
                    if time.monotonic() >= until + gap_s:
                        return
                    yield
            self.worker.pending = None
            if ended[1] is not None:  # the time is up, or the store is gone: the next question shows which
                return
            self.arrived = ended[0]
            if self.arrived is not None:
                return
            time.sleep(_NAP_S)  # the server wakes ranks that wait for a key also when one only compares it

    def peek(self, key: str) -> bytes | None:
        """Return the value, or None."""
        # comparing a missing key would wake the processes that wait for it
        return self._ask(lambda store: _value(store, key) if store.check([key]) else None)

    def settle(self, key: str, value: bytes) -> bytes:
        """Store the value unless there is one. Return the stored value."""
        return self._ask(lambda store: bytes(store.compare_set(key, "", value)))

    def add(self, key: str, value: int) -> int:
        """Add to a number, and return the result."""
        return self._ask(lambda store: store.add(key, value))

    def set(self, key: str, value: bytes) -> None:
        """Store the value."""
        self._ask(lambda store: store.set(key, value))

    def delete(self, keys: Collection[str]) -> None:
        """Remove values that no rank will request."""
        if keys:
            self._ask(lambda store: [store.delete_key(key) for key in keys])

    def append(self, log: str, place: int, entry: bytes, count: str = "") -> int:
        """Append an entry to a log. Return the number after adding 1 to `count`, if given."""
        packed = msgspec.msgpack.encode((place, entry))
        packed = struct.pack("<I", len(packed)) + packed

        def post(store: KeyValueStore) -> int:
            if self._appends:
                store.append(log, packed)
            else:
                store.set(f"{log}/{place}", entry)
            return store.add(count, 1) if count else 0

        return self._ask(post)

    def entries(self, log: str, places: Iterable[int]) -> dict[int, bytes]:
        """Return the entries of a log by place, in order. `places`: the places that may have entries."""
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
        """Return the keys of a log, to delete it."""
        return [log] if self._appends else [f"{log}/{place}" for place in places]

    def put(self, name: str, data: bytes, limit: int, keys: list[str]) -> bytes:
        """Store the data, and return a few bytes with which `fetch` finds it. Adds stored keys to
        `keys`. Up to `limit` bytes, nothing is stored."""
        if len(data) <= limit:
            return _INLINE + data
        parts = range(0, len(data), PART_BYTES)
        for i, start in enumerate(parts):
            keys.append(f"{name}/{i}")
            self.set(keys[-1], _PARTS + data[start : start + PART_BYTES])  # none is `_ABSENT`
        return _PARTS + msgspec.msgpack.encode((name, len(parts)))

    def fetch(self, head: bytes) -> bytes:
        """Return the data for a result of `put`."""
        if head[:1] == _INLINE:
            return head[1:]
        name, count = msgspec.msgpack.decode(head[1:], type=tuple[str, int])
        parts = [self.peek(f"{name}/{i}") for i in range(count)]
        if None in parts:  # only where the ranks have given up, and one of them has gone on to the next save or load
            raise RankFailedError(
                "a message of another rank was removed, because the ranks have ended the call", rank=-1
            )
        return b"".join(part[1:] for part in parts if part is not None)

    def _ask(self, ask: Callable[[KeyValueStore], T]) -> T:
        """Return the result of `ask`, which gets a client, and runs on a worker."""
        try:
            if not self.silent_for:
                if self.worker.is_idle:
                    return cast(T, self.worker.call(*self.limit, ask, self.store))
                return cast(T, self.second.call(*self.limit, self._ask_spare, ask))
        except TimeoutError as error:
            self.silent_for = str(error)
        except RuntimeError as error:  # torch raises DistNetworkError, DistStoreError or the bare class
            raise RankFailedError(
                "the store of the process group is gone: the process that hosts it, usually rank 0, has probably "
                f"exited. Look at its log first ({str(error).splitlines()[0][:200]})",
                rank=0,
            ) from error
        raise RankFailedError(_SILENT.format(self._address, self.silent_for), rank=0)

    def _ask_spare(self, ask: Callable[[KeyValueStore], T]) -> T:
        self._spare = self._spare or self._reopen()
        return ask(self._spare)


def _arrival(store: KeyValueStore, key: str, patience: timedelta) -> bytes | None:
    store.wait([key], patience)
    return _value(store, key)


def _value(store: KeyValueStore, key: str) -> bytes | None:
    # to compare gives the value without a wait on the way
    value = bytes(store.compare_set(key, _ABSENT.decode(), _ABSENT.decode()))
    return None if value == _ABSENT else value


# What the ranks of a session write down: what each posts, how a round ended, and which keys are to
# be removed.


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a session ended, in ranks of the default group: the first that failed (-1: none), and
    those that were missing."""

    kind: Literal["error", "deadline", "diverged"]
    rank: int
    message: str
    missing: list[int] = []
    traceback: str = ""

    def raise_(self) -> NoReturn:
        """Raise the error that every rank gets."""
        if self.kind == "deadline":
            raise DeadlineError(self.message)
        if self.kind == "error":
            raise RankFailedError(self.message, rank=self.rank, traceback=self.traceback)
        raise ReshardError(self.message)


class RoundOutcome(msgspec.Struct, frozen=True, tag=True):
    head: bytes
    """Reference to the combined answers of the ranks."""
    oldest: int
    """No rank is in a session before this one."""


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """What one rank, or the ranks of one log, posted to a log."""

    label: str
    head: bytes
    oldest: int


Outcome = Failure | RoundOutcome
decode_outcome: Callable[[bytes], Outcome] = msgspec.msgpack.Decoder(Failure | RoundOutcome).decode
"""Decodes the value under the key of an outcome."""


class StaleKeys:
    """Keys that this rank deletes when no rank is in their session anymore."""

    def __init__(self) -> None:
        self._keys: dict[int, list[str]] = {}
        self.live: set[int] = set()
        """The sessions that this rank is in."""

    def leave(self, session: int, keys: Iterable[str]) -> None:
        """Record that this rank has left the session, which has these keys."""
        self.live.discard(session)
        self._keys.setdefault(session, []).extend(keys)

    def take(self, oldest: int) -> list[str]:
        """Return the keys to delete if no rank is in a session before `oldest`."""
        return [key for session in sorted(self._keys) if session < oldest for key in self._keys.pop(session, ())]
