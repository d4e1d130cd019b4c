"""The source follows docs/architecture.md and CONTRIBUTING.md: layers, no import cycles, short modules, and private
names of torch in a few modules only."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs import figures
from docs.draw_architecture import CHARACTER, NAME, OMITTED, PICTURE, draw, drawn, package_imports, roles
from docs.import_graph import (
    MAX_FUNCTION_LINES,
    MAX_MODULE_LINES,
    ROOT,
    Codebase,
    layers,
    matches,
    package_of,
    packages_named,
    private_torch_modules,
)

CODEBASE = Codebase.read()
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LAYERS = layers(PAGE)
PRIVATE_TORCH_MODULES = private_torch_modules((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

LONG_FUNCTIONS = {"reshard.api.convert.convert"}
"""They document many options. Remove a function from here when it is short again."""

MOST = {
    "tokens": 513_200,
    "header %": 8.0,
    "mean line": 53.1,
    "lines over 100 %": 9.7,
    "names of several classes": 3,
    "pairs of like classes": 13,
    "folders of Megatron": 3,
    "folders of DeepSpeed": 3,
    "folders of FSDP1": 2,
    "folders of safetensors": 3,
    "folders of GGUF": 2,
    "folders of torchsnapshot": 1,
    "load: modules": 45,
    "load: folders": 11,
    "load: functions": 374,
    "save: modules": 39,
    "save: folders": 10,
    "save: functions": 301,  # two less with the compiled kernel
    "set optimizer: local parts asked for, per tensor": 2,
}
"""The maximum of each figure of `docs.figures`. Lower them toward `figures.GOALS`. Tokens and functions may only grow
with what the library can do, and CONTRIBUTING.md says with what."""


def test_no_cycles_between_modules() -> None:
    assert CODEBASE.cycles() == []


def test_no_cycles_between_packages_and_folders() -> None:
    assert CODEBASE.package_cycles() == []


def test_every_package_is_in_one_layer() -> None:
    assert sorted(package for layer in LAYERS for package in layer) == sorted(CODEBASE.packages)


def test_imports_between_packages_lead_to_lower_layers() -> None:
    assert CODEBASE.upward_imports(LAYERS) == {}


def test_nothing_is_imported_by_a_name_that_is_made_up() -> None:
    """Except for the two public tables and the table of formats, whose entries count as imports, and the alias of all
    planners."""
    made_up = {m.name: [line for line, name in m.imports_by_name() if name is None] for m in CODEBASE.modules.values()}
    assert {name: len(lines) for name, lines in made_up.items() if lines} == {
        "planners": 1,
        "reshard": 1,
        "reshard.formats.table": 1,
        "reshard.planners": 1,
    }


def test_names_of_modules_in_strings_are_names_of_modules() -> None:
    """Such strings count as imports, so they must name existing modules."""
    texts = {text for m in CODEBASE.modules.values() for text in m.strings()}
    others = ("planners", "reshard", "reshard.ranks.telemetry")  # tables of names; names of metrics
    tables = {text for module in others for text in CODEBASE.modules[module].strings()}
    assert len(texts & CODEBASE.modules.keys()) > 30
    assert sorted(texts - tables - CODEBASE.modules.keys()) == []


def test_packages_hold_a_docstring_and_names() -> None:
    """Except for the two public tables, whose names are imported on first use, and the command's entry point."""
    code = {m.name for m in CODEBASE.modules.values() if m.is_package and list(m.functions())}
    assert code == {"planners", "reshard", "reshard.cli"}


def test_modules_are_short() -> None:
    assert {m.name: m.lines for m in CODEBASE.modules.values() if m.lines > MAX_MODULE_LINES} == {}


def test_figures_of_the_source_do_not_grow() -> None:
    grown = {f.name: f.value for f in figures.of_source(CODEBASE) if f.name in MOST and f.value > MOST[f.name]}
    assert grown == {}, "see what is counted: python -m docs.figures --details"


@pytest.mark.gloo
@pytest.mark.host_only("what a device adds to a call is counted on none")
def test_calls_run_through_no_more_of_the_source() -> None:
    found = {figure.name: figure.value for figure in figures.of_calls()}

    assert {name: value for name, value in found.items() if value > MOST[name]} == {}, "python -m docs.figures"
    assert min(found.values()) > 0


def test_what_has_a_goal_is_held() -> None:
    """Except for the size of changes, which no single change determines."""
    assert figures.GOALS.keys() - MOST.keys() == {"files of a change: median", "files of a change: 90 %"}
    assert MOST.keys() <= figures.GOALS.keys()


def test_functions_are_short() -> None:
    long = {f"{m.name}.{f}": n for m in CODEBASE.modules.values() for f, n in m.functions() if n > MAX_FUNCTION_LINES}
    assert set(long) == LONG_FUNCTIONS, long


