"""What the reference shows of the source: defaults as values, options by name, sections and links. Griffe runs it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

from reshard.api.options import TransferOptions

_MODULES = ("elastic", "errors", "mapping")
_PAGES = Path(__file__).parent
_MADE = set(re.findall(r"\b([A-Z]\w+)\(", "".join(map(Path.read_text, _PAGES.glob("reference/*.md")))))
"""The classes that a page calls."""
_SECTION = re.compile(r"^([ \t]*Raises) \((.+)\):$", re.MULTILINE)
_TOGETHER = re.compile(r"^([ \t]+)(\w+(?:, \w+)+): (.*(?:\n\1[ \t]+.*)*)", re.MULTILINE)
"""Parameters, or errors, that a docstring describes together."""
_TAG = re.compile(r"`[^`]*`|<(\w+)>")
_RETURNS = re.compile(r"^[ \t]*Returns:\n[ \t]+", re.MULTILINE)
_ROWS = re.compile(r"^Args:\n((?:[ \t]+.*\n?)+)", re.MULTILINE)
_ROW = re.compile(r"^    (\w+(?:, \w+)*): .*(?:\n {5,}.*)*", re.MULTILINE)
_LIKE = {"reshard.async_save": "reshard.save", "reshard.prepare": "reshard.redistribute"}
"""Functions whose other arguments are those of another one."""
_PAGE = re.compile(r"`?\bdocs/([\w/-]+\.md)`?")


class Reference(griffe.Extension):
    """Completes what griffe reads from the source of a package with what Python knows of it."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Every public function, class and method of the package and of its modules with public names."""
        if pkg.path != "planners" and "planners" not in loader.modules_collection:
            loader.load("planners")  # some public names of this package are defined there
        griffe.DataclassesExtension().on_package(pkg=pkg)
        for module in (pkg, *(pkg.members[name] for name in _MODULES if name in pkg.members)):
            for path, found in _public(module, module.path, _names(module.path)):
                if found.docstring:
                    if path in _LIKE:
                        _add_rows(found.docstring, pkg[_LIKE[path].partition(".")[2]], pkgutil.resolve_name(path))
                    text = _TAG.sub(_escaped, _SECTION.sub(_as_title, found.docstring.value))
                    found.docstring.value = _PAGE.sub(_link, text)
                if found.is_function:
                    _complete(found, pkgutil.resolve_name(path))
                elif found.is_class:
                    _show_call(found, pkgutil.resolve_name(path))
                    _without_code(found)


def _without_code(made: griffe.Class) -> None:
    """Only defaults are values of attributes: griffe takes what `__init__` assigns for one. No private bases."""
    made.bases = [base for base in made.bases if not str(base).startswith("_")]
    for each in made.members.values():
        if each.is_attribute and "instance-attribute" in each.labels and "class-attribute" not in each.labels:
            each.value = None


def _names(module: str) -> list[str]:
    """The public names of a module."""
    known = vars(importlib.import_module(module))
    return known.get("__all__") or [name for name in known if not name.startswith("_")]


def _public(parent: Any, path: str, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Path, and what griffe has of it, of each name of a module, and of the members of its classes."""
    for name in names:
        found = parent.members.get(name)
        if found is None or (found.is_alias and not found.target_path.startswith(("planners.", "reshard."))):
            continue
        found = found.final_target if found.is_alias else found
        yield f"{path}.{name}", found
        if found.is_class:
            members = [each for each in found.members if not each.startswith("_") or each == "__init__"]
            yield from _public(found, f"{path}.{name}", members)


def _show_call(made: griffe.Class, value: Any) -> None:
    """A class shows how it is called if a page calls it; others are what calls return."""
    if made.name in _MADE and not inspect.isabstract(value):
        made.labels.add("called")  # the template asks for it
    if "__new__" in made.members:
        made.members["__init__"] = made.members["__new__"]
    init = made.members.get("__init__")
    for parameter in list(init.parameters) if isinstance(init, griffe.Function) else ():
        if parameter.name.startswith("_"):
            del init.parameters[parameter.name]


def _add_rows(docstring: griffe.Docstring, other: Any, value: Any) -> None:
    """Describe the arguments that another function describes."""
    section = _ROWS.search(docstring.value)
    rows = section[1].rstrip("\n").split("\n") if section else []
    listed = {match[1] for match in _ROW.finditer("\n".join(rows))}
    listed |= (
        inspect.signature(pkgutil.resolve_name(other.path)).parameters.keys() - inspect.signature(value).parameters
    )
    found = _ROW.finditer(_ROWS.search(other.final_target.docstring.value)[1])
    rows += [row[0] for row in found if not listed & {*row[1].split(", ")}]
    text = _ROWS.sub("", docstring.value).rstrip()
    docstring.value = re.sub(r"(?=^Returns:)", lambda _: "Args:\n" + "\n".join(rows) + "\n\n", text, flags=re.M)


def _complete(function: griffe.Function, value: Any) -> None:
    """Defaults that the source names get their values; options that it collects are listed. Each parameter and
    each error has a row of its own: one for several would call parameters required, and show errors as a tuple."""
    known = inspect.signature(value).parameters

    def apart(described: re.Match[str]) -> str:
        indent, names, text = described.groups()
        is_of_errors = all(name.endswith("Error") for name in names.split(", "))
        if not is_of_errors and not known.keys() | TransferOptions.__annotations__ >= {*names.split(", ")}:
            return described[0]
        return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))

    if function.docstring:
        function.docstring.value = _TOGETHER.sub(apart, function.docstring.value)
    for parameter in list(function.parameters):
        if parameter.kind is griffe.ParameterKind.var_keyword and parameter.name not in known:
            del function.parameters[parameter.name]
        elif parameter.name in known and parameter.default is not None:
            parameter.default = _shown(known[parameter.name].default, str(parameter.default))
    listed = {parameter.name for parameter in function.parameters}
    for name, one in known.items():
        if name not in listed and one.kind is one.KEYWORD_ONLY:
            default = _shown(one.default, "...")
            kind = griffe.ParameterKind.keyword_only
            function.parameters.add(griffe.Parameter(name, annotation=str(one.annotation), kind=kind, default=default))
    if function.docstring and function.returns is not None:
        text = function.docstring.value
        function.docstring.value = _RETURNS.sub(lambda match: f"{match[0]}{function.returns}: ", text)


def _as_title(section: re.Match[str]) -> str:
    """The heading of a section that says where or when, in the form that griffe knows."""
    title = section[2].replace("`", "")
    return f"{section[1]}: Raises ({title}):"


def _shown(default: Any, source: str) -> str:
    """A number, text or the like as it is written; of all else, what the source says, or how it is made."""
    if type(default) is int and default > 9999:
        return f"{default:_}"
    if source.startswith("_") and default == type(default)():
        return f"{type(default).__name__}()"
    plain = isinstance(default, bool | int | float | str | tuple) or default is None
    return repr(default) if plain and "<" not in repr(default) else source


def _escaped(found: re.Match[str]) -> str:
    """Names such as <fqn> outside of code, which would be taken for HTML."""
    return f"&lt;{found[1]}>" if found[1] else found[0]


def _link(match: re.Match[str]) -> str:
    """A page that a docstring names, by its title; all reference pages are in one folder."""
    page = _PAGES / match[1]
    if not page.is_file():
        return match[0]
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{match[1]})"
