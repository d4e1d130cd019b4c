"""Draws docs/architecture.svg, the packages and their imports, from the source: `python -m docs.draw_architecture`.

The picture draws an import as a line unless a longer path implies it. Each box lists all imports of its package.
For `reshard`, `planners` is one package. Packages that every other may import are drawn small, without lines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

from docs.import_graph import ROOT, Codebase, layers, packages_named

__all__ = ["BOX", "PICTURE", "draw", "drawn", "package_imports", "roles"]

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, MARGIN, GAP = 1120, 28, 40
BOX, PILL = (318, 92), (196, 34)

FOUNDATION = (
    "reshard.arguments", "reshard.state", "reshard.errors", "planners.findings", "planners.errors", "planners.units",
)  # fmt: skip
"""Every package in a higher layer may import these. They are drawn small, without lines."""

NAMES_ONLY = ("reshard", "reshard.normalization", "reshard.trace", "reshard.fingerprints", "reshard.planners")
"""Packages that only define names. They are drawn small."""

ACROSS = {
    "reshard.normalization": 0.1,
    "reshard": 0.3,
    "reshard.trace": 0.5,
    "reshard.fingerprints": 0.69,
    "reshard.dcp": 0.3,
    "reshard.elastic": 0.85,
    "reshard.state_dict": 0.16,
    "reshard.mapping": 0.76,
    "reshard.execute": 0.32,
    "reshard.checkpoint": 0.8,
    "reshard.formats": 0.8,
    "reshard.native": 0.74,
    "reshard.ranks": 0.2,
    "reshard.stored": 0.56,
    "reshard.live": 0.3,
    "reshard.storage": 0.76,
    "planners.reports": 0.34,
    "planners.testing": 0.72,
}
"""The horizontal center of a package between left (0) and right (1), chosen to avoid crossings; even by default."""

TITLE = "planners: geometry, without torch, files or processes"

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.ground { fill: #ffffff } .inner { fill: #f3f6fa; stroke: #c3ccd6 }
.package { fill: #ffffff; stroke: #8c98a6; stroke-width: 1.2 }
.planners { stroke: #2f7d6b } .reshard { stroke: #3b63b8 }
.name { font: 600 15px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.small { font-size: 12.5px; font-weight: 600 } .role { fill: #1f2328 } .imports { font-size: 10.5px }
.title { font-size: 17px; font-weight: 600; fill: #1f2328 }
.line { fill: none; stroke: #6e7b8a; stroke-width: 1.5 } .head { fill: #6e7b8a }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af } .ground { fill: #0d1117 } .inner { fill: #151b23; stroke: #3d444d }
  .package { fill: #1c232d } .planners { stroke: #58b8a0 } .reshard { stroke: #7ea2ee }
  .name, .role, .title { fill: #e6edf3 } .line { stroke: #8d97a3 } .head { fill: #8d97a3 }
}
"""


@dataclass(frozen=True)
class PlacedPackage:
    """A package and where it is drawn."""

    name: str
    x: float
    y: float
    small: bool

    @property
    def size(self) -> tuple[float, float]:
        return PILL if self.small else BOX


def roles(page: str) -> dict[str, str]:
    """The purpose of each package, from the headings of architecture.md, such as "### `reshard.api`: the verbs"."""
    heads = re.findall(r"^### (.*?): (.*)$", page, re.M)
    return {package: words for names, words in heads for package in packages_named(names)}


def _seen(target: str, source: str) -> str:
    """The name of a package as `source` refers to it: outside `planners`, all of `planners` is one package."""
    return "planners" if target.startswith("planners") and not source.startswith("planners") else target


def package_imports(codebase: Codebase) -> set[tuple[str, str]]:
    """The imports in the picture. Those from the public names of `planners` to its own packages are left out."""
    return {(a, _seen(b, a)) for a, b in codebase.packages.edges if a != "planners"}


