"""Layouts: which rank holds which elements of a tensor, and of a whole state.

A `TensorLayout` has one of three forms. `ProductForm` is the usual one: a mesh and one placement per axis. The
other two hold what is no product: explicit boxes, and flat ranges over the row-major flattening.
A form answers for a shape; the layout adds the tensor's name and dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.dtypes import itemsize
from planners.geometry.layout_forms import BoxesForm, FlatForm, Form, Part, ProductForm, ProductGeometry
from planners.geometry.mesh import Mesh
from planners.geometry.ownership import Ints
from planners.geometry.placement import Placement, Replicate, parse_placements

__all__ = ["StateLayout", "TensorLayout", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, global shape and dtype (by name, such as "bfloat16") of a tensor."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str

    def __init__(self, fqn: str, shape: Sequence[int], dtype: str) -> None:
        """Raises PlanError for a name that is no text, a negative size or an unknown dtype."""
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(fqn, str):
            raise PlanError(f"the name of a tensor must be text, got {fqn!r}")
        if self.shape and min(self.shape) < 0:
            raise PlanError(f"sizes must be >= 0, got shape {self.shape}", fqn=fqn)
        itemsize(dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


class TensorLayout:
    """Where the elements of one tensor live, for every rank. Frozen; equal if spec and form are equal.

    >>> TensorLayout(TensorSpec("w", (8, 4), "float32"), Mesh({"dp": 2}), [Shard(0)]).boxes(1)
    (Box[4:8, 0:4],)
    """

    __slots__ = ("form", "spec")

    spec: TensorSpec
    form: Form

    def __init__(self, spec: TensorSpec, mesh: Mesh | str, placements: Sequence[Placement] | str) -> None:
        """The product form. `placements` has one entry per mesh axis; text forms are parsed.

        Raises PlanError if the numbers differ, if a placement names a dim that the tensor does not have, or if
        blocks do not add up; the error names the tensor.
        """
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        given = parse_placements(placements) if isinstance(placements, str) else tuple(placements)
        self._set(spec, ProductForm.make(mesh, given))

    @classmethod
    def of(cls, spec: TensorSpec, form: Form) -> TensorLayout:
        """The layout of `spec` in a form made before, which several tensors may share."""
        layout = object.__new__(cls)
        layout._set(spec, form)
        return layout

    @classmethod
    def from_boxes(
        cls, spec: TensorSpec, boxes: Mapping[int, Iterable[Box]], world_size: int | None = None
    ) -> TensorLayout:
        """Explicit boxes per rank; each is a local tensor of its own, in the order given.

        Raises PlanError for a box outside the tensor, or two boxes of one rank that share an element.
        """
        return cls.of(spec, BoxesForm.make(boxes, world_size))

    @classmethod
    def from_flat_ranges(
        cls, spec: TensorSpec, ranges: Mapping[int, tuple[int, int]], world_size: int | None = None
    ) -> TensorLayout:
        """Each rank holds elements `[start, stop)` of the row-major flattening, as one 1-D local tensor.

        Raises PlanError for a range outside the tensor.
        """
        return cls.of(spec, FlatForm.make(ranges, world_size))

    def _set(self, spec: TensorSpec, form: Form) -> None:
        try:
            form.check(spec.shape)
        except PlanError as error:
            raise PlanError(str(error), fqn=spec.fqn) from None
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "form", form)

    @property
    def fqn(self) -> str:
        """The tensor's name."""
        return self.spec.fqn

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of a product layout, else None."""
        return self.form.mesh if isinstance(self.form, ProductForm) else None

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """The placements of a product layout, else None."""
        return self.form.placements if isinstance(self.form, ProductForm) else None

    @property
    def product(self) -> ProductGeometry | None:
        """The per-dim ownerships of a product layout, else None."""
        return self.form.geometry(self.spec.shape) if isinstance(self.form, ProductForm) else None

    @property
    def world_size(self) -> int:
        """The smallest number of ranks of a job that holds this layout."""
        return self.form.world_size

    @property
    def geometry_key(self) -> tuple[object, ...]:
        """All that plans depend on: layouts with equal keys have equal plans, whatever their tensors are called."""
        return self.spec.shape, self.spec.itemsize, self.form

    def parts(self, rank: int) -> tuple[Part, ...]:
        """The local tensors of `rank`, each a product of global intervals; () where it holds none.

        Raises PlanError for a rank outside the job.
        """
        self._check_rank(rank)
        return self.form.parts(self.spec.shape, rank)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The regions that `rank` holds, in global coordinates and in local order; () where it holds no element."""
        return tuple(box for part in self.parts(rank) for box, _ in part.boxes())

    def numel(self, rank: int) -> int:
        """Elements that `rank` holds."""
        return sum(part.numel for part in self.parts(rank))

    def nbytes(self, rank: int) -> int:
        """Bytes that `rank` holds."""
        return self.numel(rank) * self.spec.itemsize

    def numels(self) -> Ints:
        """Elements that each rank holds, for ranks 0 to `world_size` - 1."""
        return self.form.numels(self.spec.shape)

    def chunks(self) -> Iterator[tuple[int, Box]]:
        """Every distinct region once, with the lowest rank that holds it."""
        return self.form.chunks(self.spec.shape)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", fqn=self.fqn, rank=rank)

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


