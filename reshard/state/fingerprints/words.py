"""Tensors as 32-bit words, whatever their dtype: the bits of the last dim in rows, cut every four bytes.

A word has one place in the global tensor, so parts that cut through a word fill their missing bytes with zeros:
the signed value of a word is the sum of what its bytes are worth, so that the parts add up to the whole word.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from planners.geometry.box import Box
from planners.geometry.layout_forms import Part
from reshard.errors import LayoutError
from reshard.state.fingerprints.tiling import Axis, tiles

__all__ = ["Positions", "local_parts", "words_of"]

Positions = Box | Part | Sequence[Box] | Sequence[Sequence[tuple[int, int]]] | None
"""Where a local tensor lies: nowhere special (it is whole), a box, boxes in local order, or per dim its intervals."""

_WORD_BYTES = 4
_COPY_WORDS = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16}


def local_parts(tensor: torch.Tensor, positions: Positions, shape: Sequence[int]) -> list[tuple[torch.Tensor, Part]]:
    """The local tensor as pieces that are products of global intervals, dim by dim. Nothing is copied.

    Boxes must either tile the local tensor as a product does (as `TensorLayout.boxes` gives them), or be the row-major
    pieces of a 1-D local tensor (a flat range).

    Raises:
        LayoutError: positions that do not fit the local or the global shape, or that hold an element twice.
    """
    if positions is None or isinstance(positions, Part):
        part = positions or Part.of_box(Box.full(shape))
    elif not isinstance(positions, Box) and shape and not positions and not tensor.numel():
        return []  # a rank without any part
    else:
        boxes = _boxes(positions)
        if boxes and not tensor.numel() and all(box.is_empty for box in boxes):
            return []
        product = _product(boxes, tuple(tensor.shape)) if boxes else _intervals(positions)
        if product is None:
            return _flat(tensor, boxes, shape)
        part = product
    if part.flat_start is not None:
        tensor = tensor.reshape(-1)[part.flat_start : part.flat_start + part.numel].view(part.sizes)
        part = Part(part.dims)
    _check(tensor, part, shape)
    return [(tensor, part)]


def _boxes(positions: object) -> list[Box]:
    """The boxes, if that is what they are, else none."""
    if isinstance(positions, Box):
        return [positions]
    return [p for p in positions if isinstance(p, Box)] if isinstance(positions, Sequence) else []


def _intervals(positions: object) -> Part:
    """A part from its intervals per dim."""
    try:
        return Part(tuple(tuple((int(a), int(b)) for a, b in dim) for dim in positions))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise LayoutError(
            f"positions are a Box, boxes, a Part, or for each dim its intervals (start, stop), got {positions!r}"
        ) from None


def _product(boxes: Sequence[Box], local: tuple[int, ...]) -> Part | None:
    """The product of intervals whose boxes in row-major order these are, if it has the local shape."""
    if len({box.ndim for box in boxes}) != 1:
        raise LayoutError(f"boxes of one tensor must have the same dims, got {list(boxes[:8])}")
    if len(boxes) == 1:
        return Part.of_box(boxes[0]) if boxes[0].sizes == local else None
    dims = []
    for d in range(boxes[0].ndim):
        dims.append(tuple(dict.fromkeys((box.offsets[d], box.stops[d]) for box in boxes)))
    part = Part(tuple(dims))
    if part.sizes != local or math.prod(map(len, dims)) != len(boxes):
        return None
    return part if [box for box, _ in part.boxes()] == list(boxes) else None


def _flat(tensor: torch.Tensor, boxes: Sequence[Box], shape: Sequence[int]) -> list[tuple[torch.Tensor, Part]]:
    total = sum(box.numel for box in boxes)
    if tensor.ndim != 1 or tensor.numel() != total:
        raise LayoutError(
            f"a local tensor of shape {tuple(tensor.shape)} is neither the product nor the row-major flattening of the "
            f"{len(boxes)} boxes {list(boxes[:4])} ... with {total} elements; add up one partial per box instead"
        )
    found, start = [], 0
    for box in boxes:
        part = Part.of_box(box)
        piece = tensor[start : start + box.numel].view(box.sizes)
        _check(piece, part, shape)
        found.append((piece, part))
        start += box.numel
    return found


def _check(tensor: torch.Tensor, part: Part, shape: Sequence[int]) -> None:
    if part.sizes != tuple(tensor.shape) or len(part.dims) != len(shape):
        raise LayoutError(
            f"a local tensor of shape {tuple(tensor.shape)} does not fit its positions, which have the sizes "
            f"{part.sizes} within the global shape {tuple(shape)}"
        )
    for d, (intervals, size) in enumerate(zip(part.dims, shape)):
        reached = 0
        for start, stop in sorted(i for i in intervals if i[0] != i[1]):
            if not reached <= start < stop <= size:
                raise LayoutError(
                    f"the intervals {intervals[:8]} of dim {d} must be disjoint and lie within 0 to {size}, "
                    f"but [{start}, {stop}) does not"
                )
            reached = stop


def words_of(tensor: torch.Tensor, part: Part) -> Iterator[tuple[torch.Tensor, tuple[Axis, ...]]]:
    """int32 tensors that hold the bits of the local tensor, with the axes that place them; seen in place if possible,
    else as copies of at most 4 MiB in one buffer, each valid until the next one is asked for."""
    if sys.byteorder != "little":
        raise LayoutError("fingerprints are defined on little-endian words, and this machine is big-endian")
    if not tensor.numel():
        return
    tensor = tensor.detach()
    dims = [_joined(intervals) for intervals in part.dims]
    if not tensor.ndim:
        tensor, dims = tensor.reshape(1), [((0, 1),)]
    per_word = max(1, _WORD_BYTES // tensor.itemsize)
    axes = [Axis(d, intervals) for d, intervals in enumerate(dims)]
    device = tensor.device if float64_is_exact(tensor.device) else torch.device("cpu")
    if (
        device == tensor.device
        and _viewable(tensor, per_word)
        and all(a % per_word == b % per_word == 0 for a, b in dims[-1])
    ):
        words, placed = tensor.view(torch.int32), (*axes[:-1], _word_axis(axes[-1], tensor.itemsize))
        # the sum does not mind the order of its axes, but memory likes to be read in its own
        order = sorted(range(words.ndim), key=words.stride, reverse=True)
        yield words.permute(order), tuple(placed[d] for d in order)
        return
    words_per_element = max(1, tensor.itemsize // _WORD_BYTES)  # at most: an element cut off from its word takes one
    limit = max(1, _COPY_WORDS // words_per_element)
    room = torch.empty(min(limit, tensor.numel()) * words_per_element, dtype=torch.int32, device=device)
    for tile in tiles(tensor.shape, limit):
        piece = tensor[tuple(slice(*span) for span in tile)].resolve_conj().resolve_neg()
        piece_axes = [axis.cut(*span) for axis, span in zip(axes, tile)]
        placed = (*piece_axes[:-1], _word_axis(piece_axes[-1], tensor.itemsize))
        words = room[: math.prod(axis.size for axis in placed)].view([axis.size for axis in placed])
        _copy(piece, words, piece_axes[-1], per_word)
        yield words, placed


def _joined(intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without empty intervals, and with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _viewable(tensor: torch.Tensor, per_word: int) -> bool:
    """Whether torch can see the memory as int32 where it lies."""
    if tensor.is_conj() or tensor.is_neg():
        return False  # the memory holds something else than the values
    if tensor.itemsize == _WORD_BYTES:
        return True
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step % per_word == 0 for step in steps)


def _word_axis(axis: Axis, itemsize: int) -> Axis:
    """The words that hold these indices of the last dim, whole words for each interval."""
    size = _WORD_BYTES
    return Axis(axis.dim, tuple((a * itemsize // size, -(-b * itemsize // size)) for a, b in axis.intervals))


def _copy(piece: torch.Tensor, words: torch.Tensor, axis: Axis, per_word: int) -> None:
    """Copy the bits of a piece into `words`, with zeros where an interval of its last dim begins or ends in a word."""
    if per_word == 1:
        words.view(piece.dtype).view(piece.shape).copy_(piece)
        return
    bits = piece.view(_BITS[piece.itemsize])
    target = words.zero_().view(bits.dtype)
    place = local = 0
    for a, b in axis.intervals:
        begin = place + a % per_word
        target[..., begin : begin + b - a] = bits[..., local : local + b - a]
        local += b - a
        place += (-(-b // per_word) - a // per_word) * per_word


def float64_is_exact(device: torch.device) -> bool:
    """Whether this device's float64 matrix product is exact for the largest numbers that occur, found by trying once;
    on the CPU, numpy's too.

    Devices without float64, or with an emulation of it, answer no; their tensors are copied to the CPU in pieces. So
    do those whose product is refused where algorithms have to be deterministic, as CUDA's without a setting of its own.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return _tried(device, strict)


@lru_cache(maxsize=64)
def _tried(device: torch.device, strict: bool) -> bool:
    size = 2048
    ramp = torch.arange(size, dtype=torch.int64, device="cpu")  # not the user's default device
    words = torch.stack([0 * ramp - 2**31, ramp - 2**31, 2**31 - 1 - ramp * 3]).to(torch.int32)
    digits = torch.stack([0 * ramp - 2048, ramp % 4095 - 2047, 2048 - ramp * 7 % 4096])
    want = [[sum(d * w for d, w in zip(ds, ws)) for ws in words.tolist()] for ds in digits.tolist()]
    try:
        on_device = words.to(device).to(torch.float64)
        found = (digits.to(device).to(torch.float64) @ on_device.t()).tolist()
    except torch.OutOfMemoryError:
        raise  # says nothing about the device
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    if device.type == "cpu" and (digits.numpy().astype(float) @ words.numpy().astype(float).T).tolist() != want:
        return False
    return found == want
