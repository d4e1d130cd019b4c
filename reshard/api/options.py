"""The options of loads, saves, and transfers: their defaults, what is allowed, and which must be equal on all ranks."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from planners.plans.save import DIVIDE_ABOVE_BYTES
from reshard.arguments import check_options, globs_of
from reshard.errors import KeyMismatchError, LayoutError, OptionError, did_you_mean, format_value, option_error
from reshard.native.manifest import STAGE_BYTES
from reshard.ranks.group import DEADLINE_S
from reshard.stored.checksums import CheckTime

if TYPE_CHECKING:  # imported by calls that map, or transfer
    from planners.geometry.layout import TensorLayout
    from planners.geometry.views import View
    from reshard.mapping import Mapping as StateMapping

Mode = Literal["strict", "subset", "partial"]
"""Which keys may be on one side only: none, those of the checkpoint, or those of either side."""
DtypePolicy = Literal["error", "cast", "saved"]
ReadOnce = Literal["job", "host", "rank"]
"""Which ranks share reads, so that no byte is read twice."""
_OWN = frozenset({"mapping", "check", "threads", "memory_budget_bytes", "progress", "wording"})
"""The options that each rank may choose for itself."""


RENAMES = "mapping= renames keys"


@dataclass(frozen=True)
class Wording:
    """The wording and fixes of errors about mismatches, which depend on the API that was called."""

    missing: str = "missing from the checkpoint"
    mismatched: str = "mismatched"
    allow: str = (
        f"{RENAMES}\n"
        "strict={'some.*': 'partial'} allows these keys to be missing or unexpected; missing ones keep their values\n"
        "strict=False allows this for all keys"
    )
    """Advice for missing keys, one piece on each line, with `'some.*'` as placeholder."""
    mismatch_error: type[KeyMismatchError] = KeyMismatchError
    """The error class for mismatches."""
    ignore: str = f'strict="subset" ignores what only the checkpoint has; {RENAMES}'
    """Advice if no key is missing."""


class _SharedOptions:
    """Options of a collective call."""

    def shared(self) -> dict[str, object]:
        """The options that must be equal on all ranks."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}


@dataclass(frozen=True)
class LoadOptions(_SharedOptions):
    """The options of `load`: see there. Raises OptionError for values that are not allowed."""

    strict: bool | Mode | Mapping[str, Mode] = True
    dtype_policy: DtypePolicy = "error"
    mapping: Mapping[str, str] | StateMapping | None = None
    dry_run: bool = False
    check: bool | CheckTime = True
    read_once: bool | ReadOnce | None = None
    threads: int | None = None
    memory_budget_bytes: int | None = None
    progress: bool = False
    entry_by_entry: bool = False
    """Match every entry of a dict by itself, as torch.distributed.checkpoint does. False: a dict
    without tensors is replaced as one value."""
    wording: Wording = Wording()

    def __post_init__(self) -> None:
        _check_choice("dtype_policy", self.dtype_policy, get_args(DtypePolicy))
        numbers = {"threads": self.threads, "memory_budget_bytes": self.memory_budget_bytes}
        given = {name: value for name, value in numbers.items() if value is not None}
        check_options(dry_run=self.dry_run, progress=self.progress, mapping=self.mapping, **given)
        if not isinstance(self.check, bool):
            _check_choice("check", self.check, get_args(CheckTime), ", True, False")
        if isinstance(self.read_once, bool) or self.read_once is None:
            object.__setattr__(self, "read_once", {True: "job", False: "rank", None: "host"}[self.read_once])
        _check_choice("read_once", self.read_once, get_args(ReadOnce))
        if isinstance(self.strict, Mapping):
            for glob, mode in self.strict.items():
                _check_choice(f"strict[{glob!r}]", mode, get_args(Mode))
        elif not isinstance(self.strict, bool):
            _check_choice(
                "strict",
                self.strict,
                get_args(Mode),
                ", True, False (like 'partial'), or a dict from globs to these words",
            )

    def mode_of(self, key: str) -> Mode:
        """Return how strict the load is about a key: by the first glob that matches it."""
        if isinstance(self.strict, bool):
            return "strict" if self.strict else "partial"
        if isinstance(self.strict, str):
            return self.strict
        return next((mode for glob, mode in self.strict.items() if fnmatch.fnmatchcase(key, glob)), "strict")

    def strict_also(self, modes: dict[str, Mode], unexpected: Collection[str]) -> dict[str, Mode]:
        """Return a `strict` that begins with these modes and also allows these unexpected keys."""
        given = self.strict if isinstance(self.strict, Mapping) else {"*": self.mode_of("*")}
        kept = dict[str, Mode]()
        for glob, mode in given.items():
            if glob not in modes and (glob, mode) != ("*", "strict"):
                refuses = mode == "strict" and any(fnmatch.fnmatchcase(key, glob) for key in unexpected)
                kept[glob] = "subset" if refuses else mode
        return {**modes, **kept, **({"*": "subset"} if unexpected and "*" not in kept else {})}

    def ignoring(self, unexpected: Collection[str]) -> str:
        """Return the advice if no key is missing."""
        strict = self.strict_also({}, unexpected)
        return self.wording.ignore.replace('"subset"', repr(strict) if len(strict) > 1 else '"subset"')

    def idle_globs(self, keys: Collection[str]) -> list[str]:
        """Return the globs of `strict` that match no key."""
        globs = self.strict if isinstance(self.strict, Mapping) else ()
        return [glob for glob in globs if not any(fnmatch.fnmatchcase(key, glob) for key in keys)]


