"""The interface of a storage: a folder of named objects, of which byte ranges are read and complete
objects are written. Names are relative and '/'-separated ("step-10/rank-0.safetensors") on every
storage. Every error is a `StorageError`, or a `CheckpointNotFoundError` where an object is absent,
and says which object of which storage. A third-party storage implements the abstract methods here
and hands an instance to `open_storage`.
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
"""Objects of a storage: their names, and their sizes in bytes."""
_TEMPORARY_SUFFIX = ".tmp"
NOTHING = "nothing"
"""No object is called so: see `Storage.empty_folders`."""


class Storage(ABC):
    """A folder of named objects, on a disk, in an object store or in memory.

    Methods may be called from several threads at once. Objects that are read must not be rewritten
    meanwhile, except through `publish`, which readers see as either the old object or the new one.

    Attributes:
        url: where it is, for messages.
        max_gap_bytes: reading up to this many bytes that were not requested is cheaper than one
            more request.
        is_common: whether all processes of a machine that open this URL see the same objects, so
            that one may read for another.
        supports_shared_write: whether several processes of a machine can write one object together,
            see `open_shared`.
        requests: how many requests should be in flight at once; 1 if answers come without delay.
    """

    url: str
    max_gap_bytes: int
    is_common: bool = False
    supports_shared_write: bool = False
    requests: int = 8

    @abstractmethod
    def list(self, prefix: str = "") -> dict[str, int]:
        """Names that start with `prefix` (any text, "step-1" finds "step-10/x" too) and their sizes
        in bytes, sorted.

        A folder that does not exist holds nothing. What a killed writer left behind is listed too:
        see `is_temporary`.
        """

    def names(self, prefix: str = "") -> builtins.list[str]:
        """Return the names that `list` has, where their sizes do not matter: each can be a request."""
        return [*self.list(prefix)]

    def versions(self, prefix: str = "") -> Mapping[str, object]:
        """Return the names that `list` has, each with what changes when it is
        replaced, as far as the storage knows; here that is the size."""
        return self.list(prefix)

    def top(self) -> builtins.dict[str, int] | None:
        """Return what is in no folder, and its size, and each folder, with a slash behind its name
        and no size; None if that takes no less than to `list` everything."""
        return None

    def version(self, name: str) -> object:
        """Return a value that changes when an object is written again, or None if that would take a request."""
        return None

    @abstractmethod
    def size(self, name: str) -> int:
        """Length of an object in bytes. Raises `CheckpointNotFoundError` if there is none of this name."""

    def has(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.size(name)
        except CheckpointNotFoundError:
            return False
        return True

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the writable, contiguous `buffer` with the bytes from `start`: all of it, or an error."""

    def descriptor(self, name: str) -> int | None:
        """A file descriptor to read an object by, which the caller closes; None if objects are no files."""
        return None

    @abstractmethod
    def create(self, name: str) -> Writer:
        """A new object, written from front to end; it must not exist yet."""

    def open_shared(self, name: str, nbytes: int) -> PlacedWriter:
        """An object of `nbytes` that several processes of one machine write at once, each its own
        bytes of it. All of them call this with the same arguments; the first to come makes it.
        Bytes that no process writes are zero."""
        raise StorageError(
            f"{self.url} does not support objects that several processes write: let each process write its own"
        )

    def without_new_folders(self) -> Storage:
        """Return the same objects, but without creation of folders for new ones, so that a late
        process cannot write where another one has removed everything. No effect on storage whose
        folders are only parts of names."""
        return self

    @abstractmethod
    def publish(self, name: str, data: Buffer) -> None:
        """Store a whole small object so that readers, and a crash at any point, find the old one or the new one."""

    def publish_while(self, name: str, data: Buffer, check: Callable[[], None]) -> None:
        """`publish`, unless `check` raises, which is called as late as possible. If the storage
        supports conditional writes, also unless another process publishes the object between the
        two."""
        check()
        self.publish(name, data)

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error, so that a removal can be repeated after a crash."""

    def retract(self, name: str) -> None:
        """Remove an object so that no crash brings it back: before what it refers to is removed."""
        self.delete(name)

    def temporary(self, name: str, token: str) -> str:
        """The name under which to write an object that must not be seen yet; `commit` gives it its
        own name.

        It is `name` itself if objects are visible only when they are complete, and otherwise a name
        that `is_temporary`.
        """
        return name

    def commit(self, temporary: str, name: str) -> None:
        """Give a temporary object its name, over an older object, durably. A second time does nothing."""
        if temporary != name:
            raise StorageError(f"{self.url} has no temporary objects: {temporary!r} is none of them")

    def link(self, name: str, other: str) -> bool:
        """Give an object that no longer changes a second name, without reading its bytes. The
        object stays as long as it has a name. A second call does nothing. False if this storage
        cannot. No folder is made.

        Raises CheckpointNotFoundError if there is no such object.
        """
        return False

    def empty_folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders that hold nothing, left by killed writers; none where a folder is
        only a part of names. With `prefix`, only of those at the top whose names start with it.

        `delete` of `NOTHING` in one of them removes it, unless another process has put an object
        there meanwhile.
        """
        return []

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start` (default: to the end); exactly that many, or an error."""
        if length is None:
            length = self.size(name) - start
        if start < 0 or length < 0:
            check_range(self, name, start, length, self.size(name))
        buffer = bytearray(length)
        self.read_into(name, start, memoryview(buffer))
        return bytes(buffer)

    def is_link_outside(self, name: str) -> bool:
        """Return True if the name is that of a link to an object outside."""
        return False

    def mapped(self, name: str) -> memoryview | None:
        """Return a read-only view of the complete object, without a copy, or None if the storage
        has none. The view stays valid while it is referenced, even if the object is deleted or
        published again.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class Writer(ABC):
    """An object being written: `with storage.create(name) as out: out.write(data)`. One thread at a
    time calls it, but not always the same one.

    A clean exit makes it durable; an exit by an exception, a failed write included, leaves nothing
    behind.

    Attributes:
        nbytes: how many bytes were written so far.
    """

    nbytes: int = 0
    _ended: bool = False
    _failed: bool = False

    def write(self, data: Buffer) -> None:
        """Append a contiguous bytes-like object, which may be changed again once this returns."""
        if self._ended:
            raise StorageError("this object is closed: write inside its with block")
        view = memoryview(data)
        if not view.nbytes:  # an empty view of another type cannot be cast
            return
        try:
            self._write(view.cast("B"))
        except BaseException:
            self._failed = True
            raise
        self.nbytes += view.nbytes

    def reserve(self, nbytes: int) -> Callable[[memoryview], None] | None:
        """Skip the next bytes, and return what writes them: once, on any thread, before the object
        is whole. An error must end the `with` block. None if objects can only be written from
        front to end."""
        return None

    @abstractmethod
    def _write(self, data: memoryview) -> None:
        """Append a non-empty view of bytes, all of it."""

    @abstractmethod
    def _commit(self) -> None:
        """Make the object durable and visible."""

    @abstractmethod
    def _abort(self) -> None:
        """Leave nothing behind."""

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
        except ReshardError as second:  # the first error is what the caller must see
            cause.add_note(f"deleting the unfinished object failed too: {second}")


class PlacedWriter(Writer):
    """A writer for any position: the next bytes are written at `at`, which advances by their
    length. A clean exit makes what this process wrote durable. An exit with an exception removes
    the object, also for other processes: it is useless without this process's bytes.

    Attributes:
        at: a position in the object, in bytes; may be set.
    """

    at: int = 0


def check_name(name: str, url: str) -> str:
    """The name itself, if it stays inside the folder: relative, no empty, "." or ".." part, no NUL.

    Raises:
        StorageError: says what is wrong with it.
    """
    if not isinstance(name, str):
        raise StorageError(f"a name in {url} must be text, but is {type(name).__name__}")
    flaw = _flaw(name)
    if flaw:
        raise StorageError(f"bad name {name!r} in {url}: {flaw}")
    return name


@lru_cache(maxsize=10_000)  # a load asks for the same few names very often
def _flaw(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        return "expected parts separated by '/', none of them empty, '.' or '..', without NUL and backslash"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    return ""


def check_range(storage: Storage, name: str, start: int, length: int, size: int) -> None:
    """Refuse a byte range that is not inside an object of `size` bytes; names file, range and length."""
    if start < 0 or length < 0:
        raise StorageError(f"bad byte range [{start}, {start + length}) of {name} in {storage.url}")
    if start + length > size:
        raise StorageError(
            f"{name} in {storage.url} is too short: expected bytes [{start}, {start + length}), but it has {size} bytes"
        )


def is_temporary(name: str) -> bool:
    """True for what `publish` writes before it replaces an object; one that stays was left by a killed process."""
    stem, dot, suffix = name.rpartition(".")
    return bool(dot) and "." + suffix == _TEMPORARY_SUFFIX and ".~" in stem


def temporary_name(name: str, token: str) -> str:
    """The name beside `name` under which `publish` writes first."""
    return f"{name}.~{token}{_TEMPORARY_SUFFIX}"


def exists_already(name: str, url: str) -> StorageError:
    """The error for an object that is to be created."""
    return StorageError(f"cannot create {name} in {url}: it already exists and is not overwritten: delete it first")


def not_found(name: str, url: str) -> CheckpointNotFoundError:
    """The error for an object that is absent."""
    replaced = ": if a later save replaced the checkpoint, open it again" if name.startswith("data-") else ""
    return CheckpointNotFoundError(f"there is no {name} in {url}{replaced}")
