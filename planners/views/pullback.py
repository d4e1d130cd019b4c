"""Layouts pulled back through views: what each rank wants of a view's target, as regions of the view's sources.

A load or transfer moves elements of sources. Where the wanted tensor is a view of others, each rank wants boxes of
every source, and each such box has its slot in the rank's local tensor of the target:

    fused  q q k v | q q k v     rank 1 wants:  the last two rows of q, the last one of k, the last one of v
           rank 0    rank 1      and has slots for them, one under the other

A load lists its pieces rank by rank (`ViewOverlap`), as the plain overlap of such boxes with the chunks of the sources;
a transfer needs the regions of all ranks as a form (`pull_back`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from planners.geometry.box import Box, Dims
from planners.geometry.layout_forms import BoxesForm, Form, ProductForm
from planners.geometry.overlap import FilledSlot, Origin, Overlap, Piece, Sweep, chunks_of
from planners.geometry.placement import Placement, Replicate
from planners.views.patches import Patch, ViewGeometry

__all__ = ["Pulled", "Slot", "ViewOverlap", "filled_slots", "pull_back"]


@dataclass(frozen=True)
class ViewOverlap(Overlap):
    """The pieces of every wanted rank, for a view and the layouts of its sources and its target.

    wanted box  --patches of the view-->  boxes of sources  --chunks of each source-->  pieces
    """

    view: ViewGeometry
    saved: tuple[Form, ...]
    """One per source."""
    wanted_form: Form

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.view.shape

    @cached_property
    def _patches(self) -> Sweep:
        return Sweep((i, patch.target) for i, patch in enumerate(self.view.patches))

    @cached_property
    def _fills(self) -> Sweep:
        return Sweep((i, fill.target) for i, fill in enumerate(self.view.fills))

    def patches_meeting(self, box: Box) -> Iterator[tuple[Patch, Box]]:
        """(patch, what its target has in common with `box`), in global coordinates of the target."""
        yield from ((self.view.patches[i], common) for i, _, common in self._patches.meeting(box))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return tuple(
            piece
            for index, box, local in self.local_boxes(rank)
            for patch, common in self.patches_meeting(box)
            for piece in self._patch_pieces(index, box, local, patch, common)
        )

    def _patch_pieces(self, index: int, box: Box, local: Box, patch: Patch, common: Box) -> Iterator[Piece]:
        number = patch.tensor
        chunks = chunks_of(self.view.source_shapes[number], self.saved[number])
        for owner, chunk, held in chunks.covering(patch.to_source(common)):
            target = patch.to_target(held).relative_to(box).shift(local.offsets)
            yield Piece(owner, chunk, held.relative_to(chunk), target, index, number, patch.dims)

    def fills(self, rank: int) -> tuple[FilledSlot, ...]:
        return tuple(
            FilledSlot(index, common.relative_to(box).shift(local.offsets), self.view.fills[i].value)
            for index, box, local in (self.local_boxes(rank) if self.view.fills else ())
            for i, _, common in self._fills.meeting(box)
        )

    def origins(self, box: Box) -> Iterator[Origin]:
        for patch, common in self.patches_meeting(box):
            yield Origin(common, patch.tensor, patch.to_source(common), patch.dims)


class Slot(NamedTuple):
    """Where a box of a source goes in a rank's local tensors of the target."""

    part: int
    """Which of the local tensors."""
    box: Box
    """The elements, in its coordinates."""
    dims: Dims
    """Per dim of the source, the dim of the box that it follows, or None for a dim of size 1 that the target lacks."""


@dataclass(frozen=True)
class Pulled:
    """What the ranks want of one source."""

    tensor: int
    """Number of the source."""
    form: Form
    """The wanted regions, in global coordinates of the source."""
    turn: Dims | None = None
    """If the target is the whole source with its dims in another order: per dim of the source, the target's dim. The
    local tensors of `form` are then the target's, turned."""
    slots: Mapping[int, tuple[Slot, ...]] | None = None
    """Otherwise: rank -> the slot of each of its boxes in `form`."""


@lru_cache(maxsize=1024)
def pull_back(view: ViewGeometry, wanted: Form) -> tuple[Pulled, ...]:
    """What the ranks that want the target of `view` placed as `wanted` need of its sources.

    Each wanted element that is no constant lies in exactly one region. A source of which a rank wants an element twice
    (heads of keys that are repeated) comes up once for each time.
    """
    turned = _turned(view, wanted)
    if turned is not None:
        return (turned,)
    overlap = ViewOverlap(view, (), wanted)
    layers: dict[tuple[int, int], tuple[dict[int, list[Box]], dict[int, list[Slot]]]] = {}
    for alike in overlap.replicas():
        found = sorted(_wanted_boxes(overlap, int(alike[0])), key=lambda row: row[:2])
        for tensor, layer, box, slot in _layered(found):
            boxes, slots = layers.setdefault((tensor, layer), ({}, {}))
            for rank in alike.tolist():
                boxes.setdefault(rank, []).append(box)
                slots.setdefault(rank, []).append(slot)
    return tuple(
        Pulled(tensor, BoxesForm.make(boxes), slots={rank: tuple(its) for rank, its in slots.items()})
        for (tensor, _), (boxes, slots) in sorted(layers.items(), key=lambda row: row[0])
    )


def filled_slots(view: ViewGeometry, wanted: Form, rank: int) -> tuple[FilledSlot, ...]:
    """The constants of a rank."""
    return ViewOverlap(view, (), wanted).fills(rank)


def _wanted_boxes(overlap: ViewOverlap, rank: int) -> list[tuple[int, Box, Slot]]:
    """(source, box of it, slot) of all that a rank wants."""
    return [
        (patch.tensor, patch.to_source(common), Slot(index, common.relative_to(box).shift(local.offsets), _back(patch)))
        for index, box, local in overlap.local_boxes(rank)
        for patch, common in overlap.patches_meeting(box)
    ]


def _back(patch: Patch) -> Dims:
    return tuple(patch.dims.index(d) if d in patch.dims else None for d in range(patch.source.ndim))


def _layered(found: list[tuple[int, Box, Slot]]) -> list[tuple[int, int, Box, Slot]]:
    """Each box with the number of a layer; in a layer no two boxes of a source share an element. Boxes come sorted."""
    out: list[tuple[int, int, Box, Slot]] = []
    recent: dict[tuple[int, int], list[Box]] = {}
    for tensor, box, slot in found:
        layer = 0
        while True:
            # what ends before this box begins is never met again, as offsets ascend
            near = [b for b in recent.get((tensor, layer), []) if not b.ndim or b.stops[0] > box.offsets[0]]
            if all(b & box is None for b in near):
                break
            layer += 1
        recent[tensor, layer] = [*near, box]
        out.append((tensor, layer, box, slot))
    return out


def _turned(view: ViewGeometry, wanted: Form) -> Pulled | None:
    """The whole of one source with its dims in another order stays a product."""
    if len(view.patches) != 1 or view.fills or not isinstance(wanted, ProductForm):
        return None
    patch = view.patches[0]
    whole = patch.source == Box.full(view.source_shapes[patch.tensor]) and patch.target == Box.full(view.shape)
    if not whole or None in patch.dims or len(patch.dims) != patch.source.ndim:
        return None
    placed = tuple(_placed(placement, patch.dims) for placement in wanted.placements)
    return Pulled(patch.tensor, ProductForm.make(wanted.mesh, placed), turn=_back(patch))


def _placed(placement: Placement, dims: Dims) -> Placement:
    if isinstance(placement, Replicate):
        return placement
    dim = dims[placement.dim]
    assert dim is not None
    return replace(placement, dim=dim)