def _check_choice(what: str, value: object, known: tuple[str, ...], others: str = "") -> None:
    if value not in known:
        meant = did_you_mean(value, known) if isinstance(value, str) and not value.startswith("no") else ""
        raise OptionError(
            f"{what} must be one of {', '.join(map(repr, known))}{others}; got {format_value(value)}{meant}"
        )


class SaveKeywords(TypedDict, total=False):
    """The keyword arguments of `save` and `async_save`, for type checkers."""

    select: str | Iterable[str] | None
    check_replicas: bool
    fingerprints: bool
    divide_above_bytes: int
    memory_budget_bytes: int
    progress: bool
    overwrite: bool
    base: str | os.PathLike[str] | None
    ranks_per_file: int


@dataclass(frozen=True)
class SaveOptions(_SharedOptions):
    """The options of `save`: see there. Raises OptionError for values that are not allowed."""

    select: str | Iterable[str] | None = None
    check_replicas: bool = True
    fingerprints: bool = True
    divide_above_bytes: int = DIVIDE_ABOVE_BYTES
    memory_budget_bytes: int = STAGE_BYTES
    progress: bool = False
    overwrite: bool = True
    base: str | os.PathLike[str] | None = None
    ranks_per_file: int = 1

    def __post_init__(self) -> None:
        check_options(**{name: value for name, value in vars(self).items() if name not in ("select", "base")})
        if self.ranks_per_file > 1 and self.base is not None:
            raise OptionError("ranks_per_file and base cannot be combined: leave one of them out")
        if self.select is not None:
            object.__setattr__(self, "select", globs_of(self.select))
        if self.base is not None and not isinstance(self.base, str | os.PathLike):
            raise OptionError(f'base must be "auto" or the path of a checkpoint, got {format_value(self.base)}')

    @property
    def globs(self) -> tuple[str, ...] | None:
        """Return `select`. None for everything."""
        return None if self.select is None else tuple(self.select)


class TransferOptions(TypedDict, total=False):
    """The keyword arguments of `prepare`, `redistribute`, and `verify_live`. The same on every
    rank, except for layouts."""

    mapping: Mapping[str, str] | StateMapping
    views: Iterable[View]
    source_layouts: Mapping[str, TensorLayout]
    target_layouts: Mapping[str, TensorLayout]
    strict: bool
    dtype_policy: str
    check_replicas: bool
    max_inflight_bytes: int
    ranks_per_host: int | None
    delta: bool
    timeout: float | timedelta


DEFAULTS = TransferOptions(
    mapping={},
    views=(),
    source_layouts={},
    target_layouts={},
    strict=True,
    dtype_policy="error",
    check_replicas=True,
    max_inflight_bytes=256 << 20,
    ranks_per_host=None,
    delta=False,
    timeout=DEADLINE_S,
)
"""The defaults."""
_TRANSFER_OWN = ("views", "source_layouts", "target_layouts", "timeout")
"""Options that may differ between ranks, or that are compared in another form."""


def complete(given: TransferOptions) -> TransferOptions:
    """Return all options. Raises TypeError for an unknown one, OptionError for an unknown policy or
    a budget that is too small, LayoutError for two views of one name."""
    if unknown := given.keys() - DEFAULTS.keys():
        name = min(unknown)
        meant = did_you_mean(name, DEFAULTS) or f": its options are {', '.join(DEFAULTS)}"
        raise TypeError(f"a transfer got an unexpected keyword argument {name!r}{meant}")
    options: TransferOptions = {**DEFAULTS, **given}
    names = ("strict", "check_replicas", "delta", "mapping", "views", "max_inflight_bytes", "ranks_per_host")
    check_options(**{name: value for name, value in options.items() if name in names and value is not None})
    options["views"] = views = list(options["views"])
    if options["dtype_policy"] not in ("error", "cast"):
        raise OptionError(f"dtype_policy must be 'error' or 'cast', got {format_value(options['dtype_policy'])}")
    if options["max_inflight_bytes"] < 1024:
        words = f"max_inflight_bytes must be at least 1024, got {options['max_inflight_bytes']}"
        raise option_error(words, LayoutError)
    if len({view.spec.fqn for view in views}) != len(views):
        raise LayoutError("two views create the same target: pass one view per target")
    return options


def shared(options: TransferOptions) -> dict[str, object]:
    """The options that must be equal on all ranks."""
    from reshard.mapping import Mapping as StateMapping

    mapping = options["mapping"] if isinstance(options["mapping"], StateMapping) else sorted(options["mapping"].items())
    views = sorted((view.spec.fqn, view) for view in options["views"])
    rest = {name: value for name, value in options.items() if name not in _TRANSFER_OWN}
    return {**rest, "mapping": mapping, "views": views}


def digest_of(options: TransferOptions) -> str:
    """Return a digest that is equal if all options are equal that must be equal on all ranks."""
    return hashlib.sha256(repr(shared(options)).encode()).hexdigest()
