"""One call of the face: its ranks, and errors as callers of `torch.distributed.checkpoint` catch them.

What is raised is what went wrong here, and a `CheckpointException` besides, whose `failures` holds on every rank the
own error of each rank that failed, of many that of the first ones.
"""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from reshard.control.group import Group
from reshard.errors import CheckpointError, DeadlineError, RankFailedError, ReshardError

__all__ = ["Call"]

_TELL_S = 5.0
"""How long a rank that failed waits for what the others failed with."""

_WHOLE = 16
"""So many ranks' own errors are told to all ranks; of more, that they failed."""

_Heard = tuple[dict[int, bytes], list[tuple[int, int]]]
"""Errors by place in the group, and first and last places of others that failed."""

Failures = dict[int, tuple[BaseException, StackSummary]]


class Call:
    """The ranks of a save or a load. All of them make it, in the same order as other groups."""

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        with _converted(lambda error: {0: _told(error)}):
            self.group = Group.alone() if no_dist else Group(process_group)
            # made beforehand: at the time of a failure, another thread may be making groups
            self._aftermath = Group.alone() if no_dist else Group(process_group, deadline_s=_TELL_S)

    @contextmanager
    def as_torch_raises(self) -> Iterator[Group]:
        """Let every error from within be what it was and a `CheckpointException` besides."""
        with _converted(self._failures):
            yield self.group

    def _failures(self, error: Exception) -> Failures:
        """Collective, where a phase has failed: by place in the group, the error of each rank that failed itself."""
        here, group = _told(error), self.group
        known = group.ranks.index(error.rank) if isinstance(error, RankFailedError) and error.rank >= 0 else group.rank
        if group.raised_alike(error):
            return dict.fromkeys(range(group.world_size), here)
        if not group.failed or isinstance(error, DeadlineError):
            return {known: here}
        mine: dict[int, bytes] = {} if isinstance(error, RankFailedError) else {group.rank: _packed(here)}
        try:
            heard = self._aftermath.merge(msgspec.msgpack.encode((mine, [])), _first_ones, "the errors of all")
        except ReshardError:  # somebody is gone, or far from coming here
            return {known: here}
        errors, others = msgspec.msgpack.decode(heard, type=_Heard)
        found = {place: pickle.loads(data) for place, data in errors.items()}
        for first, last in others:
            found |= {place: _told(_one_of_many(group.ranks[place])) for place in range(first, last + 1)}
        return {**found, **(dict.fromkeys(mine, here))} or {known: here}


def _first_ones(parts: list[bytes]) -> bytes:
    """The errors of the first ranks that failed, and which others did: so what a rank hears does not grow with them."""
    errors: dict[int, bytes] = {}
    others: list[tuple[int, int]] = []
    for part in parts:
        some, more = msgspec.msgpack.decode(part, type=_Heard)
        for place, data in some.items():
            if len(errors) < _WHOLE:
                errors[place] = data
            else:
                more.append((place, place))
        for first, last in sorted(more):
            if others and others[-1][1] + 1 == first:
                first = others.pop()[0]
            others.append((first, last))
    return msgspec.msgpack.encode((errors, others))


def _one_of_many(rank: int) -> CheckpointError:
    return CheckpointError(f"rank {rank} failed, too: of so many only the errors of the first {_WHOLE} travel")


@contextmanager
def _converted(failures: Any) -> Iterator[None]:
    try:
        yield
    except CheckpointException:
        raise
    except Exception as error:
        raise _both(error, failures(error)) from error


def _told(error: Exception) -> tuple[BaseException, StackSummary]:
    """An error and where it was raised, without what would not travel."""
    frames = traceback.extract_tb(error.__traceback__)
    return error, StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in frames])


def _packed(failure: tuple[BaseException, StackSummary]) -> bytes:
    """For the other processes of this job."""
    try:
        data = pickle.dumps(failure)
        pickle.loads(data)
    except Exception:  # whatever its class does when it is pickled
        error, trace = failure
        data = pickle.dumps((CheckpointError(f"{type(error).__name__}: {error}"), trace))
    return data


def _both(error: Exception, failures: Failures) -> Exception:
    """`error` as an instance of a class that is its own and torch's."""
    kind = _class_of(type(error))  # type: ignore[arg-type]  # classes are hashable, whatever their instances are
    made = kind.__new__(kind, *error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    if isinstance(error, OSError) and isinstance(made, OSError):  # it is in neither
        made.filename, made.filename2 = error.filename, error.filename2
    made.__dict__.update(_original=error, _failures=failures)
    return made


@functools.cache
def _class_of(kind: type[Exception]) -> type[Exception]:
    members: dict[str, Any] = {
        "__str__": _text,
        "__reduce__": lambda self: (_both, (self._original, self._failures)),  # travels as what it was made of
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, CheckpointException), members)


def _text(error: Any) -> str:
    """What the error itself says, and what other ranks failed with."""
    known = str(error._original)
    others = [
        f"rank {place} failed, too: {type(other).__name__}: {other}"
        for place, (other, _) in error._failures.items()
        if other is not error._original and str(other) not in known
    ]
    return "\n".join([known, *others])
