"""Checks the blocks of data files against their saved checksums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from reshard.errors import DamagedCheckpointError
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.source import FileSource

__all__ = ["PassingCheck", "blocks_to_check", "check_blocks", "segment_check", "whole_blocks"]

MAX_EXTRA_SHARE = 0.01
"""For checking, so much more may be read of a file than is wanted of it."""
SMALL_FILE_BYTES = 64 << 10
"""A file of up to this size is checked as a whole, whatever is wanted of it."""


def whole_blocks(spans: Sequence[tuple[int, int]], nbytes: int, block_bytes: int) -> list[int]:
    """Numbers of the blocks of a file of `nbytes` that lie wholly within the gapless, sorted `spans`."""
    out: list[int] = []
    for start, stop in spans:
        first = -(-start // block_bytes)
        last = -(-nbytes // block_bytes) if stop >= nbytes else stop // block_bytes
        out.extend(range(first, last))
    return out


def blocks_to_check(spans: Sequence[tuple[int, int]], nbytes: int, block_bytes: int) -> tuple[list[int], int]:
    """The blocks of a file to check where `spans` of it are read, and how many bytes of them nobody else reads.

    All that are read whole; and of those at the ends of spans the ones that need the least more, as long as that stays
    within `MAX_EXTRA_SHARE` of what is read. Of a file of up to `SMALL_FILE_BYTES` every block is checked.
    """
    read = sum(stop - start for start, stop in spans)
    if nbytes <= SMALL_FILE_BYTES:
        return list(range(-(-nbytes // block_bytes))), nbytes - read
    whole = whole_blocks(spans, nbytes, block_bytes)
    ends = {at // block_bytes for start, stop in spans for at in (start, stop - 1)}.difference(whole)
    lacking = {block: min(block_bytes, nbytes - block * block_bytes) for block in ends}
    for start, stop in spans:
        for block in {start // block_bytes, (stop - 1) // block_bytes} & ends:
            lacking[block] -= min(stop, (block + 1) * block_bytes) - max(start, block * block_bytes)
    room, extra = int(read * MAX_EXTRA_SHARE), 0
    for block, more in sorted(lacking.items(), key=lambda row: row[1]):
        if extra + more > room:
            break
        whole.append(block)
        extra += more
    return sorted(whole), extra


def check_blocks(
    facts: NativeFacts,
    spans: Mapping[FileSource, Sequence[tuple[int, int]]],
    *,
    threads: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[int, int]:
    """Hash the blocks that lie in `spans`, the ranges to be read of each file: see `blocks_to_check`.

    Without a copy where the storage has a view; files that were hashed through it are copied from it, too. The
    safetensors header counts as read, since it was.

    Returns how many bytes were checked, and how many of them are read for nothing else.

    Raises DamagedCheckpointError that names the first file and byte range whose checksum differs, and how many do.
    """
    by_name = facts.files
    size = facts.manifest.block_bytes
    work: list[tuple[FileSource, FileRecord, int, int]] = []
    extra = 0
    for source, ranges in spans.items():
        record = by_name.get(source.name)
        if record is None:
            continue
        sums = np.frombuffer(facts.sums(record.name), dtype="<u8")
        blocks, more = blocks_to_check(_with_header(ranges, record.header_bytes), record.nbytes, size)
        work += [(source, record, block, int(sums[block])) for block in blocks]
        extra += more
        if blocks:
            source.prefer_view()

    def check(row: tuple[FileSource, FileRecord, int, int]) -> tuple[str, int, int, bool]:
        source, record, block, digest = row
        start, stop = block * size, min((block + 1) * size, record.nbytes)
        good = xxhash.xxh3_64_intdigest(source.read(start, stop - start)) == digest
        if on_bytes is not None:
            on_bytes(stop - start)
        return source.label, start, stop, good

    if threads == 1 or len(work) <= 1:
        rows = list(map(check, work))
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="reshard-check") as pool:
            rows = list(pool.map(check, work, chunksize=max(1, len(work) // (threads * 8))))
    raise_damaged(rows)
    return sum(stop - start for _, start, stop, _ in rows), extra


def segment_check(facts: NativeFacts) -> Callable[[FileSource, int, memoryview], int]:
    """A function that compares the blocks that lie wholly within some bytes of a file, which begin at a position, with
    their checksums, and returns how many bytes those are. It raises DamagedCheckpointError."""
    return lambda source, start, data: PassingCheck(facts, source, start, start + len(data)).add(data)


class PassingCheck:
    """Compares what is read of bytes [start, stop) of a file, one piece behind another, with the checksums of the
    blocks that lie wholly within them."""

    def __init__(self, facts: NativeFacts, source: FileSource, start: int, stop: int) -> None:
        self._label, self._at, self._size = source.label, start, facts.manifest.block_bytes
        record = facts.files.get(source.name)
        self._nbytes = 0 if record is None else record.nbytes
        self._sums = np.frombuffer(b"" if record is None else facts.sums(record.name), dtype="<u8")
        blocks = whole_blocks([(start, stop)], self._nbytes, self._size) if record is not None else []
        self._blocks = deque(blocks)
        self._state = xxhash.xxh3_64()

    def add(self, data: memoryview) -> int:
        """The next bytes; returns how many bytes were compared. Raises DamagedCheckpointError."""
        first, stop = self._at, self._at + len(data)
        rows, checked = [], 0
        while self._blocks:
            begin = self._blocks[0] * self._size
            end = min(begin + self._size, self._nbytes)
            piece = data[max(begin - first, 0) : max(end - first, 0)]
            if begin >= first and end <= stop:
                digest = xxhash.xxh3_64_intdigest(piece)
            else:
                self._state.update(piece)
                if end > stop:
                    break
                digest = self._state.intdigest()
                self._state.reset()
            rows.append((self._label, begin, end, digest == int(self._sums[self._blocks.popleft()])))
            checked += end - begin
        self._at = stop
        raise_damaged(rows)
        return checked


def raise_damaged(rows: Iterable[tuple[str, int, int, bool]]) -> None:
    """Raises DamagedCheckpointError for rows (file, start, stop, good) that are not good."""
    bad = [(label, start, stop) for label, start, stop, good in rows if not good]
    if bad:
        label, start, stop = bad[0]
        more = f", and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
        raise DamagedCheckpointError(
            f"{label}: bytes [{start}, {stop}) were changed since they were written{more}: restore the file, or load "
            "another checkpoint"
        )


def _with_header(ranges: Sequence[tuple[int, int]], header_bytes: int) -> list[tuple[int, int]]:
    if ranges and ranges[0][0] <= header_bytes:
        return [(0, ranges[0][1]), *ranges[1:]]
    return [(0, header_bytes), *ranges]
