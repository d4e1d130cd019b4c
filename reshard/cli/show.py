"""What the commands share in what they print: consoles, sizes, JSON, a tree of tensors with equal branches folded."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from planners.findings import Report

__all__ = [
    "Branch", "PrintedLeaf", "console", "counted", "fold", "print_json", "print_report",
    "report_as_json", "short", "size", "write_page",
]  # fmt: skip


def console(*, stderr: bool = False) -> Console:
    """For people. Lines are not cut where nobody looks: in files and pipes."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def write_page(file: Path, page: str, *, as_json: bool) -> None:
    """Say where it is, too: beside JSON to those who look on."""
    file.write_text(page, encoding="utf-8")
    console(stderr=as_json).print(f"drawn in {file}", markup=False, soft_wrap=True)


def print_tree(
    screen: Console, leaves: Mapping[Sequence[str], PrintedLeaf], depth: int | None, notes: Iterable[str]
) -> None:
    """Names as a tree, at most `depth` levels deep, and what is to be said of all. On as many lines as the terminal's
    width asks for; elsewhere each entry is one line, however long."""
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree("[bold].[/]")
    Branch.of(leaves).draw(tree, depth)
    screen.print(tree, soft_wrap=not screen.is_terminal)
    for note in notes:
        screen.print(f"[yellow]note[/]  {escape(note)}", soft_wrap=True)


def print_text(screen: Console, text: str, style: str = "") -> None:
    """Words as they are, wrapped on a terminal; elsewhere lines have any length."""
    screen.print(text, style=style, markup=False, soft_wrap=not screen.is_terminal)


def print_rows(screen: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Each row a sign and what there is to say of it, in two columns; wrapped as `print_text` does."""
    rows = list(rows)
    indent = max((len(sign) for sign, _ in rows), default=0) + 4
    width = screen.width if screen.is_terminal else sys.maxsize
    hanging = " " * (indent if indent < width // 2 else 4)
    for sign, text in rows:
        lead = f"  {sign:<{indent - 2}}"
        wrapped = textwrap.fill(text, width, initial_indent=lead, subsequent_indent=hanging, break_on_hyphens=False)
        screen.print(wrapped, markup=False, soft_wrap=True)


def print_legend(screen: Console, short_forms: Iterable[str]) -> None:
    """What the signs in these short forms of layouts mean."""
    from planners.geometry.words import legend

    if signs := legend(short_forms):
        screen.print("\n[bold]Notation[/]")
        print_rows(screen, signs)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(_with_text_keys(value), indent=2, default=str))


def _with_text_keys(value: Any) -> Any:
    """Objects of checkpoints may have keys that JSON does not allow, such as tuples."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _with_text_keys(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(inner) for inner in value]
    return value


def counted(number: int, what: str) -> str:
    """`"1 tensor"`, `"2 tensors"`, `"2 entries"`."""
    many = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else many}"


def size(nbytes: float) -> str:
    """A size for people."""
    from planners.reports.text import format_bytes

    return format_bytes(nbytes)


def short(value: Any, most: int = 60) -> str:
    """The repr of a value, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def print_report(report: Report, *, right: str, limit: int = 50) -> None:
    """A report for people: the verdict, or what is wrong, at most `limit` findings."""
    from rich.markup import escape

    screen = console()
    screen.print(f"{escape(report.subject)}: {counted(report.tensors, 'tensor')}", soft_wrap=True)
    if report.ok:
        screen.print(f"[green]{right}[/]")
    for finding in report.findings[:limit]:
        screen.print(f"[red]·[/] {escape(str(finding))}", soft_wrap=True)
    if len(report.findings) > limit:
        screen.print(f"[red]·[/] ... and {len(report.findings) - limit} more")


def report_as_json(report: Report) -> dict[str, Any]:
    """A report as plain data."""
    return {
        "ok": report.ok,
        "subject": report.subject,
        "tensors": report.tensors,
        "covered": None if report.covered is None else asdict(report.covered),
        "findings": [asdict(finding) for finding in report.findings],
    }


@dataclass(frozen=True)
class PrintedLeaf:
    """What there is to say of one name."""

    text: str
    nbytes: int = 0


@dataclass
class Branch:
    """Names with a common beginning."""

    children: dict[str, Branch | PrintedLeaf] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Mapping[Sequence[str], PrintedLeaf]) -> Branch:
        """A tree from leaves by path; a path that is the beginning of another gets the name "." below it."""
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
        """Of all leaves."""
        return sum(child.nbytes for child in self.children.values())

    @property
    def count(self) -> int:
        """How many leaves."""
        return sum(child.count if isinstance(child, Branch) else 1 for child in self.children.values())

    def draw(self, onto: Tree, depth: int | None) -> None:
        """Add this to a tree of rich, at most `depth` levels deep."""
        from rich.markup import escape

        for name, times, child in fold(self):
            while isinstance(child, Branch) and len(rows := fold(child)) == 1:  # a chain is one line: `norm.weight`
                [(inner, inner_times, child)] = rows
                name, times = f"{name}.{inner}", times * inner_times
            many = f" [dim]× {times}[/]" if times > 1 else ""
            if isinstance(child, PrintedLeaf):
                onto.add(f"{escape(name)}{many}  [dim]{escape(child.text)}[/]")
                continue
            head = (
                f"[bold]{escape(name)}[/]{many}  {counted(child.count * times, 'entry')}, {size(child.nbytes * times)}"
            )
            below = onto.add(head)
            if depth is None or depth > 1:
                child.draw(below, None if depth is None else depth - 1)


def fold(branch: Branch) -> list[tuple[str, int, Branch | PrintedLeaf]]:
    """The children as (name, how many, one of them): runs of numbered children that are alike become one, `0-31`."""
    out: list[tuple[str, int, Branch | PrintedLeaf]] = []
    run: list[str] = []

    def close() -> None:
        if run:
            name = run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}"
            out.append((name, len(run), branch.children[run[0]]))
            run.clear()

    numbered = sorted((n for n in branch.children if re.fullmatch(r"\d+", n)), key=int)
    for name in numbered:
        if run and (int(name) != int(run[-1]) + 1 or branch.children[name] != branch.children[run[0]]):
            close()
        run.append(name)
    close()
    known = set(numbered)
    return [*out, *((n, 1, child) for n, child in branch.children.items() if n not in known)]
