"""Draws docs/architecture.svg, the rooms and who imports whom, from the source: `python -m docs.draw_rooms`.

A line is drawn from room to room unless a longer way leads there; what a room imports in all is written in its box.
Seen from `reshard`, `planners` is one room. What every room may import is drawn small, and no lines lead to it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

from docs.rooms import ROOT, House, floors, rooms_named

__all__ = ["BOX", "PICTURE", "arrows_of", "draw", "drawn", "roles"]

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, MARGIN, GAP = 1120, 28, 40
BOX, PILL = (318, 92), (196, 34)

GROUND = ("reshard.state", "reshard.errors", "planners.findings", "planners.errors", "planners.units")
"""What every room may import: drawn small, without lines."""

FACES = ("reshard", "reshard.normalization", "reshard.trace", "reshard.fingerprints")
"""Rooms of names only: drawn small."""

ACROSS = {
    "reshard.normalization": 0.13,
    "reshard": 0.34,
    "reshard.trace": 0.64,
    "reshard.fingerprints": 0.86,
    "reshard.dcp": 0.34,
    "reshard.state_dict": 0.16,
    "reshard.mapping": 0.76,
    "reshard.execute": 0.32,
    "reshard.checkpoint": 0.8,
    "reshard.formats": 0.8,
    "reshard.native": 0.62,
    "reshard.ranks": 0.2,
    "reshard.stored": 0.62,
    "reshard.live": 0.3,
    "reshard.storage": 0.76,
    "planners.reports": 0.34,
    "planners.testing": 0.72,
}
"""Where the middle of a room is between the left end and the right, so that lines cross nothing; by default, even."""

TITLE = "planners: geometry, without torch, files or processes"

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a }
.ground { fill: #ffffff } .inner { fill: #f3f6fa; stroke: #c3ccd6 }
.room { fill: #ffffff; stroke: #8c98a6; stroke-width: 1.2 } .planners { stroke: #2f7d6b } .reshard { stroke: #3b63b8 }
.name { font: 600 15px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.small { font-size: 12.5px; font-weight: 600 } .role { fill: #1f2328 } .imports { font-size: 10.5px }
.title { font-size: 17px; font-weight: 600; fill: #1f2328 }
.line { fill: none; stroke: #6e7b8a; stroke-width: 1.5 } .head { fill: #6e7b8a }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af } .ground { fill: #0d1117 } .inner { fill: #151b23; stroke: #3d444d }
  .room { fill: #1c232d } .planners { stroke: #58b8a0 } .reshard { stroke: #7ea2ee }
  .name, .role, .title { fill: #e6edf3 } .line { stroke: #8d97a3 } .head { fill: #8d97a3 }
}
"""


@dataclass(frozen=True)
class Room:
    """A room and where it is drawn."""

    name: str
    x: float
    y: float
    small: bool

    @property
    def size(self) -> tuple[float, float]:
        return PILL if self.small else BOX


def roles(page: str) -> dict[str, str]:
    """What each room is for in a few words: the headings of architecture.md, such as "### `reshard.api`: the verbs"."""
    heads = re.findall(r"^### (.*?): (.*)$", page, re.M)
    return {room: words for names, words in heads for room in rooms_named(names)}


def _seen(target: str, source: str) -> str:
    """A room as another sees it: all of `planners` is one from outside."""
    return "planners" if target.startswith("planners") and not source.startswith("planners") else target


def arrows_of(house: House) -> set[tuple[str, str]]:
    """Who imports whom, as the picture says it; that the public names of `planners` lead to its rooms is left out."""
    return {(a, _seen(b, a)) for a, b in house.rooms.edges if a != "planners"}


