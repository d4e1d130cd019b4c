"""Border module: the key-value store of a process group, the one thing about it that torch has no stable public way to.

`ProcessGroup.get_group_store` is there in newer releases of torch and undocumented; older ones (2.6 on) have only
`torch.distributed.distributed_c10d._get_process_group_store`. Opening a store of our own instead would need an
address that every rank can reach, which only the existing store is known to have.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from reshard.control.line import KeyValueStore, Line
from reshard.control.liveness import Ring
from reshard.control.session import Litter
from reshard.errors import ReshardError

__all__ = ["SharedStore", "store_of"]


class SharedStore:
    """A store that all ranks of a group share, under a prefix of ours, over clients of its own where it can.

    Clients of its own matter: each serves one call at a time, and a background save must not keep the training loop's
    next `new_group` waiting, nor another save. Mostly there is one.

    Attributes:
        ring: this process's place among those that watch over one another.
        litter: keys that this rank deletes once no rank needs them.

    Raises ReshardError if the group has no store that answers, as a fake process group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._store = _raw_store(process_group)
        with self._answering():
            self._client = _client_of(self._store)
        self._idle = [self._open()]
        self.ring = Ring(self._idle[0], dist.get_rank(process_group))
        self.litter = Litter()

    def lend(self) -> Line:
        """A line that nobody else has until it is given back."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self._open()
        return Line(store, self._open if self._client is not None else None)

    def give_back(self, line: Line) -> None:
        """The line may be lent again."""
        if line.is_idle:
            self._idle.append(line.store)

    def _open(self) -> KeyValueStore:
        with self._answering():
            prefixed: Any = PrefixStore("reshard", self._store if self._client is None else self._client())
            if prefixed.check(["probe"]):  # which nobody ever sets
                raise RuntimeError("it has what nobody has stored")
        return cast(KeyValueStore, prefixed)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            raise ReshardError(
                f"ranks cannot talk to each other: the store of this process group ({type(self._store).__name__}) does "
                "not answer; a fake process group can describe layouts, but cannot save or load with more than one rank"
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
    # nor do they tell prefixes, which keep groups and restarts apart: one that is known only behind them stands in
    name = bytes(store.compare_set("reshard", "", uuid.uuid4().hex)).decode()
    host, port, patience = server.host, server.port, server.timeout
    return lambda: PrefixStore(name, tcp(host, port, timeout=patience, wait_for_workers=False))
