"""Objects in this process's memory, for tests and for checkpoints that live only until the next one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

from reshard.storage.base import Storage, Writer, check_name, check_range, exists_already, not_found

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryStorage(Storage):
    """A folder in memory. Two instances share nothing, but each `memory://NAME` is shared in the
    process.

    Args:
        name: for messages.
        within: the parent folder, in which this folder has the name `name`.
    """

    max_gap_bytes = 0
    requests = 1

    def __init__(self, name: str = "", *, within: MemoryStorage | None = None) -> None:
        self.url = f"memory://{name}"
        self._folder = f"{name}/" if within and name else ""
        self._objects: dict[str, bytes] = within._objects if within else {}
        self._lock: threading.Lock = within._lock if within else threading.Lock()

    def list(self, prefix: str = "") -> dict[str, int]:
        start, prefix = len(self._folder), self._folder + prefix
        with self._lock:
            found = {name[start:]: len(data) for name, data in self._objects.items() if name.startswith(prefix)}
        return dict(sorted(found.items()))

    def versions(self, prefix: str = "") -> Mapping[str, object]:
        return {name: xxhash.xxh3_128_hexdigest(self._get(name)) for name in self.list(prefix)}

    def size(self, name: str) -> int:
        return len(self._get(name))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        data = self._get(name)
        check_range(self, name, start, buffer.nbytes, len(data))
        if buffer.nbytes:
            buffer.cast("B")[:] = memoryview(data)[start : start + buffer.nbytes]

    def mapped(self, name: str) -> memoryview | None:
        return memoryview(self._get(name))

    def create(self, name: str) -> Writer:
        with self._lock:
            self._refuse_existing(check_name(name, self.url))
        return _MemoryWriter(self, name)

    def publish(self, name: str, data: Buffer) -> None:
        check_name(name, self.url)
        with self._lock:
            self._objects[self._folder + name] = bytes(data)

    def link(self, name: str, other: str) -> bool:
        data = self._get(name)
        with self._lock:
            self._objects[self._folder + check_name(other, self.url)] = data
        return True

    def delete(self, name: str) -> None:
        check_name(name, self.url)
        with self._lock:
            self._objects.pop(self._folder + name, None)

    def _add(self, name: str, data: bytes) -> None:
        with self._lock:
            self._refuse_existing(name)
            self._objects[self._folder + name] = data

    def _refuse_existing(self, name: str) -> None:
        if self._folder + name in self._objects:
            raise exists_already(name, self.url)

    def _get(self, name: str) -> bytes:
        check_name(name, self.url)
        with self._lock:
            data = self._objects.get(self._folder + name)
        if data is None:
            raise not_found(name, self.url)
        return data


class _MemoryWriter(Writer):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._buffer = bytearray()

    def _write(self, data: memoryview) -> None:
        self._buffer += data

    def _commit(self) -> None:
        self._storage._add(self._name, bytes(self._buffer))
        self._buffer.clear()

    def _abort(self) -> None:
        self._buffer.clear()
