"""What the commands share in what they print: consoles, sizes, JSON, a tree of tensors with equal branches folded."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from planners.findings import Finding, Report
from planners.units import format_bytes as size, format_count as counted, format_some as some
from reshard.cli.messages import in_words_of_the_command_line
from reshard.errors import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from planners.geometry.mesh import Mesh

__all__ = [
    "Branch", "PrintedLeaf", "as_given", "axes_as_json", "columns", "console", "counted", "damaged", "fold",
    "print_json", "print_legend", "print_lines", "print_report", "print_rows",
    "print_text", "print_totals", "print_tree", "print_written", "report_as_json", "short", "size", "some"
]  # fmt: skip


def console(*, stderr: bool = False) -> Console:
    """Return a console for people. In files and pipes, lines may have any length."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def print_written(*files: Path | None, as_json: bool) -> None:
    """Print the paths of written pages and plans at the end of the output. With `--json`, print
    them on stderr."""
    for file in filter(None, files):
        print_text(str(file), "wrote", screen=console(stderr=as_json))


def print_tree(leaves: Mapping[Sequence[str], PrintedLeaf], depth: int | None, notes: Iterable[str]) -> None:
    """Print names as a tree, at most `depth` levels deep, and then `notes`. Terminals wrap entries.
    In files and pipes, each entry is one line."""
    from rich.tree import Tree

    tree, screen = Tree("[bold].[/]"), console()
    Branch.of(leaves).draw(tree, depth)
    screen.print(tree, soft_wrap=not screen.is_terminal)
    for note in notes:
        print_text(note, "note", "yellow")


def print_text(text: str, head: str = "", style: str = "", screen: Console | None = None) -> None:
    """Print a text after a styled `head`. Terminals wrap it, indented below its beginning. In files
    and pipes, it is one line."""
    from rich.table import Column, Table
    from rich.text import Text

    screen = screen or console()
    text = "\n".join(map(visible, in_words_of_the_command_line(text).split("\n")))
    indent = len(head) + 2 if head else len(text) - len(text.lstrip(" "))
    if screen.is_terminal and 0 < indent < screen.width // 3:
        grid = Table.grid(Column(width=indent), Column(overflow="fold"))
        grid.add_row(Text(head, style), Text(text.lstrip(), "" if head else style))
        screen.print(grid)
        return
    shown = Text.assemble((head, style), "  " * bool(head), text) if head else Text(text, style)
    screen.print(shown, soft_wrap=not screen.is_terminal)


def as_given(text: str, path: str) -> str:
    """Return the text, with the path as the user typed it. Errors contain the full path."""
    return text.replace(os.path.abspath(path), path.rstrip("/") or path) if path else text


def print_rows(rows: Iterable[tuple[str, str]], screen: Console | None = None) -> None:
    """Print rows of a sign and its text in two columns, wrapped as by `print_text`."""
    screen = screen or console()
    print_lines(*columns(list(rows), screen.width if screen.is_terminal else sys.maxsize), screen=screen)


def print_lines(*lines: str, screen: Console | None = None) -> None:
    """Print lines that are already formatted."""
    for line in lines:
        (screen or console()).print(line, markup=False, soft_wrap=True)


def columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield rows of a sign and its text, wrapped in two columns. Signs that leave too little width
    get their own line."""
    indent = min(max((len(sign) for sign, _ in rows), default=0) + 4, max(width // 2, 4))
    for sign, text in rows:
        lead = f"  {sign:<{indent - 2}}"
        if len(sign) > indent - 4:  # there would be no gap
            yield lead.rstrip()
            lead = " " * indent
        wrapped = textwrap.fill(
            text, width, initial_indent=lead, subsequent_indent=" " * indent, break_on_hyphens=False
        )
        yield wrapped or lead.rstrip()


def print_totals(title: str, nbytes: Mapping[str, int], kinds: Mapping[str, Sequence[str]]) -> None:
    """Print the number of tensors of each kind and their bytes, those with the most bytes first.
    `nbytes` and `kinds` are by name. A kind is one or more lines."""
    from planners.units import format_each

    if not kinds:
        return
    counts, weights = Counter(kinds.values()), Counter[Sequence[str]]()
    for name, kind in kinds.items():
        weights[kind] += nbytes[name]
    first = weights.most_common(8)
    numbers = [counted(counts[kind], "tensor") for kind, _ in first]
    sizes = format_each([weight for _, weight in first])
    wide = [max(map(len, texts)) for texts in (numbers, sizes)]
    rows: list[tuple[str, str]] = []
    for number, amount, (kind, _) in zip(numbers, sizes, first):
        rows += zip((f"{number:>{wide[0]}}  {amount:>{wide[1]}}", *[""] * len(kind)), kind)
    print_text(title, style="bold")
    print_rows([*rows, *([("", f"and {len(weights) - len(first)} more")] if len(weights) > len(first) else [])])


def print_legend(short_forms: Iterable[str], is_wanted: bool, *more: str) -> None:
    """Explain the signs in these short forms. If that is not wanted, terminals get a line that says
    how to get it, and how to see `more`."""
    from planners.geometry.layout_text import legend

    signs = legend(short_forms)
    if signs and is_wanted:
        print_lines("")
        print_text("Notation", style="bold")
        print_rows(signs)
    hints = [*more, *["--legend explains the notation"] * (bool(signs) > is_wanted)]
    if hints and console().is_terminal:
        print_text("; ".join(hints), "tip", "dim")


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout. `ok` says whether the request succeeded, as in the JSON of
    errors."""
    from reshard.live.plain_data import represent

    print(
        json.dumps(_for_json({"ok": True, **value}), indent=2, default=lambda it: represent(it, str), allow_nan=False)
    )


