"""Reads the files in an uncompressed tar archive in place, without extracting them."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING, NoReturn

from reshard.errors import RESTORE, CorruptCheckpointError, FormatError, StorageError
from reshard.storage.base import Storage, Writer, check_range, not_found

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_MAX_HEADER_BYTES = 1 << 20
_END_BYTES = 2 * tarfile.BLOCKSIZE


class TarStorage(Storage):
    """An archive in another storage, as a read-only folder.

    Contains only regular files. If two have the same name, the later one counts, as in tar.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        """Read the headers of all members.

        Raises:
            FormatError: the archive is compressed, so reading any part means reading all of it.
            CorruptCheckpointError: not a tar archive, or damaged or truncated.
        """
        self.url = f"{storage.url.rstrip('/')}/{name}"
        self.max_gap_bytes = storage.max_gap_bytes
        self.requests = storage.requests
        self._storage, self._name = storage, name
        head = storage.read(name, 0, min(2, storage.size(name)))
        if head in _COMPRESSED:
            raise FormatError(
                f"{self.url}: the archive is compressed with {_COMPRESSED[head]}, so reading any part means reading "
                "all of it. Decompress it first, into an archive or a folder, and open that"
            )
        self._places = dict(sorted(self._members().items()))

    def _members(self) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        size = self._storage.size(self._name)
        try:
            with tarfile.open(fileobj=_ArchiveFile(self._storage, self._name, size), mode="r:") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if not 0 <= member.size <= size - member.offset_data:
                        raise tarfile.ReadError(f"{name!r} of {member.size} bytes ends behind it")
                    if member.issparse():
                        raise FormatError(f"{self.url}: {name!r} in it is a sparse file, which is not supported")
                    if member.isreg():
                        stop = member.offset_data + member.size
                        length = min(-stop % tarfile.BLOCKSIZE, size - stop)
                        if any(self._storage.read(self._name, stop, length)):
                            raise tarfile.ReadError(f"{name!r} is longer than {member.size} bytes")
                        places[name] = member.offset_data, member.size
                at = archive.offset  # the end, or where tarfile found a damaged header
                if size - at < _END_BYTES or any(self._storage.read(self._name, at, _END_BYTES)):
                    raise tarfile.ReadError(f"at byte {at} there is neither a member nor the archive's end of zeros")
        except (tarfile.TarError, ValueError, EOFError, RecursionError) as error:
            raise CorruptCheckpointError(f"{self.url}: not a complete tar archive: {error}: {RESTORE}") from None
        return places

    def list(self, prefix: str = "") -> dict[str, int]:
        return {name: size for name, (_, size) in self._places.items() if name.startswith(prefix)}

    def size(self, name: str) -> int:
        return self._place(name)[1]

    def version(self, name: str) -> object:
        return self._storage.version(self._name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        at, size = self._place(name)
        check_range(self, name, start, buffer.nbytes, size)
        self._storage.read_into(self._name, at + start, buffer)

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._places:
            raise not_found(name, self.url)
        return self._places[name]

    def create(self, name: str) -> Writer:
        self._refuse(name)

    def publish(self, name: str, data: Buffer) -> None:
        self._refuse(name)

    def delete(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(f"{self.url} is an archive, which is read-only: cannot write {name!r}")


class _ArchiveFile(io.RawIOBase):
    """A file object through which tarfile reads the headers."""

    def __init__(self, storage: Storage, name: str, size: int) -> None:
        self._storage, self._name, self._size, self._at = storage, name, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._at, 0)
        length = left if size is None or size < 0 else min(size, left)
        if length > _MAX_HEADER_BYTES:  # a header with names and sizes is smaller
            raise ValueError(f"a header of {length} bytes at {self._at}")
        data = self._storage.read(self._name, self._at, length) if length else b""
        self._at += length
        return data
