"""`reshard explain`: the short form of a layout, in words and as a picture."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.arguments import AsJson, UsageError
from reshard.cli.show import console, print_json, print_legend, print_text

if TYPE_CHECKING:
    from planners.geometry.layout import ProductForm

__all__ = ["explain"]

_DRAWN_RANKS = 64


def explain(
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="A short form, as inspect and plan print it.")],
    shape: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Shape of the tensor to draw, such as 4096,1024.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the short form of a layout.

    Prints the layout in words and draws which rank holds which rows of a tensor. Without --shape, the tensor is the
    smallest that every rank gets a part of. Larger meshes than 64 ranks are drawn only with --shape.
    """
    from planners.errors import PlanError
    from planners.geometry.layout import TensorLayout, TensorSpec
    from planners.geometry.layout_text import in_words, parse_layout
    from planners.reports.cuts import draw_cuts

    screen = console()
    try:
        form = parse_layout(layout)
        tensor = TensorLayout.of(TensorSpec("tensor", _shape(form, shape), "float32"), form)
    except PlanError as error:
        raise UsageError(str(error)) from None
    if as_json:
        placements, axes = list(map(str, form.placements)), [{"name": n, "size": size} for n, size in form.mesh.axes]
        print_json({"words": in_words(form), "mesh": axes, "placements": placements})
        return
    print_text(screen, in_words(form), style="bold")
    if form.mesh.size <= _DRAWN_RANKS or shape is not None:
        screen.print()
        screen.print(draw_cuts(tensor, screen.width), markup=False, soft_wrap=True)
    else:
        print_text(
            screen, f"not drawn, since it has {form.mesh.size} ranks: draw it with --shape, such as --shape 4096,1024"
        )
    print_legend(screen, [layout])


def _shape(form: ProductForm, given: str | None) -> tuple[int, ...]:
    """Return what was given, or a shape of two dims at least, in which every axis finds something to shard."""
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
