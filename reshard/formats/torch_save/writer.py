"""Writes files of `torch.save`: a nested state, tensor by tensor, with the CRC-32 of each record."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch

from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError
from reshard.formats.format import Writing
from reshard.formats.torch_save.archive import written_beside
from reshard.live.dtypes import as_array, dtype_from_name, dtype_name, row_major_bytes
from reshard.live.plain_data import UNSUPPORTED_TENSORS
from reshard.live.tree import builtin_kinds, nested, unflatten, unresolved_class
from reshard.state import KeyPath
from reshard.storage.base import Listing
from reshard.stored.contents import Contents, unknown_class
from reshard.stored.record_checksums import combined, crc32
from reshard.stored.streaming import (
    FilePlan,
    HashedFilesWriter,
    HashingWriter,
    Publication,
    Region,
    StreamedRows,
    Target,
)
from reshard.stored.tensor import Extent


class ArchivesWriter(HashedFilesWriter):
    """Writes files of `torch.save`. In each, stub number n represents its nth part."""

    @abstractmethod
    def value(self, file: FilePlan, numbers: Mapping[str, int]) -> Any:
        """Return the contents of a file, with a stub for each tensor. `numbers` are those of its
        parts, by name."""

    def put(self, file: FilePlan, out: HashingWriter) -> Mapping[str, Any]:
        """Write one archive."""
        value = self.value(file, {part.spec.fqn: number for number, part in enumerate(file.parts)})
        regions = with_sums(self.region(part) for part in file.parts)
        pickled, inside = pickled_with_tensors(value, len(regions))
        archive = begin_archive(out.write, pickled, out.write_later, file.name)
        for number, summed in enumerate(regions):
            tensor_record(archive, f"data/{number}", out, summed)
        for number, tensor in enumerate(inside, len(regions)):
            data = row_major_bytes(as_array(tensor))
            archive.record(f"data/{number}", len(data), [data])
        end_archive(archive)
        return {}


class NestsWriter(ArchivesWriter):
    """Writes archives with the state, or parts of it, nested as it was saved."""

    def __init__(self, contents: Contents, target: Target) -> None:
        super().__init__(contents, target)
        self.left_out += tuple(contents.per_rank)
        self.refused = refused_objects(contents.objects)
        self._kinds, self.changed_classes = builtin_kinds(contents.containers, {*contents.paths_in_order().values()})


class TorchSaveWriter(NestsWriter):
    """Writes everything into one archive. Tied tensors share their memory when they are loaded."""

    def __init__(self, contents: Contents, target: Target) -> None:
        super().__init__(contents, target)
        self.files = (FilePlan(target.name, tuple(map(self.whole, self.names))),)

    def value(self, file: FilePlan, numbers: Mapping[str, int]) -> Any:
        """Return the state, nested as it was saved."""
        contents, aliases = self.contents, self.contents.aliases
        places = {name: numbers[aliases.get(name, name)] for name in (*contents.tensors, *aliases)}
        return nest_of(contents, contents.paths_in_order(), places, self._kinds)

    def finish(self, out: Publication) -> None:
        """Put the file in its place, replacing an older one."""
        out.name_files()

    def occupied(self, names: Listing) -> str | None:
        """Return the file itself. Other files beside it do not matter."""
        return next((file.name for file in self.files if file.name in names), None)


WRITING = Writing(TorchSaveWriter, is_one_file=True)


def nest_of(
    contents: Contents, paths: Mapping[str, KeyPath], places: Mapping[str, int], containers: Mapping[KeyPath, str]
) -> Any:
    """Return the nest of the keys in `paths`, with a stub for each tensor, with the number in `places`."""
    leaves: dict[KeyPath, Any] = {}
    for key, path in paths.items():
        tensor = contents.find(key) if key in places else None
        leaves[path] = contents.objects[key] if tensor is None else TensorStub(tensor.spec, places[key])
    return unflatten(leaves, containers)


_PLAIN = frozenset([bool, dict, float, int, list, str, tuple, type(None)])


def needs_code(objects: Mapping[str, Any]) -> list[str]:
    """Return the keys of objects that `torch.load(weights_only=True)` rejects in a new process,
    such as NumPy's."""
    known = torch.serialization.get_safe_globals()  # other libraries in this process may have added some
    allowed_here = {it[1] if isinstance(it, tuple) else f"{it.__module__}.{it.__qualname__}" for it in known}
    out: list[str] = []
    for key, value in objects.items():
        if {type(part) for part in nested(value)} <= _PLAIN:
            continue
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        steps = pickletools.genops(pickle.dumps(value, protocol=2))
        used = {str(argument).replace(" ", ".") for step, argument, _ in steps if step.name == "GLOBAL"}
        is_refused = bool(used & allowed_here)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError:
            is_refused = True
        if is_refused:
            out.append(key)
    return out


