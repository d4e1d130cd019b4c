"""`View`: a tensor put together from boxes of other tensors; renaming, cutting, joining, turning, padding.

A view is a set of patches. Each says that a box of the target is a box of a source, with its dims in another order,
new dims of size 1 or dims of size 1 left out. A fill says that a box of the target is a constant. Views are built
like arrays and nest like functions:

    q, k, v = (View.of(spec) for spec in (q_spec, k_spec, v_spec))
    fused = concat("wqkv", [q, k, v])
    inverse([fused])            # wq, wk and wv as views of wqkv

A plan goes through views down to bytes: nobody ever holds the whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planners.errors import PlanError
from planners.geometry.box import Box, arrange, rearranged
from planners.geometry.cover import tiling_fault
from planners.geometry.layout import TensorSpec
from planners.geometry.layout_forms import Form
from planners.views.patches import Fill, Patch, ViewGeometry, merged
from planners.views.pullback import ViewOverlap

__all__ = ["View", "concat", "inverse", "stack", "viewed"]


@dataclass(frozen=True)
class View:
    """What every element of `spec` is made of. Patches and fills tile the target exactly once."""

    spec: TensorSpec
    """Name, shape and dtype of the target."""
    sources: tuple[TensorSpec, ...]
    """The tensors it is made of, all of one dtype, each once."""
    patches: tuple[Patch, ...]
    """Boxes that come from sources."""
    fills: tuple[Fill, ...] = ()
    """Boxes that are a constant."""

    def __post_init__(self) -> None:
        """Raises PlanError where a part lies outside its tensor or the parts do not add up to the target."""
        spec = self.spec
        for source in self.sources:
            if source.dtype != spec.dtype:
                raise PlanError(f"a view of dtype {spec.dtype} cannot take from {source.fqn!r} of {source.dtype}")
        if len({source.fqn for source in self.sources}) != len(self.sources):
            raise PlanError(f"two sources of a view have one name: {[s.fqn for s in self.sources]}", fqn=spec.fqn)
        full = [Box.full(source.shape) for source in self.sources]
        for patch in self.patches:
            if not 0 <= patch.tensor < len(full):
                raise PlanError(f"a view of {len(full)} sources has no source {patch.tensor}", fqn=spec.fqn)
            if not full[patch.tensor].contains(patch.source):
                name, shape = self.sources[patch.tensor].fqn, self.sources[patch.tensor].shape
                raise PlanError(f"{patch.source} lies outside {name!r} of shape {shape}", fqn=spec.fqn)
        targets = [part.target for part in self.parts]
        if any(box.ndim != len(spec.shape) for box in targets):
            raise PlanError(f"the parts of a view must have the {len(spec.shape)} dims of its target", fqn=spec.fqn)
        fault = tiling_fault([Box.full(spec.shape)], targets)
        if fault is not None:
            raise PlanError(f"the parts of a view do not add up to {spec.shape}: {fault}", fqn=spec.fqn)

    @classmethod
    def of(cls, spec: TensorSpec) -> View:
        """The tensor itself."""
        box = Box.full(spec.shape)
        return cls(spec, (spec,), (Patch(box, 0, box, tuple(range(box.ndim))),))

    @classmethod
    def full(cls, spec: TensorSpec, value: float = 0) -> View:
        """A tensor of one constant."""
        return cls(spec, (), (), (Fill(Box.full(spec.shape), value),))

    @property
    def parts(self) -> tuple[Patch | Fill, ...]:
        """Patches, then fills."""
        return (*self.patches, *self.fills)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the target."""
        return self.spec.shape

    @cached_property
    def geometry(self) -> ViewGeometry:
        """The view without names: views of equal geometry map alike."""
        return ViewGeometry(self.shape, tuple(source.shape for source in self.sources), self.patches, self.fills)

    def overlap(self, saved: Sequence[Form], wanted: Form) -> ViewOverlap:
        """What ranks that want the target placed as `wanted` take of sources that are placed as `saved`."""
        return _overlap(self.geometry, tuple(saved), wanted)

    def rename(self, fqn: str) -> View:
        """The same under another name."""
        return View(TensorSpec(fqn, self.shape, self.spec.dtype), self.sources, self.patches, self.fills)

    def crop(self, box: Box) -> View:
        """The elements in `box`, which becomes the whole. Raises PlanError if it lies outside."""
        if not Box.full(self.shape).contains(box):
            raise PlanError(f"cannot crop a view of shape {self.shape} to {box}", fqn=self.spec.fqn)
        back = [-o for o in box.offsets]
        kept = [(part, part.target & box) for part in self.parts]
        return self._made(box.sizes, [part.crop(common).move(back) for part, common in kept if common is not None])

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> View:
        """Slices of step 1, as numpy means them; an integer takes one index and drops the dim."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise PlanError(f"{len(parts)} indices for a view of shape {self.shape}", fqn=self.spec.fqn)
        offsets, sizes, kept = [], [], []
        for d, size in enumerate(self.shape):
            part = parts[d] if d < len(parts) else slice(None)
            if isinstance(part, int):
                if not -size <= part < size:
                    raise PlanError(f"index {part} is outside dim {d} of size {size}", fqn=self.spec.fqn)
                start, stop = part % size, part % size + 1
            else:
                kept.append(d)
                start, stop, step = part.indices(size)
                if step != 1:
                    raise PlanError(f"a view is sliced in steps of 1 only, got {part}", fqn=self.spec.fqn)
            offsets.append(start)
            sizes.append(max(stop - start, 0))
        return self.crop(Box(offsets, sizes)).rearrange(kept)

    def rearrange(self, dims: Sequence[int | None]) -> View:
        """New dim i is dim `dims[i]`, or a new dim of size 1 for None; dims of size 1 may be left out.

        Raises PlanError if a dim is named twice, or one of another size is left out.
        """
        order = tuple(dims)
        full = rearranged(Box.full(self.shape), order, self.spec.fqn)
        return self._made(full.sizes, [part.rearrange(order) for part in self.parts])

    def transpose(self, *dims: int) -> View:
        """The dims in the order `dims`; without any, reversed."""
        order = dims or tuple(reversed(range(len(self.shape))))
        if sorted(order) != list(range(len(self.shape))):
            raise PlanError(f"{order} is no order of the dims of shape {self.shape}", fqn=self.spec.fqn)
        return self.rearrange(order)

    def pad(self, widths: Sequence[tuple[int, int]], value: float = 0) -> View:
        """A constant `widths[d][0]` elements before and `widths[d][1]` after, in each dim d."""
        if len(widths) != len(self.shape):
            raise PlanError(f"pad takes a pair per dim of {self.shape}, got {list(widths)}", fqn=self.spec.fqn)
        if any(low < 0 or high < 0 for low, high in widths):
            raise PlanError(f"pad widths must be >= 0, got {list(widths)}; crop takes away", fqn=self.spec.fqn)
        inner = Box([low for low, _ in widths], self.shape)
        sizes = [low + size + high for (low, high), size in zip(widths, self.shape)]
        parts = [part.move(inner.offsets) for part in self.parts]
        return self._made(sizes, [*parts, *(Fill(box, value) for box in Box.full(sizes) - inner)])

    def split(self, sizes: Mapping[str, int], dim: int = 0) -> tuple[View, ...]:
        """Consecutive pieces of `dim`, by name. Raises PlanError if the sizes do not add up to the dim."""
        self._check_dim(dim)
        if sum(sizes.values()) != self.shape[dim]:
            raise PlanError(
                f"{dict(sizes)} add up to {sum(sizes.values())}, but dim {dim} has {self.shape[dim]} elements",
                fqn=self.spec.fqn,
            )
        out, at = [], 0
        for fqn, size in sizes.items():
            out.append(self._along(dim, at, at + size).rename(fqn))
            at += size
        return tuple(out)

    def unstack(self, names: Sequence[str], dim: int = 0) -> tuple[View, ...]:
        """The elements of `dim`, each a tensor without that dim. Raises PlanError if there are more or fewer names."""
        self._check_dim(dim)
        if len(names) != self.shape[dim]:
            raise PlanError(f"{len(names)} names for the {self.shape[dim]} elements of dim {dim}", fqn=self.spec.fqn)
        rest = [d for d in range(len(self.shape)) if d != dim]
        return tuple(self._along(dim, i, i + 1).rearrange(rest).rename(name) for i, name in enumerate(names))

    def reorder(self, intervals: Iterable[tuple[int, int]], dim: int = 0) -> View:
        """The intervals (start, stop) of `dim`, one behind another."""
        self._check_dim(dim)
        return concat(self.spec.fqn, [self._along(dim, start, stop) for start, stop in intervals], dim)

    def split_dim(self, sizes: tuple[int, int], dim: int = 0) -> View:
        """`dim` reshaped to two dims of these sizes, row-major. Raises PlanError unless they multiply to its size."""
        self._check_dim(dim)
        outer, inner = sizes
        if outer * inner != self.shape[dim]:
            raise PlanError(f"dim {dim} of size {self.shape[dim]} cannot become {outer} x {inner}", fqn=self.spec.fqn)
        if not outer:
            return self._made((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), [])
        return stack(self.spec.fqn, [self._along(dim, i * inner, (i + 1) * inner) for i in range(outer)], dim)

    def merge_dims(self, dim: int = 0) -> View:
        """Dims `dim` and `dim + 1` reshaped to one, row-major: inverse of `split_dim`."""
        self._check_dim(dim)
        self._check_dim(dim + 1)
        rest = [d for d in range(len(self.shape)) if d != dim]
        if not self.shape[dim]:
            return self._made((*self.shape[:dim], 0, *self.shape[dim + 2 :]), [])
        rows = [self._along(dim, i, i + 1).rearrange(rest) for i in range(self.shape[dim])]
        return concat(self.spec.fqn, rows, dim)

    def halves_from_pairs(self, head_size: int, dim: int = 0) -> View:
        """Rotary rows of each head from pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...)."""
        heads = self._heads(head_size, dim)
        return self.reorder([(h + i, h + i + 1) for h in heads for k in (0, 1) for i in range(k, head_size, 2)], dim)

    def pairs_from_halves(self, head_size: int, dim: int = 0) -> View:
        """Rotary rows of each head from halves (x0 x1 ... y0 y1 ...) to pairs (x0 y0 x1 y1 ...)."""
        heads, half = self._heads(head_size, dim), head_size // 2
        return self.reorder([(h + i + k, h + i + k + 1) for h in heads for i in range(half) for k in (0, half)], dim)

    def through(self, inner: Mapping[str, View]) -> View:
        """The same tensor, with every source that `inner` makes of other tensors replaced by what it is made of.

        Raises PlanError if a view in `inner` is not of the shape and dtype that this one takes from.
        """
        for source in self.sources:
            made = inner.get(source.fqn)
            if made is not None and (made.shape, made.spec.dtype) != (source.shape, source.dtype):
                raise PlanError(f"the source {source} of a view is made with shape {made.shape}", fqn=self.spec.fqn)
        placed: list[_Placed] = [((), fill, (0,) * len(self.shape)) for fill in self.fills]
        for patch in self.patches:
            source = self.sources[patch.tensor]
            part = inner.get(source.fqn, View.of(source)).crop(patch.source).rearrange(patch.dims)
            placed += _placed(part, patch.target.offsets)
        return _joined(self.spec, placed)

    def apply(self, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The whole target, from the whole sources by name: for tests and small tensors."""
        given = [arrays[source.fqn] for source in self.sources]
        out: npt.NDArray[Any] = np.zeros(self.shape, dtype=given[0].dtype if given else np.float64)
        for fill in self.fills:
            out[fill.target.slices] = fill.value
        for patch in self.patches:
            out[patch.target.slices] = arrange(given[patch.tensor][patch.source.slices], patch.dims)
        return out

    def _along(self, dim: int, start: int, stop: int) -> View:
        if not 0 <= start <= stop <= self.shape[dim]:
            raise PlanError(f"{start}:{stop} lies outside dim {dim} of size {self.shape[dim]}", fqn=self.spec.fqn)
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        offsets[dim], sizes[dim] = start, stop - start
        return self.crop(Box(offsets, sizes))

    def _heads(self, head_size: int, dim: int) -> range:
        self._check_dim(dim)
        if head_size < 2 or head_size % 2 or self.shape[dim] % head_size:
            raise PlanError(
                f"dim {dim} of {self.shape[dim]} elements is not made of heads of an even size {head_size}",
                fqn=self.spec.fqn,
            )
        return range(0, self.shape[dim], head_size)

    def _check_dim(self, dim: int) -> None:
        if not 0 <= dim < len(self.shape):
            raise PlanError(f"there is no dim {dim} in the shape {self.shape}", fqn=self.spec.fqn)

    def _made(self, shape: Sequence[int], parts: Iterable[Patch | Fill]) -> View:
        spec = TensorSpec(self.spec.fqn, shape, self.spec.dtype)
        return _joined(spec, [(self.sources, part, (0,) * len(spec.shape)) for part in parts])


