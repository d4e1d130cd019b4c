"""Layouts: which rank holds which elements of a tensor or of a full state, in one of three forms."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from planners.errors import CodecError, PlanError, did_you_mean
from planners.geometry.arrays import Ints, grouped, ints, ones, outer_sum, zeros
from planners.geometry.box import Box, Range, Shape, flat_boxes
from planners.geometry.mesh import Mesh, Placement, Replicate, axis_names, parse_placements
from planners.geometry.ownership import Ownership, ownership

__all__ = [
    "ITEM_SIZES", "LAYOUT_KINDS", "MALFORMED", "BoxesForm", "FlatForm", "Form", "Found", "Kind", "Part", "ProductForm",
    "ProductGeometry", "StateLayout", "TensorLayout", "TensorSpec", "check_rank", "flat_boxes", "form_from_json",
    "form_to_json", "itemsize", "local_boxes", "state_from_json", "state_to_json",
]  # fmt: skip

ITEM_SIZES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two values a byte; torch counts the pair as one element
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element, keyed by torch's name of the dtype without the `torch.` in front."""


def itemsize(dtype: str) -> int:
    """Bytes per element of `dtype`, a name such as `"bfloat16"`.

    Raises PlanError for a name that is not in `ITEM_SIZES`.
    """
    try:
        return ITEM_SIZES[dtype]
    except (KeyError, TypeError):
        near = did_you_mean(str(dtype).removeprefix("torch."), ITEM_SIZES, 0.85) or f"; known: {', '.join(ITEM_SIZES)}"
        raise PlanError(f"unknown dtype {dtype!r}{near}") from None


# The three forms of a layout: product of placements, explicit boxes, flat ranges. Each answers for
# any shape.


T = TypeVar("T")
Intervals = tuple[Range, ...]
Found = tuple[int, Box, Box]
"""The owner of a chunk, the chunk, and its overlap with the requested box."""


