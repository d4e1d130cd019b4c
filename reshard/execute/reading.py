"""Executes a load plan: finds the bytes of every item first, and then compares and copies them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from operator import sub
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from planners.geometry.arrays import Array, Flags, Ints, ints, zeros
from planners.geometry.box import Box, Range
from planners.geometry.byte_ranges import Window, merge_ranges
from planners.plans.load import ReadItem
from reshard.errors import CorruptCheckpointError, OptionError
from reshard.live.copy_streams import Uploads
from reshard.live.dtypes import dtype_name, overflowing
from reshard.stored.checksums import BlockChecksums, most_to_check
from reshard.stored.source import DecodedSource, FileSource, OnBytes, Source
from reshard.stored.tensor import MAX_BUFFER_BYTES, Extent, StoredTensor, check_cover, copy_place, empty

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 8
_MIN_PIECE_BYTES = 64 << 10
_SMALL_RUN_BYTES = 64 << 10
_TELL_BYTES = 1 << 20
"""How often to say how many bytes were copied."""


@dataclass(frozen=True)
class Workspace:
    """The memory that copies may take besides the targets. Each thread has one piece in progress:
    data of files without views, and data that is staged for another dtype or device.
    """

    threads: int
    piece_bytes: int

    @classmethod
    def of(cls, memory_budget_bytes: int | None, threads: int | None, sharers: int = 1) -> Workspace:
        """At most `memory_budget_bytes` for all threads together. `threads` None: the processors of
        this process, divided by the `sharers` processes that share them.

        Raises OptionError for a budget that is too small to work in, or a number of threads below 1.
        """
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = threads or max(1, min(MAX_THREADS, processors // max(sharers, 1)))
        if memory_budget_bytes is None:
            return cls(count, MAX_BUFFER_BYTES)
        if memory_budget_bytes < 2 * _MIN_PIECE_BYTES:
            raise OptionError(
                f"a memory budget of {memory_budget_bytes} bytes is too small: give at least {2 * _MIN_PIECE_BYTES}"
            )
        count = min(count, memory_budget_bytes // (2 * _MIN_PIECE_BYTES))
        return cls(count, min(MAX_BUFFER_BYTES, memory_budget_bytes // (2 * count)))


@dataclass
class ByteCounts:
    """What a rank's reading did, in bytes."""

    read: int = 0
    """Bytes of elements that were read from data files."""
    extra: int = 0
    """Bytes read in addition: to check what was requested, or between requested bytes."""
    unchecked: int = 0
    """Bytes of elements that this rank wants and that no rank compared with checksums, without
    those of sources that decode or compute."""
    received: int = 0
    """Bytes of elements that other ranks of the host read for this one."""

    def add(self, more: ByteCounts) -> None:
        """Count more bytes."""
        self.read += more.read
        self.extra += more.extra
        self.unchecked += more.unchecked
        self.received += more.received


@dataclass(frozen=True)
class Staged:
    """A target that numpy cannot write into: of another dtype or device than the saved tensor, or
    lazily conjugated."""

    tensor: torch.Tensor
    saved: torch.dtype
    uploads: Uploads | None = None
    """The way to its device, where that is reached by pinned memory."""
    counts: list[int] | None = None
    """Gets what `overflowing` counts in each piece."""

    def __getitem__(self, index: Any) -> Staged:
        return replace(self, tensor=self.tensor[index])

    def limit(self, piece_bytes: int) -> int:
        """The largest piece that can be filled at once if `piece_bytes` may be staged."""
        return piece_bytes if self.uploads is None else min(piece_bytes, self.uploads.slot_bytes)

    def fill(self, place: Extent, buffer_bytes: int, *, compared: bool = False) -> None:
        """Read the elements into memory of the saved dtype, and from there into the target: see
        `copy_place`."""

        def read(array: Array) -> None:
            copy_place(place, array, buffer_bytes, compared=compared)
            if self.counts is not None:
                elements = torch.from_numpy(array.reshape(-1).view(np.uint8)).view(self.saved)
                self.counts.append(overflowing(elements, self.tensor.dtype))

        if self.uploads is not None:
            self.uploads.put(self.tensor, self.saved, place.window.sizes, read)
            return
        scratch, array = empty(place.window.sizes, dtype_name(self.saved))
        read(array)
        self.tensor.copy_(scratch)


class Copy(NamedTuple):
    """Elements at a place of a file, and the array or tensor of equal sizes that they go into."""

    place: Extent
    out: Array | Staged
    fqn: str = ""
    """Name of the target."""


