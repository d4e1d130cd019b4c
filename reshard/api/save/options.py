"""What the caller of a save may choose: the one owner of what holds where nothing is said."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from planners.save.plan import DIVIDE_ABOVE_BYTES
from reshard.errors import CheckpointError
from reshard.formats.native.data_file import STAGE_BYTES

__all__ = ["SaveOptions"]

_OWN = frozenset({"memory_budget_bytes", "progress"})
"""What each rank may choose for itself."""


@dataclass(frozen=True)
class SaveOptions:
    """What the caller of `save` chose; see there for what each means. Raises CheckpointError for what cannot be."""

    select: Iterable[str] | None = None
    check_replicas: bool = True
    fingerprints: bool = True
    divide_above_bytes: int = DIVIDE_ABOVE_BYTES
    memory_budget_bytes: int = STAGE_BYTES
    progress: bool = False
    overwrite: bool = True
    base: str | os.PathLike[str] | None = None
    ranks_per_file: int = 1

    def __post_init__(self) -> None:
        for name in ("memory_budget_bytes", "divide_above_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name} must be a number of bytes >= 1, got {value!r}")
        if type(self.ranks_per_file) is not int or self.ranks_per_file < 1:
            raise CheckpointError(f"ranks_per_file must be a number of ranks >= 1, got {self.ranks_per_file!r}")
        if self.ranks_per_file > 1 and self.base is not None:
            raise CheckpointError(
                "a save with a base keeps digests and tables of each rank's own file: leave ranks_per_file or base out"
            )
        if isinstance(self.select, str):
            raise CheckpointError(f"select must be a list of globs, got the text {self.select!r}")
        if self.select is not None and not isinstance(self.select, Iterable):
            raise CheckpointError(f"select must be a list of globs, got {self.select!r}")
        if self.select is not None:
            object.__setattr__(self, "select", tuple(self.select))
        if odd := [glob for glob in self.select or () if not isinstance(glob, str)]:
            raise CheckpointError(f"select must be a list of globs, which are text, but has {odd[0]!r}")
        if self.base is not None and not isinstance(self.base, str | os.PathLike):
            raise CheckpointError(f'base must be "auto" or the path of a checkpoint, got {self.base!r}')
        if self.select == ():
            raise CheckpointError("select is empty: nothing would be saved; leave it out to save everything")

    @property
    def globs(self) -> tuple[str, ...] | None:
        """`select`, None for everything."""
        return None if self.select is None else tuple(self.select)

    def shared(self) -> dict[str, object]:
        """What all ranks must choose alike."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OWN}
