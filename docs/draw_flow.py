"""Draws docs/how-it-works.svg, the steps of a save and of a load: `python -m docs.draw_flow`."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from docs.draw_architecture import STYLE
from docs.import_graph import ROOT

__all__ = ["PICTURE", "ROWS", "draw"]

PICTURE = ROOT / "docs" / "how-it-works.svg"
ROWS = {
    "save": {"match": "which rank holds what", "plan": "who writes what", "prove": "each element once",
             "write": "one file per rank", "publish": "the manifest"},
    "load": {"open": "metadata only", "match": "names and shapes", "plan": "who reads what",
             "prove": "each element once", "check": "checksums", "read": "into your tensors"},
}  # fmt: skip
"""For each call its steps, as the page describes them, and what each is about."""
_WIDTH, _MARGIN, _GAP, _TALL, _HEAD = 860, 16, 18, 60, 32


def draw() -> str:
    """The picture as SVG."""
    height = 2 * _MARGIN + len(ROWS) * (_HEAD + _TALL) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">',
        "<title>The steps of a save and of a load, from left to right</title>",
        f"<style>{STYLE}",
        ".box { text-anchor: middle } .arrow { stroke: #8c98a6; stroke-width: 2 } .head { fill: #8c98a6 }",
        "</style>",
        '<marker id="a" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto">',
        '<path class="head" d="M0 0L10 5L0 10z"/></marker>',
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="14"/>',
    ]
    for number, (call, steps) in enumerate(ROWS.items()):
        parts += _row(call, steps, _MARGIN + number * (_HEAD + _TALL + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(call: str, steps: dict[str, str], top: int) -> Iterator[str]:
    yield f'<text class="name" x="{_MARGIN}" y="{top + 16}">reshard.{call}</text>'
    width = (_WIDTH - 2 * _MARGIN - _GAP * (len(steps) - 1)) / len(steps)
    y = top + _HEAD - 6
    for i, (name, about) in enumerate(steps.items()):
        x = _MARGIN + i * (width + _GAP)
        yield f'<rect class="package reshard" x="{x:g}" y="{y}" width="{width:g}" height="{_TALL}" rx="7"/>'
        yield f'<text class="name box" x="{x + width / 2:g}" y="{y + 25}">{escape(name)}</text>'
        yield f'<text class="role box" x="{x + width / 2:g}" y="{y + 44}">{escape(about)}</text>'
        if i:
            path = f"M{x - _GAP + 2:g} {y + _TALL // 2}H{x - 2:g}"
            yield f'<path class="arrow" d="{path}" marker-end="url(#a)"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