def find_copies(
    items: Sequence[ReadItem],
    stored: Mapping[str, StoredTensor],
    target: Callable[[ReadItem], Array | Staged],
) -> list[Copy]:
    """Find the bytes of every item. Touches no target.

    Args:
        stored: tensors by the names of items.
        target: the local tensor that an item goes into.

    Raises CorruptCheckpointError, which names tensor and file, if bytes of an item are missing, or
    if elements are stored twice.
    """
    copies: list[Copy] = []
    for item in items:
        whole, box, taken = target(item), item.box, 0
        used: list[Box] = []
        for chunk, common in stored[item.fqn].meeting(box):
            if not item.chunk.contains(chunk.box) or any(map(common.intersection, used)):
                check_cover(stored[item.fqn], box)  # raises: two chunks hold these elements
            used.append(common)
            place = chunk.place
            if common.sizes != chunk.box.sizes:
                offsets = tuple(map(sub, common.offsets, chunk.box.offsets))
                place = place.with_window(place.window.crop(Box.of(offsets, common.sizes)))
            window = place.window
            try:
                place.source.check(window.offset, window.stop)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"tensor {item.fqn!r}, {common}: {error}") from None
            at = item.target if common.sizes == box.sizes else common.relative_to(box).shift(item.target.offsets)
            copies.append(Copy(place, whole[_index_of(at)], item.fqn))
            taken += common.numel
        if taken != box.numel:
            raise CorruptCheckpointError(
                f"tensor {item.fqn!r}: of {box}, only {taken} of {box.numel} elements are stored"
            )
    return copies


@lru_cache(maxsize=4096)  # tensors of one geometry have the same boxes
def _index_of(box: Box) -> Any:
    return (*box.slices, ...)  # the dots make it a view, also of a 0-d array


