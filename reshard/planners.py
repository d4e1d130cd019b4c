"""`reshard.planners` is an alias of `planners`: both names give the same modules.

>>> import planners
>>> import reshard.planners
>>> reshard.planners is planners
True
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

import planners

if TYPE_CHECKING:
    from planners import *  # noqa: F403


class _Same(MetaPathFinder, Loader):
    """Finds `reshard.planners.x` as `planners.x`. A second import would create a second set of classes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix("reshard.")
        sys.modules[module.__name__] = importlib.import_module(name)


sys.meta_path.insert(0, _Same())
sys.modules[__name__] = planners
