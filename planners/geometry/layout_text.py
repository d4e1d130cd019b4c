"""Layouts in words, their short forms, and a legend for these."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence

from planners.errors import PlanError
from planners.geometry.layout import BoxesForm, Form, ProductForm, TensorLayout
from planners.geometry.mesh import BlockShard, Mesh, Placement, Replicate, Shard, StridedShard, parse_placements


def short_form(layout: TensorLayout | ProductForm) -> str:
    """`"S(0),R on dp=4,tp=2"`, or nothing for a layout that has no short form:
    on one rank, or without a mesh.

    Equal layouts have equal forms. Axes of one rank are omitted.
    The others are listed in the order of ranks.
    If the axes of a dim shard it in another order, the form begins with that:
    `"tp,dp: S(0),S(0) on dp=2,tp=2"`.
    """
    form = _plain(layout)
    if not isinstance(form, ProductForm) or form.mesh.size < 2:
        return ""
    axes = [(axis, placement) for axis, placement in zip(form.mesh.axes, form.placements) if axis[1] > 1]
    if len(axes) < len(form.placements):
        mesh = Mesh([axis for axis, _ in axes], form.mesh.ranks.tolist())
        form = ProductForm.make(mesh, [placement for _, placement in axes])
    mesh, placements = form.mesh.in_rank_order(), dict(zip(form.mesh.names, form.placements))
    is_reordered = _by_dim(form.mesh.names, placements) != _by_dim(mesh.names, placements)
    order = form.mesh.names if is_reordered else mesh.names
    head = f"{','.join(order)}: " * is_reordered
    return f"{head}{','.join(str(placements[name]) for name in order)} on {mesh}"


def parse_layout(text: str) -> ProductForm:
    """The mesh and placements that a short form gives. Inverse of `short_form`.

    Raises PlanError for text that cannot be read, or for a number of placements that is not that of the axes.
    """
    layout, on, mesh_text = text.partition(" on ")
    if not on:
        raise PlanError(f"cannot read the layout {text!r}: write PLACEMENTS on MESH, such as 'S(0),R on dp=4,tp=2'")
    axes, colon, placements = layout.rpartition(":")
    mesh = Mesh.parse(mesh_text.strip())
    order = [name.strip() for name in axes.split(",")] if colon else mesh.names
    if sorted(order) != sorted(mesh.names):
        raise PlanError(f"{text!r} lists the axes {', '.join(order)} before the colon, but the mesh has {mesh}")
    return ProductForm(mesh.submesh(*order) if colon else mesh, parse_placements(placements))


def in_words(layout: TensorLayout | ProductForm) -> str:
    """Return how ranks share a tensor. Axes are named in the order in which they shard it; an axis
    of one rank is omitted.

    >>> in_words(parse_layout("R,S(1) on dp=2,tp=2"))
    'replicated over dp; dim 1 sharded over tp'
    >>> in_words(parse_layout("_S(0, 2),S(0) on dp=2,tp=2"))
    'dim 0 sharded over tp, then dp'
    """
    form = layout.form if isinstance(layout, TensorLayout) else layout
    if not isinstance(form, ProductForm):
        assert isinstance(layout, TensorLayout)
        return _chunks_in_words(layout)
    mesh, placements = form.mesh.in_rank_order(), dict(zip(form.mesh.names, form.placements))
    copied = [_axis(name) for name, size in mesh.axes if size > 1 and isinstance(placements[name], Replicate)]
    words = [f"replicated over {_listed(copied)}"] if copied else []
    if copied in (["replica"], ["replica_of_mesh"]):  # names of our own, of axes that no mesh records
        words = [f"replicated on {dict(mesh.axes)[copied[0]]} ranks"]
    axes = [(name, size, placements[name]) for name, size in form.mesh.axes if size > 1]
    for dim in sorted({p.dim for _, _, p in axes if not isinstance(p, Replicate)}):
        its = [(n, size, p) for n, size, p in axes if not isinstance(p, Replicate) and p.dim == dim]
        order = _in_order(its)
        said = [_axis(n) + _within(p) * (not order or isinstance(p, BlockShard)) for n, _, p in order or its]
        words.append(f"dim {dim} sharded over {', then '.join(said)}")
    ranks = mesh.ranks.tolist()
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    explicit = [f"on rank{'s' * (len(ranks) > 1)} {shown}"] if mesh.has_explicit_ranks else []
    return "; ".join([*(words or ["unsharded"]), *explicit])


def one_in_words(placement: Placement, axis: str) -> str:
    """Return what a placement says about its axis, on any mesh.

    >>> one_in_words(StridedShard(0, 2), "axis 1")
    'dim 0 sharded over axis 1, after other axes sharded it into 2 parts'
    """
    if isinstance(placement, Replicate):
        return f"replicated over {axis}"
    words = f"dim {placement.dim} sharded over {axis}"
    if isinstance(placement, StridedShard):
        return f"{words}, after other axes sharded it into {placement.split_factor} parts"
    return words + _within(placement)


def in_both_forms(layout: TensorLayout) -> str:
    """Return words and the short form, `"dim 0 sharded over dp (S(0) on dp=4)"`. Only the first of
    many ranks are listed."""
    short = re.sub(r"(@(?:\d+,){8})\d.*", r"\1...", short_form(layout))
    return f"{in_words(layout)} ({short})" if short else in_words(layout)


_ShardingAxis = tuple[str, int, Placement]


def _plain(layout: TensorLayout | ProductForm) -> Form:
    """Return the form without strided shards, for each dim where plain shards give every rank the
    same elements."""
    if not isinstance(layout, TensorLayout):
        return layout
    form, shape = layout.form, layout.spec.shape
    for dim in {p.dim for p in layout.placements or () if isinstance(p, StridedShard)}:
        assert isinstance(form, ProductForm)
        plain = in_sharding_order(form, {dim})
        if all(plain.parts(shape, rank) == form.parts(shape, rank) for rank in form.ranks()):
            form = plain
    return form


def in_sharding_order(form: ProductForm, dims: Container[int]) -> ProductForm:
    """Return the form with the axes of these dims in the order in which they shard, and with plain
    shards instead of equivalent strided ones. Axes of one rank come first, because FSDP2 shards
    what other axes leave."""
    axes = [(name, size, placement) for (name, size), placement in zip(form.mesh.axes, form.placements)]
    for dim in {p.dim for p in form.placements if not isinstance(p, Replicate) and p.dim in dims}:
        places = axes_of(form, dim)
        its = [axes[place] for place in places]
        if not any(isinstance(placement, BlockShard) for _, _, placement in its):
            for place, (name, size, _) in zip(places, _in_order(its)):
                axes[place] = name, size, Shard(dim)
    mesh = form.mesh.submesh(*(name for name, _, _ in axes))
    return ProductForm.make(mesh, [placement for _, _, placement in axes])


def axes_of(form: ProductForm, dim: int) -> list[int]:
    """Return the numbers of the axes that shard a dim."""
    return [axis for axis, p in enumerate(form.placements) if not isinstance(p, Replicate) and p.dim == dim]


def _by_dim(names: Sequence[str], placements: Mapping[str, Placement]) -> dict[int, list[str]]:
    """Return the axes that shard each dim, in the order of `names`."""
    dims = {name: placement.dim for name in names if not isinstance(placement := placements[name], Replicate)}
    return {dim: [name for name, its in dims.items() if its == dim] for dim in dims.values()}


def _in_order(axes: Sequence[_ShardingAxis]) -> list[_ShardingAxis]:
    """Return the axes of one dim in the order in which they shard it. `_StridedShard(dim, n)` says
    that the axes before it have n ranks together. Returns [] if no such axes exist: then the dim
    has n parts, which are sharded separately."""
    order: list[_ShardingAxis] = []
    for axis in reversed(axes):
        pieces = axis[2].split_factor if isinstance(axis[2], StridedShard) else 1
        places = [i for i in range(len(order) + 1) if math.prod(ranks for _, ranks, _ in order[:i]) == pieces]
        if not places:
            return []
        order.insert(places[-1], axis)
    return order


def _within(placement: Placement) -> str:
    if isinstance(placement, BlockShard):
        sizes = placement.blocks
        if len(sizes) > 4:
            return f" within each of {len(sizes)} blocks"
        return f" within blocks of {_listed(list(map(str, sizes)))}"
    return f" within each of {placement.split_factor} parts" if isinstance(placement, StridedShard) else ""


def _axis(name: str) -> str:
    """Return the name of an axis. `dp.cp` means two axes that act as one."""
    return _listed(name.split(".")) + (" together" if "." in name else "")


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def _chunks_in_words(layout: TensorLayout) -> str:
    if not isinstance(layout.form, BoxesForm):
        return "ranges of the flattened tensor"
    sizes = chunk_sizes(layout)
    if sizes is None:
        count = sum(1 for _ in layout.chunks())
        return f"{count} irregular chunk{'s' * (count != 1)}" if count else "empty"
    return "; ".join(f"dim {dim} in {len(its)} chunks{_uneven(its)}" for dim, its in sizes) or "unsharded"


def _uneven(sizes: Sequence[int]) -> str:
    """Return "" for chunks as `Shard` makes them: equal, the last one perhaps smaller."""
    return "" if len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0] else " of different sizes"


def chunk_sizes(layout: TensorLayout) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return each dim that is split, with the sizes of its chunks. None if the chunks do not form a grid."""
    boxes = {box for _, box in layout.chunks()}
    starts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(len(layout.spec.shape))]
    if len(boxes) != math.prod(map(len, starts)) or any(at[:1] != [0] for at in starts):
        return None
    stops = [dict(zip(at, [*at[1:], size])) for at, size in zip(starts, layout.spec.shape)]
    if any(stops[dim][at] != at + size for box in boxes for dim, (at, size) in enumerate(zip(box.offsets, box.sizes))):
        return None
    pieces = [tuple(stop - start for start, stop in of.items()) for of in stops]
    return tuple((dim, sizes) for dim, sizes in enumerate(pieces) if len(sizes) > 1)


_LEGEND = (
    ("S(d)", r"(?<!_)S\(", "dim d is sharded over this axis of the mesh"),
    ("_S(d, n)", r"_S\(", "dim d is sharded over this axis after other axes sharded it into n parts"),
    ("B(d, a+b)", r"B\(", "dim d consists of blocks of a and b rows, and this axis shards each block by itself"),
    ("R", r"\bR\b", "replicated: all ranks along this axis hold the same"),
    ("on dp=4,tp=2", r"=", "the mesh: its axes and their sizes, in the order of the placements"),
    ("world=4", r"\bworld=", "all ranks that hold the tensor, where no mesh was recorded"),
    ("dp.cp=8", r"\w\.\w+=", "two axes that shard as one"),
    ("@0,2,1,3", r"@", "the ranks of the mesh in row-major order"),
    ("tp,dp:", r"\w:", "the axes of the placements, in the order in which they shard"),
)


def legend(short_forms: Iterable[str]) -> list[tuple[str, str]]:
    """Explain the notation that occurs in these short forms."""
    texts = set(short_forms)
    return [(sign, words) for sign, pattern, words in _LEGEND if any(re.search(pattern, text) for text in texts)]