@lru_cache(maxsize=1024)
def _overlap(view: ViewGeometry, saved: tuple[Form, ...], wanted: Form) -> ViewOverlap:
    return ViewOverlap(view, saved, wanted)


def concat(fqn: str, views: Sequence[View], dim: int = 0) -> View:
    """The views one behind another along `dim`.

    Raises PlanError if there is none, or if they differ in dtype or in the size of another dim.
    """
    first = _alike(fqn, views)
    if not 0 <= dim < len(first.shape):
        raise PlanError(f"there is no dim {dim} in the shape {first.shape}", fqn=fqn)
    placed: list[_Placed] = []
    at = 0
    for view in views:
        if view.shape[:dim] + view.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :]:
            raise PlanError(f"shapes {first.shape} and {view.shape} do not concatenate along dim {dim}", fqn=fqn)
        placed += _placed(view, [at if d == dim else 0 for d in range(len(first.shape))])
        at += view.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return _joined(TensorSpec(fqn, shape, first.spec.dtype), placed)


def stack(fqn: str, views: Sequence[View], dim: int = 0) -> View:
    """The views, of one shape, side by side along a new dim `dim`."""
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
    """Every source of `views` as a view of their targets, in order of first use. Fills are forgotten.

    Raises PlanError if an element of a source is used more than once, or never and no `fill` is given for it.
    """
    targets = list(views)
    sources = _sources(source for view in targets for source in view.sources)
    names = [view.spec.fqn for view in targets]
    if len(set(names)) != len(names):
        raise PlanError(f"two of the views to invert have one name: {names}")
    placed: dict[str, list[_Placed]] = {fqn: [] for fqn in sources}
    for view in targets:
        for patch in view.patches:
            source = view.sources[patch.tensor]
            placed[source.fqn].append(((view.spec,), patch.inverse(0), (0,) * len(source.shape)))
    for fqn, parts in placed.items():
        if fill is None:
            break
        rest = [Box.full(sources[fqn].shape)]
        for _, part, _ in parts:
            rest = [piece for hole in rest for piece in hole - part.target]
        parts += [((), Fill(box, fill), (0,) * box.ndim) for box in rest]
    return tuple(_joined(spec, placed[fqn]) for fqn, spec in sources.items())


