"""`reshard explain`: the short form of a layout, in words and as a picture."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from reshard.cli.arguments import AsJson, Legend, UsageError
from reshard.cli.output import axes_as_json, console, counted, print_json, print_legend, print_lines, print_text

if TYPE_CHECKING:
    from planners.geometry.layout import ProductForm

_ALL_SIGNS = "tp,dp: S(0),_S(0, 2),B(0, 1+2),R on dp.cp=4,world=2 @0,1"
_DRAWN_RANKS = 64
_DRAWN_DIMS = 63
_DRAWN_SPLITS = 1 << 20


def explain(
    layout: Annotated[
        str,
        typer.Argument(metavar="LAYOUT", help="A short form, as inspect and plan print it. Optional with --legend."),
    ] = "",
    shape: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Draw a tensor of this shape, such as 4096,1024.")
    ] = None,
    legend: Legend = False,
    as_json: AsJson = False,
) -> None:
    """Explain the short form of a layout.

    Prints the layout in words, and draws which rank holds which rows of a tensor. Without --shape,
    draws the smallest tensor of which every rank gets a part. A mesh of more than 64 ranks needs
    --shape.

    Also explains placements without a mesh, as torch prints them, and topologies, such as
    fsdp=4,tp=2. Does not draw these.
    """
    from planners.errors import PlanError
    from planners.geometry.topologies import looks_like_a_topology

    if not layout.strip():
        if not legend or as_json:
            raise UsageError(
                "explain needs a LAYOUT, such as 'S(0),R on dp=4,tp=2'. The notation: reshard explain --legend"
            )
        print_legend([_ALL_SIGNS], legend)
        return
    layout = re.sub(r"(?<=[)R])\s+(?=[A-Za-z_][\w.\-]*=)", " on ", layout, count=1)
    has_mesh = re.search(r"\bon\b", layout) is not None
    if shape is not None and not has_mesh:
        raise UsageError(f"--shape needs a mesh: write {layout!r} with one, such as 'S(0),R on dp=4,tp=2'")
    try:
        if looks_like_a_topology(layout):
            said = _topology(layout)
        elif has_mesh:
            said = _layout(layout, shape)
        else:
            said = _placements(layout)
    except PlanError as error:
        words = str(error).removesuffix(" (tensor 'tensor')")
        more = ". The notation: reshard explain --legend" * words.startswith("unknown placement")
        raise UsageError(f"{words}{more}") from None
    if as_json:
        print_json(said.data)
        return
    print_text(said.words, style="bold")
    print_lines(*said.lines)
    if said.note:
        print_text(said.note)
    print_legend(said.signs, legend)


class _Explanation(NamedTuple):
    words: str
    data: dict[str, Any]
    """The explanation for `--json`."""
    signs: list[str]
    """Texts whose signs the legend explains."""
    lines: Sequence[str] = ()
    note: str = ""


def _layout(text: str, shape: str | None) -> _Explanation:
    """Explain placements on a mesh."""
    from planners.geometry.layout import TensorLayout, TensorSpec
    from planners.geometry.layout_text import in_words, parse_layout, short_form
    from planners.reports.terminal_pictures import draw_cuts

    form = parse_layout(text)
    if max(*(getattr(each, "dim", 0) for each in form.placements), (shape or "").count(",")) >= _DRAWN_DIMS:
        raise UsageError(f"only tensors of at most {_DRAWN_DIMS} dims are drawn")
    if max(getattr(each, "split_factor", 1) for each in form.placements) > _DRAWN_SPLITS:
        raise UsageError(f"only layouts with split factors of at most {_DRAWN_SPLITS:,} are drawn")
    tensor = TensorLayout.of(TensorSpec("tensor", _shape(form, shape), "float32"), form)
    words, placements = in_words(form), list(map(str, form.placements))
    data = {
        "words": words,
        "short_form": short_form(form),
        "mesh": axes_as_json(form.mesh),
        "placements": placements,
    }
    is_drawn = form.mesh.size <= _DRAWN_RANKS or shape is not None
    lines = ["", draw_cuts(tensor, console().width)] if is_drawn else ()
    note = f"not drawn, because it has {form.mesh.size} ranks: to draw it, add --shape, such as --shape 4096,1024"
    return _Explanation(words, data, [text], lines, note * (not is_drawn))


def _placements(text: str) -> _Explanation:
    """Explain placements without the mesh that they are for."""
    from planners.geometry.layout_text import one_in_words
    from planners.geometry.mesh import parse_placements

    head, colon, tail = text.rpartition(":")
    names = [name.strip() for name in head.split(",")] if colon else []
    found = parse_placements(tail)
    if names and len(names) != len(found):
        raise UsageError(f"{text!r} has {counted(len(found), 'placement')} for the {len(names)} axes before the colon")
    axes = names or [f"axis {i}" for i, _ in enumerate(found)]
    words = "; ".join(map(one_in_words, found, axes))
    short = ",".join(map(str, found))
    mesh = ",".join(f"{name.replace(' ', '')}=2" for name in axes)
    example = shlex.join(["reshard", "explain", f"{f'{head}: ' * bool(colon)}{short} on {mesh}"])
    note = f"Which rank holds what depends on the mesh. To draw it, add the names and sizes of its axes: {example}"
    data = {"words": words, "mesh": None, "placements": list(map(str, found))}
    return _Explanation(words, data, [short, f"{head}:" * bool(colon)], note=note)


def _topology(text: str) -> _Explanation:
    """Explain a topology by its rules."""
    from planners.errors import PlanError, sentence
    from planners.geometry.topologies import topology_of

    try:
        topology = topology_of(text)
    except PlanError as error:
        example = (
            f" Or give placements on this mesh, such as '{','.join(['S(0)', *['R'] * text.count(',')])} on {text}'"
        )
        is_mesh = re.fullmatch(r"[\w.\-]+=\d+(,[\w.\-]+=\d+)*", text)
        raise UsageError(f"{sentence(str(error))}{example if is_mesh else ''}") from None
    rules = [(rule.pattern, rule.text) for rule in topology.rules]
    wide = max(len(pattern) for pattern, _ in rules)
    lines = [f"  {pattern:<{wide}}  {placements}" for pattern, placements in rules]
    words = f"the mesh {topology.mesh} of {counted(topology.mesh.size, 'rank')}; the first matching rule applies:"
    its_rules = [{"glob": glob, "placements": of} for glob, of in rules]
    data = {"words": words, "mesh": axes_as_json(topology.mesh), "rules": its_rules}
    note = f"To see what these ranks read from a checkpoint: reshard plan CHECKPOINT {text}"
    return _Explanation(words, data, [f"{of} on {topology.mesh}" for _, of in rules], lines, note)


def _shape(form: ProductForm, given: str | None) -> tuple[int, ...]:
    """Return the given shape. By default, return a shape of at least two dims, which every axis can shard."""
    if given is not None:
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", given):
            raise UsageError(f"cannot read the shape {given!r}: write sizes such as 4096,1024")
        return tuple(map(int, given.split(",")))
    from planners.geometry.mesh import BlockShard, Replicate

    sizes = {0: 1, 1: 1}
    for axis, placement in zip(form.mesh.shape, form.placements):
        if not isinstance(placement, Replicate):
            parts = axis * getattr(placement, "split_factor", 1)
            sizes[placement.dim] = math.lcm(sizes.get(placement.dim, 1) * axis, parts)
    sizes |= {p.dim: sum(p.blocks) for p in form.placements if isinstance(p, BlockShard)}
    return tuple(sizes.get(dim, 1) for dim in range(max(sizes) + 1))
