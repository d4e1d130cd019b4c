"""Meshes: ranks along named axes, and the placements of tensors on them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Ints, grouped, ints, ravel, unravel
from planners.geometry.box import Shape


class Mesh:
    """Named axes with sizes, and the rank at each coordinate (row-major: the last axis varies fastest).

    A list of placements has one placement per axis, in the order of the axes. A mesh may contain
    any distinct ranks, so a pipeline stage or an expert group is a mesh with explicit `ranks`.

        >>> Mesh({"dp": 2, "tp": 2}).rank_at((1, 0))
        2
    """

    __slots__ = ("_hash", "_index", "axes", "names", "ranks", "shape", "size", "world_size")

    axes: tuple[tuple[str, int], ...]
    """(name, size) of every axis, outermost first. In names, characters that texts cannot have,
    such as spaces, become `_`."""
    names: tuple[str, ...]
    """Names of the axes."""
    shape: Shape
    """Sizes of the axes."""
    size: int
    """Number of ranks."""
    ranks: Ints
    """The rank at each coordinate, row-major, read-only."""
    world_size: int
    """The smallest world size that contains this mesh: its highest rank + 1."""

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], ranks: Sequence[int] | None = None) -> None:
        """Create a mesh. `ranks` lists the rank at each coordinate in row-major order; None means
        0, 1, 2, ...

        Raises PlanError for an axis whose size is not an integer >= 1, two axes with one name, a
        wrong number of ranks, or a repeated rank.
        """
        try:
            items = axes.items() if isinstance(axes, Mapping) else axes
            self.axes = tuple((_UNWRITABLE.sub("_", str(name)), operator.index(size)) for name, size in items)
        except (TypeError, ValueError):
            raise PlanError(f"a mesh needs axes with sizes, such as Mesh({{'dp': 4}}), got {axes!r:.80}") from None
        self.names, self.shape = tuple(name for name, _ in self.axes), tuple(size for _, size in self.axes)
        if len(set(self.names)) != len(self.names):
            raise PlanError(f"two axes of a mesh have the same name: {list(self.names)}")
        for name, size in self.axes:
            if size < 1:
                raise PlanError(f"axis {name!r} of a mesh must have a size >= 1, got {size}")
        self.size = self.world_size = math.prod(self.shape)
        if self.size > 1 << 24:
            raise PlanError(f"a mesh may have at most {1 << 24:,} ranks, got {self.size:,} for {dict(self.axes)}")
        self.ranks = np.arange(self.size)
        self._index: dict[int, int] | None = None
        if ranks is not None:
            given = np.asarray(ranks).reshape(-1)
            if given.dtype.kind not in "iu" and len(given):
                raise PlanError(f"the ranks of a mesh must be integers below 2**31, got {ranks!r:.80}")
            if len(given) != self.size:
                raise PlanError(f"a mesh of axes {dict(self.axes)} has {self.size} ranks, but {len(given)} were given")
            if not np.array_equal(given, self.ranks):
                index = {rank: i for i, rank in enumerate(given.tolist())}
                if len(index) != len(given) or min(index, default=0) < 0 or max(index) >> 31:
                    raise PlanError(
                        f"the ranks of a mesh must be distinct and >= 0, and below 2**31, got {given.tolist()}"
                    )
                self.ranks, self._index, self.world_size = given.astype(np.int64), index, max(index) + 1
        self.ranks.flags.writeable = False
        self._hash = hash((self.axes, None if self._index is None else self.ranks.tobytes()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh such as `"dp=4,tp=2"`; `"dp=2@6,7"` lists its ranks in row-major order.

        An empty text is a mesh without axes: one rank. Raises PlanError for anything else.
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
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def has_explicit_ranks(self) -> bool:
        """True if the ranks are not 0, 1, 2, ... in order."""
        return self._index is not None

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, (int, np.integer)):
            return False
        return int(rank) in self._index if self._index is not None else 0 <= int(rank) < self.size

    def position(self, rank: int) -> int:
        """Return the row-major position of `rank`. Raises PlanError if the mesh does not contain it."""
        if rank not in self:
            raise PlanError(f"the mesh {self} does not hold this rank", rank=rank)
        return self._index[rank] if self._index is not None else int(rank)

    def positions(self, ranks: Ints) -> Ints:
        """Return the row-major position of each of `ranks`. The mesh must contain all of them."""
        if self._index is None:
            return ranks
        order = np.argsort(self.ranks)
        return ints(order[np.searchsorted(self.ranks, ranks, sorter=order)])

    def coordinate(self, rank: int) -> Shape:
        """Return the coordinate of `rank`, one number per axis. Inverse of `rank_at`. Raises
        PlanError if the mesh does not contain the rank."""
        return unravel(self.position(rank), self.shape)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at `coordinate`. Inverse of `coordinate`. Raises PlanError for one outside the mesh."""
        if len(coordinate) != self.ndim or any(not 0 <= c < s for c, s in zip(coordinate, self.shape)):
            raise PlanError(f"{tuple(coordinate)} is not a coordinate of the mesh {self}")
        return int(self.ranks[ravel(coordinate, self.shape)])

    def submesh(self, *names: str, at: Mapping[str, int] | None = None) -> Mesh:
        """Return the mesh of the axes `names` (in that order) at the given coordinates of the others (default 0)."""
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

    @property
    def strides(self) -> Shape:
        """Distance between the ranks at coordinates 0 and 1 of each axis; 0 for an axis of size 1."""
        grid = self.ranks.reshape(self.shape)
        units = (tuple(int(other == axis) for other in range(self.ndim)) for axis in range(self.ndim))
        return tuple(int(grid[unit]) - int(self.ranks[0]) if size > 1 else 0 for unit, size in zip(units, self.shape))

    def in_rank_order(self) -> Mesh:
        """Return the same mesh with its axes ordered so that its ranks ascend, or itself if no order does that."""
        if not self.has_explicit_ranks:
            return self
        order = sorted(zip(self.strides, self.names), key=lambda axis: -axis[0])
        turned = self.submesh(*(name for _, name in order))
        return turned if bool((np.diff(turned.ranks) > 0).all()) else self

    def named(self, axes: Mapping[tuple[int, int], str]) -> Mesh:
        """Return the same mesh, but give each `replica` axis the name that `axes` has for its (stride, size)."""
        keys = zip(self.strides, self.shape)
        names = [axes.get(key, name) if name in _REPLICAS else name for key, name in zip(keys, self.names)]
        if names == list(self.names) or len(set(names)) < len(names):
            return self
        return Mesh(list(zip(names, self.shape)), self.ranks.tolist())

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self._hash == other._hash
            and self.axes == other.axes
            and self._index == other._index
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.axes, None if self._index is None else self.ranks.tolist())

    def __str__(self) -> str:
        """The text that `parse` reads."""
        text = ",".join(f"{name}={size}" for name, size in self.axes)
        return text if self._index is None else f"{text}@{','.join(map(str, self.ranks.tolist()))}"

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"


