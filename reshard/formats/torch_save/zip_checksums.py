"""The checksums that `torch.save` writes and nobody reads: a CRC-32 of every record of its zip archives.

A `.distcp` file is one archive after another. Each ends with its directory, whose end says how large it is and where it
begins counting; so archives are found from the end of a file towards its front, with no other metadata:

    [archive of item 0 | directory] [archive of item 1 | directory] [archive of item 2 | directory]
    <------------------------------ <------------------------------ <------------------------------ end of file
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator

from reshard.errors import CheckpointError
from reshard.formats.stored.source import FileSource
from reshard.formats.torch_save.zip_archive import ZIP_MAGIC, TorchArchive

__all__ = ["archives", "changed_records", "is_archive"]

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_WINDOW_BYTES = 16 << 20


def is_archive(source: FileSource) -> bool:
    """Whether a file begins as a zip archive."""
    return bytes(source.read(0, min(4, source.nbytes))) == ZIP_MAGIC


def changed_records(files: Iterable[FileSource]) -> Iterator[str]:
    """A text for each record of the archives in `files` whose bytes have another CRC-32 than was written with them.

    Files that do not begin as zip archives are passed over.
    """
    for source in filter(is_archive, files):
        found = archives(source)
        first = found[0][0] if found else source.nbytes
        if first:
            yield f"{source.label}: bytes [0, {first}) do not end as a zip archive does: they were changed"
        for start, length in found:
            try:
                archive = TorchArchive(source, start, length)
                for name, expected in archive.sums.items():
                    at, size = archive.locate(name)
                    if _crc(source, at, size) != expected:
                        yield (
                            f"{source.label}: bytes [{at}, {at + size}), record {name!r} of a zip archive, do not have "
                            "the CRC-32 that was written with them: they were changed (or torch was told to write "
                            "none, by torch.serialization.set_crc32_options)"
                        )
            except CheckpointError as error:
                yield str(error)


def archives(source: FileSource) -> list[tuple[int, int]]:
    """(start, length) of the archives at the end of a file, the first one first."""
    found: list[tuple[int, int]] = []
    stop = source.nbytes
    while (start := _start(source, stop)) is not None:
        found.append((start, stop - start))
        stop = start
    return found[::-1]


def _start(source: FileSource, stop: int) -> int | None:
    """Where the archive that ends at `stop` begins; None if none ends there."""
    if stop < _END.size:
        return None
    end = _END.unpack(source.read(stop - _END.size, _END.size))
    if end[0] != b"PK\x05\x06" or end[7]:
        return None
    size, offset, behind = end[5], end[6], _END.size
    locator_at = stop - _END.size - _LOCATOR64.size
    if locator_at >= _END64.size:
        locator = _LOCATOR64.unpack(source.read(locator_at, _LOCATOR64.size))
        wide = _END64.unpack(source.read(locator_at - _END64.size, _END64.size))
        if locator[0] == b"PK\x06\x07" and wide[0] == b"PK\x06\x06":
            size, offset = wide[8:10]
            behind += _LOCATOR64.size + _END64.size
    start = stop - behind - size - offset
    return start if start >= 0 and bytes(source.read(start, 4)) == ZIP_MAGIC else None


def _crc(source: FileSource, at: int, size: int) -> int:
    crc = 0
    for start in range(at, at + size, _WINDOW_BYTES):
        crc = zlib.crc32(source.raw(start, min(_WINDOW_BYTES, at + size - start)), crc)
    return crc
