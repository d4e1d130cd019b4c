"""Pages of one checkpoint, and of how two differ. They are self-contained."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from planners.findings import Finding, in_groups
from planners.geometry.arrays import grouped
from planners.geometry.layout import StateLayout
from planners.geometry.layout_text import in_both_forms
from planners.reports.plan_pages import cuts, figures_of, listed, notation, page_of, weights_first
from planners.units import format_bytes, format_count

_DRAWN_BYTES = 1_500_000
"""Most bytes of pictures in a page. Tensors with the most bytes are drawn first."""
_MAX_ROWS = 1_000
_MAX_LEVELS = 64
_MAP_COLUMNS = 256
_MAP_ROWS = 200
_WHOLE = "All files listed in the metadata exist. Checksums were not verified: run reshard verify."


class SavedFile(NamedTuple):
    """A file of a checkpoint."""

    name: str
    nbytes: int
    earlier: bool = False
    """Whether an earlier save wrote it."""


class SavedStep(NamedTuple):
    """A checkpoint of a run, by what it cost."""

    name: str
    total_bytes: int
    written_bytes: int
    """Bytes of its own files."""
    shared_bytes: int
    """Bytes that it uses of files of earlier saves."""
    base: str = ""
    """The checkpoints with which it shares files."""
    problem: str = ""


class Histogram(NamedTuple):
    """The values of a tensor."""

    low: float
    high: float
    counts: Sequence[int]
    """Number of values in equal steps from low to high."""
    mean: float
    std: float
    odd: int
    """Number of values that are NaN or infinite. All other fields exclude them."""


class Measure(NamedTuple):
    """How much a tensor of two checkpoints differs."""

    elements: int
    differing: int
    largest: float
    """The largest absolute difference of finite elements."""
    relative: float
    """The norm of the difference over that of the second one, of finite elements."""
    odd: int
    """Elements of which exactly one of the two is NaN or infinite, or which are infinite with
    different signs."""


@dataclass(frozen=True)
class Shown:
    """What a page shows of a checkpoint."""

    title: str
    layout: StateLayout
    paths: Mapping[str, Sequence[str]]
    """Name -> how it is nested."""
    values: Mapping[str, str]
    """Name -> description in words, for values that are not stored as tensors of their own."""
    figures: Sequence[tuple[str, str]]
    problems: Sequence[str] = ()
    warnings: Sequence[str] = ()
    files: Sequence[SavedFile] = ()
    steps: Sequence[SavedStep] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


def checkpoint_page(shown: Shown) -> str:
    """The checkpoint as an HTML page: its tree, rendered lazily, so that it may have 200,000
    tensors; pictures of layouts; values, if given; files; and the steps of its run."""
    tree, lie = _Tree(), shown.layout.described(shown.layout, in_both_forms)
    pictures, numbers = _pictures(shown.layout)
    for name in shown.layout:
        layout = shown.layout[name]
        words = f"{layout.spec.dtype} {list(layout.spec.shape)}"
        tree.add(name, shown.paths, (words, lie[name], layout.spec.nbytes, numbers.get(name, -1)))
    for name, text in shown.values.items():
        tree.add(name, shown.paths, (text, "", 0, -1))
    data = {**tree.data(), "pictures": pictures, "histograms": shown.histograms}
    return _page(
        "checkpoint",
        data,
        title=escape(shown.title),
        verdict=listed("Not complete", shown.problems) or f'<p class="verdict">{_WHOLE}</p>',
        figures=figures_of(shown.figures),
        kinds=_kinds(shown.layout, lie),
        notation=notation([shown.layout]),
        steps=_steps(shown.steps),
        files=_files(shown.files),
        warnings=listed("Warnings", shown.warnings),
    )


def difference_page(
    title: str, labels: tuple[str, str], measures: Mapping[str, Measure], findings: Sequence[Finding], read: str
) -> str:
    """Return what differs between two checkpoints, as an HTML page: a map over layers, and a table.

    Args:
        measures: of the tensors that both have with one shape. Equal tensors have no elements
            that differ.
        findings: what else differs, or cannot be compared.
        read: what was compared, in words.
    """
    other = [name for name, measure in measures.items() if measure.differing]
    elements = sum(m.elements for m in measures.values())
    differing = sum(m.differing for m in measures.values())
    several = {name: m for name, m in measures.items() if m.elements > 1}  # a step count differs by more than a weight
    most = max(other, key=lambda name: (name in several, measures[name].largest), default=None)
    figures = [
        ("tensors compared", f"{len(measures):,}"),
        ("tensors that differ", _share(len(other), len(measures))),
        ("elements that differ", _share(differing, elements)),
        ("largest difference", f"{measures[most].largest:.4g} (in {most})" if most is not None else "0"),
        ("other differences", f"{len(findings):,}"),
    ]
    worst = sorted(other, key=lambda name: (name not in several, -measures[name].odd, -measures[name].relative, name))
    rows = [[name, *measures[name]] for name in worst[:_MAX_ROWS]]
    alike = not other and not findings
    read = read.replace(" compared", "", 1)
    words = "No difference was found" if alike else "They differ"
    return _page(
        "difference",
        {"map": _map(several), "rows": rows, "left": len(worst) - len(rows)},
        title=escape(title),
        labels=f"<b>{escape(labels[0])}</b> and <b>{escape(labels[1])}</b>",
        verdict=f'<p class="verdict{"" if alike else " wrong"}">{words}. Compared: {escape(read)}.</p>',
        figures=figures_of(figures),
        findings=listed("Other differences", in_groups(findings)),
    )


def _page(frame: str, data: Any, **parts: str) -> str:
    """A frame with data. Text of checkpoints is hostile: it stands in data, of which no browser
    makes elements, or is escaped."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return page_of(frame, data=text, **parts)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.3g}%)" if whole else "–"


