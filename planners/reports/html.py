"""`to_html`: a plan as one self-contained page, of bounded size however many ranks and tensors there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from planners.errors import PlanError
from planners.geometry.layout import StateLayout
from planners.geometry.ownership import Ints
from planners.load.plan import LoadPlan
from planners.proof import verify
from planners.reports.cost import Cluster, estimate
from planners.reports.figures import bars, cuts, matrix, placed
from planners.reports.frame import PAGE
from planners.save.plan import SavePlan
from planners.transfer.intersection import intersection_of
from planners.transfer.plan import TransferPlan
from planners.transfer.routing import Traffic, pair_groups
from planners.units import format_bytes, format_seconds

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
    rows_and_columns: tuple[str, str]
    """What the rank of a row does, and that of a column."""


def to_html(
    plan: LoadPlan | SavePlan | TransferPlan,
    *,
    title: str | None = None,
    ranks_per_host: int = 8,
    source: str = "",
    target: str = "",
    cluster: Cluster | None = None,
) -> str:
    """The plan as an HTML page: whether it is right (it is proved here), figures, the cuts of its largest tensors, who
    gets what from whom, bytes per rank, and a table of tensors to search. Everything is inside; nothing is fetched.

        page = to_html(plan, source="run/step-1000", target="fsdp=3")

    Args:
        title: shown on top; by default what the plan does, in words.
        ranks_per_host: above 64 ranks the traffic is shown between hosts, and above 64 hosts between groups of them.
        source: what it leads from, as people call it: a path, a topology.
        target: what it leads to.
        cluster: then the page has the time that `estimate` gives; its `ranks_per_host` count.

    Raises PlanError for anything that is no plan, or for less than one rank per host.
    """
    if ranks_per_host < 1:
        raise PlanError(f"ranks_per_host must be >= 1, got {ranks_per_host}")
    story = _story(plan)
    world = max(layout.world_size for _, layout in story.sides)
    figures = [*story.figures, *_held(story.sides)]
    if cluster is not None:
        ranks_per_host = cluster.ranks_per_host
        figures.append(("estimated time", f"{format_seconds(estimate(plan, cluster).seconds)} ({_rates(cluster)})"))
    parts = {
        "title": escape(title or story.title),
        "between": _between(source, target),
        "verdict": _verdict(plan),
        "figures": "".join(_figure(*figure) for figure in figures),
        "tensors": _tensors(story, world),
        "traffic": _traffic(story, ranks_per_host),
        "loads": "".join(bars(loads, label) for label, loads in story.loads),
        "table": _table(story),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE)


def _between(source: str, target: str) -> str:
    sides = [f"{word} <b>{escape(side)}</b>" for word, side in (("from", source), ("to", target)) if side]
    return f'<p class="between">{" ".join(sides)}</p>' if sides else ""


def _verdict(plan: LoadPlan | SavePlan | TransferPlan) -> str:
    """What the proof of this plan says."""
    report = verify(plan)
    if report.ok:
        return f'<p class="verdict">Proved {escape(report.verdict)}.</p>'
    listed = "".join(f"<li>{escape(str(finding))}</li>" for finding in report.findings[:5])
    more = f"<li>and {len(report.findings) - 5} more</li>" if len(report.findings) > 5 else ""
    return f'<div class="verdict wrong">Not right:<ul>{listed}{more}</ul></div>'


def _held(sides: Sequence[tuple[str, StateLayout]]) -> Iterator[tuple[str, str]]:
    """What the tensors of one rank take, at most, on each side."""
    for caption, layout in sides:
        held = layout.rank_bytes()
        yield f"a rank holds, {caption}", f"{format_bytes(int(held.max(initial=0)))} (at most)"


def _rates(cluster: Cluster) -> str:
    rates = {
        "read": cluster.storage_read_bytes_per_s,
        "written": cluster.storage_write_bytes_per_s,
        "sent": cluster.network_bytes_per_s,
    }
    told = [f"{format_bytes(rate)}/s {what} by a host" for what, rate in rates.items() if rate is not None]
    return ", ".join([*told, f"{cluster.ranks_per_host} ranks each"])


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
            ("the lowest rank that saved a chunk", "the rank that reads of it"),
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
            ("", ""),
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
            ("the rank that sends", "the rank that receives"),
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


def _traffic(story: _Story, ranks_per_host: int) -> str:
    head = '<section aria-labelledby="traffic"><h2 id="traffic">Who gets what from whom</h2>'
    if story.traffic is None:
        return ""  # a plan without senders, or changed by hand or by views
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
    rows, columns = (f"the host of {who}" if unit == "host" else who for who in story.rows_and_columns)
    words = f"Rows: {rows}. Columns: {columns}.{scale}"
    return f"{head}<p>{escape(words)}</p>{matrix(sums, unit, hosts if unit == 'host' else 1)}</section>"


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
        places = ((layout.spec.shape, layout.spec.dtype, placed(layout)) if layout else None for layout in layouts)
        found.setdefault((pattern, *places), []).append(fqn)
    for key, names in found.items():
        layouts = [side.get(names[0]) for _, side in story.sides]
        spec = next(layout.spec for layout in reversed(layouts) if layout is not None)
        shape = f"{list(spec.shape)} {spec.dtype}"
        sides = ["absent" if layout is None else placed(layout) for layout in layouts]
        yield str(key[0]) if len(names) > 1 else names[0], len(names), shape, spec.nbytes * len(names), sides


def _every(sides: Iterable[StateLayout]) -> Sequence[str]:
    return list(dict.fromkeys(fqn for side in sides for fqn in side))