def viewed(views: Iterable[View], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of a state after `views`: their targets in place of their sources, all others as they are.

    Raises PlanError for a source that the state lacks or has with another shape or dtype, and for a name made twice.
    """
    made: dict[str, TensorSpec] = {}
    used: set[str] = set()
    for view in views:
        for source in view.sources:
            if specs.get(source.fqn) != source:
                raise PlanError(f"a view takes from {source}, but the state has {specs.get(source.fqn)}")
        used.update(source.fqn for source in view.sources)
        if view.spec.fqn in made:
            raise PlanError("two views make this tensor", fqn=view.spec.fqn)
        made[view.spec.fqn] = view.spec
    kept = {fqn: spec for fqn, spec in specs.items() if fqn not in used}
    twice = sorted(set(kept) & set(made))
    if twice:
        raise PlanError("a view makes a tensor that is there already", fqn=twice[0])
    return {**kept, **made}


_Placed = tuple[tuple[TensorSpec, ...], Patch | Fill, Sequence[int]]
"""A part, the sources that it numbers, and by how much it is moved in the target."""


def _placed(view: View, by: Sequence[int]) -> list[_Placed]:
    return [(view.sources, part, by) for part in view.parts]


def _joined(spec: TensorSpec, placed: Iterable[_Placed]) -> View:
    """The view of all these parts: sources that are used numbered in order of first use, neighbours merged."""
    patches: list[Patch] = []
    fills: list[Fill] = []
    numbers: dict[str, int] = {}
    used: list[TensorSpec] = []
    for sources, part, by in placed:
        moved = part.move(by)
        if moved.target.is_empty:
            continue
        if isinstance(moved, Fill):
            fills.append(moved)
            continue
        source = sources[moved.tensor]
        number = numbers.setdefault(source.fqn, len(numbers))
        used += [source] if number == len(used) else []
        if used[number] != source:
            raise PlanError(f"two sources of one name differ: {used[number]} and {source}", fqn=spec.fqn)
        patches.append(Patch(moved.target, number, moved.source, moved.dims))
    return View(spec, tuple(used), merged(patches), tuple(sorted(fills, key=lambda fill: fill.target)))


def _sources(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """By name. Raises PlanError if two of one name differ."""
    out: dict[str, TensorSpec] = {}
    for spec in specs:
        if out.setdefault(spec.fqn, spec) != spec:
            raise PlanError(f"two sources of one name differ: {out[spec.fqn]} and {spec}", fqn=spec.fqn)
    return out


def _alike(fqn: str, views: Sequence[View]) -> View:
    if not views:
        raise PlanError("nothing to put together", fqn=fqn)
    for view in views:
        if view.spec.dtype != views[0].spec.dtype or len(view.shape) != len(views[0].shape):
            raise PlanError(f"{views[0].spec} and {view.spec} differ in dtype or number of dims", fqn=fqn)
    return views[0]
