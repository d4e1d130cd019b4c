"""From a view to a stored tensor: every patch becomes chunks whose windows lie in the sources' own bytes.

Rows that a view takes at even distances, such as those of a rotary permutation, are one chunk with a longer stride:

    target rows 0 1 2 3  <-  source rows 0 2 4 6        one window, stride 2 rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from planners.geometry.box import Box, Dims
from planners.geometry.byteruns import Window
from planners.geometry.layout import TensorSpec
from planners.views.patches import Fill, Patch, ViewGeometry
from planners.views.view import View
from reshard.formats.stored.source import BytesSource
from reshard.formats.stored.tensor import Place, StoredChunk, StoredTensor
from reshard.state.dtypes import dtype_from_name

__all__ = ["assembled", "constant"]


@dataclass(frozen=True)
class _Strip:
    """A box of the target, and a source box that is taken with steps."""

    target: Box
    tensor: int
    start: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    dims: Dims


def assembled(view: View, sources: Sequence[StoredTensor], fqn: str) -> StoredTensor:
    """The tensor that `view` makes of its sources, which are given by their number: view source "2" is `sources[2]`."""
    given = [sources[int(spec.fqn)] for spec in view.sources]
    chunks: list[StoredChunk] = []
    for strip in _strips(view.geometry):
        chunks += _chunks(strip, given[strip.tensor])
    spec = TensorSpec(fqn, view.shape, view.spec.dtype)
    chunks += [_constant(fill, spec) for fill in view.fills if not fill.target.is_empty]
    return StoredTensor(spec, tuple(chunks))


def constant(spec: TensorSpec, value: float) -> StoredTensor:
    """A tensor of one number."""
    return StoredTensor(spec, (_constant(Fill(Box.full(spec.shape), value), spec),))


@lru_cache(maxsize=4096)
def _strips(geometry: ViewGeometry) -> tuple[_Strip, ...]:
    """The patches, with those put together that continue each other at an even distance."""
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
    """`left` with `right`, of one row along dim `d`, behind it; None if it does not continue it evenly."""
    e = left.dims[d]
    if e is None or (left.tensor, left.dims) != (right.tensor, right.dims) or right.counts[e] != 1:
        return None
    if left.target.stops[d] != right.target.offsets[d]:
        return None
    for i in range(left.target.ndim):
        alike = (left.target.offsets[i], left.target.sizes[i]) == (right.target.offsets[i], right.target.sizes[i])
        if i != d and not alike:
            return None
    for i in range(len(left.start)):
        alike = (left.start[i], left.counts[i], left.steps[i]) == (right.start[i], right.counts[i], right.steps[i])
        if i != e and not alike:
            return None
    n = left.counts[e]
    step = right.start[e] - left.start[e] if n == 1 else left.steps[e]
    if step < 1 or right.start[e] != left.start[e] + n * step:
        return None
    sizes = (*left.target.sizes[:d], n + 1, *left.target.sizes[d + 1 :])
    return replace(
        left,
        target=Box.of(left.target.offsets, sizes),
        counts=(*left.counts[:e], n + 1, *left.counts[e + 1 :]),
        steps=(*left.steps[:e], step, *left.steps[e + 1 :]),
    )


def _chunks(strip: _Strip, source: StoredTensor) -> Iterator[StoredChunk]:
    """The stored chunks of the source that have elements of the strip, cut and placed in the target."""
    span = tuple((n - 1) * step + 1 if n else 0 for n, step in zip(strip.counts, strip.steps))
    hull = Box.of(strip.start, span)
    if hull.is_empty:
        return
    for chunk, _ in source.meeting(hull):
        ranges = []  # of the strip's own indexes, those that the chunk has
        for start, n, step, low, high in zip(
            strip.start, strip.counts, strip.steps, chunk.box.offsets, chunk.box.stops, strict=True
        ):
            ranges.append((max(0, -(-(low - start) // step)), min(n, -(-(high - start) // step))))
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
    """One element in memory that every element of the box points to."""
    raw = torch.full((1,), fill.value, dtype=torch.float64, device="cpu").to(dtype_from_name(spec.dtype))
    data = bytes(raw.view(torch.uint8).tolist())
    window = Window(0, fill.target.sizes, (0,) * len(spec.shape), spec.itemsize)
    return StoredChunk(fill.target, Place(BytesSource(data, f"the constant {fill.value}"), window), "constant")
