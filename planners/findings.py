"""What `verify` answers: a report of findings, each as concrete as can be."""

from __future__ import annotations

from dataclasses import dataclass

from planners.errors import ProofError
from planners.notebooks import Tabled

__all__ = ["Coverage", "Finding", "Report"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    message: str
    fqn: str | None = None
    rank: int | None = None
    element: tuple[int, ...] | None = None
    """Index of a concrete element, in global coordinates of the tensor where they are known."""

    def __str__(self) -> str:
        where = [f"{self.fqn!r}"] if self.fqn is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"element {self.element}"] if self.element is not None else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far a verdict on a checkpoint reaches beyond its structure, in bytes of its tensors."""

    total_bytes: int
    read_bytes: int
    """Of these, read: they are there."""
    checked_bytes: int
    """Of these, read and compared with checksums, or with the values of another side: a changed bit would have been
    found."""
    metadata_checked: bool = False
    """Whether names, shapes and plain objects were compared with a checksum, too, and not only with each other."""
    leaves_open: str = ""
    """What the checksums of the format do not say, in words."""

    @property
    def is_full(self) -> bool:
        """Whether a changed bit of any value would have been found."""
        return self.checked_bytes >= self.total_bytes

    def __str__(self) -> str:
        return (
            f"structure{' by checksum' if self.metadata_checked else ''}; of {self.total_bytes} bytes of values "
            f"{self.read_bytes} read, {self.checked_bytes} checked against what they must be"
            + (f"; {self.leaves_open}" if self.leaves_open else "")
        )


@dataclass(frozen=True, slots=True, repr=False)
class Report(Tabled):
    """What `verify` found."""

    subject: str
    """What was judged."""
    findings: tuple[Finding, ...]
    """What is wrong; nothing if it is right."""
    tensors: int
    """How many tensors were judged."""
    covered: Coverage | None = None
    """What a verdict on a checkpoint rests on. None for plans, and where the structure was wrong already."""
    covers: str = ""
    """What a report without findings says, and no more, in words."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong of what `covers` names."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """What was found, in a few words: that it is right, with what that covers, or how many findings there are."""
        if self.findings:
            return f"{len(self.findings)} findings"
        return f"right: {covers}" if (covers := self.covers or str(self.covered or "")) else "right"

    def raise_if_failed(self) -> None:
        """Raises ProofError with all findings, if there are any."""
        if self.findings:
            first = self.findings[0]
            lines = "\n".join(f"  {finding}" for finding in self.findings[:50])
            raise ProofError(
                f"{self.subject} is wrong in {len(self.findings)} places:\n{lines}", fqn=first.fqn, rank=first.rank
            )

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        """One line; `str` has all findings."""
        first = f", the first: {self.findings[0]}" if self.findings else ""
        return f"Report({self.subject!r}, {self.tensors} tensors, {self.verdict}{first})"

    def __str__(self) -> str:
        head = f"{self.subject}: {self.tensors} tensors, {self.verdict}"
        is_told = self.covered is None or not (self.findings or self.covers)
        covered = [] if is_told else [f"  covered: {self.covered}"]
        return "\n".join([head, *covered, *(f"  {finding}" for finding in self.findings)])
