"""The zip archives of `torch.save`: where they contain the bytes of tensors, and their checksums."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

from planners.geometry.box import Range
from reshard.errors import CheckpointError, CorruptCheckpointError, FormatError
from reshard.formats.torch_save.pickles import TensorRef, load_pickle, plain
from reshard.live.plain_data import UNSUPPORTED_TENSORS
from reshard.stored.record_checksums import RecordChecksums, crc32
from reshard.stored.source import FileSource, Source
from reshard.stored.tensor import Extent, read_place

#     archive/data.pkl     the structure, as a pickle
#     archive/byteorder    "little"
#     archive/data/0       raw bytes of storage "0"
#     central directory    names, sizes, header offsets
#
# Records are stored uncompressed. An archive can be a file, or an item within a file: its offsets
# count from its own start. Local headers lack the sizes, which are in the central directory at the end.


ZIP_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTORS = (struct.Struct("<4sIQQ"), struct.Struct("<4sIII"))
"""The bytes after a record, with sizes of 64 bits or 32 bits."""
_MOST_EXTRA_BYTES = 128
"""Most extra bytes of a local header: up to 20 for long sizes, and padding to 64 bytes."""
_HEAD_BYTES = 4096
"""Enough for the headers and the pickle of an item that is one tensor."""
_COMPRESSED = "its records are compressed, which torch.save never does"
_SCRIPT = "it is a TorchScript program, not a state. Load it with torch.jit.load and save its state_dict() instead"


class TorchArchive:
    """A zip archive of `torch.save` at [start, start + length) of a source."""

    def __init__(self, source: Source, start: int = 0, length: int | None = None) -> None:
        """Read the central directory. Raises CorruptCheckpointError if it is missing or malformed."""
        self.source = source
        self.start = start
        self.length = source.nbytes - start if length is None else length
        self.label = source.label if length is None else f"{source.label}, item at byte {start}"
        self.sums: dict[str, int] = {}
        """CRC-32 of each record's data, by name."""
        self.records = self._directory()
        """Name without the folder -> offset of the record's header, its size, and its full name."""
        if "data.pkl" not in self.records:
            raise FormatError(f"{self.label}: a zip archive without data.pkl, so not one of torch.save")
        if "byteorder" in self.records and self.read("byteorder") not in (b"little", b""):
            raise FormatError(f"{self.label}: written on a big-endian machine, which is not supported")

    def _bytes(self, at: int, length: int) -> bytes | memoryview:
        if not 0 <= at <= at + length <= self.length:
            raise self._damaged(f"bytes [{at}, {at + length}) are outside its {self.length} bytes")
        return self.source.read(self.start + at, length)

    def _damaged(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.label}: the zip archive is damaged: {what}")

    def _directory(self) -> dict[str, tuple[int, int, bytes]]:
        count, size, at = self._find_directory()
        data = self._bytes(at, size)
        records: dict[str, tuple[int, int, bytes]] = {}
        position = 0
        for _ in range(count):
            if position + _CENTRAL.size > size:
                raise self._damaged("its central directory is truncated")
            entry = _CENTRAL.unpack_from(data, position)
            name_length, extra_length, comment_length = entry[10:13]
            name_at = position + _CENTRAL.size
            extra_at = name_at + name_length
            position = extra_at + extra_length + comment_length
            if entry[0] != b"PK\x01\x02" or position > size:
                raise self._damaged("its central directory is malformed")
            written = bytes(data[name_at:extra_at])
            # torch.save names this folder after the file, without its suffix, or "archive"
            self.folder, _, name = written.decode("utf-8", "replace").partition("/")
            if entry[4] != 0:
                raise FormatError(f"{self.label}: {_SCRIPT if name.startswith('code/') else _COMPRESSED}")
            full, header = _zip64_sizes(bytes(data[extra_at : extra_at + extra_length]), entry[9], entry[16])
            if name and name in records:
                raise self._damaged(f"it has two records {name!r}")
            records[name], self.sums[name] = (header, full, written), entry[7]
        self._ends = sorted([*(header for header, _, _ in records.values()), self.length])
        if len({*self._ends}) <= len(records):
            raise self._damaged("two of its records are at one place")
        return records

    def _find_directory(self) -> tuple[int, int, int]:
        """Return the number of entries of the directory, its number of bytes, and its position."""
        start = max(self.length - 1024, 0)
        tail = bytes(self._bytes(start, self.length - start))
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(tail):
            raise self._damaged("it has no end; the file was truncated, or is not a zip archive")

        def read(first: int, length: int) -> bytes | memoryview:
            return tail[first - start :][:length] if first >= start else self._bytes(first, length)

        found = _read_end(read, start + at)
        if found is None:
            raise self._damaged("its zip64 end is malformed")
        count, size, offset, end = found
        if offset + size != end:  # the end of one of two consecutive archives may fit the other
            raise self._damaged(
                f"its directory ends at byte {offset + size}, not {end}: bytes are missing, or there are several"
            )
        return count, size, offset

    def locate(self, name: str) -> tuple[int, int]:
        """Return where the data of a record begins in the source, and its length. Raises
        CorruptCheckpointError if absent."""
        if name not in self.records:
            raise self._damaged(f"it has no record {name!r}")
        header, size, written = self.records[name]
        length = _LOCAL.size + len(written) + _MOST_EXTRA_BYTES
        head = self._bytes(header, min(length, self.length - header))
        if (found := _record_start(head, written)) is None:
            raise self._damaged(f"the header of record {name!r} is not where its directory says")
        at = header + found
        # records are disjoint: the bytes of another record, with its checksum, are not this one's
        if at + size > self._ends[bisect_right(self._ends, header)]:
            raise self._damaged(f"record {name!r} of {size} bytes ends behind the archive, or in the next one")
        return self.start + at, size

    def read(self, name: str) -> bytes | memoryview:
        """Return the bytes of a record. Raises CorruptCheckpointError if their CRC-32 differs."""
        at, size = self.locate(name)
        add_record(self.source, at, size, lambda: self.sums[name])
        return self.source.read(at, size)

    def value(self) -> Any:
        """Return what was saved, with a `TensorRef` for each tensor and a `Record` for each object
        of an unknown class."""
        return load_pickle(self.read("data.pkl"), where=self.label)

    def place(self, ref: TensorRef) -> Extent:
        """Return where the elements of a tensor are. Raises CorruptCheckpointError if its storage
        has another size."""
        record = f"data/{ref.storage.key}"
        at, size = self.locate(record)
        if size != ref.storage.nbytes:
            raise self._damaged(f"storage {ref.storage.key!r} has {size} bytes, the pickle says {ref.storage.nbytes}")
        add_record(self.source, at, size, lambda: self.sums[record])
        return make_place(self.source, ref, at, is_record=True)

    def object(self) -> Any:
        """Return what was saved, as plain data; tensors in it are read."""
        return plain(self.value(), lambda ref: read_place(self.place(ref), ref.dtype))


