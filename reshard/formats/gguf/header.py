"""The header of a GGUF file: what is known of the model, and which tensor lies where.

"GGUF" version u32, tensors u64, values u64      numbers are little-endian
name, kind u32, value                            for each value; text has its length in front, u64
name, dims u32, sizes u64..., type u32, at u64   for each tensor; the first of its sizes is the one that runs fastest
padding, then data                               each tensor begins at the next multiple of `general.alignment`
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.gguf.quantized import BLOCKS, PLAIN
from reshard.formats.stored.source import Source

__all__ = ["Entry", "Header", "read_header"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 8
_PIECE_BYTES = 1 << 20
_MAX_PIECE_BYTES = 16 << 20
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_NUMBERS = {code: struct.Struct("<" + sign) for code, sign in enumerate("BbHhIif")} | {
    code: struct.Struct("<" + sign) for code, sign in zip((10, 11, 12), "Qqd")
}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its shape as torch counts dims, its ggml type, and where its bytes are."""

    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """All tensors of a file in the order of their data, and functions that read what is known of the model."""

    source: Source
    values: Mapping[str, Callable[[], Any]]
    entries: Mapping[str, Entry]

    def number(self, key: str) -> int | None:
        """A whole number among the values; None if it is not there. Raises DamagedCheckpointError if it is none."""
        if key not in self.values:
            return None
        value = self.values[key]()
        if type(value) is not int or value < 0:
            raise DamagedCheckpointError(f"{self.source.label}: {key} should be a number, and is {value!r:.40}")
        return value


class _Cursor:
    """Reads from front to back, in pieces that grow where the storage has no view of its bytes."""

    def __init__(self, source: Source, at: int = 0) -> None:
        self.source, self.at = source, at
        self._view = source.view()
        self._data: bytes | memoryview = b""
        self._start, self._piece_bytes = at, _PIECE_BYTES

    def take(self, length: int) -> bytes | memoryview:
        """The next bytes. Raises DamagedCheckpointError if the file ends before them."""
        at, stop = self.at, self.at + length
        if stop > self.source.nbytes:
            raise DamagedCheckpointError(
                f"{self.source.label}: its header needs bytes [{at}, {stop}), but the file has {self.source.nbytes}; "
                "it was cut short, or is no GGUF file"
            )
        self.at = stop
        if self._view is not None:
            return self._view[at:stop]
        if stop > self._start + len(self._data):
            wanted = min(max(length, self._piece_bytes), self.source.nbytes - at)
            self._start, self._data = at, self.source.read(at, wanted)
            self._piece_bytes = min(2 * self._piece_bytes, _MAX_PIECE_BYTES)
        return self._data[at - self._start : stop - self._start]

    def skip(self, length: int) -> None:
        """Go on behind so many bytes. Raises DamagedCheckpointError if there are fewer."""
        self.source.check(self.at, self.at + length)
        self.at += length

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def text(self) -> bytes:
        return bytes(self.take(self.u64()))

    def name(self) -> str:
        """A text that must be one."""
        data = self.text()
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise DamagedCheckpointError(
                f"{self.source.label}: a name in its header is no text: {data!r:.60}"
            ) from None


def read_header(source: Source) -> Header:
    """Read and check the header of a file.

    Raises:
        DamagedCheckpointError: the file is cut short, or tensors overlap, leave holes or lie outside it.
        FormatError: an unknown version, byte order or type.
    """
    cursor = _Cursor(source)
    if bytes(cursor.take(4)) != MAGIC:
        raise FormatError(f"{source.label}: it does not begin with {MAGIC!r}, so it is no GGUF file")
    version = cursor.u32()
    if version not in _VERSIONS:
        big = version and version & 0xFFFF == 0
        why = "written on a big-endian machine" if big else f"of version {version}; known are 2 and 3"
        raise FormatError(f"{source.label}: a GGUF file {why}, which is not supported")
    count, values_count = cursor.u64(), cursor.u64()
    values: dict[str, Callable[[], Any]] = {}
    for _ in range(values_count):
        key = cursor.name()
        if key in values:
            raise DamagedCheckpointError(f"{source.label}: its header has the value {key!r} twice")
        values[key] = _value(cursor, cursor.u32(), key)
    told = [_tensor_info(cursor) for _ in range(count)] if count <= source.nbytes else _too_many(source, count)
    header = Header(source, values, {})
    return Header(source, values, _entries(source, told, cursor.at, header.number("general.alignment") or _ALIGNMENT))


def _too_many(source: Source, count: int) -> Any:
    raise DamagedCheckpointError(f"{source.label}: its header says {count} tensors, more than the file has bytes")


