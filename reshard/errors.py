"""All exceptions. They also derive from built-in ones. Each message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from planners.errors import (
    CodecError as CodecError,
    CoverageError as CoverageError,
    LayoutMismatchError as LayoutMismatchError,
    PlanError as PlanError,
    ProofError as ProofError,
    ReshardError as ReshardError,
    did_you_mean as did_you_mean,
    near_key as near_key,
    sentence as sentence,
    warn_renamed as warn_renamed,
)

__all__ = [
    "CheckpointError", "CheckpointExistsError", "CheckpointNotFoundError", "CheckpointReplacedError", "CodecError",
    "CorruptCheckpointError", "CoverageError", "DeadlineError", "FormatError", "KeyMismatchError", "LayoutError",
    "LayoutMismatchError", "MissingPackageError", "NewerVersionError", "NormalizationError", "OptionError",
    "PlanError", "ProofError", "RankFailedError", "ReplicaDriftError", "ReshardError", "StorageError",
    "UndefinedTargetsError", "UnsafeDataError", "VerificationError",
]  # fmt: skip


for _kind in (CodecError, CoverageError, LayoutMismatchError, PlanError, ProofError, ReshardError):
    _kind.__module__ = __name__  # from where users import them, as tracebacks show

RESTORE = "restore it, or load another checkpoint"
"""How to fix damage."""


class CheckpointError(ReshardError):
    """A checkpoint cannot be opened, read, or written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the path."""

    __str__ = Exception.__str__


class CheckpointReplacedError(CheckpointError):
    """A later save replaced the checkpoint while it was read, or it was deleted. Load again."""


class FormatError(CheckpointError, ValueError):
    """The files have an unknown format or version, or contradict their format."""


class NewerVersionError(FormatError):
    """A later version of reshard wrote the checkpoint."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Bytes are missing, truncated, or changed. The message names file, bytes, and tensors, if they are known."""

    places: tuple[tuple[str, int, int], ...] = ()
    """Known places of missing or changed bytes: the file, the first byte, and one past the last byte."""


class VerificationError(CorruptCheckpointError, ProofError):
    """`raise_if_failed()` was called on the report of `verify` or `compare`, which found damage."""


class UnsafeDataError(CheckpointError, ValueError):
    """A pickle imports code that is not in the list of allowed types. None of it was run."""


class KeyMismatchError(ReshardError, KeyError, RuntimeError):
    """Names, shapes, or dtypes of checkpoint and target differ. The message lists them."""

    __str__ = Exception.__str__  # KeyError would print the repr of a long, many-line message


class LayoutError(ReshardError, ValueError):
    """A layout is not supported, or ranks disagree about it."""


class OptionError(ReshardError, ValueError):
    """An argument has a value that is not allowed. The message lists the allowed ones."""


def option_error(message: str, was: Any, kind: Any = OptionError) -> Any:
    """Return an error of class `kind` that is also a `was`, the class in earlier releases or in torch."""
    return also(kind, was)(message)


@functools.cache
def also(kind: Any, was: Any) -> Any:
    """Return the class of such errors. Tracebacks show the public name of `kind`."""
    body = {"__module__": __name__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, was), {**body, "__reduce__": lambda e: (option_error, (str(e), was, kind))})


class ReplicaDriftError(KeyMismatchError, ValueError):
    """Ranks have different copies of one tensor, shard, or value. The message names keys and ranks."""


class NormalizationError(ReshardError, ValueError):
    """Names have no canonical name, or a state dict does not match a model or optimizer."""


class StorageError(ReshardError, OSError):
    """Storage failed: no space, no permission, or a lost connection."""

    __str__ = Exception.__str__


class RankFailedError(ReshardError):
    """Another rank failed first. The message is the same on every rank and names that rank and its
    error.

    Attributes:
        rank: the rank whose failure came first.
        traceback: the traceback of that rank, or "" if it is not known.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:  # exceptions are unpickled by position, and these have keywords
        return _revived, (type(self), self.args), self.__dict__


def _revived(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    made = kind.__new__(kind, *args)
    made.args = args
    return made


class UndefinedTargetsError(RankFailedError):
    """A transfer failed midway: targets can have old values, new values, or a mix of both.

    The process group may have pending messages or closed connections: create a new one before the
    next transfer.

    Attributes:
        rank: the rank whose failure came first, or -1 if that is not known.
        targets: keys of the undefined targets, on all ranks.
    """

    def __init__(self, message: str, *, rank: int, targets: tuple[str, ...]) -> None:
        super().__init__(message, rank=rank)
        self.targets = targets


class CheckpointExistsError(StorageError, FileExistsError, FormatError, RuntimeError):
    """There is a checkpoint at the path, and `overwrite` is off."""


class MissingPackageError(CheckpointError, ModuleNotFoundError):
    """An optional package is not installed. The message has the command that installs it."""


class DeadlineError(ReshardError, TimeoutError):
    """A rank did not answer before the timeout."""

    __str__ = Exception.__str__


def format_ranks(ranks: Iterable[int], limit: int = 20) -> str:
    """Return ranks for a message, such as `"rank 3"` or `"ranks 0-2, 7"`. Lists at most `limit` spans."""
    spans: list[tuple[int, int]] = []
    every = sorted(ranks)
    for rank in every:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    if not every:
        return "no rank"
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:limit])
    more = f" and more, {len(every)} in all" if len(spans) > limit else ""
    return f"rank{'s' * (len(every) != 1)} {words}{more}"


def format_value(value: object) -> str:
    """Return a short repr for a message. For dicts, tensors, and values of several lines, return only the class."""
    text, name = f"{value!r:.80}", type(value).__name__
    is_long = isinstance(value, Mapping) or "tensor(" in text or "array(" in text or "\n" in text
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}" if is_long else text


def format_names(names: Collection[object], limit: int = 3) -> str:
    """Return the number of names and the first few: `"5 ('a', 'b', 'c', ...)"`, or `"0"`."""
    first = [repr(name) for name in itertools.islice(names, limit)]
    more = ["..."] if len(names) > limit else []
    return f"{len(names)} ({', '.join([*first, *more])})" if first else "0"


def fix_lines(fixes: Iterable[str]) -> list[str]:
    """Return the last lines of a message: a fix, and alternatives to it."""
    return [f"  {'or: ' if number else 'fix:'} {fix}" for number, fix in enumerate(fixes)]


def visible(text: str) -> str:
    """Return text on one line, with escapes for characters that do not print: names in files must
    not control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# Old names of the public API: each still works, and warns. CHANGELOG.md lists them.


@contextmanager
def framework(requirements: str, where: str = "") -> Iterator[None]:
    """Within this context, a missing optional package raises an error that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        each = requirements.split()
        command = f"pip install {' '.join(map(repr, each))}"
        raise MissingPackageError(f"{where}{error}. Install {' and '.join(each)}: {command}") from error


def renamed_in(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that maps old names to new ones."""

    def of_module(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return of_module


if not TYPE_CHECKING:  # type checkers would accept any attribute
    __getattr__ = renamed_in(__name__, {"DamagedCheckpointError": "CorruptCheckpointError"})
