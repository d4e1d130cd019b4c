"""`to_html`: a plan as one self-contained page of bounded size, for any number of ranks and tensors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from planners.errors import PlanError
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.layout_text import in_both_forms, legend, short_form
from planners.geometry.mesh import Ints
from planners.plans.cost import Cluster, estimate
from planners.plans.load import LoadPlan
from planners.plans.plan import Plan, verify
from planners.plans.routing import Traffic, intersection_of, pair_groups
from planners.plans.save import SavePlan
from planners.plans.transfer import TransferPlan
from planners.reports.cuts import Owners, edges
from planners.units import format_bytes, format_seconds, format_some

__all__ = ["to_html"]


_READS = """<h2 id="traffic">What each rank reads of what each rank saved</h2>
<p>All ranks read from storage; none sends to another. If several ranks hold a copy, the lowest counts as the one that
saved it."""
_SENDS = """<h2 id="traffic">What each rank sends to each rank</h2>
<p>What a rank copies within its own memory is not counted."""
_MAX_MATRIX = 64
_MAX_TENSORS = 8
_MAX_ROWS = 400


@dataclass(frozen=True)
class _Story:
    """What the page says about a plan of any kind."""

    title: str
    figures: list[tuple[str, str]]
    sides: list[tuple[str, StateLayout]]
    """One or two layouts with their captions."""
    loads: list[tuple[str, Ints]]
    """Bytes per rank, with what they are."""
    traffic: Iterable[Traffic] | None
    between: tuple[str, str]
    """What the rank of a row did, and what that of a column does, as in `("sent by", "received by")`."""


def to_html(
    plan: LoadPlan | SavePlan | TransferPlan,
    *,
    title: str | None = None,
    ranks_per_host: int = 8,
    source: str = "",
    target: str = "",
    cluster: Cluster | None = None,
    wrong: Sequence[str] = (),
) -> str:
    """Draw what `to_html` of a plan returns; see there.

    Raises PlanError for a value that is not a plan, or for less than one rank per host.
    """
    if ranks_per_host < 1:
        raise PlanError(f"ranks_per_host must be >= 1, got {ranks_per_host}")
    if not isinstance(cluster, Cluster | None):
        raise PlanError(f"cluster must be a Cluster, got {cluster!r}")
    story = _story(plan)
    world = max(layout.world_size for _, layout in story.sides)
    figures = [*story.figures, *_held(story.sides)]
    if cluster is not None:
        ranks_per_host = cluster.ranks_per_host
        seconds = format_seconds(estimate(plan, cluster).seconds)
        figures.append(("estimated time, at least", f"{seconds} ({cluster.rates})"))
    parts = {
        "title": escape(title or story.title),
        "style": STYLE,
        "between": _between(source, target),
        "verdict": _verdict(plan, wrong),
        "figures": figures_of(figures),
        "tensors": _tensors(story, world),
        "traffic": _traffic(story, ranks_per_host),
        "loads": "".join(bars(loads, label) for label, loads in story.loads),
        "table": _table(story),
        "notation": notation(layout for _, layout in story.sides),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE)


def _between(source: str, target: str) -> str:
    sides = [f"{word} <b>{escape(side)}</b>" for word, side in (("from", source), ("to", target)) if side]
    return f'<p class="between">{" ".join(sides)}</p>' if sides else ""


def _verdict(plan: LoadPlan | SavePlan | TransferPlan, wrong: Sequence[str]) -> str:
    """Return what the proof of this plan says, and what else is wrong."""
    report = verify(plan)
    right = f'<p class="verdict">OK: {escape(report.covers)}.</p>'
    return listed("Not correct", [*wrong, *map(str, report.findings)]) or right


def listed(title: str, texts: Sequence[str]) -> str:
    """What is wrong, as a list, if anything is."""
    if not texts:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts[:100])
    more = f"<li>and {len(texts) - 100:,} more</li>" if len(texts) > 100 else ""
    return f'<div class="verdict wrong">{escape(title)}:<ul>{rows}{more}</ul></div>'


def _held(sides: Sequence[tuple[str, StateLayout]]) -> Iterator[tuple[str, str]]:
    """Yield what the tensors of one rank take, at most, on each side."""
    for caption, layout in sides:
        held = layout.rank_bytes()
        yield f"held by a rank, {caption}", f"{format_bytes(int(held.max(initial=0)))} (at most)"


def figures_of(figures: Iterable[tuple[str, str]]) -> str:
    """Figures by name; text in brackets is smaller."""
    out = []
    for name, value in figures:
        main, _, aside = value.partition(" (")
        small = f"<small>{escape(aside[:-1])}</small>" if aside else ""
        out.append(f"<div><dt>{escape(name)}</dt><dd>{escape(main)}{small}</dd></div>")
    return "".join(out)


def _story(plan: LoadPlan | SavePlan | TransferPlan) -> _Story:
    if not isinstance(plan, Plan):
        raise PlanError(f"cannot draw a {type(plan).__name__}: give a load, save or transfer plan")
    loads = plan.rank_bytes()
    sides = [("target" if name == "wanted" else name, layout) for name, layout in plan.sides.items()]
    told = [(f"Bytes that each rank {plan.verb}", loads)]
    figures = [("tensors", f"{len(plan.names):,}")]
    traffic, between = None, ("", "")
    if isinstance(plan, TransferPlan):
        figures.append(("bytes between ranks", format_bytes(plan.bytes_moved)))
        figures.append(("bytes copied in place", format_bytes(int(plan.local_bytes().sum()))))
        told.insert(0, ("Bytes that each rank sends", plan.sent_bytes()))
        traffic, between = plan.traffic_blocks(), ("sent by", "received by")
    else:
        figures.append(("bytes read" if plan.kind == "load" else "bytes written", format_bytes(plan.total_bytes)))
    if isinstance(plan, LoadPlan) and not (plan.views or plan.explicit):
        traffic, between = _reads(plan), ("saved by", "read by")
    worlds = " → ".join(f"{layout.world_size:,}" for _, layout in sides)
    title = f"{plan.kind.capitalize()}: {worlds} ranks"
    return _Story(title, [*figures, *_busiest(loads)], sides, told, traffic, between)


def _busiest(loads: Ints) -> list[tuple[str, str]]:
    mean = float(loads.mean()) if len(loads) else 0.0
    even = f"{int(loads.max()) / mean:.2f} × mean" if mean else "idle"
    return [
        ("mean of all ranks", format_bytes(mean)),
        ("busiest rank", f"{format_bytes(int(loads.max(initial=0)))} (rank {int(loads.argmax()):,}, {even})"),
    ]


def _reads(plan: LoadPlan) -> Iterator[Traffic]:
    """Bytes from owners of chunks to readers."""
    for group in pair_groups(plan.saved, plan.wanted, plan.wanted):
        intersection = intersection_of(group.before.spec.shape, group.before.form, group.after.form)
        holders, nbytes = intersection.holders, group.before.spec.itemsize * len(group)
        for source, receiver, numel in intersection.blocks():
            yield Traffic(holders.ranks[holders.indptr[source]], receiver, numel * nbytes)


# --- parts of the page ---


def _shared(story: _Story) -> list[tuple[str, ...]]:
    """Names by geometry on all sides, those of the most bytes first."""
    first, last = story.sides[0][1], story.sides[-1][1]
    names = [fqn for fqn in last if fqn in first and first[fqn].spec.shape == last[fqn].spec.shape]
    groups = pair_groups(first, last, names)
    return [g.names for g in sorted(groups, key=lambda g: (-g.after.spec.nbytes * len(g), g.names[0]))]


def _tensors(story: _Story, world: int) -> str:
    shown: dict[tuple[object, ...], str] = {}  # by shape and forms: moments of an optimizer look like their parameter
    for names in _shared(story):
        layouts = [side[names[0]] for _, side in story.sides]
        shown.setdefault((layouts[0].spec.shape, *(layout.form for layout in layouts)), names[0])
    chosen = list(shown.values())[:_MAX_TENSORS]
    options = "".join(f'<option value="{i}">{escape(fqn)}</option>' for i, fqn in enumerate(chosen))
    drawn = []
    for i, fqn in enumerate(chosen):
        pair = "".join(cuts(side[fqn], world, caption) for caption, side in story.sides)
        spec = story.sides[-1][1][fqn].spec
        head = f"<h3>{escape(fqn)}</h3><p>{escape(str(list(spec.shape)))} {spec.dtype}, {format_bytes(spec.nbytes)}</p>"
        drawn.append(f'<div class="tensor" id="tensor-{i}">{head}<div class="pair">{pair}</div></div>')
    more = len(shown) - len(chosen)
    note = f"<p>Not drawn: {more} more kind{'s' * (more > 1)} of tensors.</p>" if more > 0 else ""
    pick = f'<label class="pick">Tensor <select id="pick">{options}</select></label>' if len(chosen) > 1 else ""
    return pick + "".join(drawn) + note


def _traffic(story: _Story, ranks_per_host: int) -> str:
    if story.traffic is None:
        return ""  # a plan without senders, or changed by hand or by views
    words = _READS if story.between[0] == "saved by" else _SENDS
    worlds = story.sides[0][1].world_size, story.sides[-1][1].world_size
    per, unit = 1, "rank"
    if max(worlds) > _MAX_MATRIX:
        per = ranks_per_host * -(-max(worlds) // (ranks_per_host * _MAX_MATRIX))
        unit = "host"
    sums = np.zeros([-(-world // per) for world in worlds], dtype=np.int64)
    for sender, receiver, nbytes in story.traffic:
        np.add.at(sums, (sender // per, receiver // per), nbytes)
    hosts = per // ranks_per_host
    each = f"{hosts} × {hosts} hosts" if hosts > 1 else "one host with another"
    scale = f" Each cell is the sum of {each}, of {ranks_per_host} ranks each." if unit == "host" else ""
    grid = matrix(sums, story.between, unit, hosts if unit == "host" else 1)
    return f'<section aria-labelledby="traffic">{words}{scale}</p>{grid}</section>'


def _table(story: _Story) -> str:
    rows = list(_rows(story))
    rows.sort(key=lambda row: (-row[3], row[0]))
    heads = ["tensors", "count", "shape", "bytes", *(caption for caption, _ in story.sides)]
    body = "".join(
        f"<tr><td>{escape(name).replace('.', '.<wbr>')}</td><td>{count:,}</td><td>{escape(shape)}</td>"
        f'<td data-sort="{nbytes}">{format_bytes(nbytes)}</td>{"".join(f"<td>{escape(p)}</td>" for p in placed)}</tr>'
        for name, count, shape, nbytes, placed in rows[:_MAX_ROWS]
    )
    note = f"<p>{len(rows) - _MAX_ROWS:,} more rows are omitted.</p>" if len(rows) > _MAX_ROWS else ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _rows(story: _Story) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """(pattern, how many, shape, bytes, how each side places them): names that differ in numbers only are one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    sides = [side for _, side in story.sides]
    placements = [side.described(side, placed) for side in sides]
    specs = {fqn: side[fqn].spec for side in sides for fqn in side}
    for fqn, spec in specs.items():
        places = (words.get(fqn, "absent") for words in placements)
        shape = f"{list(spec.shape)} {spec.dtype}"
        found.setdefault((re.sub(r"\d+", "*", fqn), shape, *places), []).append(fqn)
    for (pattern, shape, *words), names in found.items():
        yield pattern if len(names) > 1 else names[0], len(names), shape, specs[names[0]].nbytes * len(names), words


