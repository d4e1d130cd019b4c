"""The dims of a box or array in another order, with new ones put in and those of size 1 left out."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from planners.errors import PlanError
from planners.geometry.box import Box

__all__ = ["Dims", "arrange", "rearranged"]

Dims = tuple[int | None, ...]
"""For each dim of a target, the source dim that it follows, or None for a new dim of size 1. Source dims that are not
named are of size 1 and are left out: `(1, 0)` transposes, `(None, 0)` puts a dim in front, `(1,)` drops dim 0."""


def rearranged(box: Box, dims: Dims, fqn: str | None = None) -> Box:
    """`box` with its dims rearranged; new dims are `0:1`. Raises PlanError if a dim is lost, named twice or unknown."""
    named = [d for d in dims if d is not None]
    if len(set(named)) != len(named) or any(not 0 <= d < box.ndim for d in named):
        raise PlanError(f"{dims} does not name distinct dims of {box}", fqn=fqn)
    lost = [d for d in range(box.ndim) if d not in named and box.sizes[d] != 1]
    if lost:
        raise PlanError(f"{dims} leaves out dim {lost[0]} of {box}, which is not of size 1", fqn=fqn)
    return Box.of(
        tuple(0 if d is None else box.offsets[d] for d in dims), tuple(1 if d is None else box.sizes[d] for d in dims)
    )


def arrange(array: npt.NDArray[Any], dims: Dims) -> npt.NDArray[Any]:
    """A numpy view of `array` with its dims rearranged."""
    rest = [d for d in range(array.ndim) if d not in dims]
    turned = array.transpose([*(d for d in dims if d is not None), *rest])
    return turned.reshape([1 if d is None else array.shape[d] for d in dims])
