"""What the modules of `reshard.integrations` say where their framework is not installed."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import reshard.integrations

ROOT = Path(__file__).parents[3]
MODULES = sorted(each.name for each in pkgutil.iter_modules(reshard.integrations.__path__))


def needed(name: str) -> str:
    """The requirements that the module names."""
    text = (ROOT / f"reshard/integrations/{name}.py").read_text(encoding="utf-8")
    [requirement] = re.findall(r"^with framework\(\"(.*)\"\):$", text, re.M)
    return str(requirement)


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_framework_is_named_with_how_to_install_it(name: str, monkeypatch: Any) -> None:
    missing = (name, "tyro", "accelerate") if name in ("torchtitan", "transformers") else (name,)
    for module in [m for m in sys.modules if m.split(".")[0] in missing]:
        monkeypatch.delitem(sys.modules, module)
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"reshard.integrations.{name}", raising=False)

    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"reshard.integrations.{name}")
    each = needed(name).split()
    command = " ".join(f"'{one}'" for one in each)
    assert str(error.value).endswith(f". Install {' and '.join(each)}: pip install {command}")


def test_requirements_are_those_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ours = {name: needed(name).split() for name in MODULES if name in extras}
    assert len(ours) >= 6
    assert {name: found for name, found in ours.items() if found != extras[name]} == {}