# The pictures on a plan's page, as SVG text: a tensor's shards, a matrix of bytes, bars. Each is of
# bounded size.


_WIDTH = 340
_MAX_EXACT_CELLS = 64
_SAMPLED_CELLS = 96
_MAX_BARS = 128
_WIDE = 1000.0
"""Of figures that take the width of the page."""
_RAMP = ((46, 74, 140), (33, 128, 141), (56, 138, 92), (146, 132, 32), (192, 104, 44), (190, 62, 86))
"""Colors of ranks from the first to the last; of similar lightness, so that white text is legible on all."""


def rank_color(rank: int, world_size: int) -> str:
    """The color of a rank in all pictures of a page. Neighbors have similar colors."""
    at = rank / max(world_size - 1, 1) * (len(_RAMP) - 1)
    i = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - i)) for a, b in zip(_RAMP[i], _RAMP[i + 1]))
    return f"#{red:02x}{green:02x}{blue:02x}"


class _DrawnAxis(NamedTuple):
    """How a dim is shown: at these edges. `exact` if every shard boundary of the layout is one of them."""

    edges: list[int]
    exact: bool


def cuts(layout: TensorLayout, world_size: int, caption: str) -> str:
    """The regions of a tensor, each in the color of the lowest rank that holds it. Rows are dim 0, columns dim 1."""
    shape = layout.spec.shape
    if 0 in shape:
        return f'<p class="empty">{escape(caption)}: the tensor of shape {shape} has no elements.</p>'
    seen = shape[-1:] if len(shape) == 1 else shape[:2]
    axes = [_axis(layout, d, size) for d, size in enumerate(seen)]
    if math.prod(len(axis.edges) for axis in axes) > 2 * _MAX_EXACT_CELLS * 16:  # both dims have many shards
        axes = [_sampled(axis, size, 40) for axis, size in zip(axes, seen)]
    rows = axes[0] if len(axes) == 2 else _DrawnAxis([0, 1], True)
    columns = axes[-1] if axes else _DrawnAxis([0, 1], True)
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
    note = "" if rows.exact and columns.exact else ", sampled: there are more shards than can be shown"
    label = f"{caption}: shape {list(shape)}{rest}{note}"
    words = escape(_words(layout, owner) + rest + note)
    return (
        f"<figure><figcaption>{escape(caption)}<small>{words}</small></figcaption>"
        f'<svg{fine} viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg></figure>"
    )


