"""`PerRank`: a value that is each rank's own, kept for each rank, with a stated rule for when their number changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.errors import KeyMismatchError

__all__ = ["PerRank"]


@dataclass(frozen=True)
class PerRank:
    """Declares that `value` (a random state, a data loader's position) differs from rank to rank.

    Saving keeps every rank's value. Loading gives each rank its own back if as many ranks load as saved. If not,
    `on_change` of the loading side decides.
    """

    value: Any = None
    """A tensor; or plain data, with tensors among it of up to a MiB together. When loading, what is there before."""
    on_change: str | Callable[[dict[int, Any], int, int], Any] = "error"
    """`"error"`; `"keep"`: a rank beyond the saved ones keeps the value it has, others get theirs; `"drop"`: every rank
    keeps the value it has; or a function of (values by saved rank, this rank, world size) that gives the new value."""

    def __post_init__(self) -> None:
        if self.on_change not in ("error", "keep", "drop") and not callable(self.on_change):
            raise KeyMismatchError(f"on_change must be 'error', 'keep', 'drop' or a function, got {self.on_change!r}")

    def choose(self, key: str, saved: dict[int, Any], rank: int, world_size: int) -> Any:
        """The value of `rank` of `world_size` out of the saved ones, by rank.

        Raises KeyMismatchError where the numbers differ and nothing says what to do.
        """
        if callable(self.on_change):
            if len(saved) != world_size or rank not in saved:
                return self.on_change(saved, rank, world_size)
            return saved[rank]
        if len(saved) == world_size and rank in saved:
            return saved[rank]
        if self.on_change == "keep":
            return saved.get(rank, self.value)
        if self.on_change == "drop":
            return self.value
        raise KeyMismatchError(
            f"{key!r} was saved per rank by {len(saved)} ranks, but {world_size} ranks load: say what to do with "
            "PerRank(value, on_change='keep' or 'drop' or a function)"
        )
