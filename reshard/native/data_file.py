"""Writes a data file of one rank or of several ranks together: streamed safetensors, with checksums
and digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from planners.geometry.box import Box, Range
from planners.geometry.layout import TensorSpec
from planners.plans.save import SavePlan, WriteItem
from reshard.errors import CorruptCheckpointError, FormatError, StorageError
from reshard.live.copy_streams import CopyStreams, row_major_pieces
from reshard.native.manifest import BLOCK_BYTES, STAGE_BYTES, FileRecord, entry_key
from reshard.storage.base import PlacedWriter, Storage, Writer
from reshard.stored.safetensors_header import MAX_HEADER_BYTES, encode_header, encode_rows, framed
from reshard.stored.source import OnBytes

_AT_ONCE_BYTES = 512 << 10
"""This many bytes are written, and then hashed while they are still in a CPU cache."""


@dataclass(frozen=True)
class Entry:
    """One array of a data file."""

    spec: TensorSpec
    """Spec of the full tensor."""
    box: Box
    """The box of the tensor that the array contains, in global coordinates."""
    tensor: torch.Tensor
    """The elements, with the box's sizes, on any device, with any strides."""


def write_file(
    storage: Storage,
    name: str,
    entries: Sequence[Entry],
    *,
    lanes: CopyStreams | None = None,
    stage_bytes: int = STAGE_BYTES,
    digests: bool = False,
    on_bytes: OnBytes | None = None,
) -> FileRecord:
    """Write `entries` as one safetensors file, and its block checksums beside it. Both are durable
    on return.

    Entries with the largest elements come first, so that every array is aligned to its item size.

    Args:
        lanes: streams that copy entries from devices to the host. Without a stream for its device,
            one entry is copied after another.
        stage_bytes: memory for elements that are not in row-major order or not on the CPU.
        digests: also write digests of the blocks of every array, for later saves.

    Raises FormatError if two entries have the same key, and StorageError if the storage fails.
    """
    ordered = sorted(entries, key=lambda entry: -entry.spec.itemsize)
    header = encode_header((entry_key(entry.spec, entry.box), entry.spec.dtype, entry.box.sizes) for entry in ordered)
    blocks = [blocks_of(entry.box, entry.spec.itemsize) for entry in ordered] if digests else []
    lengths = [len(header)]
    for entry, found in zip(ordered, blocks):
        lengths += (block.numel * entry.spec.itemsize for block in found)
    passing = BlockDigests(lengths) if digests else None
    pieces = row_major_pieces([entry.tensor for entry in ordered], lanes or CopyStreams(), stage_bytes)
    nbytes = sum(entry.tensor.nbytes for entry in ordered)
    seen = passing.write if passing is not None else None
    record = write_pieces(storage, name, header, pieces, nbytes, on_bytes=on_bytes, seen=seen)
    if passing is not None:
        starts = list(accumulate((entry.tensor.nbytes for entry in ordered[:-1]), initial=len(header)))
        write_blocks(storage, name, record.sums, starts, [len(found) for found in blocks], passing.finish()[1:])
    return record


def write_pieces(
    storage: Storage,
    name: str,
    header: bytes,
    pieces: Iterable[memoryview],
    nbytes: int,
    *,
    on_bytes: OnBytes | None = None,
    seen: Callable[[memoryview], object] | None,
) -> FileRecord:
    """Write a data file and its block checksums: first the header, then `nbytes` of arrays, in
    pieces. Calls `seen` with everything that is written."""
    with storage.create(name) as out:
        sums = BlockSums(out, len(header) + nbytes, seen)
        sums.put(0, memoryview(header))
        sums.put_all([(len(header), nbytes)], pieces, on_bytes)
    return recorded(storage, name, len(header), sums)


