"""Layouts pulled back through views: what each rank wants of a view's target, as regions of the view's sources.

A transfer moves elements of sources. Where the wanted tensor is a view of others, each rank wants boxes of every
source, and each such box has its slot in the rank's local tensor of the target:

    fused  q q k v | q q k v     rank 1 wants:  the last two rows of q, the last one of k, the last one of v
           rank 0    rank 1      and has slots for them, one under the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from planners.geometry.box import Box, Dims
from planners.geometry.layout_forms import BoxesForm, Form, ProductForm
from planners.geometry.placement import Placement, Replicate
from planners.views.patches import Patch, ViewGeometry
from planners.views.view_overlap import ViewOverlap

__all__ = ["FilledSlot", "Pulled", "Slot", "filled_slots", "pull_back"]


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


class FilledSlot(NamedTuple):
    """A constant in a rank's local tensor of the target."""

    part: int
    box: Box
    value: float


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
    for alike in overlap.distinct_ranks():
        found = sorted(_wanted_boxes(overlap, alike.first), key=lambda row: row[:2])
        for tensor, layer, box, slot in _layered(found):
            boxes, slots = layers.setdefault((tensor, layer), ({}, {}))
            for rank in alike.alike.tolist():
                boxes.setdefault(rank, []).append(box)
                slots.setdefault(rank, []).append(slot)
    return tuple(
        Pulled(tensor, BoxesForm.make(boxes), slots={rank: tuple(its) for rank, its in slots.items()})
        for (tensor, _), (boxes, slots) in sorted(layers.items(), key=lambda row: row[0])
    )


def filled_slots(view: ViewGeometry, wanted: Form, rank: int) -> tuple[FilledSlot, ...]:
    """The constants of a rank."""
    filled = ViewOverlap(view, (), wanted).fills(rank)
    return tuple(FilledSlot(part, target, value) for target, value, part in filled)


def _wanted_boxes(overlap: ViewOverlap, rank: int) -> list[tuple[int, Box, Slot]]:
    """(source, box of it, slot) of all that a rank wants."""
    return [
        (patch.tensor, patch.to_source(common), Slot(index, common.relative_to(box).shift(local.offsets), _back(patch)))
        for index, part in enumerate(overlap.wanted.parts(overlap.view.shape, rank))
        for box, local in part.boxes()
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