_REPEATED_BYTES, _MOST_REPEATS = 256 << 20, 64
"""A tensor with overlapping elements, as `expand` makes them, may always have this many bytes, or
else this multiple of its storage's size. This bounds work by what is stored."""


def add_record(source: Source, start: int, nbytes: int, crc: Callable[[], int | None]) -> None:
    """Register a record of a file, so that reads of it are compared with the CRC-32 that was
    written with it. torch writes 0 if its CRC-32 is switched off."""
    if isinstance(source, FileSource):
        if source.checksums is None:
            source.checksums = RecordChecksums()
        if isinstance(source.checksums, RecordChecksums):
            source.checksums.add(start, start + nbytes, lambda: crc() or None)


def written_beside(source: Source, at: int, nbytes: int) -> int | None:
    """Return the CRC-32 after a record of `nbytes` bytes at `at`, or None if there is none. torch
    writes 0 if its CRC-32 is off."""
    for form in _DESCRIPTORS:
        if at + form.size <= source.nbytes:
            mark, crc, *sizes = form.unpack(source.raw(at, form.size))
            if mark == _DESCRIPTOR and sizes == [nbytes] * 2:
                return int(crc) or None
    return None


def make_place(source: Source, ref: TensorRef, storage_at: int, *, is_record: bool = False) -> Extent:
    """Return where a tensor's elements are. Its storage begins at byte `storage_at` of `source`;
    `is_record`: as a record of a zip archive.

    Raises FormatError for unsupported tensors, such as a few bytes that are repeated far too often.
    """
    window, nbytes = ref.window(storage_at), ref.storage.nbytes
    if window.nbytes > max(_REPEATED_BYTES, _MOST_REPEATS * nbytes):
        raise FormatError(
            f"{source.label}: a tensor of size {list(ref.size)} and strides {list(ref.stride)} repeats a storage of "
            f"{nbytes} bytes until it has {window.nbytes}, more than the allowed {_MOST_REPEATS} times. Save what it "
            "repeats, without expand()"
        )
    is_all = is_record and window.offset == storage_at and window.nbytes == nbytes
    return Extent(source, window, ref.conjugate, storage_at + nbytes if is_all else None)


