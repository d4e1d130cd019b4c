"""GGUF files of llama.cpp, with their metadata and quantized tensors: one file, or several of one model."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from planners.geometry.box import Box, Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec, itemsize
from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.format import Format, at_top
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import NO_CHECKSUMS
from reshard.stored.contents import Contents, Facts, LazyMapping, Makers
from reshard.stored.source import Files, Source
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

# A block is some elements of one row with a common scale, sometimes an offset, and sub-blocks with
# small integer scales. The arithmetic is ggml's, operation by operation in float32.


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PLAIN: dict[int, tuple[str, str]] = {
    0: ("F32", "float32"),
    1: ("F16", "float16"),
    24: ("I8", "int8"),
    25: ("I16", "int16"),
    26: ("I32", "int32"),
    27: ("I64", "int64"),
    28: ("F64", "float64"),
    30: ("BF16", "bfloat16"),
}
"""ggml's number of a type -> its name in ggml and in torch."""


@dataclass(frozen=True)
class Block:
    """A type of quantized blocks."""

    name: str
    numel: int
    nbytes: int
    values: Callable[[Bytes], Floats] | None = None
    """Converts blocks, one per row, to the elements that they represent, in any shape. None if not known here."""


_TWO_BITS = np.array([0, 2, 4, 6], dtype=np.uint8)
"""Where each of four numbers in a byte begins."""


def _half(data: Bytes, dtype: str = "<f2") -> Floats:
    """Return the float16 numbers in the bytes of each row, or those of another dtype, as float32."""
    return np.ascontiguousarray(data).view(dtype).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Return the low halves of the n bytes of each row, then the high halves."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _bits(data: Bytes) -> Bytes:
    return np.unpackbits(data, axis=1, bitorder="little")


def _bit_planes(data: Bytes) -> Bytes:
    """Return eight rows: bit 0 of all bytes, bit 1 of all bytes, up to bit 7."""
    return data[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    five = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks[:, :2]) * (five.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    five = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks[:, :2]) * five + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _half(blocks[:, 2:], "i1")


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    """Decode eight sub-blocks, each with a scale and an offset of 6 bits, 12 bytes in total: the
    upper two bits of the last four are stored above the first four."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    offsets = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    steps, starts = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * offsets
    values: Floats = steps[:, :, None] * quants - starts[:, :, None]
    return values


def _pairs(data: Bytes) -> Bytes:
    """Divide 128 bytes into eight rows of 32 elements: for each 32 bytes, their low halves, then
    their high halves."""
    quarters = data.reshape(len(data), 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(len(data), 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _pairs(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _pairs(blocks[:, 48:]) | _bit_planes(blocks[:, 16:48]) << np.uint8(4))


def _q6_k(blocks: Bytes) -> Floats:
    """Decode halves of 128 elements: 64 bytes with the lower four bits, 32 with the upper two, and
    a scale for 16 elements."""
    low = blocks[:, :128].reshape(len(blocks), 2, 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    upper = high >> _TWO_BITS[:, None] & 3
    lower = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    six = (lower | upper << 4).astype(np.float32) - 32
    return _sixteens(blocks, _half(blocks[:, 208:]) * _half(blocks[:, 192:208], "i1"), six)


def _two_bit_numbers(data: Bytes) -> Bytes:
    """Return the 256 two-bit numbers in 64 bytes. Each 32 bytes contain four rows of 32, the lowest
    bits first."""
    return data.reshape(len(data), 2, 1, 32) >> _TWO_BITS[:, None] & np.uint8(3)


def _sixteens(blocks: Bytes, steps: Floats, quants: Any) -> Floats:
    """Decode sixteen sub-blocks of 16 elements, each with its own step."""
    values: Floats = steps[:, :, None] * quants.reshape(len(blocks), 16, 16)
    return values


def _q2_k(blocks: Bytes) -> Floats:
    steps = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    starts = _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4)
    return _sixteens(blocks, steps, _two_bit_numbers(blocks[:, 16:80])) - starts[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    """Decode elements of three bits: 4 is subtracted where the third bit is 0. Scales have 6 bits,
    whose upper two are stored after the lower four."""
    third = _bit_planes(blocks[:, :32])
    low = _two_bit_numbers(blocks[:, 32:96]).reshape(len(blocks), 8, 32).astype(np.int8)
    upper = (blocks[:, None, 104:108] >> _TWO_BITS[:, None] & 3).reshape(-1, 16)
    scales = (_nibbles(blocks[:, 96:104]) | upper << 4).astype(np.float32) - 32
    quants = low - ((third ^ 1) << 2).astype(np.int8)
    return _sixteens(blocks, _half(blocks[:, 108:]) * scales, quants)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _IQ4[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    """Decode eight sub-blocks. Their scales have 6 bits, whose upper two are stored together in two bytes."""
    upper = (blocks[:, 2:4, None] >> _TWO_BITS & 3).reshape(-1, 8)
    low = (blocks[:, 4:8, None] >> _TWO_BITS[::2] & 15).reshape(-1, 8)
    steps = _half(blocks[:, :2]) * ((low | upper << 4).astype(np.float32) - 32)
    parts = blocks[:, 8:].reshape(-1, 16)
    return steps[:, :, None] * _IQ4[_nibbles(parts)].reshape(len(blocks), 8, 32)


def _mxfp4(blocks: Bytes) -> Floats:
    """Decode 4-bit floats. The scale is an exponent, 2 ** (e - 128), because elements are stored in halves."""
    steps = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return steps * _FP4[_nibbles(blocks[:, 1:])]


BLOCKS: dict[int, Block] = {
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    10: Block("Q2_K", 256, 84, _q2_k),
    11: Block("Q3_K", 256, 110, _q3_k),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18, _iq4_nl),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136, _iq4_xs),
    29: Block("IQ1_M", 256, 56),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66),
    39: Block("MXFP4", 32, 17, _mxfp4),
}
"""Quantized types by ggml's number."""


