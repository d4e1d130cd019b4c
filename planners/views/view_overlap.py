"""The overlap of saved and wanted layouts where the wanted tensor is a view of saved ones.

wanted box  --patches of the view-->  boxes of sources  --chunks of each source-->  pieces
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planners.geometry.box import Box, Dims
from planners.geometry.layout_forms import Form, ProductForm, ProductGeometry
from planners.geometry.overlap import Piece, Sweep, cover
from planners.geometry.ownership import Ints, Ownership
from planners.views.patches import Fill, Patch, ViewGeometry
from planners.views.view_tables import PatchOverlap

__all__ = ["FilledBox", "ProductChunks", "ViewOverlap", "ViewPiece", "view_overlap_of"]


class ViewPiece(NamedTuple):
    """A piece of a source, and how its dims lie in the target."""

    piece: Piece
    tensor: int
    """Number of the source."""
    dims: Dims


class FilledBox(NamedTuple):
    """A constant in a local tensor."""

    target: Box
    """In the coordinates of the wanted local tensor."""
    value: float
    part: int


class ProductChunks:
    """The chunks of a product layout, found by where they lie: same answers as a `Sweep` of them all."""

    def __init__(self, geometry: ProductGeometry) -> None:
        self._geometry = geometry
        self._rows = [_Sorted(own) for own in geometry.dims]
        self._lowest: dict[tuple[int, ...], int] = {}

    def meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """(lowest rank that holds it, chunk, what it has in common with `box`) of every chunk that meets `box`."""
        found = [rows.meeting(start, start + size) for rows, start, size in zip(self._rows, box.offsets, box.sizes)]
        for combo in itertools.product(*found):
            owners = tuple(owner for owner, _, _ in combo)
            rank = self._lowest.get(owners)
            if rank is None:
                rank = self._lowest[owners] = self._geometry.lowest_rank(owners)
            chunk = Box.of(tuple(start for _, start, _ in combo), tuple(stop - start for _, start, stop in combo))
            common = chunk & box
            if common is not None:
                yield rank, chunk, common


class _Sorted:
    """The intervals of a dim by where they begin."""

    def __init__(self, own: Ownership) -> None:
        order = np.argsort(own.starts, kind="stable")
        self.starts, self.stops, self.owners = own.starts[order], own.stops[order], own.owner_of[order]

    def meeting(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(owner, start, stop) of the intervals that share an element with `[start, stop)`."""
        if start >= stop:
            return []
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        at = slice(first, last)
        return list(zip(self.owners[at].tolist(), self.starts[at].tolist(), self.stops[at].tolist()))


