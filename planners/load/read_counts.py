"""How many items and read requests a load plan has for every rank, counted without listing them.

A chunk lies row-major in one file. An item's elements are runs of bytes in it, and gaps of up to a limit between
runs are read along with them. Per dim, segments of equal extent in chunks of equal extent need the same, so a
product plan is counted by kinds of segments, of which there are a handful:

    rank's items = product over dims of its segments;    requests = sum over kinds of (items of the kind x runs of one)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planners.geometry.byteruns import Window
from planners.geometry.overlap import ProductOverlap
from planners.geometry.ownership import Ints, Segments
from planners.load.plan import LoadPlan, ReadItem

__all__ = ["ReadCounts", "count_reads", "group_loads"]


@dataclass(frozen=True, eq=False)
class ReadCounts:
    """Counts of every rank, each an array over ranks."""

    items: Ints
    requests: Ints
    """Reads after coalescing."""
    read_bytes: Ints
    """Bytes of these reads: those needed and the gaps between them."""


def group_loads(plan: LoadPlan) -> dict[tuple[object, ...], list[str]]:
    """Wanted names by `LoadPlan.geometry_key`."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for fqn in plan.wanted:
        groups.setdefault(plan.geometry_key(fqn), []).append(fqn)
    return groups


def count_reads(plan: LoadPlan, max_gap_bytes: int = 0) -> ReadCounts:
    """Items, requests and bytes of every rank, if gaps of up to `max_gap_bytes` within an item are read as well."""
    total = np.zeros((3, plan.world_size), dtype=np.int64)
    for names in group_loads(plan).values():
        overlap = plan.overlap(names[0])
        if overlap.product is not None:
            counted = _count_product(overlap.product, plan.saved_itemsize(names[0]), max_gap_bytes)
            total[:, overlap.product.wanted.mesh.ranks] += counted * len(names)
            continue
        for alike in overlap.replicas():
            counts = _count_items(plan, plan.tensor_items(names[0], int(alike[0])), max_gap_bytes)
            total[:, alike] += np.array(counts, dtype=np.int64)[:, None] * len(names)
    for rank, items in plan.explicit.items():
        total[:, rank] = _count_items(plan, items, max_gap_bytes)
    return ReadCounts(*total)


def _count_items(plan: LoadPlan, items: Sequence[ReadItem], max_gap_bytes: int) -> tuple[int, int, int]:
    requests = read_bytes = 0
    for item in items:
        itemsize = plan.saved[item.saved_fqn].spec.itemsize
        runs = Window.row_major(0, item.chunk.sizes, itemsize).crop(item.source).runs()
        for _, length, _ in runs.coalesced(max_gap_bytes):
            requests, read_bytes = requests + 1, read_bytes + length
    return len(items), requests, read_bytes


def _count_product(overlap: ProductOverlap, itemsize: int, max_gap_bytes: int) -> Ints:
    """(items, requests, bytes) at each position of the wanted mesh, for one tensor."""
    kinds = [_Kinds(segments) for segments in overlap.dims]
    out = np.zeros((3, overlap.wanted.mesh.size), dtype=np.int64)
    for combo in itertools.product(*(range(len(kind.sizes)) for kind in kinds)):
        items = np.ones(overlap.wanted.mesh.size, dtype=np.int64)
        for kind, k, owner in zip(kinds, combo, overlap.wanted.rank_owners):
            items *= kind.counts[k, owner]
        pairs = [kind.sizes[k] for kind, k in zip(kinds, combo)]
        requests, read_bytes = _coalesced([p for p, _ in pairs], [c for _, c in pairs], itemsize, max_gap_bytes)
        out += items * np.array([[1], [requests], [read_bytes]])
    return out


class _Kinds:
    """Segments of a dim by their extent and that of their chunk: how many of each kind every wanted owner has."""

    def __init__(self, segments: Segments) -> None:
        chunk = (segments.saved.stops - segments.saved.starts)[segments.saved_row]
        pairs = np.stack((segments.stops - segments.starts, chunk), axis=1)
        sizes, kind = np.unique(pairs, axis=0, return_inverse=True)
        self.sizes: list[tuple[int, int]] = [(int(p), int(c)) for p, c in sizes]
        self.counts = np.zeros((len(sizes), segments.wanted.owners), dtype=np.int64)
        np.add.at(self.counts, (kind.reshape(-1), segments.wanted_owner), 1)


def _coalesced(piece: Sequence[int], chunk: Sequence[int], itemsize: int, max_gap_bytes: int) -> tuple[int, int]:
    """Reads, and bytes of them all, for a box of sizes `piece` in a row-major chunk of sizes `chunk`.

    From the last dim outwards, neighbours that are close enough become one span; the first dim whose gaps are too wide
    ends that, since gaps only grow.
    """
    span, stride, reads = itemsize, itemsize, 1
    merging = True
    for p, c in _inside_out(piece, chunk):
        merging = merging and (p == 1 or stride - span <= max_gap_bytes)
        if merging:
            span += (p - 1) * stride
        else:
            reads *= p
        stride *= c
    return reads, reads * span


def _inside_out(piece: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(reversed(piece), reversed(chunk))
