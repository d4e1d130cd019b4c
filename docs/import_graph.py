"""The modules of the source, their imports, their packages, and the layers of architecture.md.

Every import counts: at the top, in a function, or for type checking only. The name of a module in a string (a table
of names, a program to start) also counts as an import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx

__all__ = ["ROOT", "Codebase", "Module", "layers", "matches", "package_of", "packages_named", "private_torch_modules"]

ROOT = Path(__file__).parents[1]
TOP_LEVEL = ("planners", "reshard")
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 800, 60


def package_of(module: str) -> str:
    """The package of a module: a folder or a single module directly below `planners` or `reshard`. `python -m reshard`
    belongs to the command line."""
    if module == "reshard.__main__":
        return "reshard.cli"
    return ".".join(module.split(".")[:2])


@dataclass(frozen=True)
class Module:
    """One file of source: its dotted name, its path in the repository, and its text."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imports(self) -> Iterator[tuple[str, str | None]]:
        """(module, name imported from it, or None) for each import anywhere in the file."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.name.split(".")[: len(self.name.split(".")) + self.is_package - node.level]
                base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
                yield from ((base, alias.name) for alias in node.names)

    def imports_by_name(self) -> Iterator[tuple[int, str | None]]:
        """(line, name) of each call that imports by a string; the name is None unless it is a literal."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
                yield node.lineno, first.value if literal else None

    def strings(self) -> Iterator[str]:
        """Every string that could name a module; the tables in `planners` and `reshard` omit that prefix."""
        for node in self.nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"\w+(\.\w+)*", text):
                if re.match(r"(planners|reshard)\.", text):
                    yield text
                elif self.name in TOP_LEVEL:
                    yield f"{self.name}.{text}"

    @property
    def only_reexports(self) -> bool:
        """Whether the module only re-exports names: an old name of a module, or torch's name for it."""
        kinds = {
            type(node)
            for node in self.tree.body
            if not (
                isinstance(node, ast.Assign)
                and {getattr(t, "id", "") for t in node.targets} <= {"__getattr__", "__all__"}
            )
        }
        return not self.is_package and kinds <= {ast.Expr, ast.Import, ast.ImportFrom}

    def functions(self) -> Iterator[tuple[str, int]]:
        """(name, lines) of each function."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1

    def private_torch(self) -> set[str]:
        """Names of torch with an underscore that are imported, or reached through torch or a module of it."""
        bound, found = {}, set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    bound[alias.asname or first] = alias.name if alias.asname else first
                    found.add(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    found.add(f"{node.module}.{alias.name}")
        bound = {name: path for name, path in bound.items() if path.split(".")[0] == "torch"}
        for node in self.nodes:
            chain = _attributes(node)
            if chain and chain[0] in bound:
                found.add(".".join([bound[chain[0]], *chain[1:]]))
        return {name for name in found if name.split(".")[0] == "torch" and any(map(_is_private, name.split(".")))}


def _attributes(node: ast.AST) -> list[str]:
    """`a.b.c` as its names; empty where it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _attributes(node.value)):
        return [*before, node.attr]
    return []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@dataclass(frozen=True)
class Codebase:
    """All modules by name, with their imports and packages."""

    modules: Mapping[str, Module]

    @classmethod
    def read(cls, root: Path = ROOT, packages: Sequence[str] = TOP_LEVEL) -> Codebase:
        """The codebase below `root`."""
        found = sorted(path.relative_to(root) for package in packages for path in (root / package).rglob("*.py"))
        paths = [path for path in found if "examples" not in path.parts]  # a link to one of examples/
        names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
        texts = [(root / path).read_text(encoding="utf-8") for path in paths]
        return cls({n: Module(n, p.as_posix(), text) for n, p, text in zip(names, paths, texts, strict=True)})

    @cached_property
    def arrows(self) -> nx.DiGraph:
        """The imports between modules."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.modules)
        for module in self.modules.values():
            named = [f"{base}.{name}" if f"{base}.{name}" in self.modules else base for base, name in module.imports()]
            targets = {*named, *module.strings()} & self.modules.keys()
            graph.add_edges_from((module.name, target) for target in targets - {module.name})
        return graph

    @cached_property
    def packages(self) -> nx.DiGraph:
        """The imports between packages. Each node has its modules under "modules"."""
        graph = nx.DiGraph()
        for name in self.modules:
            graph.add_node(package_of(name))
            graph.nodes[package_of(name)].setdefault("modules", []).append(name)
        ends = ((package_of(a), package_of(b)) for a, b in self.arrows.edges)
        graph.add_edges_from((a, b) for a, b in ends if a != b)
        return graph

    def lines(self, package: str) -> int:
        """Lines of code of a package."""
        return sum(self.modules[name].lines for name in self.packages.nodes[package]["modules"])

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or not."""
        return sorted(sorted(group) for group in nx.strongly_connected_components(self.arrows) if len(group) > 1)

    def package_cycles(self) -> list[list[str]]:
        """The same for packages, and for the folders in them."""
        folders = nx.DiGraph()
        for a, b in self.arrows.edges:
            if not (self.modules[a].is_package or self.modules[b].is_package):
                one, other = a.rpartition(".")[0], b.rpartition(".")[0]
                if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
                    folders.add_edge(one, other)
        groups = [*nx.strongly_connected_components(self.packages), *nx.strongly_connected_components(folders)]
        return sorted({tuple(sorted(group)) for group in groups if len(group) > 1})

    def upward_imports(self, layers: Sequence[Sequence[str]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """Imports between packages that do not lead to a lower layer, with their modules."""
        level = {package: i for i, layer in enumerate(layers) for package in layer}
        wrong: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for a, b in self.arrows.edges:
            packages = package_of(a), package_of(b)
            if packages[0] != packages[1] and not level[packages[0]] < level[packages[1]]:
                wrong.setdefault(packages, []).append((a, b))
        return wrong


def packages_named(text: str) -> list[str]:
    """The packages that a text names in backticks."""
    return re.findall(r"`((?:planners|reshard)(?:\.\w+)?)`", text)


def layers(page: str) -> list[list[str]]:
    """The layers that docs/architecture.md lists from top to bottom: the rows of the table under "## Layers"."""
    section = page.split("\n## Layers\n", 1)[1].split("\n## ", 1)[0]
    return [found for line in section.splitlines() if line.startswith("|") and (found := packages_named(line))]


def private_torch_modules(page: str) -> list[str]:
    """The paths that CONTRIBUTING.md lists as users of torch's private names; `folder/*` is all below a folder."""
    paragraph = next(p for p in page.split("\n\n") if p.startswith("**Private names of torch**"))
    return re.findall(r"`(reshard/[\w/*.]+)`", paragraph)


def matches(path: str, listed: str) -> bool:
    """Whether the file at `path` is one that the entry `listed` covers."""
    return path.startswith(listed.removesuffix("*")) if listed.endswith("/*") else path == listed
