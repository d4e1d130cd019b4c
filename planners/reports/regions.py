"""Who holds what of a tensor, for those who draw it: the cuts of each dim, and the ranks that hold an element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout

__all__ = ["Owners", "edges"]


def edges(layout: TensorLayout, dim: int) -> list[int]:
    """Where `dim` is cut, its two ends included."""
    ends = {0, layout.spec.shape[dim]}
    if layout.product is not None:
        own = layout.product.dims[dim]
        return sorted(ends.union(own.starts.tolist(), own.stops.tolist()))
    return sorted(ends.union(*((box.offsets[dim], box.stops[dim]) for _, box in layout.chunks())))


class Owners:
    """Who holds an element."""

    def __init__(self, layout: TensorLayout) -> None:
        self._product = layout.product
        self._chunks = [] if self._product is not None else list(layout.chunks())
        self._dims = []
        for own in self._product.dims if self._product is not None else ():
            order = np.argsort(own.starts, kind="stable")
            self._dims.append((own.starts[order], own.owner_of[order]))

    @property
    def pieces(self) -> int:
        """How many distinct regions there are."""
        if self._product is None:
            return len(self._chunks)
        return math.prod(int((own.local_sizes > 0).sum()) for own in self._product.dims)

    @property
    def copies(self) -> int:
        """How many ranks hold each region."""
        return 1 if self._product is None else len(self._product.replica_positions)

    def at(self, index: Sequence[int]) -> list[int]:
        """The ranks that hold the element at an index in global coordinates; none for a hole."""
        if self._product is None:
            here = Box(index, (1,) * len(index))
            return [rank for rank, box in self._chunks if box.contains(here)]
        owners = [int(o[np.searchsorted(starts, i, side="right") - 1]) for (starts, o), i in zip(self._dims, index)]
        ranks: list[int] = sorted(self._product.replicas(owners).tolist())
        return ranks
