"""Writes one rank's data file: a safetensors file, streamed, with a checksum for every block of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import xxhash

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.formats.native.blocks import BlockDigests, Sink, blocks_of, write_blocks
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import BLOCK_BYTES, entry_key
from reshard.formats.safetensors.header import encode_header
from reshard.state.fingerprints import Partial, partials
from reshard.state.memory.downloads import row_major_pieces
from reshard.state.memory.lanes import Lanes
from reshard.storage.base import Storage

__all__ = ["STAGE_BYTES", "BlockSums", "Entry", "digest128", "sum_up", "write_file"]

STAGE_BYTES = 32 << 20
"""Default memory for elements that do not lie in row-major order, or not on the CPU, on their way to the file."""


@dataclass(frozen=True)
class Entry:
    """One array of a data file."""

    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    """The region of it that the array holds, in global coordinates."""
    tensor: torch.Tensor
    """The elements, of the box's sizes; on any device, with any strides."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        return entry_key(self.spec.fqn, self.box, self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.spec.itemsize


def write_file(
    storage: Storage,
    name: str,
    entries: Sequence[Entry],
    *,
    lanes: Lanes | None = None,
    stage_bytes: int = STAGE_BYTES,
    digests: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write `entries` as one safetensors file, and its block checksums beside it. Both are durable on return.

    Large elements come first, so that every array is aligned to its item size.

    Args:
        lanes: by which entries on devices come to the host; those of other devices are copied one after another.
        stage_bytes: for elements that do not lie in row-major order, or not on the CPU, on their way to the file.
        digests: leave digests of the blocks of every array, too, for later saves.

    Raises FormatError if two entries have one key; StorageError if the storage fails.
    """
    ordered = sorted(entries, key=lambda entry: -entry.spec.itemsize)
    header = encode_header((entry.key, entry.spec.dtype, entry.box.sizes) for entry in ordered)
    with storage.create(name) as out:
        blocks = [blocks_of(entry.box, entry.spec.itemsize) for entry in ordered] if digests else []
        passing = BlockDigests([len(header), *_lengths(ordered, blocks)], out)
        sums = BlockSums(passing if digests else out)
        sums.write(memoryview(header))
        for piece in row_major_pieces([entry.tensor for entry in ordered], lanes or Lanes(), stage_bytes):
            sums.write(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        checksums = sums.finish()
    with storage.create(f"{name}.sums") as out:
        out.write(checksums)
    *starts, end = accumulate((entry.nbytes for entry in ordered), initial=len(header))
    record = FileRecord(name, end, len(header), digest128(checksums))
    if digests:
        write_blocks(storage, name, record.sums, starts, [len(found) for found in blocks], passing.finish()[1:])
    return record


def _lengths(entries: Sequence[Entry], blocks: Sequence[Sequence[Box]]) -> Iterator[int]:
    for entry, found in zip(entries, blocks):
        for block in found:
            yield block.numel * entry.spec.itemsize


def sum_up(entries: Sequence[Entry], lanes: Lanes | None = None) -> dict[str, Partial]:
    """What `entries` add to the fingerprints of their tensors, by name: computed where they are, on these lanes."""
    out: dict[str, Partial] = {}
    lanes = lanes or Lanes()
    for device in dict.fromkeys(entry.tensor.device for entry in entries):
        here = [entry for entry in entries if entry.tensor.device == device]
        with lanes.use(device):
            found = partials((entry.tensor, entry.box, entry.spec.shape) for entry in here)
        for entry, one in zip(here, found, strict=True):
            out[entry.spec.fqn] = out[entry.spec.fqn] + one if entry.spec.fqn in out else one
    return out


def digest128(data: bytes) -> str:
    """XXH3-128, in hex."""
    return str(xxhash.xxh3_128_hexdigest(data))


class BlockSums:
    """Passes bytes on to a writer and hashes them block by block."""

    def __init__(self, out: Sink) -> None:
        self._out = out
        self._state = xxhash.xxh3_64()
        self._room = BLOCK_BYTES
        self._digests: list[int] = []

    def write(self, data: memoryview) -> None:
        """Block by block, so that what is written is still at hand from being hashed."""
        at = 0
        while at < len(data):
            piece = data[at : at + self._room]
            if len(piece) == BLOCK_BYTES:
                self._digests.append(xxhash.xxh3_64_intdigest(piece))
            else:
                self._state.update(piece)
                self._room -= len(piece)
                if not self._room:
                    self._close_block()
            self._out.write(piece)
            at += len(piece)

    def _close_block(self) -> None:
        self._digests.append(self._state.intdigest())
        self._state.reset()
        self._room = BLOCK_BYTES

    def finish(self) -> bytes:
        """The digests of all blocks, the last one perhaps short, as little-endian 64-bit numbers."""
        if self._room != BLOCK_BYTES:
            self._close_block()
        return np.array(self._digests, dtype="<u8").tobytes()
