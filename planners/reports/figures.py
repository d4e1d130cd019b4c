"""The pictures on a plan's page, as SVG text: a tensor's cuts, a traffic matrix, bars. Each is of bounded size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np

from planners.geometry.layout import TensorLayout
from planners.geometry.ownership import Ints
from planners.reports.regions import Owners, edges
from planners.units import format_bytes

__all__ = ["bars", "cuts", "matrix", "placed", "rank_color"]

_WIDTH = 340
_MAX_EXACT_CELLS = 64
_SAMPLED_CELLS = 96
_MAX_BARS = 128
_WIDE = 1000.0
"""Of figures that take the width of the page."""
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
    owner = Owners(layout)
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
    return _sampled(_Axis(edges(layout, dim), True), size, _SAMPLED_CELLS, at_most=_MAX_EXACT_CELLS)


def _sampled(axis: _Axis, size: int, cells: int, at_most: int = 40) -> _Axis:
    """The axis itself if it has few cells, else that many cells of equal size."""
    if len(axis.edges) - 1 <= min(at_most, cells):
        return axis
    return _Axis([size * i // cells for i in range(cells + 1)] if size >= cells else list(range(size + 1)), False)


def placed(layout: TensorLayout) -> str:
    """The placements in words: `S(0), R over dp=2,tp=2`."""
    if layout.mesh is None or layout.placements is None:
        return "flat ranges" if hasattr(layout.form, "ranges") else "explicit boxes"
    mesh = layout.mesh
    axes = ",".join(f"{name}={size}" for name, size in mesh.axes)
    some = ""
    if mesh.has_explicit_ranks:
        some = ", ranks in another order" if mesh.world_size == mesh.size else ", on some ranks"
    return f"{', '.join(map(str, layout.placements))} over {axes or 'one rank'}{some}"


def _words(layout: TensorLayout, owners: Owners) -> str:
    copies = f", {owners.copies:,} ranks hold each" if owners.copies > 1 else ""
    return f"{placed(layout)} · {owners.pieces:,} region{'s' * (owners.pieces != 1)}{copies}"


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


def matrix(sums: Ints, unit: str, each: int) -> str:
    """Bytes from each row to each column: the darker, the more, on a logarithmic scale. A row or column is `each`
    units, such as 32 hosts."""
    rows, columns = sums.shape
    most = max(int(sums.max(initial=0)), 1)
    left, top = 66.0, 40.0
    wide = (_WIDE - left - 2) / columns
    high = min(max(min(wide, 56.0), 4.0), max(440.0 / rows, 4.0))
    positive = sums[sums > 0]
    least = int(positive.min()) if len(positive) else 1
    width, height = columns * wide, rows * high
    body = [f'<rect class="ground" x="{left}" y="{top}" width="{width:.1f}" height="{height:.1f}"/>']
    gap = 0.6 if min(wide, high) > 5 else 0.0
    for i, j in np.argwhere(sums > 0).tolist():
        value = int(sums[i, j])
        level = 0.25 + 0.75 * (math.log(value / least) / math.log(most / least) if most > least else 1.0)
        words = f"{_units(unit, i, each)} to {_units(unit, j, each)}: {format_bytes(value)}"
        body.append(
            f'<rect x="{left + j * wide:.1f}" y="{top + i * high:.1f}" width="{wide - gap:.2f}" '
            f'height="{high - gap:.2f}" fill-opacity="{level:.2f}"><title>{words}</title></rect>'
        )
    middle = 0.5 if each == 1 else 0.0
    for number in _round_numbers(rows * each, int(height // 30)):
        y = top + (number / each + middle) * high
        body.append(f'<text class="tick end" x="{left - 8}" y="{y:.1f}">{number:,}</text>')
    for number in _round_numbers(columns * each, 14):
        x = left + (number / each + middle) * wide
        body.append(f'<text class="tick" x="{x:.1f}" y="{top - 10}">{number:,}</text>')
    total = top + height + 6
    scale = f"{format_bytes(most)} a cell"
    if least < most:
        scale = f'{format_bytes(least)}<span class="swatch"></span>{scale}; logarithmic'
    faint = ' class="swatch faint"' if least < most else ' class="swatch"'
    return (
        f'<div class="wide" tabindex="0"><svg class="matrix" viewBox="0 0 {_WIDE:.0f} {total:.0f}" role="img" '
        f'aria-label="bytes from {rows} to {columns} rows and columns of {unit}s">{"".join(body)}'
        f'<text class="tick" x="{left + width / 2:.1f}" y="12">to {unit}</text>'
        f'<text class="tick" transform="translate(9 {top + height / 2:.1f}) rotate(-90)">from {unit}</text></svg></div>'
        f'<p class="legend"><span{faint}></span>{scale}</p>'
    )


def _units(unit: str, index: int, each: int) -> str:
    if each == 1:
        return f"{unit} {index:,}"
    return f"{unit}s {index * each:,} to {(index + 1) * each - 1:,}"


def _round_numbers(end: int, most: int) -> Iterator[int]:
    """0 and further round numbers below `end`: at most about so many, in steps of 1, 2 or 5 times a power of ten."""
    step = next(s for s in _steps(10) if end / s <= max(most, 1))
    yield from range(0, end, step)


def _steps(base: int) -> Iterator[int]:
    for power in itertools.count():
        yield from (factor * base**power for factor in (1, 2, 5))


# --- bars ---


def bars(loads: Ints, label: str) -> str:
    """Bytes of each rank as a bar; if there are many, the mean of neighbours with the largest of them on top."""
    world, n = len(loads), min(len(loads), _MAX_BARS)
    edges = [world * i // n for i in range(n + 1)]
    most = max(int(loads.max(initial=0)), 1)
    height, left, base, top = 180.0, 66.0, 160.0, 10.0
    marks = _round_sizes(most)
    step, body = (_WIDE - left) / max(world, 1), []
    for mark in marks:
        y = base - mark / marks[-1] * (base - top)
        body.append(f'<line x1="{left}" x2="{_WIDE:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="tick end" x="{left - 6}" y="{y:.1f}">{format_bytes(mark)}</text>')
    for first, last in itertools.pairwise(edges):
        some = loads[first:last]
        mean, peak = float(some.mean()), int(some.max())
        who = f"rank {first}" if last - first == 1 else f"ranks {first:,} to {last - 1:,}: mean"
        x, wide = left + first * step, (last - first) * step
        tall, taller = (size / marks[-1] * (base - top) for size in (mean, peak))
        gap = 1.0 if wide > 4 else 0.2
        more = f", most {format_bytes(peak)}" if last - first > 1 else ""
        body.append(
            f"<g><title>{who} {format_bytes(mean)}{more}</title>"
            f'<rect class="peak" x="{x:.1f}" y="{base - taller:.1f}" width="{wide - gap:.2f}" height="{taller:.1f}"/>'
            f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{wide - gap:.2f}" height="{tall:.1f}"/></g>'
        )
    middle = 0.5 if n == world else 0.0
    for rank in _round_numbers(world, 14):
        body.append(f'<text class="tick" x="{left + (rank + middle) * step:.1f}" y="{base + 11}">{rank:,}</text>')
    grouped = "" if n == world else f"; each bar is the mean of some {world // n:,} ranks, the largest of them is faint"
    return (
        f'<figure class="wide" tabindex="0"><figcaption>{escape(label)}<small>by rank{grouped}</small></figcaption>'
        f'<svg class="bars" viewBox="0 0 {_WIDE:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}: {format_bytes(most)} at most">{"".join(body)}</svg></figure>'
    )


def _round_sizes(most: int) -> list[int]:
    """0 and round sizes up to the first that is not below `most`: 1, 2 or 5, 10, 20, 50, 100, 200, 500 of a unit."""
    most = max(most, 1)
    unit = 1024 ** int(math.log(most, 1024) + 1e-9)
    step = next(s for s in (unit * factor for factor in _steps(10)) if most / s <= 5)
    if step == unit and unit > 1 and most / unit < 2.5:
        step = unit // 2  # 1.5 MiB: half units rather than one line
    return list(range(0, most + step, step))
