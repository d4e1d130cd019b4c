"""Hypothesis strategies for boxes, meshes, placements, layouts, topologies and views, to test planners and storages.

Not imported by `planners`: it needs hypothesis, which only tests have to have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from planners.geometry.box import Box, Shape
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import BlockShard, Mesh, Placement, Replicate, Shard, StridedShard
from planners.geometry.topologies import Home, Rule, Topology
from planners.geometry.views import View, concat, stack

__all__ = [
    "block_placements", "box_layouts", "boxes", "flat_layouts", "layouts", "meshes", "placements",
    "product_layouts", "shapes", "specs", "state_pairs", "topologies", "views",
]  # fmt: skip


DTYPES = ("bool", "uint8", "bfloat16", "float32", "int64", "complex128")
"""One dtype of every item size."""


def shapes(max_dims: int = 4, max_size: int = 17) -> st.SearchStrategy[Shape]:
    """Shapes of 0 to `max_dims` dims, sizes from 0, now and then with one large dim."""
    small = st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)
    large = st.tuples(st.integers(100, 1000), st.integers(0, 3))
    return st.one_of(small, small, small, small, large)


def specs(fqn: str = "w", shape: st.SearchStrategy[Shape] | None = None) -> st.SearchStrategy[TensorSpec]:
    """A tensor of any shape and item size."""
    return st.builds(TensorSpec, st.just(fqn), shapes() if shape is None else shape, st.sampled_from(DTYPES))


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
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
    """Generate placements that DTensor accepts for one axis of a tensor of `ndim` dims."""
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
def block_placements(draw: st.DrawFn, shape: Shape, axes: int) -> tuple[Placement, ...]:
    """One placement per axis. The first placement that shards a dim is sometimes block-wise."""
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
    """Mesh and placements; with `blocks`, also block-wise shards."""
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
    """Irregular boxes that tile the tensor: the full box, split repeatedly, on up to 6 ranks."""
    pieces = [Box.full(spec.shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if not box.ndim:
            pieces.append(box)
            continue
        d = draw(st.integers(0, box.ndim - 1))
        at = box.offsets[d] + draw(st.integers(0, box.sizes[d]))
        pieces += [box.cut(d, box.offsets[d], at), box.cut(d, at, box.stops[d])]
    ranks = draw(st.integers(1, 6))
    owner = [draw(st.integers(0, ranks - 1)) for _ in pieces]
    return TensorLayout.from_boxes(spec, {r: [p for p, o in zip(pieces, owner) if o == r] for r in range(ranks)}, ranks)


def layouts(spec: TensorSpec) -> st.SearchStrategy[TensorLayout]:
    """Generate layouts: mostly products, some block-wise, flat, or irregular."""
    plain = product_layouts(spec)
    return st.one_of(plain, plain, product_layouts(spec, blocks=True), flat_layouts(spec), box_layouts(spec))


@st.composite
def state_pairs(draw: st.DrawFn, max_tensors: int = 2) -> tuple[StateLayout, StateLayout]:
    """Two layouts of the same state of 1 to `max_tensors` tensors."""
    saved, wanted = {}, {}
    for i in range(draw(st.integers(1, max_tensors))):
        spec = draw(specs(f"w{i}"))
        saved[spec.fqn], wanted[spec.fqn] = draw(layouts(spec)), draw(layouts(spec))
    return StateLayout(saved), StateLayout(wanted)


@st.composite
def topologies(draw: st.DrawFn, tensors: Sequence[TensorSpec], max_ranks: int = 24) -> Topology:
    """A topology that fits these tensors: a rule of its own for some of them, one for all others, homes here and there.

    Rules name their axes in any order, and some act as one.
    """
    mesh = draw(meshes(max_ranks=max_ranks))
    names = [spec.fqn for spec in tensors]
    fixed = draw(st.sampled_from([None, *mesh.names])) if mesh.ndim > 1 else None
    homes = []
    if fixed is not None:
        at = st.integers(0, dict(mesh.axes)[fixed] - 1)
        homes = [Home(pattern, ((fixed, draw(at)),), optional=True) for pattern in (*names[:1], "*")]
    free = [name for name in mesh.names if name != fixed]
    least = min((len(spec.shape) for spec in tensors if spec.shape), default=0)

    def rule(pattern: str, ndim: int) -> Rule:
        order = draw(st.permutations(free))
        cut = draw(st.integers(0, max(len(order) - 2, 0)))
        groups = (
            [(name,) for name in order]
            if draw(st.booleans())
            else [tuple(order[: cut + 1])] + [(n,) for n in order[cut + 1 :]]
        )
        kinds = placements(ndim)
        return Rule(pattern, tuple(draw(kinds) for _ in groups), tuple(groups), optional=True)

    own = [rule(spec.fqn, len(spec.shape)) for spec in tensors if draw(st.booleans())]
    return Topology(mesh, (*own, rule("*", least)), tuple(homes))


@st.composite
def views(draw: st.DrawFn, sources: Sequence[TensorSpec], fqn: str = "viewed", steps: int = 4) -> View:
    """A view composed at random of tensors of one dtype: the first of them, changed by up to `steps` operations, in
    which others join in where their shape allows it."""
    view = View.of(sources[0])
    for _ in range(draw(st.integers(0, steps))):
        view = draw(_changed(view, sources))
        if len(view.shape) > 4 or view.spec.numel > 3000:
            break
    return view.rename(fqn)


@st.composite
def _changed(draw: st.DrawFn, view: View, sources: Sequence[TensorSpec]) -> View:
    ndim = len(view.shape)
    dim = draw(st.integers(0, ndim - 1)) if ndim else 0
    move = draw(st.sampled_from(["pad", "transpose", "stack", *(["crop", "concat", "turn", "split"] if ndim else [])]))
    if move == "pad":
        widths = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in view.shape]
        return view.pad(widths, draw(st.integers(0, 1)))
    if move == "transpose":
        return view.transpose(*draw(st.permutations(range(ndim))))
    if move == "crop":
        return view.crop(draw(boxes(view.shape)))
    if move == "turn":
        at = draw(st.integers(0, view.shape[dim]))
        return view.reorder([(at, view.shape[dim]), (0, at)], dim)
    if move == "split":
        outer = draw(st.sampled_from([k for k in range(1, 7) if view.shape[dim] % k == 0]))
        return view.split_dim((outer, view.shape[dim] // outer), dim)
    alike = [View.of(spec) for spec in sources if spec.shape == view.shape and spec.dtype == view.spec.dtype]
    joined = [view, draw(st.sampled_from([view, *alike]))]
    return stack("stacked", joined, dim) if move == "stack" else concat("joined", joined, dim)
