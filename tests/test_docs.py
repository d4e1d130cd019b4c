"""What the documentation names exists: tests, links, pages."""

from __future__ import annotations

import ast
import builtins
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

from docs import draw_flow
from docs.draw_pages import RECORD, headings, pages
from docs.index_readme import for_index

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "kernels/README.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "tests").glob("*.md")),
]
TEST_FILES = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("property_tests/test_*.py")]
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*sorted(DOCS.rglob("*.md")), *sorted((ROOT / "tests").glob("*.md"))]
}
TELEMETRY = (ROOT / "reshard/ranks/telemetry.py").read_text(encoding="utf-8")
"""Metrics whose names begin with `reshard`, but are not Python names."""
_INSTALLING = re.compile(r"framework\(\s*[\"'](.*?)[\"']")
FOLDERS = "benchmarks|docs|examples|planners|property_tests|reshard|tests"


def functions(page: str) -> list[tuple[str, str]]:
    """Return (file, function) for every test that a page names."""
    return re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)


def defining(file: str, function: str) -> list[Path]:
    """Return the test files with that name and function. A name can begin with folders."""
    found = [path for path in TEST_FILES if f"/{path.relative_to(ROOT).as_posix()}".endswith(f"/{file}")]
    return [path for path in found if re.search(rf"^\s*def {function}\(", path.read_text(encoding="utf-8"), re.M)]


def rows(page: str) -> list[str]:
    """Return the rows of a page's tables, without headers."""
    lines = page.splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| symptom", "| case"))]


@pytest.mark.parametrize(
    ("page", "file", "function"), sorted({(name, *test) for name, page in TEXTS.items() for test in functions(page)})
)
def test_every_test_that_is_named_exists(page: str, file: str, function: str) -> None:
    assert len(defining(file, function)) == 1, f"{page} names {file}::{function}"


def test_pages_and_headings_that_the_source_names_exist() -> None:
    named = set()
    for file in [*ROOT.glob("reshard/**/*.py"), *ROOT.glob("planners/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.update(re.findall(r"(?:'([^'\n]+)' in )?(docs/[\w/-]+\.md)", node.value))
    assert named
    for heading, page in named:
        assert f"# {heading}" in TEXTS[page], f"{page} has no heading {heading!r}"


def test_every_complaint_has_its_test() -> None:
    assert len(rows(TEXTS["tests/complaints.md"])) > 40
    assert [row for row in rows(TEXTS["tests/complaints.md"]) if not functions(row)] == []


def test_every_edge_case_names_its_tests() -> None:
    """A row either describes what happens and names tests, or says only that it is open."""
    found = rows(TEXTS["tests/edge-cases.md"])
    assert len(found) >= 19
    assert [row for row in found if bool(functions(row)) == row.endswith("| | open |")] == []


def test_a_test_that_is_not_there_is_seen() -> None:
    assert defining("test_docs.py", "test_a_test_that_is_not_there_is_seen") == [Path(__file__)]
    assert defining("test_docs.py", "test_no_such_test") == []
    assert functions("see `test_docs.py::test_x`, not test_y") == [("test_docs.py", "test_x")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    """Paths in the repository, and dotted names in a package: modules, functions, methods."""
    text = page.read_text(encoding="utf-8")
    assert [path for path in re.findall(rf"`((?:{FOLDERS})/[\w/.]*)`", text) if not (ROOT / path).exists()] == []
    for name in sorted(set(re.findall(r"\b((?:planners|reshard)(?:\.[A-Za-z_]\w*)+)", text))):
        if f'"{name}"' not in TELEMETRY and _framework_imports(name):
            pkgutil.resolve_name(name.removesuffix(".py"))


def _framework_imports(name: str) -> bool:
    """Return False if an integration's framework is not installed, or does not support this torch."""
    module = re.match(r"reshard\.integrations\.\w+", name)
    try:
        importlib.import_module(module[0] if module else "reshard")
    except ImportError as error:
        return (error.name or "").startswith("reshard")
    return True


def test_the_index_lists_every_page() -> None:
    index = DOCS / "README.md"
    links = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", index.read_text(encoding="utf-8"))}
    pages = {page.resolve() for page in DOCS.rglob("*.md")} - {index.resolve()}
    assert pages - links == set()


def test_the_page_of_logs_has_every_line_that_is_logged() -> None:
    logged = set()
    for file in (ROOT / "reshard").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Attribute(ast.Name("_log"), level), [ast.Constant(str(line)), *_]):
                    logged.add((level.replace("exception", "error").upper(), line))
                case ast.Call(ast.Attribute(ast.Name("_log"), "log"), [_, ast.Constant(str(line)), *_]):
                    logged.add(("WARNING", line))  # of a level that the call finds
    rows = re.findall(r"^\| (`.*`) \| ([A-Z]+) \| ", (DOCS / "monitoring.md").read_text(encoding="utf-8"), re.M)
    told = {(level, line) for cell, level in rows for line in re.findall(r"`([^`]+)`", cell)}
    assert len(logged) > 15

    def is_told(level: str, line: str) -> bool:
        """The page may contain an example, and end it early with `…`."""
        for text in (text for of, text in told if of == level):
            shown = text.removesuffix("…")
            ends = [i for i in range(1, len(line) + 1) if text != shown and line[:i].endswith(shown[-4:])] or [
                len(line)
            ]
            starts = (map(re.escape, re.split(r"%[.0-9]*[a-z]", line[:i])) for i in ends)
            if any(re.fullmatch(".+".join(parts), shown) for parts in starts):
                return True
        return False

    assert {line for level, line in logged if not is_told(level, line)} == set()


def test_links_and_images_of_the_readme_lead_somewhere_on_a_package_index() -> None:
    text = for_index(
        "<!-- figures in bold: a -->1<!-- end --> [a](docs/a.md#b) ![c](d.png) [e](https://f.example/) [g](#h)",
        "https://x.example/blob/v1/",
        "https://raw.example/v1",
    )
    assert text == (
        "1 [a](https://x.example/blob/v1/docs/a.md#b) ![c](https://raw.example/v1/d.png) "
        "[e](https://f.example/) [g](#h)"
    )


def test_the_package_is_described_and_its_versions_are_given_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    [tested] = re.findall(
        r"^\| Python \| .* \| 3\.11; (3\.\d+) to (3\.\d+) only in the CI workflow, .* \|$",
        TEXTS["docs/support.md"],
        re.M,
    )

    assert project["description"] == first
    assert f"\nsite_description: {first}\n" in site
    searched = re.findall(r"python(3\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8").split("; do")[0])
    assert searched == ["3.11", "3.12", "3.13", "3.14"]
    assert classified == searched[:1]  # others once CI has run on them
    assert tested == (searched[1], searched[-1])
    assert [version for version in searched if f'"{version}"' not in workflow] == []


