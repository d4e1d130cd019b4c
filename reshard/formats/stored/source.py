"""Where bytes come from: a file of a storage, a compressed item of a file, or memory. Equal sources compare equal."""

from __future__ import annotations

import mmap
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from reshard.errors import DamagedCheckpointError
from reshard.storage.base import Storage

__all__ = ["DIRECT_BYTES", "BytesSource", "DecodedSource", "FileSource", "Files", "Source"]


DIRECT_BYTES = 1 << 20
"""Runs of at least this many bytes are read by calls to the storage, even where there is a zero-copy view: one call to
the kernel is faster than a page fault for every few pages of a fresh mapping."""


_MADV_POPULATE_READ = 22
"""Linux 5.14: the page tables are filled at once, and not page by page as they are touched."""


class Source(ABC):
    """A run of bytes that windows count in."""

    label: str
    """Its name, for messages."""
    max_gap_bytes: int = 0
    """Reading up to this many bytes that nobody asked for is cheaper than one more request."""
    direct_bytes: int = DIRECT_BYTES
    """Runs of at least so many bytes are better read by a call than copied from the view."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes there are."""

    @abstractmethod
    def view(self) -> memoryview | None:
        """All bytes, read-only and without a copy, where that costs nothing; else None."""

    @abstractmethod
    def _fill(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start`; the range was checked."""

    def check(self, start: int, stop: int) -> None:
        """Raises DamagedCheckpointError unless bytes [start, stop) exist."""
        if not 0 <= start <= stop <= self.nbytes:
            raise DamagedCheckpointError(
                f"{self.label}: wanted bytes [{start}, {stop}), but it has {self.nbytes} bytes; it was cut short, or "
                "what points into it is wrong"
            )

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the writable `buffer` with the bytes from `start`. Raises DamagedCheckpointError if they end early."""
        self.check(start, start + buffer.nbytes)
        if buffer.nbytes:
            self._fill(start, buffer)

    def read(self, start: int, length: int) -> bytes | memoryview:
        """`length` bytes from `start`, a view where there is one. Raises DamagedCheckpointError if they end early."""
        self.check(start, start + length)
        view = self.view()
        if view is not None:
            return view[start : start + length]
        buffer = memoryview(bytearray(length))
        if length:
            self._fill(start, buffer)
        return buffer.toreadonly()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r})"


class FileSource(Source):
    """An object of a storage. Mapped into memory at first use where the storage can.

    `listed` is its size, if that is known already, where the storage has no view of it: a request less.
    """

    def __init__(self, storage: Storage, name: str, listed: int | None = None) -> None:
        self.storage = storage
        self.name = name
        self.label = f"{storage.url.rstrip('/')}/{name}"
        self.max_gap_bytes = storage.max_gap_bytes
        self._view: memoryview | None = None
        self._nbytes: int | None = None
        self._listed = listed
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        if self._nbytes is None:
            self.view()
            assert self._nbytes is not None
        return self._nbytes

    def view(self) -> memoryview | None:
        if self._nbytes is None:
            with self._lock:
                if self._nbytes is None:
                    self._view = self.storage.mapped(self.name)
                    if self._view is not None:
                        self._nbytes = len(self._view)
                    else:
                        self._nbytes = self.storage.size(self.name) if self._listed is None else self._listed
        return self._view

    def prefer_view(self) -> None:
        """Copy from the view from now on, where there is one: its pages were touched, and are at hand."""
        self.direct_bytes = sys.maxsize

    def _fill(self, start: int, buffer: memoryview) -> None:
        view = self.view()
        if view is not None and buffer.nbytes < self.direct_bytes:
            buffer[:] = view[start : start + buffer.nbytes]
        else:
            self.storage.read_into(self.name, start, buffer)

    def read_directly(self, start: int, buffer: memoryview) -> None:
        """Like `read_into`, by calls to the storage even where there is a view: the pages stay unmapped."""
        self.check(start, start + buffer.nbytes)
        if buffer.nbytes:
            self.storage.read_into(self.name, start, buffer)

    def release(self) -> None:
        """Give the mapped pages that were read back: they count as this process's memory until then."""
        self._give_back(0, self.nbytes)  # what is needed again comes from the page cache

    def mapped(self, start: int, length: int) -> memoryview | None:
        """Bytes of the file, brought into memory at once and without a copy, or None where it cannot be so."""
        self.check(start, start + length)
        view = self.view()
        if view is None or not isinstance(view.obj, mmap.mmap):
            return None
        try:  # a page that cannot be read is an error here, but would end the process if it were touched
            self._advise(_MADV_POPULATE_READ, start, length)
        except OSError:
            return None
        return view[start : start + length]

    def unmap(self, start: int, length: int) -> None:
        """Give these bytes back: the pages that lie wholly within them."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        self._give_back(first, start + length - first)

    def _give_back(self, start: int, length: int) -> None:
        with suppress(OSError):  # then the pages stay until the system wants them back itself
            self._advise(mmap.MADV_DONTNEED, start, length)

    def _advise(self, what: int, start: int, length: int) -> None:
        mapped = self._view.obj if self._view is not None else None
        if isinstance(mapped, mmap.mmap) and length > 0:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(what, first, start + length - first)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileSource) and self.storage is other.storage and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.storage), self.name))


class Files:
    """The files of one checkpoint: one `FileSource` a name, so that each is mapped once.

    `listed`: sizes by name, as far as they are known.
    """

    def __init__(self, storage: Storage, listed: Mapping[str, int] = MappingProxyType({})) -> None:
        self.storage = storage
        self._listed = listed
        self._sources: dict[str, FileSource] = {}

    def __getitem__(self, name: str) -> FileSource:
        source = self._sources.get(name)
        if source is None:
            source = self._sources.setdefault(name, FileSource(self.storage, name, self._listed.get(name)))
        return source


class BytesSource(Source):
    """Bytes in memory: constants, padding, what was decoded."""

    def __init__(self, data: bytes | memoryview, label: str = "memory") -> None:
        self.data = data
        self.label = label

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def view(self) -> memoryview:
        return memoryview(self.data)

    def _fill(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.data[start : start + buffer.nbytes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytesSource) and self.data == other.data

    def __hash__(self) -> int:
        return hash((BytesSource, len(self.data), bytes(self.data[:64])))


class DecodedSource(Source):
    """Bytes that exist only decoded, such as a compressed item of a file.

    Decoding is all or nothing, so the last decoded item is kept, and only that one: memory stays within one item
    for each `DecodedSource.Slot` that a checkpoint shares among its items.
    """

    class Slot:
        """Holds the bytes of the source that was decoded last."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.owner: DecodedSource | None = None
            self.data = b""

    def __init__(
        self, file: FileSource, start: int, length: int, codec: str, decode: Callable[[bytes], bytes], slot: Slot
    ) -> None:
        """`decode` turns the `length` bytes at `start` of `file` into the bytes that windows count in."""
        self.file, self.start, self.length, self.codec = file, start, length, codec
        self.label = f"{file.label} (bytes [{start}, {start + length}), {codec})"
        self._decode = decode
        self._slot = slot

    def decoded(self) -> bytes:
        """All bytes, decoded. Raises DamagedCheckpointError if they cannot be."""
        with self._slot.lock:
            if self._slot.owner is not self:
                self._slot.data = self._decode(bytes(self.file.read(self.start, self.length)))
                self._slot.owner = self
            return self._slot.data

    @property
    def nbytes(self) -> int:
        return len(self.decoded())

    def view(self) -> memoryview:
        return memoryview(self.decoded())

    def _fill(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.decoded()[start : start + buffer.nbytes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodedSource) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[FileSource, int, int, str]:
        return self.file, self.start, self.length, self.codec