@dataclass(frozen=True, slots=True)
class Part:
    """One local tensor: for each dim, the global intervals of its local dim, in order.

    `flat_start` is set if the local tensor is 1-D, a piece of the row-major flattening. Then this part is the `numel`
    elements from `flat_start` of that 1-D tensor, viewed with its shape."""

    dims: tuple[Intervals, ...]
    flat_start: int | None = None

    @property
    def sizes(self) -> Shape:
        """Shape of the local tensor."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.dims)

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.sizes)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """(global box, the same in the local tensor's coordinates) of every piece, in local row-major order."""
        if any(not dim for dim in self.dims):
            return
        axes = []
        for dim in self.dims:
            at, rows = 0, []
            for start, stop in dim:
                rows.append((start, at, stop - start))
                at += stop - start
            axes.append(rows)
        for combo in itertools.product(*axes):
            sizes = tuple(size for _, _, size in combo)
            yield Box.of(tuple(g for g, _, _ in combo), sizes), Box.of(tuple(at for _, at, _ in combo), sizes)

    @classmethod
    def of_box(cls, box: Box, flat_start: int | None = None) -> Part:
        """The part that is one box."""
        return cls(tuple(((o, o + s),) if s else () for o, s in zip(box.offsets, box.sizes)), flat_start)


@dataclass(frozen=True)
class ProductGeometry:
    """A product form for one shape: the ownership of each dim, and how owners and replicas map to ranks."""

    mesh: Mesh
    dims: tuple[Ownership, ...]
    dim_positions: tuple[Ints, ...]
    """Per dim: what each owner adds to a rank's row-major position in the mesh."""
    replica_positions: Ints
    """What each replica adds to that position."""
    _lowest: dict[Shape, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def rank_owners(self) -> tuple[Ints, ...]:
        """Per dim: the owner index of every mesh position."""
        every = (*self.dim_positions, self.replica_positions)
        order = np.argsort(outer_sum(every))
        return np.unravel_index(order, [len(positions) for positions in every])[:-1]

    def owners_of(self, rank: int) -> Shape:
        """Per dim: the owner index of `rank`."""
        position = self.mesh.position(rank)
        return tuple(int(owner[position]) for owner in self.rank_owners)

    def replicas(self, owners: Sequence[int]) -> Ints:
        """The ranks that hold the part of these owners (one per dim), replica by replica."""
        base = sum(int(positions[o]) for positions, o in zip(self.dim_positions, owners))
        return ints(self.mesh.ranks[base + self.replica_positions])

    def lowest_rank(self, owners: Shape) -> int:
        """The lowest rank that holds the part of these owners."""
        found = self._lowest.get(owners)
        if found is None:
            found = self._lowest[owners] = int(self.replicas(owners).min())
        return found

    def part(self, owners: Sequence[int]) -> Part:
        """Return the local tensor of these owners."""
        return Part(tuple(own.intervals(o) for own, o in zip(self.dims, owners)))

    @cached_property
    def holding(self) -> tuple[Ints, ...]:
        """Per dim: the owners that have at least one element."""
        return tuple(np.flatnonzero(own.local_sizes) for own in self.dims)

    def distinct(self) -> Iterator[Shape]:
        """Return the owners of every distinct, non-empty part, in row-major order."""
        return itertools.product(*(owners.tolist() for owners in self.holding))

    def holders(self, owners: Iterable[Ints | slice]) -> Ints:
        """Return the ranks that hold each combination of `owners` (some of each dim), ascending, as
        one row per combination, in row-major order."""
        base = outer_sum(positions[its] for positions, its in zip(self.dim_positions, owners))
        return np.sort(self.mesh.ranks[base[:, None] + self.replica_positions], axis=1)

    def covering(self, box: Box) -> Iterator[Found]:
        """Yield the chunks that overlap `box`, found dim by dim. Chunks of a product cover it once."""
        if box.is_empty:
            return
        found = [
            zip(*(column[own.meeting(start, stop)].tolist() for column in (own.owner_of, own.starts, own.stops)))
            for own, start, stop in zip(self.dims, box.offsets, box.stops)
        ]
        for combo in itertools.product(*found):
            chunk = Box.of(tuple(start for _, start, _ in combo), tuple(stop - start for _, start, stop in combo))
            common = chunk & box
            if common is not None:
                yield self.lowest_rank(tuple(owner for owner, _, _ in combo)), chunk, common


class ProductForm:
    """A mesh and one placement per axis."""

    __slots__ = ("_hash", "mesh", "placements", "world_size")

    mesh: Mesh
    placements: tuple[Placement, ...]
    world_size: int
    """Ranks 0 to world_size - 1 may hold something."""

    def __init__(self, mesh: Mesh, placements: Sequence[Placement]) -> None:
        self.mesh, self.placements, self.world_size = mesh, tuple(placements), mesh.world_size
        if len(self.placements) != mesh.ndim:
            raise PlanError(
                f"the mesh {mesh} needs one placement for each axis, {mesh.ndim} in all, but got "
                f"{len(self.placements)}: ({', '.join(map(str, self.placements))})"
            )
        self._hash = hash((mesh, self.placements))

    @classmethod
    def make(cls, mesh: Mesh, placements: Sequence[Placement]) -> ProductForm:
        """Return the form. Callers that request equal forms share one object."""
        return _product_form(mesh, tuple(placements))

    def ranks(self) -> Sequence[int]:
        """Return the ranks that may hold something, ascending."""
        return sorted(self.mesh.ranks.tolist())

    @lru_cache(maxsize=4096)  # noqa: B019  # equal forms share what is found
    def geometry(self, shape: Shape) -> ProductGeometry:
        """Return the ownerships for a shape. Raises PlanError if the form does not fit it."""
        mesh, placements = self.mesh, self.placements
        steps = [math.prod(mesh.shape[i + 1 :]) for i in range(mesh.ndim)]
        axes_of: list[list[int]] = [[] for _ in shape]
        replicated: list[int] = []
        for axis, placement in enumerate(placements):
            if not isinstance(placement, Placement):
                raise PlanError(f"placements are those of reshard.planners, or 'S(0),R' as text, got {placement!r:.80}")
            if isinstance(placement, Replicate):
                replicated.append(axis)
            elif placement.dim < len(shape):
                axes_of[placement.dim].append(axis)
            else:
                name = mesh.names[axis]
                raise PlanError(f"{placement} on axis {name!r} shards a dim that the shape {shape} does not have")

        def positions(axes: list[int]) -> Ints:
            return outer_sum(np.arange(mesh.shape[axis]) * steps[axis] for axis in axes)

        dims = []
        for size, axes in zip(shape, axes_of):
            cuts = tuple((placements[a], mesh.shape[a]) for a in axes)
            dims.append(ownership(size, cuts))
        dim_positions = tuple(map(positions, axes_of))
        return ProductGeometry(mesh, tuple(dims), dim_positions, positions(replicated))

    check = geometry

    def parts(self, shape: Shape, rank: int) -> tuple[Part, ...]:
        """Local tensors of a rank."""
        if rank not in self.mesh:
            return ()
        geometry = self.geometry(shape)
        return (geometry.part(geometry.owners_of(rank)),)

    def numels(self, shape: Shape) -> Ints:
        """Elements per rank."""
        geometry = self.geometry(shape)
        held = ones(self.mesh.size)
        for own, owner in zip(geometry.dims, geometry.rank_owners):
            held *= own.local_sizes[owner]
        out = zeros(self.world_size)
        out[self.mesh.ranks] = held
        return out

    def chunks(self, shape: Shape) -> Iterator[tuple[int, Box]]:
        """Every distinct box once, with the lowest rank that holds it."""
        geometry = self.geometry(shape)
        for owners, rank in zip(geometry.distinct(), geometry.holders(geometry.holding)[:, 0].tolist()):
            for box, _ in geometry.part(owners).boxes():
                yield rank, box

    def replicas(self, shape: Shape) -> Iterator[Ints]:
        """Group the ranks that hold something: ranks in a group are certain to hold the same elements."""
        geometry = self.geometry(shape)
        return iter(geometry.holders(geometry.holding))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ProductForm)
            and self._hash == other._hash
            and self.placements == other.placements
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return ProductForm.make, (self.mesh, self.placements)

    def __str__(self) -> str:
        return f"{self.mesh} ({', '.join(map(str, self.placements))})"

    __repr__ = __str__


_product_form = lru_cache(maxsize=4096)(ProductForm)


class _ListedForm(ABC):
    """A form that lists what each rank holds. Its methods are those of `ProductForm`."""

    __slots__ = ()

    @abstractmethod
    def held(self, shape: Shape) -> Iterable[tuple[int, Iterable[Box]]]:
        """(rank, its boxes), by rank."""

    @abstractmethod
    def ranks(self) -> Sequence[int]: ...

    def chunks(self, shape: Shape) -> Iterator[tuple[int, Box]]:
        seen: set[Box] = set()
        for rank, its in self.held(shape):
            for box in its:
                if box not in seen and not box.is_empty:
                    seen.add(box)
                    yield rank, box

    def replicas(self, shape: Shape) -> Iterator[Ints]:
        return (ints([rank]) for rank in self.ranks())


@dataclass(frozen=True, slots=True)
class BoxesForm(_ListedForm):
    """Explicit boxes for each rank. Each box is a separate local tensor."""

    boxes: tuple[tuple[int, tuple[Box, ...]], ...]
    """(rank, its boxes), by rank."""
    world_size: int

    @classmethod
    def make(cls, boxes: Mapping[int, Iterable[Box]], world_size: int | None = None) -> BoxesForm:
        """Raises PlanError for negative ranks or ranks beyond `world_size`."""
        table = tuple(sorted((int(rank), tuple(its)) for rank, its in boxes.items()))
        return cls(table, _world_size([rank for rank, _ in table], world_size))

    def held(self, shape: Shape) -> Iterable[tuple[int, Iterable[Box]]]:
        return self.boxes

    def ranks(self) -> Sequence[int]:
        return [rank for rank, _ in self.boxes]

    def check(self, shape: Shape) -> None:
        for rank, its in self.boxes:
            for box in its:
                if box.ndim != len(shape) or not all(b <= s for b, s in zip(box.stops, shape)):
                    raise PlanError(f"a box is outside the shape {shape}", rank=rank, box=box)
            filled = sorted(box for box in its if not box.is_empty)
            for i, box in enumerate(filled):
                for other in filled[i + 1 :]:
                    if other.ndim and other.offsets[0] >= box.stops[0]:
                        break
                    common = box & other
                    if common is not None:
                        raise PlanError(
                            f"two boxes of one rank, {box} and {other}, share elements", rank=rank, box=common
                        )

    def parts(self, shape: Shape, rank: int) -> tuple[Part, ...]:
        at = bisect.bisect_left(self.boxes, rank, key=lambda row: row[0])
        if at == len(self.boxes) or self.boxes[at][0] != rank:
            return ()
        return tuple(Part.of_box(box) for box in self.boxes[at][1])

    def numels(self, shape: Shape) -> Ints:
        out = zeros(self.world_size)
        for rank, its in self.boxes:
            out[rank] = sum(box.numel for box in its)
        return out

    def __str__(self) -> str:
        return "boxes{" + "; ".join(f"{rank}: {', '.join(map(str, its))}" for rank, its in self.boxes) + "}"


@dataclass(frozen=True, slots=True)
class FlatForm(_ListedForm):
    """Each rank holds one range of the row-major flattening, as a 1-D local tensor."""

    ranges: tuple[tuple[int, int, int], ...]
    """(rank, start, stop), by rank."""
    world_size: int

    @classmethod
    def make(cls, ranges: Mapping[int, Range], world_size: int | None = None) -> FlatForm:
        """Raises PlanError for negative ranks or ranks beyond `world_size`."""
        table = tuple(sorted((int(rank), int(start), int(stop)) for rank, (start, stop) in ranges.items()))
        return cls(table, _world_size([rank for rank, _, _ in table], world_size))

    def held(self, shape: Shape) -> Iterable[tuple[int, Iterable[Box]]]:
        return ((rank, flat_boxes(shape, start, stop)) for rank, start, stop in self.ranges)

    def ranks(self) -> Sequence[int]:
        return [rank for rank, _, _ in self.ranges]

    def check(self, shape: Shape) -> None:
        numel = math.prod(shape)
        for rank, start, stop in self.ranges:
            if not 0 <= start <= stop <= numel:
                raise PlanError(f"the range {start}:{stop} is outside the {numel} elements of shape {shape}", rank=rank)

    def parts(self, shape: Shape, rank: int) -> tuple[Part, ...]:
        row = bisect.bisect_left(self.ranges, rank, key=lambda row: row[0])
        if row == len(self.ranges) or self.ranges[row][0] != rank:
            return ()
        parts, at = [], 0
        for box in flat_boxes(shape, *self.ranges[row][1:]):
            parts.append(Part.of_box(box, at))
            at += box.numel
        return tuple(parts)

    def numels(self, shape: Shape) -> Ints:
        out = zeros(self.world_size)
        for rank, start, stop in self.ranges:
            out[rank] = stop - start
        return out

    def __str__(self) -> str:
        return "flat{" + "; ".join(f"{rank}: {start}:{stop}" for rank, start, stop in self.ranges) + "}"


Form = ProductForm | BoxesForm | FlatForm
"""What the form of a layout knows, given the shape. Forms are hashable; equal forms place elements
equally."""


def local_boxes(form: Form, shape: Shape, rank: int) -> Iterator[tuple[int, Box, Box]]:
    """Yield (index of the local tensor, global box, the same box in that tensor's coordinates) for
    everything that `rank` holds."""
    for index, part in enumerate(form.parts(shape, rank) if rank < form.world_size else ()):
        for box, local in part.boxes():
            yield index, box, local


def _world_size(ranks: Sequence[int], world_size: int | None) -> int:
    least = max(ranks, default=0) + 1
    if max(least, world_size or 0) > 1 << 31:
        raise PlanError("ranks must be below 2**31", rank=least - 1)
    if ranks and min(ranks) < 0:
        raise PlanError("ranks must be >= 0", rank=min(ranks))
    if world_size is not None and world_size < least:
        raise PlanError(f"the job has only {world_size} ranks", rank=least - 1)
    return least if world_size is None else world_size


# Layouts: which rank holds which elements of a tensor, and of all tensors of a state.
#
# A `TensorLayout` has one of three forms. `ProductForm` is the usual one: a mesh and one placement
# per axis. The other two hold what is no product: explicit boxes, and flat ranges over the row-
# major flattening. A form answers for a shape; the layout adds the tensor's name and dtype.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, global shape, and dtype (by name, such as "bfloat16") of a tensor."""

    fqn: str
    shape: Shape
    dtype: str
    itemsize: int = field(init=False, repr=False, compare=False)
    """Bytes per element."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Size of the full tensor in bytes."""

    def __init__(self, fqn: str, shape: Sequence[int], dtype: str) -> None:
        """Raises PlanError for a name that is not a string, a negative size, or an unknown dtype."""
        if not isinstance(fqn, str):
            raise PlanError(f"the name of a tensor must be a string, got {fqn!r}")
        try:
            sizes = _sizes(tuple(shape), dtype)
        except (PlanError, TypeError) as error:
            raise PlanError(str(error), fqn=fqn) from None
        for put, value in zip(_SPEC_SLOTS, (fqn, *sizes)):
            put(self, value)


_SPEC_SLOTS = [vars(TensorSpec)[name].__set__ for name in TensorSpec.__slots__]  # faster than object.__setattr__


@lru_cache(maxsize=4096)  # a state has few shapes
def _sizes(shape: Shape, dtype: str) -> tuple[Shape, str, int, int, int]:
    shape = tuple(map(operator.index, shape))
    if shape and min(shape) < 0:
        raise PlanError(f"sizes must be >= 0, got shape {shape}")
    if len(shape) > 63:  # numpy has 64 dims, and plans need one of them
        raise PlanError(f"a tensor can have at most 63 dims, got {len(shape)}")
    each, numel = itemsize(dtype), math.prod(shape)
    if max((numel * each, *shape)) >= 1 << 63:
        raise PlanError(f"a tensor must have fewer than 2**63 bytes, got shape {shape}")
    return shape, dtype, each, numel, numel * each


class TensorLayout:
    """Which elements of one tensor each rank holds. Immutable. Layouts are equal if spec and form are.

    >>> TensorLayout(TensorSpec("w", (8, 4), "float32"), Mesh({"dp": 2}), [Shard(0)]).boxes(1)
    (Box[4:8, 0:4],)
    """

    __slots__ = ("form", "spec")

    spec: TensorSpec
    form: Form

    def __init__(self, spec: TensorSpec, mesh: Mesh | str, placements: Sequence[Placement] | str) -> None:
        """Create a layout from a mesh and one placement per axis. Placements may be given as text.

        Raises PlanError, which names the tensor, if the numbers differ, if a placement names a dim that the tensor does
        not have, or if blocks do not add up."""
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        given = parse_placements(placements) if isinstance(placements, str) else tuple(placements)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "form", self.of(spec, ProductForm.make(mesh, given)).form)

    @classmethod
    def of(cls, spec: TensorSpec, form: Form) -> TensorLayout:
        """Return the layout of `spec` in an existing form, which several tensors may share."""
        try:
            form.check(spec.shape)
        except PlanError as error:
            raise PlanError(str(error), fqn=spec.fqn) from None
        layout = object.__new__(cls)
        _put_spec(layout, spec)
        _put_form(layout, form)
        return layout

    def named(self, axes: Mapping[tuple[int, int], str]) -> TensorLayout:
        """Return the same layout on `Mesh.named(axes)`."""
        form = self.form
        named = ProductForm.make(form.mesh.named(axes), form.placements) if isinstance(form, ProductForm) else form
        return TensorLayout.of(self.spec, named)

    @classmethod
    def from_boxes(
        cls, spec: TensorSpec, boxes: Mapping[int, Iterable[Box]], world_size: int | None = None
    ) -> TensorLayout:
        """Return a layout of explicit boxes per rank. Each box is a separate local tensor, in the given order.

        Raises PlanError for a box outside the tensor, or two boxes of one rank that share an element."""
        return cls.of(spec, BoxesForm.make(boxes, world_size))

    @classmethod
    def from_flat_ranges(
        cls, spec: TensorSpec, ranges: Mapping[int, Range], world_size: int | None = None
    ) -> TensorLayout:
        """Return a layout in which each rank holds elements `[start, stop)` of the flattened tensor, as one 1-D tensor.

        Raises PlanError for a range outside the tensor."""
        return cls.of(spec, FlatForm.make(ranges, world_size))

    @property
    def fqn(self) -> str:
        """Name of the tensor."""
        return self.spec.fqn

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of a product layout, otherwise None."""
        return self.form.mesh if isinstance(self.form, ProductForm) else None

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """The placements of a product layout, otherwise None."""
        return self.form.placements if isinstance(self.form, ProductForm) else None

    @property
    def product(self) -> ProductGeometry | None:
        """The per-dim ownerships of a product layout, otherwise None."""
        return self.form.geometry(self.spec.shape) if isinstance(self.form, ProductForm) else None

    @property
    def world_size(self) -> int:
        """The smallest world size that contains this layout."""
        return self.form.world_size

    @property
    def geometry_key(self) -> tuple[object, ...]:
        """Everything that plans depend on. Layouts with equal keys have equal plans, regardless of the names
        of their tensors."""
        return self.spec.shape, self.spec.itemsize, self.form

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Return the local tensors of `rank`, each a product of global intervals; () if it has none.

        Raises PlanError for a rank outside the job.
        """
        check_rank(rank, self.world_size, self.fqn)
        return self.form.parts(self.spec.shape, rank)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that `rank` holds, in global coordinates and local order. () if it holds none."""
        return tuple(box for part in self.parts(rank) for box, _ in part.boxes())

    def numel(self, rank: int) -> int:
        """Return the number of elements that `rank` holds."""
        return sum(part.numel for part in self.parts(rank))

    def nbytes(self, rank: int) -> int:
        """Return the number of bytes that `rank` holds."""
        return self.numel(rank) * self.spec.itemsize

    def numels(self) -> Ints:
        """Return the number of elements that each rank holds, for ranks 0 to `world_size` - 1."""
        return self.form.numels(self.spec.shape)

    def chunks(self) -> Iterator[tuple[int, Box]]:
        """Return every distinct box once, with the lowest rank that holds it."""
        return self.form.chunks(self.spec.shape)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a TensorLayout is frozen: make a new one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLayout) and self.spec == other.spec and self.form == other.form

    def __hash__(self) -> int:
        return hash((self.spec, self.form))

    def __reduce__(self) -> tuple[object, ...]:
        return TensorLayout.of, (self.spec, self.form)

    def __repr__(self) -> str:
        return f"TensorLayout({self.spec.fqn!r}, {self.spec.shape}, {self.spec.dtype}, {self.form})"


_put_spec, _put_form = (vars(TensorLayout)[name].__set__ for name in ("spec", "form"))


def check_rank(rank: int, world_size: int, fqn: str | None = None) -> None:
    """Raises PlanError for a rank that is not below `world_size`."""
    if not 0 <= rank < world_size:
        raise PlanError(f"there are only ranks 0 to {world_size - 1}", fqn=fqn, rank=rank)


class StateLayout(Mapping[str, TensorLayout]):
    """The layouts of all tensors of a state, by FQN. Immutable.

    `world_size` is the number of ranks of the job; None takes the smallest that contains all tensors."""

    __slots__ = ("_tensors", "nbytes", "world_size")

    nbytes: int
    """Bytes of all tensors, each counted once."""
    world_size: int
    """Number of ranks of the job."""

    def __init__(self, tensors: Mapping[str, TensorLayout], world_size: int | None = None) -> None:
        """Raises PlanError for a key that is not its tensor's name, for 2**63 bytes or more, or for too few ranks."""
        self._tensors, self.nbytes = dict(tensors), 0
        for fqn, layout in self._tensors.items():
            if layout.spec.fqn != fqn:
                raise PlanError(f"the layout under the key {fqn!r} is of the tensor {layout.spec.fqn!r}")
            self.nbytes += layout.spec.nbytes
        if self.nbytes >> 63:
            raise PlanError(f"a state must have fewer than 2**63 bytes, got {self.nbytes:,}")
        forms = {id(layout.form): layout.form for layout in self._tensors.values()}
        least = max((form.world_size for form in forms.values()), default=1)
        if world_size is not None and world_size < least:
            raise PlanError(f"the tensors need {least} ranks, but world_size is {world_size}")
        self.world_size = least if world_size is None else world_size

    def __getitem__(self, fqn: str) -> TensorLayout:
        return self._tensors[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Name, shape, and dtype of every tensor."""
        return {fqn: layout.spec for fqn, layout in self._tensors.items()}

    def parts(self, fqn: str, rank: int) -> tuple[Part, ...]:
        """Like `TensorLayout.parts`, but () for ranks of the job beyond this tensor's own."""
        layout = self._tensors[fqn]
        check_rank(rank, self.world_size, fqn)
        return layout.form.parts(layout.spec.shape, rank) if rank < layout.world_size else ()

    def geometries(self) -> dict[tuple[object, ...], list[str]]:
        """Return FQNs grouped by `TensorLayout.geometry_key`, in sorted order. Each group can share one plan."""
        return grouped((self._tensors[fqn].geometry_key, fqn) for fqn in sorted(self._tensors))

    def described(self, fqns: Iterable[str], describe: Callable[[TensorLayout], T]) -> dict[str, T]:
        """Return the result of `describe` for each FQN. It is called once per group of tensors of equal geometry, with
        axes as `Mesh.named` names them."""
        axes = axis_names((layout.mesh for layout in self._tensors.values()), self.world_size)
        texts: dict[object, T] = {}
        for layout in (chosen := {fqn: self._tensors[fqn] for fqn in fqns}).values():
            if layout.geometry_key not in texts:
                texts[layout.geometry_key] = describe(layout.named(axes))
        return {fqn: texts[layout.geometry_key] for fqn, layout in chosen.items()}

    def unsharded_axes(self) -> dict[str, tuple[str, ...]]:
        """Return the axes that shard no tensor, each with the names of the tensors that are replicated over it."""
        copied: dict[str, list[str]] = {}
        cutting: set[str] = set()
        for fqn, layout in self._tensors.items():
            for (name, size), placement in zip(layout.mesh.axes if layout.mesh else (), layout.placements or ()):
                if isinstance(placement, Replicate):
                    if size > 1:
                        copied.setdefault(name, []).append(fqn)
                else:
                    cutting.update(name.split("."))  # axes that act as one
        return {name: tuple(fqns) for name, fqns in copied.items() if not cutting.issuperset(name.split("."))}

    uncut_axes = unsharded_axes  # its old name

    def rank_bytes(self) -> Ints:
        """Return the bytes that each rank holds, without listing tensors one by one."""
        total = zeros(self.world_size)
        for names in self.geometries().values():
            layout = self._tensors[names[0]]
            held = layout.numels()
            total[: len(held)] += held * (layout.spec.itemsize * len(names))
        return total

    def digest(self) -> str:
        """Return a short text that is equal for equal layouts, in any order of the tensors."""
        hasher = hashlib.sha256(str(self.world_size).encode())
        texts: dict[int, bytes] = {}
        for fqn in sorted(self._tensors):
            layout = self._tensors[fqn]
            if id(layout.form) not in texts:  # that of many ranks is long
                texts[id(layout.form)] = str(layout.form).encode()
            name = fqn.encode(errors="surrogatepass")
            for text in (name, str(layout.spec.shape).encode(), layout.spec.dtype.encode(), texts[id(layout.form)]):
                hasher.update(len(text).to_bytes(8, "little") + text)
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StateLayout):
            return NotImplemented
        return self.world_size == other.world_size and self._tensors == other._tensors

    __hash__ = None  # type: ignore[assignment]  # a mapping of many tensors; use digest()

    def __repr__(self) -> str:
        return f"StateLayout(tensors={len(self)}, bytes={self.nbytes}, world_size={self.world_size})"


