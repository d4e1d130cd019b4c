"""What the site shows of the source, besides what `make docs` checks."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import pkgutil
import re
import textwrap
import typing
from pathlib import Path

import griffe
import pytest

import reshard
from docs.command_line import as_page
from docs.reference_extension import _names, _public
from docs.site_pages import labeled, on_page_content
from reshard.api.options import TransferOptions
from reshard.cli.app import EXAMPLES
from tests.test_readme import ROOT


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    extensions = griffe.load_extensions(str(ROOT / "docs" / "reference_extension.py"))
    loaded = griffe.load("reshard", search_paths=[str(ROOT)], extensions=extensions, docstring_parser="google")
    assert isinstance(loaded, griffe.Module)
    return loaded


@pytest.mark.parametrize("verb", ["save", "async_save", "load", "convert"])
def test_every_option_has_its_default_as_a_value(package: griffe.Module, verb: str) -> None:
    shown = {parameter.name: parameter.default for parameter in package[verb].final_target.parameters}

    known = inspect.signature(getattr(reshard, verb)).parameters
    assert list(shown) == list(known)
    plain = {name: one.default for name, one in known.items() if isinstance(one.default, bool | int | float | str)}
    assert len(plain) > 4
    assert {name: eval(shown[name]) for name in plain} == plain


def test_classes_that_a_page_calls_show_how(package: griffe.Module) -> None:
    def called(name: str) -> bool:
        return "called" in package[name].final_target.labels

    assert all(
        map(called, ["CheckpointManager", "Keep", "Mapping", "StateDictOptions", "mapping.Rename", "elastic.Tier"])
    )
    assert not any(map(called, ["SaveReport", "Checkpoint", "PendingSave", "mapping.Rule"]))
    manager = {one.name: one.default for one in package["CheckpointManager"].final_target.parameters}
    assert (manager["keep"], manager["preemption"]) == ("Keep()", "Preemption()")
    assert [one.name for one in package["mapping.Rename"].final_target.parameters][1:] == ["source", "target"]


def test_the_page_of_the_command_line_has_every_command_with_its_options() -> None:
    parts = dict(re.findall(r"^## reshard (\w+)$(.*?)(?=^## |\Z)", as_page(), re.M | re.S))

    assert list(parts) == [command.__name__ for command in EXAMPLES]
    for command, examples in EXAMPLES.items():
        text = parts[command.__name__]
        assert "COMMAND" not in text
        assert all(f"$ reshard {example}\n" in text for example in examples)
        assert set(re.findall(r"--[a-z-]+", " ".join(examples))) - {"--"} <= set(re.findall(r"`(--[a-z-]+)`", text))
        rows = re.findall(r"^\| `.*` \| (.*) \|$", text, re.M)
        assert len(rows) > 3
        assert all(rows), "each with a meaning"


def test_sections_are_whole_and_pages_are_links(package: griffe.Module) -> None:
    save = package["save"].final_target.docstring
    destinations = package["optimizer_destinations"].final_target.docstring
    [raises] = [one for one in save.parse("google") if one.kind.value == "raises"]
    options = {"returns_named_value": False, "returns_multiple_items": False}
    [returns] = [one for one in destinations.parse("google", **options) if one.kind.value == "returns"]

    assert raises.title.startswith("Raises (")
    assert "StorageError" in {str(one.annotation) for one in raises.value}
    assert '{"state": {fqn: {name: value}}, "param_groups"' in returns.value[0].description
    assert "(../incremental.md)" in save.value


@pytest.mark.parametrize(("verb", "other"), [("async_save", "save"), ("prepare", "redistribute")])
def test_arguments_that_another_function_describes_have_rows_too(package: griffe.Module, verb: str, other: str) -> None:
    def rows(name: str) -> set[str]:
        sections = package[name].final_target.docstring.parse("google")
        return {row.name for one in sections if one.kind.value == "parameters" for row in one.value}

    assert rows(verb) - rows(other) == {*{"async_save": ["max_in_flight", "stage"]}.get(verb, ())}
    assert rows(other) - rows(verb) == {*{"prepare": ["check"]}.get(verb, ())}


def test_each_error_has_a_row_of_its_own(package: griffe.Module) -> None:
    rows = {
        path: [
            str(row.annotation)
            for one in item.docstring.parse("google")
            if one.kind.value == "raises"
            for row in one.value
        ]
        for path, item in _public(package, "reshard", _names("reshard"))
        if item.is_function and item.docstring
    }

    assert {"PlanError", "NormalizationError"} <= {*rows["reshard.Mapping.apply"]}
    assert [path for path, errors in rows.items() if not all(map(str.isalpha, errors))] == []


def test_help_lists_the_options_of_a_transfer() -> None:
    for verb in (reshard.redistribute, reshard.prepare):
        assert set(TransferOptions.__annotations__) <= set(re.findall(r"\w+", verb.__doc__)), verb


def code_of(text: str) -> list[str]:
    """Return the indented blocks of a text."""
    blocks = re.findall(r"^\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def test_code_in_docstrings_is_code_and_fits_the_page(package: griffe.Module) -> None:
    """A formatter of prose may wrap a line of code, which is then no longer code."""
    found = []
    for module in (package, package["elastic"], package["mapping"]):
        for path, item in _public(module, module.path, _names(module.path)):
            if item.docstring and not item.is_module:
                texts = [part.value for part in item.docstring.parse("google") if part.kind.value == "text"]
                found += [(path, block) for text in texts for block in code_of(text) if block[0] != "{"]  # a form

    assert len(found) > 10
    for path, block in found:
        compile(block, path, "exec", ast.PyCF_ONLY_AST)
        assert [line for line in block.splitlines() if len(line) > 110] == [], path


@pytest.mark.parametrize("name", ["reshard", "planners"])
def test_tables_of_parameters_are_complete(name: str) -> None:
    extensions = griffe.load_extensions(str(ROOT / "docs" / "reference_extension.py"))
    package = griffe.load(name, search_paths=[str(ROOT)], extensions=extensions, docstring_parser="google")
    assert isinstance(package, griffe.Module)
    missing, tables = {}, 0
    for path, item in _public(package, name, _names(name)):
        sections = item.docstring.parse("google") if item.is_function and item.docstring else []
        listed = [one.name for section in sections if section.kind.value == "parameters" for one in section.value]
        if listed:
            tables += 1
            known = {one.lstrip("*") for one in listed}  # each in a row of its own, which has its default
            asked = {one.name.lstrip("*") for one in item.parameters} - {"self", "cls", "options"}
            missing |= {path: asked - known} if asked - known else {}

    assert missing == {}
    assert tables > 2


def test_types_in_signatures_are_on_their_page_with_their_words(package: griffe.Module) -> None:
    page = (ROOT / "docs" / "reference" / "types.md").read_text(encoding="utf-8")
    rows = {
        name: row for row in re.findall(r"^\| `.*$", page, re.M) for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    named = set()
    for module in (package, package["elastic"], package["mapping"]):
        for _, item in _public(module, module.path, _names(module.path)):
            annotations = [one.annotation for one in item.parameters] if item.is_function else []
            expressions = [one for one in annotations if isinstance(one, griffe.Expr)]
            named |= {part.canonical_path for one in expressions for part in one if isinstance(part, griffe.ExprName)}
    aliases = {}
    for path in named - {"reshard.api.staging.Stage"}:  # which has the name of a public class
        value = pkgutil.resolve_name(path) if path.startswith(("planners.", "reshard.")) else int
        if not isinstance(value, type | typing.TypeVar):
            aliases[path.rpartition(".")[2]] = value

    assert {"CheckpointSource", "DtypePolicy", "Models", "StoragePath"} <= aliases.keys()
    assert aliases.keys() - rows.keys() == set()
    for name, value in aliases.items():
        words = [word for word in typing.get_args(value) if isinstance(word, str)]
        assert [word for word in words if f'`"{word}"`' not in rows[name]] == []


def test_the_tutorial_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    programs = [cell for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "__main__"}

    for number, cell in enumerate(programs):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        assert printed.getvalue() == "".join("".join(output["text"]) for output in cell["outputs"])
    assert len(programs) == 8


def test_cells_of_tables_for_reading_know_their_column() -> None:
    """A narrow screen shows their rows as lists."""
    head = (
        '<table>\n<thead>\n<tr>\n<th>Call "x"</th>\n<th style="text-align: left;"><code>T</code></th>\n</tr>\n</thead>'
    )
    text = f"{head}<tr>\n<td>save</td>\n<td><b>a sentence</b>\nthat has to be read, not compared</td>\n</tr></table>"
    numbers = f"{head}<tr><td>1</td><td>2</td></tr></table>"

    shown = labeled(text)

    assert '<td data-head="Call &quot;x&quot;">save</td>' in shown
    assert '<td data-head="T"><b>a sentence</b>\n' in shown
    assert re.sub(' data-head="[^"]*"', "", shown) == text
    assert on_page_content(f"<p>{numbers}</p>") == f"<p>{numbers}</p>"
    assert on_page_content(f"<p>{text}</p>") == f"<p>{shown}</p>"


def test_pictures_lead_to_their_full_size() -> None:
    image = '<img alt="a page" src="../page.webp" width="720" />'
    assert on_page_content(f"<p>{image}</p>") == f'<p><a href="../page.webp">{image}</a></p>'
