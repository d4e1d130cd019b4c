"""Blocks: a digest of each MiB of the arrays of a data file, by which a later save sees what it need not write again.

    array of the file        00003.safetensors.blocks
    +-----------+
    |  block 0  |  rows of   probe, digest of block 0
    |-----------|  1 MiB     probe, digest of block 1
    |  block 1  |            ...
    +-----------+

Blocks are boxes of the array, not bytes of the file, so that whoever holds all elements of one can compute its digest,
however the tensor is cut by then. A probe is a digest of the first few bytes: where these differ, no more need be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from planners.geometry.box import Box
from reshard.errors import DamagedCheckpointError
from reshard.storage.base import Storage

__all__ = ["BlockDigests", "BlockTable", "Digests", "Sink", "blocks_of", "probe_of", "read_blocks", "write_blocks"]

BLOCK_BYTES = 1 << 20
"""At most so many bytes, or one element, are a block."""
PROBE_BYTES = 256
_VERSION = 2
_RECORD = np.dtype([("probe", "<u8"), ("digest", "V16")])

Digests = npt.NDArray[np.void]
"""A record (probe, digest) for each block."""


def blocks_of(box: Box, itemsize: int) -> list[Box]:
    """The blocks of an array of these elements, in row-major order: some rows, or rows of rows, of at most 1 MiB.

    A function of the box and the item size alone. Where it changes, files of blocks need another name.
    """
    return [] if box.is_empty else list(_cut(box.offsets, box.sizes, 0, itemsize))


def _cut(offsets: tuple[int, ...], sizes: tuple[int, ...], dim: int, itemsize: int) -> Iterator[Box]:
    """Of a box whose dims before `dim` are cut down to one index already."""
    inner = itemsize
    for size in sizes[dim + 1 :]:
        inner *= size
    if dim == len(sizes) or sizes[dim] * inner <= BLOCK_BYTES:
        yield Box.of(offsets, sizes)
        return
    rows = max(BLOCK_BYTES // inner, 1)
    for at in range(0, sizes[dim], rows):
        first = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        some = (*sizes[:dim], min(rows, sizes[dim] - at), *sizes[dim + 1 :])
        if inner > BLOCK_BYTES:
            yield from _cut(first, some, dim + 1, itemsize)
        else:
            yield Box.of(first, some)


def probe_of(head: bytes | memoryview) -> int:
    """The probe of a block that begins with these bytes."""
    return xxhash.xxh3_64_intdigest(head[:PROBE_BYTES])


class Sink(Protocol):
    """What takes the bytes of a file, front to end."""

    def write(self, data: memoryview) -> None:
        """Append."""


class BlockDigests:
    """Takes the digests of what passes on its way to a writer, or of what goes nowhere."""

    def __init__(self, lengths: Iterable[int], out: Sink | None = None) -> None:
        """`lengths` are those of the blocks that will pass, in bytes, none of them 0."""
        self._lengths = iter(lengths)
        self._out = out
        self._state = xxhash.xxh3_128()
        self._head = b""
        self._length = self._left = next(self._lengths, 0)
        self._found: list[tuple[int, bytes]] = []

    def write(self, data: memoryview) -> None:
        """Block by block."""
        if self._out is not None:
            self._out.write(data)
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
        """Of all blocks."""
        return np.array(self._found, dtype=_RECORD)


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of blocks. The first ones had other fields, of which the digest covered a part: these are not believed."""

    version: int
    body: bytes
    digest: bytes
    """XXH3-128 of the body, which is all that the file says."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_bytes: int
    sums: str
    """Of the data file, as its manifest has it: these digests are of no other bytes."""
    starts: list[int]
    counts: list[int]
    records: bytes

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes an error of the parser, for what no save writes."""
        if self.block_bytes != BLOCK_BYTES:
            raise ValueError(f"its blocks have up to {self.block_bytes} bytes, not {BLOCK_BYTES}")
        if len(self.starts) != len(self.counts) or min([*self.starts, *self.counts], default=0) < 0:
            raise ValueError("its arrays make no sense")
        if sum(self.counts) * _RECORD.itemsize != len(self.records):
            raise ValueError(f"it has {len(self.records)} bytes of digests for {sum(self.counts)} blocks")


@dataclass(frozen=True)
class BlockTable:
    """The digests of a data file."""

    records: Digests
    first: dict[int, tuple[int, int]]
    """By the first byte of an array in the file: the number of its first block, and how many it has."""

    def of_array(self, start: int, blocks: Sequence[Box]) -> Digests | None:
        """The digests of an array that has these blocks; None if there are none of it."""
        at, count = self.first.get(start, (0, 0))
        return self.records[at : at + count] if count == len(blocks) else None


def write_blocks(
    storage: Storage, name: str, sums: str, starts: Sequence[int], counts: Sequence[int], digests: Digests
) -> None:
    """Store the digests of the arrays that begin at `starts` in the data file `name`, beside it. `sums` is what the
    manifest says of its checksums."""
    body = msgspec.msgpack.encode(_Body(BLOCK_BYTES, sums, list(starts), list(counts), digests.tobytes()))
    with storage.create(f"{name}.blocks") as out:
        out.write(msgspec.msgpack.encode(_Sealed(_VERSION, body, xxhash.xxh3_128_digest(body))))


def read_blocks(storage: Storage, name: str, sums: str) -> BlockTable:
    """The digests of the data file `name`, of which the manifest says `sums`.

    Raises CheckpointNotFoundError if nobody took them; DamagedCheckpointError if they are not to be believed: they were
    changed, are of other bytes, or are such as the first releases wrote.
    """
    data = storage.read(f"{name}.blocks")
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        if (sealed.version, sealed.digest) != (_VERSION, xxhash.xxh3_128_digest(sealed.body)):
            raise ValueError("its digest is another one")
        found = msgspec.msgpack.decode(sealed.body, type=_Body)
        if found.sums != sums:
            raise ValueError("it is of another file")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError
        raise DamagedCheckpointError(f"{storage.url}: {name}.blocks cannot be relied on: {error}") from None
    ends = accumulate(found.counts, initial=0)
    first = {start: (at, count) for start, at, count in zip(found.starts, ends, found.counts, strict=False)}
    return BlockTable(np.frombuffer(found.records, dtype=_RECORD), first)
