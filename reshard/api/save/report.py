"""`SaveReport`: what a save did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planners.notebooks import Tabled
from planners.units import format_bytes
from reshard.errors import format_names

__all__ = ["SaveReport"]


@dataclass(frozen=True, repr=False)
class SaveReport(Tabled):
    """What a save did. Equal on all ranks but for `bytes_written`, `bytes_reused`, `seconds` and `passed_over`."""

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
    base: str | None = None
    """The save id of the checkpoint that this one was compared with."""
    bytes_reused: int = 0
    """Bytes of tensors that this rank did not write, since a file of an earlier save has them."""
    passed_over: tuple[str, ...] = ()
    """What of earlier checkpoints this rank could not rely on, and why: what it might have reused was written."""

    def __repr__(self) -> str:
        """One line, with the first names of what is tied or each rank's own."""
        head = f"{self.tensors} tensors, {self.objects} objects, {format_bytes(self.total_bytes)} in {self.path!r}"
        odd = [f"{what} {format_names(getattr(self, what))}" for what in ("aliases", "per_rank") if getattr(self, what)]
        odd += [f"{format_bytes(self.bytes_reused)} as they were"] if self.base is not None else []
        if self.passed_over:
            more = f" and {len(self.passed_over) - 1} more" if len(self.passed_over) > 1 else ""
            odd.append(f"passed over: {self.passed_over[0]}{more}")
        return f"SaveReport({', '.join([head, *odd])}, {format_bytes(self.bytes_written)} by this rank)"
