"""Do boxes tile a region exactly once? Exact, for any boxes, with a concrete element where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planners.geometry.box import Box
from planners.geometry.ownership import Ints, distinct

__all__ = ["Fault", "tiling_fault"]

_MAX_CELLS = 1 << 22
"""Largest grid that is counted at once; above it the region is halved."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An element that is not covered exactly once."""

    element: tuple[int, ...]
    """Its index, in the coordinates of the boxes."""
    count: int
    """How many boxes hold it."""
    wanted: int = 1
    """How many should: 0 for an element outside the region."""

    def __str__(self) -> str:
        times = {0: "never", 1: "once"}.get(self.count, f"{self.count} times")
        return f"element {self.element} is covered {times}" + ("" if self.wanted else ", but lies outside")


def tiling_fault(region: Sequence[Box], boxes: Sequence[Box]) -> Fault | None:
    """None if every element of `region` (disjoint boxes) is in exactly one of `boxes` and no other element is.

    Volumes are not compared: a gap and an overlap of equal size are found. The cuts of all boxes make
    a grid whose cells are counted; grids that are too large are halved along their longest axis.
    """
    wanted = [box for box in region if not box.is_empty]
    given = [box for box in boxes if not box.is_empty]
    if len(wanted) == 1 and len(given) == 1 and wanted == given:
        return None
    every = wanted + given
    if not every:
        return None
    ndim = every[0].ndim
    if ndim == 0:
        return None if len(wanted) == len(given) else Fault((), len(given), len(wanted))
    lows = np.array([box.offsets for box in every], dtype=np.int64)
    highs = np.array([box.stops for box in every], dtype=np.int64)
    signs = np.concatenate((np.full(len(wanted), -1), np.ones(len(given), dtype=np.int64)))
    return _fault(lows, highs, np.asarray(signs, dtype=np.int64))


def _fault(lows: Ints, highs: Ints, signs: Ints) -> Fault | None:
    ndim = lows.shape[1]
    cuts = [distinct(np.concatenate((lows[:, d], highs[:, d]))) for d in range(ndim)]
    cells = 1
    for cut in cuts:
        cells *= len(cut)
    if cells > _MAX_CELLS:
        d = max(range(ndim), key=lambda d: len(cuts[d]))
        middle = cuts[d][len(cuts[d]) // 2]
        for low, high in ((cuts[d][0], middle), (middle, cuts[d][-1])):
            keep = (lows[:, d] < high) & (highs[:, d] > low)
            if keep.any():
                some_lows, some_highs = lows[keep].copy(), highs[keep].copy()
                some_lows[:, d] = np.maximum(some_lows[:, d], low)
                some_highs[:, d] = np.minimum(some_highs[:, d], high)
                fault = _fault(some_lows, some_highs, signs[keep])
                if fault is not None:
                    return fault
        return None
    # +1 or -1 at the corners of every box; the running sum along every dim then counts the boxes over each cell
    balance = _counts(lows, highs, signs, cuts)
    wrong = np.argwhere(balance != 0)
    if not len(wrong):
        return None
    cell = tuple(wrong[0])
    element = tuple(int(cut[i]) for cut, i in zip(cuts, cell))
    inside = np.all((lows <= element) & (highs > element), axis=1)
    return Fault(element, int(np.sum(inside & (signs > 0))), int(np.sum(inside & (signs < 0))))


def _counts(lows: Ints, highs: Ints, signs: Ints, cuts: list[Ints]) -> Ints:
    ndim = lows.shape[1]
    grid = np.zeros([len(cut) for cut in cuts], dtype=np.int64)
    begin = np.stack([np.searchsorted(cut, lows[:, d]) for d, cut in enumerate(cuts)], axis=1)
    end = np.stack([np.searchsorted(cut, highs[:, d]) for d, cut in enumerate(cuts)], axis=1)
    for corner in range(1 << ndim):
        at = tuple(end[:, d] if corner >> d & 1 else begin[:, d] for d in range(ndim))
        np.add.at(grid, at, signs * (-1) ** corner.bit_count())
    for d in range(ndim):
        grid = np.cumsum(grid, axis=d)
    return grid
