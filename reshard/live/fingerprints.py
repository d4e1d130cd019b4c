"""Fingerprints: what each part of a tensor contributes, and how the parts of many ranks are combined."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from planners.geometry.arrays import distinct, grouped
from planners.geometry.box import Box, Range, Shape
from planners.geometry.byte_ranges import merge_ranges
from planners.geometry.layout import Part, TensorLayout, TensorSpec
from reshard.errors import FormatError, LayoutError, ReplicaDriftError, format_ranks, format_value
from reshard.live.compiled_kernel import PRIME
from reshard.live.dtypes import PLAIN, dtype_from_name, dtype_name, is_resolved, resolved
from reshard.live.fingerprint_arithmetic import (
    LANES,
    PUBLIC,
    Axis,
    Key,
    Sums,
    Term,
    add_sums,
    fold,
    fold_each,
    known,
    terms,
    tiles,
)
from reshard.live.garbage_collection import gc_paused

K = TypeVar("K")

_VERSION = "rf1"
_LANE_BYTES = 6
_COUNT_BYTES = 8
_WORD_BYTES = 4
_SMALL_BYTES = 64 << 10
_BATCH_WORDS = 1 << 16
"""Words of small tensors that are summed together. As float64, they fit into the cache."""


@dataclass(frozen=True)
class Partial:
    """The sum over some elements of a tensor. Adding those of disjoint parts, in any order, gives
    the sum of the full tensor.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0]) >>> partial(a, Box((0,), (2,)), (3,)) +
    partial(b, Box((2,), (1,)), (3,)) == partial(torch.tensor([1.0, 2.0, 3.0])) True
    """

    sums: Sums = (0,) * LANES
    """One number of the field per lane."""
    count: int = 0
    """How many elements were added."""

    def __post_init__(self) -> None:
        if len(self.sums) != LANES or min(self.count, *self.sums) < 0 or max(self.sums) >= PRIME:
            raise FormatError(f"no partial fingerprint: sums {self.sums} of {self.count} elements")

    def __add__(self, other: Partial) -> Partial:
        return Partial(add_sums(self.sums, other.sums), self.count + other.count)

    @classmethod
    def total(cls, partials: Iterable[Partial]) -> Partial:
        """Return the sum of partials. Without any, return the partial of no elements."""
        partials = list(partials)
        return cls(add_sums(*(p.sums for p in partials)), sum(p.count for p in partials))

    def to_bytes(self) -> bytes:
        """20 bytes that another rank can read. Inverse of `from_bytes`."""
        return b"".join(s.to_bytes(_LANE_BYTES, "little") for s in self.sums) + self.count.to_bytes(
            _COUNT_BYTES, "little"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Partial:
        """Inverse of `to_bytes`. Raises FormatError."""
        if len(data) != LANES * _LANE_BYTES + _COUNT_BYTES:
            raise FormatError(f"a partial fingerprint has {LANES * _LANE_BYTES + _COUNT_BYTES} bytes, got {len(data)}")
        lanes = [data[i * _LANE_BYTES : (i + 1) * _LANE_BYTES] for i in range(LANES)]
        return cls(
            tuple(int.from_bytes(lane, "little") for lane in lanes),
            int.from_bytes(data[LANES * _LANE_BYTES :], "little"),
        )

    def digest(self, dtype: torch.dtype | str, shape: Sequence[int], *, key: Key = PUBLIC) -> str:
        """The fingerprint, such as `"rf1:bfloat16[4096,1024]:0123456789ab0123456789ab"`.

        Raises:
            LayoutError: the parts hold more or fewer elements than a tensor of this shape: one is
                missing, or one of several replicas was counted twice.
        """
        name = dtype if isinstance(dtype, str) else dtype_name(dtype)
        numel = math.prod(shape)
        if self.count != numel:
            raise LayoutError(
                f"the parts of a fingerprint hold {self.count} elements, but shape {tuple(shape)} has {numel}: "
                f"{'a part is missing' if self.count < numel else 'a part was counted twice'}"
            )
        head = f"{_VERSION}.{key.name}" if key.secret else _VERSION
        return f"{head}:{name}[{','.join(map(str, shape))}]:{''.join(f'{lane:012x}' for lane in self.sums)}"


def partial(
    tensor: torch.Tensor, positions: Positions = None, shape: Sequence[int] | None = None, *, key: Key = PUBLIC
) -> Partial:
    """Return what a local tensor adds to the fingerprint of the full tensor of `shape`.

    Without positions, the tensor is the full tensor. Add the part of only one replica. The tensor may
    have any device and strides. A call needs at most 50 MiB of memory on the CPU, and 200 MiB on
    other devices, for tensors of any size.

    Raises:
        LayoutError: the positions do not fit the shapes.
        FormatError: the tensor is not dense, has no data, or has elements that are not plain numbers.
    """
    return partials([(tensor, positions, shape)], key=key)[0]


def partials(
    parts: Iterable[tuple[torch.Tensor, Positions, Sequence[int] | None]], *, key: Key = PUBLIC
) -> list[Partial]:
    """Return `partial` of each (tensor, positions, shape). All are submitted to their devices
    before any is waited for. Small host tensors of one layout are summed together."""
    given = list(parts)
    together = grouped((_small_kind(*part), i) for i, part in enumerate(given))
    together.pop(None, None)
    out: list[Partial | None] = [None] * len(given)
    with torch.no_grad():
        for alike in together.values():
            if len(alike) > 1:
                for i, found in zip(alike, _small_partials([given[i] for i in alike], key), strict=True):
                    out[i] = found
        begun = {i: _Begun.of(*given[i], key) for i, done in enumerate(out) if done is None}
        under_way = grouped((term.digits.device, term) for each in begun.values() for term in each.terms)
        ended = {device: iter(known(asked)) for device, asked in under_way.items()}
    return [begun[i].end(ended) if done is None else done for i, done in enumerate(out)]


def _small_kind(tensor: torch.Tensor, positions: Positions, shape: Sequence[int] | None) -> tuple[object, ...] | None:
    """Return a key for small tensors that can be viewed as complete words and summed together. None
    for others."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if not tensor.is_cpu or not 0 < tensor.nbytes <= _SMALL_BYTES or not tensor.is_contiguous():
        return None
    if not is_resolved(tensor):
        return None
    itemsize = tensor.itemsize
    if positions is not None and not (isinstance(positions, Box) and positions.sizes == tensor.shape):
        return None
    start = positions.offsets[-1] if positions is not None and tensor.ndim else 0
    stop = start + (tensor.shape[-1] if tensor.ndim else 1)
    if any(end * itemsize % _WORD_BYTES for end in (start, stop, tensor.storage_offset())):
        return None
    return tensor.dtype, tensor.shape, positions, shape if shape is None else tuple(shape)