# Meshes and layouts as plain data: for checkpoint manifests and for messages between ranks.


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of a type become plain data, and the reverse."""

    type: type
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Mapping[str, Any]], Any]


def form_to_json(form: Form) -> dict[str, Any]:
    """Return a form as plain data."""
    if isinstance(form, ProductForm):
        return {"mesh": str(form.mesh), "placements": ",".join(map(str, form.placements))}
    if isinstance(form, BoxesForm):
        rows = [[rank, [[list(box.offsets), list(box.sizes)] for box in its]] for rank, its in form.boxes]
        return {"boxes": rows, "world_size": form.world_size}
    return {"flat": [list(row) for row in form.ranges], "world_size": form.world_size}


def form_from_json(data: Mapping[str, Any]) -> Form:
    """Inverse of `form_to_json`. Raises PlanError, or any error from reading plain data, for other input."""
    if "mesh" in data:
        return ProductForm.make(Mesh.parse(data["mesh"]), parse_placements(data["placements"]))
    if "boxes" in data:
        return BoxesForm.make({rank: [Box(*box) for box in its] for rank, its in data["boxes"]}, data["world_size"])
    return FlatForm.make({rank: (start, stop) for rank, start, stop in data["flat"]}, data["world_size"])


def state_to_json(state: StateLayout) -> dict[str, Any]:
    """Return a state layout as plain data. Forms that tensors share are written once."""
    forms: dict[Form, int] = {}
    tensors = {
        fqn: [layout.spec.dtype, list(layout.spec.shape), forms.setdefault(layout.form, len(forms))]
        for fqn, layout in state.items()
    }
    return {"world_size": state.world_size, "forms": [form_to_json(form) for form in forms], "tensors": tensors}


MALFORMED = KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError
"""Errors that plain data raises if it does not come from a layout or a plan."""


def state_from_json(data: Mapping[str, Any]) -> StateLayout:
    """Inverse of `state_to_json`. Raises CodecError for other input."""
    try:
        forms = [form_from_json(form) for form in data["forms"]]
        tensors = {}
        for fqn, (dtype, shape, form) in data["tensors"].items():
            if not 0 <= form < len(forms):
                raise CodecError(f"form {form} of {len(forms)} does not exist", fqn=fqn)
            tensors[fqn] = TensorLayout.of(TensorSpec(fqn, shape, dtype), forms[form])
        return StateLayout(tensors, data["world_size"])
    except MALFORMED as error:
        raise CodecError(f"this layout is malformed or was edited: {error}") from error


def _tensor(data: Mapping[str, Any]) -> TensorLayout:
    return TensorLayout.of(TensorSpec(data["fqn"], data["shape"], data["dtype"]), form_from_json(data["form"]))


LAYOUT_KINDS: dict[str, Kind] = {
    "mesh": Kind(Mesh, lambda m: {"mesh": str(m)}, lambda d: Mesh.parse(d["mesh"])),
    "tensor_layout": Kind(
        TensorLayout,
        lambda t: {"fqn": t.fqn, "shape": list(t.spec.shape), "dtype": t.spec.dtype, "form": form_to_json(t.form)},
        _tensor,
    ),
    "state_layout": Kind(StateLayout, state_to_json, state_from_json),
}
"""Kinds of values, by the name in their text."""
