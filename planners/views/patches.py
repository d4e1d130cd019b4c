"""The pieces that views are made of: a box of one tensor that is a box of another, or a constant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planners.errors import PlanError
from planners.geometry.box import Box, Dims, rearranged

__all__ = ["Fill", "Patch", "ViewGeometry", "merged"]


@dataclass(frozen=True, slots=True)
class Patch:
    """The box `target` of the tensor that is made is the box `source` of source number `tensor`."""

    target: Box
    tensor: int
    source: Box
    dims: Dims

    def __post_init__(self) -> None:
        sizes = rearranged(self.source, self.dims).sizes
        if sizes != self.target.sizes:
            raise PlanError(f"{self.source} with dims {self.dims} has sizes {sizes}, and does not fill {self.target}")

    def to_source(self, box: Box) -> Box:
        """A box within `target`, in the coordinates of the source."""
        offsets, sizes = list(self.source.offsets), list(self.source.sizes)
        for i, d in enumerate(self.dims):
            if d is not None:
                offsets[d] += box.offsets[i] - self.target.offsets[i]
                sizes[d] = box.sizes[i]
        return Box.of(tuple(offsets), tuple(sizes))

    def to_target(self, box: Box) -> Box:
        """A box within `source`, in the coordinates of the target. Inverse of `to_source`."""
        offsets, sizes = list(self.target.offsets), list(self.target.sizes)
        for i, d in enumerate(self.dims):
            if d is not None:
                offsets[i] += box.offsets[d] - self.source.offsets[d]
                sizes[i] = box.sizes[d]
        return Box.of(tuple(offsets), tuple(sizes))

    def crop(self, box: Box) -> Patch:
        """What is within `box`, in the same coordinates. `box` lies within `target`."""
        return replace(self, target=box, source=self.to_source(box))

    def move(self, by: Sequence[int]) -> Patch:
        """The same at another place of the target."""
        return replace(self, target=self.target.shift(by))

    def rearrange(self, dims: Dims) -> Patch:
        """The same, the dims of the target being rearranged."""
        followed = tuple(None if d is None else self.dims[d] for d in dims)
        return Patch(rearranged(self.target, dims), self.tensor, self.source, followed)

    def inverse(self, tensor: int) -> Patch:
        """The source's box made of the target's, which is source number `tensor` of the inverse."""
        dims = tuple(self.dims.index(d) if d in self.dims else None for d in range(self.source.ndim))
        return Patch(self.source, tensor, self.target, dims)


@dataclass(frozen=True, slots=True)
class Fill:
    """The box `target` of the tensor that is made is `value` throughout."""

    target: Box
    value: float = 0

    def crop(self, box: Box) -> Fill:
        """What is within `box`, which lies within `target`."""
        return Fill(box, self.value)

    def move(self, by: Sequence[int]) -> Fill:
        """The same at another place."""
        return Fill(self.target.shift(by), self.value)

    def rearrange(self, dims: Dims) -> Fill:
        """The same, the dims being rearranged."""
        return Fill(rearranged(self.target, dims), self.value)


@dataclass(frozen=True)
class ViewGeometry:
    """A view without names. Equal ones map alike; the hash is computed once, since there may be many patches."""

    shape: tuple[int, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    patches: tuple[Patch, ...]
    fills: tuple[Fill, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.source_shapes, self.patches, self.fills))

    def __hash__(self) -> int:
        return self._hash


def merged(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """The same map in fewer patches, in order of their targets: empty ones left out, neighbours that continue one
    another in target and source made one."""
    found = [_named(patch) for patch in patches if not patch.target.is_empty]
    ndim = found[0].target.ndim if found else 0
    for dim in reversed(range(ndim)):
        found.sort(key=lambda p: (p.target.offsets[:dim], p.target.offsets[dim + 1 :], p.target.offsets[dim]))
        out: list[Patch] = []
        for patch in found:
            if out and _continues(out[-1], patch, dim):
                out[-1] = Patch(
                    _grown(out[-1].target, dim, patch.target.sizes[dim]),
                    patch.tensor,
                    _grown(out[-1].source, _followed(patch, dim), patch.target.sizes[dim]),
                    patch.dims,
                )
            else:
                out.append(patch)
        found = out
    return tuple(sorted(found, key=lambda p: p.target))


def _named(patch: Patch) -> Patch:
    """The same patch, but new dims follow source dims that were left out while there are any: all are of size 1."""
    if None not in patch.dims:
        return patch
    left = (d for d in range(patch.source.ndim) if d not in patch.dims)
    return replace(patch, dims=tuple(next(left, None) if d is None else d for d in patch.dims))


def _followed(patch: Patch, dim: int) -> int:
    source_dim = patch.dims[dim]
    assert source_dim is not None
    return source_dim


def _continues(left: Patch, right: Patch, dim: int) -> bool:
    along = left.dims[dim]
    return (
        along is not None
        and (left.tensor, left.dims) == (right.tensor, right.dims)
        and _goes_on(left.target, right.target, dim)
        and _goes_on(left.source, right.source, along)
    )


def _goes_on(left: Box, right: Box, dim: int) -> bool:
    return left.stops[dim] == right.offsets[dim] and all(
        left.offsets[d] == right.offsets[d] and left.sizes[d] == right.sizes[d] for d in range(left.ndim) if d != dim
    )


def _grown(box: Box, dim: int, by: int) -> Box:
    return Box.of(box.offsets, (*box.sizes[:dim], box.sizes[dim] + by, *box.sizes[dim + 1 :]))