def _small_partials(
    alike: Sequence[tuple[torch.Tensor, Positions, Sequence[int] | None]], key: Key
) -> Iterator[Partial]:
    """Yield the partials of tensors of one small kind. Raises as `partial` does."""
    tensor, positions, shape = alike[0]
    ((piece, part),) = local_parts(tensor, positions, tuple(tensor.shape) if shape is None else tuple(shape))
    ((words, axes),) = words_of(piece, part)
    step = max(1, _BATCH_WORDS // words.numel())
    for start in range(0, len(alike), step):
        # one element may have any stride, and the tensor is contiguous all the same
        rows = [one.detach().as_strided((one.numel(),), (1,)).view(torch.int32) for one, _, _ in alike[start:][:step]]
        for sums in fold_each(torch.stack(rows), axes, key):
            yield Partial(sums, tensor.numel())


class _Begun(NamedTuple):
    """One fingerprint in progress: the sums so far, and those that a device is computing."""

    sums: Sums
    terms: list[Term]
    numel: int

    @classmethod
    def of(cls, tensor: torch.Tensor, positions: Positions, shape: Sequence[int] | None, key: Key) -> _Begun:
        """Raises as `partial` does."""
        shape = tuple(tensor.shape) if shape is None else tuple(shape)
        pieces = local_parts(tensor, positions, shape)
        words = (found for piece, part in pieces for found in words_of(piece, part))
        numel = sum(piece.numel() for piece, _ in pieces)
        if tensor.device.type == "cpu" or not float64_is_exact(tensor.device):
            return cls(add_sums(*(fold(piece, axes, key) for piece, axes in words)), [], numel)
        return cls(add_sums(), [term for piece, axes in words for term in terms(piece, axes, key)], numel)

    def end(self, ended: Mapping[torch.device, Iterator[Sums]]) -> Partial:
        """Return the partial. `ended`: the sums of all terms, in the order in which they were begun."""
        return Partial(add_sums(self.sums, *(next(ended[term.digits.device]) for term in self.terms)), self.numel)


def comparable(a: str, b: str) -> bool:
    """Return True if two fingerprints have the same version and key, so that equal tensors have
    equal fingerprints."""
    return a.split(":", 1)[0] == b.split(":", 1)[0]


class Fingerprinter:
    """Computes the fingerprint of one tensor that arrives in boxes, such as from a large file. Add
    each box once, in any order."""

    def __init__(self, dtype: torch.dtype | str, shape: Sequence[int], *, key: Key = PUBLIC) -> None:
        self.dtype = dtype_from_name(dtype) if isinstance(dtype, str) else dtype
        self.shape = tuple(shape)
        self.key = key
        self.partial = Partial()

    def add(self, tensor: torch.Tensor, positions: Positions = None) -> None:
        """Add the elements at these positions. Raises as `partial` does, and LayoutError for
        another dtype."""
        if tensor.dtype != self.dtype:
            raise LayoutError(f"a part of dtype {tensor.dtype} does not belong to a tensor of dtype {self.dtype}")
        self.partial += partial(tensor, positions, self.shape, key=self.key)

    def add_bytes(self, data: bytes | bytearray | memoryview, box: Box) -> None:
        """Add a box whose elements are row-major in `data`. Raises LayoutError if their lengths
        differ."""
        if memoryview(data).nbytes != box.numel * self.dtype.itemsize:
            raise LayoutError(
                f"{box} holds {box.numel} elements of {self.dtype.itemsize} bytes, got {memoryview(data).nbytes} bytes"
            )
        if not box.is_empty:
            raw = np.frombuffer(data, np.uint8)
            raw = raw if raw.flags.writeable else raw.copy()  # torch has no read-only tensors
            self.add(torch.from_numpy(raw).view(self.dtype).view(box.sizes), box)

    def digest(self) -> str:
        """Return the fingerprint. Raises LayoutError if elements are missing or were added twice."""
        return self.partial.digest(self.dtype, self.shape, key=self.key)


# Tensors as 32-bit words, whatever their dtype: the bits of the last dim in rows, split every four
# bytes.
#
# A word has one place in the global tensor, so parts that split a word fill their missing
# bytes with zeros: the signed value of a word is the sum of what its bytes are worth, so that the
# parts add up to the whole word.


Positions = Box | Part | Sequence[Box] | Sequence[Sequence[Range]] | None
"""Where a local tensor is in the full one: None (it is the full one), a box, boxes in local order,
or the intervals per dim."""

_COPY_WORDS = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16}


