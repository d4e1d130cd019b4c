"""Writes one data file of several ranks of a machine: each puts its own arrays where they belong.

    header: rows of rank 0 | of rank 1    8-byte elements of rank 0 | of rank 1    4-byte elements of rank 0 | of rank 1

Larger elements come first, whoever has them, so that every array is aligned to its item size. Ranks tell one another
how many bytes they have of each item size, and then how long their rows are: so each knows where its own belong.
A block whose bytes several of them wrote is hashed by the first one, which reads it back and compares each rank's
bytes with the digest that this rank took of them before it wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
import xxhash

from reshard.errors import FormatError, StorageError
from reshard.formats.native.data_file import STAGE_BYTES, Entry, digest128
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import BLOCK_BYTES
from reshard.formats.safetensors.header import MAX_HEADER_BYTES, encode_rows, framed
from reshard.state.memory.downloads import row_major_pieces
from reshard.state.memory.lanes import Lanes
from reshard.storage.base import PlacedWriter, Storage

__all__ = ["CommonFile", "Crew", "places", "write_common_file"]


@dataclass(frozen=True)
class Crew:
    """The ranks that write one file, all of one machine."""

    ranks: tuple[int, ...]
    """Ascending; the file has the name of the first."""
    place: int
    """Of this one among them."""
    tell: Callable[[bytes], list[bytes]]
    """Collective: what each of them says, in their order."""


@dataclass(frozen=True)
class CommonFile:
    """What was written."""

    record: FileRecord
    ranks: tuple[int, ...]
    """Those that have arrays in it."""


class _Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file that one rank wrote."""

    start: int
    stop: int
    digest: int
    """XXH3-64, taken before they were written."""


