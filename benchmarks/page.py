"""The rows that benchmarks measure, and the pages that show them.

A benchmark yields rows. `python -m benchmarks` collects the rows of all benchmarks, and prints their tables. With
`--write`, it stores the rows in `benchmarks/results.json`, and fills the tables into `benchmarks/RESULTS.md`, and
single figures into `docs/speed.md` and `README.md`, between their marks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "README",
    "RESULTS",
    "SPEED",
    "TABLES",
    "Results",
    "Row",
    "arguments",
    "filled",
    "merged",
    "report",
    "with_figures",
]

RESULTS = Path(__file__).with_name("results.json")
TABLES = Path(__file__).with_name("RESULTS.md")
README = Path(__file__).parents[1] / "README.md"
SPEED = Path(__file__).parents[1] / "docs" / "speed.md"

Rounds = tuple[float, ...]
"""A figure per round. Contestants run in turns, so figures at the same index were measured close to each other."""


@dataclass(frozen=True)
class Row:
    """One measurement of all contestants in the same rounds."""

    section: str
    """Name of the benchmark."""
    what: str
    unit: str
    """"s", "CPU s", or another unit, such as "MB". Less is better."""
    ours: Rounds
    peers: dict[str, Rounds] = field(default_factory=dict)
    """A peer without rounds was not installed."""
    floor: Rounds = ()
    """The minimum that the work needs. The section's text says which work."""

    def __post_init__(self) -> None:
        others = [rounds for rounds in (*self.peers.values(), self.floor) if rounds]
        if not self.ours or any(len(one) != len(self.ours) for one in others):
            raise ValueError(f"{self.section}: {self.what}: a figure of each round is wanted of each contestant")

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        """Inverse of `dataclasses.asdict` after JSON."""
        peers = {name: tuple(rounds) for name, rounds in row["peers"].items()}
        return cls(**{**row, "ours": tuple(row["ours"]), "peers": peers, "floor": tuple(row["floor"])})

    def cells(self) -> tuple[str, ...]:
        """Return the cells for the header of `Results.table`."""
        ratios = [f"{_ratio(rounds, self.ours)} {name}" for name, rounds in self.peers.items() if rounds]
        return (
            self.what,
            self.unit,
            _figure(self.ours),
            ", ".join(
                f"{name} {_figure(rounds) if rounds else 'not installed'}" for name, rounds in self.peers.items()
            ),
            _figure(self.floor) if self.floor else "",
            ", ".join(ratios),
            _ratio(self.floor, self.ours) if self.floor else "",
            f"{max(self.ours) / min(self.ours):.2f}" if len(self.ours) > 1 and min(self.ours) else "one round",
        )


def _figure(rounds: Rounds) -> str:
    """Return the median."""
    return f"{statistics.median(rounds):.3g}"