def local_parts(tensor: torch.Tensor, positions: Positions, shape: Sequence[int]) -> list[tuple[torch.Tensor, Part]]:
    """Return the local tensor as pieces that are products of global intervals, dim by dim. Nothing
    is copied.

    Boxes must either tile the local tensor as a product does (as `TensorLayout.boxes` returns
    them), or be the row-major pieces of a 1-D local tensor (a flat range).

    Raises:
        LayoutError: positions do not fit the local or the global shape, or contain an element
        twice.
        FormatError: as `partial` does.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise FormatError(
            f"a {kind} tensor of shape {tuple(tensor.shape)} has no plain elements to take a fingerprint of"
        )
    dtype_name(tensor.dtype)
    if positions is None:
        positions = Part.of_box(Box.full(shape))
    elif isinstance(positions, Box) and positions.sizes == tensor.shape:  # as nearly always
        positions = Part.of_box(positions)
    if isinstance(positions, Part):
        part = positions
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
    """Return the boxes. Empty if the positions are not boxes."""
    if isinstance(positions, Box):
        return [positions]
    return [p for p in positions if isinstance(p, Box)] if isinstance(positions, Sequence) else []


def _intervals(positions: object) -> Part:
    """Return a part from its intervals per dim."""
    try:
        return Part(tuple(tuple((int(a), int(b)) for a, b in dim) for dim in positions))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise LayoutError(
            f"positions are a Box, boxes, a Part, or for each dim its intervals (start, stop), got "
            f"{format_value(positions)}"
        ) from None


def _product(boxes: Sequence[Box], local: Shape) -> Part | None:
    """Return the product of intervals whose boxes, in row-major order, these are, if it has the
    local shape."""
    if len({box.ndim for box in boxes}) != 1:
        raise LayoutError(f"boxes of one tensor must have the same dims, got {list(boxes[:8])}")
    dims = [tuple(dict.fromkeys((box.offsets[d], box.stops[d]) for box in boxes)) for d in range(boxes[0].ndim)]
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
                    f"the intervals {intervals[:8]} of dim {d} must be disjoint and within 0 to {size}, "
                    f"but [{start}, {stop}) does not"
                )
            reached = stop


def words_of(tensor: torch.Tensor, part: Part) -> Iterator[tuple[torch.Tensor, tuple[Axis, ...]]]:
    """Yield int32 tensors with the bits of the local tensor, and the axes that place them. They are
    views if possible, and otherwise copies of at most 4 MiB in one buffer, each valid until you
    request the next one."""
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
    device = tensor.device if tensor.is_cpu or float64_is_exact(tensor.device) else torch.device("cpu")
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    is_whole = tensor.stride(-1) == 1 and all(step % per_word == 0 for step in steps)
    if (
        device == tensor.device
        and is_resolved(tensor)  # else the memory holds other values
        and (is_whole or tensor.itemsize == _WORD_BYTES)
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
        piece = resolved(tensor[tuple(slice(*span) for span in tile)])
        piece_axes = [axis.cut(*span) for axis, span in zip(axes, tile)]
        placed = (*piece_axes[:-1], _word_axis(piece_axes[-1], tensor.itemsize))
        words = room[: math.prod(axis.size for axis in placed)].view([axis.size for axis in placed])
        _copy(piece, words, piece_axes[-1], per_word)
        yield words, placed


def _joined(intervals: Sequence[Range]) -> tuple[Range, ...]:
    """Return the intervals without empty ones, and with adjacent ones joined."""
    joined: list[Range] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _word_axis(axis: Axis, itemsize: int) -> Axis:
    """Return the words that contain these indices of the last dim, with complete words for each interval."""
    size = _WORD_BYTES
    return Axis(axis.dim, tuple((a * itemsize // size, -(-b * itemsize // size)) for a, b in axis.intervals))


def _copy(piece: torch.Tensor, words: torch.Tensor, axis: Axis, per_word: int) -> None:
    """Copy the bits of a piece into `words`, with zeros where an interval of its last dim begins or
    ends inside a word."""
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
    """Return True if this device's float64 matrix product is exact for the largest numbers that
    occur, found by one trial. For the CPU, this includes numpy's product.

    It is not exact on devices without float64 or with an emulation of it. It is also False if the
    device refuses the product when algorithms must be deterministic, as CUDA does without a special
    setting. Tensors of such devices are copied to the CPU in pieces.
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