class _Wrote(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells of what it wrote."""

    edges: list[_Range]
    """Of blocks that are not all its own."""
    sums: list[_Range]
    """Of the file of sums: those of blocks that are."""


@dataclass(frozen=True)
class _Shape:
    """What the file is like, and what of it is this rank's."""

    nbytes: int
    header_bytes: int
    ranks: tuple[int, ...]
    """Those that have arrays in it."""
    header: list[tuple[int, bytes]]
    """This rank's part of the header, by position."""
    runs: list[tuple[int, int]]
    """Where its elements go: first byte and length of each run, in the order in which they come."""


def places(held: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """Where the bytes of each rank begin, counted from the end of the header, by item size; `held` says how many each
    has."""
    out: list[dict[int, int]] = [{} for _ in held]
    at = 0
    for size in sorted({size for row in held for size in row}, reverse=True):
        for row, starts in zip(held, out):
            starts[size] = at
            at += row.get(size, 0)
    return out


def write_common_file(
    storage: Storage,
    name: str,
    entries: Sequence[Entry],
    crew: Crew,
    *,
    lanes: Lanes | None = None,
    stage_bytes: int = STAGE_BYTES,
    on_bytes: Callable[[int], None] | None = None,
) -> CommonFile | None:
    """Write this rank's `entries` into the safetensors file that the ranks of `crew` write together, and what it knows
    of the checksums beside it. Collective among them, also for a rank that has no entries.

    Returns what there is then on the first rank of them, when all have written and all is durable; None on the others,
    and where nobody had any.

    Raises FormatError if two arrays of this rank have one key, or the header would be larger than other tools read;
    StorageError if the storage fails, or bytes are not what some rank wrote.
    """
    ordered = sorted(entries, key=lambda entry: -entry.spec.itemsize)
    shape = _agreed(name, ordered, crew)
    wrote = _Wrote([], [])
    if shape.header or shape.runs:
        pieces = row_major_pieces([entry.tensor for entry in ordered], lanes or Lanes(), stage_bytes)
        wrote = _write(storage, name, shape, pieces, on_bytes)
    told = [msgspec.msgpack.decode(row, type=_Wrote) for row in crew.tell(msgspec.msgpack.encode(wrote))]
    if crew.place or not shape.ranks:
        return None
    sums = _closed(storage, name, shape.nbytes, dict(zip(crew.ranks, told, strict=True)))
    return CommonFile(FileRecord(name, shape.nbytes, shape.header_bytes, digest128(sums)), shape.ranks)


def _agreed(name: str, ordered: Sequence[Entry], crew: Crew) -> _Shape:
    by_size = {size: list(some) for size, some in groupby(ordered, key=lambda entry: entry.spec.itemsize)}
    mine = {size: sum(entry.nbytes for entry in some) for size, some in by_size.items()}
    held = [msgspec.msgpack.decode(row, type=dict[int, int]) for row in crew.tell(msgspec.msgpack.encode(mine))]
    starts = places(held)[crew.place]
    rows = b"".join(
        encode_rows(((entry.key, entry.spec.dtype, entry.box.sizes) for entry in some), starts[size])
        for size, some in by_size.items()
    )
    rows_bytes = [int.from_bytes(row, "little") for row in crew.tell(len(rows).to_bytes(8, "little"))]
    head, tail = framed(sum(rows_bytes))
    header_bytes = len(head) + sum(rows_bytes) + len(tail)
    if header_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"the header of {name} would have {header_bytes} bytes, and other tools read no more than "
            f"{MAX_HEADER_BYTES}: choose a smaller ranks_per_file"
        )
    header = [(len(head) + sum(rows_bytes[: crew.place]), rows)] if rows else []
    if crew.place == 0 and any(held):
        header = [(0, head), *header, (header_bytes - len(tail), tail)]
    return _Shape(
        nbytes=header_bytes + sum(sum(row.values()) for row in held),
        header_bytes=header_bytes,
        ranks=tuple(rank for rank, row in zip(crew.ranks, held, strict=True) if row),
        header=header,
        runs=[(header_bytes + starts[size], nbytes) for size, nbytes in mine.items() if nbytes],
    )


def _write(
    storage: Storage,
    name: str,
    shape: _Shape,
    pieces: Iterable[memoryview],
    on_bytes: Callable[[int], None] | None,
) -> _Wrote:
    with storage.create_together(name, shape.nbytes) as out:
        sums = _Sums(out, shape.nbytes)
        for at, data in shape.header:
            sums.put(at, memoryview(data))
        runs, at, left = iter(shape.runs), 0, 0
        for piece in pieces:
            done = 0
            while done < len(piece):
                if not left:
                    at, left = next(runs)
                some = piece[done : done + left]
                sums.put(at, some)
                at, left, done = at + len(some), left - len(some), done + len(some)
            if on_bytes is not None:
                on_bytes(len(piece))
        sums.close()
    if not sums.blocks:
        return _Wrote(sums.edges, [])
    ranges = []
    with storage.create_together(f"{name}.sums", _sums_bytes(shape.nbytes)) as out:
        for first, digests in _consecutive(sums.blocks):
            packed = np.array(digests, dtype="<u8").tobytes()
            out.at = 8 * first
            out.write(packed)
            ranges.append(_Range(8 * first, 8 * first + len(packed), xxhash.xxh3_64_intdigest(packed)))
    return _Wrote(sums.edges, ranges)


class _Sums:
    """Passes bytes on to their places in a file, and takes a digest of what passes of each block."""

    def __init__(self, out: PlacedWriter, nbytes: int) -> None:
        self._out, self._nbytes = out, nbytes
        self._state = xxhash.xxh3_64()
        self._start = self._stop = 0
        self.blocks: dict[int, int] = {}
        """By number: digests of blocks that passed whole."""
        self.edges: list[_Range] = []

    def put(self, at: int, data: memoryview) -> None:
        """Write the bytes from position `at` on."""
        if at != self._stop:
            self.close()
            self._start = self._out.at = at
        done = 0
        while done < len(data):
            end = min(((at + done) // BLOCK_BYTES + 1) * BLOCK_BYTES, self._nbytes)
            piece = data[done : done + end - at - done]
            self._state.update(piece)
            self._out.write(piece)
            done += len(piece)
            self._stop = at + done
            if self._stop == end:
                self.close()

    def close(self) -> None:
        """What came since the last block ended is all that passes in a row."""
        if self._start == self._stop:
            return
        digest = self._state.intdigest()
        if self._start % BLOCK_BYTES == 0 and self._stop in (self._nbytes, self._start + BLOCK_BYTES):
            self.blocks[self._start // BLOCK_BYTES] = digest
        else:
            self.edges.append(_Range(self._start, self._stop, digest))
        self._state.reset()
        self._start = self._stop


def _consecutive(blocks: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Runs of blocks that follow one another: the first one's number, and the digests."""
    for _, run in groupby(enumerate(sorted(blocks)), key=lambda row: row[1] - row[0]):
        numbers = [number for _, number in run]
        yield numbers[0], [blocks[number] for number in numbers]


def _sums_bytes(nbytes: int) -> int:
    return 8 * -(-nbytes // BLOCK_BYTES)


def _closed(storage: Storage, name: str, nbytes: int, wrote: dict[int, _Wrote]) -> bytes:
    """Add the sums of blocks that several ranks wrote to, and return those of all blocks, as they can be read there."""
    divided: dict[int, list[tuple[_Range, int]]] = {}
    for rank, one in wrote.items():
        for edge in one.edges:
            divided.setdefault(edge.start // BLOCK_BYTES, []).append((edge, rank))
    with storage.create_together(f"{name}.sums", _sums_bytes(nbytes)) as out:
        for block, edges in divided.items():
            data = memoryview(storage.read(name, block * BLOCK_BYTES, min(BLOCK_BYTES, nbytes - block * BLOCK_BYTES)))
            at = block * BLOCK_BYTES
            for edge, rank in sorted(edges, key=lambda row: row[0].start):
                _check(storage, name, rank, edge, data[edge.start - block * BLOCK_BYTES :], at)
                at = edge.stop
            assert at == block * BLOCK_BYTES + len(data)  # the places of all ranks make up the file
            out.at = 8 * block
            out.write(xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"))
    sums = storage.read(f"{name}.sums")
    for rank, one in wrote.items():
        for some in one.sums:
            _check(storage, f"{name}.sums", rank, some, memoryview(sums)[some.start :], some.start)
    return sums


def _check(storage: Storage, name: str, rank: int, wrote: _Range, found: memoryview, at: int) -> None:
    assert at == wrote.start
    if xxhash.xxh3_64_intdigest(found[: wrote.stop - wrote.start]) != wrote.digest:
        raise StorageError(
            f"{storage.url}: bytes [{wrote.start}, {wrote.stop}) of {name} are not what rank {rank} has just written"
        )
