"""The result of `verify`: a report of problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

from planners.errors import ProofError
from planners.notebooks import Tabled
from planners.units import format_bytes, format_count, format_some

__all__ = ["Coverage", "Finding", "Report", "in_groups"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that `verify` found."""

    message: str
    fqn: str | None = None
    rank: int | None = None
    element: tuple[int, ...] | None = None
    """Index of one affected element. It refers to the full tensor, if that is known."""
    kind: Literal["wrong", "one-sided", "unchecked"] = "wrong"
    """`one-sided`: only one of two sides has the name. `unchecked`: the tensor was not read or
    not compared."""

    def __str__(self) -> str:
        where = [f"{self.fqn!r}"] if self.fqn is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"element {self.element}"] if self.element is not None else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


_MOST_LISTED = 3
"""Most names with one prefix that `in_groups` lists one by one."""


_LOST = re.compile(
    r"(?:chunk Box\[.*?\]: )?(there is no .*|(?!was not read).* (?:has \d+ of its \d+ bytes|is missing): .*?"
    r"|.* was changed since it was written.*?)(?:\. (?:Tensors there:|This tensor has bytes) .*)?"
)


def in_groups(findings: Iterable[Finding]) -> list[str]:
    """The findings as text.

    Equal ones of many names are one: `"optim.state.*: 52 names, such as 'x': only in a"`.
    So are a missing file and a changed block, whatever was in them.
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for it in findings:
        lost = _LOST.fullmatch(it.message)
        cause = ("", lost[1]) if lost else (_front(it.fqn), it.message)
        groups.setdefault((*cause, it.rank, it.element), []).append(it)
    texts: list[str] = []
    for (front, message, *_), its in groups.items():
        if len(its) <= (_MOST_LISTED if front else 1):
            texts += map(str, its)
        else:
            whole = f"{next((it.message for it in its if it.message.startswith(str(message))), message)}"
            its = [it for it in its if it.fqn is not None] or its
            one = f"{front}: {len(its)} names, such as {its[0].fqn!r}"
            some = f"{format_count(len(its), 'name')} ({format_some([repr(it.fqn) for it in its], _MOST_LISTED)})"
            texts.append(f"{one if front else some}: {re.sub('^was ', 'were ', whole).partition('. This tensor')[0]}")
    return texts


def _front(name: str | None) -> str:
    """The beginning of a name as a glob: at most two segments, and no numbers."""
    segments = takewhile(lambda segment: not segment.isdecimal(), (name or "").split(".")[:-1])
    return ".".join([*islice(segments, 2), "*"])


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a checkpoint `verify` read and compared."""

    total_bytes: int
    """Size of the tensors."""
    read_bytes: int
    """Bytes of the tensors that were read, and so exist."""
    checked_bytes: int
    """Bytes of the tensors that were compared with checksums, or with the values of another
    checkpoint. `verify` would have found a changed bit in them."""
    metadata_checked: bool = False
    """True if a checksum covers names, shapes, and plain objects. False if they were only
    compared with each other."""
    unchecked: str = ""
    """What the checksums of the format do not cover, in words."""

    @property
    def is_full(self) -> bool:
        """True if a changed bit of any value would have been found."""
        return self.checked_bytes >= self.total_bytes

    def __str__(self) -> str:
        total, read, checked = map(format_bytes, (self.total_bytes, self.read_bytes, self.checked_bytes))
        return (
            f"metadata {'verified by checksum' if self.metadata_checked else 'consistent'}; values: {total} in all, "
            f"{read} read, {checked} verified{f'; {self.unchecked}' * bool(self.unchecked)}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Report(Tabled):
    """The result of `verify`."""

    subject: str
    """What was verified."""
    findings: tuple[Finding, ...]
    """The problems; empty if there are none."""
    tensors: int
    """Number of tensors that were verified."""
    covered: Coverage | None = None
    """How much of a checkpoint was read and compared. None for plans and for damaged
    checkpoints."""
    covers: str = ""
    """What was verified, in words, if there are no problems."""
    hint: str = ""
    """A possible cause of the problems."""

    @property
    def _problem(self) -> str:
        """What one of `findings` is called."""
        return "problem"

    @property
    def _error(self) -> type[ProofError]:
        """What `raise_if_failed` raises."""
        return ProofError

    @property
    def ok(self) -> bool:
        """True if there are no problems. `covers` says what was verified."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """The result in a few words: what was verified, or the number of problems."""
        if self.findings:
            return format_count(len(self.findings), self._problem)
        return f"ok: {covers}" if (covers := self.covers or str(self.covered or "")) else "ok"

    def raise_if_failed(self) -> None:
        """Raise ProofError with the problems, if there are any. For a damaged checkpoint, the error is also a
        `reshard.errors.CorruptCheckpointError`."""
        if self.findings:
            first = self.findings[0]
            lines = "\n".join(islice(self._lines(), 50))
            error = self._error(f"{self.subject}: {self.verdict}:\n{lines}")
            error.fqn, error.rank = first.fqn, first.rank  # which the lines name
            try:
                raise error
            finally:
                del error

    def _lines(self) -> Iterator[str]:
        yield from (f"  {line}" for line in (*filter(None, [self.hint]), *self.findings))

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        """One line; `str` has all problems."""
        first = f", the first: {self.findings[0]}" if self.findings else ""
        return f"Report({self.subject!r}, {format_count(self.tensors, 'tensor')}, {self.verdict}{first})"

    def __str__(self) -> str:
        covered = [f"  covered: {self.covers or self.covered}"] if self.covered and self.findings else []
        return "\n".join(
            [
                f"{self.subject}: {format_count(self.tensors, 'tensor')}, {self.verdict}",
                *covered,
                *self._lines(),
            ]
        )