# What ranks hold of tensors, each part summed up, and how that is put together, by any number of
# ranks at a time.
#
# Ranks that hold the same elements must have the same sums, which then count once. Where it is
# known how many hold them, their part is added to the tensor's total as soon as all have sent it, and
# forgotten; at the latest when all ranks have. So what is put together for many ranks is no larger
# than for few.


_Runs = list[Range]
"""Ranges of ranks, as rows of the first and one past the last."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of one tensor: one product of intervals."""

    fqn: str
    dtype: str
    shape: Shape
    place: bytes
    """8 bytes that are equal for ranks that hold the same elements. Empty if the rank holds none."""
    sums: bytes
    """`Partial.to_bytes()` of these elements."""
    holders: int = 0
    """Number of ranks that hold them, including this one. 0 if unknown."""

    @classmethod
    def nothing(cls, spec: TensorSpec) -> Holding:
        """Return the holding of no elements, so that some rank names the tensor."""
        return cls(spec.fqn, spec.dtype, spec.shape, b"", Partial().to_bytes())


class _SummedTensor(msgspec.Struct, array_like=True):
    """What some ranks hold of one tensor."""

    rank: int
    """The first of these ranks."""
    dtype: str
    shape: Shape
    total: bytes
    """Sum of the elements whose holders have all sent their sums."""
    places: dict[bytes, tuple[int, dict[bytes, _Runs]]]
    """Other elements: for each place, the number of ranks that hold it and, for each sum, the ranks
    that sent it."""
    other: tuple[int, str, Shape] | None = None
    """A rank that has another dtype or shape."""

    def add(self, more: _SummedTensor) -> None:
        """Add what more ranks hold of the tensor."""
        self.total = (Partial.from_bytes(self.total) + Partial.from_bytes(more.total)).to_bytes()
        if (more.dtype, more.shape) != (self.dtype, self.shape):
            self.other = self.other or (more.rank, more.dtype, more.shape)
        self.other = self.other or more.other
        for place, (holders, versions) in more.places.items():
            known = self.places.setdefault(place, (holders, {}))[1]
            for sums, runs in versions.items():
                known[sums] = merge_ranges([*known.get(sums, ()), *runs])

    def settle(self, *, is_all: bool) -> None:
        """Add up, and remove, the places that no further rank can hold. Keeps places where replicas
        differ."""
        done = {}
        for place, (holders, versions) in self.places.items():
            if len(versions) == 1:
                ((sums, runs),) = versions.items()
                if is_all or sum(stop - start for start, stop in runs) == holders:
                    done[place] = Partial.from_bytes(sums)
        self.total = Partial.total([Partial.from_bytes(self.total), *done.values()]).to_bytes()
        self.places = {place: row for place, row in self.places.items() if place not in done}