def _ratio(above: Rounds, below: Rounds) -> str:
    """Return the median of the rounds' ratios, with the lowest and the highest."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True) if b)
    if not ratios:
        return ""
    middle = (
        f"{statistics.median(ratios):.2g}" if statistics.median(ratios) < 10 else f"{statistics.median(ratios):.0f}"
    )
    return middle if len(ratios) == 1 else f"{middle} ({ratios[0]:.2g} to {ratios[-1]:.2g})"


HEADER = ("", "unit", "ours", "peers", "floor", "peer / ours", "floor / ours", "noise")


@dataclass(frozen=True)
class Results:
    """The rows of one run of all benchmarks."""

    where: str
    """A description of the machine."""
    rows: tuple[Row, ...]

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections, in the order in which they first occur."""
        return tuple(dict.fromkeys(row.section for row in self.rows))

    def table(self, section: str) -> str:
        """Return the rows of a section in Markdown."""
        lines = [HEADER, tuple("---" for _ in HEADER), *(row.cells() for row in self.rows if row.section == section)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def parts(self) -> dict[str, str]:
        """Return the parts of the page by the names of their places: the machine, and the tables."""
        return {"where": self.where, **{section: self.table(section) for section in self.sections}}

    def to_json(self) -> str:
        """Return the text of `RESULTS`, with one row per line."""
        rows = ",\n".join(f"  {json.dumps(_rounded(asdict(row)))}" for row in self.rows)
        return f'{{"where": {json.dumps(self.where)}, "rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Inverse of `to_json`."""
        found = json.loads(text)
        return cls(found["where"], tuple(map(Row.from_json, found["rows"])))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with figures of four digits."""

    def short(rounds: Iterable[float]) -> list[float]:
        return [float(f"{x:.4g}") for x in rounds]

    peers = {name: short(rounds) for name, rounds in row["peers"].items()}
    return {**row, "ours": short(row["ours"]), "peers": peers, "floor": short(row["floor"])}


def merged(kept: Results, found: Sequence[Row], order: Sequence[str]) -> Results:
    """Return the kept results, with sections that were measured again replaced, in the order of the page."""
    again = {row.section for row in found}
    rows = [*(row for row in kept.rows if row.section not in again), *found]
    return Results(kept.where, tuple(sorted(rows, key=lambda row: order.index(row.section))))


_MARKS = re.compile(r"(<!-- measured: (\w+) -->\n).*?(\n?<!-- end -->)", re.DOTALL)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with each part between its marks. Raises ValueError unless each has exactly one place."""
    places = [mark[1] for mark in _MARKS.findall(text)]
    if sorted(places) != sorted(parts):
        raise ValueError(f"the page has places for {', '.join(places)}; there are {', '.join(parts)}")
    return _MARKS.sub(lambda mark: f"{mark[1]}{parts[mark[2]]}\n<!-- end -->", text)


_FIGURES = re.compile(r"(<!-- figures in bold:\n(.*?)-->)(.*?)(?=<!-- end -->)", re.DOTALL)
_NAME = re.compile(r"(\w+): (.+?) of (.+), ([\w ]+)")
_BOLD = re.compile(r"\*\*.*?\*\*")


def with_figures(text: str, rows: Iterable[Row]) -> str:
    """Return a text with single figures of the page. A comment before a table or paragraph names its bold figures in
    order, such as "load: DCP / ours of columns, CPU s and s" for two of them. The comment "end" follows.

    Raises ValueError if a line names no row, or if there are more or fewer figures than lines.
    """
    named = {(row.section, row.what, row.unit): row for row in rows}

    def figure(name: str) -> str:
        parts = _NAME.fullmatch(name)
        section, which, what, unit = parts.groups() if parts is not None else ("", name, "", "")
        row = named.get((section, what, unit))
        contestants = {"ours": row.ours, "floor": row.floor, **row.peers} if row is not None else {}
        above, _, below = which.partition(" / ")
        if row is None or not {above, below or "ours"} <= contestants.keys():
            raise ValueError(f"no row of {section} has {which} of {what}, {unit}")
        return _ratio(contestants[above], contestants[below]) if below else _figure(contestants[above])

    def block(found: re.Match[str]) -> str:
        lines = (line.rpartition(", ") for line in found[2].splitlines())
        names = [front + comma + unit for front, comma, units in lines for unit in units.split(" and ")]
        shown = _BOLD.findall(found[3])
        if len(names) != len(shown):
            raise ValueError(f"{len(names)} figures are named, and {len(shown)} are in bold: {', '.join(shown)}")
        figures = (f"**{figure(name)}**" for name in names)
        return found[1] + _BOLD.sub(lambda _: next(figures), found[3])

    return _FIGURES.sub(block, text)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options of all benchmarks. From here on, the compiled kernel is off, except in rows
    that name it (`benchmarks.kernels`)."""
    os.environ["RESHARD_KERNELS"] = "0"
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller or fewer cases")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write what was measured there, too, as JSON")
    return parser


def report(rows: Iterator[Row], file: Path | None) -> int:
    """Print rows as they come, and keep them. Return the exit code 0."""
    found: list[Row] = []
    for row in rows:
        if not found:
            print(_line(HEADER), flush=True)
        found.append(row)
        print(_line(row.cells()), flush=True)
    if file is not None:
        file.write_text(Results("", tuple(found)).to_json())
    return 0


def _line(cells: Sequence[str]) -> str:
    widths = (44, 12, 9, 26, 9, 34, 20, 0)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