def with_sums(regions: Iterable[Region]) -> list[tuple[Region, int | None]]:
    """Return each region with the CRC-32 that is stored with it. If there is none, the threads that
    read the region compute it."""
    known = ((region, written_crc(region)) for region in regions)
    return [(replace(region, digest=crc32) if crc is None else region, crc) for region, crc in known]


def tensor_record(archive: ArchiveWriter, name: str, out: HashingWriter, summed: tuple[Region, int | None]) -> None:
    """Write the data of one tensor, from `with_sums`, as a record of an archive in `out`."""
    region, known = summed
    crc = known or 0

    def add(piece: StreamedRows) -> None:
        nonlocal crc
        if piece.digest is not None:
            crc = combined(crc, piece.digest, len(piece.data))

    archive.begin(name, region.nbytes)
    out.copy(region, add)
    archive.end(lambda: crc)


# Writes the zip archives of `torch.save`, tensor by tensor, as a stream: the inverse of `archive`.
#
#     archive = ArchiveWriter(out.write)
#     archive.record("data.pkl", len(pickled), [pickled])
#     archive.record("data/0", nbytes, pieces)
#     archive.close()
#
# It neither seeks nor keeps data: sizes are known beforehand, and checksums follow their data.
# Records begin at multiples of 64 bytes of the archive, so that `torch.load(mmap=True)` finds
# aligned tensors.


_ALIGNMENT = 64
_MARK32 = 0xFFFFFFFF
"""Placeholder for a number that needs more than 32 bits: the number is in an extra field."""
LIMIT32 = _MARK32
"""Numbers from this one on are written in 64 bits."""
_FLAGS = 0x0808
"""Sizes and checksum follow the data; names are UTF-8."""
_DATE = 0x0021
"""The first of January 1980, so that files with equal contents are equal."""