def _value(cursor: _Cursor, kind: int, key: str) -> Callable[[], Any]:
    """A value; lists are passed over, and read when they are asked for."""
    if kind != _ARRAY:
        value = _scalar(cursor, kind, key)
        return lambda: value
    at = cursor.at
    _pass_array(cursor, key, 0)
    return partial(_read_array, cursor.source, at, key)


def _scalar(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _TEXT:
        data = cursor.text()
        try:
            return data.decode()
        except UnicodeDecodeError:  # as tokens may be
            return data
    if kind == _BOOL:
        return bytes(cursor.take(1)) != b"\0"
    number = _NUMBERS.get(kind)
    if number is None:
        raise DamagedCheckpointError(
            f"{cursor.source.label}: the value {key!r} is of the unknown kind {kind}, at byte {cursor.at}"
        )
    return number.unpack(cursor.take(number.size))[0]


def _pass_array(cursor: _Cursor, key: str, depth: int) -> None:
    kind, count = cursor.u32(), cursor.u64()
    if depth > _MAX_DEPTH:
        raise DamagedCheckpointError(f"{cursor.source.label}: the value {key!r} is nested too deeply to be data")
    if kind in _NUMBERS or kind == _BOOL:
        cursor.skip(count * (_NUMBERS[kind].size if kind in _NUMBERS else 1))
    elif kind == _TEXT:
        for _ in range(count):
            cursor.skip(cursor.u64())
    elif kind == _ARRAY:
        for _ in range(count):
            _pass_array(cursor, key, depth + 1)
    else:
        _scalar(cursor, kind, key)


def _read_array(source: Source, at: int, key: str) -> list[Any]:
    return _array(_Cursor(source, at), key)


def _array(cursor: _Cursor, key: str) -> list[Any]:
    kind, count = cursor.u32(), cursor.u64()
    if kind in _NUMBERS:
        number = _NUMBERS[kind]
        return [value for (value,) in number.iter_unpack(cursor.take(count * number.size))]
    if kind == _ARRAY:
        return [_array(cursor, key) for _ in range(count)]
    return [_scalar(cursor, kind, key) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, ndim = cursor.name(), cursor.u32()
    if ndim > _MAX_DIMS:
        raise DamagedCheckpointError(f"{cursor.source.label}: tensor {name!r} has {ndim} dims, more than ggml knows")
    sizes = tuple(cursor.u64() for _ in range(ndim))
    return name, sizes[::-1], cursor.u32(), cursor.u64()


def _entries(
    source: Source, told: list[tuple[str, tuple[int, ...], int, int]], header_bytes: int, alignment: int
) -> dict[str, Entry]:
    """The tensors, each of which must begin where the padding behind the one before it ends."""
    data_at = -(-header_bytes // alignment) * alignment
    entries: dict[str, Entry] = {}
    wanted = 0
    for name, shape, code, at in told:
        type_, nbytes = _nbytes(source, name, shape, code)
        if name in entries:
            raise DamagedCheckpointError(f"{source.label}: its header has the tensor {name!r} twice")
        if at != wanted:
            raise DamagedCheckpointError(
                f"{source.label}: tensor {name!r} should begin {wanted} bytes behind the header, and the header says "
                f"{at}: it would overlap others or leave a hole"
            )
        wanted = -(-(at + nbytes) // alignment) * alignment
        entries[name] = Entry(shape, type_, data_at + at, nbytes)
        if data_at + at + nbytes > source.nbytes:
            raise DamagedCheckpointError(
                f"{source.label}: tensor {name!r} of shape {list(shape)} and type {type_} ends at byte "
                f"{data_at + at + nbytes}, but the file has {source.nbytes}: it was cut short"
            )
    return entries


def _nbytes(source: Source, name: str, shape: tuple[int, ...], code: int) -> tuple[str, int]:
    """The name of a tensor's type, and how many bytes the tensor has."""
    if code in PLAIN:
        type_, _, itemsize = PLAIN[code]
        return type_, math.prod(shape) * itemsize
    if code not in BLOCKS:
        raise FormatError(
            f"{source.label}: tensor {name!r} is of the ggml type {code}, which is not known here, so that nobody "
            "knows how many bytes it has"
        )
    block = BLOCKS[code]
    last = shape[-1] if shape else 1
    if last % block.numel:
        raise DamagedCheckpointError(
            f"{source.label}: tensor {name!r} of shape {list(shape)} has rows of {last} elements, which {block.name} "
            f"cannot cut into blocks of {block.numel}"
        )
    return block.name, math.prod(shape) // block.numel * block.nbytes
