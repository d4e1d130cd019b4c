"""Views: tensors composed of boxes of other tensors, and layouts seen through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Array
from planners.geometry.box import Box, Dims, Range, Shape, arrange, rearranged
from planners.geometry.layout import BoxesForm, Form, ProductForm, TensorSpec
from planners.geometry.mesh import Placement, Replicate
from planners.geometry.overlap import FilledSlot, Origin, Overlap, Piece, Sweep, chunks_of, tiling_fault


@dataclass(frozen=True, slots=True)
class Patch:
    """The box `target` of the composed tensor is the box `source` of source number `tensor`."""

    target: Box
    tensor: int
    source: Box
    dims: Dims

    def __post_init__(self) -> None:
        sizes = rearranged(self.source, self.dims).sizes
        if sizes != self.target.sizes:
            raise PlanError(f"{self.source} with dims {self.dims} has sizes {sizes}, and does not fill {self.target}")

    @property
    def back(self) -> Dims:
        """Per dim of the source, the dim of the target that follows it, or None for a dim of size 1 that it lacks."""
        return tuple(self.dims.index(d) if d in self.dims else None for d in range(self.source.ndim))

    def to_source(self, box: Box) -> Box:
        """Return a box within `target` in the coordinates of the source."""
        return _carried(box, self.target, self.source, self.dims)

    def to_target(self, box: Box) -> Box:
        """Return a box within `source` in the coordinates of the target. Inverse of `to_source`."""
        return _carried(box, self.source, self.target, self.back)

    def crop(self, box: Box) -> Patch:
        """Return the part within `box`, in the same coordinates. `target` contains `box`."""
        return replace(self, target=box, source=self.to_source(box))

    def move(self, by: Sequence[int]) -> Patch:
        """Return the patch, moved in the target."""
        return replace(self, target=self.target.shift(by))

    def rearrange(self, dims: Dims) -> Patch:
        """Return the patch with the dims of the target rearranged."""
        followed = tuple(None if d is None else self.dims[d] for d in dims)
        return Patch(rearranged(self.target, dims), self.tensor, self.source, followed)

    def inverse(self, tensor: int) -> Patch:
        """Return the patch of the inverse view, in which the target is source number `tensor`."""
        return Patch(self.source, tensor, self.target, self.back)


def _carried(box: Box, outer: Box, there: Box, dims: Dims) -> Box:
    """Return a box within `outer` in the coordinates of `there`, whose dim `dims[i]` follows dim i
    of `outer`."""
    offsets, sizes = list(there.offsets), list(there.sizes)
    for i, d in enumerate(dims):
        if d is not None:
            offsets[d] += box.offsets[i] - outer.offsets[i]
            sizes[d] = box.sizes[i]
    return Box.of(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Fill:
    """The box `target` of the composed tensor has the same `value` everywhere."""

    target: Box
    value: float = 0

    def crop(self, box: Box) -> Fill:
        """Return the part within `box`, which `target` contains."""
        return Fill(box, self.value)

    def move(self, by: Sequence[int]) -> Fill:
        """Return the fill, moved in the target."""
        return Fill(self.target.shift(by), self.value)

    def rearrange(self, dims: Dims) -> Fill:
        """Return the fill with the dims rearranged."""
        return Fill(rearranged(self.target, dims), self.value)


@dataclass(frozen=True)
class ViewGeometry:
    """A view without names. Equal geometries map elements equally. The hash is computed once,
    because there may be many patches."""

    shape: Shape
    source_shapes: tuple[Shape, ...]
    patches: tuple[Patch, ...]
    fills: tuple[Fill, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.source_shapes, self.patches, self.fills))

    def __hash__(self) -> int:
        return self._hash


def merged(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """Return the same map in fewer patches, in order of their targets: without empty ones, and with
    neighbors joined that are adjacent in both target and source."""
    found = [_named(patch) for patch in patches if not patch.target.is_empty]
    ndim = found[0].target.ndim if found else 0
    for dim in reversed(range(ndim)):
        found.sort(key=lambda p: (p.target.offsets[:dim], p.target.offsets[dim + 1 :], p.target.offsets[dim]))
        out: list[Patch] = []
        for patch in found:
            if out and _continues(out[-1], patch, dim):
                out[-1] = replace(
                    patch,
                    target=_joined_along(dim, out[-1].target, patch.target),
                    source=_joined_along(_followed(patch, dim), out[-1].source, patch.source),
                )
            else:
                out.append(patch)
        found = out
    return tuple(sorted(found, key=lambda p: p.target))


def _named(patch: Patch) -> Patch:
    """Return the same patch, but let new dims follow source dims that were omitted, as long as
    there are any. All of them have size 1."""
    if None not in patch.dims:
        return patch
    left = (d for d in range(patch.source.ndim) if d not in patch.dims)
    return replace(patch, dims=tuple(next(left, None) if d is None else d for d in patch.dims))


def _joined_along(dim: int, left: Box, right: Box) -> Box:
    return left.cut(dim, left.offsets[dim], right.stops[dim])


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


# `View`: a tensor composed of boxes of other tensors: renamed, split, joined, transposed,
# padded.
#
# A view is a set of patches. Each says that a box of the target is a box of a source, with its dims
# in another order, new dims of size 1 or dims of size 1 omitted. A fill says that a box of the
# target is a constant. Views are built like arrays and nest like functions:
#
#     q, k, v = (View.of(spec) for spec in (q_spec, k_spec, v_spec))
#     fused = concat("wqkv", [q, k, v])
#     inverse([fused])            # wq, wk and wv as views of wqkv
#
# A plan translates views to bytes: no rank ever holds the full tensors.


@dataclass(frozen=True)
class View:
    """How to compose each element of the tensor `spec` from source tensors. Patches and fills cover it exactly once."""

    spec: TensorSpec
    """FQN, shape, and dtype of the composed tensor."""
    sources: tuple[TensorSpec, ...]
    """The source tensors, each once. All have the same dtype."""
    patches: tuple[Patch, ...]
    """Boxes that come from sources."""
    fills: tuple[Fill, ...] = ()
    """Boxes that have a constant value."""

    def __post_init__(self) -> None:
        """Raises PlanError if a part is outside its tensor, or if the parts do not add up to the target."""
        spec = self.spec
        for source in self.sources:
            if source.dtype != spec.dtype:
                raise PlanError(f"a view of dtype {spec.dtype} cannot take from {source.fqn!r} of {source.dtype}")
        if len({source.fqn for source in self.sources}) != len(self.sources):
            raise PlanError(f"two sources of a view have the same name: {[s.fqn for s in self.sources]}", fqn=spec.fqn)
        full = [Box.full(source.shape) for source in self.sources]
        for patch in self.patches:
            if not 0 <= patch.tensor < len(full):
                raise PlanError(f"a view of {len(full)} sources has no source {patch.tensor}", fqn=spec.fqn)
            if not full[patch.tensor].contains(patch.source):
                name, shape = self.sources[patch.tensor].fqn, self.sources[patch.tensor].shape
                raise PlanError(f"{patch.source} is outside {name!r} of shape {shape}", fqn=spec.fqn)
        targets = [part.target for part in self.parts]
        if any(box.ndim != len(spec.shape) for box in targets):
            raise PlanError(f"the parts of a view must have the {len(spec.shape)} dims of its target", fqn=spec.fqn)
        fault = tiling_fault([Box.full(spec.shape)], targets)
        if fault is not None:
            raise PlanError(f"the parts of a view do not add up to {spec.shape}: {fault}", fqn=spec.fqn)

    @classmethod
    def of(cls, spec: TensorSpec) -> View:
        """Return a view that is the tensor itself, unchanged."""
        box = Box.full(spec.shape)
        return cls(spec, (spec,), (Patch(box, 0, box, tuple(range(box.ndim))),))

    @classmethod
    def full(cls, spec: TensorSpec, value: float = 0) -> View:
        """Return a tensor with one constant value."""
        return cls(spec, (), (), (Fill(Box.full(spec.shape), value),))

    @property
    def parts(self) -> tuple[Patch | Fill, ...]:
        """Patches, then fills."""
        return (*self.patches, *self.fills)

    @property
    def shape(self) -> Shape:
        """Shape of the composed tensor."""
        return self.spec.shape

    @cached_property
    def geometry(self) -> ViewGeometry:
        """The view without names. Views with equal geometry map elements in the same way."""
        return ViewGeometry(self.shape, tuple(source.shape for source in self.sources), self.patches, self.fills)

    def overlap(self, saved: Sequence[Form], wanted: Form) -> ViewOverlap:
        """Return the boxes that ranks take from sources with the layouts `saved`, if they want the
        composed tensor in the layout `wanted`."""
        return _overlap_of(self.geometry, tuple(saved), wanted)

    def rename(self, fqn: str) -> View:
        """Return the same view with another FQN."""
        return View(TensorSpec(fqn, self.shape, self.spec.dtype), self.sources, self.patches, self.fills)

    def crop(self, box: Box) -> View:
        """Return the elements in `box` as a new tensor. Raises PlanError if the box is outside."""
        if not Box.full(self.shape).contains(box):
            raise self._error(f"cannot crop a view of shape {self.shape} to {box}")
        back = [-o for o in box.offsets]
        kept = [(part, part.target & box) for part in self.parts]
        return self._made(box.sizes, [part.crop(common).move(back) for part, common in kept if common is not None])

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> View:
        """Slice the view. Slices have step 1, as in numpy; an integer selects one index and drops the dim."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise self._error(f"{len(parts)} indices for a view of shape {self.shape}")
        offsets, sizes, kept = [], [], []
        for d, size in enumerate(self.shape):
            part = parts[d] if d < len(parts) else slice(None)
            if not isinstance(part, slice):
                if not hasattr(part, "__index__"):
                    raise self._error(f"a view takes integers and slices, got {part!r}")
                if not -size <= part < size:
                    raise self._error(f"index {part} is outside dim {d} of size {size}")
                start, stop = part % size, part % size + 1
            else:
                kept.append(d)
                start, stop, step = part.indices(size)
                if step != 1:
                    raise self._error(f"slices of a view must have step 1, got {part}")
            offsets.append(start)
            sizes.append(max(stop - start, 0))
        return self.crop(Box(offsets, sizes)).rearrange(kept)

    def rearrange(self, dims: Sequence[int | None]) -> View:
        """Return the view with dim `dims[i]` as new dim i, or a new dim of size 1 for None. Dims of
        size 1 may be omitted.

        Raises PlanError if a dim is named twice, or if one of another size is omitted.
        """
        order = tuple(dims)
        full = rearranged(Box.full(self.shape), order, self.spec.fqn)
        return self._made(full.sizes, [part.rearrange(order) for part in self.parts])

    def transpose(self, *dims: int) -> View:
        """Return the dims in the order `dims`. Default: reversed."""
        order = dims or tuple(reversed(range(len(self.shape))))
        if sorted(order) != list(range(len(self.shape))):
            raise self._error(f"{order} is not an order of the dims of shape {self.shape}")
        return self.rearrange(order)

    def pad(self, widths: Sequence[tuple[int, int]], value: float = 0) -> View:
        """Add `widths[d][0]` constant elements before and `widths[d][1]` after, in each dim d."""
        if len(widths) != len(self.shape):
            raise self._error(f"pad takes a pair per dim of {self.shape}, got {list(widths)}")
        if any(low < 0 or high < 0 for low, high in widths):
            raise self._error(f"pad widths must be >= 0, got {list(widths)}; crop takes away")
        inner = Box([low for low, _ in widths], self.shape)
        sizes = [low + size + high for (low, high), size in zip(widths, self.shape)]
        parts = [part.move(inner.offsets) for part in self.parts]
        return self._made(sizes, [*parts, *(Fill(box, value) for box in Box.full(sizes) - inner)])

    def split(self, sizes: Mapping[str, int], dim: int = 0) -> tuple[View, ...]:
        """Split `dim` into consecutive pieces, by name. Raises PlanError if the sizes do not add up to the dim."""
        self._check_dim(dim)
        if sum(sizes.values()) != self.shape[dim]:
            raise self._error(
                f"{dict(sizes)} add up to {sum(sizes.values())}, but dim {dim} has {self.shape[dim]} elements"
            )
        out, at = [], 0
        for fqn, size in sizes.items():
            out.append(self._along(dim, at, at + size).rename(fqn))
            at += size
        return tuple(out)

    def unstack(self, names: Sequence[str], dim: int = 0) -> tuple[View, ...]:
        """Split `dim` into tensors without that dim, one per index. Raises PlanError for a wrong number of names."""
        self._check_dim(dim)
        if len(names) != self.shape[dim]:
            raise self._error(f"{len(names)} names for the {self.shape[dim]} elements of dim {dim}")
        rest = [d for d in range(len(self.shape)) if d != dim]
        return tuple(self._along(dim, i, i + 1).rearrange(rest).rename(name) for i, name in enumerate(names))

    def reorder(self, intervals: Iterable[Range], dim: int = 0) -> View:
        """Concatenate the intervals (start, stop) of `dim`."""
        self._check_dim(dim)
        return concat(self.spec.fqn, [self._along(dim, start, stop) for start, stop in intervals], dim)

    def split_dim(self, sizes: tuple[int, int], dim: int = 0) -> View:
        """Reshape `dim` to two dims of these sizes, row-major. Raises PlanError unless they multiply to its size."""
        self._check_dim(dim)
        outer, inner = sizes
        if outer * inner != self.shape[dim]:
            raise self._error(f"dim {dim} of size {self.shape[dim]} cannot become {outer} x {inner}")
        if not outer:
            return self._made((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), [])
        return stack(self.spec.fqn, [self._along(dim, i * inner, (i + 1) * inner) for i in range(outer)], dim)

    def merge_dims(self, dim: int = 0) -> View:
        """Reshape dims `dim` and `dim + 1` to one, row-major. Inverse of `split_dim`."""
        self._check_dim(dim)
        self._check_dim(dim + 1)
        rest = [d for d in range(len(self.shape)) if d != dim]
        if not self.shape[dim]:
            return self._made((*self.shape[:dim], 0, *self.shape[dim + 2 :]), [])
        rows = [self._along(dim, i, i + 1).rearrange(rest) for i in range(self.shape[dim])]
        return concat(self.spec.fqn, rows, dim)

    def halves_from_pairs(self, head_size: int, dim: int = 0) -> View:
        """Reorder the rotary rows of each head from pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...)."""
        heads = self._heads(head_size, dim)
        return self.reorder([(h + i, h + i + 1) for h in heads for k in (0, 1) for i in range(k, head_size, 2)], dim)

    def pairs_from_halves(self, head_size: int, dim: int = 0) -> View:
        """Reorder the rotary rows of each head from halves (x0 x1 ... y0 y1 ...) to pairs (x0 y0 x1 y1 ...)."""
        heads, half = self._heads(head_size, dim), head_size // 2
        return self.reorder([(h + i + k, h + i + k + 1) for h in heads for i in range(half) for k in (0, half)], dim)

    def through(self, inner: Mapping[str, View]) -> View:
        """Return the same tensor with every source that `inner` builds replaced by the sources
        of that view.

        Raises PlanError if a view in `inner` does not have the shape and dtype that this one expects.
        """
        for source in self.sources:
            made = inner.get(source.fqn)
            if made is not None and (made.shape, made.spec.dtype) != (source.shape, source.dtype):
                raise self._error(f"the source {source} of a view is built with shape {made.shape}")
        placed: list[_Placed] = [((), fill) for fill in self.fills]
        for patch in self.patches:
            source = self.sources[patch.tensor]
            part = inner.get(source.fqn, View.of(source)).crop(patch.source).rearrange(patch.dims)
            placed += _placed(part, patch.target.offsets)
        return _joined(self.spec, placed)

    def apply(self, arrays: Mapping[str, Array]) -> Array:
        """Build the full tensor from full sources by name. For tests and small tensors."""
        given = [arrays[source.fqn] for source in self.sources]
        out: Array = np.zeros(self.shape, dtype=given[0].dtype if given else np.float64)
        for fill in self.fills:
            out[fill.target.slices] = fill.value
        for patch in self.patches:
            out[patch.target.slices] = arrange(given[patch.tensor][patch.source.slices], patch.dims)
        return out

    def _along(self, dim: int, start: int, stop: int) -> View:
        if not 0 <= start <= stop <= self.shape[dim]:
            raise self._error(f"{start}:{stop} is outside dim {dim} of size {self.shape[dim]}")
        return self.crop(Box.full(self.shape).cut(dim, start, stop))

    def _heads(self, head_size: int, dim: int) -> range:
        self._check_dim(dim)
        if head_size < 2 or head_size % 2 or self.shape[dim] % head_size:
            raise self._error(
                f"dim {dim} of {self.shape[dim]} elements is not made of heads of an even size {head_size}"
            )
        return range(0, self.shape[dim], head_size)

    def _check_dim(self, dim: int) -> None:
        if not 0 <= dim < len(self.shape):
            raise self._error(f"there is no dim {dim} in the shape {self.shape}")

    def _error(self, text: str) -> PlanError:
        return PlanError(text, fqn=self.spec.fqn)

    def _made(self, shape: Sequence[int], parts: Iterable[Patch | Fill]) -> View:
        return _joined(TensorSpec(self.spec.fqn, shape, self.spec.dtype), [(self.sources, part) for part in parts])


