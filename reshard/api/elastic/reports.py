"""What `keep`, `recover` and `gather` did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planners.notebooks import Tabled
from planners.units import format_bytes
from reshard.api.load.report import LoadReport
from reshard.errors import format_names

__all__ = ["GatherReport", "KeepReport", "RecoverReport"]


@dataclass(frozen=True, repr=False)
class KeepReport(Tabled):
    """What `Tier.keep` did. Equal on all ranks but for `bytes_received` and `seconds`."""

    number: int
    """Of the generation: larger than those of all that were there before."""
    step: int
    save_id: str
    total_bytes: int
    """Bytes of all tensors, each distinct element once."""
    bytes_by_host: Mapping[str, int]
    """Bytes of tensors that each host holds of this generation, copies included; of two at most at a time."""
    bytes_received: int
    """Of copies, by this rank."""
    seconds: Mapping[str, float] = field(compare=False)
    """Time of this rank, by phase."""

    def __repr__(self) -> str:
        """One line."""
        most = format_bytes(max(self.bytes_by_host.values()))
        return (
            f"KeepReport(generation {self.number}, step {self.step}, {format_bytes(self.total_bytes)}, at most {most} "
            f"on each of {len(self.bytes_by_host)} hosts)"
        )


@dataclass(frozen=True, repr=False)
class RecoverReport(Tabled):
    """What `Tier.recover` did. Equal on all ranks but for `bytes_received`, `load` and `seconds`."""

    number: int | None
    """Of the generation that was loaded; None if all came from the fallback, so that nothing is left in memory."""
    step: int | None
    from_fallback: tuple[str, ...]
    """Tensors that survived nowhere, and came from the fallback, which has the same: by fingerprint."""
    passed_over: tuple[str, ...]
    """Newer generations, and those that hosts have brought back from which the job had not gone on: what each is, and
    why it was not loaded."""
    bytes_received: int
    """From other hosts, by this rank."""
    bytes_checked: int
    """Bytes of blocks that this rank has compared with their checksums: of all files that were left, and again of
    what came from other hosts."""
    load: LoadReport
    seconds: Mapping[str, float] = field(compare=False)
    """Time of this rank, by phase."""

    def __repr__(self) -> str:
        """One line."""
        what = "the fallback" if self.number is None else f"generation {self.number}, step {self.step}"
        odd = [f"{format_names(self.from_fallback)} from the fallback"] if self.from_fallback else []
        odd += [f"{len(self.passed_over)} passed over"] if self.passed_over else []
        return f"RecoverReport({', '.join([what, *odd])})"


@dataclass(frozen=True, repr=False)
class GatherReport(Tabled):
    """What `gather` did."""

    path: str
    number: int
    step: int
    files: int
    nbytes: int
    """Of data files."""
    passed_over: tuple[str, ...] = ()
    """Generations that are not older states of this one, and why they were not taken."""

    def __repr__(self) -> str:
        """One line."""
        odd = f", {len(self.passed_over)} passed over" if self.passed_over else ""
        return (
            f"GatherReport(generation {self.number}, step {self.step}: {self.files} files, "
            f"{format_bytes(self.nbytes)} in {self.path!r}{odd})"
        )
