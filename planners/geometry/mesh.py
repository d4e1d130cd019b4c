"""`Mesh`: ranks arranged along named axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planners.errors import PlanError

__all__ = ["Mesh"]


class Mesh:
    """Named axes with their sizes, and the rank that sits at each coordinate (row-major: the last axis moves fastest).

    A placement list names one placement per axis, in the order of the axes. A mesh may cover any set of
    distinct ranks, so a pipeline stage or an expert group is a mesh with explicit `ranks`.

        >>> Mesh({"dp": 2, "tp": 2}).rank_at((1, 0))
        2
    """

    __slots__ = ("_hash", "_index", "_ranks", "axes")

    axes: tuple[tuple[str, int], ...]
    """(name, size) of every axis, outermost first."""

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], ranks: Sequence[int] | None = None) -> None:
        """`ranks` lists the rank at each coordinate in row-major order; None means 0, 1, 2, ...

        Raises PlanError for an axis of size < 1, two axes of one name, a wrong number of ranks or a rank given twice.
        """
        items = tuple(axes.items() if isinstance(axes, Mapping) else axes)
        self.axes = tuple((str(name), int(size)) for name, size in items)
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise PlanError(f"two axes of a mesh have one name: {names}")
        for name, size in self.axes:
            if size < 1:
                raise PlanError(f"axis {name!r} of a mesh must have a size >= 1, got {size}")
        self._index: dict[int, int] | None = None
        self._ranks: npt.NDArray[np.int64] | None = None
        if ranks is not None:
            given = np.asarray(ranks, dtype=np.int64).reshape(-1)
            if len(given) != self.size:
                raise PlanError(f"a mesh of axes {dict(self.axes)} has {self.size} ranks, but {len(given)} were given")
            if not np.array_equal(given, np.arange(self.size)):
                index = {rank: i for i, rank in enumerate(given.tolist())}
                if len(index) != len(given) or min(index, default=0) < 0:
                    raise PlanError(f"the ranks of a mesh must be distinct and >= 0, got {given.tolist()}")
                given.flags.writeable = False
                self._ranks, self._index = given, index
        self._hash = hash((self.axes, None if self._ranks is None else self._ranks.tobytes()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """A mesh from text such as `"dp=4,tp=2"`; `"dp=2@6,7"` gives explicit ranks, in row-major order.

        The empty text is the mesh of no axes: one rank. Raises PlanError for anything else.
        """
        head, at, tail = text.partition("@")
        axes: list[tuple[str, int]] = []
        for part in head.split(",") if head.strip() else []:
            match = re.fullmatch(r"\s*([A-Za-z_][\w.\-]*)\s*=\s*(\d+)\s*", part)
            if match is None:
                raise PlanError(f"cannot read {part!r} in the mesh {text!r}: write axes as name=size, like 'dp=4,tp=2'")
            axes.append((match[1], int(match[2])))
        if at and not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", tail):
            raise PlanError(f"cannot read the ranks {tail!r} of the mesh {text!r}: write them like '@4,5,6,7'")
        return cls(axes, [int(r) for r in tail.split(",")] if at else None)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes."""
        return tuple(size for _, size in self.axes)

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.axes)

    @property
    def size(self) -> int:
        """How many ranks."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """The rank at each coordinate, row-major, read-only."""
        if self._ranks is not None:
            return self._ranks
        ranks = np.arange(self.size, dtype=np.int64)
        ranks.flags.writeable = False
        return ranks

    @property
    def has_explicit_ranks(self) -> bool:
        """Whether the ranks are anything but 0, 1, 2, ... in order."""
        return self._ranks is not None

    @property
    def world_size(self) -> int:
        """The smallest number of ranks of a job that this mesh fits in: its highest rank + 1."""
        return int(self._ranks.max()) + 1 if self._ranks is not None else self.size

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, (int, np.integer)):
            return False
        return int(rank) in self._index if self._index is not None else 0 <= int(rank) < self.size

    def position(self, rank: int) -> int:
        """Row-major position of `rank`. Raises PlanError if the mesh does not hold it."""
        if rank not in self:
            raise PlanError(f"the mesh {self} does not hold this rank", rank=rank)
        return self._index[rank] if self._index is not None else int(rank)

    def positions(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row-major position of each of `ranks`, all of which the mesh holds."""
        if self._ranks is None:
            return ranks
        order = np.argsort(self._ranks)
        return np.asarray(order[np.searchsorted(self._ranks, ranks, sorter=order)], dtype=np.int64)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinate of `rank`, one number per axis. Inverse of `rank_at`. Raises PlanError for a rank outside."""
        position, out = self.position(rank), []
        for size in reversed(self.shape):
            position, c = divmod(position, size)
            out.append(c)
        return tuple(reversed(out))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Rank at `coordinate`. Inverse of `coordinate`. Raises PlanError for a coordinate outside."""
        if len(coordinate) != self.ndim or any(not 0 <= c < s for c, s in zip(coordinate, self.shape)):
            raise PlanError(f"{tuple(coordinate)} is no coordinate of the mesh {self}")
        position = 0
        for c, size in zip(coordinate, self.shape):
            position = position * size + c
        return int(self._ranks[position]) if self._ranks is not None else position

    def submesh(self, *names: str, at: Mapping[str, int] | None = None) -> Mesh:
        """The mesh of the axes `names` (in that order) at the given coordinates of all the others (0 if not given)."""
        unknown = [n for n in (*names, *(at or {})) if n not in self.names]
        if unknown:
            raise PlanError(f"the mesh {self} has no axis {unknown[0]!r}: it has {list(self.names)}")
        if at and any(not 0 <= c < dict(self.axes)[n] for n, c in at.items()):
            raise PlanError(f"{dict(at)} is outside the mesh {self}")
        index = tuple(slice(None) if n in names else (at or {}).get(n, 0) for n in self.names)
        grid = self.ranks.reshape(self.shape)[index]
        kept = [n for n in self.names if n in names]
        grid = grid.transpose([kept.index(n) for n in names])
        return Mesh([(n, dict(self.axes)[n]) for n in names], grid.reshape(-1).tolist())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh) or self._hash != other._hash or self.axes != other.axes:
            return False
        if self._ranks is None or other._ranks is None:
            return self._ranks is other._ranks
        return np.array_equal(self._ranks, other._ranks)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.axes, None if self._ranks is None else self._ranks.tolist())

    def __str__(self) -> str:
        """The text that `parse` reads."""
        text = ",".join(f"{name}={size}" for name, size in self.axes)
        return text if self._ranks is None else f"{text}@{','.join(map(str, self._ranks.tolist()))}"

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"
