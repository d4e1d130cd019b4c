"""Which blocks of files a load compares with their checksums, and what stays unchecked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from reshard.execute.reading import Wanted
from reshard.formats.stored.checksums import BlockChecksums, may_check
from reshard.formats.stored.source import FileSource

__all__ = ["ComparePlan", "Elsewhere", "compare_plan", "plan_compare"]

Range = tuple[int, int]

_LOT_BLOCKS = 256
"""So many are compared before somebody looks whether another rank has failed."""


@dataclass
class Elsewhere:
    """What of a file other ranks compare, and what this one compares for others."""

    by_others: Sequence[Range] = ()
    """Bytes of which each block that lies within is compared by another rank, or while it is read for all: in order."""
    for_others: Sequence[Range] = ()


@dataclass
class ComparePlan:
    """The blocks to compare of each file."""

    blocks: dict[FileSource, list[Range]] = field(default_factory=dict)
    extra_bytes: int = 0
    """Bytes of these that nobody asked for."""
    unchecked_bytes: int = 0
    """Bytes that were asked for and that nobody compares."""


def plan_compare(wanted: Mapping[FileSource, Wanted], elsewhere: Mapping[FileSource, Elsewhere]) -> ComparePlan:
    """All blocks that are touched, if that is within `may_check`; else as many as it allows, those first of which the
    least is read for nothing else."""
    plan = ComparePlan()
    chosen: list[tuple[int, int, FileSource, Range]] = []
    total = 0
    for source in dict.fromkeys((*wanted, *elsewhere)):
        want, shared = wanted.get(source, Wanted()), elsewhere.get(source, Elsewhere())
        total += sum(b - a for a, b in want.ranges) + sum(window.nbytes for window in want.windows)
        if source.checksums is None or not source.checking.enabled:
            plan.unchecked_bytes += sum(b - a for a, b in want.ranges) + sum(w.nbytes for w in want.windows)
            continue
        blocks, counts, outside = source.checksums.wanted(want.ranges, want.windows)
        plan.unchecked_bytes += outside
        in_blocks = isinstance(source.checksums, BlockChecksums)
        others = _within(blocks, shared.by_others if in_blocks else ())
        mine: set[Range] = set()
        for start, stop in shared.for_others if in_blocks else ():
            mine.update((a, b) for a, b in source.checksums.pending(start, stop) if start <= a and b <= stop)
        for block, count, is_others in zip(blocks, counts.tolist(), others):
            if not is_others and block not in mine and source.checksums.pending(*block):
                chosen.append((max(block[1] - block[0] - count, 0), count, source, block))
        if mine:
            plan.blocks[source] = sorted(mine)
    cost = 0
    for lacking, count, source, block in sorted(chosen, key=lambda row: row[0]):
        cost += block[1] - block[0]
        if may_check(cost, total):
            plan.extra_bytes += lacking
            plan.blocks.setdefault(source, []).append(block)
        else:
            plan.unchecked_bytes += count
    return plan


def _within(blocks: Sequence[Range], ranges: Sequence[Range]) -> list[bool]:
    """Whether each block lies within one of some ranges, which are in order and apart."""
    if not blocks or not ranges:
        return [False] * len(blocks)
    found, bounds = np.array(blocks, np.int64), np.array(ranges, np.int64)
    at = np.searchsorted(bounds[:, 0], found[:, 0], side="right") - 1
    return list((at >= 0) & (found[:, 1] <= bounds[np.maximum(at, 0), 1]))


def compare_plan(plan: ComparePlan, threads: int, on_bytes: Callable[[int], None]) -> None:
    """Read and compare all blocks, without a copy: what was hashed through a view is copied from it, too.

    Raises DamagedCheckpointError.
    """
    lots = []
    for source, blocks in plan.blocks.items():
        source.prefer_view()
        blocks = sorted(blocks)
        step = max(1, min(-(-len(blocks) // threads), _LOT_BLOCKS))
        lots += [(source, blocks[i : i + step]) for i in range(0, len(blocks), step)]

    def compare(lot: tuple[FileSource, Sequence[Range]]) -> None:
        lot[0].compare_blocks(lot[1])
        on_bytes(sum(stop - start for start, stop in lot[1]))

    if threads == 1 or len(lots) <= 1:
        for lot in lots:
            compare(lot)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-check") as pool:
        for _ in pool.map(compare, lots):
            pass