@dataclass(frozen=True)
class ViewOverlap:
    """Pieces of every wanted rank, for a view and the layouts of its sources and its target."""

    view: ViewGeometry
    saved: tuple[Form, ...]
    """One per source."""
    wanted: Form

    @cached_property
    def _patches(self) -> Sweep:
        return Sweep((i, patch.target) for i, patch in enumerate(self.view.patches))

    @cached_property
    def _fills(self) -> Sweep:
        return Sweep((i, fill.target) for i, fill in enumerate(self.view.fills))

    @cached_property
    def _chunks(self) -> tuple[ProductChunks | Sweep, ...]:
        return tuple(_chunks_of(shape, form) for shape, form in zip(self.view.source_shapes, self.saved))

    @cached_property
    def _lowest(self) -> list[dict[tuple[int, ...], int]]:
        """Per source: the lowest rank of owners that were asked for."""
        return [{} for _ in self.saved]

    def patches_meeting(self, box: Box) -> Iterator[tuple[Patch, Box]]:
        """(patch, what its target has in common with `box`), in global coordinates of the target."""
        yield from ((self.view.patches[i], common) for i, _, common in self._patches.meeting(box))

    def fills_meeting(self, box: Box) -> Iterator[tuple[Fill, Box]]:
        """The same for the constants."""
        yield from ((self.view.fills[i], common) for i, _, common in self._fills.meeting(box))

    @cached_property
    def tables(self) -> tuple[PatchOverlap, ...] | None:
        """The product form, one for each patch; None if a side is no product."""
        if not isinstance(self.wanted, ProductForm):
            return None
        wanted = self.wanted.geometry(self.view.shape)
        saved = []
        for shape, form in zip(self.view.source_shapes, self.saved):
            if not isinstance(form, ProductForm):
                return None
            saved.append(form.geometry(shape))
        return tuple(PatchOverlap(patch, saved[patch.tensor], wanted) for patch in self.view.patches)

    def pieces(self, rank: int) -> tuple[ViewPiece, ...]:
        """All pieces of `rank`. Raises CoverageError at a hole, in global coordinates of the source."""
        if self.tables is not None and isinstance(self.wanted, ProductForm):
            if rank not in self.wanted.mesh:
                return ()
            owners = self.wanted.geometry(self.view.shape).owners_of(rank)
            met = {i for _, box, _ in self._local_boxes(rank) for i, _, _ in self._patches.meeting(box)}
            return tuple(
                ViewPiece(piece, table.patch.tensor, table.patch.dims)
                for table in (self.tables[i] for i in sorted(met))
                for piece in table.pieces(owners, self._lowest[table.patch.tensor])
            )
        return tuple(
            found
            for index, box, local in self._local_boxes(rank)
            for patch, common in self.patches_meeting(box)
            for found in self._patch_pieces(index, box, local, patch, common)
        )

    def fills(self, rank: int) -> tuple[FilledBox, ...]:
        """The constants of `rank`."""
        if not self.view.fills:
            return ()
        return tuple(
            FilledBox(common.relative_to(box).shift(local.offsets), fill.value, index)
            for index, box, local in self._local_boxes(rank)
            for fill, common in self.fills_meeting(box)
        )

    def filled(self) -> Ints:
        """How many elements of each wanted rank are constants."""
        out = np.zeros(self.wanted.world_size, dtype=np.int64)
        for rank in self.distinct_ranks() if self.view.fills else ():
            out[rank.alike] = sum(filled.target.numel for filled in self.fills(rank.first))
        return out

    def distinct_ranks(self) -> Iterator[Alike]:
        """Wanted ranks that hold the same elements, once for all of them."""
        if isinstance(self.wanted, ProductForm):
            geometry = self.wanted.geometry(self.view.shape)
            for owners in geometry.distinct():
                ranks = geometry.replicas(owners)
                yield Alike(int(ranks.min()), ranks)
        else:
            for rank in self.wanted.ranks():
                yield Alike(rank, np.array([rank], dtype=np.int64))

    def _local_boxes(self, rank: int) -> Iterator[tuple[int, Box, Box]]:
        if rank < self.wanted.world_size:
            for index, part in enumerate(self.wanted.parts(self.view.shape, rank)):
                yield from ((index, box, local) for box, local in part.boxes())

    def _patch_pieces(self, index: int, box: Box, local: Box, patch: Patch, common: Box) -> Iterator[ViewPiece]:
        due = patch.to_source(common)
        chunks = self._chunks[patch.tensor]
        found = chunks.meeting(due) if isinstance(chunks, ProductChunks) else cover(due, list(chunks.meeting(due)))
        for owner, chunk, held in found:
            target = patch.to_target(held).relative_to(box).shift(local.offsets)
            yield ViewPiece(Piece(owner, chunk, held.relative_to(chunk), target, index), patch.tensor, patch.dims)


class Alike(NamedTuple):
    """Ranks that hold the same."""

    first: int
    alike: Ints


@lru_cache(maxsize=1024)
def _chunks_of(shape: tuple[int, ...], form: Form) -> ProductChunks | Sweep:
    if isinstance(form, ProductForm):
        return ProductChunks(form.geometry(shape))
    return Sweep(form.chunks(shape))


@lru_cache(maxsize=1024)
def view_overlap_of(view: ViewGeometry, saved: tuple[Form, ...], wanted: Form) -> ViewOverlap:
    """The overlap through a view; computed once for each."""
    return ViewOverlap(view, saved, wanted)