def test_private_names_of_torch_are_used_in_listed_modules_only() -> None:
    users = {m.path: m.private_torch() for m in CODEBASE.modules.values() if m.private_torch()}
    listed = {path for path in users for entry in PRIVATE_TORCH_MODULES if matches(path, entry)}
    assert {path: names for path, names in users.items() if path not in listed} == {}


def test_every_listed_module_uses_private_names_of_torch() -> None:
    users = [m.path for m in CODEBASE.modules.values() if m.private_torch()]
    assert [b for b in PRIVATE_TORCH_MODULES if not any(matches(path, b) for path in users)] == []
    assert len(PRIVATE_TORCH_MODULES) > 3


def test_planners_import_no_torch_and_nothing_of_reshard() -> None:
    outside = {"torch", "reshard", "msgspec", "safetensors", "rich", "typer", "os", "io", "pathlib", "time", "socket"}
    found = {
        (module.name, base)
        for module in CODEBASE.modules.values()
        for base, _ in module.imports()
        if module.name.split(".")[0] == "planners" and base.split(".")[0] in outside
    }
    assert found == set()


def test_tests_are_in_the_packages_of_what_they_test() -> None:
    """One folder per package, `tests/stories` for tests that span several, and repository tests at the top."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    packages = {Path(*package.split(".")) for package in CODEBASE.packages}
    allowed = {Path(), Path("stories"), *packages}
    assert {str(f) for f in folders if not any(f == p or (p.parts[1:] and p in f.parents) for p in allowed)} == set()


def test_the_picture_is_of_these_packages() -> None:
    """Packages and imports. The lines of code may have changed since it was drawn."""
    packages, arrows = drawn(PICTURE.read_text(encoding="utf-8"))

    redraw = "redraw it: python -m docs.draw_architecture"
    assert set(CODEBASE.packages) >= OMITTED
    assert packages == set(CODEBASE.packages) - {"planners", *OMITTED}, redraw
    assert arrows == package_imports(CODEBASE), redraw


def paragraphs(page: str) -> dict[str, str]:
    """Return the text under each package's heading."""
    found = re.findall(r"^### (.*?): .*?\n(.*?)(?=^##)", page, re.M | re.S)
    return {package: text for names, text in found for package in packages_named(names)}


def test_every_package_is_described_with_every_entry() -> None:
    described = paragraphs(PAGE)
    assert sorted(described) == sorted(roles(PAGE)) == sorted(CODEBASE.packages)
    unnamed = {
        name
        for package, text in described.items()
        for name in CODEBASE.packages.nodes[package]["modules"]
        if name.count(".") > 1 and not CODEBASE.modules[name].only_reexports and f"`{name.split('.')[2]}`" not in text
    }
    assert unnamed == set(), "name them in the paragraph of their package in docs/architecture.md"
    assert min(len(text.split()) for text in described.values()) > 20


def test_functions_that_the_page_names_are_there() -> None:
    named = sorted(set(re.findall(r"`((?:planners|reshard)(?:\.\w+){2,})`", PAGE)))
    assert len(named) > 20
    for name in named:
        pkgutil.resolve_name(name)


# what the checks above see in small made-up sources: each is wrong in one way


def codebase(tmp_path: Path, files: Mapping[str, str]) -> Codebase:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return Codebase.read(tmp_path)


CYCLES = [
    ("def f():\n    from reshard.one.b import x\n", "from reshard.one.a import y\n", "in a function"),
    ("if TYPE_CHECKING:\n    from reshard.one import b\n", "import reshard.one.a\n", "for types only"),
    ("from .b import x\n", "from . import a\n", "relative"),
    ("import_module('reshard.one.b')\n", "from reshard.one import a\n", "by a string"),
    ("TABLE = {'x': 'reshard.one.b'}\n", "from reshard.one.a import y\n", "in a table"),
]


@pytest.mark.parametrize(("a", "b", "note"), CYCLES, ids=[row[2] for row in CYCLES])
def test_a_cycle_is_seen(a: str, b: str, note: str, tmp_path: Path) -> None:
    made = codebase(tmp_path, {"reshard/one/__init__.py": "", "reshard/one/a.py": a, "reshard/one/b.py": b})

    assert made.cycles() == [["reshard.one.a", "reshard.one.b"]]
    assert made.package_cycles() == []


def test_a_chain_is_no_cycle(tmp_path: Path) -> None:
    text = "from reshard.one import b\n"
    made = codebase(tmp_path, {"reshard/one/__init__.py": "", "reshard/one/a.py": text, "reshard/one/b.py": ""})

    assert list(made.arrows.edges) == [("reshard.one.a", "reshard.one.b")]
    assert made.cycles() == []


