"""What the caller of a load may choose: the one owner of what holds where nothing is said."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from reshard.errors import KeyMismatchError

if TYPE_CHECKING:  # imported by loads that map
    from reshard.mapping import Mapping as StateMapping

__all__ = ["DtypePolicy", "LoadOptions", "Mode", "ReadOnce", "Wording"]

Mode = Literal["strict", "subset", "partial"]
"""Which keys only one side may have: none; the checkpoint may have more; both may."""
DtypePolicy = Literal["error", "cast", "saved"]
ReadOnce = Literal["job", "host", "rank"]
"""Among whom no byte is read twice."""

_OWN = frozenset({"mapping", "check", "threads", "memory_budget_bytes", "progress", "wording"})
"""What each rank may choose for itself."""


@dataclass(frozen=True)
class Wording:
    """What a refusal calls what does not fit, and what it advises: callers of other faces have other arguments."""

    missing: str = "missing in the checkpoint"
    mismatched: str = "mismatched"
    allow: str = "strict=False or strict={'some.*': 'partial'} allows missing and unexpected keys, mapping= renames"
    mismatch_error: type[KeyMismatchError] = KeyMismatchError
    """Raised where something is mismatched."""


@dataclass(frozen=True)
class LoadOptions:
    """What the caller of `load` chose; see there for what each means. Raises KeyMismatchError for what is unknown."""

    strict: bool | Mode | Mapping[str, Mode] = True
    dtype_policy: DtypePolicy = "error"
    mapping: Mapping[str, str] | StateMapping | None = None
    dry_run: bool = False
    check: bool = True
    read_once: bool | ReadOnce | None = None
    threads: int | None = None
    memory_budget_bytes: int | None = None
    progress: bool = False
    entry_by_entry: bool = False
    """Match every entry of a dict for itself, as torch.distributed.checkpoint does; else a dict without tensors is
    replaced whole."""
    wording: Wording = Wording()

    def __post_init__(self) -> None:
        _check_choice("dtype_policy", self.dtype_policy, get_args(DtypePolicy))
        if not (isinstance(self.read_once, bool) or self.read_once is None):
            _check_choice("read_once", self.read_once, get_args(ReadOnce))
        if isinstance(self.strict, Mapping):
            for glob, mode in self.strict.items():
                _check_choice(f"strictness of {glob!r}", mode, get_args(Mode))
        elif not isinstance(self.strict, bool) and self.strict not in get_args(Mode):
            modes = ", ".join(map(repr, get_args(Mode)))
            raise KeyMismatchError(
                f"strict must be True, False or a dict of globs to modes, or one of {modes}, got {self.strict!r}"
            )

    def mode_of(self, key: str) -> Mode:
        """How strict the load is about a key: by the first glob that fits it."""
        if isinstance(self.strict, bool):
            return "strict" if self.strict else "partial"
        if isinstance(self.strict, str):
            return self.strict
        return next((mode for glob, mode in self.strict.items() if fnmatch.fnmatchcase(key, glob)), "strict")

    @property
    def once_among(self) -> ReadOnce:
        """`read_once`, with True, None and False by name."""
        if isinstance(self.read_once, bool):
            return "job" if self.read_once else "rank"
        return self.read_once or "host"

    def shared(self) -> dict[str, object]:
        """What all ranks must choose alike."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OWN}


def _check_choice(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise KeyMismatchError(f"{what} must be one of {', '.join(known)}, got {value!r}")
