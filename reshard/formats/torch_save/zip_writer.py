"""Writes the zip archives of `torch.save`, tensor by tensor, from a stream: the inverse of `zip_archive`.

    archive = ArchiveWriter(out.write)
    archive.record("data.pkl", len(pickled), [pickled])
    archive.record("data/0", nbytes, pieces)
    archive.close()

Nothing is ever sought or held: sizes are known beforehand, and checksums follow the data they are of; they are taken on
threads beside the writing, in parts, unless they are known. Records begin
at multiples of 64 bytes of the archive, so that `torch.load(mmap=True)` finds aligned tensors.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError
from reshard.formats.pickles.record import Record
from reshard.formats.stored.checksums import combined
from reshard.formats.torch_save.crc32 import summing
from reshard.state.dtypes import dtype_from_name, dtype_name
from reshard.state.memory.arrays import as_array, row_major_bytes

__all__ = [
    "ArchiveWriter",
    "TensorStub",
    "begin_archive",
    "end_archive",
    "pickled_state",
    "save_tensor",
    "unknown_objects",
]

_ALIGNMENT = 64
_MARK32 = 0xFFFFFFFF
"""Stands where a number of 32 bits would be too small: the right one is in an extra field."""
_LIMIT32 = _MARK32
"""From here on numbers are told in 64 bits."""
_FLAGS = 0x0808
"""Sizes and checksum follow the data; names are UTF-8."""
_DATE = 0x0021
"""The first of January 1980: files of equal contents are equal."""

_PIECE_BYTES = 1 << 19
"""What is in memory is summed and written in pieces that stay in the processor's cache."""
_ASIDE_BYTES = 1 << 20
"""Checksums of pieces of at least this size are taken beside the writing."""
_THREADS = 4
"""That take them, each of a part."""

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
"""Storages of a dtype of their own; all other dtypes are kept in untyped ones."""


@dataclass(frozen=True)
class _Entry:
    name: bytes
    at: int
    nbytes: int
    crc: int


class ArchiveWriter:
    """A zip archive that is written from front to end."""

    def __init__(self, write: Callable[[Any], Any], folder: str = "archive") -> None:
        """`write` appends bytes; `folder` is what every record's name begins with."""
        self._write = write
        self._folder = folder
        self._entries: list[_Entry] = []
        self._aside = ThreadPoolExecutor(_THREADS, thread_name_prefix="reshard-crc")
        self.nbytes = 0
        """How many bytes were written so far."""

    def _put(self, data: Any) -> None:
        self._write(data)
        self.nbytes += memoryview(data).nbytes

    def record(self, name: str, nbytes: int, pieces: Iterable[Any], crc: int | None = None) -> None:
        """A record of `nbytes` bytes, of which `crc` is the CRC-32 where it is known.

        Raises FormatError if the pieces add up to another number.
        """
        full = f"{self._folder}/{name}".encode()
        at = self.nbytes
        big = nbytes >= _LIMIT32
        # the extra fields: sizes of 64 bits where needed, then padding up to the alignment of the data
        wide = struct.pack("<HHQQ", 1, 16, 0, 0) if big else b""
        fill = -(at + 30 + len(full) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, fill) + b"Z" * fill
        size = _MARK32 if big else 0
        self._put(
            struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45 if big else 20, _FLAGS, 0, 0, _DATE, 0, size, size,
                        len(full), len(extra))
            + full + extra
        )  # fmt: skip
        taken, done = 0, 0
        for piece in pieces:
            size = memoryview(piece).nbytes
            if crc is not None:
                self._put(piece)
            elif size < _ASIDE_BYTES:
                taken = zlib.crc32(piece, taken)
                self._put(piece)
            else:
                parts = summing(memoryview(piece), self._aside)
                self._put(piece)
                for part, length in parts:
                    taken = combined(taken, part.result(), length)
            done += size
        crc = taken if crc is None else crc
        if done != nbytes:
            raise FormatError(f"record {name!r} should have {nbytes} bytes, but {done} were written")
        self._put(struct.pack("<4sIQQ" if big else "<4sIII", b"PK\x07\x08", crc, nbytes, nbytes))
        self._entries.append(_Entry(full, at, nbytes, crc))

    def close(self) -> None:
        """Write the central directory: before that, the archive is none."""
        self._aside.shutdown()
        start = self.nbytes
        for entry in self._entries:
            wide = [n for n in (entry.nbytes,) * 2 if n >= _LIMIT32] + [n for n in (entry.at,) if n >= _LIMIT32]
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            size, at = _fitting(entry.nbytes), _fitting(entry.at)
            self._put(
                struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 45, 45 if wide else 20, _FLAGS, 0, 0, _DATE,
                            entry.crc, size, size, len(entry.name), len(extra), 0, 0, 0, 0, at)
                + entry.name + extra
            )  # fmt: skip
        length, end, count = self.nbytes - start, self.nbytes, len(self._entries)
        self._put(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start))
        self._put(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        few, small, near = min(count, 0xFFFF), _fitting(length), _fitting(start)
        self._put(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, small, near, 0))