def _read_end(read: Callable[[int, int], bytes | memoryview], at: int) -> tuple[int, int, int, int] | None:
    """Parse the end of an archive, at `at`. Return the number of entries of its directory, the
    directory's size in bytes, its recorded position, and its actual end. Returns None if the zip64
    end before it is incomplete."""
    _, _, _, _, count, size, offset, _ = _END.unpack(read(at, _END.size))
    locator_at, end = at - _LOCATOR64.size, at - _LOCATOR64.size - _END64.size
    if end < 0 or bytes(read(locator_at, 4)) != b"PK\x06\x07":
        return count, size, offset, at
    fields = _END64.unpack(read(end, _END64.size))
    return (*fields[7:10], end) if fields[0] == b"PK\x06\x06" else None


def _record_start(head: bytes | memoryview, name: bytes) -> int | None:
    """Return where data begins after the local header in `head`, or None if it is not this record's
    header.

    torch aligns data with a last field, "FB". Its length leads to the same position.
    """
    if len(head) < _LOCAL.size + len(name):
        return None
    fields = _LOCAL.unpack_from(head)
    at = _LOCAL.size + len(name)
    if fields[0] != ZIP_MAGIC or fields[9] != len(name):
        return None
    if head[_LOCAL.size : at] != name:
        return None
    stop = at + int(fields[10])
    while at + 4 <= len(head):
        kind, length = struct.unpack_from("<2sH", head, at)
        end = at + 4 + length
        inside = bytes(head[at + 4 : end])
        if kind == b"FB" and not inside.strip(b"Z"):
            return end if end == stop else None
        if at >= stop:
            break
        at = end
    return stop


