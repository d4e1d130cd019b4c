"""The house as the source draws it: modules, who imports whom, their rooms, and the floors of architecture.md.

An arrow is any import, at the top, in a function or for type checking only; a name of a module in a string (a table of
names, a program to start) is an arrow, too, so that nothing hides one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx

__all__ = ["ROOT", "House", "Module", "borders", "fits", "floors", "room_of", "rooms_named"]

ROOT = Path(__file__).parents[1]
PACKAGES = ("planners", "reshard")
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 800, 60


def room_of(module: str) -> str:
    """The folder right below `planners` or `reshard`, or the module that is there by itself; `python -m reshard`
    runs the command."""
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
        """(module, name taken from it, or None), wherever in the file the import stands."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.name.split(".")[: len(self.name.split(".")) + self.is_package - node.level]
                base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
                yield from ((base, alias.name) for alias in node.names)

    def imports_by_name(self) -> Iterator[tuple[int, str | None]]:
        """(line, name) of each call that imports by a string; the name is None unless it stands there."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
                yield node.lineno, first.value if literal else None

    def strings(self) -> Iterator[str]:
        """Every string in the file that could name a module; the tables of the packages leave their own name out."""
        for node in self.nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"\w+(\.\w+)*", text):
                if re.match(r"(planners|reshard)\.", text):
                    yield text
                elif self.name in PACKAGES:
                    yield f"{self.name}.{text}"

    @property
    def is_face(self) -> bool:
        """Whether it only gives names of others: an old name of a module, or torch's name for it."""
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
class House:
    """All modules by name, and what follows from them."""

    modules: Mapping[str, Module]

    @classmethod
    def read(cls, root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> House:
        """The house below `root`."""
        paths = sorted(path.relative_to(root) for package in packages for path in (root / package).rglob("*.py"))
        names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
        texts = [(root / path).read_text(encoding="utf-8") for path in paths]
        return cls({n: Module(n, p.as_posix(), text) for n, p, text in zip(names, paths, texts, strict=True)})

    @cached_property
    def arrows(self) -> nx.DiGraph:
        """Who imports whom."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.modules)
        for module in self.modules.values():
            named = [f"{base}.{name}" if f"{base}.{name}" in self.modules else base for base, name in module.imports()]
            targets = {*named, *module.strings()} & self.modules.keys()
            graph.add_edges_from((module.name, target) for target in targets - {module.name})
        return graph

    @cached_property
    def rooms(self) -> nx.DiGraph:
        """Which room imports from which; each has its modules under "modules"."""
        graph = nx.DiGraph()
        for name in self.modules:
            graph.add_node(room_of(name))
            graph.nodes[room_of(name)].setdefault("modules", []).append(name)
        graph.add_edges_from((room_of(a), room_of(b)) for a, b in self.arrows.edges if room_of(a) != room_of(b))
        return graph

    def lines(self, room: str) -> int:
        """Lines of code of a room."""
        return sum(self.modules[name].lines for name in self.rooms.nodes[room]["modules"])

    def circles(self) -> list[list[str]]:
        """Groups of modules each of which leads to every other."""
        return sorted(sorted(group) for group in nx.strongly_connected_components(self.arrows) if len(group) > 1)

    def room_circles(self) -> list[list[str]]:
        """The same of rooms, and of the folders in them."""
        folders = nx.DiGraph()
        for a, b in self.arrows.edges:
            if not (self.modules[a].is_package or self.modules[b].is_package):
                one, other = a.rpartition(".")[0], b.rpartition(".")[0]
                if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
                    folders.add_edge(one, other)
        groups = [*nx.strongly_connected_components(self.rooms), *nx.strongly_connected_components(folders)]
        return sorted({tuple(sorted(group)) for group in groups if len(group) > 1})

    def uphill(self, floors: Sequence[Sequence[str]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """Arrows between rooms that do not lead to a lower floor, with the modules that draw them."""
        level = {room: i for i, floor in enumerate(floors) for room in floor}
        wrong: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for a, b in self.arrows.edges:
            rooms = room_of(a), room_of(b)
            if rooms[0] != rooms[1] and not level[rooms[0]] < level[rooms[1]]:
                wrong.setdefault(rooms, []).append((a, b))
        return wrong


def rooms_named(text: str) -> list[str]:
    """The rooms that a text names in backticks."""
    return re.findall(r"`((?:planners|reshard)(?:\.\w+)?)`", text)


def floors(page: str) -> list[list[str]]:
    """The floors that docs/architecture.md lists, from the top down: a row of the table under "## Floors" each."""
    section = page.split("\n## Floors\n", 1)[1].split("\n## ", 1)[0]
    return [found for line in section.splitlines() if line.startswith("|") and (found := rooms_named(line))]


def borders(page: str) -> list[str]:
    """The paths that CONTRIBUTING.md lists as borders to torch's private names; `folder/*` is all below a folder."""
    paragraph = next(p for p in page.split("\n\n") if p.startswith("**Private names of torch**"))
    return re.findall(r"`(reshard/[\w/*.]+)`", paragraph)


def fits(path: str, border: str) -> bool:
    """Whether the file at `path` is one that `border` lists."""
    return path.startswith(border.removesuffix("*")) if border.endswith("/*") else path == border
