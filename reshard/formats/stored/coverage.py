"""Do the chunks of a stored tensor hold each element exactly once? With the place where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from planners.geometry.box import Box
from planners.geometry.cover import tiling_fault
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.contents import StoredChunk, StoredTensor

__all__ = ["check_cover"]


def check_cover(tensor: StoredTensor, region: Box | None = None) -> None:
    """Raises DamagedCheckpointError unless the chunks hold every element of `region` (default: all) exactly once."""
    wanted = Box.full(tensor.spec.shape) if region is None else region
    if region is None:  # a stored tensor has no chunk outside itself
        inside = [(chunk, chunk.box) for chunk in tensor.chunks if not chunk.box.is_empty]
    else:
        inside = list(tensor.meeting(wanted))
    boxes = [box for _, box in inside]
    fault = tiling_fault([wanted], boxes)
    if fault is None:
        return
    element = Box.of(fault.element, (1,) * wanted.ndim)
    if fault.count > 1:
        (first, a), (second, b) = [row for row in inside if row[1].contains(element)][:2]
        raise DamagedCheckpointError(
            f"tensor {tensor.fqn!r}: elements {a & b} are stored twice, in {_name(first)} and in {_name(second)}; the "
            "checkpoint does not say which is right"
        )
    raise DamagedCheckpointError(
        f"tensor {tensor.fqn!r} of shape {list(tensor.spec.shape)}: elements {_hole(wanted, boxes, element)} are in no "
        f"file of the checkpoint ({len(tensor.chunks)} chunks are); a file or the part of a rank is missing"
    )


def _hole(region: Box, boxes: Sequence[Box], element: Box) -> Box:
    """A part of `region` around `element` that no box covers."""
    left = region
    for box in boxes:
        left = next((piece for piece in left - box if piece.contains(element)), left)
    return left


def _name(chunk: StoredChunk) -> str:
    where = f" ({chunk.source.label})" if chunk.is_located else ""
    return f"the chunk {chunk.box} of writer {chunk.owner}{where}"
