"""Border module: the key-value store of a process group, the one thing about it that torch has no stable public way to.

`ProcessGroup.get_group_store` is there in newer releases of torch and undocumented; older ones (2.6 on) have only
`torch.distributed.distributed_c10d._get_process_group_store`. Opening a store of our own instead would need an
address that every rank can reach, which only the existing store is known to have.
"""

from __future__ import annotations

import threading
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from reshard.control.liveness import Ring
from reshard.control.store_rounds import KeyValueStore
from reshard.errors import ReshardError

__all__ = ["store_of"]

_stores: WeakKeyDictionary[Any, tuple[KeyValueStore, Ring]] = WeakKeyDictionary()
_lock = threading.Lock()


def store_of(process_group: dist.ProcessGroup) -> tuple[KeyValueStore, Ring]:
    """A store that all ranks of this group share, under a prefix of ours, over a connection of its own where it can.

    Its own connection matters: a store's client serves one call at a time, and a background save must not keep the
    training loop's next `new_group` waiting. With it comes this process's place in the ring that watches over ranks.

    Raises:
        ReshardError: the group has none that works, as a fake process group.
    """
    with _lock:
        known = _stores.get(process_group)
        if known is None:
            store = _open(process_group)
            known = _stores[process_group] = store, Ring(store, dist.get_rank(process_group))
    return known


def _open(process_group: dist.ProcessGroup) -> KeyValueStore:
    find = getattr(process_group, "get_group_store", None)
    if find is None:
        from torch.distributed.distributed_c10d import _get_process_group_store

        store = _get_process_group_store(process_group)
    else:
        store = find()
    try:
        prefixed: Any = PrefixStore("reshard", store.clone() if hasattr(store, "clone") else store)
        prefixed.check(["probe"])
    except (RuntimeError, NotImplementedError) as error:
        raise ReshardError(
            f"ranks cannot talk to each other: the store of this process group ({type(store).__name__}) does not "
            "answer; a fake process group can describe layouts, but cannot save or load with more than one rank"
        ) from error
    return cast(KeyValueStore, prefixed)