def _for_json(value: Any) -> Any:
    """Return values with the keys and numbers that JSON allows. If keys have the same text, such as
    1 and "1", the items become a list of pairs."""
    from reshard.live.plain_data import represent

    if isinstance(value, Mapping):
        found = {represent(key, str): _for_json(inner) for key, inner in value.items()}
        return found if len(found) == len(value) else [[_for_json(key), _for_json(value[key])] for key in value]
    if isinstance(value, list | tuple):
        return [_for_json(inner) for inner in value]
    if type(value) is int:
        return text if "x" in (text := represent(value)) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def axes_as_json(mesh: Mesh) -> list[dict[str, Any]]:
    """Return the axes of a mesh as plain data."""
    return [{"name": name, "size": size} for name, size in mesh.axes]


def short(value: Any, most: int = 60) -> str:
    """Return the repr of a value, shortened to `most` characters."""
    from reshard.live.plain_data import represent

    text = represent(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def print_report(
    report: Report, *, right: str, path: str = "", of: str = "", limit: int = 20, more: str = "--json"
) -> None:
    """Print what was found correct, and at most `limit` problems, with `path` as the user typed it."""
    from planners.findings import in_groups

    print_text(f"{as_given(report.subject, path)}: {counted(report.tensors, 'tensor')}{of}")
    if report.hint:
        print_text(report.hint, "note", "yellow")
    if right:
        print_text(right, style="green")
    texts = in_groups(report.findings)
    for text in texts[:limit]:
        print_text(as_given(text, path), "·", "red")
    if len(texts) > limit:
        print_text(f"and {counted(len(texts) - limit, 'more line')}: see {more}", "·", "red")


def report_as_json(report: Report, path: str | None = None) -> dict[str, Any]:
    """Return a report as plain data. `path`: the path of its subject, if it has one."""
    return {
        "ok": report.ok,
        "path": path,
        "subject": report.subject,
        "tensors": report.tensors,
        "covered": None if report.covered is None else asdict(report.covered),
        "findings": [asdict(finding) for finding in report.findings],
        "problems": [*map(str, report.findings)],
        "hint": in_words_of_the_command_line(report.hint),
        "largest_differences": {
            name: {"absolute": far, "relative": ratio}
            for name, (far, ratio) in getattr(report, "largest", {}).items()  # of a comparison
        },
    }


def damaged(path: str, problem: str, as_json: bool, head: str = "damaged", other: Any = None) -> Exit:
    """Print why a checkpoint cannot be opened, and return the exit with code 1. `other`: further
    fields of the command's JSON, if it is not a report."""
    if as_json:
        found = {"path": path, "ok": False, **(other or {}), "problems": [problem]}
        print_json(found if other else report_as_json(Report(path, (Finding(problem),), 0), path))
    else:
        print_text(as_given(problem, path), head, "red")
    return Exit(1)


@dataclass(frozen=True)
class PrintedLeaf:
    """What to print for one name."""

    text: str
    nbytes: int = 0


@dataclass
class Branch:
    """Names with a common beginning."""

    children: dict[str, Branch | PrintedLeaf] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Mapping[Sequence[str], PrintedLeaf]) -> Branch:
        """Return a tree of leaves by path. If a path is the beginning of another, its leaf is
        called "." below it."""
        root = cls()
        for path, leaf in leaves.items():
            at = root
            for part in path[:-1]:
                below = at.children.get(part)
                if not isinstance(below, Branch):
                    below = at.children[part] = cls({} if below is None else {".": below})
                at = below
            known = at.children.get(path[-1])
            if isinstance(known, Branch):
                known.children["."] = leaf
            else:
                at.children[path[-1]] = leaf
        return root

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(child.nbytes for child in self.children.values())

    @property
    def count(self) -> int:
        """Number of leaves."""
        return sum(child.count if isinstance(child, Branch) else 1 for child in self.children.values())

    def draw(self, onto: Tree, depth: int | None) -> None:
        """Add this branch to a rich tree, at most `depth` levels deep."""
        from rich.markup import escape

        for name, times, child in fold(self):
            while isinstance(child, Branch) and len(rows := fold(child)) == 1:  # a chain is one line: `norm.weight`
                [(inner, inner_times, child)] = rows
                name, times = f"{name}.{inner}", times * inner_times
            many = f" [dim]× {times}[/]" if times > 1 else ""
            if isinstance(child, PrintedLeaf):
                onto.add(f"{escape(visible(name))}{many}  [dim]{escape(visible(child.text))}[/]")
                continue
            head = (
                f"[bold]{escape(visible(name))}[/]{many}  {counted(child.count * times, 'entry')}, "
                f"{size(child.nbytes * times)}"
            )
            below = onto.add(head)
            if depth is None or depth > 1:
                child.draw(below, None if depth is None else depth - 1)


def fold(branch: Branch) -> list[tuple[str, int, Branch | PrintedLeaf]]:
    """Return the children as (name, number, one of them). Runs of equal numbered children become
    one, such as `0-31`."""
    children, runs = branch.children, list[list[str]]()
    for name in sorted((n for n in children if re.fullmatch(r"\d+", n)), key=int):
        if not runs or int(name) != int(runs[-1][-1]) + 1 or children[name] != children[runs[-1][0]]:
            runs.append([])
        runs[-1].append(name)
    rows = [(f"{run[0]}-{run[-1]}" if run[1:] else run[0], len(run), children[run[0]]) for run in runs]
    return [*rows, *((name, 1, child) for name, child in children.items() if not re.fullmatch(r"\d+", name))]