def run_copies(
    copies: Sequence[Copy],
    *,
    space: Workspace,
    compared: Callable[[Source], bool] = lambda _: False,
    on_bytes: OnBytes | None = None,
) -> int:
    """Copy everything, file by file in order of position, on several threads. Return the number of
    bytes copied.

    Args:
        space: threads and memory.
        compared: whether what is read of a source was compared with checksums already, or is not to be.
        on_bytes: called with the bytes of each piece that is done, on any thread.
    """
    in_file_order = sorted(copies, key=lambda copy: (copy.place.source.label, copy.place.window.offset))
    pieces = [piece for copy in in_file_order for piece in in_pieces(copy, space.piece_bytes)]

    def work(some: Sequence[tuple[Extent, Array | Staged]]) -> int:
        total = told = 0
        for place, out in some:
            if isinstance(out, Staged):
                out.fill(place, space.piece_bytes, compared=compared(place.source))
            else:
                copy_place(place, out, space.piece_bytes, compared=compared(place.source))
            total += place.window.nbytes
            if on_bytes is not None and total - told >= _TELL_BYTES:
                on_bytes(total - told)
                told = total
        if on_bytes is not None:
            on_bytes(total - told)
        return total

    # some at a time: a thread's turn costs more than to copy a small piece
    step = max(1, len(pieces) // (space.threads * 16))
    lots = [pieces[i : i + step] for i in range(0, len(pieces), step)]
    sources = {copy.place.source for copy in copies}
    kept = {source.kept for source in sources if isinstance(source, DecodedSource)}
    try:
        for each in kept:
            each.allow(space.threads * space.piece_bytes // len(kept))
        return sum(on_threads(work, lots, space.threads, "reshard-read"))
    finally:
        for each in kept:
            each.allow(0)


def on_threads(work: Callable[[T], R], items: Sequence[T], threads: int, name: str) -> list[R]:
    """Return the results of `work` for some items, in order. The first error ends all."""
    if threads == 1 or len(items) <= 1:
        return list(map(work, items))
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        return list(pool.map(work, items))


def in_pieces(copy: Copy, piece_bytes: int) -> Iterator[tuple[Extent, Array | Staged]]:
    """Yield the copy in pieces: it is split along the longest dim until the pieces are small enough.

    Copies that need no memory beside their target are split only so that threads share them.
    """
    window, out = copy.place.window, copy.out
    limit = out.limit(piece_bytes) if isinstance(out, Staged) else 2 * MAX_BUFFER_BYTES
    todo = [(copy.place, out)]
    while todo:
        place, out = todo.pop()
        window = place.window
        if window.nbytes <= limit or max(window.sizes, default=1) == 1:
            yield place, out
            continue
        d = 0 if max(window.sizes) <= window.sizes[0] * 4 != 4 else int(np.argmax(window.sizes))
        step = max(1, window.sizes[d] * min(limit, MAX_BUFFER_BYTES) // window.nbytes)
        whole, parts = Box.full(window.sizes), []
        for start in range(0, window.sizes[d], step):
            box = whole.cut(d, start, min(start + step, window.sizes[d]))
            parts.append((place.with_window(window.crop(box)), out[box.slices]))
        todo += reversed(parts)


@dataclass
class Wanted:
    """What is read of one file."""

    ranges: list[Range] = field(default_factory=list)
    """Bytes that are read without gaps, in order and apart."""
    windows: list[Window] = field(default_factory=list)
    """What is read with gaps."""

    def without(self, blocks: Flags, sums: BlockChecksums) -> Wanted:
        """Return only what touches other blocks than these."""
        if not blocks.any():
            return self
        bounds = [*self.ranges, *((window.offset, window.stop) for window in self.windows)]
        left = ~sums.are_among(blocks, *ints(bounds).reshape(-1, 2).T)
        windows = compress(self.windows, left[len(self.ranges) :])
        return Wanted(list(compress(self.ranges, left)), list(windows))


def wanted_by_file(copies: Iterable[Copy]) -> dict[FileSource, Wanted]:
    """Return what some copies read of each file."""
    found: dict[FileSource, Wanted] = {}
    for copy in copies:
        source, window = copy.place.source, copy.place.window
        if not isinstance(source, FileSource) or not window.numel:
            continue
        wanted, runs = found.get(source), window.runs()
        if wanted is None:
            wanted = found[source] = Wanted()
        if runs.count == 1:
            wanted.ranges.append((runs.offset, runs.offset + runs.run_bytes))
        elif runs.run_bytes >= _SMALL_RUN_BYTES:
            wanted.ranges.extend((start, start + length) for start, length in runs)
        else:
            wanted.windows.append(window)
    for wanted in found.values():
        wanted.ranges = merge_ranges(wanted.ranges)
    return found


# Which blocks of files a load compares with their checksums, and what stays unchecked.


_LOT_BLOCKS = 256
"""The number of blocks that are compared between two checks whether another rank has failed."""


class Elsewhere(NamedTuple):
    """The blocks of a file that others compare, and that this rank compares for others, as ranges, (n, 2)."""

    by_others: Ints
    """Also what is compared while it is read for all."""
    for_others: Ints


@dataclass
class ComparePlan:
    """The blocks to compare of each file."""

    blocks: dict[FileSource, Ints] = field(default_factory=dict)
    """(n, 2), in order."""
    extra_bytes: int = 0
    """Bytes of these that were not requested."""
    unchecked_bytes: int = 0
    """Bytes that were requested and that no rank compares."""


def plan_compare(wanted: Mapping[FileSource, Wanted], elsewhere: Mapping[FileSource, Elsewhere]) -> ComparePlan:
    """The blocks that are touched, up to what `most_to_check` allows, those with the least extra
    bytes first."""
    plan = ComparePlan()
    chosen: list[tuple[FileSource, Ints, Ints]] = []
    total = 0
    for source in dict.fromkeys((*wanted, *elsewhere)):
        want, shared = wanted.get(source, Wanted()), elsewhere.get(source)
        nbytes = sum(b - a for a, b in want.ranges) + sum(window.nbytes for window in want.windows)
        total += nbytes
        sums = source.checksums
        if sums is None or not source.checking.enabled:
            plan.unchecked_bytes += nbytes
            continue
        if isinstance(sums, BlockChecksums) and shared is not None:
            by_others, for_others = map(sums.within, shared)
            mine, want = sums.bounds(for_others), want.without(by_others, sums)
            mine = mine[sums.are_pending(mine)]
            if len(mine):
                plan.blocks[source] = mine
            blocks, counts, outside = sums.wanted(want.ranges, want.windows)
            left = sums.are_pending(blocks) & ~sums.are_among(by_others | for_others, *blocks.T)
        else:
            blocks, counts, outside = sums.wanted(want.ranges, want.windows)
            left = sums.are_pending(blocks)
        plan.unchecked_bytes += outside
        chosen.append((source, blocks[left], counts[left]))
    _choose(plan, chosen, total)
    return plan


def _choose(plan: ComparePlan, rows: Sequence[tuple[FileSource, Ints, Ints]], total: int) -> None:
    """Add blocks to a plan, up to what may be read to check `total` bytes, those with the least
    extra bytes first. `rows`: blocks of a file, and the wanted bytes of each."""
    lengths = [blocks[:, 1] - blocks[:, 0] for _, blocks, _ in rows]
    cost = np.concatenate((zeros(0), *lengths))
    lacking = np.maximum(cost - np.concatenate((zeros(0), *(counts for _, _, counts in rows))), 0)
    order = np.argsort(lacking, kind="stable")
    allowed = np.zeros(len(cost), np.bool_)
    allowed[order] = np.cumsum(cost[order]) <= most_to_check(total)
    at = 0
    for source, blocks, counts in rows:
        some = allowed[at : at + len(blocks)]
        plan.extra_bytes += int(lacking[at : at + len(blocks)][some].sum())
        plan.unchecked_bytes += int(counts[~some].sum())
        if some.any():
            every = np.concatenate((plan.blocks.get(source, blocks[:0]), blocks[some]))
            plan.blocks[source] = every[np.argsort(every[:, 0])]
        at += len(blocks)


def compare_plan(plan: ComparePlan, threads: int, on_bytes: OnBytes) -> None:
    """Read and compare all blocks, without a copy: what was hashed through a view is copied from
    it, too.

    Raises CorruptCheckpointError.
    """
    lots = []
    for source, blocks in plan.blocks.items():
        source.prefer_view()
        step = max(1, min(-(-len(blocks) // threads), _LOT_BLOCKS))
        lots += [(source, blocks[i : i + step]) for i in range(0, len(blocks), step)]

    def compare(lot: tuple[FileSource, Ints]) -> None:
        source, blocks = lot
        source.compare_blocks(blocks)
        on_bytes(int((blocks[:, 1] - blocks[:, 0]).sum()))

    on_threads(compare, lots, threads, "reshard-check")