def drawn(svg: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The packages of a picture, and their imports."""
    found = dict(re.findall(r'data-package="([\w.]+)" data-imports="([\w. ]*)"', svg))
    return set(found), {(package, target) for package, targets in found.items() for target in targets.split()}


def _lines(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The imports that no longer path implies."""
    shown = [(a, b) for a, b in arrows if not {a, b} & {*FOUNDATION, "reshard.planners"}]
    return sorted(nx.transitive_reduction(nx.DiGraph(shown)).edges)


def _place(levels: Sequence[Sequence[str]], top: float, left: float, right: float) -> tuple[list[PlacedPackage], float]:
    """Packages placed in their layers, and the bottom of the lowest one."""
    packages = []
    for level in filter(None, levels):
        small = level[0] in (*FOUNDATION, *NAMES_ONLY)
        for i, name in enumerate(level):
            share = ACROSS.get(name, (i + 1) / (len(level) + 1))
            packages.append(PlacedPackage(name, left + share * (right - left), top, small))
        top += (PILL if small else BOX)[1] + GAP
    return packages, top - GAP


def draw(codebase: Codebase, page: str) -> str:
    """The picture as SVG."""
    levels = [[package for package in layer if package != "planners"] for layer in layers(page)]
    ours = [level for level in levels if level and level[0].startswith("reshard")]
    theirs = [level for level in levels if level and level[0].startswith("planners") and level[0] not in FOUNDATION]
    ground = [[name for level in levels for name in level if name in FOUNDATION and name.startswith("planners")]]
    above, bottom = _place(ours, MARGIN + 8, MARGIN, WIDTH - MARGIN)
    start = bottom + GAP
    below, bottom = _place([*theirs, *ground], start + 44, MARGIN + 10, WIDTH - MARGIN - 10)
    height, inner = bottom + 20 + MARGIN, WIDTH - 2 * MARGIN
    arrows = package_imports(codebase)
    packages = {package.name: package for package in (*above, *below)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        "<title>The packages of reshard and planners, and their imports</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="14"/>',
        f'<rect class="inner" x="{MARGIN}" y="{start:g}" width="{inner}" height="{bottom + 20 - start:g}" rx="12"/>',
        f'<text class="title" x="{MARGIN + 20}" y="{start + 30:g}">{TITLE}</text>',
        *_curves(_lines(arrows), packages, start),
        *(text for package in packages.values() for text in _box(package, codebase, arrows, roles(page))),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curves(lines: Sequence[tuple[str, str]], packages: dict[str, PlacedPackage], planners_top: float) -> Iterator[str]:
    """Lines from the bottom of a package to the top of another, ordered by the position of their other ends."""

    def middle(name: str, default: float) -> float:
        return packages[name].x if name in packages else default

    def port(name: str, x: float, others: list[str]) -> dict[str, float]:
        """The position on the edge of a package where the line to each other package ends."""
        others = sorted(others, key=lambda other: middle(other, x))
        span = min(0.6 * packages[name].size[0], 56 * (len(others) - 1))
        step = span / (len(others) - 1) if len(others) > 1 else 0
        return {other: x - span / 2 + i * step for i, other in enumerate(others)}

    for a, b in lines:
        one = packages[a]
        x0 = port(a, one.x, [t for s, t in lines if s == a])[b]
        y0 = one.y + one.size[1]
        if b in packages:
            x1, y1 = port(b, packages[b].x, [s for s, t in lines if t == b])[a], packages[b].y
        else:
            x1, y1 = x0, planners_top
        bend = max(24, (y1 - y0) * 0.45)
        yield (
            f'<path class="line" d="M{x0:.1f} {y0:.1f} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - 7 - bend:.1f} '
            f'{x1:.1f} {y1 - 7:.1f}"/><path class="head" d="M{x1 - 5:.1f} {y1 - 8:.1f} h10 l-5 8 z"/>'
        )


def _box(
    placed: PlacedPackage, codebase: Codebase, arrows: set[tuple[str, str]], words: dict[str, str]
) -> Iterator[str]:
    """A package: its name, its number of lines, its purpose, and its imports."""
    imports = sorted({b for a, b in arrows if a == placed.name})
    (w, h), x, package = placed.size, placed.x - placed.size[0] / 2, placed.name.split(".")[0]
    yield f'<g data-package="{placed.name}" data-imports="{" ".join(imports)}">'
    yield f'<rect class="package {package}" x="{x:.1f}" y="{placed.y:g}" width="{w}" height="{h}" rx="8"/>'
    label = placed.name if placed.small else placed.name.split(".")[-1]
    if placed.small:
        at = f'x="{placed.x:.1f}" y="{placed.y + 22:g}"'
        yield f'<text class="name small" {at} text-anchor="middle">{label}</text></g>'
        return
    yield f'<text class="name" x="{x + 14:.1f}" y="{placed.y + 23:g}">{label}</text>'
    count = f"{codebase.lines(placed.name):,} lines"
    yield f'<text x="{x + w - 14:.1f}" y="{placed.y + 23:g}" text-anchor="end">{count}</text>'
    role = escape(words.get(placed.name, "").replace("`", ""))
    yield f'<text class="role" x="{x + 14:.1f}" y="{placed.y + 43:g}">{role}</text>'
    named = ", ".join(name.removeprefix(f"{package}.") for name in imports if name not in FOUNDATION)
    for i, line in enumerate(textwrap.wrap(f"imports {named}" if named else "", 53)):
        yield f'<text class="imports" x="{x + 14:.1f}" y="{placed.y + 63 + 15 * i:g}">{escape(line)}</text>'
    yield "</g>"


if __name__ == "__main__":
    PICTURE.write_text(draw(Codebase.read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
