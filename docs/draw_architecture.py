"""Draws docs/architecture.svg, the packages in their layers, from the source: `python -m docs.draw_architecture`.

An arrow leads from a package to one that it imports, in a lower row. Imports that follow from other arrows have none of
their own. For `reshard`, `planners` is one package, in a column of its own beside it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

import networkx as nx

from docs.import_graph import ROOT, Codebase, layers, packages_named

__all__ = ["CHARACTER", "NAME", "PICTURE", "draw", "drawn", "package_imports", "roles"]

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, MARGIN, GAP = 760, 16, 10
"""The width is that of the column of the site, so that text has its own size there."""
COLUMN = 216
"""The width of the column of `planners`."""
LINE, PADDING = 16, 8
BETWEEN, LANE = 24, 8
"""The space between rows, where arrows turn, and what an arrow that passes a row takes of its width."""
CHARACTER, NAME = 6.6, 8.1
"""The most that a character of the text takes, on average, and one of a name."""

TITLE = ("planners", "geometry, without torch, files, or processes")

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.ground { fill: #ffffff } .inner { fill: #f3f6fa; stroke: #c3ccd6 }
.package { fill: #ffffff; stroke: #8c98a6; stroke-width: 1.2 }
.planners { stroke: #2f7d6b } .reshard { stroke: #3b63b8 }
.name { font: 600 13px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.role { fill: #1f2328 } .arrow { fill: none; stroke: #6e7a88; stroke-width: 1.3 } .head { fill: #6e7a88 }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af } .ground { fill: #0d1117 } .inner { fill: #151b23; stroke: #3d444d }
  .package { fill: #1c232d } .planners { stroke: #58b8a0 } .reshard { stroke: #7ea2ee }
  .name, .role { fill: #e6edf3 } .arrow { stroke: #8b96a3 } .head { fill: #8b96a3 }
}
"""

HEAD = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="head" d="M0,0.5 L8,4 L0,7.5 z"/></marker></defs>"""


def roles(page: str) -> dict[str, str]:
    """The purpose of each package, from the headings of architecture.md, such as "### `reshard.api`: the verbs"."""
    heads = re.findall(r"^### (.*?): (.*)$", page, re.M)
    return {package: words for names, words in heads for package in packages_named(names)}


def _seen(target: str, source: str) -> str:
    """The name of a package as `source` refers to it: outside `planners`, all of `planners` is one package."""
    return "planners" if target.startswith("planners") and not source.startswith("planners") else target


def package_imports(codebase: Codebase) -> set[tuple[str, str]]:
    """The imports in the picture. Those from the public names of `planners` to its own packages are omitted."""
    return {(a, _seen(b, a)) for a, b in codebase.packages.edges if a != "planners"}


def drawn(svg: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The packages of a picture, and their imports."""
    found = dict(re.findall(r'data-package="([\w.]+)" data-imports="([\w. ]*)"', svg))
    return set(found), {(package, target) for package, targets in found.items() for target in targets.split()}


Box = tuple[float, float, float, float]
"""x, y, width, and height."""


