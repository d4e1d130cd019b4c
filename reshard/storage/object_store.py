"""Object stores (S3, Google Cloud, Azure) through obstore, an optional package."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError, framework
from reshard.storage.base import Storage, Writer, check_name, check_range, exists_already, not_found

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Objects are written atomically: a small one by a conditional put, a large one by completing its
# multipart upload. A killed writer leaves an invisible upload, which costs money until a lifecycle
# rule of the bucket ("abort incomplete multipart uploads") removes it. Credentials, region, and
# endpoint come from the usual environment variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
# AWS_ALLOW_HTTP, ...), or from the obstore store that you pass to `ObjectStorage`.


_T = TypeVar("_T")

_PART_BYTES = 16 << 20
_PARALLEL = 8
_SMALL_BYTES = 64 << 10
"""Responses up to this size take hardly longer than their first byte."""
_TRIES = 4
"""Number of tries here, in addition to those of obstore, which does not retry every request that is
safe to retry."""
FIRST_PAUSE_S = 0.2
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_FORBIDDEN = re.compile("status code: 40[13]")
_LASTING = re.compile(r"status code: 4(?!08|25|29)\d\d")
"""Responses for which a retry is useless: all 4xx except timeout, "too early", and "too many requests"."""
RETRY: Any = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}


def open_objects(url: str) -> ObjectStorage:
    """Return the storage for a URL as obstore reads it: "s3://bucket/folder", "gs://bucket/folder",
    "az://...".

    Raises:
        MissingPackageError: obstore is not installed.
        StorageError: obstore rejects the URL or its configuration.
    """
    with framework("obstore>=0.6", f"{url}: "):
        from obstore.store import from_url
    try:
        store = from_url(url, retry_config=RETRY)
    except Exception as error:
        raise StorageError(f"cannot open {url}: {_first_line(error)}") from error
    return ObjectStorage(store, url)


_BYTES_PER_S = 80e6
"""Assumed read throughput of one connection."""


def choose_gap_bytes(latency_s: float) -> int:
    """Return how many bytes a connection reads during one request latency: a power of two from 64
    KiB to 8 MiB."""
    wanted = latency_s * _BYTES_PER_S
    gap = 64 << 10
    while gap * 2 <= wanted and gap < 8 << 20:
        gap *= 2
    return gap


class ObjectStorage(Storage):
    """An obstore store (such as `obstore.store.S3Store(...)`), whose prefix is the folder.

    `max_gap_bytes` is computed from a latency of 30 ms, and later from the lowest latency seen.

    Args:
        store: the store.
        url: for messages.
        part_bytes: size of an upload part and of a range request, in bytes. An object has at most
            10,000 parts.
        parallel: number of parts in flight per read or writer. Each uses parallel x part_bytes of
            memory.
    """

    is_common = True
    requests = 16

    def __init__(self, store: Any, url: str, *, part_bytes: int = _PART_BYTES, parallel: int = _PARALLEL) -> None:
        if part_bytes < 5 << 20 or parallel < 1:
            raise StorageError(
                f"part_bytes must be at least 5 MiB and parallel at least 1, not {part_bytes}, {parallel}"
            )
        import obstore

        self.url = url
        self.part_bytes = part_bytes
        self.parallel = parallel
        self.max_gap_bytes = choose_gap_bytes(0.03)
        self._latency_s = 0.03
        self._store = store
        self._seen: dict[str, tuple[str, int]] = {}
        """Tag and time of each object, as last reported by the store."""
        self._api: Any = obstore
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="range-read")

    def list(self, prefix: str = "") -> dict[str, int]:
        return {name: item["size"] for name, item in self._items(prefix).items()}

    def versions(self, prefix: str = "") -> Mapping[str, object]:
        facts = "size", "e_tag", "last_modified"
        items = self._items(prefix)
        return {name: [items[name][fact] for fact in facts] for name in items}

    def _items(self, prefix: str) -> dict[str, Any]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder, self.url)

        def all_pages() -> dict[str, Any]:
            # the store lists folders only, but `offset` skips the names before the prefix
            pages = self._api.list(self._store, folder or None, offset=prefix[:-1] or None, chunk_size=1000)
            return {item["path"]: item for page in pages for item in page}

        with self._errors("list", prefix or "objects"):
            found = self._again(all_pages)
        for name, meta in found.items():
            self._saw(name, meta)
        return {name: found[name] for name in sorted(found) if name.startswith(prefix)}

    def size(self, name: str) -> int:
        check_name(name, self.url)
        start = time.monotonic()
        meta = self._call("read", name, self._api.head)
        self._took(time.monotonic() - start)
        self._saw(name, meta)
        return int(meta["size"])

    def version(self, name: str) -> object:
        return self._seen.get(name)

    def _saw(self, name: str, meta: Mapping[str, Any]) -> None:
        """Record the version of an object, which every response contains. It counts as newer if the
        tag differs and the time is later, because some stores write the tag or the time in two
        ways."""
        tag, at = (meta["e_tag"] or "").removeprefix("W/").strip('"'), int(meta["last_modified"].timestamp())
        before = self._seen.get(name, ("", 0))
        if tag != before[0] and at > before[1]:
            self._seen[name] = tag, at

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object of at most one part in a single request: the response also contains the size."""
        if length is not None or start:
            return super().read(name, start, length)
        check_name(name, self.url)

        def front() -> tuple[bytes, int]:
            began = time.monotonic()
            answer = self._api.get(self._store, name, options={"range": (0, self.part_bytes)})
            data = bytes(answer.bytes())
            self._saw(name, answer.meta)
            if len(data) <= _SMALL_BYTES:
                self._took(time.monotonic() - began)
            return data, int(answer.meta["size"])

        try:
            with self._errors("read", name):
                data, size = self._again(front)
        except CheckpointNotFoundError:
            raise
        except StorageError:  # stores reject every range of an empty object
            if self.size(name):
                raise
            return b""
        return data if len(data) == size else data + super().read(name, len(data), size - len(data))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        check_name(name, self.url)
        length = buffer.nbytes
        if start < 0 or not length:  # stores reject an empty range, but its position must still be checked
            check_range(self, name, start, length, self.size(name))
            return
        view = buffer.cast("B")
        offsets = range(0, length, self.part_bytes)
        pieces = [(name, start + offset, view[offset : offset + self.part_bytes]) for offset in offsets]
        if len(pieces) == 1:
            self._read_piece(*pieces[0])
            return
        reads = [self._pool.submit(self._read_piece, *piece) for piece in pieces]
        try:
            for read in reads:
                read.result()
        finally:
            for read in reads:
                read.cancel()
            wait(reads)  # no thread may write into the caller's buffer after this raises
            del read, reads  # they refer to the error

    def _read_piece(self, name: str, start: int, view: memoryview) -> None:
        def part() -> Any:
            answer = self._api.get(self._store, name, options={"range": (start, start + view.nbytes)})
            self._saw(name, answer.meta)
            return answer.bytes()

        try:
            with self._errors("read", name):
                data = memoryview(self._again(part))
        except CheckpointNotFoundError:
            raise
        except StorageError:  # stores respond differently to a range past the end
            check_range(self, name, start, view.nbytes, self.size(name))
            raise
        if data.nbytes != view.nbytes:
            check_range(self, name, start, view.nbytes, self.size(name))
            raise StorageError(f"{name} in {self.url}: asked for {view.nbytes} bytes from {start}, got {data.nbytes}")
        view[:] = data

    def create(self, name: str) -> Writer:
        check_name(name, self.url)
        if self.has(name):
            raise exists_already(name, self.url)
        return ObjectWriter(self, name)

    def publish(self, name: str, data: Buffer) -> None:
        check_name(name, self.url)
        self._call("publish", name, self._api.put, bytes(data), use_multipart=False)

    def publish_while(self, name: str, data: Buffer, check: Callable[[], None]) -> None:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        check_name(name, self.url)
        mode: Any = "create"
        try:
            found = self._call("read", name, self._api.head)
            mode = {key: found[key] for key in ("e_tag", "version") if found[key] is not None} or "overwrite"
        except CheckpointNotFoundError:
            pass
        check()
        try:
            self._call("publish", name, self._api.put, bytes(data), use_multipart=False, mode=mode)
        except StorageError as error:
            if isinstance(error.__cause__, NotSupportedError | NotImplementedError):
                self.publish(name, data)
            elif not isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                raise
            elif self.read(name) != bytes(data):  # otherwise, an earlier try succeeded, but its response was lost
                raise StorageError(f"{name} in {self.url} was published by another process in the meantime") from error

    def delete(self, name: str) -> None:
        check_name(name, self.url)
        try:
            self._call("delete", name, self._api.delete)
        except CheckpointNotFoundError:  # Google and Azure report a missing object, S3 does not
            return

    def link(self, name: str, other: str) -> bool:
        """The store copies the object itself, so no bytes are transferred to this machine."""
        check_name(other, self.url)
        if not self.has(name):
            raise not_found(name, self.url)
        self._call("copy", name, self._api.copy, other)
        return True

    def _no_bucket(self, verb: str, name: str) -> StorageError:
        return StorageError(f"cannot {verb} {name} in {self.url}: there is no such bucket or container")

    def _forbidden(self, verb: str, name: str, error: BaseException) -> StorageError:
        why = "permission denied, or no credentials; check those in the environment and the bucket's policy"
        return StorageError(f"cannot {verb} {name} in {self.url}: {why} ({_first_line(error)})")

    def put_new(self, name: str, data: bytes) -> None:
        """Store a complete object if there is none of this name."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self._call("write", name, self._api.put, data, mode="create")
        except StorageError as error:
            if not isinstance(error.__cause__, AlreadyExistsError):
                raise
            try:
                stored = self.read(name) if self.size(name) == len(data) else None
            except CheckpointNotFoundError:
                # in Azurite, an emulator of Azure, the parts of an aborted upload block the name
                self.publish(name, data)
                return
            if stored != data:  # otherwise, the first try succeeded, but its response was lost
                raise

    def put_parts(self, name: str, parts: Iterator[bytes]) -> None:
        """Store an object from the parts that an iterator yields. If the iterator raises, the
        upload is aborted."""
        with self._errors("write", name):
            self._api.put(
                self._store,
                name,
                parts,
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=self.parallel,
            )

    def _took(self, seconds: float) -> None:
        if seconds < self._latency_s:
            self._latency_s = seconds
            self.max_gap_bytes = choose_gap_bytes(seconds)

    def _call(self, verb: str, name: str, function: Callable[..., _T], *arguments: object, **options: object) -> _T:
        """Call an obstore function for an object and return its result."""
        with self._errors(verb, name):
            return self._again(lambda: function(self._store, name, *arguments, **options))

    def _again(self, call: Callable[[], _T]) -> _T:
        """Call, and retry transient errors with increasing pauses."""
        from obstore.exceptions import GenericError, JoinError

        for attempt in range(_TRIES - 1):
            try:
                return call()
            except (GenericError, JoinError) as error:
                if _LASTING.search(str(error)):
                    raise
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        return call()

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

        if verb not in ("list", "read"):
            self._seen.pop(name, None)
        try:
            yield
        except ReshardError:
            raise
        except FileNotFoundError as error:
            if verb in ("read", "delete") and not _NO_BUCKET.search(str(error)):
                raise not_found(name, self.url) from error
            raise self._no_bucket(verb, name) from error
        except AlreadyExistsError as error:
            raise exists_already(name, self.url) from error
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise self._forbidden(verb, name, error) from error
        except (BaseError, ValueError, OSError) as error:
            if _NO_BUCKET.search(str(error)):
                raise self._no_bucket(verb, name) from error
            if _FORBIDDEN.search(str(error)):
                raise self._forbidden(verb, name, error) from error
            raise StorageError(f"cannot {verb} {name} in {self.url}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an obstore error: the others show its internals."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


# The writer of an object store: many small writes become one conditional put or a multipart upload.


MAX_PARTS = 10_000
"""Most parts of a multipart upload: the limit of S3, which is the lowest."""


class _Abandoned(Exception):
    """Ends the stream of parts, which aborts the upload."""


class ObjectWriter(Writer):
    """Passes parts to a thread that uploads them. If the caller is faster than the network, `write`
    blocks.

        write ──► gathered to one part ──► queue of one ──► thread: multipart upload, several parts in flight

    An object smaller than one part is put in one request, on condition that the name is free.
    """

    def __init__(self, store: ObjectStorage, name: str) -> None:
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
        if self.nbytes + data.nbytes > part_bytes * MAX_PARTS:
            raise StorageError(
                f"cannot write {self._name} in {self._store.url}: an object holds at most {MAX_PARTS} parts of "
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
                f"{self._name} in {self._store.url} has {stored} bytes after {self.nbytes} were written: another "
                "process wrote it at the same time, or the storage lost bytes"
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