TWO_PACKAGES = {
    "reshard/__init__.py": "_HOME = {'x': 'high.a'}\n",
    "reshard/high/__init__.py": "",
    "reshard/high/a.py": "from reshard.low.b import x\n",
    "reshard/low/__init__.py": "",
    "reshard/low/b.py": "from planners import box\n",
    "planners/box.py": "",
}
SMALL = "# A\n\n## Layers\n\n| layer | packages |\n|---|---|\n| 1 | `reshard` |\n| 2 | `reshard.high` |\n"
SMALL += "| 3 | `reshard.low` |\n| 4 | `planners.box` |\n\n## Packages\n\n| `reshard.other` |\n"


def test_layers_are_read_off_the_page() -> None:
    assert layers(SMALL) == [["reshard"], ["reshard.high"], ["reshard.low"], ["planners.box"]]


def test_an_import_that_leads_up_is_seen(tmp_path: Path) -> None:
    made = codebase(tmp_path, TWO_PACKAGES)
    assert made.upward_imports(layers(SMALL)) == {}
    assert sorted(made.packages.edges) == [
        ("reshard", "reshard.high"),
        ("reshard.high", "reshard.low"),
        ("reshard.low", "planners.box"),
    ]

    swapped = layers(SMALL.replace(".high", ".x").replace(".low", ".high").replace(".x", ".low"))
    assert made.upward_imports(swapped) == {("reshard.high", "reshard.low"): [("reshard.high.a", "reshard.low.b")]}
    beside = [["reshard"], ["reshard.high", "reshard.low"], ["planners.box"]]
    assert list(made.upward_imports(beside)) == [("reshard.high", "reshard.low")]


def test_a_cycle_of_packages_and_folders_is_seen_though_no_module_is_in_one(tmp_path: Path) -> None:
    back = {"reshard/low/c.py": "from reshard.high.d import x\n", "reshard/high/d.py": ""}
    made = codebase(tmp_path, {**TWO_PACKAGES, **back})

    assert made.cycles() == []
    assert made.package_cycles() == [("reshard.high", "reshard.low")]
    inner = {"reshard/low/p/a.py": "import reshard.low.q.a\n", "reshard/low/q/a.py": "", "reshard/low/p/c.py": ""}
    inner["reshard/low/q/b.py"] = "from reshard.low.p import c\n"
    assert ("reshard.low.p", "reshard.low.q") in codebase(tmp_path, inner).package_cycles()


def test_sizes_are_seen(tmp_path: Path) -> None:
    long = {"reshard/high/long.py": "def f():\n" + "    x = 1\n" * 60 + "\n" * 740}
    made = codebase(tmp_path, {**TWO_PACKAGES, **long})

    assert {m.name for m in made.modules.values() if m.lines > MAX_MODULE_LINES} == {"reshard.high.long"}
    assert list(made.modules["reshard.high.long"].functions()) == [("f", 61)]
    assert made.lines("reshard.high") == 802


COUNTED = '''"""A module.

Of two lines more."""

from __future__ import annotations
from typing import (
    TYPE_CHECKING,
)

if TYPE_CHECKING:
    import os

__all__ = ["One"]


class One:
    a: int
    b: int
    c: int
    d: int = 0


def f():
    import sys  # megatron
'''


def test_figures_are_counted(tmp_path: Path) -> None:
    other = COUNTED.replace("One", "_One").replace("megatron", "Megatron, megatron-core and " + "MEGATRON" * 10)
    texts = {"reshard/low/a.py": COUNTED, "reshard/high/b.py": other, "reshard/high/c.py": "x = 1\n\n"}
    found = {figure.name: figure for figure in figures.of_source(codebase(tmp_path, texts))}
    values = {name: figure.value for name, figure in found.items()}
    written = [line for text in texts.values() for line in text.splitlines() if line]

    assert (values["modules"], values["lines"], values["tokens"]) == (3, 2 * 24 + 2, 2 * 44 + 3)
    assert values["header %"] == pytest.approx(100 * 2 * (3 + 1 + 3 + 2 + 1) / 50)
    assert values["mean line"] == pytest.approx(sum(map(len, written)) / len(written))
    assert values["lines over 100 %"] == pytest.approx(100 / len(written))
    assert (values["names of several classes"], found["names of several classes"].detail) == (1, "One 2")
    assert (values["pairs of like classes"], found["pairs of like classes"].detail) == (1, "One and One")
    assert (found["folders of Megatron"].detail, values["folders of DeepSpeed"]) == ("reshard/high", 0)
    assert {name for name, figure in found.items() if figure.goal is None} == {"modules", "lines"}


