"""Texts for users speak the field's language: words that only this project used are retired."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.name != "CHANGELOG.md"  # what was released keeps the words that it was released with
)
MODULES = sorted(
    str(module.relative_to(ROOT))
    for package in ("planners", "reshard")
    for module in (ROOT / package).rglob("*.py")
    if "examples" not in module.parts  # a link to one of examples/
)
RETIRED = {
    r"\b(the house|rooms?)\b": "architecture, package, layer",
    r"\bborders?\b(?! module|[-:])": "edge case, limit",
    r"\b(the|a|DCP) face\b": "drop-in API",
    r"\btold\b|\btells?\b": "report, print, say which",
    r"\bholes?\b": "missing region",
    r"\b(is|are|was|were|be|been) cut\b|\bcuts?\b(?! off)|\bcutting\b": "shard, split",
    r"\bwhole (tensors?|checkpoints?|state)\b": "full tensor, complete checkpoint",
    r"\b(go|goes|went|going) on\b": "continue, resume",
    r"\b(lies|lie|lay)\b": "is stored, is laid out",
    r"\balike\b": "the same",
    r"\b(nobody|somebody|whoever)\b": "no rank, a process, say who",
    r"\bunder way\b": "in progress",
    r"\bwhat there is\b|\bas it stands\b|\bby then\b": "say it directly",
    r"\bso many\b|\bas many as\b": "give the number",
    r"\b(any|every)body\b|\banyone\b": "any rank, all ranks, say who",
    r"\bthe very\b": "the same",
    r"\b(is|was|were|has|have|had|been) said\b": "reported, sent, given",
    r"\bone behind (the )?(an)?other\b|\b(is|are|was|were) laid\b": "one after another",
    r"\bin (its|their) stead\b|\bin the place of\b": "instead of",
    r"\bdealt\b|\b(is|are|be) deal\b": "distributed",
    r"\bhears?\b|\bheard\b": "receive, learn",
    r"\bjudge[sd]?\b": "check, decide",
    r"\bhad better\b": "should",
    r"\bin vain\b": "without result",
    r"\banew\b": "again",
    r"\bprocessor (time|seconds|m?s)\b": "CPU time, CPU s",
    r"\bpassed over\b": "skipped",
    r"\bleft out\b": "omitted",
    r"\bbytes a byte\b": "bytes per byte",
    r"\bmend\b": "fix",
    r"\bmisspelt\b": "misspelled",
    r"(?<!\w)(?!\w*_)\w*(initialis|normalis|materialis|serialis|synchronis|recognis|organis)\w+": "American: -ize",
    r"\b(behaviour|colour|neighbour|favour|centre|catalogue)\w*|\b(labelled|modelled)\b": "American: -or, -er, -og, -l",
}
"""Retired words, and replacements."""
ALLOWED = {}
"""Uses of retired words that stay, with reasons."""


def retired_in(text: str) -> list[str]:
    """Return the retired words of a text, outside of its code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [
        f"line {text[: match.start()].count(chr(10)) + 1} {match[0]!r}: {instead}"
        for pattern, instead in RETIRED.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def texts_of(source: str) -> list[tuple[int, str]]:
    """Return the docstrings, messages, and comments of a module, each with its first line, but not its `__all__`."""
    tree = ast.parse(source)
    names = {
        id(node)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        for node in ast.walk(statement)
    }
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in names
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return strings + [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_retired_words(page: str) -> None:
    assert retired_in((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES)
def test_code_has_no_retired_words(module: str) -> None:
    found = [
        f"{module}:{line}: {problem} in {text[:60]!r}"
        for line, text in texts_of((ROOT / module).read_text(encoding="utf-8"))
        if (module, text) not in ALLOWED
        for problem in retired_in(text)
    ]
    assert found == []


def test_retired_words_are_found_in_each_kind_of_text() -> None:
    source = '"""So many words."""\n\n__all__ = ["alike"]\n\nx = f"{1} are told"  # nobody reads `this hole`\n'
    found = [problem for _, text in texts_of(source) for problem in retired_in(text)]
    assert [problem.split("'")[1] for problem in found] == ["So many", "told", "nobody"]


def test_each_exception_is_needed() -> None:
    for module, text in ALLOWED:
        assert text in [text for _, text in texts_of((ROOT / module).read_text(encoding="utf-8"))]
        assert retired_in(text)


_SECTION = re.compile(r"^\s*(?:Args|Attributes|Raises):\s*$", re.MULTILINE)


def merged_items_in(source: str) -> list[str]:
    """Return items of docstring sections that do not begin a line, so that the reference merges them with others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        section = _SECTION.search(text)
        names = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        for item in re.finditer(r"\. (\w+): ", text[section.end() :] if section else ""):
            if item[1] in names or item[1].endswith("Error"):
                found.append(f"{node.name}: {item[1]}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_each_item_of_a_section_begins_a_line(module: str) -> None:
    assert merged_items_in((ROOT / module).read_text(encoding="utf-8")) == []


def test_merged_items_are_found() -> None:
    text = "Args:\n    a: one. b: another.\n\nRaises:\n    ValueError: so. OtherError: no.\n"
    source = f"def f(a, b):\n    {text!r}\n"
    assert merged_items_in(source) == ["f: b", "f: OtherError"]
