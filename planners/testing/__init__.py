"""Hypothesis strategies for boxes, meshes, layouts, topologies and views, to test planners and storages; and `replay`.

The strategies are imported when first used: only they need Hypothesis.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "block_placements",
    "box_layouts",
    "boxes",
    "flat_layouts",
    "layouts",
    "meshes",
    "placements",
    "product_layouts",
    "shapes",
    "specs",
    "state_pairs",
    "topologies",
    "views",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'planners.testing.strategies' has no attribute {name!r}")
    return getattr(importlib.import_module("planners.testing.strategies.strategies"), name)
