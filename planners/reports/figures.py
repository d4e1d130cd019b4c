"""The pictures on a plan's page, as SVG text: a tensor's cuts, a traffic matrix, bars. Each is of bounded size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout
from planners.geometry.ownership import Ints
from planners.units import format_bytes

__all__ = ["bars", "cuts", "matrix", "rank_color"]

_WIDTH = 340
_MAX_EXACT_CELLS = 64
_SAMPLED_CELLS = 96
_MAX_BARS = 80
_RAMP = ((46, 74, 140), (33, 128, 141), (56, 138, 92), (146, 132, 32), (192, 104, 44), (190, 62, 86))
"""Colors of ranks from the first to the last; of similar lightness, so that white text is legible on all."""


def rank_color(rank: int, world_size: int) -> str:
    """The color of a rank in all pictures of a page: neighbours look alike."""
    at = rank / max(world_size - 1, 1) * (len(_RAMP) - 1)
    i = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - i)) for a, b in zip(_RAMP[i], _RAMP[i + 1]))
    return f"#{red:02x}{green:02x}{blue:02x}"


class _Axis(NamedTuple):
    """How a dim is shown: at these edges. `exact` if every cut of the layout is one of them."""

    edges: list[int]
    exact: bool


def cuts(layout: TensorLayout, world_size: int, caption: str) -> str:
    """The regions of a tensor, each in the color of the lowest rank that holds it. Rows are dim 0, columns dim 1."""
    shape = layout.spec.shape
    if 0 in shape:
        return f'<p class="empty">{escape(caption)}: the tensor of shape {shape} has no elements.</p>'
    seen = shape[-1:] if len(shape) == 1 else shape[:2]
    axes = [_axis(layout, d, size) for d, size in enumerate(seen)]
    if math.prod(len(axis.edges) for axis in axes) > 2 * _MAX_EXACT_CELLS * 16:  # both dims are cut often
        axes = [_sampled(axis, size, 40) for axis, size in zip(axes, seen)]
    rows = axes[0] if len(axes) == 2 else _Axis([0, 1], True)
    columns = axes[-1] if axes else _Axis([0, 1], True)
    height = 64.0 if len(axes) < 2 else min(max(_WIDTH * shape[0] / shape[1], 120.0), 300.0)
    body = []
    few = (len(rows.edges) - 1) * (len(columns.edges) - 1) <= 64
    fine = ' class="fine"' if len(rows.edges) > 33 or len(columns.edges) > 33 else ""
    owner = _Owners(layout)
    for r, (top, bottom) in enumerate(zip(rows.edges, rows.edges[1:])):
        for c, (left, right) in enumerate(zip(columns.edges, columns.edges[1:])):
            index = [(top + bottom) // 2, (left + right) // 2][2 - len(axes) :] if axes else []
            ranks = owner.at([*index, *(0 for _ in shape[2:])])
            x, w = _span(columns.edges, c, _WIDTH)
            y, h = _span(rows.edges, r, height)
            w, h = (w + 0.5, h + 0.5) if fine else (w, h)  # no seams where cells are not outlined
            body.append(_cell(x, y, w, h, ranks, world_size, few))
    rest = f", at index 0 of the {len(shape) - 2} other dims" if len(shape) > 2 else ""
    note = "" if rows.exact and columns.exact else ", sampled: there are more cuts than can be shown"
    label = f"{caption}: shape {list(shape)}{rest}{note}"
    words = escape(_words(layout, owner) + rest + note)
    return (
        f"<figure><figcaption>{escape(caption)}<small>{words}</small></figcaption>"
        f'<svg{fine} viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg></figure>"
    )


def _axis(layout: TensorLayout, dim: int, size: int) -> _Axis:
    product = layout.product
    if product is not None:
        edges = np.unique(np.concatenate(([0, size], product.dims[dim].starts, product.dims[dim].stops)))
    else:
        found = {0, size}
        for _, box in layout.chunks():
            found |= {box.offsets[dim], box.stops[dim]}
        edges = np.array(sorted(found), dtype=np.int64)
    return _sampled(_Axis(edges.tolist(), True), size, _SAMPLED_CELLS, at_most=_MAX_EXACT_CELLS)


def _sampled(axis: _Axis, size: int, cells: int, at_most: int = 40) -> _Axis:
    """The axis itself if it has few cells, else that many cells of equal size."""
    if len(axis.edges) - 1 <= min(at_most, cells):
        return axis
    return _Axis([size * i // cells for i in range(cells + 1)] if size >= cells else list(range(size + 1)), False)


class _Owners:
    """Who holds an element."""

    def __init__(self, layout: TensorLayout) -> None:
        self._product = layout.product
        self._chunks = [] if self._product is not None else list(layout.chunks())
        self._dims = []
        for own in self._product.dims if self._product is not None else ():
            order = np.argsort(own.starts, kind="stable")
            self._dims.append((own.starts[order], own.owner_of[order]))

    @property
    def pieces(self) -> int:
        """How many distinct regions there are."""
        if self._product is None:
            return len(self._chunks)
        return math.prod(int((own.local_sizes > 0).sum()) for own in self._product.dims)

    @property
    def copies(self) -> int:
        """How many ranks hold each region."""
        return 1 if self._product is None else len(self._product.replica_positions)

    def at(self, index: Sequence[int]) -> list[int]:
        if self._product is None:
            here = Box(index, (1,) * len(index))
            return [rank for rank, box in self._chunks if box.contains(here)]
        owners = [int(o[np.searchsorted(starts, i, side="right") - 1]) for (starts, o), i in zip(self._dims, index)]
        ranks: list[int] = sorted(self._product.replicas(owners).tolist())
        return ranks


def _words(layout: TensorLayout, owners: _Owners) -> str:
    copies = f", {owners.copies:,} ranks hold each" if owners.copies > 1 else ""
    placed = str(layout.form) if layout.product is not None and not layout.product.mesh.has_explicit_ranks else ""
    return f" {placed}{' · ' if placed else ''}{owners.pieces:,} region{'s' * (owners.pieces != 1)}{copies}"


def _span(edges: list[int], i: int, length: float) -> tuple[float, float]:
    total = edges[-1] - edges[0]
    return length * (edges[i] - edges[0]) / total, length * (edges[i + 1] - edges[i]) / total


def _cell(x: float, y: float, w: float, h: float, ranks: list[int], world_size: int, label: bool) -> str:
    if not ranks:
        return (
            f'<rect class="hole" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"><title>nobody</title></rect>'
        )
    color = rank_color(ranks[0], world_size)
    words = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4:,} more" if len(ranks) > 4 else "")
    out = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{color}">'
        f"<title>rank{'s' * (len(ranks) > 1)} {words}</title></rect>"
    )
    text = words if len(words) * 7.5 < w - 6 else f"{ranks[0]}{'+' * (len(ranks) > 1)}"
    if label and h >= 15 and len(text) * 7.5 < w - 2:
        out += f'<text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}">{text}</text>'
    return out


# --- traffic ---


def matrix(sums: Ints, labels: Sequence[str], unit: str) -> str:
    """Bytes from each row to each column: the darker, the more, on a logarithmic scale."""
    n, most = len(labels), max(int(sums.max(initial=0)), 1)
    side, margin = 420.0, 58.0
    step = side / n
    positive = sums[sums > 0]
    least = int(positive.min()) if len(positive) else 1
    body = [f'<rect class="ground" x="{margin}" y="{margin}" width="{side}" height="{side}"/>']
    gap = 0.6 if step > 5 else 0.0
    for i, j in np.argwhere(sums > 0).tolist():
        value = int(sums[i, j])
        level = 0.25 + 0.75 * (math.log(value / least) / math.log(most / least) if most > least else 1.0)
        body.append(
            f'<rect x="{margin + j * step:.1f}" y="{margin + i * step:.1f}" width="{step - gap:.2f}" '
            f'height="{step - gap:.2f}" fill-opacity="{level:.2f}">'
            f"<title>{escape(unit)} {escape(labels[i])} to {escape(labels[j])}: {format_bytes(value)}</title></rect>"
        )
    for i in _ticks(n, step):
        at = margin + (i + 0.5) * step
        body.append(f'<text class="tick end" x="{margin - 6}" y="{at:.1f}">{escape(labels[i].split("–")[0])}</text>')
        body.append(f'<text class="tick" x="{at:.1f}" y="{margin - 8}">{escape(labels[i].split("–")[0])}</text>')
    size = side + margin + 4
    return (
        f'<svg class="matrix" viewBox="0 0 {size:.0f} {size:.0f}" role="img" '
        f'aria-label="bytes between {n} {escape(unit)}s">{"".join(body)}'
        f'<text class="tick" x="{margin + side / 2}" y="12">to {escape(unit)}</text>'
        f'<text class="tick" transform="translate(9 {margin + side / 2}) rotate(-90)">from {escape(unit)}</text></svg>'
        f'<p class="legend"><span class="swatch faint"></span>{format_bytes(least)}'
        f'<span class="swatch"></span>{format_bytes(most)} a cell; logarithmic</p>'
    )


def _ticks(n: int, step: float) -> Iterator[int]:
    every = max(1, math.ceil(48 / step)) if n > 8 else 1
    yield from range(0, n, every)


# --- bars ---


def bars(loads: Ints, label: str) -> str:
    """Bytes of each rank as a bar; if there are many, the mean of neighbours with the largest of them on top."""
    world, n = len(loads), min(len(loads), _MAX_BARS)
    edges = [world * i // n for i in range(n + 1)]
    most = max(int(loads.max(initial=0)), 1)
    width, height, left, base = 480.0, 200.0, 66.0, 180.0
    step, body = (width - left) / n, []
    for share in (0.0, 0.5, 1.0):
        y = base - share * (base - 12)
        body.append(f'<line x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="tick end" x="{left - 6}" y="{y:.1f}">{format_bytes(most * share)}</text>')
    for i, (first, last) in enumerate(itertools.pairwise(edges)):
        some = loads[first:last]
        mean, top = float(some.mean()), int(some.max())
        who = f"rank {first}" if last - first == 1 else f"ranks {first:,} to {last - 1:,}: mean"
        x, tall, peak = left + i * step, mean / most * (base - 12), top / most * (base - 12)
        gap = 1.0 if step > 4 else 0.2
        more = f", most {format_bytes(top)}" if last - first > 1 else ""
        body.append(
            f"<g><title>{who} {format_bytes(mean)}{more}</title>"
            f'<rect class="peak" x="{x:.1f}" y="{base - peak:.1f}" width="{step - gap:.2f}" height="{peak:.1f}"/>'
            f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{step - gap:.2f}" height="{tall:.1f}"/></g>'
        )
    every = max(1, -(-n // 6))
    for i in range(0, n, every):
        body.append(f'<text class="tick" x="{left + (i + 0.5) * step:.1f}" y="{base + 11}">{edges[i]:,}</text>')
    return (
        f'<figure class="wide"><figcaption>{escape(label)}</figcaption>'
        f'<svg class="bars" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}: {format_bytes(most)} at most">{"".join(body)}</svg></figure>'
    )
