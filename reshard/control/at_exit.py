"""What must still be done before the interpreter goes.

Joining a thread at exit comes too late for a save: by then no pool of threads takes work any more, those that the save
needs included. What is registered here runs before they close, by the same private name as the pools' own closing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["await_at_exit", "before_exit", "tell"]

_log = logging.getLogger("reshard")
_running: set[Future[Any]] = set()


def before_exit(call: Callable[[], None]) -> None:
    """Call it when the program has ended and before pools of threads close; the last one registered comes first."""
    threading._register_atexit(call)  # type: ignore[attr-defined]


def await_at_exit(future: Future[Any]) -> None:
    """Should the program end before the future does: wait for it, and tell of its failure."""
    _running.add(future)
    future.add_done_callback(_running.discard)


def tell(future: Future[Any]) -> None:
    """Wait for a future, and log its failure: nobody will ask for it any more."""
    error = future.exception()
    if error is not None:
        _log.error("a save in the background failed, and nobody asked for its result", exc_info=error)


def _await_running() -> None:
    for future in list(_running):
        tell(future)


before_exit(_await_running)
os.register_at_fork(after_in_child=_running.clear)  # the parent waits; here nothing goes on