def test_the_changelog_has_each_category_of_keep_a_changelog_once() -> None:
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        found = re.findall(r"^### (.*)$", release, re.M)
        assert len(found) == len(set(found))
        assert set(found) <= known


def test_what_an_error_says_to_install_is_what_an_extra_installs() -> None:
    """And no text recommends to install reshard by a name that is not on a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {requirement for extra in project["optional-dependencies"].values() for requirement in extra}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "reshard").rglob("*.py")]
    named = {name for text in sources for names in _INSTALLING.findall(text) for name in names.split()}

    assert len(named) >= 6
    clients = {"dask", "sglang", "torch-checkpointing", "verl", "vllm"}  # who uses them has them: no extra
    assert named - clients <= known
    others = [page.read_text(encoding="utf-8") for page in [*PAGES, *(ROOT / "tests").rglob("*.py")]]
    assert [text for text in sources + others if re.search(r"pip install '?reshard(\[|\s)", text)] == []


def test_programs_on_the_pages_of_integrations_import_what_they_use() -> None:
    """Except for the reader's own objects, such as a model."""
    yours = {"data", "engine", "group", "model", "optimizer", "replica_id"}
    pages = [text for name, text in TEXTS.items() if name.startswith("docs/integrations/")]
    programs = [program for text in pages for program in re.findall(r"^```python\n((?:.*\n)*?)```", text, re.M)]
    trees = [ast.parse(program) for program in programs if "import " in program]
    assert len(trees) >= 9
    for tree in trees:
        nodes = list(ast.walk(tree))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        known = {name.id for name in names if isinstance(name.ctx, ast.Store)} | yours | set(dir(builtins))
        known |= {(each.asname or each.name).split(".")[0] for node in nodes for each in getattr(node, "names", [])}
        known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        assert {name.id for name in names} - known == set()


def test_every_page_of_a_framework_is_in_the_table_of_integrations() -> None:
    table = TEXTS["docs/integrations.md"]
    pages = sorted(name for name in TEXTS if name.startswith("docs/integrations/"))
    assert len(pages) >= 10
    assert [page for page in pages if f"]({page.removeprefix('docs/')})" not in table] == []


def test_configs_of_torchtitan_on_its_page_are_enabled() -> None:
    """By default, torchtitan's managers silently save nothing."""
    page = TEXTS["docs/integrations/torchtitan.md"]
    programs = [ast.parse(program) for program in re.findall(r"^```python\n((?:.*\n)*?)```", page, re.M)]
    configs = [
        {each.arg: ast.unparse(each.value) for each in node.keywords}
        for program in programs
        for node in ast.walk(program)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Manager.Config")
    ]
    assert [options["enable"] for options in configs] == ["True", "True"]


def test_names_of_reshard_that_unrun_snippets_import_are_there() -> None:
    """For snippets of frameworks that are not installed. Modules of `reshard.integrations` import them, so only their
    text is searched."""
    found = 0
    for page in [text for name, text in TEXTS.items() if name.startswith("docs/integrations/")]:
        for program in re.findall(r"^```python\n((?:.*\n)*?)```", page, re.M):
            for module, names in re.findall(r"^from (reshard[\w.]*) import (.+)$", program, re.M):
                source = (ROOT / module.replace(".", "/")).with_suffix(".py")
                tree = ast.parse(source.read_text(encoding="utf-8")) if "integrations" in module else None
                for name in re.findall(r"\w+", names.partition("#")[0]):
                    found += 1
                    if tree is None:
                        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
                    else:
                        assert name in _imported_or_made(tree), f"{module}.{name}"
    assert found >= 12


def _imported_or_made(tree: ast.Module) -> set[str]:
    made = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            made |= set(ast.literal_eval(node.value))  # ruff sees to it that these are there
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return made | {each.asname or each.name for node in imports for each in node.names}


def test_the_steps_in_the_picture_of_how_it_works_are_those_of_the_page() -> None:
    """Otherwise, draw it again: `python -m docs.draw_flow`."""
    page = TEXTS["docs/how-it-works.md"]

    assert draw_flow.PICTURE.read_text(encoding="utf-8") == draw_flow.draw()
    for call, steps in draw_flow.ROWS.items():
        [part] = re.findall(rf"^## {call.capitalize()}$(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert [name.lower() for name in re.findall(r"^\d\. \*\*(\w+)\.\*\*", part, re.M)] == list(steps)


def test_pictures_of_pages_have_the_headings_of_today_s_pages(tmp_path: Path) -> None:
    """Otherwise, take them again: `python -m docs.draw_pages`."""
    assert RECORD.read_text(encoding="utf-8") == headings(pages(tmp_path))
