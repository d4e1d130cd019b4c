"""Layouts in words, their short forms, and the legend of these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from planners.errors import PlanError
from planners.geometry.layout import BoxesForm, ProductForm, TensorLayout
from planners.geometry.mesh import BlockShard, Mesh, Placement, Replicate, StridedShard, parse_placements

__all__ = ["chunk_sizes", "in_both_forms", "in_words", "legend", "parse_layout", "short_form"]


def short_form(layout: TensorLayout | ProductForm) -> str:
    """`"S(0),R on dp=4,tp=2"`, or nothing for a layout without a mesh, which has no short form."""
    form = layout.form if isinstance(layout, TensorLayout) else layout
    if not isinstance(form, ProductForm) or not form.mesh.axes:
        return ""
    return f"{','.join(map(str, form.placements))} on {form.mesh}"


def parse_layout(text: str) -> ProductForm:
    """The mesh and placements that a short form gives. Inverse of `short_form`.

    Raises PlanError for text that cannot be read, or for a number of placements that is not that of the axes.
    """
    placements, on, mesh = text.partition(" on ")
    if not on:
        raise PlanError(f"cannot read the layout {text!r}: write PLACEMENTS on MESH, such as 'S(0),R on dp=4,tp=2'")
    return ProductForm(Mesh.parse(mesh.strip()), parse_placements(placements))


def in_words(layout: TensorLayout | ProductForm) -> str:
    """Return how ranks share a tensor. Axes are named in the order in which they shard it; an axis
    of one rank is left out.

    >>> in_words(parse_layout("R,S(1) on dp=2,tp=2"))
    'replicated over dp; dim 1 sharded over tp'
    >>> in_words(parse_layout("_S(0, 2),S(0) on dp=2,tp=2"))
    'dim 0 sharded over tp, then dp'
    """
    form = layout.form if isinstance(layout, TensorLayout) else layout
    if not isinstance(form, ProductForm):
        assert isinstance(layout, TensorLayout)
        return _chunks_in_words(layout)
    axes = [(n, size, p) for (n, size), p in zip(form.mesh.axes, form.placements) if size > 1]
    copied = [_axis(name) for name, _, placement in axes if isinstance(placement, Replicate)]
    words = [f"replicated over {_listed(copied)}"] if copied else []
    for dim in sorted({p.dim for _, _, p in axes if not isinstance(p, Replicate)}):
        its = [(n, size, p) for n, size, p in axes if not isinstance(p, Replicate) and p.dim == dim]
        words.append(f"dim {dim} sharded over {', then '.join(_in_order(its))}")
    ranks = form.mesh.ranks.tolist()
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    explicit = [f"on rank{'s' * (len(ranks) > 1)} {shown}"] if form.mesh.has_explicit_ranks else []
    return "; ".join([*(words or ["unsharded"]), *explicit])


def in_both_forms(layout: TensorLayout) -> str:
    """Words and the short form, `"dim 0 sharded over dp (S(0) on dp=4)"`. Of many ranks the first ones are listed."""
    short = re.sub(r"(@(?:\d+,){8})\d.*", r"\1...", short_form(layout))
    return f"{in_words(layout)} ({short})" if short else in_words(layout)


def _in_order(axes: Sequence[tuple[str, int, Placement]]) -> list[str]:
    """Axes of one dim, the one that shards first first. `_StridedShard(dim, n)` says that the axes before it have n
    ranks together; where no such axes exist, the dim has n parts that are sharded by themselves."""
    order: list[tuple[str, int]] = []
    for name, size, placement in reversed(axes):
        pieces = placement.split_factor if isinstance(placement, StridedShard) else 1
        places = [i for i in range(len(order) + 1) if math.prod(ranks for _, ranks in order[:i]) == pieces]
        if not places:
            return [_axis(n) + _within(p) for n, _, p in axes]
        blocks = _within(placement) if isinstance(placement, BlockShard) else ""
        order.insert(places[0], (_axis(name) + blocks, size))
    return [words for words, _ in order]


def _within(placement: Placement) -> str:
    if isinstance(placement, BlockShard):
        sizes = placement.blocks
        if len(sizes) > 4:
            return f" within each of {len(sizes)} blocks"
        return f" within blocks of {_listed(list(map(str, sizes)))}"
    return f" within each of {placement.split_factor} parts" if isinstance(placement, StridedShard) else ""


def _axis(name: str) -> str:
    """`dp.cp` are two axes that act as one."""
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
        return f"{count} chunk{'s' * (count != 1)} of any shape"
    return "; ".join(f"dim {dim} in {len(its)} chunks{_uneven(its)}" for dim, its in sizes) or "in one chunk"


def _uneven(sizes: Sequence[int]) -> str:
    """Return "" for chunks as `Shard` makes them: equal, the last one perhaps smaller."""
    return "" if len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0] else " of different sizes"


def chunk_sizes(layout: TensorLayout) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return each dim that is split, with the sizes of its chunks. None if the chunks are no grid."""
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
    ("dp.cp=8", r"\w\.\w+=", "two axes that shard as one"),
    ("@0,2,1,3", r"@", "the ranks of the mesh in row-major order"),
)


def legend(short_forms: Iterable[str]) -> list[tuple[str, str]]:
    """Return what the signs that occur in these short forms mean."""
    texts = set(short_forms)
    return [(sign, words) for sign, pattern, words in _LEGEND if any(re.search(pattern, text) for text in texts)]
