"""`to_html`: a plan as one self-contained page, of bounded size however many ranks and tensors there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from planners.errors import PlanError
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.ownership import Ints
from planners.load.plan import LoadPlan
from planners.reports.figures import bars, cuts, matrix
from planners.save.plan import SavePlan
from planners.transfer.intersection import intersection_of
from planners.transfer.plan import TransferPlan
from planners.transfer.routing import Traffic, pair_groups
from planners.units import format_bytes

__all__ = ["to_html"]

_MAX_MATRIX = 64
_MAX_TENSORS = 8
_MAX_ROWS = 400


@dataclass(frozen=True)
class _Story:
    """What the page tells of a plan, whatever kind of plan it is."""

    title: str
    figures: list[tuple[str, str]]
    sides: list[tuple[str, StateLayout]]
    """One or two layouts with their captions."""
    loads: list[tuple[str, Ints]]
    """Bytes per rank, with what they are."""
    traffic: Iterable[Traffic] | None
    traffic_words: str


def to_html(plan: LoadPlan | SavePlan | TransferPlan, *, title: str | None = None, ranks_per_host: int = 8) -> str:
    """The plan as an HTML page: figures, the cuts of its largest tensors, who gets what from whom, bytes per rank, and
    a table of tensors to search. Everything is inside; nothing is fetched.

    Args:
        title: shown on top; by default what the plan does, in words.
        ranks_per_host: above 64 ranks the traffic is shown between hosts, and above 64 hosts between groups of them.

    Raises PlanError for anything that is no plan, or for less than one rank per host.
    """
    if ranks_per_host < 1:
        raise PlanError(f"ranks_per_host must be >= 1, got {ranks_per_host}")
    story = _story(plan)
    world = max(layout.world_size for _, layout in story.sides)
    parts = {
        "title": escape(title or story.title),
        "figures": "".join(_figure(*figure) for figure in story.figures),
        "tensors": _tensors(story, world),
        "traffic": _traffic(story, world, ranks_per_host),
        "loads": "".join(bars(loads, label) for label, loads in story.loads),
        "table": _table(story),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _PAGE)


def _figure(name: str, value: str) -> str:
    """A figure; what is in brackets is said smaller."""
    main, _, aside = value.partition(" (")
    small = f"<small>{escape(aside[:-1])}</small>" if aside else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(main)}{small}</dd></div>"


def _story(plan: LoadPlan | SavePlan | TransferPlan) -> _Story:
    if isinstance(plan, LoadPlan):
        loads = plan.rank_bytes()
        return _Story(
            f"Load: {plan.saved.world_size:,} → {plan.world_size:,} ranks",
            [("tensors", f"{len(plan.wanted):,}"), ("bytes read", format_bytes(plan.total_bytes)), *_busiest(loads)],
            [("saved", plan.saved), ("wanted", plan.wanted)],
            [("Bytes that each rank reads", loads)],
            None if plan.views or plan.explicit else _reads(plan),
            "Rows: the lowest rank that saved a chunk. Columns: the rank that reads of it.",
        )
    if isinstance(plan, SavePlan):
        loads = plan.rank_bytes()
        figures = [("tensors", f"{len(plan.layout):,}"), ("bytes written", format_bytes(plan.total_bytes))]
        return _Story(
            f"Save: {plan.world_size:,} ranks",
            [*figures, *_busiest(loads)],
            [("layout", plan.layout)],
            [("Bytes that each rank writes", loads)],
            None,
            "",
        )
    if isinstance(plan, TransferPlan):
        sent, received = plan.sent_bytes(), plan.received_bytes()
        figures = [
            ("tensors", f"{len(plan.names):,}"),
            ("bytes between ranks", format_bytes(plan.bytes_moved)),
            ("bytes copied in place", format_bytes(int(plan.local_bytes().sum()))),
        ]
        return _Story(
            f"Transfer: {plan.before.world_size:,} → {plan.after.world_size:,} ranks",
            [*figures, *_busiest(received)],
            [("before", plan.before), ("after", plan.after)],
            [("Bytes that each rank sends", sent), ("Bytes that each rank receives", received)],
            plan.traffic_blocks(),
            "Rows: senders. Columns: receivers.",
        )
    raise PlanError(f"cannot draw a {type(plan).__name__}: give a load, save or transfer plan")


def _busiest(loads: Ints) -> list[tuple[str, str]]:
    mean = float(loads.mean()) if len(loads) else 0.0
    even = f"{int(loads.max()) / mean:.2f} × mean" if mean else "idle"
    return [
        ("mean rank", format_bytes(mean)),
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


def _traffic(story: _Story, world: int, ranks_per_host: int) -> str:
    if story.traffic is None:
        return '<p class="empty">Not drawn for this plan: it has no senders, or it was changed by hand or by views.</p>'
    if world <= _MAX_MATRIX:
        per, unit, labels = 1, "rank", [str(rank) for rank in range(world)]
    else:
        hosts = -(-world // ranks_per_host)
        group = -(-hosts // _MAX_MATRIX)
        per, n = ranks_per_host * group, -(-hosts // group)
        unit = "host" if group == 1 else "hosts"
        labels = [f"{i * group:,}" + (f"–{min((i + 1) * group, hosts) - 1:,}" if group > 1 else "") for i in range(n)]
    n = len(labels)
    sums = np.zeros((n, n), dtype=np.int64)
    for sender, receiver, nbytes in story.traffic:
        np.add.at(sums, (sender // per, receiver // per), nbytes)
    scale = "" if per == 1 else f" Each cell sums {per} × {per} ranks."
    return f"<p>{escape(story.traffic_words + scale)}</p>" + matrix(sums, labels, unit)


def _table(story: _Story) -> str:
    rows = list(_rows(story))
    rows.sort(key=lambda row: (-row[3], row[0]))
    heads = ["tensors", "count", "shape", "bytes", *(caption for caption, _ in story.sides)]
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{escape(shape)}</td>"
        f'<td data-sort="{nbytes}">{format_bytes(nbytes)}</td>{"".join(f"<td>{escape(p)}</td>" for p in placed)}</tr>'
        for name, count, shape, nbytes, placed in rows[:_MAX_ROWS]
    )
    note = f"<p>{len(rows) - _MAX_ROWS:,} more rows are left out.</p>" if len(rows) > _MAX_ROWS else ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _rows(story: _Story) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """(pattern, how many, shape, bytes, how each side places them): names that differ in numbers only are one row."""
    found: dict[tuple[object, ...], list[str]] = {}
    for fqn in _every(side for _, side in story.sides):
        pattern = re.sub(r"\d+", "*", fqn)
        layouts = [side.get(fqn) for _, side in story.sides]
        places = ((layout.spec.shape, layout.spec.dtype, _placed(layout)) if layout else None for layout in layouts)
        found.setdefault((pattern, *places), []).append(fqn)
    for key, names in found.items():
        layouts = [side.get(names[0]) for _, side in story.sides]
        spec = next(layout.spec for layout in reversed(layouts) if layout is not None)
        shape = f"{list(spec.shape)} {spec.dtype}"
        placed = ["absent" if layout is None else _placed(layout) for layout in layouts]
        yield str(key[0]) if len(names) > 1 else names[0], len(names), shape, spec.nbytes * len(names), placed


def _every(sides: Iterable[StateLayout]) -> Sequence[str]:
    return list(dict.fromkeys(fqn for side in sides for fqn in side))


def _placed(layout: TensorLayout) -> str:
    if layout.mesh is None or layout.placements is None:
        return "flat ranges" if hasattr(layout.form, "ranges") else "explicit boxes"
    axes = ",".join(f"{name}={size}" for name, size in layout.mesh.axes)
    some = " on some ranks" if layout.mesh.has_explicit_ranks else ""
    return f"{', '.join(map(str, layout.placements))} over {axes or 'one rank'}{some}"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dde2e9; --paper: #fbfcfd; --card: #fff;
  --accent: #21808d; --faint: #edf1f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --soft: #9aa6b4; --line: #303945; --paper: #12161b;
  --card: #1a2027; --accent: #5cc3c9; --faint: #232b34; } }
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
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 0;
  background: var(--line); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
dl div { background: var(--card); padding: 14px 18px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 28px; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 20px; }
@media (max-width: 860px) { .columns { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 8px 0 0; }
figure.wide { margin: 12px 0 4px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
.pair rect { stroke: var(--card); stroke-width: 1; }
.pair .fine rect { stroke: none; shape-rendering: crispEdges; }
.pair rect.hole { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.pair text { fill: #fff; font-size: 12px; font-weight: 600; text-anchor: middle; dominant-baseline: central;
  pointer-events: none; }
.matrix rect { fill: var(--accent); }
.matrix rect.ground { fill: var(--faint); }
.matrix rect:not(.ground):hover, .bars g:hover rect { stroke: var(--ink); stroke-width: 1.5; }
.tick { fill: var(--soft); font-size: 11px; text-anchor: middle; dominant-baseline: central;
  font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.bars rect { fill: var(--accent); }
.bars rect.peak { fill-opacity: .35; }
.bars line { stroke: var(--line); }
.legend { display: flex; white-space: nowrap; align-items: center; gap: 8px; font-size: 13px; margin-top: 10px; }
.swatch { width: 26px; height: 12px; border-radius: 3px; background: var(--accent); margin-left: 10px; }
.swatch.faint { opacity: .25; margin-left: 0; }
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
td:first-child { font-family: ui-monospace, "SF Mono", "Liberation Mono", "DejaVu Sans Mono", monospace; }
td:nth-child(2), th:nth-child(2), td:nth-child(4), th:nth-child(4) { text-align: right; }
.js .tensor:not(.shown) { display: none; }
</style>
<main>
<h1>{{title}}</h1>
<dl>{{figures}}</dl>
<section aria-labelledby="cuts"><h2 id="cuts">How tensors are cut</h2>
<p>Each region has the color of the lowest rank that holds it; neighbouring ranks look alike, and a rank has the same
color on both sides.</p>
{{tensors}}</section>
<div class="columns">
<section aria-labelledby="traffic"><h2 id="traffic">Who gets what from whom</h2>{{traffic}}</section>
<section aria-labelledby="loads"><h2 id="loads">Bytes per rank</h2>{{loads}}</section>
</div>
<section aria-labelledby="tensors"><h2 id="tensors">Tensors</h2>
<p>Names that differ only in numbers are one row.</p>
<label for="search">Search names, shapes and placements</label>
<input id="search" type="search" autocomplete="off">
<div class="scroll" tabindex="0">{{table}}</div></section>
</main>
<script>
document.documentElement.classList.add("js");
const tensors = [...document.querySelectorAll(".tensor")], pick = document.getElementById("pick");
const show = i => tensors.forEach((t, j) => t.classList.toggle("shown", i === j));
show(0);
if (pick) pick.onchange = () => show(Number(pick.value));
const body = document.querySelector("tbody"), rows = [...body.rows];
document.getElementById("search").oninput = event => {
  const words = event.target.value.toLowerCase().split(/ +/);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
};
document.querySelectorAll("th").forEach((head, i) => {
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
"""The frame of the page: style and script, with `{{slots}}` for what `to_html` fills in."""
