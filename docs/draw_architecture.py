"""Draws docs/architecture.svg, the packages in their layers, from the source: `python -m docs.draw_architecture`.

Each row is a layer, and each box lists all imports of its package, which are in lower rows. For `reshard`, `planners`
is one package. Imports of the shared basics, which every package may import, are not listed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from docs.import_graph import ROOT, Codebase, layers, packages_named

__all__ = ["CHARACTER", "PICTURE", "draw", "drawn", "package_imports", "roles"]

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, MARGIN, GAP = 760, 16, 10
"""The width is that of the column of the site, so that text has its own size there."""
LINE, PADDING = 18, 12
SMALL = 200
"""Below this, the number of lines of a package is not given."""
CHARACTER = 6.9
"""The most that a character of the text takes, on average."""

FOUNDATION = (
    "reshard.arguments", "reshard.state", "reshard.errors", "planners.findings", "planners.errors", "planners.units",
)  # fmt: skip
"""Every package in a higher layer may import these."""

TITLE = "planners: geometry, without torch, files, or processes"

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.ground { fill: #ffffff } .inner { fill: #f3f6fa; stroke: #c3ccd6 }
.package { fill: #ffffff; stroke: #8c98a6; stroke-width: 1.2 }
.planners { stroke: #2f7d6b } .reshard { stroke: #3b63b8 }
.name { font: 600 14px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.role { fill: #1f2328 } .title { font-size: 15px; font-weight: 600; fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af } .ground { fill: #0d1117 } .inner { fill: #151b23; stroke: #3d444d }
  .package { fill: #1c232d } .planners { stroke: #58b8a0 } .reshard { stroke: #7ea2ee }
  .name, .role, .title { fill: #e6edf3 }
}
"""


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


def draw(codebase: Codebase, page: str) -> str:
    """The picture as SVG."""
    levels = [[package for package in layer if package != "planners"] for layer in layers(page)]
    above = [level for level in levels if level and level[0].startswith("reshard")]
    below = [level for level in levels if level and level[0].startswith("planners")]
    arrows, words = package_imports(codebase), roles(page)
    lines = {name: _text(name, arrows, words) for level in above + below for name in level}
    upper, start = _rows(above, lines, MARGIN, MARGIN, WIDTH - MARGIN)
    lower, bottom = _rows(below, lines, start + 40, MARGIN + 10, WIDTH - MARGIN - 10)
    height, inner = bottom + MARGIN, WIDTH - 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        "<title>The packages of reshard and planners in their layers, and their imports</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="14"/>',
        f'<rect class="inner" x="{MARGIN}" y="{start:g}" width="{inner}" height="{bottom - start:g}" rx="12"/>',
        f'<text class="title" x="{MARGIN + 14}" y="{start + 26:g}">{TITLE}</text>',
    ]
    for name, (x, y, width, tall) in {**upper, **lower}.items():
        imports = " ".join(sorted(b for a, b in arrows if a == name))
        kind = name.split(".")[0]
        parts.append(f'<g data-package="{name}" data-imports="{imports}">')
        parts.append(f'<rect class="package {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{tall:g}" rx="8"/>')
        count = codebase.lines(name)
        if count > SMALL:
            end = f'x="{x + width - PADDING:g}" y="{y + PADDING + 10:g}" text-anchor="end"'
            parts.append(f"<text {end}>{count:,} lines</text>")
        for i, (style, text) in enumerate(_wrapped(lines[name], width)):
            at = f'x="{x + PADDING:g}" y="{y + PADDING + 10 + LINE * i:g}"'
            parts.append(f'<text class="{style}" {at}>{escape(text)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(name: str, arrows: set[tuple[str, str]], words: Mapping[str, str]) -> list[tuple[str, str]]:
    """Kinds and texts of what a box says: the name, the purpose, and the imports."""
    package = name.split(".")[0]
    named = [b.removeprefix(f"{package}.") for a, b in sorted(arrows) if a == name and b not in FOUNDATION]
    role = words.get(name, "").replace("`", "")
    listed = [("imports", f"imports {', '.join(named)}")] if named else []
    return [("name", name.removeprefix(f"{package}.")), ("role", role), *listed]


def _wrapped(lines: Sequence[tuple[str, str]], width: float) -> Iterator[tuple[str, str]]:
    for style, text in lines:
        size = 8.5 if style == "name" else CHARACTER
        for line in textwrap.wrap(text, int((width - 2 * PADDING) / size)):
            yield style, line


def _rows(
    levels: Sequence[Sequence[str]], lines: Mapping[str, list[tuple[str, str]]], top: float, left: float, right: float
) -> tuple[dict[str, tuple[float, float, float, float]], float]:
    """The box of each package: x, y, width, and height; and where the next row would begin."""
    boxes = {}
    for level in levels:
        width = (right - left - GAP * (len(level) - 1)) / len(level)
        tall = max(2 * PADDING - 4 + LINE * len(list(_wrapped(lines[name], width))) for name in level)
        for i, name in enumerate(level):
            boxes[name] = (left + i * (width + GAP), top, width, tall)
        top += tall + GAP
    return boxes, top


if __name__ == "__main__":
    PICTURE.write_text(draw(Codebase.read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
