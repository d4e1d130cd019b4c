"""Compares byte ranges of data files with their checksums, whatever was read or compared of them before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.checksums import BlockChecksums
from reshard.formats.stored.source import FileSource

__all__ = ["compare_ranges"]


def compare_ranges(facts: NativeFacts, spans: Mapping[FileSource, Sequence[tuple[int, int]]]) -> int:
    """Compare all blocks that share bytes with these ranges of data files; returns how many bytes those blocks have.

    Raises DamagedCheckpointError that names the first file and byte range whose checksum differs.
    """
    compared = 0
    for source, ranges in spans.items():
        record = facts.files.get(source.name)
        if record is None:
            continue
        fresh = FileSource(source.storage, source.name)
        block_bytes = record.block_bytes_or(facts.manifest.block_bytes)
        sums = fresh.checksums = BlockChecksums(record.nbytes, block_bytes, partial(facts.sums, record.name))
        blocks = dict.fromkeys(block for start, stop in ranges for block in sums.pending(start, stop))
        fresh.compare_blocks(blocks)
        compared += sum(stop - start for start, stop in blocks)
    return compared
