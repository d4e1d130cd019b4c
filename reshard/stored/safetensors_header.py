"""Reads and writes the header of a safetensors file, which says where each tensor is.

8 bytes: length N      N bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}      data
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from planners.geometry.byte_ranges import Window
from planners.geometry.layout import itemsize
from reshard.errors import RESTORE, CorruptCheckpointError, FormatError
from reshard.live.garbage_collection import gc_paused
from reshard.stored.source import Source
from reshard.stored.tensor import Extent

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library rejects longer headers."""
_ALIGNMENT = 64
SAFETENSORS_CODES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",  # the header counts half-byte values: the last dim is twice torch's
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""dtype names by their code in a header."""

_F4 = SAFETENSORS_CODES["F4"]
_CODES = {name: code for code, name in SAFETENSORS_CODES.items() if code != "F4"}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file, row-major, at `window` of the file."""

    dtype: str
    window: Window


@dataclass(frozen=True)
class Header:
    """All tensors of a file, in the order of their data, and the file's metadata."""

    source: Source
    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]

    def place(self, name: str) -> Extent:
        """Return where a tensor's data is. Raises CorruptCheckpointError if the file has no such tensor."""
        if name not in self.entries:
            raise CorruptCheckpointError(f"{self.source.label}: this safetensors file has no tensor {name!r}")
        return Extent(self.source, self.entries[name].window)

    def saved_offsets(self) -> dict[str, list[int]]:
        """Return the offsets of each chunk in a file of DCP's Hugging Face writer, or {} if the
        file has none.

        Raises CorruptCheckpointError if they are malformed.
        """
        text = self.metadata.get("DCP_SHARDING_INFO")
        if text is None:
            return {}
        where = f"{self.source.label}: DCP_SHARDING_INFO in its header"
        try:
            info = {str(key): [int(o) for o in value["saved_offsets"]] for key, value in json.loads(text).items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CorruptCheckpointError(f"{where} is malformed") from None
        if any(offset < 0 for offsets in info.values() for offset in offsets):
            raise CorruptCheckpointError(f"{where} has a negative offset")
        if wrong := sorted(info.keys() ^ self.entries.keys()):
            what = f"the header have other names: only one has {wrong[0]!r}"
            raise CorruptCheckpointError(f"{where} and {what}")
        return info


def find_header(source: Source) -> Header | None:
    """Return the verified header of a file, or None if its first bytes are not those of a safetensors file."""
    head = bytes(source.read(0, min(9, source.nbytes)))
    is_one = len(head) == 9 and 2 <= int.from_bytes(head[:8], "little") <= source.nbytes - 8 and head[8:] == b"{"
    return read_header(source) if is_one else None


def read_header(source: Source) -> Header:
    """Read and verify the header of a file. For a damaged file that is only listed as lost, returns
    an empty header.

    Raises:
        CorruptCheckpointError: the file is truncated, the header is not JSON, or tensors overlap,
            leave gaps, or do not have the number of bytes that their shape needs.
        FormatError: unknown dtype.
    """
    try:
        return _read_header(source)
    except CorruptCheckpointError as error:
        source.refuse(CorruptCheckpointError(f"{error}: {RESTORE}"))
        return Header(source, {}, {})


def _read_header(source: Source) -> Header:
    if source.nbytes < 8:
        raise CorruptCheckpointError(
            f"{source.label}: a safetensors file has at least 8 bytes, this has {source.nbytes}"
        )
    length = int.from_bytes(bytes(source.read(0, 8)), "little")
    if length > min(MAX_HEADER_BYTES, source.nbytes - 8):
        raise CorruptCheckpointError(
            f"{source.label}: its header should have {length} bytes, but the file has {source.nbytes} in all; it was "
            "truncated, or is not a safetensors file"
        )
    try:
        header = json.loads(bytes(source.read(8, length)), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source.label}: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{source.label}: its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptCheckpointError(f"{source.label}: __metadata__ in its header must map text to text")
    found = [(name, *_entry(source, name, fields, 8 + length)) for name, fields in header.items()]
    found.sort(key=lambda item: (item[2], item[3]))
    _check_tiling(source, found, 8 + length)
    return Header(source, {name: entry for name, entry, _, _ in found}, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("it has the same key twice")
    return result


def _entry(source: Source, name: str, fields: Any, data_at: int) -> tuple[HeaderEntry, int, int]:
    """Return the entry, and the first and one past the last byte position that the header gives."""
    try:
        code, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, start, stop]
        sane = isinstance(code, str) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        sane &= code != "F4" or not math.prod(shape) % 2  # half a byte cannot be stored
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise CorruptCheckpointError(
            f"{source.label}: the header's entry for tensor {name!r} is malformed: {fields!r:.200}"
        )
    if (dtype := SAFETENSORS_CODES.get(code, "")) == "":
        known = ", ".join(SAFETENSORS_CODES)
        raise FormatError(f"{source.label}: tensor {name!r}: unknown safetensors dtype {code!r}: known are {known}")
    sizes = _sizes_in_memory(code, shape)
    wanted = min(math.prod(sizes) * itemsize(dtype), 1 << 63)
    if stop - start != wanted:
        raise CorruptCheckpointError(
            f"{source.label}: tensor {name!r} of shape {shape!s:.200} and dtype {code} needs {wanted} bytes, the "
            f"header gives it {stop - start} at [{start}, {stop})"
        )
    return HeaderEntry(dtype, Window.row_major(data_at + start, sizes, itemsize(dtype))), start, stop


def _sizes_in_memory(code: str, shape: list[int]) -> list[int]:
    """Return the shape in torch: the header counts 4-bit values, torch pairs of them."""
    if code == "F4" and shape:
        return [*shape[:-1], shape[-1] // 2]
    return shape


def _check_tiling(source: Source, found: list[tuple[str, HeaderEntry, int, int]], data_at: int) -> None:
    at = 0
    for name, _, start, stop in found:
        if start != at:
            what = "overlaps the one before" if start < at else f"leaves a gap of {start - at} bytes"
            raise CorruptCheckpointError(
                f"{source.label}: tensor {name!r} at [{start}, {stop}) {what}; the header is wrong"
            )
        at = stop
    if data_at + at != source.nbytes:
        what = "truncated" if source.nbytes < data_at + at else "appended to"
        raise CorruptCheckpointError(
            f"{source.label}: its tensors need {data_at + at} bytes, but the file has {source.nbytes}; it was {what}"
        )


def encode_header(
    arrays: Iterable[tuple[str, str, Sequence[int]]], note: Mapping[str, str] | None = None, *, has_f4: bool = False
) -> bytes:
    """Return the length and header of a file whose arrays (name, dtype, sizes) follow one another.
    `note` is metadata.

    With `has_f4`, 4-bit floats have the library's code. Native files store them as bytes.

    Raises FormatError if two arrays have the same name.
    """
    rows = encode_rows(arrays, 0, has_f4=has_f4)
    head, tail = framed(len(rows), note)
    return head + rows + tail


@gc_paused()
def encode_rows(arrays: Iterable[tuple[str, str, Sequence[int]]], start: int, *, has_f4: bool = False) -> bytes:
    """Return the header rows of consecutive arrays. The first array begins at `start`, counted from
    the end of the header.

    Raises FormatError if two arrays have the same name.
    """
    table: dict[str, object] = {}
    at = start
    for key, dtype, sizes in arrays:
        if key == "__metadata__":
            raise FormatError('no tensor can be called "__metadata__": safetensors reserves that name; rename it')
        if key in table:
            raise FormatError(f"two arrays of one file would be called {key!r}: rename one of the tensors")
        stop = at + math.prod(sizes) * itemsize(dtype)
        code, shape = _CODES.get(dtype), list(sizes)
        if has_f4 and dtype == _F4:
            code, shape = "F4", [*shape[:-1], 2 * shape[-1]]
        elif code is None:  # safetensors has no code for it: store bytes, in an additional last dim
            code, shape = "U8", [*shape, itemsize(dtype)]
        table[key] = {"dtype": code, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    return b"," + msgspec.json.encode(table)[1:-1] if table else b""


def framed(rows_bytes: int, note: Mapping[str, str] | None = None) -> tuple[bytes, bytes]:
    """Return the text before and after `rows_bytes` of rows that makes them a header. `note` is metadata."""
    head = msgspec.json.encode({"__metadata__": {"format": "pt", **(note or {})}})[:-1]
    nbytes = len(head) + rows_bytes + 1
    padding = -(8 + nbytes) % _ALIGNMENT
    return (nbytes + padding).to_bytes(8, "little") + head, b"}" + b" " * padding
