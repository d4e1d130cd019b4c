"""Tensors that a mapping creates: windows of the sources' bytes, or values computed while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch

from planners.geometry.box import Box, Dims, Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec, flat_boxes
from planners.geometry.views import Fill, Patch, View, ViewGeometry
from reshard.errors import NormalizationError
from reshard.live.dtypes import dtype_from_name, overflowing, refused_cast
from reshard.live.tensors import raw_bytes
from reshard.stored.source import BytesSource, Source
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor, read_box

# Evenly spaced rows of a view, such as those of a rotary permutation, become one chunk with a
# larger stride:
#
#     target rows 0 1 2 3  <-  source rows 0 2 4 6        one window, stride 2 rows


@dataclass(frozen=True)
class _Strip:
    """A box of the target, and evenly spaced elements of a source."""

    target: Box
    tensor: int
    start: Shape
    counts: Shape
    steps: Shape
    dims: Dims

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Return the start, count, and step of each dim of the source."""
        return zip(self.start, self.counts, self.steps)


def assembled(view: View, sources: Sequence[StoredTensor], fqn: str) -> StoredTensor:
    """Return the tensor that `view` describes. Its source "2" is `sources[2]`."""
    given = [sources[int(spec.fqn)] for spec in view.sources]
    chunks = [chunk for strip in _strips(view.geometry) for chunk in _chunks(strip, given[strip.tensor])]
    spec = TensorSpec(fqn, view.shape, view.spec.dtype)
    chunks += [_constant(fill, spec) for fill in view.fills if not fill.target.is_empty]
    return StoredTensor(spec, tuple(chunks))


def constant(spec: TensorSpec, value: float) -> StoredTensor:
    """Return a tensor whose elements all equal `value`."""
    return StoredTensor(spec, (_constant(Fill(Box.full(spec.shape), value), spec),))


@lru_cache(maxsize=4096)
def _strips(geometry: ViewGeometry) -> tuple[_Strip, ...]:
    """Return the patches as strips. Patches that continue each other at an even distance are joined."""
    found = [_strip(patch) for patch in geometry.patches]
    ndim = found[0].target.ndim if found else 0
    for d in range(ndim):
        found.sort(key=lambda s: (s.target.offsets[:d], s.target.offsets[d + 1 :], s.target.offsets[d]))
        out: list[_Strip] = []
        for strip in found:
            joined = _joined(out[-1], strip, d) if out else None
            if joined is None:
                out.append(strip)
            else:
                out[-1] = joined
        found = out
    return tuple(found)


def _strip(patch: Patch) -> _Strip:
    ones = (1,) * patch.source.ndim
    return _Strip(patch.target, patch.tensor, patch.source.offsets, patch.source.sizes, ones, patch.dims)


def _joined(left: _Strip, right: _Strip, d: int) -> _Strip | None:
    """Return `left` extended by `right`, which has one row along dim `d`, or None if it does not
    continue it evenly."""
    e = left.dims[d]
    if e is None or (left.tensor, left.dims) != (right.tensor, right.dims) or right.counts[e] != 1:
        return None
    if left.target.stops[d] != right.target.offsets[d]:
        return None
    if any(a != b for i, (a, b) in enumerate(zip(zip(*left.target), zip(*right.target))) if i != d):
        return None
    if any(a != b for i, (a, b) in enumerate(zip(left.ranges(), right.ranges())) if i != e):
        return None
    n = left.counts[e]
    step = right.start[e] - left.start[e] if n == 1 else left.steps[e]
    if step < 1 or right.start[e] != left.start[e] + n * step:
        return None
    return replace(
        left,
        target=Box.of(left.target.offsets, _with_item(left.target.sizes, d, n + 1)),
        counts=_with_item(left.counts, e, n + 1),
        steps=_with_item(left.steps, e, step),
    )


def _with_item(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at + 1 :])


