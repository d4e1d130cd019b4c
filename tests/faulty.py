"""A storage that fails on command, over one that does not.

    def fault(verb, name):                   # called before each operation
        if verb == "write":
            raise StorageError("no space left")

    save(state, Faulty(open_storage(folder), fault))

Verbs are method names ("list", "size", "read", "read_into", "mapped", "create", "publish", "delete"), and for a
writer "write" and "commit". `fault` can raise, sleep, end the process, or damage what is stored.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from reshard.storage import Storage, Writer

__all__ = ["Crash", "Faulty", "FileCalls", "SystemCalls"]

Fault = Callable[[str, str], None]


class Faulty(Storage):
    """The storage `inner`, with `fault(verb, name)` called before each operation."""

    def __init__(self, inner: Storage, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault
        self.url = inner.url
        self.max_gap_bytes = inner.max_gap_bytes

    def list(self, prefix: str = "") -> dict[str, int]:
        self.fault("list", prefix)
        return self.inner.list(prefix)

    def size(self, name: str) -> int:
        self.fault("size", name)
        return self.inner.size(name)

    def version(self, name: str) -> object:
        return self.inner.version(name)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.fault("read", name)
        return self.inner.read(name, start, length)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.fault("read_into", name)
        self.inner.read_into(name, start, buffer)

    def mapped(self, name: str) -> memoryview | None:
        self.fault("mapped", name)
        return self.inner.mapped(name)

    def create(self, name: str) -> Writer:
        self.fault("create", name)
        return _FaultyWriter(self.inner.create(name), name, self.fault)

    def publish(self, name: str, data: Any) -> None:
        self.fault("publish", name)
        self.inner.publish(name, data)

    def link(self, name: str, other: str) -> bool:
        self.fault("link", name)
        return self.inner.link(name, other)

    def delete(self, name: str) -> None:
        self.fault("delete", name)
        self.inner.delete(name)


class _FaultyWriter(Writer):
    def __init__(self, inner: Writer, name: str, fault: Fault) -> None:
        self._inner = inner
        self._name = name
        self._fault = fault

    def _write(self, data: memoryview) -> None:
        self._fault("write", self._name)
        self._inner._write(data)

    def _commit(self) -> None:
        self._fault("commit", self._name)
        self._inner._commit()

    def _abort(self) -> None:
        self._inner._abort()


class Crash(BaseException):
    """The process is dead: none of its cleanup takes effect."""


class SystemCalls:
    """Counts the calls by which this process changes local files, and makes one of them fail.

    calls = SystemCalls()
    with calls.counted(): save(...)            # calls.made: how many there are
    with calls.failing(3): save(...)           # the third raises OSError
    with calls.crashing(3): save(...)          # the third and all later ones raise Crash
    """

    NAMES = ("mkdir", "pwrite", "fsync", "replace", "link", "unlink", "rmdir", "open")

    def __init__(self) -> None:
        self.made = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._patched(lambda n: None):
            yield

    @contextmanager
    def failing(self, at: int) -> Iterator[None]:
        def fault(n: int) -> None:
            if n == at:
                raise OSError(errno.EIO, "injected")

        with self._patched(fault):
            yield

    @contextmanager
    def crashing(self, at: int) -> Iterator[None]:
        def fault(n: int) -> None:
            if n >= at:
                raise Crash

        with self._patched(fault):
            yield

    @contextmanager
    def _patched(self, fault: Callable[[int], None]) -> Iterator[None]:
        self.made = 0

        def wrap(real: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if name != "open" or args[1] & os.O_CREAT:  # opening a file to read it changes nothing
                    self.made += 1
                    fault(self.made)
                return real(*args, **kwargs)

            return call

        with mock.patch.multiple(os, **{name: wrap(getattr(os, name), name) for name in self.NAMES}):
            yield


class FileCalls:
    """Counts the calls of one kind that touch files below a folder, and makes one of them fail as a bad disk does.

    calls = FileCalls(folder, "pread")
    with calls.failing(0): load(...)       # none fails; calls.made: how many there are
    with calls.failing(3): load(...)       # the third raises OSError

    "mmap" is mapping a file, "madvise" advice on one that is mapped; "close" closes first.
    """

    BY_PATH = ("open", "stat", "scandir", "mkdir", "replace", "unlink", "rmdir")
    BY_FILE = ("fstat", "pread", "preadv", "pwrite", "fsync", "close")
    NAMES = (*BY_PATH, *BY_FILE, "mmap", "madvise")

    def __init__(self, folder: str | os.PathLike[str], name: str, error: int = errno.EIO) -> None:
        self.folder, self.name, self.error = os.fspath(folder), name, error
        self.made = self._at = 0
        self._files: set[int] = set()
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.made += 1
            fails = self.made == self._at
        if fails:
            raise OSError(self.error, os.strerror(self.error))

    @contextmanager
    def failing(self, at: int) -> Iterator[None]:
        """Make call number `at`, counted from 1, fail."""
        self.made, self._at = 0, at
        self._files.clear()
        real = {name: getattr(os, name) for name in (*self.BY_PATH, *self.BY_FILE)}

        def is_inside(path: Any) -> bool:
            return not isinstance(path, int) and os.fspath(path).startswith(self.folder)

        def by_path(name: str) -> Callable[..., Any]:
            def call(path: Any, *args: Any, **kwargs: Any) -> Any:
                if name == self.name and is_inside(path):
                    self._count()
                made = real[name](path, *args, **kwargs)
                if name == "open" and is_inside(path):
                    self._files.add(made)
                return made

            return call

        def by_file(name: str) -> Callable[..., Any]:
            def call(file: int, *args: Any, **kwargs: Any) -> Any:
                known = file in self._files
                if name == "close":
                    self._files.discard(file)
                    real[name](file)
                if name == self.name and known:
                    self._count()
                return None if name == "close" else real[name](file, *args, **kwargs)

            return call

        calls = self

        class Mapped(mmap.mmap):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                if calls.name == "mmap":
                    calls._count()
                return super().__new__(cls, *args, **kwargs)

            def madvise(self, *args: int) -> None:
                if calls.name == "madvise":
                    calls._count()
                super().madvise(*args)

        patched = {name: by_path(name) for name in self.BY_PATH} | {name: by_file(name) for name in self.BY_FILE}
        with mock.patch.multiple(os, **patched), mock.patch.object(mmap, "mmap", Mapped):
            yield
