"""Meshes: ranks along named axes, the placements of tensors on them, and the intervals of a dim that each rank owns."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from planners.errors import PlanError

__all__ = [
    "BlockShard", "Mesh", "Ownership", "Placement", "Replicate", "SegmentRow", "Segments", "Shard",
    "StridedShard", "axis_names", "distinct", "grouped", "outer_sum", "overlap", "ownership", "parse_placement",
    "parse_placements", "ravel", "unravel",
]  # fmt: skip


class Mesh:
    """Named axes with sizes, and the rank at each coordinate (row-major: the last axis varies fastest).

    A list of placements has one placement per axis, in the order of the axes. A mesh may contain any distinct ranks, so
    a pipeline stage or an expert group is a mesh with explicit `ranks`.

        >>> Mesh({"dp": 2, "tp": 2}).rank_at((1, 0))
        2
    """

    __slots__ = ("_hash", "_index", "axes", "names", "ranks", "shape", "size", "world_size")

    axes: tuple[tuple[str, int], ...]
    """(name, size) of every axis, outermost first."""
    names: tuple[str, ...]
    """Names of the axes."""
    shape: tuple[int, ...]
    """Sizes of the axes."""
    size: int
    """Number of ranks."""
    ranks: npt.NDArray[np.int64]
    """The rank at each coordinate, row-major, read-only."""
    world_size: int
    """The smallest world size that contains this mesh: its highest rank + 1."""

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], ranks: Sequence[int] | None = None) -> None:
        """`ranks` lists the rank at each coordinate in row-major order; None means 0, 1, 2, ...

        Raises PlanError for an axis whose size is no integer >= 1, two axes with one
        name, a wrong number of ranks, or a repeated rank.
        """
        try:
            items = axes.items() if isinstance(axes, Mapping) else axes
            self.axes = tuple((str(name), operator.index(size)) for name, size in items)
        except (TypeError, ValueError):
            raise PlanError(f"a mesh needs axes with sizes, such as Mesh({{'dp': 4}}), got {axes!r:.80}") from None
        self.names, self.shape = tuple(name for name, _ in self.axes), tuple(size for _, size in self.axes)
        if len(set(self.names)) != len(self.names):
            raise PlanError(f"two axes of a mesh have the same name: {list(self.names)}")
        for name, size in self.axes:
            if size < 1:
                raise PlanError(f"axis {name!r} of a mesh must have a size >= 1, got {size}")
        self.size = self.world_size = math.prod(self.shape)
        self.ranks = np.arange(self.size, dtype=np.int64)
        self._index: dict[int, int] | None = None
        if ranks is not None:
            given = np.asarray(ranks, dtype=np.int64).reshape(-1)
            if len(given) != self.size:
                raise PlanError(f"a mesh of axes {dict(self.axes)} has {self.size} ranks, but {len(given)} were given")
            if not np.array_equal(given, self.ranks):
                index = {rank: i for i, rank in enumerate(given.tolist())}
                if len(index) != len(given) or min(index, default=0) < 0:
                    raise PlanError(f"the ranks of a mesh must be distinct and >= 0, got {given.tolist()}")
                self.ranks, self._index, self.world_size = given, index, max(index) + 1
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

    def positions(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row-major position of each of `ranks`. The mesh must contain all of them."""
        if self._index is None:
            return ranks
        order = np.argsort(self.ranks)
        return np.asarray(order[np.searchsorted(self.ranks, ranks, sorter=order)], dtype=np.int64)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of `rank`, one number per axis. Inverse of `rank_at`. Raises PlanError if the mesh does
        not contain the rank."""
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
    def strides(self) -> tuple[int, ...]:
        """How far apart the ranks at coordinates 0 and 1 of each axis are; 0 for an axis of size 1."""
        grid = self.ranks.reshape(self.shape)
        units = (tuple(int(other == axis) for other in range(self.ndim)) for axis in range(self.ndim))
        return tuple(int(grid[unit]) - int(self.ranks[0]) if size > 1 else 0 for unit, size in zip(units, self.shape))

    def in_rank_order(self) -> Mesh:
        """Return the same mesh with its axes in the order in which its ranks ascend, or itself if there is none."""
        if not self.has_explicit_ranks:
            return self
        order = sorted(zip(self.strides, self.names), key=lambda axis: -axis[0])
        turned = self.submesh(*(name for _, name in order))
        return turned if bool((np.diff(turned.ranks) > 0).all()) else self

    def named(self, axes: Mapping[tuple[int, int], str]) -> Mesh:
        """Return the same mesh with the names in `axes`, by stride and size, for `replica` axes."""
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


_REPLICAS = ("replica", "replica_of_mesh")
"""Axes over the copies of a tensor on several meshes, which do not know each other's axes."""


