"""What the planners refuse. Every error keeps the FQN, the rank and the box where they are known."""

from __future__ import annotations

from typing import Protocol

__all__ = [
    "BoxLike", "CodecError", "CoverageError", "LayoutMismatchError", "PlanError", "ProofError",
]  # fmt: skip


class BoxLike(Protocol):
    """What an error needs to know of a `Box`, which itself raises these errors."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First index in each dim."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent in each dim."""


class PlanError(ValueError):
    """A layout or plan that cannot be: says what was wanted, what was found, and where.

    Attributes:
        fqn: the tensor concerned, or None.
        rank: the rank concerned, or None.
        box: the region concerned, in the tensor's global coordinates, or None.
    """

    def __init__(
        self, message: str, *, fqn: str | None = None, rank: int | None = None, box: BoxLike | None = None
    ) -> None:
        where = [f"tensor {fqn!r}"] if fqn is not None else []
        where += [f"rank {rank}"] if rank is not None else []
        where += [f"region {box}"] if box is not None else []
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.fqn = fqn
        self.rank = rank
        self.box = box


class CoverageError(PlanError):
    """Some elements have no source, or would be written more than once."""


class LayoutMismatchError(PlanError):
    """The two sides of a plan do not describe the same tensors: names, shapes or dtypes differ."""


class ProofError(PlanError):
    """`Report.raise_if_failed()` on a plan that is not right."""


class CodecError(PlanError):
    """A JSON text that is no plan or layout of a version known here, or that was edited."""