def _fitting(number: int) -> int:
    return number if number < _LIMIT32 else _MARK32


def begin_archive(write: Callable[[Any], Any], pickled: bytes) -> ArchiveWriter:
    """An archive up to its tensors' data: the records `data/0`, `data/1` ... come next, then `end_archive`."""
    archive = ArchiveWriter(write)
    archive.record("data.pkl", len(pickled), [pickled])
    for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
        archive.record(name, len(text), [text])
    return archive


def end_archive(archive: ArchiveWriter) -> None:
    """What follows the tensors' data."""
    archive.record("version", 2, [b"3\n"])
    archive.record(".data/serialization_id", 40, [b"0" * 40])
    archive.close()


@dataclass(frozen=True)
class TensorStub:
    """A contiguous tensor whose elements are the record `data/<number>`. Equal numbers share memory when loaded."""

    spec: TensorSpec
    number: int


@dataclass(frozen=True)
class _Storage:
    kind: Any
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles stubs as `torch.save` pickles the tensors that they stand for."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorStub):
            return NotImplemented
        spec, steps, step = obj.spec, [], 1
        for size in reversed(spec.shape):
            steps.append(step)
            step *= max(size, 1)
        name = _STORAGES.get(spec.dtype)
        if name is None:
            storage = _Storage(torch.UntypedStorage, obj.number, spec.nbytes)
        else:
            storage = _Storage(getattr(torch, name), obj.number, spec.numel)
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (storage, 0, spec.shape, tuple(reversed(steps)), False, hooks)
        # torch itself says by which function a tensor of this dtype is made again
        like: Any = torch.empty(0, dtype=dtype_from_name(spec.dtype), device="cpu")
        rebuild = like.__reduce_ex__(2)[0]
        return rebuild, args if name else (*args, dtype_from_name(spec.dtype))


def pickled_state(value: Any) -> bytes:
    """The record `data.pkl` of a nest of plain data and `TensorStub`s.

    Raises FormatError for an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=2).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the state cannot be written as torch.save does: {error}") from error
    return buffer.getvalue()


def save_tensor(tensor: torch.Tensor, file: Any) -> None:
    """What `torch.save` does with a contiguous tensor on the CPU that has its memory for itself, in a fraction of the
    time: archives of tensors of one dtype and shape differ in nothing but the data. Others are left to torch."""
    usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if not usual or str(tensor.dtype).removeprefix("torch.") not in _STORAGES:
        torch.save(tensor, file)
        return
    archive = begin_archive(file.write, _pickled_tensor(tensor.dtype, tuple(tensor.shape)))
    data = row_major_bytes(as_array(tensor))
    pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
    archive.record("data/0", len(data), pieces)
    end_archive(archive)


@lru_cache(maxsize=1024)
def _pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return pickled_state(TensorStub(TensorSpec("", shape, dtype_name(dtype)), 0))


def unknown_objects(objects: Mapping[str, Any]) -> list[str]:
    """Keys of objects whose class is not known here, so that they cannot be written."""
    return [key for key, value in objects.items() if isinstance(value, Record)]
