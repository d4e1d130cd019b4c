"""How torch.distributed.checkpoint names its files: to tell that there are some, their reader need not be imported."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["DATA_FILE", "RANK_METADATA", "has_dcp"]

RANK_METADATA = re.compile(r"__\d+\.metadata")
DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
"""Of a rank, whose number is the group."""


def has_dcp(names: Iterable[str]) -> bool:
    """Whether one of the files, in the top folder, is of a DCP checkpoint, be it one that never became whole."""
    return any(name == ".metadata" or RANK_METADATA.fullmatch(name) or DATA_FILE.fullmatch(name) for name in names)
