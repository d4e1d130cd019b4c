"""Errors as callers of `torch.distributed.checkpoint` catch them: also a `CheckpointException`, with `failures`."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from reshard.errors import RankFailedError

__all__ = ["also_as_torch_raises"]


@contextmanager
def also_as_torch_raises() -> Iterator[None]:
    """Let every error from within be what it was and a `CheckpointException` besides, with the same message."""
    try:
        yield
    except CheckpointException:
        raise
    except Exception as error:
        raise _both(error, error.rank if isinstance(error, RankFailedError) else None) from error


def _both(error: Exception, rank: int | None) -> Exception:
    """`error` as an instance of a class that is its own and torch's.

    `failures` has the rank that failed first, with its error if that was here, else with what is known of it.
    """
    kind = _class_of(type(error))  # type: ignore[arg-type]  # classes are hashable, whatever their instances are
    made = kind.__new__(kind, *error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    if isinstance(error, OSError) and isinstance(made, OSError):  # it is in neither
        made.filename, made.filename2 = error.filename, error.filename2
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    trace = traceback.extract_tb(error.__traceback__)
    made.__dict__["_failures"] = {here if rank is None else rank: (error, trace)}
    return made


@functools.cache
def _class_of(kind: type[Exception]) -> type[Exception]:
    members: dict[str, Any] = {
        "__str__": lambda self: str(_original(self)),
        "__reduce__": _reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, CheckpointException), members)


def _original(self: Any) -> Exception:
    ((error, _),) = self._failures.values()
    found: Exception = error
    return found


def _reduce(self: Any) -> tuple[Any, ...]:
    """Travels as the error that it was made of."""
    return _both, (_original(self), *self._failures)