class HeldSums(msgspec.Struct, array_like=True):
    """What some ranks hold of all tensors."""

    ranks: int
    """Number of ranks that have sent their sums."""
    tensors: dict[str, _SummedTensor]

    def add(self, fqn: str, tensor: _SummedTensor) -> None:
        """Add what the same rank or more ranks hold of one tensor."""
        if fqn in self.tensors:
            self.tensors[fqn].add(tensor)
        else:
            self.tensors[fqn] = tensor


def sum_up(held: Iterable[Holding], rank: int) -> HeldSums:
    """Return what one rank holds, for `add_holdings`."""
    found, none = HeldSums(1, {}), Partial().to_bytes()
    for one in held:
        places = {one.place: (one.holders, {one.sums: [(rank, rank + 1)]})}
        found.add(one.fqn, _SummedTensor(rank, one.dtype, one.shape, none, places))
    return found


def add_holdings(parts: Sequence[HeldSums], world_size: int) -> HeldSums:
    """Combine what several ranks, or several groups of ranks, hold. The first part becomes the
    result. `world_size`: total number of ranks."""
    first, *rest = parts
    for more in rest:
        first.ranks += more.ranks
        for fqn, tensor in more.tensors.items():
            first.add(fqn, tensor)
    for tensor in first.tensors.values():
        tensor.settle(is_all=first.ranks == world_size)
    return first