def axis_names(meshes: Iterable[Mesh | None], world_size: int) -> dict[tuple[int, int], str]:
    """The name of each axis of the meshes of all ranks, by stride and size, if there is only one."""
    found = {
        (axis, name)
        for mesh in set(meshes)
        if mesh is not None and mesh.size == world_size
        for axis, name in zip(zip(mesh.strides, mesh.shape), mesh.names)
        if name not in _REPLICAS
    }
    return {axis: names[0] for axis, names in grouped(found).items() if len(names) == 1}


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major position of an index."""
    position = 0
    for i, size in zip(index, shape):
        position = position * size + i
    return position


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index at a row-major position. Inverse of `ravel`."""
    out = []
    for size in reversed(shape):
        position, i = divmod(position, size)
        out.append(i)
    return tuple(reversed(out))


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
    """The axis shards `dim` as `torch.chunk` does: chunks of ceil(size / n), of which the last ones are shorter or
    empty."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """DTensor's `_StridedShard`: `dim` is split into `split_factor` pieces, and the axis shards each piece. Coordinate
    k holds shard k of every piece, in order.

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
    """`dim` is a concatenation of blocks (a fused q, k, and v; a gate and an up projection), and the axis shards each
    block as `Shard` would. Coordinate k holds shard k of every block, in order.

    q=4, k=2, v=2 elements, axis of size 2:   0 0 1 1 | 0 1 | 0 1

    Only the first axis that shards a dim may be a `BlockShard`, because later ones no longer see full blocks.
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
    raise PlanError(f"unknown placement {text!r}: write S(dim), _S(dim, split_factor), B(dim, size+size) or R")


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


Ints = npt.NDArray[np.int64]
Cut = Shard | StridedShard | BlockShard
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Ownership:
    """Intervals of a dim of `size` elements: owner k has rows `indptr[k]` to `indptr[k + 1]`, in local order.

    No interval is empty, and no two neighbors in local order touch. Owners are numbered row-major over
    the axes that shard the dim, in mesh order. A dim that no axis shards has one owner, 0.
    """

    size: int
    starts: Ints
    stops: Ints
    indptr: Ints

    @property
    def owners(self) -> int:
        """How many owners."""
        return len(self.indptr) - 1

    @cached_property
    def owner_of(self) -> Ints:
        """The owner of each interval."""
        return np.repeat(np.arange(self.owners, dtype=np.int64), np.diff(self.indptr))

    @cached_property
    def local_starts(self) -> Ints:
        """Where each interval begins in its owner's local dim."""
        lengths = self.stops - self.starts
        before = np.concatenate(([0], np.cumsum(lengths)))
        return np.asarray(before[:-1] - before[self.indptr[self.owner_of]], dtype=np.int64)

    @cached_property
    def local_sizes(self) -> Ints:
        """How many elements each owner has."""
        before = np.concatenate(([0], np.cumsum(self.stops - self.starts)))
        return np.asarray(np.diff(before[self.indptr]), dtype=np.int64)

    def intervals(self, owner: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each interval of `owner`, in local order."""
        rows = slice(self.indptr[owner], self.indptr[owner + 1])
        return tuple(zip(self.starts[rows].tolist(), self.stops[rows].tolist()))

    @cached_property
    def ascending(self) -> tuple[Ints, Ints, Ints]:
        """(row, start, stop) of the intervals by where they begin in the dim."""
        order = np.argsort(self.starts, kind="stable")
        return order, self.starts[order], self.stops[order]

    def meeting(self, start: int, stop: int) -> Ints:
        """The rows of the intervals that share an element with `[start, stop)`, which is not empty, as they ascend."""
        rows, starts, stops = self.ascending
        return rows[np.searchsorted(stops, start, side="right") : np.searchsorted(starts, stop)]

    def uncovered(self) -> tuple[int, str] | None:
        """An element that is not owned exactly once and what is wrong with it; None if the intervals tile the dim."""
        _, starts, stops = self.ascending
        starts = np.append(starts, self.size)
        reach = np.maximum.accumulate(np.insert(stops, 0, 0))
        wrong = np.flatnonzero(starts != reach)
        if not len(wrong):
            return None
        start, stop = int(starts[wrong[0]]), int(reach[wrong[0]])
        if stop > self.size:
            return self.size, "is outside the tensor"
        return (stop, "has no owner") if stop < start else (start, "has two owners")


@lru_cache(maxsize=4096)
def ownership(size: int, cuts: tuple[tuple[Cut, int], ...]) -> Ownership:
    """The ownership of a dim of `size` elements. `cuts` are pairs (placement, axis size), applied from left to right.

    Raises PlanError for blocks that do not add up to the dim, or that come after another placement.
    """
    whole = [] if size == 0 else [0]
    own = Ownership(
        size,
        np.array(whole, dtype=np.int64),
        np.array([size] * len(whole), dtype=np.int64),
        np.array([0, len(whole)], dtype=np.int64),
    )
    for i, (placement, parts) in enumerate(cuts):
        own = _cut(own, _bounds(own, placement, parts, first=i == 0))
    return own


def _bounds(own: Ownership, placement: Cut, parts: int, *, first: bool) -> Ints:
    """Boundaries in each owner's local dim, of shape (owners, pieces, parts + 1): part k of piece j of owner c is
    `[bounds[c, j, k], bounds[c, j, k + 1])`."""
    sizes = own.local_sizes
    if isinstance(placement, BlockShard):
        if not first:
            raise PlanError(
                f"{placement} must be the first placement that shards its dim: its blocks are sharded already"
            )
        if sum(placement.blocks) != own.size:
            total = sum(placement.blocks)
            raise PlanError(f"the blocks of {placement} add up to {total}, but the dim has {own.size} elements")
        edges = np.concatenate(([0], np.cumsum(placement.blocks)))[None, :]
    else:
        pieces = placement.split_factor if isinstance(placement, StridedShard) else 1
        step = -(-sizes // pieces)
        edges = np.minimum(np.arange(pieces + 1)[None, :] * step[:, None], sizes[:, None])
    lengths = np.diff(edges, axis=1)
    step = -(-lengths // parts)
    inner = np.minimum(np.arange(parts + 1) * step[..., None], lengths[..., None])
    return np.asarray(edges[:, :-1, None] + inner, dtype=np.int64)


def _cut(own: Ownership, bounds: Ints) -> Ownership:
    """Every owner c becomes owners (c, k): the parts k of all its pieces, in order of the pieces."""
    owners, pieces, parts = bounds.shape[0], bounds.shape[1], bounds.shape[2] - 1
    base = np.concatenate(([0], np.cumsum(own.local_sizes)))  # all local dims, one after another
    ends = np.minimum(bounds[:, :, 1:] + base[:-1, None, None], base[-1])
    begins = bounds[:, :, :-1] + base[:-1, None, None]
    # split the intervals, in the same order, at every boundary
    position = own.local_starts + base[own.owner_of]
    edges = distinct(np.concatenate((begins.reshape(-1), ends.reshape(-1), position, base[-1:])))
    left, right = edges[:-1], edges[1:]
    row = np.searchsorted(position, left, side="right") - 1
    starts = np.asarray(own.starts[row] + (left - position[row]), dtype=np.int64)
    stops = np.asarray(starts + (right - left), dtype=np.int64)
    # which (c, j, k) each little interval fell into; empty parts take none
    filled = np.flatnonzero((ends > begins).reshape(-1))
    piece = filled[np.searchsorted(begins.reshape(-1)[filled], left, side="right") - 1]
    c, rest = np.divmod(piece, pieces * parts)
    j, k = np.divmod(rest, parts)
    owner = c * parts + k
    order = np.lexsort((left, j, owner))
    return _grouped(own.size, starts[order], stops[order], owner[order], owners * parts)


def _grouped(size: int, starts: Ints, stops: Ints, owner: Ints, owners: int) -> Ownership:
    """An ownership from rows sorted by owner and local order; neighbors that touch become one."""
    if len(starts):
        new = np.ones(len(starts), dtype=bool)
        new[1:] = (starts[1:] != stops[:-1]) | (owner[1:] != owner[:-1])
        last = np.append(np.flatnonzero(new)[1:] - 1, len(starts) - 1)
        starts, stops, owner = starts[new], stops[last], owner[new]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=owners))))
    return Ownership(size, starts, stops, np.asarray(indptr, dtype=np.int64))


def outer_sum(columns: Iterable[Ints]) -> Ints:
    """The sums of one number of each column, in the order of the product of the columns."""
    out = np.zeros(1, dtype=np.int64)
    for column in columns:
        out = (out[:, None] + column).reshape(-1)
    return out


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def distinct(values: Ints) -> Ints:
    """The values of an array of any shape, ascending, each once. Not by `np.unique`: its first call imports `numpy.ma`,
    which takes longer than most plans."""
    ordered = np.sort(values, axis=None, kind="stable")
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return np.asarray(ordered[new], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Segments:
    """The common refinement of two ownerships of one dim: rows sorted by wanted owner and its local order.

    Row i says that elements `[starts[i], stops[i])` are in interval `saved_row[i]` of the saved ownership and begin at
    `local_starts[i]` in the local dim of wanted owner `wanted_owner[i]`.
    """

    saved: Ownership
    wanted: Ownership
    starts: Ints
    stops: Ints
    saved_row: Ints
    wanted_owner: Ints
    local_starts: Ints
    indptr: Ints
    """Rows of wanted owner k are `indptr[k]` to `indptr[k + 1]`."""

    @property
    def saved_owner(self) -> Ints:
        """The saved owner of each row."""
        return self.saved.owner_of[self.saved_row]

    def rows(self, wanted_owner: int) -> list[SegmentRow]:
        """The rows of one wanted owner, in its local order."""
        at, saved = slice(self.indptr[wanted_owner], self.indptr[wanted_owner + 1]), self.saved
        row, start = self.saved_row[at], self.starts[at]
        chunk_start = saved.starts[row]
        columns = (
            saved.owner_of[row],
            chunk_start,
            saved.stops[row] - chunk_start,
            saved.local_starts[row] + start - chunk_start,
            start,
            self.stops[at] - start,
            self.local_starts[at],
        )
        return [*map(SegmentRow, *(column.tolist() for column in columns))]


class SegmentRow(NamedTuple):
    """A row of `Segments`, in elements."""

    saved_owner: int
    chunk_start: int
    """Where the saved interval begins in the dim."""
    chunk_size: int
    saved_local_start: int
    """Where the row's elements begin in the local dim of the saved owner."""
    start: int
    """Where they begin in the dim."""
    size: int
    local_start: int
    """Where they begin in the local dim of the wanted owner."""


def overlap(saved: Ownership, wanted: Ownership) -> Segments:
    """Merge the boundaries of two ownerships of the same dim. Elements that one side lacks appear in no row.

    Cost: the intervals of both sides, sorted once.
    """
    if saved.size != wanted.size:
        raise PlanError(f"a dim of {saved.size} elements does not overlap one of {wanted.size}")
    by_saved, s_starts, s_stops = saved.ascending
    by_wanted, w_starts, w_stops = wanted.ascending
    edges = distinct(np.concatenate((s_starts, s_stops, w_starts, w_stops)))
    starts, stops = edges[:-1], edges[1:]
    s_at = np.searchsorted(s_starts, starts, side="right") - 1
    w_at = np.searchsorted(w_starts, starts, side="right") - 1
    if len(s_starts) and len(w_starts):
        held = (s_at >= 0) & (w_at >= 0) & (s_stops[s_at] >= stops) & (w_stops[w_at] >= stops)
    else:
        held = np.zeros(len(starts), dtype=bool)
    starts, stops, s_row, w_row = starts[held], stops[held], by_saved[s_at[held]], by_wanted[w_at[held]]
    order = np.argsort(w_row, kind="stable")  # rows are grouped by owner, in local order; starts ascend within a row
    starts, stops, s_row, w_row = starts[order], stops[order], s_row[order], w_row[order]
    owner = wanted.owner_of[w_row]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=wanted.owners))))
    return Segments(
        saved=saved,
        wanted=wanted,
        starts=starts,
        stops=stops,
        saved_row=s_row,
        wanted_owner=owner,
        local_starts=wanted.local_starts[w_row] + (starts - wanted.starts[w_row]),
        indptr=np.asarray(indptr, dtype=np.int64),
    )
