"""`SaveReport`: what a save did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SaveReport"]


@dataclass(frozen=True)
class SaveReport:
    """What a save did. Equal on all ranks but for `bytes_written` and `seconds`."""

    path: str
    save_id: str
    tensors: int
    objects: int
    total_bytes: int
    """Bytes of all tensors, each distinct element once."""
    bytes_written: int
    """Bytes of tensors that this rank wrote."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that holds them."""
    per_rank: tuple[str, ...]
    """Keys of which each rank's own value was kept."""
    seconds: Mapping[str, float] = field(compare=False)
    """Time of this rank, by phase."""