def recorded(storage: Storage, name: str, header_bytes: int, sums: BlockSums) -> FileRecord:
    """Write the block checksums of a complete data file, and return the file's record."""
    checksums = np.fromiter(sums.blocks.values(), "<u8").tobytes()
    with storage.create(f"{name}.sums") as out:
        out.write(checksums)
    return FileRecord(name, sums.nbytes, header_bytes, xxhash.xxh3_128_hexdigest(checksums))


def _in_file_order(plan: SavePlan, rank: int) -> list[WriteItem]:
    """Return the arrays of a rank's file, in the order in which they are stored."""
    return sorted(plan.items(rank), key=lambda item: -plan.layout[item.fqn].spec.itemsize)


def header_of(plan: SavePlan, rank: int) -> bytes:
    """Return the header of a rank's file, which follows from the plan."""
    specs = plan.layout.specs
    return encode_header(
        (entry_key(specs[item.fqn], item.box), specs[item.fqn].dtype, item.box.sizes)
        for item in _in_file_order(plan, rank)
    )


def arrays_of(plan: SavePlan, rank: int, header_bytes: int) -> list[tuple[str, Box, int, int]]:
    """Return (FQN, box, first byte, one past the last byte) of every array in a rank's file."""
    items = _in_file_order(plan, rank)
    starts = accumulate((item.nbytes for item in items), initial=header_bytes)
    return [(item.fqn, item.box, at, at + item.nbytes) for item, at in zip(items, starts)]