def concat(fqn: str, views: Sequence[View], dim: int = 0) -> View:
    """Concatenate views along `dim`.

    Raises PlanError if there are none, or if they differ in dtype or in the size of another dim.
    """
    first = _alike(fqn, views).spec
    shape = first.shape
    if not 0 <= dim < len(shape):
        raise PlanError(f"there is no dim {dim} in the shape {shape}", fqn=fqn)
    placed: list[_Placed] = []
    at = 0
    for view in views:
        if view.shape[:dim] + view.shape[dim + 1 :] != shape[:dim] + shape[dim + 1 :]:
            raise PlanError(f"shapes {shape} and {view.shape} do not concatenate along dim {dim}", fqn=fqn)
        placed += _placed(view, [at if d == dim else 0 for d in range(len(shape))])
        at += view.shape[dim]
    return _joined(TensorSpec(fqn, (*shape[:dim], at, *shape[dim + 1 :]), first.dtype), placed)


def stack(fqn: str, views: Sequence[View], dim: int = 0) -> View:
    """Stack views of one shape along a new dim `dim`."""
    first = _alike(fqn, views)
    if not 0 <= dim <= len(first.shape):
        raise PlanError(f"a new dim {dim} does not fit the shape {first.shape}", fqn=fqn)
    for view in views:
        if view.shape != first.shape:
            raise PlanError(f"shapes {first.shape} and {view.shape} do not stack", fqn=fqn)
    dims: list[int | None] = list(range(len(first.shape)))
    dims.insert(dim, None)
    return concat(fqn, [view.rearrange(dims) for view in views], dim)


