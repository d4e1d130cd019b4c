"""Parts: where those arrays of a rank are that it did not write whole, as a file of an earlier save has some of them.

    what rank 3 holds of "w"         00003.parts
    +-----------+
    |  rows 0:4 |  unchanged         from-<save id>-00003.safetensors, an array that begins at byte 512
    |-----------|
    |  rows 4:6 |  changed           its own file, under "w#4:6,0:8"
    +-----------+

The file of the earlier save is in this checkpoint's folder by a second name: a link. So nothing refers to another
folder, and whatever becomes of the earlier checkpoint, this one stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from planners.errors import PlanError
from planners.geometry.box import Box
from reshard.errors import DamagedCheckpointError
from reshard.formats.native.manifest import PartsRecord
from reshard.storage.base import Storage

__all__ = ["Part", "read_parts", "write_parts"]


class Part(NamedTuple):
    """Where some elements of a tensor are."""

    box: Box
    """Of the tensor, in global coordinates."""
    array: Box
    """The region that an array of a file holds, of which the box is a part."""
    file: str = ""
    """Relative to the checkpoint's folder; empty for the rank's own, in which the box is an array by itself."""
    start: int = 0
    """The first byte of the array in that file."""


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    box: tuple[tuple[int, ...], tuple[int, ...]]
    """Offsets and sizes."""
    file: int = -1
    start: int = 0
    array: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """None if it is the box."""


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    files: list[str]
    arrays: dict[str, list[_Row]]


def write_parts(storage: Storage, name: str, arrays: Mapping[str, Sequence[Part]]) -> PartsRecord:
    """Store a rank's table: by the key that an array would have in its file, the parts that make it up."""
    files = dict.fromkeys(part.file for parts in arrays.values() for part in parts if part.file)
    numbers = {"": -1, **{file: i for i, file in enumerate(files)}}
    table = _Table(list(files), {key: [_row(part, numbers) for part in parts] for key, parts in arrays.items()})
    data = msgspec.msgpack.encode(table)
    with storage.create(name) as out:
        out.write(data)
    return PartsRecord(name, len(data), xxhash.xxh3_128_hexdigest(data))


def read_parts(storage: Storage, record: PartsRecord) -> dict[str, list[Part]]:
    """What `write_parts` stored. Raises DamagedCheckpointError."""
    data = storage.read(record.name)
    if xxhash.xxh3_128_hexdigest(data) != record.digest:
        raise DamagedCheckpointError(f"{storage.url}: {record.name} was changed since it was written")
    try:
        table = msgspec.msgpack.decode(data, type=_Table)
        return {key: [_part(row, table.files) for row in rows] for key, rows in table.arrays.items()}
    except (msgspec.MsgspecError, PlanError, ValueError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{storage.url}: {record.name} makes no sense: {error}") from None


def _row(part: Part, numbers: Mapping[str, int]) -> _Row:
    array = None if part.array == part.box else (part.array.offsets, part.array.sizes)
    return _Row((part.box.offsets, part.box.sizes), numbers[part.file], part.start, array)


def _part(row: _Row, files: Sequence[str]) -> Part:
    box = Box(*row.box)
    if row.file < 0:
        return Part(box, box)
    return Part(box, box if row.array is None else Box(*row.array), files[row.file], row.start)