def _chunks(strip: _Strip, source: StoredTensor) -> Iterator[StoredChunk]:
    """Yield the source's chunks that contain elements of the strip, cropped and moved to their
    place in the target."""
    span = tuple((n - 1) * step + 1 if n else 0 for n, step in zip(strip.counts, strip.steps))
    hull = Box.of(strip.start, span)
    if hull.is_empty:
        return
    for chunk, _ in source.meeting(hull):
        ranges = [  # the strip's indices that are in the chunk
            (max(0, -(-(low - start) // step)), min(n, -(-(high - start) // step)))
            for (start, n, step), low, high in zip(strip.ranges(), chunk.box.offsets, chunk.box.stops, strict=True)
        ]
        if all(first < stop for first, stop in ranges):
            yield _cut(strip, chunk, ranges)


def _cut(strip: _Strip, chunk: StoredChunk, ranges: Sequence[tuple[int, int]]) -> StoredChunk:
    first = [start + a * step for start, step, (a, _) in zip(strip.start, strip.steps, ranges)]
    sizes = tuple(b - a for a, b in ranges)
    offsets = [at - low for at, low in zip(first, chunk.box.offsets)]
    target = Box.of(
        tuple(o if d is None else o + ranges[d][0] for o, d in zip(strip.target.offsets, strip.dims)),
        tuple(1 if d is None else sizes[d] for d in strip.dims),
    )

    def change(window: Window) -> Window:
        at = window.offset + sum(o * s for o, s in zip(offsets, window.strides))
        strides = tuple(s * step for s, step in zip(window.strides, strip.steps))
        return Window(at, sizes, strides, window.itemsize).rearrange(strip.dims)

    return chunk.derived(target, change)


def _constant(fill: Fill, spec: TensorSpec) -> StoredChunk:
    """Return a chunk of one element in memory, at which every element of the box points."""
    if why := refused_cast("", spec.dtype):
        raise NormalizationError(f"{spec.fqn!r} of {spec.dtype} cannot be filled with {fill.value}: {why}")
    raw = torch.full((1,), fill.value, dtype=torch.float64, device="cpu").to(dtype_from_name(spec.dtype))
    data = bytes(raw.view(torch.uint8).tolist())
    window = Window(0, fill.target.sizes, (0,) * len(spec.shape), spec.itemsize)
    return StoredChunk(fill.target, Extent(BytesSource(data, f"the constant {fill.value}"), window), "constant")


# Tensors that are computed while they are read, such as casts and dequantized weights. They take no
# memory.
#
# A computed tensor is a source without stored bytes: a read of a byte range computes its elements
# from stored ones, in pieces of bounded size.


_PIECE_BYTES = 8 << 20
_GAP_BYTES = 64 << 10


class _Computed(Source):
    """The row-major bytes of a tensor, of which `compute` returns any box."""

    max_gap_bytes = _GAP_BYTES

    def __init__(
        self, spec: TensorSpec, compute: Callable[[Box], torch.Tensor], label: str, inputs: Sequence[StoredTensor]
    ) -> None:
        self.spec, self.label, self._inputs = spec, label, inputs
        self._compute, self._dtype = compute, dtype_from_name(spec.dtype)
        self._counts: list[int] = []

    @cached_property
    def _sources(self) -> set[Source]:
        return {chunk.place.source for stored in self._inputs for chunk in stored.chunks}

    @property
    def overflowed(self) -> int:
        return sum(self._counts) + sum(source.overflowed for source in self._sources)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def view(self) -> None:
        return None

    def _fill(self, start: int, buffer: memoryview) -> None:
        size = self.spec.itemsize
        first, last = start // size, -(-(start + buffer.nbytes) // size)
        at, skip = start, start - first * size  # the range may begin within an element
        for box in _pieces(self.spec, first, last):
            elements = self._compute(box)
            if lost := overflowing(elements, self._dtype):
                self._counts.append(lost)
            values = raw_bytes(elements.to(self._dtype).contiguous())
            take = min(values.numel() - skip, start + buffer.nbytes - at)
            buffer[at - start : at - start + take] = values.numpy().data[skip : skip + take]
            at, skip = at + take, 0


def _pieces(spec: TensorSpec, first: int, last: int) -> Iterator[Box]:
    """Yield the row-major elements [first, last) as boxes of limited size."""
    step = max(1, _PIECE_BYTES // spec.itemsize)
    for begin in range(first, last, step):
        yield from flat_boxes(spec.shape, begin, min(begin + step, last))


def computed(
    spec: TensorSpec, compute: Callable[[Box], torch.Tensor], label: str, *inputs: StoredTensor
) -> StoredTensor:
    """Return a tensor whose boxes `compute` computes from `inputs`. The results are cast to the
    spec's dtype."""
    place = Extent(_Computed(spec, compute, label, inputs), Window.row_major(0, spec.shape, spec.itemsize))
    return StoredTensor(spec, (StoredChunk(Box.full(spec.shape), place),))


def is_floating(dtype: str) -> bool:
    """Return True for a floating-point dtype."""
    return dtype_from_name(dtype).is_floating_point


LOSES = "integers and bool would truncate weights, mostly to 0"


def check_cast(spec: TensorSpec, dtype: str) -> None:
    """Raise NormalizationError if torch cannot convert the elements, or they would be truncated."""
    if why := refused_cast(spec.dtype, dtype):
        raise NormalizationError(f"{spec.fqn!r} of {spec.dtype} cannot become {dtype}: {why}")


def cast(stored: StoredTensor, dtype: str, fqn: str | None = None) -> StoredTensor:
    """Return the tensor cast to `dtype` as torch does, or itself if it already has that dtype.

    Raises NormalizationError if the cast would drop fractions or imaginary parts, or if torch does
    not support it.
    """
    name = stored.fqn if fqn is None else fqn
    if stored.spec.dtype == dtype:
        return stored if name == stored.fqn else stored.renamed(name)
    check_cast(stored.spec, dtype)
    spec = TensorSpec(name, stored.spec.shape, dtype)
    return computed(spec, partial(read_box, stored), f"{stored.fqn} as {dtype}", stored)


def offset(stored: StoredTensor, fqn: str, *, by: float, exact: bool) -> StoredTensor:
    """Return the tensor plus `by`, in its own dtype. With `exact`, first read all of it to check
    that subtracting `by` restores every element.

    Raises NormalizationError for integers and, with `exact`, if an element would not be restored.
    """
    if not is_floating(stored.spec.dtype):
        raise NormalizationError(f"{stored.fqn!r} of {stored.spec.dtype} cannot get an offset of {by}")
    check_cast(stored.spec, "float64")

    def compute(box: Box) -> torch.Tensor:
        return read_box(stored, box).to(torch.float64) + by

    if exact:
        _check_exact(stored, by)
    return computed(TensorSpec(fqn, stored.spec.shape, stored.spec.dtype), compute, f"{stored.fqn} plus {by}", stored)


def _plus(values: torch.Tensor, by: float) -> torch.Tensor:
    return (values.to(torch.float64) + by).to(values.dtype)


def _check_exact(stored: StoredTensor, by: float) -> None:
    for box in _pieces(stored.spec, 0, stored.spec.numel):
        values = read_box(stored, box)
        back = _plus(_plus(values, by), -by).to(torch.float64)
        wrong = (back != values.to(torch.float64)) & ~(back.isnan() & values.isnan())
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            where = [o + i for o, i in zip(box.offsets, at)]
            raise NormalizationError(
                f"{stored.fqn!r} plus {by} would lose digits in {stored.spec.dtype}: element {where} is "
                f"{float(values[at])!r}, and would come back as {float(back[at])!r}; cast it to a wider dtype before, "
                "or let it be rounded: exact=False, on the command line --naming exact=false"
            )
