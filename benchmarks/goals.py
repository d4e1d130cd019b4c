"""Goals and results: a table that is computed from the rows of the page.

A goal is the ratio of a peer, or of the floor, to ours, in the same rounds. It is reached in every round, in the
median, or not. The sections of the page say why not. If `benchmarks.limits` measured the bare passes over the bytes,
the table also shows the best ratio that can be reached.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.convert import WITH_ISAL
from benchmarks.page import Row

__all__ = ["GOALS", "Goal", "table"]

HEADER = ("table", "row", "against", "wanted", "median", "lowest round", "reached", "limit")


@dataclass(frozen=True)
class Goal:
    """That something in a row of the page is at least `wanted` times ours."""

    section: str
    what: str
    """The row. With a star at its end: all rows that begin so and have the contestant. The worst is reported."""
    unit: str
    against: str
    """A peer, "floor", or "limit". With "limit", `wanted` is an upper bound for ours, in the row's unit."""
    wanted: float
    may_lack: bool = False
    """Whether the row only exists if an extra is installed."""
    limit: str = ""
    """The row of `benchmarks.limits`, if there is one, with the passes that no implementation can omit."""

    def ratios(self, row: Row) -> tuple[float, ...]:
        """Return the ratio of each round, or ours if there is a limit. Empty if the row lacks the contestant."""
        if self.against == "limit":
            return row.ours
        others = row.floor if self.against == "floor" else row.peers.get(self.against, ())
        return tuple(other / ours for other, ours in zip(others, row.ours))

    def cells(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Return the cells for `HEADER`. Raises ValueError if there is no such row."""
        found = self.rows(rows)
        worst = max if self.against == "limit" else min
        if not found:
            raise ValueError(f"a goal names {self.section}: {self.what}, {self.unit}, {self.against}: no row has that")
        row, ratios = worst(found, key=lambda one: statistics.median(one[1]))
        name = f"{row.what}, {row.unit}{'' if row.what == self.what else ': the worst of these'}"
        wanted = f"at most {self.wanted:g} {self.unit}" if self.against == "limit" else f"{self.wanted:g}"
        against = "" if self.against == "limit" else self.against
        middle = statistics.median(ratios)
        limit = [
            self.ratios(row) for row in rows if (row.section, row.what, row.unit) == ("limits", self.limit, self.unit)
        ]
        most = f"{statistics.median(limit[0]):.2g}" if limit and limit[0] else ""
        return self.section, name, against, wanted, f"{middle:.2g}", f"{worst(ratios):.2g}", self._verdict(ratios), most

    def rows(self, rows: Iterable[Row]) -> list[tuple[Row, tuple[float, ...]]]:
        """Return the rows of this goal, each with its ratios."""
        return [(row, ratios) for row in rows if self._names(row) and (ratios := self.ratios(row))]

    def _names(self, row: Row) -> bool:
        same = row.what.startswith(self.what[:-1]) if self.what.endswith("*") else row.what == self.what
        return same and (row.section, row.unit) == (self.section, self.unit)

    def _verdict(self, ratios: Sequence[float]) -> str:
        def reached(ratio: float) -> bool:
            return ratio <= self.wanted if self.against == "limit" else ratio >= self.wanted

        if all(map(reached, ratios)):
            return "in every round" if len(ratios) > 1 else "in its one round"
        return "in the median" if reached(statistics.median(ratios)) else "no"


_CPU = "CPU s"
_COLUMNS = "rows by 4 to columns by {}, the compiled loop"
_COPIES = "rows by 4 to copies on all, hash a share, copy all"
_FIRST, _DURING = "rows by 8, check first", "rows by 8, check during"
GOALS = (
    Goal("load", "rows by 4 to columns by 8, compiled kernel", _CPU, "DCP", 5.5, limit=_COLUMNS.format(8)),
    Goal("load", "rows by 4 to columns by 8", _CPU, "DCP", 5.5),
    Goal("load", "rows by 4 to columns by 4, compiled kernel", _CPU, "DCP", 4, limit=_COLUMNS.format(4)),
    Goal("load", "rows by 8, the same layout, compiled kernel", _CPU, "DCP", 2, limit=_FIRST),
    Goal("load", "rows by 8, the same layout, check during, compiled kernel", _CPU, "DCP", 2, limit=_DURING),
    Goal("load", "rows by 4 to copies on all, compiled kernel", _CPU, "DCP", 2.5, limit=_COPIES),
    Goal("load", "rows by 4 to columns by 8, compiled kernel", _CPU, "floor", 0.6, limit=_COLUMNS.format(8)),
    Goal("load", "rows by 4 to columns by 8", _CPU, "floor", 0.6),
    Goal("load", "rows by 8, the same layout, compiled kernel", _CPU, "floor", 0.55, limit=_FIRST),
    Goal("load", "rows by 8, the same layout, check during, compiled kernel", _CPU, "floor", 0.55, limit=_DURING),
    Goal("save", "one rank, default", _CPU, "DCP", 1, limit="one rank, default"),
    Goal("save", "one rank, default, compiled kernel", _CPU, "DCP", 1.4, limit="one rank, default, compiled kernel"),
    Goal("save", "rows by 4, default", _CPU, "DCP", 1, limit="rows by 4, default"),
    Goal("save", "rows by 4, default, compiled kernel", _CPU, "DCP", 1.4, limit="rows by 4, default, compiled kernel"),
    Goal("save", "rows by 8, default", _CPU, "DCP", 1, limit="rows by 8, default"),
    Goal("save", "rows by 8, default, compiled kernel", _CPU, "DCP", 1.4, limit="rows by 8, default, compiled kernel"),
    Goal("save", "one rank, without fingerprints", _CPU, "floor", 0.9, limit="one rank, hash and write"),
    Goal("save", "rows by 4, without fingerprints", _CPU, "floor", 0.9, limit="rows by 4, hash and write"),
    Goal("save", "rows by 8, without fingerprints", _CPU, "floor", 0.9, limit="rows by 8, hash and write"),
    Goal("save", "one rank, async, the call", "s", "floor", 0.91),
    Goal("save", "rows by 4, async, the call", "s", "floor", 0.91),
    Goal("save", "rows by 8, async, the call", "s", "floor", 0.91),
    Goal("disk", "one rank", "s", "floor", 0.9),
    Goal("disk", "rows by 4", "s", "floor", 0.9),
    Goal("state_dict", "get flat", _CPU, "torch", 5),
    Goal("state_dict", "set optimizer", _CPU, "torch", 20),
    Goal("many_tensors", "*", _CPU, "torch", 1),
    Goal("many_tensors", "*", _CPU, "floor", 0.9),
    Goal("many_tensors", "inspect, until its first line, 20,000 tensors", "s", "limit", 2),
    Goal("many_tensors_large", "*", _CPU, "torch", 1),
    Goal("many_tensors_large", "*", _CPU, "floor", 0.9),
    Goal("first_calls", "import*", _CPU, "DCP", 1),
    Goal("first_calls", "first save", _CPU, "DCP", 1),
    Goal("first_calls", "first load", _CPU, "DCP", 1),
    *(
        Goal("convert", f"{what}*", unit, "torch", wanted, may_lack=bool(extra), limit=f"{what} by 4")
        for extra in ("", WITH_ISAL)
        for what in (f"DCP to torch.save{extra}, rows", f"DCP to torch.save{extra}, columns")
        for unit, wanted in (("s", 4), (_CPU, 3))
    ),
    Goal("convert_large", "*", "s", "floor", 0.8),
    Goal("drop_in", "*", _CPU, "torch", 1),
)
"""This project's goals."""


def table(rows: Sequence[Row], goals: Iterable[Goal] = GOALS) -> str:
    """Return a Markdown table of all goals for measured tables. Raises ValueError if a goal names an unknown row."""
    measured = {row.section for row in rows}
    asked = [goal for goal in goals if goal.section in measured and not (goal.may_lack and not goal.rows(rows))]
    found = [goal.cells(rows) for goal in asked]
    lines = [HEADER, tuple("---" for _ in HEADER), *found]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