def _zip64_sizes(extra: bytes, size: int, header: int) -> tuple[int, int]:
    """Return size and header offset from the zip64 field, for numbers that need more than 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = [v for (v,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            if size == 0xFFFFFFFF and wide:
                size = wide.pop(0)
                wide = wide[1:]  # the compressed size, which is equal
            if header == 0xFFFFFFFF and wide:
                header = wide[0]
        at += 4 + length
    return size, header


def read_head(source: Source, start: int, length: int) -> bytes:
    """Return the first bytes of the item at [start, start + length), which `locate_item` needs."""
    source.check(start, start + length)
    return bytes(source.read(start, min(length, _HEAD_BYTES)))


def locate_item(source: Source, start: int, length: int, head: bytes) -> tuple[Extent, str]:
    """Return where the only tensor of an archive at [start, start + length) is, and its dtype.

    The first bytes usually suffice: the pickle comes first, and headers say where records begin.

    Raises CorruptCheckpointError or FormatError if the archive is not that of one plain tensor.
    """
    found = _scan_head(head)
    if found is None:
        archive = TorchArchive(source, start, length)
        ref = _one_tensor(archive.value(), archive.label)
        return archive.place(ref), ref.dtype
    where = f"{source.label}, item at byte {start}"
    pickle_at, pickled, crc, data_at = found
    if isinstance(source, FileSource) and crc and source.checking.enabled:  # now, because it was already read
        source.checking.add(compared=len(pickled))
        if crc32(pickled) != crc:
            source.refuse_changed([(start + pickle_at, start + pickle_at + len(pickled))])
    ref = _one_tensor(_parse_cached(pickled), where)
    if ref.storage.key != "0":
        raise CorruptCheckpointError(f"{where}: no storage {ref.storage.key!r}")
    # at least 100 bytes follow the storage: its descriptor, more records, and the directory
    at, nbytes = start + data_at, ref.storage.nbytes
    if data_at + nbytes + 100 > length:
        raise CorruptCheckpointError(
            f"{where}: its storage of {nbytes} bytes does not fit into the {length} bytes of the item"
        )
    add_record(source, at, nbytes, partial(written_beside, source, at + nbytes, nbytes))
    return make_place(source, ref, at, is_record=True), ref.dtype


def _scan_head(head: bytes) -> tuple[int, bytes, int, int] | None:
    """Return where the pickle begins, the pickle, its CRC-32, and where storage "0" begins; None if
    the head is too short."""
    if len(head) < _LOCAL.size or head[:4] != ZIP_MAGIC:
        return None
    fields = _LOCAL.unpack_from(head)
    folder, _, file = head[_LOCAL.size : _LOCAL.size + fields[9]].partition(b"/")
    pickle_at = _LOCAL.size + fields[9] + fields[10]
    if file != b"data.pkl" or fields[3] != 0:
        return None
    order = head.find(folder + b"/byteorder", pickle_at)
    if order >= _LOCAL.size:
        header = _LOCAL.unpack_from(head, order - _LOCAL.size)
        at = order + header[9] + header[10]
        if header[0] == ZIP_MAGIC and head[at : at + 6] != b"little":
            return None  # the full reader reports the problem
    wanted = folder + b"/data/0"
    header_at = head.find(wanted, pickle_at) - _LOCAL.size
    if header_at < 0:
        return None
    data_at = _record_start(head[header_at:], wanted)
    if data_at is None or _LOCAL.unpack_from(head, header_at)[3] != 0:
        return None
    stop = head.find(b"." + _DESCRIPTOR, pickle_at, header_at) + 1
    if not stop:
        return None
    crc = int.from_bytes(head[stop + 4 : stop + 8], "little")
    return pickle_at, head[pickle_at:stop], crc, header_at + data_at


_parse_cached = lru_cache(maxsize=4096)(partial(load_pickle, where="the item"))
"""Cached, because shards of one shape have identical pickles."""


def _one_tensor(value: Any, where: str) -> TensorRef:
    if not isinstance(value, TensorRef):
        path = getattr(value, "path", type(value).__name__)
        found = UNSUPPORTED_TENSORS.get(path) or f"a {path}"
        raise FormatError(f"{where}: expected one plain tensor, found {found}")
    return value


# The checksums that `torch.save` writes, and that torch never compares: a CRC-32 of every record.
#
# A `.distcp` file consists of archives. Each ends with its central directory, whose last record says how
# large the directory is, and at which offset it begins. So archives can be found from the end of a
# file, without other metadata:
#
#     [archive of item 0 | directory] [archive of item 1 | directory] [archive of item 2 | directory]
#     <------------------------------ <------------------------------ <------------------------------ end of file


_WINDOW_BYTES = 16 << 20


def is_archive(source: FileSource) -> bool:
    """Return True if a file begins like a zip archive."""
    return bytes(source.read(0, min(4, source.nbytes))) == ZIP_MAGIC


def changed_records(files: Iterable[FileSource]) -> Iterator[tuple[str, int, int]]:
    """Yield a message, the first byte, and one past the last byte for each record whose bytes do
    not match its CRC-32. The bytes are 0 and 0 if unknown.

    Files that do not begin like zip archives are skipped.
    """
    for source in filter(is_archive, files):
        found = archives(source)
        first = found[0][0] if found else source.nbytes
        if first:
            yield f"{source.label}: bytes [0, {first}) do not end as a zip archive does: they were changed", 0, first
        for start, length in found:
            try:
                archive = TorchArchive(source, start, length)
                for name, expected in archive.sums.items():
                    at, size = archive.locate(name)
                    if _crc(source, at, size) != expected:
                        text = (
                            f"{source.label}: bytes [{at}, {at + size}), record {name!r} of a zip archive, do not have "
                            "the CRC-32 that was written with them: some were changed (or "
                            "torch.serialization.set_crc32_options was off when they were saved)"
                        )
                        yield text, at, at + size
            except CheckpointError as error:
                yield str(error), 0, 0


def archives(source: FileSource) -> list[Range]:
    """Return (start, length) of the archives at the end of a file, in order."""
    found: list[Range] = []
    stop = source.nbytes
    while (start := _start(source, stop)) is not None:
        found.append((start, stop - start))
        stop = start
    return found[::-1]


def _start(source: FileSource, stop: int) -> int | None:
    """Return where the archive that ends at `stop` begins; None if none ends there."""
    at = stop - _END.size
    if at < 0:
        return None
    mark, *_, comment_bytes = _END.unpack(source.read(at, _END.size))
    found = None if mark != b"PK\x05\x06" or comment_bytes else _read_end(source.read, at)
    if found is None:
        return None
    _, size, offset, end = found
    start = end - size - offset
    return start if start >= 0 and bytes(source.read(start, 4)) == ZIP_MAGIC else None


def _crc(source: FileSource, at: int, size: int) -> int:
    crc = 0
    for start in range(at, at + size, _WINDOW_BYTES):
        crc = crc32(source.raw(start, min(_WINDOW_BYTES, at + size - start)), crc)
    return crc