def draw(codebase: Codebase, page: str) -> str:
    """The picture as SVG."""
    levels = [[package for package in layer if package != "planners"] for layer in layers(page)]
    above = [level for level in levels if level and level[0].startswith("reshard")]
    below = [level for level in levels if level and level[0].startswith("planners")]
    imports, words = package_imports(codebase), roles(page)
    direct = set(nx.transitive_reduction(nx.DiGraph(list(imports))).edges)
    rows, inside = _ordered(above, direct), _ordered(below, direct)
    wide = max((i + 1 for i, level in enumerate(above) if len(level) > 2), default=0)
    ends = [WIDTH - MARGIN - (COLUMN + 2 * GAP) * (i >= wide) for i in range(len(rows))]
    boxes, bottom = _placed(rows, words, MARGIN, MARGIN, ends, BETWEEN)
    bottom, left = bottom - BETWEEN, WIDTH - MARGIN - COLUMN
    top = min((boxes[name][1] for row in rows[wide:] for name in row), default=bottom)
    head = [[("name", TITLE[0])], *([("role", line)] for line in _wrapped(TITLE[1], COLUMN))]
    first, rights = top + LINE * len(head) + 2 * PADDING, [WIDTH - MARGIN - GAP] * len(inside)
    _, end = _placed(inside, words, first, left + GAP, rights, 0)
    between = max(bottom - GAP - end, BETWEEN) / max(len(inside) - 1, 1)
    boxes |= _placed(inside, words, first, left + GAP, rights, between)[0]
    column = (left, top, COLUMN, bottom - top)
    height = bottom + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        "<title>The packages of reshard and planners in their layers, with arrows to what they import</title>",
        f"<style>{STYLE}</style>",
        HEAD,
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="14"/>',
        _rectangle("inner", column),
        *_texts(head, column),
        *_arrows(rows, direct, {**boxes, "planners": column}),
        *_arrows(inside, direct, boxes),
    ]
    for name, box in boxes.items():
        if ">" not in name:
            its = " ".join(sorted(b for a, b in imports if a == name))
            parts.append(f'<g data-package="{name}" data-imports="{its}">')
            parts.append(_rectangle(f"package {name.partition('.')[0]}", box))
            parts += [*_texts(_lines(name, words, box[2]), box), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ordered(levels: Sequence[Sequence[str]], arrows: set[tuple[str, str]]) -> list[list[str]]:
    """The rows from left to right, with a lane for each arrow that passes a row, so that few arrows cross."""
    row_of = {name: i for i, level in enumerate(levels) for name in level}
    rows = [list(level) for level in levels]
    links = nx.DiGraph()
    for a, b in sorted(arrows):
        if a in row_of and b in row_of:
            lanes = [f"{a}>{b}>{i}" for i in range(row_of[a] + 1, row_of[b])]
            for lane in lanes:
                rows[int(lane.rpartition(">")[2])].append(lane)
            links.add_edges_from(pairwise([a, *lanes, b]))
    to_column = {a for a, b in arrows if b == "planners"}
    at = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
    for turn in range(24):
        for row in rows if turn % 2 else reversed(rows):
            near = {
                name: [at[o] for o in (links.predecessors if turn % 2 else links.successors)(name)]
                for name in row
                if name in links
            }
            wanted = {n: sum(near[n]) / len(near[n]) if near.get(n) else at[n] for n in row}
            row.sort(key=lambda name: (name in to_column, wanted[name]))
            at |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    return rows


def _placed(
    rows: Sequence[Sequence[str]],
    words: Mapping[str, str],
    top: float,
    left: float,
    ends: Sequence[float],
    between: float,
) -> tuple[dict[str, Box], float]:
    """The box of each package and lane, and where the next row would begin."""
    boxes = {}
    for row, right in zip(rows, ends):
        packages = [name for name in row if ">" not in name]
        lanes = len(row) - len(packages)
        width = (right - left - GAP * (len(row) - 1) - LANE * lanes) / max(len(packages), 1)
        tall = max(2 * PADDING + LINE * len(_lines(name, words, width)) for name in packages)
        x = left
        for name in row:
            its = LANE if ">" in name else width
            boxes[name] = (x, top, its, tall)
            x += its + GAP
        top += tall + between
    return boxes, top


def _arrows(rows: Sequence[Sequence[str]], arrows: set[tuple[str, str]], boxes: Mapping[str, Box]) -> Iterator[str]:
    """The arrows between boxes, through the lanes of the rows that they pass."""
    row_of = {name: i for i, row in enumerate(rows) for name in row}
    paths = [
        [a, *(f"{a}>{b}>{i}" for i in range(row_of[a] + 1, row_of[b])), b]
        for a, b in sorted(arrows)
        if a in row_of and b in row_of
    ]
    middle = {name: x + width / 2 for name, (x, _, width, _) in boxes.items()}
    leave, enter = ({(path[i], path[j]): 0.0 for path in paths for i, j in [ends]} for ends in ((0, 1), (-1, -2)))
    for ports in (leave, enter):
        for name in {name for name, _ in ports}:
            others = sorted((other for one, other in ports if one == name), key=middle.__getitem__)
            x, _, width, _ = boxes[name]
            for i, other in enumerate(others):
                ports[name, other] = x + width * (i + 1) / (len(others) + 1)
    for path in paths:
        x, y = leave[path[0], path[1]], boxes[path[0]][1] + boxes[path[0]][3]
        line = f"M{x:g},{y:g}"
        for name in path[1:]:
            to = enter[name, path[-2]] if name == path[-1] else middle[name]
            top = boxes[name][1]
            half = (y + top) / 2
            line += f" C{x:g},{half:g} {to:g},{half:g} {to:g},{top:g}"
            x, y = to, top
            if name != path[-1]:
                y = top + boxes[name][3]
                line += f" V{y:g}"
        yield f'<path class="arrow" marker-end="url(#head)" d="{line}"/>'
    for a, b in sorted(arrows):
        if a in row_of and b == "planners":
            x, y, width, tall = boxes[a]
            yield f'<path class="arrow" marker-end="url(#head)" d="M{x + width:g},{y + tall / 2:g} H{boxes[b][0]:g}"/>'


def _rectangle(kind: str, box: Box) -> str:
    x, y, width, tall = box
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{tall:g}" rx="7"/>'


def _lines(name: str, words: Mapping[str, str], width: float) -> list[list[tuple[str, str]]]:
    """What each line of a box says: the name and the purpose, beside it if there is room. Texts have a kind."""
    role = words.get(name, "").replace("`", "")
    named = name if name == "reshard.planners" else name.partition(".")[2] or name
    if _taken(named) + CHARACTER * len(role) < width - 2 * PADDING:
        return [[("name", named), ("role", role)]]
    return [[("name", named)], *([("role", line)] for line in _wrapped(role, width))]


def _taken(name: str) -> float:
    """The width of a name, and of the space behind it."""
    return NAME * len(name) + PADDING


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * PADDING) / CHARACTER))


def _texts(lines: Sequence[Sequence[tuple[str, str]]], box: Box) -> Iterator[str]:
    for i, line in enumerate(lines):
        x, y = box[0] + PADDING, box[1] + PADDING + 12 + LINE * i
        for kind, text in line:
            yield f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text, quote=False)}</text>'
            x += _taken(text)


if __name__ == "__main__":
    PICTURE.write_text(draw(Codebase.read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