PRIVATE = [
    ("from torch.distributed.tensor.placement_types import _StridedShard\n", {"placement_types._StridedShard"}),
    ("def f():\n    from torch.distributed._shard import metadata\n", {"torch.distributed._shard.metadata"}),
    ("import torch._C\n", {"torch._C"}),
    ("import torch\n\ntorch.utils._pytree.x()\n", {"torch.utils._pytree"}),
    ("from torch.distributed import distributed_c10d as c10d\n\nc10d._get()\n", {"distributed_c10d._get"}),
    ("import torch.distributed as dist\n\ndist._x\n", {"torch.distributed._x"}),
    ("import os\nimport torch\n\nos._exit(torch.__version__)\n", set()),
    ("TEXT = 'torch._utils._rebuild_tensor_v2'\n", set()),
    ("from reshard.low import _x\n", set()),
]


@pytest.mark.parametrize(("text", "wanted"), PRIVATE, ids=[row[0].splitlines()[-1][:40] for row in PRIVATE])
def test_private_names_of_torch_are_seen(text: str, wanted: set[str], tmp_path: Path) -> None:
    found = codebase(tmp_path, {"reshard/high/a.py": text}).modules["reshard.high.a"].private_torch()

    assert bool(found) == bool(wanted)
    assert all(any(name in each for each in found) for name in wanted)


def test_private_torch_modules_are_read_off_the_page() -> None:
    page = "**Words.** `reshard/no.py`\n\n**Private names of torch** in `reshard/state/a.py`, `reshard/dcp/*`.\n\n"
    page += "`reshard/b.py`"
    assert private_torch_modules(page) == ["reshard/state/a.py", "reshard/dcp/*"]
    assert matches("reshard/dcp/x.py", "reshard/dcp/*")
    assert not matches("reshard/dcp_x.py", "reshard/dcp/*")
    assert matches("reshard/state/a.py", "reshard/state/a.py")
    assert not matches("reshard/state/ab.py", "reshard/state/a.py")


def test_imports_by_made_up_names_are_seen(tmp_path: Path) -> None:
    text = "import importlib\n\nimportlib.import_module('reshard.low')\n__import__(name)\n"
    [one, other] = codebase(tmp_path, {"reshard/a.py": text}).modules["reshard.a"].imports_by_name()

    assert (one, other) == ((3, "reshard.low"), (4, None))


def test_a_package_is_a_folder_or_a_module_by_itself() -> None:
    assert package_of("reshard.live.fingerprint_arithmetic") == "reshard.live"
    assert (package_of("reshard.errors"), package_of("planners")) == ("reshard.errors", "planners")


def test_a_picture_says_what_was_drawn(tmp_path: Path) -> None:
    made = codebase(tmp_path, TWO_PACKAGES)
    packages, arrows = drawn(draw(made, SMALL))

    assert packages == {"reshard", "reshard.high", "reshard.low", "planners.box"}
    assert arrows == {("reshard", "reshard.high"), ("reshard.high", "reshard.low"), ("reshard.low", "planners")}
    other = codebase(tmp_path, {"reshard/low/b.py": ""})
    assert drawn(draw(other, SMALL))[1] == arrows - {("reshard.low", "planners")}


def test_texts_of_the_picture_fit_their_boxes() -> None:
    """With a generous character width, no text is wider than its box, and the purpose begins after the name."""
    boxes = re.findall(r'data-package="[\w.]+"(.*?)</g>', draw(CODEBASE, PAGE), re.S)
    assert len(boxes) > 15
    for box in boxes:
        [(x, y, width, height)] = re.findall(r'<rect .*? x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"', box)
        texts = re.findall(r'<text class="(\w+)" x="(.*?)" y="(.*?)">([^<]*)<', box)
        assert [kind for kind, *_ in texts][:2] == ["name", "role"]
        taken = {
            text: float(left) + len(text) * (NAME if kind == "name" else CHARACTER) for kind, left, _, text in texts
        }
        for _, _, bottom, text in texts:
            assert taken[text] < float(x) + float(width)
            assert float(y) < float(bottom) < float(y) + float(height)
        name, role = texts[:2]
        assert name[2] != role[2] or taken[name[3]] < float(role[1])


def test_a_package_of_the_picture_imports_from_lower_rows_only() -> None:
    """Or from the column of planners, for packages of reshard."""
    svg = draw(CODEBASE, PAGE)
    tops = dict(re.findall(r'data-package="([\w.]+)".*?<rect .*? y="([\d.]+)"', svg, re.S))
    inner = [(a, b) for a, b in package_imports(CODEBASE) if b != "planners"]
    assert len(inner) > 40
    assert [(a, b) for a, b in inner if float(tops[a]) >= float(tops[b])] == []
