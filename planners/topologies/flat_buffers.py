"""Flat buffers: tensors laid one behind another, cut into ranges without regard to where one tensor ends.

FSDP1's flat parameters and ZeRO's partitions are such. Each tensor then has on each rank a range of its own
flattening, and a `FlatForm` for its layout.

    a a a a b b b . c c c c c . . .      align_elements=4, 16 elements with padding
    |- rank 0 -----|- rank 1 ------|
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planners.errors import PlanError
from planners.geometry.layout import TensorLayout, TensorSpec

__all__ = ["even_ranges", "flat_layouts", "flat_offsets"]


def flat_offsets(specs: Iterable[TensorSpec], *, align_elements: int = 1) -> tuple[dict[str, int], int]:
    """Where each tensor begins in the buffer, and how many elements there are up to the end of the last one.

    Each tensor begins at a multiple of `align_elements`. Raises PlanError for two tensors of one name.
    """
    _at_least_one("align_elements", align_elements)
    offsets: dict[str, int] = {}
    at = end = 0
    for spec in specs:
        if spec.fqn in offsets:
            raise PlanError("two tensors of a flat buffer have one name", fqn=spec.fqn)
        at = -(-end // align_elements) * align_elements
        offsets[spec.fqn] = at
        end = at + spec.numel
    return offsets, end


def even_ranges(numel: int, ranks: Sequence[int], *, multiple: int = 1) -> dict[int, tuple[int, int]]:
    """Equal pieces of a buffer of `numel` elements, one per rank, in order.

    The buffer is padded so that every piece has the same size, a multiple of `multiple`; padding is behind the end.
    """
    _at_least_one("multiple", multiple)
    if not ranks:
        raise PlanError("a flat buffer needs at least one rank")
    size = -(-numel // (len(ranks) * multiple)) * multiple
    return {rank: (i * size, (i + 1) * size) for i, rank in enumerate(ranks)}


def flat_layouts(
    specs: Iterable[TensorSpec],
    ranges: Mapping[int, tuple[int, int]],
    *,
    align_elements: int = 1,
    offsets: Mapping[str, int] | None = None,
    world_size: int | None = None,
) -> dict[str, TensorLayout]:
    """The layout of each tensor of a flat buffer of which every rank holds a range.

    `offsets` gives the place of each tensor where it is not what `flat_offsets` says. Ranges may reach into padding,
    and ranks with equal ranges are replicas. Raises PlanError if the ranges leave out an element of a tensor.
    """
    tensors = list(specs)
    places = flat_offsets(tensors, align_elements=align_elements)[0] if offsets is None else offsets
    for rank, (start, stop) in ranges.items():
        if not 0 <= start <= stop:
            raise PlanError(f"the range {start}:{stop} of a flat buffer must ascend from 0", rank=rank)
    world = max(ranges, default=0) + 1 if world_size is None else world_size
    out: dict[str, TensorLayout] = {}
    for spec in tensors:
        if spec.fqn not in places:
            raise PlanError("no place in the flat buffer is given", fqn=spec.fqn)
        begin, end = places[spec.fqn], places[spec.fqn] + spec.numel
        held = {
            rank: (max(start, begin) - begin, min(stop, end) - begin)
            for rank, (start, stop) in ranges.items()
            if max(start, begin) < min(stop, end)
        }
        reach = 0
        for start, stop in sorted(held.values()):
            if start > reach:
                break
            reach = max(reach, stop)
        if reach < spec.numel:
            raise PlanError(f"the ranges of the flat buffer leave out element {reach} of its flattening", fqn=spec.fqn)
        out[spec.fqn] = TensorLayout.from_flat_ranges(spec, held, world)
    return out


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise PlanError(f"{name} must be >= 1, got {value}")
