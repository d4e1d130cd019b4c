"""Plans and reports in notebooks. A package above this one draws pages and registers its functions here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from planners.units import format_bytes

__all__ = ["Pictured", "Tabled", "draw_pages_with", "framed", "preformatted"]

_MOST_NAMES = 3
_MOST_LINES = 40
_draw: list[Callable[..., str]] = []


def draw_pages_with(draw: Callable[..., str], write: Callable[..., str]) -> None:
    """Register functions that draw a plan as a complete HTML page, and write it as text."""
    _draw[:] = [draw, write]


class Pictured:
    """A plan. In a notebook it is its page, in a frame: its styles are its own."""

    __slots__ = ()

    def to_html(
        self,
        *,
        title: str | None = None,
        ranks_per_host: int = 8,
        source: str = "",
        target: str = "",
        cluster: Any = None,
        wrong: Sequence[str] = (),
    ) -> str:
        """Return the plan as a self-contained HTML page: its proof, totals, the sharding of its
        largest tensors, traffic between ranks, bytes per rank, and a searchable table of tensors.
        Notebooks display a plan as this page.

            Path("plan.html").write_text(plan.to_html(source="run/step-1000", target="fsdp=3"))

        Args:
            title: title of the page. Default: what the plan does.
            ranks_per_host: above 64 ranks, traffic is shown between hosts, and above 64 hosts
                between groups of hosts.
            source: name of the source for readers, such as a path or a topology.
            target: name of the target.
            cluster: a `Cluster`: also show the time that `estimate` returns. Its `ranks_per_host` is used.
            wrong: what is wrong besides what the proof finds. The page lists it first.

        Raises PlanError for less than one rank per host.
        """
        return _draw[0](
            self,
            title=title,
            ranks_per_host=ranks_per_host,
            source=source,
            target=target,
            cluster=cluster,
            wrong=wrong,
        )

    def __str__(self) -> str:
        """Totals, and the bytes of each rank. `reshard.planners.format_plan(plan)` also lists items."""
        return _draw[1](self)

    def _repr_html_(self) -> str:
        return framed(self.to_html(), repr(self))


def framed(page: str, title: str) -> str:
    """A whole page within that of a notebook."""
    from html import escape

    style = "width: 100%; height: 720px; border: 0"
    return f'<iframe srcdoc="{escape(page)}" title="{escape(title)}" style="{style}"></iframe>'


class Tabled:
    """A report: a dataclass. In a notebook it is a table of its fields, without those that are empty."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from html import escape

        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        rows = "".join(
            f'<tr><th style="text-align: left">{escape(name.replace("_", " "))}</th>'
            f'<td style="text-align: left">{escape(_said(name, value))}</td></tr>'
            for name, value in fields
            if value is False or value not in (None, "", 0, (), [], {})
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def preformatted(text: str) -> str:
    """Return preformatted text for a notebook. Of many lines, only the first ones are shown."""
    from html import escape

    lines = text.splitlines()
    more = [f"... {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return f"<pre>{escape(chr(10).join(lines[:_MOST_LINES] + more))}</pre>"


def _said(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return format_bytes(value) if "bytes" in name else f"{value:,}"
    if isinstance(value, Mapping) and all(isinstance(v, float) for v in value.values()):
        return ", ".join(f"{key} {number:.3g}" for key, number in value.items())
    if isinstance(value, Collection) and not isinstance(value, str):
        items = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, Mapping) else [str(item) for item in value]
        more = ", ..." if len(items) > _MOST_NAMES else ""
        return f"{len(items):,}: {', '.join(items[:_MOST_NAMES])}{more}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
