"""`python -m tests.damage`: the matrix, or random damages; what came of them, and each that must not be."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tests import samples
from tests.damage.formats import FORMATS
from tests.damage.matrix import Cell, Checkpoints, Outcome, Result, any_folder, cells, random_cell
from tests.damage.ranks import WAYS, results_together, some_cells
from tests.damage.worker import results_of

TOGETHER = 25
"""To so many random damages that one process reads comes one that two read together."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 if a damage went unseen, 2 if none was tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage")
    parser.add_argument("--random", type=int, metavar="N", help="so many random damages, instead of the matrix")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them; the next has the next number")
    parser.add_argument("--cell", action="append", help="this one, as it is printed where it failed; repeat it")
    parser.add_argument("--format", choices=[*FORMATS], help="of the matrix, this format only")
    parser.add_argument("--reader", help="of the matrix, this reader only")
    parser.add_argument("--share", type=int, default=1, help="of the matrix, one of every so many cells")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    results: list[Result] = []
    unreadable: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory(dir=any_folder()) as folder:
        asked = [*_asked(given, Path(folder))]
        alone = [cell for cell in asked if cell.reader not in WAYS]
        together = [cell for cell in asked if cell.reader in WAYS]
        for result in chain(results_of(alone, Path(folder) / "made"), _together(together, Path(folder) / "together")):
            results.append(result)
            reader = result.cell.format, result.cell.reader
            if not result.outcome.is_allowed and reader not in unreadable:
                print(result, flush=True)
            if result.outcome is Outcome.UNREADABLE:
                unreadable.add(reader)  # and is told once
    print(table(results))
    bad = [result for result in results if not result.outcome.is_allowed]
    kinds = ", ".join(f"{n} {outcome.value}" for outcome, n in Counter(r.outcome for r in results).most_common())
    print(f"{len(results)} damages in {time.monotonic() - started:.0f} s: {kinds}")
    return 2 if not results else 1 if bad else 0


def _asked(given: argparse.Namespace, folder: Path) -> Iterator[Cell]:
    checkpoints = Checkpoints(folder / "asked")
    if given.cell:
        yield from map(Cell.parse, given.cell)
    elif given.random is not None:
        print(f"seeds {given.seed} to {given.seed + given.random - 1}", flush=True)
        yield from (random_cell(checkpoints, given.seed + i) for i in range(given.random))
        yield from some_cells(checkpoints, given.random // TOGETHER, given.seed)
    else:
        for format in [given.format] if given.format else FORMATS:
            for cell in cells(checkpoints, format):
                if given.reader in (None, cell.reader) and cell.is_in_share(given.share):
                    yield cell


def _together(cells: list[Cell], folder: Path) -> Iterator[Result]:
    """A hundred for each start of processes."""
    for start in range(0, len(cells), 100):
        yield from results_together(cells[start : start + 100], folder / str(start))


def table(results: Iterable[Result]) -> str:
    """A row for each reader, a column for each format; in a field, how many damages had each kind of end."""
    signs = {Outcome.REFUSED: "r", Outcome.RIGHT: "=", Outcome.UNCHECKED: "u", Outcome.FORGED: "f", Outcome.NOTHING: ""}
    counts: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        sign = signs.get(result.outcome, "!")
        counts.setdefault(result.cell.reader, {}).setdefault(result.cell.format, Counter())[sign] += 1
    formats = [format for format in FORMATS if any(format in row for row in counts.values())]
    lines = ["refused r, right =, told unchecked u, told by it f, must not be !", ""]
    lines.append("| reader | " + " | ".join(formats) + " |")
    lines.append("|---" * (len(formats) + 1) + "|")
    for reader, row in counts.items():
        fields = (
            " ".join(f"{row[f][sign]}{sign}" for sign in "r=uf!" if row[f][sign]) if f in row else "" for f in formats
        )
        lines.append(f"| {reader} | " + " | ".join(fields) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    samples.begin()
    try:
        sys.exit(main())
    finally:
        samples.end()
