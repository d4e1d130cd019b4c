"""Hypothesis strategies for boxes, meshes, placements and layouts, to test planners and storages with.

Not imported by `planners`: it needs hypothesis, which only tests have to have.
"""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from planners.box import Box
from planners.layout import StateLayout, TensorLayout, TensorSpec
from planners.mesh import Mesh
from planners.placement import BlockShard, Placement, Replicate, Shard, StridedShard

__all__ = [
    "block_placements",
    "box_layouts",
    "boxes",
    "flat_layouts",
    "layouts",
    "meshes",
    "placements",
    "product_layouts",
    "shapes",
    "specs",
    "state_pairs",
]  # fmt: skip

DTYPES = ("bool", "uint8", "bfloat16", "float32", "int64", "complex128")
"""One dtype of every item size."""


def shapes(max_dims: int = 4, max_size: int = 17) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims, sizes from 0, now and then with one large dim."""
    small = st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)
    large = st.tuples(st.integers(100, 1000), st.integers(0, 3))
    return st.one_of(small, small, small, small, large)


def specs(fqn: str = "w", shape: st.SearchStrategy[tuple[int, ...]] | None = None) -> st.SearchStrategy[TensorSpec]:
    """A tensor of any shape and item size."""
    return st.builds(TensorSpec, st.just(fqn), shape or shapes(), st.sampled_from(DTYPES))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box within `shape`, possibly empty."""
    offsets = [draw(st.integers(0, n)) for n in shape]
    return Box(offsets, [draw(st.integers(0, n - o)) for n, o in zip(shape, offsets)])


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_ranks: int = 24, explicit: bool = True) -> Mesh:
    """Meshes of 1 to `max_axes` axes; some on a shuffled or gappy set of ranks, if `explicit`."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        sizes.append(draw(st.integers(1, max(1, min(6, max_ranks // math.prod(sizes))))))
    ranks = None
    if explicit and draw(st.integers(0, 4)) == 0:
        ranks = draw(st.permutations(range(max_ranks)))[: math.prod(sizes)]
    return Mesh([(f"axis{i}", n) for i, n in enumerate(sizes)], ranks)


def placements(ndim: int) -> st.SearchStrategy[Placement]:
    """Any placement that DTensor accepts for one axis of a tensor of `ndim` dims."""
    if ndim == 0:
        return st.just(Replicate())
    dims = st.integers(0, ndim - 1)
    return st.one_of(
        st.builds(Shard, dims),
        st.builds(Shard, dims),
        st.builds(Replicate),
        st.builds(StridedShard, dims, st.integers(1, 5)),
    )


@st.composite
def block_placements(draw: st.DrawFn, shape: tuple[int, ...], axes: int) -> tuple[Placement, ...]:
    """One placement per axis, the first cut of a dim being block-wise now and then."""
    out: list[Placement] = [draw(placements(len(shape))) for _ in range(axes)]
    seen: set[int] = set()
    for i, placement in enumerate(out):
        if isinstance(placement, Replicate) or placement.dim in seen:
            continue
        seen.add(placement.dim)
        if draw(st.booleans()):
            edges = sorted(draw(st.lists(st.integers(0, shape[placement.dim]), max_size=3)))
            bounds = [0, *edges, shape[placement.dim]]
            out[i] = BlockShard(placement.dim, [b - a for a, b in itertools.pairwise(bounds)])
    return tuple(out)


@st.composite
def product_layouts(draw: st.DrawFn, spec: TensorSpec, blocks: bool = False, max_ranks: int = 24) -> TensorLayout:
    """Mesh and placements; with `blocks`, block-wise cuts too."""
    mesh = draw(meshes(max_ranks=max_ranks))
    if blocks:
        return TensorLayout(spec, mesh, draw(block_placements(spec.shape, mesh.ndim)))
    return TensorLayout(spec, mesh, [draw(placements(len(spec.shape))) for _ in range(mesh.ndim)])


@st.composite
def flat_layouts(draw: st.DrawFn, spec: TensorSpec) -> TensorLayout:
    """Flat ranges that tile the tensor, over 1 to 6 ranks."""
    cuts = sorted(draw(st.lists(st.integers(0, spec.numel), max_size=5)))
    edges = [0, *cuts, spec.numel]
    return TensorLayout.from_flat_ranges(spec, dict(enumerate(itertools.pairwise(edges))))


@st.composite
def box_layouts(draw: st.DrawFn, spec: TensorSpec) -> TensorLayout:
    """Irregular boxes that tile the tensor: the whole, cut again and again, dealt to up to 6 ranks."""
    pieces = [Box.full(spec.shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if not box.ndim:
            pieces.append(box)
            continue
        d = draw(st.integers(0, box.ndim - 1))
        at = draw(st.integers(0, box.sizes[d]))
        low, high = list(box.sizes), list(box.sizes)
        low[d], high[d] = at, box.sizes[d] - at
        shifted = list(box.offsets)
        shifted[d] += at
        pieces += [Box(box.offsets, low), Box(shifted, high)]
    ranks = draw(st.integers(1, 6))
    owner = [draw(st.integers(0, ranks - 1)) for _ in pieces]
    return TensorLayout.from_boxes(spec, {r: [p for p, o in zip(pieces, owner) if o == r] for r in range(ranks)}, ranks)


def layouts(spec: TensorSpec) -> st.SearchStrategy[TensorLayout]:
    """Any layout: mostly products, some block-wise, flat or irregular."""
    plain = product_layouts(spec)
    return st.one_of(plain, plain, product_layouts(spec, blocks=True), flat_layouts(spec), box_layouts(spec))


@st.composite
def state_pairs(draw: st.DrawFn, irregular: bool = True, max_tensors: int = 2) -> tuple[StateLayout, StateLayout]:
    """Two layouts of the same state of 1 to `max_tensors` tensors."""
    make = layouts if irregular else product_layouts
    saved, wanted = {}, {}
    for i in range(draw(st.integers(1, max_tensors))):
        spec = draw(specs(f"w{i}"))
        saved[spec.fqn], wanted[spec.fqn] = draw(make(spec)), draw(make(spec))
    return StateLayout(saved), StateLayout(wanted)
