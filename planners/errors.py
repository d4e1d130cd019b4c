"""Errors of the planners. Each has the FQN, the rank, and the box where they are known."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Protocol

__all__ = [
    "BoxLike", "CodecError", "CoverageError", "LayoutMismatchError", "PlanError", "ProofError", "ReshardError",
    "did_you_mean", "near_key", "sentence", "warn_renamed",
]  # fmt: skip


class BoxLike(Protocol):
    """What an error needs to know of a `Box`, which itself raises these errors."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First index in each dim."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent in each dim."""


class ReshardError(Exception):
    """Base class of all exceptions of reshard and of the planners."""


class PlanError(ReshardError, ValueError):
    """A layout or plan is invalid. The message says what was expected, what was found, and where.

    Attributes:
        fqn: the tensor, or None.
        rank: the rank, or None.
        box: the box of the full tensor, or None.
    """

    def __init__(
        self, message: str, *, fqn: str | None = None, rank: int | None = None, box: BoxLike | None = None
    ) -> None:
        where = [f"tensor {fqn!r}"] if fqn is not None else []
        where += [f"rank {rank}"] if rank is not None else []
        where += [f"{box}"] if box is not None else []
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.fqn = fqn
        self.rank = rank
        self.box = box


class CoverageError(PlanError):
    """Some elements have no source, or would be written more than once."""


class LayoutMismatchError(PlanError):
    """The two sides of a plan have different tensors: names, shapes, or dtypes differ."""


class ProofError(PlanError):
    """`Report.raise_if_failed()` was called on a report with problems."""


class CodecError(PlanError):
    """A JSON text is not a plan or layout of a known version, or it was edited."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`": did you mean 'fsdp'?"`, or nothing where no name is near: one with other digits is not."""
    from difflib import get_close_matches

    digits = {*filter(str.isdigit, word)}
    names = [name for name in known if {*filter(str.isdigit, name)} == digits]
    near = get_close_matches(word, names, 9, cutoff) or get_close_matches(word.lower(), names, 1, cutoff)
    parts = {*word.split(".")}  # of an FQN: most of them are right
    near.sort(key=lambda name: -len(parts.intersection(name.split("."))))
    near = near or [name for name in names if name.startswith(f"{word}_")]
    if not near and 1 < len(word) < 4 and word.isalpha():  # an abbreviation, such as hf
        near = [name for name in names if re.match(".*".join(word), name)]
    return f": did you mean {near[0]!r}?" if near else ""


def near_key(key: str, known: Iterable[str]) -> str:
    """Return the known key that was probably meant, or "". Numbers, as of layers, are hardly ever mistyped."""
    from difflib import get_close_matches

    numbers = re.findall(r"\d+", key)
    names = [name for name in known if re.findall(r"\d+", name) == numbers]
    return next(iter(get_close_matches(key, names, 1, 0.75)), "")


def warn_renamed(old: str, new: str) -> None:
    """Where a user writes the old name: two frames above the caller."""
    text = f"{old} is now called {new}; the old name will be removed in a later release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def sentence(text: str) -> str:
    """The text, with a period unless it ends a sentence already, as with a suggestion."""
    return f"{text}{'' if text[-1:] in '?.!' else '.'}"
