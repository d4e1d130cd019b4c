"""The interface of a storage: a folder of named objects. Reads return byte ranges; writes store
complete objects.

Names are relative and use "/" on every storage ("step-10/rank-0.safetensors"). Errors are
`StorageError`, or `CheckpointNotFoundError` for a missing object, and name the object and the
storage. A third-party storage implements the abstract methods and is passed to `open_storage`.
"""

from __future__ import annotations

import builtins
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeAlias

from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in the standard library from Python 3.12 on

AnyPath: TypeAlias = str | os.PathLike[str]
"""A path or URL."""
Listing: TypeAlias = Mapping[str, int]
"""Names of objects, with their sizes in bytes."""
_TEMPORARY_SUFFIX = ".tmp"
NOTHING = "nothing"
"""A name that no object has: see `Storage.empty_folders`."""


class Storage(ABC):
    """A folder of named objects, on disk, in an object store, or in memory.

    Several threads may call the methods at once. While an object is read, only `publish` may
    rewrite it: readers then see either the old object or the new one.

    Attributes:
        url: location, for messages.
        max_gap_bytes: reading up to this many unrequested bytes is cheaper than another request.
        is_common: whether all processes on a machine that open this URL see the same objects, so
            that one can read for another.
        supports_shared_write: whether several processes on a machine can write one object together:
            see `open_shared`.
        requests: how many requests to keep in flight; 1 if the storage answers without delay.
    """

    url: str
    max_gap_bytes: int
    is_common: bool = False
    supports_shared_write: bool = False
    requests: int = 8

    @abstractmethod
    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the names that start with `prefix`, sorted, and their sizes in bytes. The prefix
        can be any text: "step-1" also finds "step-10/x".

        Returns {} for a folder that does not exist. Includes leftovers of killed writers: see
        `is_temporary`.
        """

    def names(self, prefix: str = "") -> builtins.list[str]:
        """Return the names that `list` returns, without sizes, because each size can cost a request."""
        return [*self.list(prefix)]

    def versions(self, prefix: str = "") -> Mapping[str, object]:
        """Return the names that `list` returns, each with a value that changes when the object is
        replaced, as far as the storage knows. Default: its size."""
        return self.list(prefix)

    def top(self) -> builtins.dict[str, int] | None:
        """Return the top-level objects with their sizes, and the top-level folders, as "name/" with
        size 0. Returns None if this is no cheaper than `list`."""
        return None

    def version(self, name: str) -> object:
        """Return a value that changes when the object is rewritten, or None if that would cost a request."""
        return None

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of an object in bytes. Raises `CheckpointNotFoundError` if it does not exist."""

    def has(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.size(name)
        except CheckpointNotFoundError:
            return False
        return True

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill all of the writable, contiguous `buffer` with the bytes from `start`. Raises an
        error if there are too few."""

    def descriptor(self, name: str) -> int | None:
        """Return a file descriptor for reading the object, which the caller closes, or None if
        objects are not files."""
        return None

    @abstractmethod
    def create(self, name: str) -> Writer:
        """Return a writer for a new object, which writes from front to end. The object must not exist yet."""

    def open_shared(self, name: str, nbytes: int) -> PlacedWriter:
        """Return a writer for an object of `nbytes` that several processes on a machine write at
        the same time, each its own bytes. All of them pass the same arguments, and the first call
        creates the object. Bytes that no process writes are zero."""
        raise StorageError(
            f"{self.url} does not support objects that several processes write: let each process write its own"
        )

    def without_new_folders(self) -> Storage:
        """Return a view of this storage that creates no folders, so that a late process cannot
        write into a folder that another process has removed. No effect if folders are only parts of
        names."""
        return self

    @abstractmethod
    def publish(self, name: str, data: Buffer) -> None:
        """Store a small object atomically: readers, also after a crash, see either the old object
        or the new one."""

    def publish_while(self, name: str, data: Buffer, check: Callable[[], None]) -> None:
        """Call `check` as late as possible, then `publish`, unless `check` raises. If the storage
        supports conditional writes, also fail if another process publishes the object between the
        two."""
        check()
        self.publish(name, data)

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object. A missing object is not an error, so that a removal can be repeated
        after a crash."""

    def retract(self, name: str) -> None:
        """Delete an object so that no crash restores it. Call this before you delete what the
        object refers to."""
        self.delete(name)

    def temporary(self, name: str, token: str) -> str:
        """Return the name under which to write an object that readers must not see before `commit`
        renames it.

        Returns `name` itself if objects are visible only when complete; otherwise a name for which
        `is_temporary` is true.
        """
        return name

    def commit(self, temporary: str, name: str) -> None:
        """Rename a temporary object durably. Replaces an existing object. A second call does nothing."""
        if temporary != name:
            raise StorageError(f"{self.url} has no temporary objects: {temporary!r} is none of them")

    def link(self, name: str, other: str) -> bool:
        """Give an object that no longer changes a second name, without reading its bytes. The
        object exists as long as it has a name. A second call does nothing. Creates no folder.
        Returns False if the storage does not support this.

        Raises CheckpointNotFoundError if the object does not exist.
        """
        return False

    def empty_folders(self, prefix: str = "") -> builtins.list[str]:
        """Return the empty folders, which killed writers leave behind. Returns [] if folders are
        only parts of names. `prefix` limits the search to top-level folders whose names start with
        it.

        To remove such a folder, call `delete` for `NOTHING` in it. The folder stays if another
        process has put an object there meanwhile.
        """
        return []

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return exactly `length` bytes from `start` (default: up to the end), or raise an error."""
        if length is None:
            length = self.size(name) - start
        if start < 0 or length < 0:
            check_range(self, name, start, length, self.size(name))
        buffer = bytearray(length)
        self.read_into(name, start, memoryview(buffer))
        return bytes(buffer)

    def is_link_outside(self, name: str) -> bool:
        """Return True if the name is a link to an object outside this folder."""
        return False

    def mapped(self, name: str) -> memoryview | None:
        """Return a read-only, zero-copy view of the object, or None if the storage has none. The
        view stays valid while it is referenced, even if the object is deleted or published again."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class Writer(ABC):
    """An object being written: `with storage.create(name) as out: out.write(data)`. Calls may come
    from several threads, but only one at a time.

    A clean exit makes the object durable. After an exception or a failed write, nothing is left.

    Attributes:
        nbytes: bytes written so far.
    """

    nbytes: int = 0
    _ended: bool = False
    _failed: bool = False

    def write(self, data: Buffer) -> None:
        """Append a contiguous bytes-like object. The caller may change it after this returns."""
        if self._ended:
            raise StorageError("this object is closed: write inside its with block")
        view = memoryview(data)
        if not view.nbytes:  # an empty view of another item type cannot be cast
            return
        try:
            self._write(view.cast("B"))
        except BaseException:
            self._failed = True
            raise
        self.nbytes += view.nbytes

    def reserve(self, nbytes: int) -> Callable[[memoryview], None] | None:
        """Skip `nbytes`, and return a function that writes them. Call that function once, on any
        thread, before the `with` block ends. An error in it must end the block. Returns None if
        objects can only be written from front to end."""
        return None

    @abstractmethod
    def _write(self, data: memoryview) -> None:
        """Append all of a non-empty view of bytes."""

    @abstractmethod
    def _commit(self) -> None:
        """Make the object durable and visible."""

    @abstractmethod
    def _abort(self) -> None:
        """Remove everything that was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if error is None and self._failed:
                raise StorageError("a write of this object failed and was ignored; nothing was kept")
            if error is None:
                self._commit()
                return
        except BaseException as failure:
            self._give_up(failure)
            raise
        self._give_up(error)

    def _give_up(self, cause: BaseException) -> None:
        try:
            self._abort()
        except ReshardError as second:  # the caller must see the first error
            cause.add_note(f"deleting the unfinished object failed too: {second}")


class PlacedWriter(Writer):
    """A writer for any position: the next bytes are written at `at`, which advances by their
    length.

    A clean exit makes the bytes of this process durable. An exception removes the object, also for
    the other processes, because it is useless without these bytes.

    Attributes:
        at: position in the object, in bytes. You may set it.
    """

    at: int = 0


def check_name(name: str, url: str) -> str:
    """Return the name if it stays inside the folder: relative, no empty, "." or ".." part, no NUL.

    Raises:
        StorageError: says what is wrong with the name.
    """
    if not isinstance(name, str):
        raise StorageError(f"a name in {url} must be text, but is {type(name).__name__}")
    flaw = _flaw(name)
    if flaw:
        raise StorageError(f"bad name {name!r} in {url}: {flaw}")
    return name


@lru_cache(maxsize=10_000)  # a load passes the same few names very often
def _flaw(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        return "expected parts separated by '/', none of them empty, '.' or '..', without NUL and backslash"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    return ""


def check_range(storage: Storage, name: str, start: int, length: int, size: int) -> None:
    """Raise StorageError for a byte range outside an object of `size` bytes. The error names file,
    range, and size."""
    if start < 0 or length < 0:
        raise StorageError(f"bad byte range [{start}, {start + length}) of {name} in {storage.url}")
    if start + length > size:
        raise StorageError(
            f"{name} in {storage.url} is too short: expected bytes [{start}, {start + length}), but it has {size} bytes"
        )


def is_temporary(name: str) -> bool:
    """Return True for the name of a temporary object. If one remains, its writer was killed."""
    stem, dot, suffix = name.rpartition(".")
    return bool(dot) and "." + suffix == _TEMPORARY_SUFFIX and ".~" in stem


def temporary_name(name: str, token: str) -> str:
    """Return the name under which `publish` first writes the object `name`."""
    return f"{name}.~{token}{_TEMPORARY_SUFFIX}"


def exists_already(name: str, url: str) -> StorageError:
    """Return the error for creating an object that already exists."""
    return StorageError(f"cannot create {name} in {url}: it already exists and is not overwritten: delete it first")


def not_found(name: str, url: str) -> CheckpointNotFoundError:
    """Return the error for an object that does not exist."""
    replaced = ": if a later save replaced the checkpoint, open it again" if name.startswith("data-") else ""
    return CheckpointNotFoundError(f"there is no {name} in {url}{replaced}")
