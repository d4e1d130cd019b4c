"""Where tests use our private names: `python -m tests.private_names` prints how often, by name and by file.

A private name has one leading underscore and is defined by `reshard` or `planners`: a module, a class, or an
attribute. A use is an import of it, an attribute of anything but the test's own objects and torch, or its name in a
string for `monkeypatch`, `mock.patch`, `getattr`, and similar functions. Names that Python, IPython, or torch define
do not count.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Use", "defined", "uses"]

ROOT = Path(__file__).parents[1]
_SOURCE, _TESTS = ("planners", "reshard"), ("tests", "property_tests")
_THEIRS = {"_replace", "_repr_html_", "_local_tensor", "_schema", "_flatten"}
"""Private names of named tuples, notebooks, DTensors, torch's operators, and meshes, which our source also has."""
_BY_STRING = {"setattr", "delattr", "getattr", "hasattr", "patch", "object", "setitem", "delitem"}


@dataclass(frozen=True)
class Use:
    """A private name in a line of a test."""

    name: str
    path: str
    line: int


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _modules(folders: tuple[str, ...]) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_symlink():  # to an example
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def _names_defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def defined() -> set[str]:
    """Return the private names that our source defines, including modules."""
    names = {path.stem for path, _ in _modules(_SOURCE)}
    names |= {name for _, tree in _modules(_SOURCE) for name in _names_defined(tree)}
    return {name for name in names if _is_private(name)} - _THEIRS


def _own(tree: ast.Module) -> set[str]:
    """Return the names of a test's own classes, functions, methods, and attributes."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return own | {node.attr for node in stored if _root(node) == "self"}


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names_used(tree: ast.Module) -> Iterator[tuple[str, int]]:
    own = _own(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_SOURCE):
            for name in {*(alias.name for alias in node.names), *(node.module or "").split(".")}:
                yield name, node.lineno
        elif isinstance(node, ast.Attribute):
            if node.attr not in own and _root(node) not in ("self", "cls", "super", "torch", "dist"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _BY_STRING:
            for arg in node.args[:2]:
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    yield arg.value.rsplit(".", 1)[-1], node.lineno


def uses() -> list[Use]:
    """Return every use of one of our private names in a test."""
    ours = defined()
    return [
        Use(name, path.relative_to(ROOT).as_posix(), line)
        for path, tree in _modules(_TESTS)
        for name, line in _names_used(tree)
        if name in ours
    ]


def main() -> None:
    found = uses()
    print(f"{len(found)} uses of {len({use.name for use in found})} private names")
    for what, counted in (("name", Counter(u.name for u in found)), ("file", Counter(u.path for u in found))):
        print(f"\nby {what}")
        for key, count in counted.most_common():
            print(f"{count:5} {key}")


if __name__ == "__main__":
    main()
