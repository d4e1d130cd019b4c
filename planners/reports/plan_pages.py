"""`to_html`: a plan as one self-contained page of bounded size, for any number of ranks and
tensors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Ints, grouped, zeros
from planners.geometry.layout import ProductForm, StateLayout, TensorLayout
from planners.geometry.layout_text import axes_of, in_both_forms, in_sharding_order, legend, short_form
from planners.geometry.mesh import Replicate, Shard
from planners.plans.cost import Cluster, estimate
from planners.plans.load import LoadPlan
from planners.plans.plan import Plan, verify
from planners.plans.routing import Traffic, intersection_of, pair_groups
from planners.plans.save import SavePlan
from planners.plans.transfer import TransferPlan
from planners.reports.terminal_pictures import Owners, drawn_dims, edges
from planners.units import format_bytes, format_seconds, format_some

_READS = """<h2 id="traffic">Bytes that each rank reads of each saver's data</h2>
<p>All ranks read from storage. If several ranks saved the same data, the read is attributed to the lowest rank. On the
diagonal, ranks or hosts read what they saved."""
_SENDS = """<h2 id="traffic">Bytes sent, by sender and receiver</h2>
<p>Copies within one rank are not counted."""
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
    """Labels of rows and columns, such as `("sent by", "received by")`."""


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
    figures = [*story.figures, *_held(story.sides)]
    if cluster is not None:
        ranks_per_host = cluster.ranks_per_host
        seconds = format_seconds(estimate(plan, cluster).seconds)
        figures.append(("estimated time, at least", f"{seconds} ({cluster.rates})"))
    return page_of(
        "plan",
        title=escape(title or story.title),
        between=_between(source, target),
        verdict=_verdict(plan, wrong),
        figures=figures_of(figures),
        tensors=_tensors(story),
        traffic=_traffic(story, ranks_per_host),
        loads="".join(bars(loads, label) for label, loads in story.loads),
        table=_table(story),
        notation=notation(layout for _, layout in story.sides),
    )


def page_of(frame: str, **parts: str) -> str:
    """A frame from the folder of this module, filled in, with the style and scripts of all
    pages."""
    folder = resources.files("planners.reports")
    parts |= {name: folder.joinpath(f"look.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    page = folder.joinpath(f"{frame}.html").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
    # names may be no Unicode text
    return text.encode(errors="backslashreplace").decode()


def _between(source: str, target: str) -> str:
    sides = [f"{word} <b>{escape(side)}</b>" for word, side in (("from", source), ("to", target)) if side]
    return f'<p class="between">{" ".join(sides)}</p>' if sides else ""


def _verdict(plan: LoadPlan | SavePlan | TransferPlan, wrong: Sequence[str]) -> str:
    """Return what the proof of this plan says, and what else is wrong."""
    report = verify(plan)
    right = f'<p class="verdict">OK: {escape(report.covers)}.</p>'
    title = "Not correct" if report.findings else "Check the layout"
    return listed(title, [*wrong, *map(str, report.findings)]) or right


def listed(title: str, texts: Sequence[str]) -> str:
    """Return what is wrong, as a list, if anything is."""
    if not texts:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts[:100])
    more = f"<li>and {len(texts) - 100:,} more</li>" if len(texts) > 100 else ""
    return f'<div class="verdict wrong">{escape(title)}:<ul>{rows}{more}</ul></div>'


def _held(sides: Sequence[tuple[str, StateLayout]]) -> Iterator[tuple[str, str]]:
    """Yield what the tensors of one rank take, at most, on each side."""
    for caption, (_, layout) in zip((", before", ", after") if len(sides) == 2 else ("",), sides):
        held = layout.rank_bytes()
        yield f"largest shard per rank{caption}", format_bytes(int(held.max(initial=0)))


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
        raise PlanError(f"cannot draw a {type(plan).__name__}: expected a load, save, or transfer plan")
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
    return _Story(title, [*figures, *_busiest(plan.verb, loads)], sides, told, traffic, between)


def _busiest(verb: str, loads: Ints) -> list[tuple[str, str]]:
    mean = float(loads.mean()) if len(loads) else 0.0
    even = f"{int(loads.max()) / mean:.2f} × mean" if mean else "idle"
    done = {"reads": "read", "writes": "written", "receives": "received"}[verb]
    return [
        (f"{done} per rank, mean", format_bytes(mean)),
        (f"most {done} by a rank", f"{format_bytes(int(loads.max(initial=0)))} (rank {int(loads.argmax()):,}, {even})"),
    ]


def _reads(plan: LoadPlan) -> Iterator[Traffic]:
    """Bytes from owners of chunks to readers."""
    for group in pair_groups(plan.saved, plan.wanted, plan.wanted):
        intersection = intersection_of(group.before.spec.shape, group.before.form, group.after.form)
        holders, nbytes = intersection.holders, group.before.spec.itemsize * len(group)
        for source, receiver, numel in intersection.blocks():
            yield Traffic(holders.ranks[holders.indptr[source]], receiver, numel * nbytes)


# --- parts of the page ---


def weights_first(name: str) -> tuple[bool, str]:
    """Sorts the states of an optimizer after what a person looks for."""
    return re.search(r"\boptim|exp_avg|momentum_buffer", name) is not None, name


def _tensors(story: _Story) -> str:
    """A tensor of each shape and layouts: weights first, of them those of the most bytes."""
    first, last = story.sides[0][1], story.sides[-1][1]
    alike = grouped(
        ((layout.spec.shape, first[fqn].form, layout.form), fqn)
        for fqn, layout in last.items()
        if fqn in first and first[fqn].spec.shape == layout.spec.shape
    )
    nbytes = {min(names, key=weights_first): sum(last[fqn].spec.nbytes for fqn in names) for names in alike.values()}
    shown = sorted(nbytes, key=lambda fqn: (weights_first(fqn)[0], -nbytes[fqn], fqn))
    chosen = shown[:_MAX_TENSORS]
    options, drawn = "", ""
    for i, fqn in enumerate(chosen):
        pair = "".join(cuts(side[fqn], caption) for caption, side in story.sides)
        spec = last[fqn].spec
        options += f'<option value="{i}">{escape(fqn)} {list(spec.shape)}</option>'
        head = f"<h3>{escape(fqn)}</h3><p>{list(spec.shape)} {spec.dtype}, {format_bytes(spec.nbytes)}</p>"
        drawn += f'<div class="tensor" id="tensor-{i}">{head}<div class="pair">{pair}</div></div>'
    more = len(shown) - len(chosen)
    note = f"<p>Not drawn: {more} more combination{'s' * (more > 1)} of shape and layout.</p>" if more > 0 else ""
    pick = f'<label class="pick">Tensor <select id="pick">{options}</select></label>' if len(chosen) > 1 else ""
    return pick + drawn + note


def _traffic(story: _Story, ranks_per_host: int) -> str:
    if story.traffic is None:
        return ""  # a plan without senders, or changed by hand or by views
    words = _READS if story.between[0] == "saved by" else _SENDS
    worlds = story.sides[0][1].world_size, story.sides[-1][1].world_size
    per, unit = 1, "rank"
    if max(worlds) > _MAX_MATRIX:
        per = ranks_per_host * -(-max(worlds) // (ranks_per_host * _MAX_MATRIX))
        unit = "host"
    sums = zeros([-(-world // per) for world in worlds])
    for sender, receiver, nbytes in story.traffic:
        np.add.at(sums, (sender // per, receiver // per), nbytes)
    hosts = per // ranks_per_host or 1
    each = f"sums {hosts} × {hosts} hosts" if hosts > 1 else "is one host with another,"
    scale = f" Each cell {each} of {ranks_per_host} ranks{' each' * (hosts == 1)}." if unit == "host" else ""
    grid = matrix(sums, story.between, unit, hosts)
    return f'<section aria-labelledby="traffic">{words}{scale}</p>{grid}</section>'


def _table(story: _Story) -> str:
    rows = list(_rows(story))
    rows.sort(key=lambda row: (-row[3], weights_first(row[0])))
    heads = ["tensors", "count", "shape", "bytes", *(caption for caption, _ in story.sides)]
    body = "".join(
        f"<tr><td>{escape(name).replace('.', '.<wbr>')}</td>"
        f'<td data-sort="{count}">{count:,}</td><td>{escape(shape)}</td>'
        f'<td data-sort="{nbytes}">{format_bytes(nbytes)}</td>{"".join(f"<td>{escape(p)}</td>" for p in placed)}</tr>'
        for name, count, shape, nbytes, placed in rows[:_MAX_ROWS]
    )
    note = f"<p>{len(rows) - _MAX_ROWS:,} more rows are omitted.</p>" if len(rows) > _MAX_ROWS else ""
    head = "".join(f"<th{' aria-sort=descending' * (text == 'bytes')}>{escape(text)}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _rows(story: _Story) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """(pattern, how many, shape, bytes, how each side places them): names that differ in
    numbers only are one row."""
    sides = [side for _, side in story.sides]
    placements = [side.described(side, in_both_forms) for side in sides]
    specs = {fqn: side[fqn].spec for side in sides for fqn in side}
    shapes = {fqn: f"{list(spec.shape)} {spec.dtype}" for fqn, spec in specs.items()}
    found = grouped(
        ((re.sub(r"\d+", "*", fqn), shape, *(words.get(fqn, "absent") for words in placements)), fqn)
        for fqn, shape in shapes.items()
    )
    for (pattern, shape, *words), names in found.items():
        yield pattern if len(names) > 1 else names[0], len(names), shape, specs[names[0]].nbytes * len(names), words


# The pictures on a plan's page, as SVG text: a tensor's shards, a matrix of bytes, bars. Each is of
# bounded size.


_WIDTH = 340
_POINTED = '<p class="pointed" aria-live="polite"></p>'
"""Where a page says what the pointer is at."""
_MAX_CELLS = 64
_GROUPS = 16
"""How many regions are drawn of a dim with more than that many shards."""
_MAX_BARS = 128
_WIDE = 1000.0
"""Width of figures that take the width of the page."""
_RAMP = (
    (46, 74, 140),
    (24, 116, 130),
    (40, 122, 76),
    (122, 108, 20),
    (176, 86, 30),
    (190, 54, 84),
    (122, 64, 150),
)
"""A circle of colors, all so dark that white text has a contrast of 4.9 and more."""


def rank_color(rank: int) -> str:
    """The color of a rank on every page. The first eight differ most; of many ranks, neighbors
    have similar colors."""
    at = math.log2(1 + rank / 4) / 1.6 * len(_RAMP) % len(_RAMP)
    i = int(at)
    mixed = (round(a + (b - a) * (at - i)) for a, b in zip(_RAMP[i], _RAMP[(i + 1) % len(_RAMP)]))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def cuts(layout: TensorLayout, caption: str) -> str:
    """The regions of a tensor, each in the color of the lowest rank that holds it. Rows and columns
    are the first two sharded dims, or the first two."""
    shape, words = layout.spec.shape, _words(layout)
    if 0 in shape:
        return f'<p class="empty">{escape(caption)}: the tensor of shape {list(shape)} has no elements.</p>'
    layout, inner = _outer(layout)
    owner, dims = Owners(layout), drawn_dims(layout)
    exact = [edges(layout, dim) for dim in dims]
    most = _MAX_CELLS if math.prod(map(len, exact)) <= 1024 else _GROUPS
    drawn = [at if len(at) <= most + 1 else [at[-1] * i // _GROUPS for i in range(_GROUPS + 1)] for at in exact]
    rows, columns = [[0, 1]] * (2 - len(dims)) + drawn
    height = 64.0 if len(dims) < 2 else min(max(_WIDTH * rows[-1] / columns[-1], 120.0), 300.0)
    places = 'class="tick end" transform="translate(6 14) rotate(-90)"', 'class="tick start" x="14" y="6"'
    names = (f"dim {dim}: {shape[dim]:,}" for dim in dims)
    body = [f"<text {place}>{name}</text>" for place, name in zip(places[2 - len(dims) :], names)]
    for down, across in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns)):
        of_dim = dict(zip(dims, [down, across][2 - len(dims) :]))
        spans = [of_dim.get(dim, (0, 1)) for dim in range(len(shape))]
        ranks = owner.at([start for start, _ in spans])
        if drawn != exact:
            ranks = sorted({*ranks, *owner.at([stop - 1 for _, stop in spans])})
        where = ", ".join(f"{start}:{stop}" if dim in dims else "0" for dim, (start, stop) in enumerate(spans))
        (y, below), (x, right) = ([at * length / all_of[-1] for at in span] for span, length, all_of in (
            (down, height, rows), (across, _WIDTH, columns),
        ))  # fmt: skip
        body.append(_cell(x + 14, y + 14, right - x, below - y, ranks, where, drawn != exact))
    rest = f", at index 0 of the {len(shape) - 2} other dims" if len(shape) > 2 else ""
    rest += f"; not drawn: the further sharding of each box over {' and '.join(inner)}" if inner else ""
    rest += "; each drawn box stands for many shards, from the first to the last rank" if drawn != exact else ""
    rest += "; 0+ means rank 0 and others" if any(part.endswith("+</text>") for part in body) else ""
    fine = ' class="fine"' if max(map(len, (rows, columns))) > 33 else ""
    return (
        f"<figure><figcaption>{escape(caption)}<small>{escape(words + rest)}</small></figcaption>"
        f'<svg{fine} viewBox="0 0 {_WIDTH + 14} {height + 14:.0f}" role="img" tabindex="0" '
        f'aria-label="{escape(f"{caption}: shape {list(shape)}{rest}")}">{"".join(body)}</svg>{_POINTED}</figure>'
    )


def _outer(layout: TensorLayout) -> tuple[TensorLayout, list[str]]:
    """The layout without the axes that shard last, where a dim has more shards than can be
    drawn; and these axes."""
    inner = []
    for dim in range(len(layout.spec.shape[:2])):
        while isinstance(layout.form, ProductForm) and len(edges(layout, dim)) > _MAX_CELLS + 1:
            form = in_sharding_order(layout.form, {dim})
            its = axes_of(form, dim)
            if len(its) < 2 or {type(form.placements[axis]) for axis in its} != {Shard}:
                break
            inner.append(form.mesh.names[its[-1]])
            placements = [Replicate() if axis == its[-1] else p for axis, p in enumerate(form.placements)]
            layout = TensorLayout.of(layout.spec, ProductForm.make(form.mesh, placements))
    return layout, inner


def notation(sides: Iterable[StateLayout]) -> str:
    """Return what the signs in the short forms of these layouts mean."""
    signs = legend(form for side in sides for form in side.described(side, short_form).values())
    rows = "".join(f"<li><b>{escape(sign)}</b> {escape(words)}</li>" for sign, words in signs)
    head = '<section aria-labelledby="notation"><h2 id="notation">Notation</h2>'
    return f"{head}<ul>{rows}</ul></section>" if rows else ""


def _words(layout: TensorLayout) -> str:
    owners = Owners(layout)
    copies = f" on {owners.copies:,} ranks each" if owners.copies > 1 else ""
    return f"{in_both_forms(layout)} · {owners.pieces:,} box{'es' * (owners.pieces != 1)}{copies}"


def _cell(
    x: float,
    y: float,
    w: float,
    h: float,
    ranks: list[int],
    where: str,
    is_group: bool,
) -> str:
    words = f"{ranks[0]} to {ranks[-1]}" if is_group and len(ranks) > 1 else format_some(ranks, 4)
    look = f'fill="{rank_color(ranks[0])}"' if ranks else 'class="missing"'
    who = f"rank{'s' * (len(ranks) > 1)} {words}" if ranks else "no rank"
    out = (
        f'<rect {look} x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"><title>{who}: [{where}]</title></rect>'
    )
    text = words if len(words) * 8.5 < w - 6 else f"{ranks[0]}{'+' * (len(ranks) > 1)}" if ranks else ""
    if h >= 15 and text and len(text) * 8.5 < w - 2:
        out += f'<text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}">{text}</text>'
    return out


# --- traffic ---


def matrix(sums: Ints, between: tuple[str, str], unit: str, each: int) -> str:
    """Bytes from each row to each column: the darker, the more, and in numbers if they fit. A row
    or column is `each` units, such as 32 hosts. The scale is logarithmic if the cells that make 99%
    of all bytes differ by more than 10 times."""
    rows, columns = sums.shape
    found = np.sort(sums[sums > 0])
    least, most = (
        (int(found[i]) for i in (np.searchsorted(found.cumsum(), found.sum() / 100), -1)) if len(found) else (1, 1)
    )
    left, top = 66.0, 40.0
    wide = (_WIDE - left - 2) / columns
    high = min(max(min(wide, 56.0), 4.0), max(440.0 / rows, 4.0))
    width, height = columns * wide, rows * high
    body = [f'<rect class="ground" x="{left}" y="{top}" width="{width:.1f}" height="{height:.1f}"/>']
    gap = 0.6 if min(wide, high) > 5 else 0.0
    for i, j in np.argwhere(sums > 0).tolist():
        value = int(sums[i, j])
        level = max(math.log(value / least, most / least), 0) if most > 10 * least else value / most
        words = f"{between[0]} {_units(unit, i, each)}, {between[1]} {_units(unit, j, each)}: {format_bytes(value)}"
        body.append(
            f'<rect x="{left + j * wide:.1f}" y="{top + i * high:.1f}" width="{wide - gap:.2f}" '
            f'height="{high - gap:.2f}" fill-opacity="{0.2 + 0.8 * level:.2f}"><title>{words}</title></rect>'
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
    low, kind = (f"{format_bytes(least)} or less", "logarithmic") if most > 10 * least else ("0 B", "linear")
    scale = f' · {low} <span class="swatch matrix-scale"></span> {format_bytes(most)} ({kind} scale)' * (len(found) > 0)
    return (
        f'<div class="wide"><svg class="matrix" viewBox="0 0 {_WIDE:.0f} {total:.0f}" role="img" tabindex="0" '
        f'aria-label="bytes from {rows} to {columns} rows and columns of {unit}s">{"".join(body)}'
        f'<text class="tick" x="{left + width / 2:.1f}" y="12">{between[1]} {unit} →</text>'
        f'<text class="tick start" x="0" y="12">{between[0]} {unit} ↓</text></svg></div>{_POINTED}'
        f'<p class="legend">Bytes in a cell: <span class="swatch"></span> none{scale}</p>'
    )


def _units(unit: str, index: int, each: int) -> str:
    if each == 1:
        return f"{unit} {index:,}"
    return f"{unit}s {index * each:,} to {(index + 1) * each - 1:,}"


def _round_numbers(end: int, most: int) -> Iterator[int]:
    """0 and further round numbers below `end`: about `most` at most, in steps of 1, 2, or 5
    times a power of ten."""
    step = next(s for s in _steps(10) if end / s <= max(most, 1))
    yield from range(0, end, step)


def _steps(base: int) -> Iterator[int]:
    for power in itertools.count():
        yield from (factor * base**power for factor in (1, 2, 5))


# --- bars ---


def bars(loads: Ints, label: str) -> str:
    """Bytes of each rank as a bar; if there are many, the mean of neighbors with the largest
    of them on top."""
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
        f'<figure class="wide"><figcaption>{escape(label)}<small>by rank{grouped}</small></figcaption>'
        f'<svg class="bars" viewBox="0 0 {_WIDE:.0f} {height:.0f}" role="img" tabindex="0" '
        f'aria-label="{escape(label)}: {format_bytes(most)} at most">{"".join(body)}</svg>{_POINTED}</figure>'
    )


def _round_sizes(most: int) -> list[int]:
    """0 and round sizes up to the first that is not below `most`: 1, 2 or 5, 10, 20, 50, 100,
    200, 500 of a unit."""
    most = max(most, 1)
    unit = 1024 ** int(math.log(most, 1024) + 1e-9)
    step = next(s for s in (unit * factor for factor in _steps(10)) if most / s <= 5)
    if step == unit and unit > 1 and most / unit < 2.5:
        step = unit // 2  # 1.5 MiB: half units rather than one line
    return list(range(0, most + step, step))
