"""What several reports say in the same words: of keys, of what was written, of checksums, of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planners.notebooks import Tabled

__all__ = ["CheckedReport", "FilledReport", "HostsReport", "WrittenReport"]


@dataclass(frozen=True, repr=False)
class FilledReport(Tabled):
    """Of a load or a transfer, which fill a target."""

    missing: tuple[str, ...]
    """Keys of the target that nobody has for it; they keep the values they had."""
    unexpected: tuple[str, ...]
    """Keys that no rank's target has; they were not read or moved."""
    cast: Mapping[str, tuple[str, str]]
    """Key of the target -> (dtype before, dtype of the target) of what was converted."""


@dataclass(frozen=True, repr=False)
class WrittenReport(Tabled):
    """Of a save or a conversion, which write a checkpoint."""

    tensors: int
    objects: int
    total_bytes: int
    """Bytes of all tensors, each distinct element once."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that holds them."""


@dataclass(frozen=True, repr=False)
class CheckedReport(Tabled):
    """Of a load or a conversion, which read a checkpoint."""

    format: str
    """Of the checkpoint that was loaded, or written."""
    bytes_unchecked: int
    """Bytes of the elements that were asked for, of a load those of this rank, that nobody compared
    with a checksum: the format has none, `check` was off, or it would have cost too much, see
    `reshard.stored.checksums.may_check`."""
    unchecked: str
    """In words, what was not compared; empty where every byte was, and of a conversion what was
    written with the saved fingerprints."""


@dataclass(frozen=True, repr=False)
class HostsReport(Tabled):
    """Of what hosts keep in their memory. Each rank has its own."""

    bytes_received: int
    """By this rank, from other hosts: of copies, or of what was recovered."""
    seconds: Mapping[str, float] = field(compare=False)
    """Time of this rank, by phase."""
