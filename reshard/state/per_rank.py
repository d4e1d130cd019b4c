"""`PerRank`: a value that is each rank's own, kept for each rank, with a stated rule for when their number changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def choose(self, key: str, saved: Mapping[int, Any], rank: int, world_size: int, saved_world_size: int = 0) -> Any:
        """The value of `rank` of `world_size` out of the saved ones, by rank.

        Args:
            saved: values by the rank that saved them, each of which may be read only when it is asked for.
            saved_world_size: how many ranks saved, of which some may have had no such value; 0 if that is not known.

        Raises KeyMismatchError where the numbers differ and nothing says what to do.
        """
        if rank in saved and world_size in (len(saved), saved_world_size):
            return saved[rank]
        if callable(self.on_change):
            return self.on_change(dict(saved), rank, world_size)
        if self.on_change == "keep":
            return saved.get(rank, self.value)
        if self.on_change == "drop":
            return self.value
        of = f" of {saved_world_size}" if saved_world_size > len(saved) else ""
        raise KeyMismatchError(
            f"{key!r} was saved per rank by {len(saved)}{of} ranks, but {world_size} ranks load, of which this is rank "
            f"{rank}: say what to do with PerRank(value, on_change='keep' or 'drop' or a function)"
        )