# --- of one checkpoint ---


class _Tree:
    """Names as a tree, equal branches once: so the experts of a layer, and layers, cost what
    one of them does."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._leaves: dict[tuple[int, int, int, int], int] = {}
        self._nodes: dict[tuple[int, ...], int] = {}
        self._root: dict[str, Any] = {}

    def add(self, name: str, paths: Mapping[str, Sequence[str]], leaf: tuple[str, str, int, int]) -> None:
        """A tensor or value: its layout in words, its bytes, and the number of its picture."""
        parts = [part for key in paths.get(name, (name,)) for part in key.split(".")]
        parts[_MAX_LEVELS:] = [".".join(parts[_MAX_LEVELS:])] if len(parts) > _MAX_LEVELS else []
        at = self._root
        for part in parts[:-1]:
            below = at.setdefault(part, {})
            if not isinstance(below, dict):
                below = at[part] = {".": below}
            at = below
        row = (self._text(leaf[0]), self._text(leaf[1]), *leaf[2:])
        number = ~self._leaves.setdefault(row, len(self._leaves))
        last = at.get(parts[-1])
        if isinstance(last, dict):
            last["."] = number
        else:
            at[parts[-1]] = number

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _number(self, at: Mapping[str, Any]) -> int:
        names = sorted(at, key=lambda name: (len(name), name)) if all(map(str.isdigit, at)) else at
        row: list[int] = []
        for name in names:
            child = at[name]
            row += (self._text(name), child if isinstance(child, int) else self._number(child))
        return self._nodes.setdefault(tuple(row), len(self._nodes))

    def data(self) -> dict[str, Any]:
        """Nodes are rows of name, child, name, child; a child below 0 is a leaf."""
        root = self._number(self._root)
        return {"texts": list(self._texts), "leaves": list(self._leaves), "nodes": list(self._nodes), "root": root}


def _pictures(layout: StateLayout) -> tuple[list[str], dict[str, int]]:
    """A picture for each layout of tensors of one shape, up to a limit; and which one each
    tensor has."""
    drawn: list[str] = []
    numbers: dict[str, int] = {}
    alike = grouped(((layout[name].spec.shape, layout[name].form), name) for name in layout)
    for names in sorted(alike.values(), key=lambda n: (weights_first(n[0])[0], -layout[n[0]].spec.nbytes)):
        if sum(map(len, drawn)) < _DRAWN_BYTES:
            numbers.update(dict.fromkeys(names, len(drawn)))
            drawn.append(cuts(layout[names[0]], "How it is sharded"))
    return drawn, numbers


def _kinds(layout: StateLayout, lie: Mapping[str, str]) -> str:
    """Bytes by dtype and by layout, as bars."""
    out = []
    dtypes = {name: layout[name].spec.dtype for name in layout}
    for title, kinds in (("By dtype", dtypes), ("By layout", lie)):
        weights: Counter[str] = Counter()
        counts = Counter(kinds.values())
        for name, kind in kinds.items():
            weights[kind] += layout[name].spec.nbytes
        most = max([*weights.values(), 1])
        rows = "".join(
            f'<li><span>{escape(kind)}</span><b class="cost"><i style="width:{100 * nbytes / most:.2f}%"></i></b>'
            f"<span>{format_bytes(nbytes)}, {format_count(counts[kind], 'tensor')}</span></li>"
            for kind, nbytes in weights.most_common(12)
        )
        more = f"<li>and {len(weights) - 12:,} more</li>" if len(weights) > 12 else ""
        out.append(f'<div><h3>{title}</h3><ul class="bars-list">{rows}{more}</ul></div>')
    return "".join(out)


def _steps(steps: Sequence[SavedStep]) -> str:
    most = max([1, *(step.written_bytes + step.shared_bytes for step in steps)])
    rows = []
    for step in steps[-_MAX_ROWS:]:
        new, shared = (100 * size / most for size in (step.written_bytes, step.shared_bytes))
        what = f"{format_bytes(step.written_bytes)} written"
        what += f", {format_bytes(step.shared_bytes)} shared with {step.base}" if step.shared_bytes else ""
        if step.problem:
            what = f"not complete: {step.problem}"
        rows.append(
            f'<tr><td>{escape(step.name)}</td><td data-sort="{step.total_bytes}">{format_bytes(step.total_bytes)}</td>'
            f'<td><div class="cost" role="img" aria-label="{escape(what)}"><i style="width:{new:.2f}%"></i>'
            f'<i class="shared" style="width:{shared:.2f}%"></i></div><small>{escape(what)}</small></td></tr>'
        )
    title = "Checkpoints of the run</h2><p>What each one wrote, and what it shares with earlier ones.</p>"
    return _listing(
        "steps", title, "<th>checkpoint</th><th>tensors</th><th>bytes written, and shared</th>", rows, len(steps)
    )


def _files(files: Sequence[SavedFile]) -> str:
    rows = [
        f'<tr><td>{escape(file.name)}</td><td data-sort="{file.nbytes}">{format_bytes(file.nbytes)}</td>'
        f"<td>{'an earlier save wrote it' if file.earlier else ''}</td></tr>"
        for file in sorted(files, key=lambda file: file.name)[:_MAX_ROWS]
    ]
    return _listing("files", "Files</h2>", "<th>file</th><th>size</th><th></th>", rows, len(files))


def _listing(name: str, title: str, heads: str, rows: Sequence[str], count: int) -> str:
    left = f"<p>{count - len(rows):,} more are omitted.</p>" if count > len(rows) else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    head = f'<section aria-labelledby="{name}"><h2 id="{name}">{title}'
    return f'{head}<div class="scroll">{table}</div>{left}</section>' if rows else ""


# --- of two ---


def _map(measures: Mapping[str, Measure]) -> dict[str, Any]:
    """Rows are names without their numbers, columns the first number, most often the layer; a
    cell is the worst of its tensors, which have elements. Rows that differ most come first."""
    numbered = {name: re.findall(r"(?:^|\.)(\d{1,6})(?=\.|$)", name) for name in measures}
    top = max((int(numbers[0]) for numbers in numbered.values() if numbers), default=0)
    step = top // _MAP_COLUMNS + 1
    cells: dict[str, dict[int, list[float]]] = {}
    for name, m in measures.items():
        column = int(numbered[name][0]) // step if numbered[name] else -1
        row = cells.setdefault(re.sub(r"(^|\.)\d{1,6}(?=\.|$)", r"\1*", name), {})
        *before, count = row.get(column, [0.0, 0.0, 0.0, 0, 0])
        row[column] = [*map(max, before, (m.relative, m.largest, m.differing / m.elements, m.odd)), count + 1]
    rows = sorted(cells.items(), key=lambda row: -max(cell[0] + cell[3] for cell in row[1].values()))[:_MAP_ROWS]
    return {"rows": rows, "step": step, "columns": top // step + 1, "left": len(cells) - len(rows)}