def inverse(views: Iterable[View], fill: float | None = None) -> tuple[View, ...]:
    """Return every source of `views` as a view of the composed tensors, in order of first use.
    Fills are dropped.

    Raises PlanError if an element of a source is used more than once, or is not used and has no `fill`.
    """
    targets = list(views)
    sources = _sources(source for view in targets for source in view.sources)
    names = [view.spec.fqn for view in targets]
    if len(set(names)) != len(names):
        raise PlanError(f"two of the views to invert have the same name: {names}")
    placed: dict[str, list[_Placed]] = {fqn: [] for fqn in sources}
    for view in targets:
        for patch in view.patches:
            source = view.sources[patch.tensor]
            placed[source.fqn].append(((view.spec,), patch.inverse(0)))
    for fqn, parts in placed.items():
        if fill is None:
            break
        rest = [Box.full(sources[fqn].shape)]
        for _, part in parts:
            rest = [piece for hole in rest for piece in hole - part.target]
        parts += [((), Fill(box, fill)) for box in rest]
    return tuple(_joined(spec, placed[fqn]) for fqn, spec in sources.items())


def viewed(views: Iterable[View], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of a state after `views`. Composed tensors replace their sources. All others
    stay the same.

    Raises PlanError if the state lacks a source or has it with another shape or dtype, and for a
    repeated FQN.
    """
    made: dict[str, TensorSpec] = {}
    used: set[str] = set()
    for view in views:
        for source in view.sources:
            if specs.get(source.fqn) != source:
                raise PlanError(f"a view takes from {source}, but the state has {specs.get(source.fqn)}")
        used.update(source.fqn for source in view.sources)
        if view.spec.fqn in made:
            raise PlanError("two views create this tensor", fqn=view.spec.fqn)
        made[view.spec.fqn] = view.spec
    kept = {fqn: spec for fqn, spec in specs.items() if fqn not in used}
    twice = sorted(set(kept) & set(made))
    if twice:
        raise PlanError("a view creates a tensor that already exists", fqn=twice[0])
    return {**kept, **made}


_Placed = tuple[tuple[TensorSpec, ...], Patch | Fill]
"""The sources that a part numbers, and the part at its place in the target."""


def _placed(view: View, by: Sequence[int]) -> list[_Placed]:
    return [(view.sources, part.move(by)) for part in view.parts]


def _joined(spec: TensorSpec, placed: Iterable[_Placed]) -> View:
    """Return the view of all these parts. Sources that are used are numbered in order of first use,
    and neighbors are merged."""
    found = [(sources, part) for sources, part in placed if not part.target.is_empty]
    patches = [(sources[part.tensor], part) for sources, part in found if isinstance(part, Patch)]
    fills = sorted((part for _, part in found if isinstance(part, Fill)), key=lambda fill: fill.target)
    used = _sources((source for source, _ in patches), spec.fqn)
    numbers = {fqn: number for number, fqn in enumerate(used)}
    numbered = (Patch(part.target, numbers[source.fqn], part.source, part.dims) for source, part in patches)
    return View(spec, tuple(used.values()), merged(numbered), tuple(fills))


def _sources(specs: Iterable[TensorSpec], fqn: str | None = None) -> dict[str, TensorSpec]:
    """Return the sources by name. Raises PlanError if two sources with one name differ."""
    out: dict[str, TensorSpec] = {}
    for spec in specs:
        if out.setdefault(spec.fqn, spec) != spec:
            raise PlanError(f"two sources with the same name differ: {out[spec.fqn]} and {spec}", fqn=fqn or spec.fqn)
    return out


def _alike(fqn: str, views: Sequence[View]) -> View:
    if not views:
        raise PlanError("no views to concatenate or stack", fqn=fqn)
    for view in views:
        if view.spec.dtype != views[0].spec.dtype or len(view.shape) != len(views[0].shape):
            raise PlanError(f"{views[0].spec} and {view.spec} differ in dtype or number of dims", fqn=fqn)
    return views[0]


# Layouts pulled back through views: what each rank wants of a view's target, as regions of the
# view's sources.
#
# A load or transfer moves elements of sources. Where the wanted tensor is a view of others, each
# rank wants boxes of every source, and each such box has its slot in the rank's local tensor of the
# target:
#
#     fused  q q k v | q q k v     rank 1 wants:  the last two rows of q, the last one of k, the last one of v
#            rank 0    rank 1      and has slots for them, one under the other
#
# A load lists its pieces rank by rank (`ViewOverlap`), as the plain overlap of such boxes with the
# chunks of the sources; a transfer needs the regions of all ranks as a form (`pull_back`).


@dataclass(frozen=True)
class ViewOverlap(Overlap):
    """The pieces of every wanted rank, for a view and the layouts of its sources and its target.

    wanted box  --patches of the view-->  boxes of sources  --chunks of each source-->  pieces
    """

    view: ViewGeometry
    saved: tuple[Form, ...]
    """One per source."""
    wanted_form: Form

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.view.shape

    @cached_property
    def _patches(self) -> Sweep:
        return Sweep((i, patch.target) for i, patch in enumerate(self.view.patches))

    @cached_property
    def _fills(self) -> Sweep:
        return Sweep((i, fill.target) for i, fill in enumerate(self.view.fills))

    def patches_meeting(self, box: Box) -> Iterator[tuple[Patch, Box]]:
        """Yield (patch, the overlap of its target with `box`), in global coordinates of the target."""
        yield from ((self.view.patches[i], common) for i, _, common in self._patches.meeting(box))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return tuple(self._pieces(rank))

    def _pieces(self, rank: int) -> Iterator[Piece]:
        for index, box, local in self.local_boxes(rank):
            for patch, common in self.patches_meeting(box):
                number = patch.tensor
                chunks = chunks_of(self.view.source_shapes[number], self.saved[number])
                for owner, chunk, held in chunks.covering(patch.to_source(common)):
                    target = patch.to_target(held).moved_with(box, local)
                    yield Piece(owner, chunk, held.relative_to(chunk), target, index, number, patch.dims)

    def fills(self, rank: int) -> tuple[FilledSlot, ...]:
        return tuple(
            FilledSlot(index, common.moved_with(box, local), self.view.fills[i].value)
            for index, box, local in (self.local_boxes(rank) if self.view.fills else ())
            for i, _, common in self._fills.meeting(box)
        )

    def origins(self, box: Box) -> Iterator[Origin]:
        for patch, common in self.patches_meeting(box):
            yield Origin(common, patch.tensor, patch.to_source(common), patch.dims)


_overlap_of = lru_cache(maxsize=1024)(ViewOverlap)


class TargetSlot(NamedTuple):
    """Where a box of a source goes in a rank's local tensors of the target."""

    part: int
    """Index of the local tensor."""
    box: Box
    """The elements, in its coordinates."""
    dims: Dims
    """Per dim of the source, the dim of the box that it follows, or None for a dim of size 1 that the target lacks."""


@dataclass(frozen=True)
class Pulled:
    """The parts of one source that ranks want."""

    tensor: int
    """Number of the source."""
    form: Form
    """The wanted regions, in global coordinates of the source."""
    turn: Dims | None = None
    """If the target is one full source with its dims in another order: per dim of the source, the
    target's dim. The local tensors of `form` are then those of the target, with their dims in the
    order of the source."""
    slots: Mapping[int, tuple[TargetSlot, ...]] | None = None
    """Otherwise: rank -> the slot of each of its boxes in `form`."""


@lru_cache(maxsize=1024)
def pull_back(view: ViewGeometry, wanted: Form) -> tuple[Pulled, ...]:
    """Return what ranks need of the sources if they want the target of `view` placed as `wanted`.

    Each wanted element that is not a constant is in one region. If a rank wants an element twice,
    as for repeated key heads, the source is listed once for each time.
    """
    turned = _turned(view, wanted)
    if turned is not None:
        return (turned,)
    overlap = ViewOverlap(view, (), wanted)
    layers: dict[tuple[int, int], tuple[dict[int, list[Box]], dict[int, list[TargetSlot]]]] = {}
    for alike in overlap.replicas():
        found = sorted(_wanted_boxes(overlap, int(alike[0])), key=lambda row: row[:2])
        for tensor, layer, box, slot in _layered(found):
            boxes, slots = layers.setdefault((tensor, layer), ({}, {}))
            for rank in alike.tolist():
                boxes.setdefault(rank, []).append(box)
                slots.setdefault(rank, []).append(slot)
    return tuple(
        Pulled(tensor, BoxesForm.make(boxes), slots={rank: tuple(its) for rank, its in slots.items()})
        for (tensor, _), (boxes, slots) in sorted(layers.items(), key=lambda row: row[0])
    )


def filled_slots(view: ViewGeometry, wanted: Form, rank: int) -> tuple[FilledSlot, ...]:
    """Return the constants that a rank wants."""
    return ViewOverlap(view, (), wanted).fills(rank)


def _wanted_boxes(overlap: ViewOverlap, rank: int) -> list[tuple[int, Box, TargetSlot]]:
    """Return (source, box of it, slot) for everything that a rank wants."""
    return [
        (
            patch.tensor,
            patch.to_source(common),
            TargetSlot(index, common.moved_with(box, local), patch.back),
        )
        for index, box, local in overlap.local_boxes(rank)
        for patch, common in overlap.patches_meeting(box)
    ]


def _layered(found: list[tuple[int, Box, TargetSlot]]) -> list[tuple[int, int, Box, TargetSlot]]:
    """Return each box with the number of a layer, so that no two boxes of a source in one layer
    share an element. Boxes come sorted."""
    out: list[tuple[int, int, Box, TargetSlot]] = []
    recent: dict[tuple[int, int], list[Box]] = {}
    for tensor, box, slot in found:
        layer = 0
        while True:
            # what ends before this box begins is never met again, as offsets ascend
            near = [b for b in recent.get((tensor, layer), []) if not b.ndim or b.stops[0] > box.offsets[0]]
            if all(b & box is None for b in near):
                break
            layer += 1
        recent[tensor, layer] = [*near, box]
        out.append((tensor, layer, box, slot))
    return out


def _turned(view: ViewGeometry, wanted: Form) -> Pulled | None:
    """Return the form of one full source with its dims in another order, which is still a product."""
    if len(view.patches) != 1 or view.fills or not isinstance(wanted, ProductForm):
        return None
    patch = view.patches[0]
    whole = patch.source == Box.full(view.source_shapes[patch.tensor]) and patch.target == Box.full(view.shape)
    if not whole or None in patch.dims or len(patch.dims) != patch.source.ndim:
        return None
    placed = tuple(_on_source(placement, patch.dims) for placement in wanted.placements)
    return Pulled(patch.tensor, ProductForm.make(wanted.mesh, placed), turn=patch.back)


def _on_source(placement: Placement, dims: Dims) -> Placement:
    if isinstance(placement, Replicate):
        return placement
    dim = dims[placement.dim]
    assert dim is not None
    return replace(placement, dim=dim)
