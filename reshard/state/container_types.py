"""What comes back as plain data, in the type of the live value whose place it takes.

Checkpoints hold plain data only, and nothing in them says what to construct. The live value does:

    live {"log": BytesIO(...), "where": device("cpu")}    saved {"log": b"...", "where": "cpu"}
"""

from __future__ import annotations

import argparse
import io
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

__all__ = ["retyped"]


def retyped(value: Any, live: Any) -> Any:
    """`value`, or the same in the type of `live` where it is plain data for that type; the inside of dicts, lists and
    tuples as well. Neither is changed."""
    if isinstance(value, bytes) and isinstance(live, io.BytesIO):
        return io.BytesIO(value)
    if isinstance(value, str) and isinstance(live, torch.device | PurePath):
        return type(live)(value)
    if isinstance(value, dict) and isinstance(live, argparse.Namespace | types.SimpleNamespace):
        return type(live)(**retyped(value, vars(live)))
    if isinstance(value, dict) and isinstance(live, Mapping):
        return _like({key: retyped(item, live[key]) if key in live else item for key, item in value.items()}, live)
    if type(value) in (list, tuple) and isinstance(live, list | tuple) and len(value) == len(live):
        return type(value)(map(retyped, value, live))
    return value


def _like(items: dict[Any, Any], live: Mapping[Any, Any]) -> dict[Any, Any]:
    """As one of the standard library's dicts, if `live` is: they have methods that a scheduler calls after a load."""
    if type(live) is OrderedDict:
        return OrderedDict(items)
    if type(live) is Counter:
        return Counter(items)
    if type(live) is defaultdict:
        return defaultdict(live.default_factory, items)
    return items