def _axis(layout: TensorLayout, dim: int, size: int) -> _DrawnAxis:
    return _sampled(_DrawnAxis(edges(layout, dim), True), size, _SAMPLED_CELLS, at_most=_MAX_EXACT_CELLS)


def _sampled(axis: _DrawnAxis, size: int, cells: int, at_most: int = 40) -> _DrawnAxis:
    """The axis itself if it has few cells, else that many cells of equal size."""
    if len(axis.edges) - 1 <= min(at_most, cells):
        return axis
    return _DrawnAxis([size * i // cells for i in range(cells + 1)] if size >= cells else list(range(size + 1)), False)


def placed(layout: TensorLayout) -> str:
    """The layout in words, with its short form."""
    return in_both_forms(layout)


def notation(sides: Iterable[StateLayout]) -> str:
    """Return what the signs in the short forms of these layouts mean."""
    signs = legend(form for side in sides for form in side.described(side, short_form).values())
    rows = "".join(f"<li><b>{escape(sign)}</b> {escape(words)}</li>" for sign, words in signs)
    head = '<section aria-labelledby="notation"><h2 id="notation">Notation</h2>'
    return f"{head}<ul>{rows}</ul></section>" if rows else ""


def _words(layout: TensorLayout, owners: Owners) -> str:
    copies = f", {owners.copies:,} ranks hold each" if owners.copies > 1 else ""
    return f"{placed(layout)} · {owners.pieces:,} region{'s' * (owners.pieces != 1)}{copies}"


def _span(edges: list[int], i: int, length: float) -> tuple[float, float]:
    total = edges[-1] - edges[0]
    return length * (edges[i] - edges[0]) / total, length * (edges[i + 1] - edges[i]) / total


def _cell(x: float, y: float, w: float, h: float, ranks: list[int], world_size: int, label: bool) -> str:
    if not ranks:
        return (
            f'<rect class="missing" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}">'
            "<title>no rank</title></rect>"
        )
    color = rank_color(ranks[0], world_size)
    words = format_some(ranks, 4)
    out = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{color}">'
        f"<title>rank{'s' * (len(ranks) > 1)} {words}</title></rect>"
    )
    text = words if len(words) * 7.5 < w - 6 else f"{ranks[0]}{'+' * (len(ranks) > 1)}"
    if label and h >= 15 and len(text) * 7.5 < w - 2:
        out += f'<text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}">{text}</text>'
    return out


# --- traffic ---


def matrix(sums: Ints, between: tuple[str, str], unit: str, each: int) -> str:
    """Bytes from each row to each column: the darker, the more, on a logarithmic scale, and in numbers if they
    fit. A row or column is `each` units, such as 32 hosts."""
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
        words = f"{between[0]} {_units(unit, i, each)}, {between[1]} {_units(unit, j, each)}: {format_bytes(value)}"
        body.append(
            f'<rect x="{left + j * wide:.1f}" y="{top + i * high:.1f}" width="{wide - gap:.2f}" '
            f'height="{high - gap:.2f}" fill-opacity="{level:.2f}"><title>{words}</title></rect>'
        )
        if wide > 70 and high > 13:
            x, y = left + (j + 0.5) * wide, top + (i + 0.5) * high
            body.append(f'<text class="tick number" x="{x:.1f}" y="{y:.1f}">{format_bytes(value)}</text>')
    middle = 0.5 if each == 1 else 0.0
    for number in _round_numbers(rows * each, int(height // 30)):
        y = top + (number / each + middle) * high
        body.append(f'<text class="tick end" x="{left - 8}" y="{y:.1f}">{number:,}</text>')
    for number in _round_numbers(columns * each, 14):
        x = left + (number / each + middle) * wide
        body.append(f'<text class="tick" x="{x:.1f}" y="{top - 10}">{number:,}</text>')
    total = top + height + 6
    scale = f'<span class="swatch"></span>{format_bytes(most)}'
    if least < most:
        scale = f'<span class="swatch faint"></span>{format_bytes(least)} (least) to {scale} (most), logarithmic'
    return (
        f'<div class="wide" tabindex="0"><svg class="matrix" viewBox="0 0 {_WIDE:.0f} {total:.0f}" role="img" '
        f'aria-label="bytes from {rows} to {columns} rows and columns of {unit}s">{"".join(body)}'
        f'<text class="tick" x="{left + width / 2:.1f}" y="12">{between[1]} {unit}</text>'
        f'<text class="tick" transform="translate(9 {top + height / 2:.1f}) rotate(-90)">{between[0]} {unit}</text>'
        f'</svg></div><p class="legend">Bytes in a cell: {scale}. An empty cell: none.</p>'
    )


def _units(unit: str, index: int, each: int) -> str:
    if each == 1:
        return f"{unit} {index:,}"
    return f"{unit}s {index * each:,} to {(index + 1) * each - 1:,}"


def _round_numbers(end: int, most: int) -> Iterator[int]:
    """0 and further round numbers below `end`: about `most` at most, in steps of 1, 2, or 5 times a power of ten."""
    step = next(s for s in _steps(10) if end / s <= max(most, 1))
    yield from range(0, end, step)


def _steps(base: int) -> Iterator[int]:
    for power in itertools.count():
        yield from (factor * base**power for factor in (1, 2, 5))


# --- bars ---


def bars(loads: Ints, label: str) -> str:
    """Bytes of each rank as a bar; if there are many, the mean of neighbors with the largest of them on top."""
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
    grouped = (
        ""
        if n == world
        else f"; a bar is the mean of about {world // n:,} ranks, and the faint bar behind it the largest"
    )
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


# What all pages look like.


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dde2e9; --paper: #fbfcfd; --card: #fff;
  --accent: #21808d; --heat: #56b0ba; --faint: #edf1f5; --right: #2f8f5b; --wrong: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --soft: #9aa6b4; --line: #303945; --paper: #12161b;
  --card: #1a2027; --accent: #5cc3c9; --heat: #2a7178; --faint: #232b34; --right: #5cc98f; --wrong: #ff7b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 20px; font-weight: 650; }
h2 { font-size: 18px; margin: 0 0 4px; font-weight: 650; letter-spacing: -.01em; }
h3 { font: 600 14px/1.4 ui-monospace, "SF Mono", "Liberation Mono", "DejaVu Sans Mono", monospace; margin: 14px 0 0;
  overflow-wrap: anywhere; }
p { margin: 2px 0 10px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px;
  margin-top: 20px; min-width: 0; }
dl { display: flex; flex-wrap: wrap; gap: 1px; margin: 0; background: var(--line); border: 1px solid var(--line);
  border-radius: 12px; overflow: hidden; }
dl div { background: var(--card); padding: 14px 18px; flex: 1 1 140px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 28px; align-items: end; }
.between { margin: -12px 0 14px; overflow-wrap: anywhere; }
.between b { color: var(--ink); font-weight: 600; }
.verdict { border-left: 4px solid var(--right); padding: 2px 12px; margin: 0 0 20px; color: var(--ink); }
.verdict.wrong { border-color: var(--wrong); }
.verdict ul { margin: 4px 0; padding-left: 20px; }
.wide { overflow-x: auto; }
.wide svg { min-width: 780px; }
figure { margin: 8px 0 0; }
figure.wide { margin: 12px 0 4px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
.pair rect { stroke: var(--card); stroke-width: 1; }
.pair .fine rect { stroke: none; shape-rendering: crispEdges; }
.pair rect.missing { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.pair text { fill: #fff; font-size: 12px; font-weight: 600; text-anchor: middle; dominant-baseline: central;
  pointer-events: none; }
.matrix rect { fill: var(--heat); }
.matrix rect.ground { fill: var(--faint); }
.matrix rect:not(.ground):hover, .bars g:hover rect { stroke: var(--ink); stroke-width: 1.5; }
.tick { fill: var(--soft); font-size: 11px; text-anchor: middle; dominant-baseline: central;
  font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.tick.number { fill: var(--ink); font-size: 12px; pointer-events: none; }
.bars rect { fill: var(--accent); }
.bars rect.peak { fill-opacity: .35; }
.bars line { stroke: var(--line); }
.legend { display: flex; white-space: nowrap; align-items: center; gap: 8px; font-size: 13px; margin-top: 10px; }
.swatch { width: 26px; height: 12px; border-radius: 3px; background: var(--heat); }
.swatch.faint { opacity: .25; }
label { color: var(--soft); font-size: 13px; }
select, input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; padding: 7px 10px; max-width: 100%; }
input { width: 100%; margin: 8px 0 12px; }
select:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 500; text-align: left;
  cursor: pointer; }
th, td { vertical-align: top; padding: 7px 16px 7px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:nth-child(n+5) { white-space: normal; min-width: 150px; }
td:first-child { font-family: ui-monospace, "SF Mono", "Liberation Mono", "DejaVu Sans Mono", monospace;
  white-space: normal; overflow-wrap: anywhere; min-width: min(260px, 50vw); }
td:nth-child(2), th:nth-child(2), td:nth-child(4), th:nth-child(4) { text-align: right; }
.js .tensor:not(.shown) { display: none; }
"""


# The frame of a plan's page: style and script, with `{{slots}}` for what `to_html` fills in.


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
{{style}}</style>
<main>
<h1>{{title}}</h1>
{{between}}{{verdict}}
<dl>{{figures}}</dl>
<section aria-labelledby="layouts"><h2 id="layouts">Layouts of the largest tensors</h2>
<p>The number and color of a region show the lowest rank that holds it; 0+ means rank 0 and others. Neighboring ranks
have similar colors. A rank has the same color on both sides.</p>
{{tensors}}</section>
{{traffic}}
<section aria-labelledby="loads"><h2 id="loads">Bytes per rank</h2>{{loads}}</section>
<section aria-labelledby="tensors"><h2 id="tensors">Tensors</h2>
<p>Names that differ only in numbers are one row.</p>
<label for="search">Search names, shapes and placements</label>
<input id="search" type="search" autocomplete="off">
<div class="scroll" tabindex="0">{{table}}</div></section>
{{notation}}
</main>
<script>
document.documentElement.classList.add("js");
const tensors = [...document.querySelectorAll(".tensor")], pick = document.getElementById("pick");
const show = i => tensors.forEach((t, j) => t.classList.toggle("shown", i === j));
show(0);
if (pick) pick.onchange = () => show(Number(pick.value));
const body = document.querySelector(".scroll tbody"), rows = [...body.rows];
document.getElementById("search").oninput = event => {
  const words = event.target.value.toLowerCase().split(/ +/);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
};
document.querySelectorAll(".scroll th").forEach((head, i) => {
  let up = true;
  head.onclick = () => {
    const key = row => row.cells[i].dataset.sort ?? row.cells[i].textContent;
    rows.sort((a, b) => key(a).localeCompare(key(b), undefined, { numeric: true }) * (up ? 1 : -1));
    up = !up;
    body.append(...rows);
  };
});
</script>
</html>
"""