class DequantizedSource(Source):
    """The float32 elements of a quantized tensor, computed for the requested bytes."""

    max_gap_bytes = 1 << 16
    _PIECE_NUMEL = 1 << 18

    def __init__(self, source: Source, start: int, numel: int, block: Block, label: str) -> None:
        """`start` is the position of its blocks in `source`. The block must have `values`."""
        self.source, self.start, self.block, self.label = source, start, block, label
        self._numel = numel
        self._key = source, start, numel, block.name

    @property
    def nbytes(self) -> int:
        return self._numel * 4

    def view(self) -> memoryview | None:
        return None

    def _fill(self, start: int, buffer: memoryview) -> None:
        step = self._PIECE_NUMEL * 4
        for at in range(start, start + buffer.nbytes, step):
            stop = min(at + step, start + buffer.nbytes)
            buffer[at - start : stop - start] = self._values(at, stop)

    def _values(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the elements."""
        assert self.block.values is not None
        bytes_of_block = self.block.numel * 4
        first, last = start // bytes_of_block, -(-stop // bytes_of_block)
        length = (last - first) * self.block.nbytes
        data = self.source.read(self.start + first * self.block.nbytes, length, elements=True)
        blocks = np.frombuffer(data, np.uint8).reshape(last - first, self.block.nbytes)
        with np.errstate(all="ignore"):  # scales of damaged or odd files may be infinite
            values: Any = np.ascontiguousarray(self.block.values(blocks), np.dtype("<f4"))
        found = memoryview(values.reshape(-1).view(np.uint8))
        return found[start - first * bytes_of_block : stop - first * bytes_of_block]


# The header of a GGUF file: the model's metadata, and where each tensor is. Numbers are little-endian.
#
#     "GGUF", version u32, number of tensors u64, number of values u64
#     name, kind u32, value                                  for each value; text follows its length
#     name, dims u32, sizes u64..., type u32, offset u64     for each tensor; the innermost size is first
#     padding, then data                                     tensors begin at multiples of `general.alignment`


MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 8
_PIECE_BYTES = 1 << 20
_MAX_PIECE_BYTES = 16 << 20
_NUMBERS = {code: struct.Struct("<" + sign) for code, sign in zip((*range(7), 10, 11, 12), "BbHhIifQqd", strict=True)}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: its shape as torch counts dims, its ggml type, and where its bytes are."""

    shape: Shape
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """All tensors of a file in the order of their data, and functions that read the metadata of the model."""

    source: Source
    values: Makers
    entries: Mapping[str, GgufTensor]

    def number(self, key: str) -> int | None:
        """Return a whole number among the values, or None if it is missing. Raises
        CorruptCheckpointError for other values."""
        if key not in self.values:
            return None
        value = self.values[key]()
        if type(value) is not int or value < 0:
            raise CorruptCheckpointError(f"{self.source.label}: {key} should be a number, and is {value!r:.40}")
        return value


class _Cursor:
    """Reads from front to back, in pieces that grow if the storage has no view of its bytes."""

    def __init__(self, source: Source, at: int = 0) -> None:
        self.source, self.at = source, at
        self._view = source.view()
        self._data: bytes | memoryview = b""
        self._start, self._piece_bytes = at, _PIECE_BYTES

    def take(self, length: int) -> bytes | memoryview:
        """Return the next bytes. Raises CorruptCheckpointError if the file ends before them."""
        at, stop = self.at, self.at + length
        if stop > self.source.nbytes:
            raise CorruptCheckpointError(
                f"{self.source.label}: its header needs bytes [{at}, {stop}), but the file has {self.source.nbytes}; "
                "it was truncated, or is not a GGUF file"
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
        """Skip this many bytes. Raises CorruptCheckpointError if there are fewer."""
        self.source.check(self.at, self.at + length)
        self.at += length

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> bytes:
        return bytes(self.take(self.u64()))

    def name(self) -> str:
        """Return the next value, which must be text."""
        data = self.text()
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise CorruptCheckpointError(
                f"{self.source.label}: a name in its header is not text: {data!r:.60}"
            ) from None


def read_header(source: Source) -> GgufHeader:
    """Read and check the header of a file.

    Raises:
        CorruptCheckpointError: the file is truncated, or tensors overlap, leave gaps, or are
            outside it.
        FormatError: an unknown version, byte order or type.
    """
    cursor = _Cursor(source)
    if bytes(cursor.take(4)) != MAGIC:
        raise FormatError(f"{source.label}: it does not begin with {MAGIC!r}, so it is not a GGUF file")
    version = cursor.u32()
    if version not in _VERSIONS:
        big = version and version & 0xFFFF == 0
        why = "written on a big-endian machine" if big else f"of version {version}; known are 2 and 3"
        raise FormatError(f"{source.label}: a GGUF file {why}, which is not supported")
    count, values_count = cursor.u64(), cursor.u64()
    values: Makers = {}
    for _ in range(values_count):
        key = cursor.name()
        if key in values:
            raise CorruptCheckpointError(f"{source.label}: its header has the value {key!r} twice")
        values[key] = _value(cursor, cursor.u32(), key)
    if count > source.nbytes:
        raise CorruptCheckpointError(f"{source.label}: its header says {count} tensors, more than the file has bytes")
    told = [_tensor_info(cursor) for _ in range(count)]
    header = GgufHeader(source, values, {})
    return GgufHeader(
        source, values, _entries(source, told, cursor.at, header.number("general.alignment") or _ALIGNMENT)
    )


def _value(cursor: _Cursor, kind: int, key: str) -> Callable[[], Any]:
    """Return a value. Lists are skipped, and read on request."""
    if kind != _ARRAY:
        value = _scalar(cursor, kind, key)
        return lambda: value
    source, at = cursor.source, cursor.at
    _pass_array(cursor, key, 0)
    return lambda: _array(_Cursor(source, at), key)


def _scalar(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _TEXT:
        data = cursor.text()
        try:
            return data.decode()
        except UnicodeDecodeError:  # tokens need not be valid UTF-8
            return data
    if kind == _BOOL:
        return bytes(cursor.take(1)) != b"\0"
    number = _NUMBERS.get(kind)
    if number is None:
        raise CorruptCheckpointError(
            f"{cursor.source.label}: the value {key!r} is of the unknown kind {kind}, at byte {cursor.at}"
        )
    return number.unpack(cursor.take(number.size))[0]


def _pass_array(cursor: _Cursor, key: str, depth: int) -> None:
    kind, count = cursor.u32(), cursor.u64()
    if depth > _MAX_DEPTH:
        raise CorruptCheckpointError(f"{cursor.source.label}: the value {key!r} is nested too deeply")
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


def _array(cursor: _Cursor, key: str) -> list[Any]:
    kind, count = cursor.u32(), cursor.u64()
    if kind in _NUMBERS:
        number = _NUMBERS[kind]
        return [value for (value,) in number.iter_unpack(cursor.take(count * number.size))]
    if kind == _ARRAY:
        return [_array(cursor, key) for _ in range(count)]
    return [_scalar(cursor, kind, key) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> tuple[str, Shape, int, int]:
    name, ndim = cursor.name(), cursor.u32()
    if ndim > _MAX_DIMS:
        raise CorruptCheckpointError(f"{cursor.source.label}: tensor {name!r} has {ndim} dims, more than ggml knows")
    sizes = tuple(cursor.u64() for _ in range(ndim))
    return name, sizes[::-1], cursor.u32(), cursor.u64()


def _entries(
    source: Source, told: list[tuple[str, Shape, int, int]], header_bytes: int, alignment: int
) -> dict[str, GgufTensor]:
    """Return the tensors. Each must begin where the padding after the previous one ends."""
    data_at = -(-header_bytes // alignment) * alignment
    entries: dict[str, GgufTensor] = {}
    wanted = 0
    for name, shape, code, at in told:
        type_, nbytes = _nbytes(source, name, shape, code)
        if name in entries:
            raise CorruptCheckpointError(f"{source.label}: its header has the tensor {name!r} twice")
        if at != wanted:
            raise CorruptCheckpointError(
                f"{source.label}: tensor {name!r} should begin {wanted} bytes after the header, and the header says "
                f"{at}: it would overlap others or leave a gap"
            )
        wanted = -(-(at + nbytes) // alignment) * alignment
        entries[name] = GgufTensor(shape, type_, data_at + at, nbytes)
        if data_at + at + nbytes > source.nbytes:
            raise CorruptCheckpointError(
                f"{source.label}: tensor {name!r} of shape {list(shape)} and type {type_} ends at byte "
                f"{data_at + at + nbytes}, but the file has {source.nbytes}: it was truncated"
            )
    if source.nbytes > data_at + wanted:
        where = f"its {len(entries)} tensors end at byte {data_at + wanted}"
        raise CorruptCheckpointError(
            f"{source.label}: {where}, but the file has {source.nbytes}: bytes were added, or the header was changed"
        )
    return entries


def _nbytes(source: Source, name: str, shape: Shape, code: int) -> tuple[str, int]:
    """Return the name of a tensor's type, and its number of bytes."""
    if code in PLAIN:
        type_, dtype = PLAIN[code]
        return type_, math.prod(shape) * itemsize(dtype)
    if code not in BLOCKS:
        raise FormatError(f"{source.label}: tensor {name!r} has the unknown ggml type {code}, so its size is unknown")
    block = BLOCKS[code]
    last = shape[-1] if shape else 1
    if last % block.numel:
        raise CorruptCheckpointError(
            f"{source.label}: tensor {name!r} of shape {list(shape)} has rows of {last} elements, which {block.name} "
            f"cannot split into blocks of {block.numel}"
        )
    return block.name, math.prod(shape) // block.numel * block.nbytes


# GGUF files of llama.cpp: one, or several of one model named `<name>-00001-of-00003.gguf`.
#
# Plain tensors are windows of the file. Quantized ones become float32: the usual types are dequantized
# while they are read, and others are listed, but cannot be read. The model's metadata, such as its
# architecture and tokens, are objects.


_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_METADATA = "metadata"
_DTYPES = dict(PLAIN.values())
_BLOCKS = {block.name: block for block in BLOCKS.values()}


@dataclass(frozen=True)
class GgufFacts(Facts):
    """The contents of the header besides names and shapes."""

    types: Mapping[str, str]
    """ggml's type of each tensor, such as "Q4_K"."""


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if the top folder contains GGUF files."""
    return bool(at_top(names, ".gguf"))


def open(files: Files) -> Contents:
    """Return the model in the only file, or in all numbered files.

    Raises:
        CorruptCheckpointError: a file is missing, truncated, or damaged.
        FormatError: several files that are not of one model, or of an unknown version, byte order,
        or type.
    """
    storage, names = files.storage, files.listed
    found = at_top(names, ".gguf")
    _check_names(storage.url, found)
    headers = {file: read_header(files[file]) for file in found}
    alone = _NUMBERED.fullmatch(found[0]) if len(names) == 1 and len(storage.list()) > 1 else None
    # the user opened one of several files by its path
    rest = f"{alone[1]}-*.gguf" if alone else ""
    warnings = [f"{found[0]} is one of several files: the others were not opened, {rest!r} opens all"] if alone else []
    if not alone:
        _check_split(headers)
    entries: dict[str, tuple[str, GgufHeader, GgufTensor]] = {}
    for file, header in headers.items():
        for key, entry in header.entries.items():
            if key in entries:
                raise CorruptCheckpointError(f"tensor {key!r} is stored twice, in {entries[key][0]} and in {file}")
            entries[key] = file, header, entry
    tensors = {key: partial(_tensor, key, *found_at) for key, found_at in entries.items()}
    types = {key: entry.type for key, (_, _, entry) in entries.items()}
    objects, paths = _objects(storage.url, headers[found[0]], types)
    return Contents(
        LazyMapping(tensors), LazyMapping(objects), paths, format="gguf", facts=GgufFacts(types),
        warnings=(*warnings, *_quantized(types)),
    )  # fmt: skip


def _check_names(url: str, files: list[str]) -> None:
    """Raise an error unless the names of the files show that they are one model."""
    if len(files) > 1:
        numbered = [_NUMBERED.fullmatch(file) for file in files]
        if not all(numbered) or len({(m[1], m[3]) for m in numbered if m}) > 1:
            raise FormatError(
                f"{url} has {len(files)} GGUF files that are not of one model: {format_some(files)}; open one by its "
                "path, or those of one model as '<name>-*.gguf'"
            )


def _check_split(headers: Mapping[str, GgufHeader]) -> None:
    """Raise CorruptCheckpointError unless these are all files into which the model was split."""
    (first, header), *_ = headers.items()
    match = _NUMBERED.fullmatch(first)
    total = header.number("split.count") or (int(match[3]) if match else 1)
    numbers = {int(m[2]) for m in map(_NUMBERED.fullmatch, headers) if m} or {1}
    lost = next((i for i in range(1, total + 1) if i not in numbers), None)
    if lost is not None or len(headers) > total:
        what = f"number {lost} is missing" if lost is not None else f"there are {len(headers)}"
        words = f"{header.source.label}: the model was split into {total} files, and {what}"
        header.source.refuse(CorruptCheckpointError(words))
    counts = (None, total, *([0] if total == 1 else []))  # llama.cpp writes 0 parts when it merges files into one
    for number, (file, of) in enumerate(headers.items()):
        said = of.number("split.no")
        if said not in (None, number) or of.number("split.count") not in counts:
            raise CorruptCheckpointError(
                f"{of.source.label}: it says that it is number {said} (from 0) of {of.number('split.count')}, and "
                f"{file} should be number {number} of {total}"
            )
    wanted, there = header.number("split.tensors.count"), sum(len(of.entries) for of in headers.values())
    if wanted not in (None, there):
        raise CorruptCheckpointError(
            f"{header.source.label}: the model was split into files of {wanted} tensors in all, and they hold {there}"
        )


def _objects(url: str, header: GgufHeader, types: Mapping[str, str]) -> tuple[Makers, dict[str, KeyPath]]:
    """Return the metadata of the model in the first file, and the types of quantized tensors, under
    separate names."""
    objects = {f"{_METADATA}.{key}": value for key, value in header.values.items()}
    paths: dict[str, KeyPath] = {f"{_METADATA}.{key}": (_METADATA, key) for key in header.values}
    quantized = {key: of for key, of in types.items() if of in _BLOCKS}
    if quantized:
        objects["quantized"] = lambda: quantized
    twin = next((key for key in types if key in objects), None)
    if twin is not None:
        raise FormatError(f"{url}: the name of the tensor {twin!r} is reserved for metadata of the model")
    return objects, paths


def _quantized(types: Mapping[str, str]) -> list[str]:
    """Return the notes about each type of blocks that occurs."""
    told = []
    for of, count in Counter(of for of in types.values() if of in _BLOCKS).items():
        example = next(key for key, type_ in types.items() if type_ == of)
        how = "refused here" if _BLOCKS[of].values is None else "dequantized to float32 as they are read"
        told.append(f"tensors of the quantized type {of} ({count}, such as {example!r}) are {how}")
    return told


def _tensor(key: str, file: str, header: GgufHeader, entry: GgufTensor) -> StoredTensor:
    dtype = _DTYPES.get(entry.type, "float32")
    spec = TensorSpec(key, entry.shape, dtype)
    window = Window.row_major(entry.start, entry.shape, itemsize(dtype))
    label = f"{header.source.label} (tensor {key!r}, {entry.type})"
    place: Extent | Callable[[], Extent] = Extent(header.source, window)
    if entry.type not in _DTYPES:
        block = _BLOCKS[entry.type]
        if block.values is None:
            place = partial(_refuse, label)
        else:
            source = DequantizedSource(header.source, entry.start, spec.numel, block, label)
            place = Extent(source, Window.row_major(0, entry.shape, 4))
    return StoredTensor(spec, (StoredChunk(Box.full(entry.shape), place, file),))


def _refuse(label: str) -> NoReturn:
    known = ", ".join(block.name for block in BLOCKS.values() if block.values is not None)
    raise FormatError(
        f"{label}: of the quantized types only {known} are read; take a file of another type of this model, or "
        "dequantize it by llama.cpp first (llama-quantize --allow-requantize IN OUT F32)"
    )


FORMAT = Format(
    "gguf",
    checksums=NO_CHECKSUMS,
    detect=detect,
    open=open,
)