def conclude(held: HeldSums, *, key: Key = PUBLIC) -> dict[str, str]:
    """Return the fingerprints from the holdings of all ranks, in the order of first mention.

    Raises:
        ReplicaDriftError: ranks that hold the same elements have different sums.
        LayoutError: dtypes or shapes differ, or parts are missing or overlap.
    """
    tensors = held.tensors
    for fqn, tensor in tensors.items():
        if tensor.other is not None:
            rank, dtype, shape = tensor.other
            raise LayoutError(
                f"tensor {fqn!r} is {tensor.dtype}{list(tensor.shape)} on rank {tensor.rank}, "
                f"but {dtype}{list(shape)} on rank {rank}"
            )
    drifted = [
        f"{fqn}: " + " vs. ".join(format_ranks(_ranks(runs)) for runs in versions.values())
        for fqn, tensor in tensors.items()
        for _, versions in tensor.places.values()
    ]
    if drifted:
        raise ReplicaDriftError(
            "replicas have different bits: "
            + "; ".join(drifted[:8])
            + (f"; and {len(drifted) - 8} more" if len(drifted) > 8 else "")
        )
    found = {}
    for fqn, tensor in tensors.items():
        try:
            found[fqn] = Partial.from_bytes(tensor.total).digest(tensor.dtype, tensor.shape, key=key)
        except LayoutError as error:
            raise LayoutError(f"tensor {fqn!r}: {error}") from None
    return found


def _ranks(runs: _Runs) -> list[int]:
    return [rank for start, stop in runs for rank in range(start, stop)]


# Tallies: parts of the fingerprints of many tensors, packed so that those of many ranks add up
# quickly: each by the number of its tensor in an order that all ranks know.


_ROW = np.dtype([("number", "<u4"), ("sums", "<u8", LANES), ("count", "<u8")])


@gc_paused()
def pack_tally(parts: Mapping[K, Partial], every: Iterable[K]) -> bytes:
    """Pack the parts by name, 28 bytes each. `every`: the names of all tensors, in the same order
    on all ranks."""
    held = [(number, parts[name]) for number, name in enumerate(every) if name in parts] if parts else []
    return np.array([(number, part.sums, part.count) for number, part in held], _ROW).tobytes()


@gc_paused()
def digests_of(packed: bytes, every: Mapping[K, TensorLayout]) -> dict[K, str]:
    """Return the fingerprint of every tensor, by name, from a tally of all parts. A tensor without
    elements has no part."""
    rows, none = _rows(packed), Partial()
    sums, counts = rows["sums"].tolist(), rows["count"].tolist()
    parts = [Partial(tuple(lanes), count) for lanes, count in zip(sums, counts)]
    found = dict(zip(rows["number"].tolist(), parts))
    digests = {}
    for number, (name, layout) in enumerate(every.items()):
        spec = layout.spec
        digests[name] = found.get(number, none).digest(spec.dtype, spec.shape)
    return digests


def add_tallies(packed: Sequence[bytes]) -> bytes:
    """Return the packed sum of packed tallies."""
    parts = [_rows(one) for one in packed]
    numbers = distinct(np.concatenate([part["number"] for part in parts]))
    total = np.zeros(len(numbers), _ROW)
    total["number"] = numbers
    for part in parts:
        at = np.searchsorted(numbers, part["number"])
        total["sums"][at] = (total["sums"][at] + part["sums"]) % PRIME
        total["count"][at] += part["count"]
    return total.tobytes()


def _rows(packed: bytes) -> npt.NDArray[np.void]:
    if len(packed) % _ROW.itemsize:
        raise FormatError(f"a tally has {_ROW.itemsize} bytes for each tensor, got {len(packed)}")
    return np.frombuffer(packed, _ROW)
