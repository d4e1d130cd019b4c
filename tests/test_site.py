"""What the site shows of the source, beyond what `make docs` checks itself."""

from __future__ import annotations

import inspect

import griffe
import pytest

import reshard
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


def test_sections_are_whole_and_pages_are_links(package: griffe.Module) -> None:
    save = package["save"].final_target.docstring
    destinations = package["optimizer_destinations"].final_target.docstring
    [raises] = [one for one in save.parse("google") if one.kind.value == "raises"]
    options = {"returns_named_value": False, "returns_multiple_items": False}
    [returns] = [one for one in destinations.parse("google", **options) if one.kind.value == "returns"]

    assert raises.title.startswith("Raises (on every rank")
    assert "StorageError" in {str(one.annotation) for one in raises.value}
    assert returns.value[0].description.startswith('`{"state": {fqn: {name: value}}')
    assert "(../incremental.md)" in save.value
