"""Saves in the background: each on a thread of its own, awaited at exit, and told of where nobody asks for its result.

Joining a thread at exit comes too late for a save: by then no pool of threads takes work any more, those that the save
needs included. So what still runs is awaited before they close, by the same private name as the pools' own closing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["await_place", "ended_for", "forget", "start"]

T = TypeVar("T")

_log = logging.getLogger("reshard")
_saves: dict[Future[Any], str | None] = {}
"""The oldest first, and where each goes. Those without a place count no longer than they run; the others until somebody
has asked for their result: an error must not be lost."""


def start(save: Callable[[], T], name: str, place: str | None = None) -> Future[T]:
    """Run `save` on a thread of this name; the future has what it returns or raises.

    Args:
        place: where it writes, for `await_place` and `ended_for`; None: the caller's future is all that is known of it.

    Raises RuntimeError if the system allows no more threads.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(save())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    _saves[future] = place
    if place is None:
        future.add_done_callback(forget)
    return future


def forget(future: Future[Any]) -> None:
    """Somebody knows how it ended: nobody else need be told."""
    _saves.pop(future, None)


def await_place(place: str) -> None:
    """Wait for the saves to the same place: if one took longer, it would take the place of a later one."""
    wait([future for future, where in list(_saves.items()) if where == place])


def ended_for(max_in_flight: int) -> list[Future[Any]]:
    """Wait until one more save may go on; those that have ended, and of which nobody knows yet how."""
    counted = [future for future, place in list(_saves.items()) if place is not None]
    while sum(not future.done() for future in counted) >= max_in_flight:
        wait([next(future for future in counted if not future.done())])
    ended = [future for future in counted if future.done()]
    for future in ended:
        forget(future)
    return ended


def _await_all() -> None:
    for future in list(_saves):
        error = future.exception()
        if error is not None:
            _log.error("a save in the background failed, and nobody asked for its result", exc_info=error)


threading._register_atexit(_await_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_saves.clear)  # the threads that save are the parent's
