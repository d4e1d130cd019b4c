"""A folder of a local or mounted file system.

Durable means that the file is fsynced, and so is each folder with a new entry, up to the first
folder that existed before. Without the fsync of its folder, a crash can undo a rename.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.storage.base import PlacedWriter, Storage, Writer, check_name, check_range, not_found, temporary_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_PAGE_BYTES = 4096
_WRITE_BYTES = 8 << 20
"""Most bytes of one write call. Also the unit in which finished parts of a file are written back to disk."""
_SYNC_FILE_RANGE_WRITE = 2
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
_CREATE_TRIES = 10
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without links, and of links between two file systems."""


class LocalStorage(Storage):
    """The folder `root`. If it does not exist, the first write creates it.

    Links are followed, even out of the folder, as in a Hugging Face cache: see `is_link_outside`.
    Names cannot point outside.
    """

    max_gap_bytes = _PAGE_BYTES
    is_common = True
    supports_shared_write = True
    requests = 1
    _makes_folders = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)

    def names(self, prefix: str = "") -> builtins.list[str]:
        return [*self.list(prefix, sized=False)]

    def list(self, prefix: str = "", *, sized: bool = True) -> dict[str, int]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder, self.url)
        top = self.root / folder
        found: dict[str, int] = {}
        with self._errors("list", folder or "."):
            with suppress(FileNotFoundError, NotADirectoryError):  # `_list` finds nothing there
                mode = os.stat(self.root).st_mode  # only one stat: the folder may be removed meanwhile
                if not stat.S_ISDIR(mode):
                    kind = "not a regular file or folder"
                    if stat.S_ISREG(mode):
                        kind = "a file, not a folder"
                    raise StorageError(f"{self.url} is {kind}: use another path")
            _list(os.fspath(top), f"{folder}/" if folder else "", found, prefix, sized=sized)
        return dict(sorted(found.items()))

    def top(self) -> dict[str, int] | None:
        with self._errors("list", "."):
            found: dict[str, int] = {}
            _list(os.fspath(self.root), "", found, deep=False)
        return found

    def empty_folders(self, prefix: str = "") -> builtins.list[str]:
        found: list[str] = []
        with self._errors("list", "."):
            for where, folders, files in os.walk(self.root, onerror=_unless_absent):
                if where == os.fspath(self.root):
                    folders[:] = [name for name in folders if name.startswith(prefix)]  # os.walk then skips the others
                elif not folders and not files:
                    found.append(os.path.relpath(where, self.root))
        return sorted(found)

    def version(self, name: str) -> object:
        try:
            found = os.stat(f"{self.url}/{name}")
        except OSError:  # deleted, but processes that have it open can still read it
            return None
        return found.st_size, found.st_mtime_ns

    def size(self, name: str) -> int:
        return self._with_file(name, "read", lambda _, size: size)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if start < 0 or (length is not None and length < 0):
            return super().read(name, start, length)

        def pread(file: int, size: int) -> tuple[bytes, int]:
            wanted = size - start if length is None else length
            check_range(self, name, start, wanted, size)
            return os.pread(file, wanted, start), wanted

        stop = "end" if length is None else start + length
        data, wanted = self._with_file(name, f"read bytes [{start}, {stop}) of", pread)
        # one call reads at most 2 GiB: `super().read` reads the rest, or says why there is none
        return data if len(data) == wanted else super().read(name, start, wanted)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B") if buffer.nbytes else buffer
        nbytes = view.nbytes

        def preadv(file: int, size: int) -> None:
            done = os.preadv(file, [view], start) if nbytes and 0 <= start < size else 0
            while 0 < done < nbytes:
                got = os.preadv(file, [view[done:]], start + done)
                if not got:
                    break
                done += got
            if done < nbytes or start < 0:
                check_range(self, name, start, nbytes, size)
                raise StorageError(f"{name} in {self.url} changed while bytes [{start}, {start + nbytes}) were read")

        self._with_file(name, f"read bytes [{start}, {start + nbytes}) of", preadv)

    def descriptor(self, name: str) -> int | None:
        return self._with_file(name, "open", lambda file, _: os.dup(file))

    def mapped(self, name: str) -> memoryview | None:
        view = self._with_file(  # an empty file cannot be mapped
            name, "map", lambda file, size: mmap.mmap(file, 0, access=mmap.ACCESS_READ) if size else b""
        )
        return memoryview(view)

    def is_link_outside(self, name: str) -> bool:
        with self._errors("look at", name):
            return not Path(os.path.realpath(self._path(name))).is_relative_to(os.path.realpath(self.root))

    def without_new_folders(self) -> Storage:
        other = copy(self)
        other._makes_folders = False
        return other

    def create(self, name: str) -> Writer:
        return _LocalWriter(self, name, *self._created(name, os.O_EXCL))

    def open_shared(self, name: str, nbytes: int) -> PlacedWriter:
        path, file = self._created(name, 0)
        with self._errors("create", name):
            try:
                os.ftruncate(file, nbytes)
            except OSError:
                os.close(file)
                raise
        return _LocalWriter(self, name, path, file)

    def _created(self, name: str, more_flags: int) -> tuple[Path, int]:
        path = self._path(name)
        with self._errors("create", name):
            for _ in range(_CREATE_TRIES):
                # another process may remove the folders while they are still empty
                with suppress(FileNotFoundError):
                    if self._makes_folders:
                        make_folder(path.parent)
                    return path, os.open(path, _CREATE_FLAGS | more_flags, 0o666)
        raise StorageError(f"cannot create {name} in {self.url}: another process deleted its folder")

    def publish(self, name: str, data: Buffer) -> None:
        self.publish_while(name, data, lambda: None)

    def publish_while(self, name: str, data: Buffer, check: Callable[[], None]) -> None:
        path = self._path(name)
        for last in (False, False, True):
            beside = temporary_name(name, secrets.token_hex(8))
            try:
                with self.create(beside) as out:
                    out.write(data)
            except CheckpointNotFoundError:  # another process removed it, or its folder, as a leftover
                if last:
                    raise
                continue
            try:
                with self._errors("publish", name):
                    check()
                    os.replace(self.root / beside, path)
                    sync_folder(path.parent)
                return
            except ReshardError as error:
                try:
                    self.delete(beside)
                except ReshardError as second:  # the caller must see the first error
                    error.add_note(f"deleting the unfinished object failed too: {second}")
                if last or not isinstance(error, CheckpointNotFoundError):
                    raise

    def temporary(self, name: str, token: str) -> str:
        return temporary_name(name, token)

    def commit(self, temporary: str, name: str) -> None:
        path = self._path(name)
        with self._errors("publish", name), suppress(FileNotFoundError):
            with suppress(FileNotFoundError):
                os.replace(self._path(temporary), path)
            sync_folder(path.parent)  # also if a killed process did the rename

    def link(self, name: str, other: str) -> bool:
        path, beside = self._path(name), self._path(other)
        with self._errors("link", name):
            try:
                os.link(path, beside)
            except FileExistsError:
                return os.path.samefile(path, beside)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return False
                if isinstance(error, FileNotFoundError) and path.exists():
                    raise StorageError(
                        f"cannot link {name} in {self.url}: another process deleted the folder of {other}"
                    ) from error
                raise
            sync_folder(beside.parent)
            return True

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._errors("delete", name):
            with suppress(FileNotFoundError):
                path.unlink()
            # folders exist only for their objects: remove those that are now empty
            folder = path.parent
            while folder != self.root and folder.is_relative_to(self.root):
                try:
                    folder.rmdir()
                except OSError:  # it has other contents, or was deleted
                    break
                folder = folder.parent

    def retract(self, name: str) -> None:
        path = self._path(name)
        with self._errors("delete", name), suppress(FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            sync_folder(path.parent)  # also if a killed process did the removal

    def _path(self, name: str) -> Path:
        return self.root / check_name(name, self.url)

    def _with_file(self, name: str, verb: str, use: Callable[[int, int], T]) -> T:
        """Call `use` with an open file and its size in bytes, and return its result. `verb`
        describes the operation in errors."""
        path = f"{self.url}/{check_name(name, self.url)}"
        try:
            # without O_NONBLOCK, opening a named pipe would wait for its writer
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _explained(error, "read", name, self.url) from error
        try:
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise StorageError(f"cannot read {name} in {self.url}: it is not a regular file")
                return use(file, found.st_size)
            finally:
                os.close(file)
        except ReshardError:  # some of these are OSErrors, too
            raise
        except OSError as error:
            raise _explained(error, verb, name, self.url) from error
        except MemoryError as error:
            raise StorageError(f"cannot {verb} {name} in {self.url}: it does not fit into memory") from error

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except ReshardError:
            raise
        except OSError as error:
            if verb == "list" and error.filename:  # the error may be about a subfolder
                name = os.path.relpath(error.filename, self.url)
            raise _explained(error, verb, name, self.url) from error


@dataclass(eq=False)
class _LocalWriter(PlacedWriter):
    _storage: LocalStorage
    _name: str
    _path: Path
    _file: int
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    """Only one thread can write a file at a time. In the kernel, the others would spin; at this
    lock, they sleep."""

    def reserve(self, nbytes: int) -> Callable[[memoryview], None]:
        place = partial(self._write, at=self.at)
        self.at += nbytes
        self.nbytes += nbytes
        return place

    def _write(self, data: memoryview, at: int | None = None) -> None:
        if at is None:
            at = self.at
            self.at += len(data)
        with self._storage._errors("write", self._name):
            while data:
                with self._one_at_a_time:
                    done = os.pwrite(self._file, data[:_WRITE_BYTES], at)
                start, at = at, at + done
                stop = at // _WRITE_BYTES * _WRITE_BYTES
                if start < stop:  # the disk writes while the caller prepares the next bytes
                    start_writing_back(self._file, range(start // _WRITE_BYTES * _WRITE_BYTES, stop))
                data = data[done:]

    def _commit(self) -> None:
        with self._storage._errors("write", self._name):
            os.fsync(self._file)
            self._close()
            sync_folder(self._path.parent)

    def _abort(self) -> None:
        is_ours = self._file < 0 or self._is_named()
        try:
            with self._storage._errors("write", self._name):
                self._close()
        finally:
            if is_ours:
                self._storage.delete(self._name)

    def _is_named(self) -> bool:
        """Return True if the path still names this file. A process that took this one for dead may
        have written a new file there."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn an operating system error into a StorageError that says what failed."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what}: {error.strerror or error}") from error


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's `sync_file_range`, or None if there is none: only Linux has it."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def start_writing_back(file: int, written: range) -> None:
    """Ask the disk to write these bytes of a file, without waiting.

    Errors are ignored, because this guarantees nothing: unwritten bytes stay in the page cache
    until fsync, which reports errors.
    """
    if (call := _sync_file_range()) is not None:
        call(file, written.start, len(written), _SYNC_FILE_RANGE_WRITE)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing: list[Path] = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            try:
                folder.mkdir()
            except FileNotFoundError as error:  # such as in /proc, where no folder can be created
                if folder.parent.is_dir():
                    raise PermissionError(errno.EPERM, "no folder can be created", str(folder)) from error
                raise
        if folder.is_symlink() and not folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, "the link leads nowhere", str(folder))
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make new and deleted names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        # some network file systems cannot fsync folders, but their metadata operations are
        # synchronous
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


def _list(
    folder: str, before: str, found: dict[str, int], prefix: str = "", *, deep: bool = True, sized: bool = True
) -> None:
    """Add to `found` the name and size of each file below `folder` whose name starts with `prefix`.

    Without `deep`, add subfolders as "name/" instead of their files. Each size costs a request to
    the file system; without `sized`, sizes are 0.
    """
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        _unless_absent(error)
        return
    with entries:
        for entry in entries:
            name = before + entry.name
            if not name.startswith(prefix):
                continue
            try:
                nbytes = None if entry.is_dir() else entry.stat().st_size if sized else 0
            except OSError as error:
                # skip a file that another process removes meanwhile, and a link to itself
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                continue
            if nbytes is not None:
                found[name] = nbytes
            elif not deep:
                found[f"{name}/"] = 0
            elif not entry.is_symlink():
                _list(entry.path, f"{name}/", found, prefix, sized=sized)


def _unless_absent(error: OSError) -> None:
    """Raise an error from listing a folder, unless the folder is gone or is a `lost+found`, which
    only the file system may read."""
    is_systems = isinstance(error, PermissionError) and os.path.basename(error.filename or "") == "lost+found"
    try:
        if not is_systems and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error
    finally:
        del error


_FIXES = {
    errno.EACCES: "permission denied: check the owner and mode of the folder",
    errno.EPERM: "the file system denied permission",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "no space left on the device: free some space, or use another folder",
    errno.EDQUOT: "disk quota exceeded: free some space, or use another folder",
    errno.EFBIG: "the file exceeds the maximum size of this file system or process",
    errno.ENOTDIR: "a part of the path is a file, or a dangling symbolic link",
    errno.EISDIR: "a folder is at that path: choose another path",
    errno.EEXIST: "it already exists and is not overwritten: delete it first",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}


_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errors that concern the folder, not the file."""


def _explained(error: OSError, verb: str, name: str, url: str) -> ReshardError:
    if error.errno == errno.ENOENT:
        return not_found(name, url)
    why = _FIXES.get(error.errno or 0, error.strerror or str(error))
    if verb == "create" and error.errno in _NOT_WRITABLE:
        explained = StorageError(f"cannot write to {url}: {why}. Fix this, or use another folder")
    elif verb == "read" and os.path.isfile(url):
        explained = StorageError(f"{url} is a file: pass a folder")
    else:
        fix = ": check the path" * (error.errno == errno.ENOTDIR)
        explained = StorageError(f"cannot {verb} {name} in {url}: {why}{fix}")
    explained.errno = error.errno
    return explained
