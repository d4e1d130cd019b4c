"""Plans through views in product form: one table per dim of a patch says what every wanted rank takes of it.

patch       source [5:9) -> target [0:4)
saved       source cut at 6          =  target cut at 1
wanted      target cut at 2
rows        target [0:1) [1:2) | [2:4)      for wanted owners 0 0 | 1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planners.geometry.box import Box
from planners.geometry.layout_forms import ProductGeometry
from planners.geometry.overlap import Piece
from planners.geometry.ownership import Ints, Ownership, distinct
from planners.views.patches import Patch

__all__ = ["PatchDim", "PatchOverlap"]


class PatchDim:
    """One dim of a patch: rows sorted by wanted owner and its local order, in coordinates of the target."""

    def __init__(self, wanted: Ownership, start: int, size: int, saved: Ownership | None, source_start: int) -> None:
        """`saved` is the ownership of the source dim that the target dim follows, None for a new dim."""
        self.wanted, self.saved, self.start, self.stop = wanted, saved, start, start + size
        self.shift = source_start - start
        edges = [np.array([start, start + size]), wanted.starts, wanted.stops]
        if saved is not None:
            edges += [saved.starts - self.shift, saved.stops - self.shift]
        cuts = distinct(np.concatenate(edges))
        cuts = cuts[(cuts >= start) & (cuts <= start + size)]
        starts, stops = cuts[:-1], cuts[1:]
        row, held = _row_of(wanted, starts, stops)
        order = np.argsort(row[held], kind="stable")  # rows of an owner are in local order, and starts ascend in a row
        self.starts, self.stops, self.row = starts[held][order], stops[held][order], row[held][order]
        self.local_starts = wanted.local_starts[self.row] + (self.starts - wanted.starts[self.row])
        self.saved_row = _row_of(saved, self.starts + self.shift, self.stops + self.shift)[0] if saved else self.row
        owners = wanted.owner_of[self.row]
        self.indptr = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=wanted.owners))))

    def fault(self) -> tuple[int, str] | None:
        """(target index, what is wrong) if rows do not take every index of the patch once, from where it lies; or None.

        Exact if the wanted side owns each index of the dim once, which is for its layout to prove.
        """
        order = np.argsort(self.starts, kind="stable")
        begins, ends = np.append(self.starts[order], self.stop), np.insert(self.stops[order], 0, self.start)
        for i in np.flatnonzero(begins != ends)[:1].tolist():
            return int(min(begins[i], ends[i])), "is not taken exactly once"
        wanted, row = self.wanted, self.row
        wrong = (self.starts < wanted.starts[row]) | (self.stops > wanted.stops[row])
        wrong |= self.local_starts - wanted.local_starts[row] != self.starts - wanted.starts[row]
        if self.saved is not None:
            saved = self.saved_row
            wrong |= (self.starts + self.shift < self.saved.starts[saved]) | (saved < 0)
            wrong |= self.stops + self.shift > self.saved.stops[saved]
        for i in np.flatnonzero(wrong)[:1].tolist():
            return int(self.starts[i]), "is taken from where it does not lie"
        return None

    def rows(self, owner: int) -> list[tuple[int, int, int, int]]:
        """(start, size, local start, saved row) of what a wanted owner takes."""
        at = slice(self.indptr[owner], self.indptr[owner + 1])
        columns = (self.starts[at], self.stops[at] - self.starts[at], self.local_starts[at], self.saved_row[at])
        return list(zip(*(column.tolist() for column in columns)))


def _row_of(own: Ownership, starts: Ints, stops: Ints) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """The interval that holds each range, and whether there is one; -1 where there is none."""
    if not len(own.starts):
        return np.full(len(starts), -1, dtype=np.int64), np.zeros(len(starts), dtype=bool)
    order = np.argsort(own.starts, kind="stable")
    row = order[np.maximum(np.searchsorted(own.starts[order], starts, side="right") - 1, 0)]
    held = (own.starts[row] <= starts) & (own.stops[row] >= stops)
    return np.where(held, row, -1), np.asarray(held)


@dataclass(frozen=True)
class PatchOverlap:
    """What every rank of a product layout takes of one patch out of a source that is a product too."""

    patch: Patch
    saved: ProductGeometry
    wanted: ProductGeometry

    @cached_property
    def dims(self) -> tuple[PatchDim, ...]:
        """One table per dim of the target."""
        target, source = self.patch.target, self.patch.source
        return tuple(
            PatchDim(
                own,
                target.offsets[i],
                target.sizes[i],
                None if d is None else self.saved.dims[d],
                target.offsets[i] if d is None else source.offsets[d],
            )
            for i, (own, d) in enumerate(zip(self.wanted.dims, self.patch.dims))
        )

    @cached_property
    def _left_out(self) -> dict[int, int]:
        """The saved row of each source dim that the target does not follow."""
        found = {}
        for d in set(range(self.patch.source.ndim)) - set(self.patch.dims):
            at = np.array([self.patch.source.offsets[d]], dtype=np.int64)
            found[d] = int(_row_of(self.saved.dims[d], at, at + 1)[0][0])
        return found

    def fault(self) -> tuple[int, int, str] | None:
        """(target dim, target index, what is wrong), or None."""
        for i, table in enumerate(self.dims):
            wrong = table.fault()
            if wrong is not None:
                return i, *wrong
        if -1 in self._left_out.values():
            return 0, self.patch.target.offsets[0] if self.patch.target.ndim else 0, "is saved nowhere"
        return None

    def pieces(self, owners: Sequence[int], lowest: dict[tuple[int, ...], int]) -> Iterator[Piece]:
        """The pieces of the wanted part of these owners. `lowest` remembers the lowest rank of owners."""
        patch, saved = self.patch, self.saved.dims
        for combo in itertools.product(*(table.rows(owner) for table, owner in zip(self.dims, owners))):
            rows = dict(self._left_out)
            rows |= {d: row[3] for d, row in zip(patch.dims, combo) if d is not None}
            meant = Box.of(tuple(row[0] for row in combo), tuple(row[1] for row in combo))
            source = patch.to_source(meant)
            starts = tuple(int(own.starts[rows[d]]) for d, own in enumerate(saved))
            stops = tuple(int(own.stops[rows[d]]) for d, own in enumerate(saved))
            holders = tuple(int(own.owner_of[rows[d]]) for d, own in enumerate(saved))
            rank = lowest.get(holders)
            if rank is None:
                rank = lowest[holders] = self.saved.lowest_rank(holders)
            yield Piece(
                rank,
                Box.of(starts, tuple(stop - start for start, stop in zip(starts, stops))),
                Box.of(tuple(o - start for o, start in zip(source.offsets, starts)), source.sizes),
                Box.of(tuple(row[2] for row in combo), meant.sizes),
                0,
            )