_UNWRITABLE = re.compile(r"[^\w.\-]|^(?![A-Za-z_])")
"""Text that `Mesh.parse` cannot read in a name, or in front of one."""
_REPLICAS = ("replica", "replica_of_mesh")
"""Axes over the copies of a tensor on several meshes, which do not know each other's axes."""


def axis_names(meshes: Iterable[Mesh | None], world_size: int) -> dict[tuple[int, int], str]:
    """Return the name of each axis in the meshes of all ranks, by stride and size, if the name is unique."""
    found = {
        (axis, name)
        for mesh in set(meshes)
        if mesh is not None and mesh.size == world_size
        for axis, name in zip(zip(mesh.strides, mesh.shape), mesh.names)
        if name not in _REPLICAS
    }
    return {axis: names[0] for axis, names in grouped(found).items() if len(names) == 1}


# How one mesh axis places a tensor: it shards a dim, or replicates.
#
# The three basic placements mean what DTensor means by them, and have its short text form: `S(0)`,
# `_S(0, 2)`, `R`. `BlockShard` is ours: a dim made of blocks, each of which is sharded on its own.


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis has a copy."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis shards `dim` as `torch.chunk` does: chunks of ceil(size / n), of which the last ones
    are shorter or empty."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """DTensor's `_StridedShard`: `dim` is split into `split_factor` pieces, and the axis shards
    each piece. Coordinate k holds shard k of every piece, in order.

    12 elements, split_factor 2, axis of size 2:   0 0 0 1 1 1 | 0 0 0 1 1 1
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise PlanError(f"split_factor must be an integer >= 1, got {self.split_factor!r}")

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, slots=True)
class BlockShard:
    """`dim` is a concatenation of blocks (a fused q, k, and v; a gate and an up projection), and
    the axis shards each block as `Shard` would. Coordinate k holds shard k of every block, in
    order.

    q=4, k=2, v=2 elements, axis of size 2:   0 0 1 1 | 0 1 | 0 1

    Only the first axis that shards a dim may be a `BlockShard`, because later ones no longer see
    full blocks.
    """

    dim: int
    blocks: tuple[int, ...]
    """Sizes of the blocks, in elements of the dim. They add up to its size."""

    def __init__(self, dim: int, blocks: Sequence[int]) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "blocks", tuple(blocks))
        _check_dim(dim)
        if not self.blocks or any(not isinstance(b, int) or b < 0 for b in self.blocks):
            raise PlanError(f"blocks must be one or more sizes >= 0, got {self.blocks}")

    def __str__(self) -> str:
        return f"B({self.dim}, {'+'.join(map(str, self.blocks))})"


