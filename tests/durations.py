"""Where the time of a test run is spent, by folder, as the table of `tests/durations.md`.

make test TESTFLAGS="-n 2 --dist worksteal --junitxml=report.xml"
python -m tests.durations report.xml           # prints the table
python -m tests.durations report.xml --write   # and puts it on the page
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["PAGE", "Folder", "put_on_page", "read", "table"]

PAGE = Path(__file__).with_suffix(".md")
_BLOCK = re.compile(r"(?<=<!-- durations -->\n).*?(?=<!-- end of durations -->)", re.DOTALL)


@dataclass
class Folder:
    """The results of the tests in one folder."""

    tests: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    by_module: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, case: ElementTree.Element, module: str) -> None:
        self.tests += 1
        self.skipped += case.find("skipped") is not None
        self.failed += case.find("failure") is not None or case.find("error") is not None
        self.seconds += float(case.get("time", "0"))
        self.by_module[module] += float(case.get("time", "0"))


def read(report: Path) -> tuple[dict[str, Folder], float]:
    """Return the folders of a JUnit report, and the duration of the run in seconds."""
    folders: dict[str, Folder] = defaultdict(Folder)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    for case in (case for suite in suites for case in suite.iter("testcase")):
        parts = (case.get("classname") or case.get("name") or "").split(".")  # for a skipped module, only `name` is set
        module = next((part for part in parts if part.startswith("test_")), parts[-1])
        folders["/".join(parts[: parts.index(module)])].add(case, module)
    return dict(folders), sum(float(suite.get("time", "0")) for suite in suites)


def table(folders: dict[str, Folder], wall_s: float) -> Iterator[str]:
    """Yield the lines of the table, the longest duration first."""
    total = Folder()
    for one in folders.values():
        total.tests += one.tests
        total.skipped += one.skipped
        total.failed += one.failed
        total.seconds += one.seconds
    yield f"{total.tests:,} tests in {wall_s / 60:.1f} minutes; together they took {total.seconds / 60:.1f} minutes."
    yield f"{total.skipped:,} were skipped and {total.failed:,} failed."
    yield ""
    yield "| Folder | Tests | Seconds | Share | Milliseconds a test | Longest module, seconds |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, one in sorted(folders.items(), key=lambda item: -item[1].seconds):
        module, longest = max(one.by_module.items(), key=lambda item: item[1])
        share = one.seconds / total.seconds if total.seconds else 0.0
        yield (
            f"| `{name}` | {one.tests:,} | {one.seconds:,.0f} | {share:.0%} | {1000 * one.seconds / one.tests:,.0f} |"
            f" `{module}`, {longest:,.0f} |"
        )


def put_on_page(lines: Iterable[str], page: Path = PAGE) -> None:
    """Replace the text between the two marks of the page."""
    text, replaced = _BLOCK.subn(lambda _: "\n" + "\n".join(lines) + "\n\n", page.read_text(encoding="utf-8"))
    if replaced != 1:
        raise SystemExit(f"{page} needs the lines <!-- durations --> and <!-- end of durations -->, once each")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what pytest wrote with --junitxml")
    parser.add_argument("--write", action="store_true", help="put the table on tests/durations.md")
    arguments = parser.parse_args()
    lines = list(table(*read(arguments.report)))
    print("\n".join(lines))
    if arguments.write:
        put_on_page(lines)


if __name__ == "__main__":
    main()
