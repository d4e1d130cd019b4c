"""The writer of an object store: from many small writes to one conditional put or to a multipart upload."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Protocol

from reshard.errors import StorageError
from reshard.storage.base import Writer

__all__ = ["ObjectWriter", "UploadTarget"]

_MAX_PARTS = 10_000
"""Of one multipart upload; the limit of S3, the lowest of them."""


class UploadTarget(Protocol):
    """The store that an object is written to."""

    url: str
    part_bytes: int

    def put_new(self, name: str, data: bytes) -> None:
        """Store a whole object on condition that there is none of this name."""

    def put_parts(self, name: str, parts: Iterator[bytes]) -> None:
        """Store an object in parts while the iterator yields them; if it raises, the upload is aborted."""

    def size(self, name: str) -> int:
        """Bytes of a stored object."""


class _Abandoned(Exception):
    """Ends the stream of parts, whereupon the upload is aborted."""


class ObjectWriter(Writer):
    """Hands parts to a thread that uploads them; a caller who is faster than the network waits in `write`.

        write ──► gathered to one part ──► queue of one ──► thread: multipart upload, several parts in flight

    An object of less than one part is put whole, on condition that there is none of its name.
    """

    def __init__(self, store: UploadTarget, name: str) -> None:
        self._store = store
        self._name = name
        self._gathered = bytearray()
        self._parts: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._abandon = threading.Event()
        self._error: BaseException | None = None

    def _write(self, data: memoryview) -> None:
        part_bytes = self._store.part_bytes
        if self.nbytes + data.nbytes > part_bytes * _MAX_PARTS:
            raise StorageError(
                f"cannot write {self._name} in {self._store.url}: an object holds at most {_MAX_PARTS} parts of "
                f"{part_bytes} bytes; write several, or make ObjectStorage with a larger part_bytes"
            )
        while data:
            taken = data[: part_bytes - len(self._gathered)]
            self._gathered += taken
            data = data[taken.nbytes :]
            if len(self._gathered) == part_bytes:
                self._send(bytes(self._gathered))
                self._gathered.clear()

    def _commit(self) -> None:
        if self._thread is None:
            self._store.put_new(self._name, bytes(self._gathered))
            return
        if self._gathered:
            self._send(bytes(self._gathered))
        self._send(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        stored = self._store.size(self._name)
        if stored != self.nbytes:
            raise StorageError(
                f"{self._name} in {self._store.url} has {stored} bytes after {self.nbytes} were written: "
                "somebody else wrote it at the same time, or the storage lost some"
            )

    def _abort(self) -> None:
        self._gathered.clear()
        self._abandon.set()
        if self._thread is not None:
            self._thread.join()

    def _send(self, part: bytes | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name=f"upload {self._name}", daemon=True)
            self._thread.start()
        while not self._over.is_set():
            try:
                self._parts.put(part, timeout=0.1)
                break
            except queue.Full:
                continue
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        try:
            self._store.put_parts(self._name, self._stream())
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _stream(self) -> Iterator[bytes]:
        while True:
            if self._abandon.is_set():
                raise _Abandoned
            try:
                part = self._parts.get(timeout=0.1)
            except queue.Empty:
                continue
            if part is None:
                return
            yield part
