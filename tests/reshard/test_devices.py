"""Where the tensors lie that the library makes for itself."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

import reshard

SOURCE = Path(reshard.__file__).parent
FACTORIES = {made.__name__ for made in _device_constructors()} | {"rand", "randn"}
USERS = "cli/examples/"
"""Models, which lie wherever their users want them."""


def test_every_tensor_says_where_it_lies() -> None:
    """Under `torch.set_default_device("cuda")`, what does not say so is on the device, where arrays cannot see it."""
    silent = []
    for file in sorted(SOURCE.rglob("*.py")):
        where = file.relative_to(SOURCE).as_posix()
        for node in [] if where.startswith(USERS) else ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _is_factory(node.func) and not _says(node):
                silent.append(f"{where}:{node.lineno}")
    assert not silent


def _is_factory(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch" and called.attr in FACTORIES


def _says(call: ast.Call) -> bool:
    return any(keyword.arg in ("device", None) for keyword in call.keywords)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """What is read, decoded and computed on the host is there, whatever device new tensors of the user lie on."""
    state = {"w": torch.arange(6.0), "none": torch.empty(0, 3), "plain": {"x": 1}}
    reshard.save(state, tmp_path / "a")
    with torch.device("meta"):
        lazy = reshard.open(tmp_path / "a")
        found = {name: lazy[name][...] for name in ("w", "none")}
        reshard.load(state, tmp_path / "a")
        reshard.convert(tmp_path / "a", tmp_path / "b", format="torch_save")
    assert {value.device.type for value in found.values()} == {"cpu"}
    assert torch.equal(reshard.open(tmp_path / "b")["w"][...], state["w"])