_PIECE_BYTES = 1 << 19
"""Data in memory is checksummed and written in pieces that fit into the processor's cache."""

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""Storages with a dtype. All other dtypes are kept in untyped ones."""


@dataclass(frozen=True)
class _ArchiveEntry:
    """An entry of the central directory."""

    before: bytes
    crc: Callable[[], int]
    after: bytes

    @property
    def nbytes(self) -> int:
        return len(self.before) + 4 + len(self.after)

    def encoded(self) -> bytes:
        return self.before + struct.pack("<I", self.crc()) + self.after


class ArchiveWriter:
    """A zip archive that is written sequentially."""

    def __init__(
        self,
        write: Callable[[Any], Any],
        write_later: Callable[[int, Callable[[], bytes]], Any] | None = None,
        path: str = "",
    ) -> None:
        """`write` appends bytes. `write_later` appends bytes that are created once everything
        before them was read. Without it, each tensor is read when it is appended."""
        self._write = write
        self._write_later = write_later or (lambda nbytes, make: write(make()))
        name = PurePath(path).stem
        self._folder = name if name.isascii() and name else "archive"  # the names that torch.save uses
        self._entries: list[_ArchiveEntry] = []
        self._record = b"", 0, 0
        """The record that was begun last: name, position, and length."""
        self.nbytes = 0
        """Number of bytes that were written so far."""

    def _put(self, data: Any) -> None:
        self._write(data)
        self.nbytes += memoryview(data).nbytes

    def _put_later(self, nbytes: int, make: Callable[[], bytes]) -> None:
        self._write_later(nbytes, make)
        self.nbytes += nbytes

    def record(self, name: str, nbytes: int, pieces: Iterable[Any]) -> None:
        """Write a record of `nbytes` bytes. Raises FormatError if the pieces have another total length."""
        self.begin(name, nbytes)
        crc = done = 0
        for piece in pieces:
            crc = crc32(piece, crc)
            self._write(piece)
            done += memoryview(piece).nbytes
        if done != nbytes:
            raise FormatError(f"record {name!r} should have {nbytes} bytes, but {done} were written")
        self.end(lambda: crc)

    def begin(self, name: str, nbytes: int) -> None:
        """Begin a record. Append its `nbytes` bytes next, in the same way as `write`, and then call `end`."""
        full, at = f"{self._folder}/{name}".encode(), self.nbytes
        self._record = full, at, nbytes
        big = nbytes >= LIMIT32
        # extra fields: 64-bit sizes if necessary, then padding to align the data
        wide = struct.pack("<HHQQ", 1, 16, 0, 0) if big else b""
        fill = -(at + 30 + len(full) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, fill) + b"Z" * fill
        size = _MARK32 if big else 0
        self._put(
            struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45 if big else 20, _FLAGS, 0, 0, _DATE, 0, size, size,
                        len(full), len(extra))
            + full + extra
        )  # fmt: skip
        self.nbytes += nbytes

    def end(self, crc: Callable[[], int]) -> None:
        """End the record. `crc` returns the CRC-32 of its bytes when they have been read."""
        full, at, nbytes = self._record
        big = nbytes >= LIMIT32
        sizes = struct.pack("<QQ" if big else "<II", nbytes, nbytes)
        self._put_later(8 + len(sizes), lambda: struct.pack("<4sI", b"PK\x07\x08", crc()) + sizes)
        numbers = [n for n in (nbytes,) * 2 if n >= LIMIT32] + [n for n in (at,) if n >= LIMIT32]
        more = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        small, near = _fitting(nbytes), _fitting(at)
        self._entries.append(
            _ArchiveEntry(
                struct.pack("<4sHHHHHH", b"PK\x01\x02", 45, 45 if numbers else 20, _FLAGS, 0, 0, _DATE),
                crc,
                struct.pack("<IIHHHHHII", small, small, len(full), len(more), 0, 0, 0, 0, near) + full + more,
            )
        )

    def close(self) -> None:
        """Write the central directory, without which the file is not an archive."""
        start, entries = self.nbytes, self._entries
        length, count = sum(entry.nbytes for entry in entries), len(entries)
        self._put_later(length, lambda: b"".join(entry.encoded() for entry in entries))
        end = self.nbytes
        self._put(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start))
        self._put(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        few, small, near = min(count, 0xFFFF), _fitting(length), _fitting(start)
        self._put(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, small, near, 0))


def _fitting(number: int) -> int:
    return number if number < LIMIT32 else _MARK32


def begin_archive(
    write: Callable[[Any], Any],
    pickled: bytes,
    write_later: Callable[[int, Callable[[], bytes]], Any] | None = None,
    path: str = "",
) -> ArchiveWriter:
    """Write an archive up to its tensors' data. The records `data/0`, `data/1`, ... come next, then
    `end_archive`.

    `path`: that of the file, which a reader compares with the name in the archive.
    """
    archive = ArchiveWriter(write, write_later, path)
    archive.record("data.pkl", len(pickled), [pickled])
    for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
        archive.record(name, len(text), [text])
    return archive


def end_archive(archive: ArchiveWriter) -> None:
    """Write the bytes that follow the tensors' data."""
    archive.record("version", 2, [b"3\n"])
    archive.record(".data/serialization_id", 40, [b"0" * 40])
    archive.close()


@dataclass(frozen=True)
class TensorStub:
    """A contiguous tensor whose elements are the record `data/<number>`. Equal numbers share memory when loaded."""

    spec: TensorSpec
    number: int


