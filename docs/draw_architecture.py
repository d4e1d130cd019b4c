"""Draws docs/architecture.svg, the packages in their layers, from the source: `python -m docs.draw_architecture`.

A package imports only packages in lower rows, and packages of `reshard` import those of `planners`, in a column of its
own. Arrows between packages would cross: each box has its imports as data instead.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from docs.import_graph import ROOT, Codebase, layers, packages_named

__all__ = ["CHARACTER", "NAME", "OMITTED", "PICTURE", "draw", "drawn", "package_imports", "roles"]

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
OMITTED = {
    "reshard.errors", "reshard.version", "reshard.planners", "reshard.normalization", "reshard.trace",
    "reshard.fingerprints", "planners.errors", "planners.units", "planners.findings", "planners.notebooks",
}  # fmt: skip
"""Packages that are not in the picture: errors, second names, and small helpers."""
WIDTH, MARGIN, GAP = 760, 16, 10
"""The width is that of the column of the site, so that text has its own size there."""
COLUMN = 216
"""The width of the column of `planners`."""
LINE, PADDING = 16, 8
BETWEEN = 8
"""The space between rows."""
CHARACTER, NAME = 6.6, 8.1
"""The most that a character of the text takes, on average, and one of a name."""

TITLE = ("planners", "geometry, without torch, files, or processes")

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.ground { fill: #ffffff } .inner { fill: #f3f6fa; stroke: #c3ccd6 }
.package { fill: #ffffff; stroke: #8c98a6; stroke-width: 1.2 }
.planners { stroke: #2f7d6b } .reshard { stroke: #3b63b8 }
.name { font: 600 13px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.role { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af } .ground { fill: #0d1117 } .inner { fill: #151b23; stroke: #3d444d }
  .package { fill: #1c232d } .planners { stroke: #58b8a0 } .reshard { stroke: #7ea2ee }
  .name, .role { fill: #e6edf3 }
}
"""


def roles(page: str) -> dict[str, str]:
    """The purpose of each package, from the headings of architecture.md, such as "### `reshard.api`: the verbs". The
    purposes of several packages are in the order of their names, with semicolons between them."""
    heads = re.findall(r"^### (.*?): (.*)$", page, re.M)
    cut = [(packages_named(names), words.split("; ")) for names, words in heads]
    return {
        package: its
        for packages, words in cut
        for package, its in zip(packages, words * len(packages) if len(words) == 1 else words, strict=len(words) > 1)
    }


def _seen(target: str, source: str) -> str:
    """The name of a package as `source` refers to it: outside `planners`, all of `planners` is one package."""
    return "planners" if target.startswith("planners") and not source.startswith("planners") else target


def package_imports(codebase: Codebase) -> set[tuple[str, str]]:
    """The imports in the picture. Those from the public names of `planners` to its own packages are not."""
    found = {(a, _seen(b, a)) for a, b in codebase.packages.edges if a != "planners"}
    return {edge for edge in found if not OMITTED & {*edge}}


def drawn(svg: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The packages of a picture, and their imports."""
    found = dict(re.findall(r'data-package="([\w.]+)" data-imports="([\w. ]*)"', svg))
    return set(found), {(package, target) for package, targets in found.items() for target in targets.split()}


Box = tuple[float, float, float, float]
"""x, y, width, and height."""


def draw(codebase: Codebase, page: str) -> str:
    """The picture as SVG."""
    rows = [[package for package in layer if package not in {"planners", *OMITTED}] for layer in layers(page)]
    above = [row for row in rows if row and row[0].startswith("reshard")]
    below = [row for row in rows if row and row[0].startswith("planners")]
    imports, words = package_imports(codebase), roles(page)
    wide = max((i + 1 for i, row in enumerate(above) if len(row) > 2), default=0)
    ends = [WIDTH - MARGIN - (COLUMN + 2 * GAP) * (i >= wide) for i in range(len(above))]
    boxes, bottom = _placed(above, words, MARGIN, MARGIN, ends, BETWEEN)
    bottom, left = bottom - BETWEEN, WIDTH - MARGIN - COLUMN
    top = min((boxes[name][1] for row in above[wide:] for name in row), default=bottom)
    head = [[("name", TITLE[0])], *([("role", line)] for line in _wrapped(TITLE[1], COLUMN))]
    first, rights = top + LINE * len(head) + 2 * PADDING, [WIDTH - MARGIN - GAP] * len(below)
    _, end = _placed(below, words, first, left + GAP, rights, 0)
    between = max(bottom - GAP - end, BETWEEN) / max(len(below) - 1, 1)
    boxes |= _placed(below, words, first, left + GAP, rights, between)[0]
    column = (left, top, COLUMN, bottom - top)
    height = bottom + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        "<title>The packages of reshard and planners: each imports only packages in lower rows</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="14"/>',
        _rectangle("inner", column),
        *_texts(head, column),
    ]
    for name, box in boxes.items():
        its = " ".join(sorted(b for a, b in imports if a == name))
        parts.append(f'<g data-package="{name}" data-imports="{its}">')
        parts.append(_rectangle(f"package {name.partition('.')[0]}", box))
        parts += [*_texts(_lines(name, words, box[2]), box), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _placed(
    rows: Sequence[Sequence[str]],
    words: Mapping[str, str],
    top: float,
    left: float,
    ends: Sequence[float],
    between: float,
) -> tuple[dict[str, Box], float]:
    """The box of each package, and where the next row would begin."""
    boxes = {}
    for row, right in zip(rows, ends):
        width = (right - left - GAP * (len(row) - 1)) / len(row)
        tall = max(2 * PADDING + LINE * len(_lines(name, words, width)) for name in row)
        for i, name in enumerate(row):
            boxes[name] = (left + i * (width + GAP), top, width, tall)
        top += tall + between
    return boxes, top


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