class StateLayout(Mapping[str, TensorLayout]):
    """The layouts of all tensors of a state, by FQN. Frozen.

    `world_size` is the number of ranks of the job; None takes the smallest that all tensors fit in.
    """

    __slots__ = ("_tensors", "_world_size")

    def __init__(self, tensors: Mapping[str, TensorLayout], world_size: int | None = None) -> None:
        """Raises PlanError if a key differs from its tensor's name or `world_size` is too small."""
        self._tensors = dict(tensors)
        least = 1
        seen: set[int] = set()
        for fqn, layout in self._tensors.items():
            if layout.spec.fqn != fqn:
                raise PlanError(f"the layout under the key {fqn!r} is of the tensor {layout.spec.fqn!r}")
            if id(layout.form) not in seen:
                seen.add(id(layout.form))
                least = max(least, layout.form.world_size)
        if world_size is not None and world_size < least:
            raise PlanError(f"the tensors live on {least} ranks, but world_size is {world_size}")
        self._world_size = least if world_size is None else world_size

    def __getitem__(self, fqn: str) -> TensorLayout:
        return self._tensors[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self._world_size

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Name, shape and dtype of every tensor."""
        return {fqn: layout.spec for fqn, layout in self._tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(layout.spec.nbytes for layout in self._tensors.values())

    def parts(self, fqn: str, rank: int) -> tuple[Part, ...]:
        """Like `TensorLayout.parts`, but () for ranks of the job that are beyond this tensor's own."""
        layout = self._tensors[fqn]
        if not 0 <= rank < self._world_size:
            raise PlanError(f"there are ranks 0 to {self._world_size - 1} only", fqn=fqn, rank=rank)
        return layout.form.parts(layout.spec.shape, rank) if rank < layout.world_size else ()

    def geometries(self) -> dict[tuple[object, ...], list[str]]:
        """FQNs grouped by `TensorLayout.geometry_key`, names sorted: what can share one plan."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for fqn in sorted(self._tensors):
            groups.setdefault(self._tensors[fqn].geometry_key, []).append(fqn)
        return groups

    def uncut_axes(self) -> dict[str, tuple[str, ...]]:
        """Axes of more than one rank that cut no tensor, each with the names of those that are copied along it."""
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

    def rank_bytes(self) -> Ints:
        """Bytes that each rank holds, without enumerating tensors one by one."""
        total = np.zeros(self._world_size, dtype=np.int64)
        for names in self.geometries().values():
            layout = self._tensors[names[0]]
            held = layout.numels()
            total[: len(held)] += held * (layout.spec.itemsize * len(names))
        return total

    def digest(self) -> str:
        """A short text that is equal for equal layouts, whatever the order of the tensors; for ranks to agree on."""
        hasher = hashlib.sha256(str(self._world_size).encode())
        forms: dict[int, bytes] = {}
        for fqn in sorted(self._tensors):
            layout = self._tensors[fqn]
            form = forms.setdefault(id(layout.form), str(layout.form).encode())
            for text in (fqn.encode(), str(layout.spec.shape).encode(), layout.spec.dtype.encode(), form):
                hasher.update(len(text).to_bytes(8, "little") + text)
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StateLayout):
            return NotImplemented
        return self._world_size == other._world_size and self._tensors == other._tensors

    __hash__ = None  # type: ignore[assignment]  # a mapping of many tensors; use digest()

    def __repr__(self) -> str:
        return f"StateLayout({len(self)} tensors, {self.nbytes} bytes, world_size={self.world_size})"