@dataclass(frozen=True)
class _StubStorage:
    kind: Any
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles stubs as `torch.save` pickles tensors. Tensors in objects become stubs, numbered from `first`."""

    def __init__(self, file: io.BytesIO, first: int) -> None:
        super().__init__(file, protocol=2)
        self.first = first
        self.inside: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _StubStorage):
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.inside.append(obj)
            spec = TensorSpec("", tuple(obj.shape), dtype_name(obj.dtype))
            obj = TensorStub(spec, self.first + len(self.inside) - 1)
        if not isinstance(obj, TensorStub):
            return NotImplemented
        spec, steps, step = obj.spec, [], 1
        for size in reversed(spec.shape):
            steps.append(step)
            step *= max(size, 1)
        name = _STORAGES.get(spec.dtype)
        if name is None:
            storage = _StubStorage(torch.UntypedStorage, obj.number, spec.nbytes)
        else:
            storage = _StubStorage(getattr(torch, name), obj.number, spec.numel)
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (storage, 0, spec.shape, tuple(reversed(steps)), False, hooks)
        # torch says which function rebuilds a tensor of this dtype
        like: Any = torch.empty(0, dtype=dtype_from_name(spec.dtype), device="cpu")
        rebuild = like.__reduce_ex__(2)[0]
        return rebuild, args if name else (*args, dtype_from_name(spec.dtype))


def pickled_state(value: Any) -> bytes:
    """Return the record `data.pkl` of a nest of plain data and `TensorStub`s.

    Raises FormatError for an object that cannot be pickled.
    """
    return pickled_with_tensors(value, 0)[0]


def pickled_with_tensors(value: Any, first: int) -> tuple[bytes, list[torch.Tensor]]:
    """Like `pickled_state`, for tensors in places that only objects can have, such as the key 1.5
    of a dict. They become the records from `data/<first>` on."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, first)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the state cannot be written as torch.save does: {error}") from error
    return buffer.getvalue(), pickler.inside


def save_tensor(tensor: torch.Tensor, file: Any) -> None:
    """Do what `torch.save` does with a contiguous tensor on the CPU that does not share its memory,
    in a fraction of the time: archives of tensors of one dtype and shape differ only in their data.
    Other tensors are left to torch."""
    usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if not usual or str(tensor.dtype).removeprefix("torch.") not in _STORAGES:
        torch.save(tensor, file)
        return
    archive = begin_archive(file.write, pickled_tensor(dtype_name(tensor.dtype), tuple(tensor.shape)))
    data = row_major_bytes(as_array(tensor))
    pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
    archive.record("data/0", len(data), pieces)
    end_archive(archive)


@lru_cache(maxsize=1024)
def pickled_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the record `data.pkl` of one contiguous tensor."""
    return pickled_state(TensorStub(TensorSpec("", shape, dtype), 0))


def refused_objects(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of objects that cannot be pickled here, because their class is not known,
    with the reasons."""
    out: dict[str, str] = {}
    for key, value in objects.items():
        if (path := unknown_class(value)) is not None:
            out[key] = UNSUPPORTED_TENSORS.get(path, "its class is not known here")
        elif (name := unresolved_class(value)) is not None:
            out[key] = f"it is a {name}, or holds one, and only native checkpoints hold that without its class"
    return out


# CRC-32 of records without hashing: each record of a zip archive is followed by its CRC, and the
# CRC of a tensor that consists of such records is combined from theirs.


def written_crc(region: Region) -> int | None:
    """Return the CRC-32 of a region's bytes in row-major order, combined from the CRCs in the files
    beside its chunks.

    None unless each of its chunks has one, and the chunks are consecutive in that order.
    """
    boxes = Window.row_major(0, region.box.sizes, region.stored.itemsize)
    found: list[tuple[int, int, int]] = []
    for chunk, common in region.stored.meeting(region.box):
        run = boxes.crop(common.relative_to(region.box))
        crc = _beside(chunk.place) if common == chunk.box and run.is_contiguous else None
        if crc is None:
            return None
        found.append((run.offset, run.nbytes, crc))
    return _joined(sorted(found), region.nbytes)


def _joined(runs: Sequence[tuple[int, int, int]], nbytes: int) -> int | None:
    """Combine the CRCs of (start, length, CRC) in order. None if they do not cover `nbytes` exactly once."""
    crc = done = 0
    for start, length, one in runs:
        if start != done:
            return None
        crc = combined(crc, one, length)
        done += length
    return crc if done == nbytes else None


def _beside(place: Extent) -> int | None:
    """Return the CRC after the bytes of a complete record, if reading it needs no additional request."""
    is_record = place.descriptor_at is not None and not place.conjugate and place.window.is_contiguous
    if not is_record or place.source.view() is None:
        return None
    return written_beside(place.source, place.window.stop, place.window.nbytes)
