"""`Span`: one timed operation on one rank, and the operations inside it."""

from __future__ import annotations

import msgspec

from planners.units import format_seconds


class Span(msgspec.Struct):
    """One timed operation on this rank, and the operations inside it."""

    name: str
    thread: str
    began_ns: int
    """Nanoseconds since 1970, by the clock of this host."""
    ended_ns: int = 0
    nbytes: int = 0
    """Bytes that it processed. 0 if they are not counted."""
    waits: bool = False
    """True if this rank only waited for other ranks."""
    error: str = ""
    """The class of the exception that ended it; "" if it did not fail."""
    path: str = ""
    """The path of the checkpoint, if the span is a full call."""
    inner: list[Span] = []

    @property
    def seconds(self) -> float:
        """Duration, including work that continues in the background after a call."""
        return (max([self.ended_ns, *(span.ended_ns for span in self.inner)]) - self.began_ns) / 1e9

    def by_phase(self) -> dict[str, float]:
        """Seconds by name of the spans directly inside, without those that only wait."""
        out: dict[str, float] = {}
        for span in self.inner:
            if not span.waits:
                out[span.name] = out.get(span.name, 0.0) + span.seconds
        return out

    def __str__(self) -> str:
        """The seconds by phase, as text."""
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.by_phase().items())
