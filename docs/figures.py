"""The source in figures, each with its goal: `python -m docs.figures [--json] [--changes 200]`.

The figures: size, the share of headers, names with several meanings, folders per framework, and the modules and
functions that one call runs through. `tests/test_architecture.py` lets none of them grow.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median

from docs.import_graph import ROOT, TOP_LEVEL, Codebase, Module

__all__ = ["FRAMEWORKS", "GOALS", "Figure", "changes", "of_calls", "of_source"]

FRAMEWORKS = ("Megatron", "DeepSpeed", "FSDP1", "safetensors", "GGUF", "torchsnapshot")
WIDE = 100
SHARED_FIELDS = 4

GOALS = {
    "tokens": 370_000,
    "header %": 8.0,
    "mean line": 53.1,
    f"lines over {WIDE} %": 11.2,
    "names of several classes": 5,
    "pairs of like classes": 15,
    **{f"folders of {framework}": 3 for framework in FRAMEWORKS},
    "load: modules": 45,
    "load: folders": 12,
    "load: functions": 380,
    "save: modules": 40,
    "save: folders": 11,
    "save: functions": 300,
    "set optimizer: local parts asked for, per tensor": 2,
    "files of a change: median": 2,
    "files of a change: 90 %": 8,
}
"""At most so much is wanted; a figure without an entry is there for orientation."""


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    detail: str = ""

    @property
    def goal(self) -> float | None:
        return GOALS.get(self.name)


def of_source(codebase: Codebase) -> Iterator[Figure]:
    """What is seen by reading the source."""
    modules = list(codebase.modules.values())
    lines = [line for module in modules for line in module.text.splitlines()]
    written = [line for line in lines if line.strip()]
    yield Figure("tokens", sum(map(_tokens, modules)), "names, operators and numbers")
    yield Figure("lines", len(lines))
    yield Figure("modules", len(modules))
    headers = sum(map(_header_lines, modules))
    yield Figure("header %", 100 * headers / len(lines), "of lines: docstring, imports, __all__")
    yield Figure("mean line", sum(map(len, written)) / len(written), "characters, without blank lines")
    wide = sum(len(line) > WIDE for line in written)
    yield Figure(f"lines over {WIDE} %", 100 * wide / len(written), "without blank lines")
    again = {name: n for name, n in Counter(name for name, _ in _classes(codebase)).most_common() if n > 1}
    yield Figure("names of several classes", len(again), ", ".join(f"{name} {n}" for name, n in again.items()))
    alike = list(_alike(codebase))
    yield Figure("pairs of like classes", len(alike), "; ".join(f"{a} and {b}" for a, b in alike))
    for framework in FRAMEWORKS:
        folders = _folders_that_say(codebase, framework)
        yield Figure(f"folders of {framework}", len(folders), ", ".join(folders))


def _tokens(module: Module) -> int:
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    return sum(token.type in counted for token in tokenize.generate_tokens(io.StringIO(module.text).readline))


def _header_lines(module: Module) -> int:
    """Lines of the module's docstring, of imports at its top, also for type checkers, and of `__all__`."""
    head = [node for node in module.tree.body if _is_header(node, node is module.tree.body[0])]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in head)


def _is_header(node: ast.stmt, first: bool) -> bool:
    if isinstance(node, ast.Assign):
        return any(getattr(target, "id", "") == "__all__" for target in node.targets)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Import | ast.ImportFrom) or (first and isinstance(node, ast.Expr))


def _classes(codebase: Codebase) -> Iterator[tuple[str, set[str]]]:
    """The name of each class, whether private or not, and the fields that it declares."""
    for module in codebase.modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                yield node.name.lstrip("_"), {target.id for target in declared if isinstance(target, ast.Name)}


def _alike(codebase: Codebase) -> Iterator[tuple[str, str]]:
    for (one, fields), (other, others) in combinations(_classes(codebase), 2):
        if len(fields & others) >= SHARED_FIELDS:
            yield one, other


def _folders_that_say(codebase: Codebase, word: str) -> list[str]:
    """Folders with a module in which the word stands three times."""
    found = [m for m in codebase.modules.values() if len(re.findall(word, m.text, re.I)) >= 3]
    return sorted({module.path.rpartition("/")[0] for module in found})


def of_calls() -> Iterator[Figure]:
    """What is seen by running: on four processes, a warm load, a first save, and a set of optimizer state."""
    from docs import traced
    from tests import gloo

    with tempfile.TemporaryDirectory() as folder:
        ranks = gloo.run(traced.calls, traced.RANKS, folder)
    for call in ("load", "save"):
        functions = set().union(*(rank.functions[call] for rank in ranks))
        modules = {path for path, _, _ in functions}
        yield Figure(f"{call}: modules", len(modules), "run through on any rank")
        yield Figure(f"{call}: folders", len({path.rpartition("/")[0] for path in modules}))
        yield Figure(f"{call}: functions", len(functions), "with a name, in any thread")
    asked, tensors = max(rank.asked for rank in ranks), ranks[0].tensors
    detail = f"{asked} times for {tensors} sharded tensors"
    yield Figure("set optimizer: local parts asked for, per tensor", asked / tensors, detail)


def changes(last: int) -> Iterator[Figure]:
    """How many source files a change touches, of those among the last commits that touch any; nothing outside of a
    repository."""
    command = ["git", "log", f"-{last}", "--format=%x00", "--name-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    commits = [
        sum(path.split("/")[0] in TOP_LEVEL and path.endswith(".py") for path in commit.split())
        for commit in done.stdout.split("\0")
    ]
    touched = sorted(filter(None, commits))
    if touched:
        detail = f"{len(touched)} of the last {last} commits touch source"
        yield Figure("files of a change: median", median(touched), detail)
        yield Figure("files of a change: 90 %", touched[int(0.9 * (len(touched) - 1))])


def _rows(figures: Sequence[Figure], details: bool) -> Iterator[str]:
    for figure in figures:
        value = f"{figure.value:,.1f}".removesuffix(".0")
        goal = "" if figure.goal is None else f"{figure.goal:,}"
        yield f"{figure.name:<50} {value:>10} {goal:>10}  {figure.detail if details else ''}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument("--details", action="store_true", help="with what was counted")
    parser.add_argument("--no-calls", action="store_true", help="start no processes: what is seen by reading only")
    parser.add_argument("--changes", type=int, default=200, metavar="N", help="look at so many commits")
    options = parser.parse_args()
    figures = [*of_source(Codebase.read()), *changes(options.changes)]
    if not options.no_calls:
        figures += of_calls()
    if options.json:
        print(json.dumps({figure.name: asdict(figure) | {"goal": figure.goal} for figure in figures}, indent=1))
    else:
        print(f"{'':<50} {'now':>10} {'at most':>10}", *_rows(figures, options.details), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
