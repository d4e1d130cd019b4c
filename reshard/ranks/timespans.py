"""`Span`: when something began and ended, on one rank, and what was within it."""

from __future__ import annotations

import msgspec

from planners.units import format_seconds

__all__ = ["Span"]


class Span(msgspec.Struct):
    """When something began and ended, on this rank, and what was within it."""

    name: str
    thread: str
    began_ns: int
    """Since 1970, by the clock of this host."""
    ended_ns: int = 0
    nbytes: int = 0
    """How much was done, where that is counted."""
    waits: bool = False
    """Whether it was spent on hearing from other ranks."""
    error: str = ""
    """The class of what ended it, where it failed."""
    path: str = ""
    """Of the checkpoint, where it is a whole call."""
    inner: list[Span] = []

    @property
    def seconds(self) -> float:
        """How long it took, including what continues in the background after a call."""
        return (max([self.ended_ns, *(span.ended_ns for span in self.inner)]) - self.began_ns) / 1e9

    def by_phase(self) -> dict[str, float]:
        """Seconds of what is directly within it, but for what only waits."""
        out: dict[str, float] = {}
        for span in self.inner:
            if not span.waits:
                out[span.name] = out.get(span.name, 0.0) + span.seconds
        return out

    def __str__(self) -> str:
        """The same, in words."""
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.by_phase().items())