def drawn(svg: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The rooms of a picture, and who imports whom in it."""
    found = dict(re.findall(r'data-room="([\w.]+)" data-imports="([\w. ]*)"', svg))
    return set(found), {(room, target) for room, targets in found.items() for target in targets.split()}


def _lines(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows that follow from no others."""
    return sorted(nx.transitive_reduction(nx.DiGraph(pair for pair in arrows if pair[1] not in GROUND)).edges)


def _place(levels: Sequence[Sequence[str]], top: float, left: float, right: float) -> tuple[list[Room], float]:
    """Rooms on their floors, and where the lowest ends."""
    rooms = []
    for level in filter(None, levels):
        small = level[0] in (*GROUND, *FACES)
        for i, name in enumerate(level):
            share = ACROSS.get(name, (i + 1) / (len(level) + 1))
            rooms.append(Room(name, left + share * (right - left), top, small))
        top += (PILL if small else BOX)[1] + GAP
    return rooms, top - GAP


def draw(house: House, page: str) -> str:
    """The picture as SVG."""
    levels = [[room for room in floor if room != "planners"] for floor in floors(page)]
    ours = [level for level in levels if level and level[0].startswith("reshard")]
    theirs = [level for level in levels if level and level[0].startswith("planners") and level[0] not in GROUND]
    ground = [[room for level in levels for room in level if room in GROUND and room.startswith("planners")]]
    above, bottom = _place(ours, MARGIN + 8, MARGIN, WIDTH - MARGIN)
    start = bottom + GAP
    below, bottom = _place([*theirs, *ground], start + 44, MARGIN + 10, WIDTH - MARGIN - 10)
    height, inner = bottom + 20 + MARGIN, WIDTH - 2 * MARGIN
    arrows = arrows_of(house)
    rooms = {room.name: room for room in (*above, *below)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        "<title>The rooms of the house, and who imports whom</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="14"/>',
        f'<rect class="inner" x="{MARGIN}" y="{start:g}" width="{inner}" height="{bottom + 20 - start:g}" rx="12"/>',
        f'<text class="title" x="{MARGIN + 20}" y="{start + 30:g}">{TITLE}</text>',
        *_curves(_lines(arrows), rooms, start),
        *(text for room in rooms.values() for text in _box(room, house, arrows, roles(page))),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curves(lines: Sequence[tuple[str, str]], rooms: dict[str, Room], planners_top: float) -> Iterator[str]:
    """Lines from the bottom of a room to the top of another, side by side in the order of their other ends."""

    def middle(name: str, default: float) -> float:
        return rooms[name].x if name in rooms else default

    def port(name: str, x: float, others: list[str]) -> dict[str, float]:
        """Where on an edge of a room the line to each other room ends."""
        others = sorted(others, key=lambda other: middle(other, x))
        span = min(0.6 * rooms[name].size[0], 56 * (len(others) - 1))
        step = span / (len(others) - 1) if len(others) > 1 else 0
        return {other: x - span / 2 + i * step for i, other in enumerate(others)}

    for a, b in lines:
        one = rooms[a]
        x0 = port(a, one.x, [t for s, t in lines if s == a])[b]
        y0 = one.y + one.size[1]
        if b in rooms:
            x1, y1 = port(b, rooms[b].x, [s for s, t in lines if t == b])[a], rooms[b].y
        else:
            x1, y1 = x0, planners_top
        bend = max(24, (y1 - y0) * 0.45)
        yield (
            f'<path class="line" d="M{x0:.1f} {y0:.1f} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - 7 - bend:.1f} '
            f'{x1:.1f} {y1 - 7:.1f}"/><path class="head" d="M{x1 - 5:.1f} {y1 - 8:.1f} h10 l-5 8 z"/>'
        )


def _box(room: Room, house: House, arrows: set[tuple[str, str]], words: dict[str, str]) -> Iterator[str]:
    """A room: its name, its lines, what it is for, and what it imports."""
    imports = sorted({b for a, b in arrows if a == room.name})
    (w, h), x, package = room.size, room.x - room.size[0] / 2, room.name.split(".")[0]
    yield f'<g data-room="{room.name}" data-imports="{" ".join(imports)}">'
    yield f'<rect class="room {package}" x="{x:.1f}" y="{room.y:g}" width="{w}" height="{h}" rx="8"/>'
    label = room.name if room.small else room.name.split(".")[-1]
    if room.small:
        yield f'<text class="name small" x="{room.x:.1f}" y="{room.y + 22:g}" text-anchor="middle">{label}</text></g>'
        return
    yield f'<text class="name" x="{x + 14:.1f}" y="{room.y + 23:g}">{label}</text>'
    count = f"{house.lines(room.name):,} lines"
    yield f'<text x="{x + w - 14:.1f}" y="{room.y + 23:g}" text-anchor="end">{count}</text>'
    yield f'<text class="role" x="{x + 14:.1f}" y="{room.y + 43:g}">{escape(words.get(room.name, ""))}</text>'
    named = ", ".join(name.removeprefix(f"{package}.") for name in imports if name not in GROUND)
    for i, line in enumerate(textwrap.wrap(f"imports {named}" if named else "", 53)):
        yield f'<text class="imports" x="{x + 14:.1f}" y="{room.y + 63 + 15 * i:g}">{escape(line)}</text>'
    yield "</g>"


if __name__ == "__main__":
    PICTURE.write_text(draw(House.read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