Placement = Replicate | Shard | StridedShard | BlockShard


def _check_dim(dim: object) -> None:
    if type(dim) is not int or dim < 0:
        raise PlanError(f"the dim of a placement must be an integer >= 0, got {dim!r}")


_FORMS = (
    (re.compile(r"R|Replicate(?:\(\))?"), lambda m: Replicate()),
    (re.compile(r"S(?:hard)?\((?:dim=)?(\d+)\)"), lambda m: Shard(int(m[1]))),
    (
        re.compile(r"_?S(?:tridedShard)?\((?:dim=)?(\d+),(?:split_factor=|sf=)?(\d+)\)"),
        lambda m: StridedShard(int(m[1]), int(m[2])),
    ),
    (
        re.compile(r"B(?:lockShard)?\((?:dim=)?(\d+),(\d+(?:\+\d+)*)\)"),
        lambda m: BlockShard(int(m[1]), [int(b) for b in m[2].split("+")]),
    ),
)


def parse_placement(text: str) -> Placement:
    """A placement from `"S(0)"`, `"_S(0, 2)"`, `"R"`, `"B(0, 4+2+2)"`, or DTensor's long forms.

    Raises PlanError for anything else. Inverse of `str`.
    """
    compact = re.sub(r"\s+", "", text)
    for pattern, make in _FORMS:
        match = pattern.fullmatch(compact)
        if match is not None:
            return make(match)
    raise PlanError(f"unknown placement {text!r}: write S(dim), _S(dim, split_factor), B(dim, size+size), or R")


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Placements separated by commas, one per mesh axis: `"S(0),R"`. The empty text is no placement.

    Raises PlanError for text that holds anything else.
    """
    text = text.strip()
    text = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    parts = re.split(r",(?![^(]*\))", text)
    return tuple(parse_placement(part) for part in parts if part.strip()) if text.strip() else ()


# The 1-D algebra: which intervals of one dim each coordinate of the sharding mesh axes owns.
#
# Everything about a product layout is asked here, one dim at a time. An `Ownership` is a table of
# intervals, grouped by owner, in the owner's local order:
#
#     8 elements, _S(0, 2) on an axis of 2:    owner 0: [0:2) [4:6)      owner 1: [2:4) [6:8)