class BlockSums:
    """Writes bytes to their positions in a file, and computes the digest of each block."""

    def __init__(self, out: Writer, nbytes: int, seen: Callable[[memoryview], object] | None = None) -> None:
        """`nbytes` is the size of the file, where the last block ends. `seen` is called with
        everything that is written."""
        self._out, self.nbytes, self._seen = out, nbytes, seen
        self._state = xxhash.xxh3_64()
        self._start = self.stop = 0
        self.blocks: dict[int, int] = {}
        """Digest by block number, for blocks that were written completely."""
        self.edges: list[WrittenRange] = []

    def put(self, at: int, data: memoryview) -> None:
        """Write bytes at position `at`. Only a `PlacedWriter` can leave the previous position."""
        if at != self.stop:
            self.close()
            assert isinstance(self._out, PlacedWriter)
            self._start = self.stop = self._out.at = at
        while data:
            # write up to the end of a block first: then its bytes are in a cache for the digests
            some = data[: self.stop // BLOCK_BYTES * BLOCK_BYTES + max(_AT_ONCE_BYTES, BLOCK_BYTES) - self.stop]
            data = data[len(some) :]
            self._out.write(some)
            while some:
                end = min((self.stop // BLOCK_BYTES + 1) * BLOCK_BYTES, self.nbytes)
                piece = some[: end - self.stop]
                some = some[len(piece) :]
                if self._seen is not None:
                    self._seen(piece)
                if len(piece) == BLOCK_BYTES:  # as most are: then none was begun
                    self.blocks[self._start // BLOCK_BYTES] = xxhash.xxh3_64_intdigest(piece)
                    self._start = self.stop = end
                    continue
                self._state.update(piece)
                self.stop += len(piece)
                if self.stop == end:
                    self.close()

    def put_all(
        self,
        runs: Iterable[Range],
        pieces: Iterable[memoryview],
        on_bytes: OnBytes | None,
    ) -> None:
        """Write pieces one after another into runs (first byte, length)."""
        places, at, left = iter(runs), 0, 0
        for piece in pieces:
            done = 0
            while done < len(piece):
                if not left:
                    at, left = next(places)
                some = piece[done : done + left]
                self.put(at, some)
                at, left, done = at + len(some), left - len(some), done + len(some)
            if on_bytes is not None:
                on_bytes(len(piece))
        self.close()

    def close(self) -> None:
        """End the current run, whose last block may be incomplete."""
        if self._start == self.stop:
            return
        digest = self._state.intdigest()
        if self._start % BLOCK_BYTES == 0 and self.stop in (self.nbytes, self._start + BLOCK_BYTES):
            self.blocks[self._start // BLOCK_BYTES] = digest
        else:
            self.edges.append(WrittenRange(self._start, self.stop, digest))
        self._state.reset()
        self._start = self.stop


# Several ranks on a host write one data file: each writes its own arrays at their positions.
#
#     header: rows of rank 0 | rank 1    8-byte elements of rank 0 | rank 1    4-byte elements of rank 0 | rank 1
#
# The largest elements of all ranks come first, so that every array is aligned to its item size.
# Ranks exchange how many bytes they have of each item size, and then the lengths of their header
# rows. From these, each computes the positions of its own. If several ranks wrote parts of a block,
# the first rank in the group hashes it: it reads the block back, and compares each rank's bytes
# with the digest that this rank computed before writing.


@dataclass(frozen=True)
class FileGroup:
    """The ranks on one host that write one file."""

    ranks: tuple[int, ...]
    """The ranks, ascending. The file is named after the first."""
    place: int
    """This rank's index in `ranks`."""
    tell: Callable[[bytes], list[bytes]]
    """Collective: send bytes to all of these ranks, and return those of all, in the order of `ranks`."""


@dataclass(frozen=True)
class CommonFile:
    """The written file."""

    record: FileRecord
    ranks: tuple[int, ...]
    """The ranks that have arrays in the file."""


class WrittenRange(msgspec.Struct, frozen=True, array_like=True):
    """A byte range of a file that one rank wrote."""

    start: int
    stop: int
    digest: int
    """XXH3-64, computed before the bytes were written."""


class _WriteReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank reports after writing."""

    edges: list[WrittenRange]
    """Ranges in blocks that this rank shares with other ranks."""
    sums: list[WrittenRange]
    """Ranges in the file of checksums, for blocks that only this rank wrote."""


@dataclass(frozen=True)
class _Shape:
    """The structure of the file, and this rank's part of it."""

    nbytes: int
    header_bytes: int
    ranks: tuple[int, ...]
    """The ranks with arrays in the file."""
    header: list[tuple[int, bytes]]
    """This rank's parts of the header, each with its position."""
    runs: list[Range]
    """Where this rank's elements are stored: first byte and length of each run, in order."""


def places(held: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """Return, for each rank, where its bytes of each item size begin, counted from the end of the
    header. `held` is the number of bytes of each rank by item size."""
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
    file_group: FileGroup,
    *,
    lanes: CopyStreams | None = None,
    stage_bytes: int = STAGE_BYTES,
    on_bytes: OnBytes | None = None,
) -> CommonFile | None:
    """Write this rank's `entries` into the safetensors file that the ranks of `file_group` share,
    and its part of the checksums. Collective, also for ranks without entries.

    On the first rank of the group, returns the result after all ranks have written durably. Returns
    None on the others, and if no rank has entries.

    Raises FormatError if two arrays of this rank have the same key, or the header would be larger
    than other tools read. Raises StorageError if the storage fails, or stored bytes differ from
    what a rank wrote.
    """
    ordered = sorted(entries, key=lambda entry: -entry.spec.itemsize)
    shape = _agreed(name, ordered, file_group)
    wrote = _WriteReport([], [])
    if shape.header or shape.runs:
        pieces = row_major_pieces([entry.tensor for entry in ordered], lanes or CopyStreams(), stage_bytes)
        wrote = _write(storage, name, shape, pieces, on_bytes)
    told = [msgspec.msgpack.decode(row, type=_WriteReport) for row in file_group.tell(msgspec.msgpack.encode(wrote))]
    if file_group.place or not shape.ranks:
        return None
    sums = _closed(storage, name, shape.nbytes, dict(zip(file_group.ranks, told, strict=True)))
    return CommonFile(FileRecord(name, shape.nbytes, shape.header_bytes, xxhash.xxh3_128_hexdigest(sums)), shape.ranks)


def _agreed(name: str, ordered: Sequence[Entry], file_group: FileGroup) -> _Shape:
    by_size = {size: list(some) for size, some in groupby(ordered, key=lambda entry: entry.spec.itemsize)}
    mine = {size: sum(entry.tensor.nbytes for entry in some) for size, some in by_size.items()}
    held = [msgspec.msgpack.decode(row, type=dict[int, int]) for row in file_group.tell(msgspec.msgpack.encode(mine))]
    starts = places(held)[file_group.place]
    rows = b"".join(
        encode_rows(
            ((entry_key(entry.spec, entry.box), entry.spec.dtype, entry.box.sizes) for entry in some), starts[size]
        )
        for size, some in by_size.items()
    )
    rows_bytes = [int.from_bytes(row, "little") for row in file_group.tell(len(rows).to_bytes(8, "little"))]
    head, tail = framed(sum(rows_bytes))
    header_bytes = len(head) + sum(rows_bytes) + len(tail)
    if header_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"the header of {name} would have {header_bytes} bytes, and other tools read no more than "
            f"{MAX_HEADER_BYTES}: choose a smaller ranks_per_file"
        )
    header = [(len(head) + sum(rows_bytes[: file_group.place]), rows)] if rows else []
    if file_group.place == 0 and any(held):
        header = [(0, head), *header, (header_bytes - len(tail), tail)]
    return _Shape(
        nbytes=header_bytes + sum(sum(row.values()) for row in held),
        header_bytes=header_bytes,
        ranks=tuple(rank for rank, row in zip(file_group.ranks, held, strict=True) if row),
        header=header,
        runs=[(header_bytes + starts[size], nbytes) for size, nbytes in mine.items() if nbytes],
    )


def _write(
    storage: Storage,
    name: str,
    shape: _Shape,
    pieces: Iterable[memoryview],
    on_bytes: OnBytes | None,
) -> _WriteReport:
    with storage.open_shared(name, shape.nbytes) as out:
        sums = BlockSums(out, shape.nbytes)
        for at, data in shape.header:
            sums.put(at, memoryview(data))
        sums.put_all(shape.runs, pieces, on_bytes)
    if not sums.blocks:
        return _WriteReport(sums.edges, [])
    ranges = []
    with storage.open_shared(f"{name}.sums", _sums_bytes(shape.nbytes)) as out:
        for first, digests in _consecutive(sums.blocks):
            packed = np.fromiter(digests, "<u8").tobytes()
            out.at = 8 * first
            out.write(packed)
            ranges.append(WrittenRange(8 * first, 8 * first + len(packed), xxhash.xxh3_64_intdigest(packed)))
    return _WriteReport(sums.edges, ranges)


def _consecutive(blocks: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Yield each run of consecutive blocks: the number of its first block, and the digests."""
    for _, run in groupby(enumerate(sorted(blocks)), key=lambda row: row[1] - row[0]):
        numbers = [number for _, number in run]
        yield numbers[0], [blocks[number] for number in numbers]


def _sums_bytes(nbytes: int) -> int:
    return 8 * -(-nbytes // BLOCK_BYTES)


def _closed(storage: Storage, name: str, nbytes: int, wrote: dict[int, _WriteReport]) -> bytes:
    """Add the checksums of blocks that several ranks wrote. Return the checksums of all blocks."""
    divided: dict[int, list[tuple[WrittenRange, int]]] = {}
    for rank, one in wrote.items():
        for edge in one.edges:
            divided.setdefault(edge.start // BLOCK_BYTES, []).append((edge, rank))
    with storage.open_shared(f"{name}.sums", _sums_bytes(nbytes)) as out:
        for block, edges in divided.items():
            data = memoryview(storage.read(name, block * BLOCK_BYTES, min(BLOCK_BYTES, nbytes - block * BLOCK_BYTES)))
            at = block * BLOCK_BYTES
            for edge, rank in sorted(edges, key=lambda row: row[0].start):
                _check(storage, name, rank, edge, data[edge.start - block * BLOCK_BYTES :], at)
                at = edge.stop
            assert at == block * BLOCK_BYTES + len(data)  # the ranges of all ranks make up the file
            out.at = 8 * block
            out.write(xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"))
    sums = storage.read(f"{name}.sums")
    for rank, one in wrote.items():
        for some in one.sums:
            _check(storage, f"{name}.sums", rank, some, memoryview(sums)[some.start :], some.start)
    return sums


def _check(storage: Storage, name: str, rank: int, wrote: WrittenRange, found: memoryview, at: int) -> None:
    assert at == wrote.start
    if xxhash.xxh3_64_intdigest(found[: wrote.stop - wrote.start]) != wrote.digest:
        raise StorageError(
            f"{storage.url}: bytes [{wrote.start}, {wrote.stop}) of {name} are not what rank {rank} has just written"
        )


# Digests of blocks: one for each MiB of the arrays in a data file. With them, a later save finds
# out what it need not write again.
#
#     array of the file        00003.safetensors.blocks
#     +-----------+
#     |  block 0  |  rows of   probe, digest of block 0
#     |-----------|  1 MiB     probe, digest of block 1
#     |  block 1  |            ...
#     +-----------+
#
# Blocks are boxes of the array, not byte ranges of the file. So a rank that holds all elements of a
# block can compute its digest under any sharding. A probe is the digest of the first few bytes: if
# it differs, the rest need not be read.


DIGEST_BLOCK_BYTES = 1 << 20
"""Largest size of a block, unless one element is larger."""
PROBE_BYTES = 256
_VERSION = 2
_RECORD = np.dtype([("probe", "<u8"), ("digest", "V16")])

Digests = npt.NDArray[np.void]
"""A record (probe, digest) per block."""


def blocks_of(box: Box, itemsize: int) -> list[Box]:
    """Return the blocks of an array in row-major order: each some rows, or rows of rows, of at most
    1 MiB.

    Depends only on the box and the item size. If this function changes, files of digests need
    another name.
    """
    return [] if box.is_empty else list(_cut(box, 0, itemsize))


def _cut(box: Box, dim: int, itemsize: int) -> Iterator[Box]:
    """Yield the blocks of a box whose dims before `dim` have size 1."""
    inner = itemsize * math.prod(box.sizes[dim + 1 :])
    if dim == box.ndim or box.sizes[dim] * inner <= DIGEST_BLOCK_BYTES:
        yield box
        return
    rows, stop = max(DIGEST_BLOCK_BYTES // inner, 1), box.stops[dim]
    for at in range(box.offsets[dim], stop, rows):
        some = box.cut(dim, at, min(at + rows, stop))
        if inner > DIGEST_BLOCK_BYTES:
            yield from _cut(some, dim + 1, itemsize)
        else:
            yield some


def probe_of(head: bytes | memoryview) -> int:
    """Return the probe of a block, given its first bytes."""
    return xxhash.xxh3_64_intdigest(head[:PROBE_BYTES])


class BlockDigests:
    """Computes digests of blocks whose bytes are passed in order."""

    def __init__(self, lengths: Iterable[int]) -> None:
        """`lengths` are the sizes of the blocks in bytes, in order, none of them 0."""
        self._lengths = iter(lengths)
        self._state = xxhash.xxh3_128()
        self._head = b""
        self._length = self._left = next(self._lengths, 0)
        self._found: list[tuple[int, bytes]] = []

    def write(self, data: memoryview) -> None:
        """Add the next bytes."""
        at = 0
        while at < len(data):
            piece = data[at : at + self._left]
            at += len(piece)
            if len(piece) == self._length:
                self._close(probe_of(piece), xxhash.xxh3_128_digest(piece))
                continue
            self._head += bytes(piece[: PROBE_BYTES - len(self._head)])
            self._state.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._close(probe_of(self._head), self._state.digest())
                self._state.reset()
                self._head = b""

    def _close(self, probe: int, digest: bytes) -> None:
        self._found.append((probe, digest))
        self._length = self._left = next(self._lengths, 0)

    def finish(self) -> Digests:
        """Return the digests of all blocks."""
        return np.array(self._found, dtype=_RECORD)


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of digests. Files of the first releases, which have other fields, are rejected."""

    version: int
    body: bytes
    digest: bytes
    """XXH3-128 of the body."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_bytes: int
    sums: str
    """The `sums` of the data file in its manifest. It ties the digests to that file's bytes."""
    starts: list[int]
    counts: list[int]
    records: bytes

    def __post_init__(self) -> None:
        """Raise ValueError for values that no save writes. The parser turns it into its own error."""
        if self.block_bytes != DIGEST_BLOCK_BYTES:
            raise ValueError(f"its blocks have up to {self.block_bytes} bytes, not {DIGEST_BLOCK_BYTES}")
        if len(self.starts) != len(self.counts) or min([*self.starts, *self.counts], default=0) < 0:
            raise ValueError("its arrays are malformed")
        if sum(self.counts) * _RECORD.itemsize != len(self.records):
            raise ValueError(f"it has {len(self.records)} bytes of digests for {sum(self.counts)} blocks")


@dataclass(frozen=True)
class BlockTable:
    """The digests of a data file, as read from its `.blocks` file.

    The file is a MessagePack map: `version` (2), `body`, and `digest`, the XXH3-128 of the body.
    The body is a map: `block_bytes` (1048576), `sums` of the data file as in its manifest, `starts`
    and `counts` of the arrays (first byte, number of blocks), and `records`. Writers ignore files
    of another version, or whose digest or `sums` do not match.

    A block is a box of the array: the full array if it has at most `block_bytes` bytes; otherwise,
    as many consecutive indices of the first dim as fit; if not even one fits, each index, divided
    the same way in the next dim. A record consists of the XXH3-64 of the block's first 256 bytes
    and the XXH3-128 of the complete block.
    """

    records: Digests
    first: dict[int, tuple[int, int]]
    """First byte of each array in the file -> the number of its first block, and the number of its blocks."""

    def of_array(self, start: int, blocks: Sequence[Box]) -> Digests | None:
        """Return the digests of the array at byte `start`, or None if there are none for these blocks."""
        at, count = self.first.get(start, (0, 0))
        return self.records[at : at + count] if count == len(blocks) else None


def write_blocks(
    storage: Storage, name: str, sums: str, starts: Sequence[int], counts: Sequence[int], digests: Digests
) -> None:
    """Store the digests of the arrays that begin at `starts` in the data file `name`. `sums` is
    that of the file's record in the manifest."""
    body = msgspec.msgpack.encode(_Body(DIGEST_BLOCK_BYTES, sums, list(starts), list(counts), digests.tobytes()))
    with storage.create(f"{name}.blocks") as out:
        out.write(msgspec.msgpack.encode(_Sealed(_VERSION, body, xxhash.xxh3_128_digest(body))))


def read_blocks(storage: Storage, name: str, sums: str) -> BlockTable:
    """Read the digests of the data file `name`, whose record in the manifest has these `sums`.

    Raises CheckpointNotFoundError if there are none. Raises CorruptCheckpointError if they are
    invalid: they were changed, belong to other bytes, or were written by one of the first releases.
    """
    data = storage.read(f"{name}.blocks")
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        if (sealed.version, sealed.digest) != (_VERSION, xxhash.xxh3_128_digest(sealed.body)):
            raise ValueError("its digest differs")
        found = msgspec.msgpack.decode(sealed.body, type=_Body)
        if found.sums != sums:
            raise ValueError("it belongs to another file")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError
        raise CorruptCheckpointError(f"{storage.url}: {name}.blocks cannot be relied on: {error}") from None
    ends = accumulate(found.counts, initial=0)
    first = {start: (at, count) for start, at, count in zip(found.starts, ends, found.counts, strict=False)}
    return BlockTable(np.frombuffer(found.records, dtype=_RECORD), first)
