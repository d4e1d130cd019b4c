"""Saves in the background: each runs on its own thread, and the process waits for all at exit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from reshard.errors import ReshardError
from reshard.ranks.progress import rest_of_call
from reshard.storage.opening import open_storage, place_of

T = TypeVar("T")

_log = logging.getLogger("reshard")

saves: dict[Future[Any], tuple[str | None, Set[Any]]] = {}
"""Saves, the oldest first, with their paths and what they use. One without a path is listed only
while it runs. Others stay until a caller has asked for the result, so that no error is lost."""


def start_in_background(
    save: Callable[[], T], name: str, place: str | None = None, uses: Set[Any] = frozenset()
) -> Future[T]:
    """Run `save` on a thread of this name. The future gets its result or error.

    Args:
        place: where it writes, for later saves and `ended_for`; None: the caller's future is all that is known of it.
        uses: what `await_saves` returned. Later saves that use any of it wait.

    Raises RuntimeError if the system allows no more threads.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            with rest_of_call():
                result = save()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    thread = threading.Thread(target=copy_context().run, args=(run,), name=name)  # within the current phase
    saves[future] = place, uses  # before it starts: KeyboardInterrupt may end the wait for that
    if place is None:
        future.add_done_callback(forget_background_save)
    try:
        thread.start()
    except RuntimeError:
        forget_background_save(future)
        raise
    return future


def forget_background_save(future: Future[Any]) -> None:
    """Note that a caller knows the result, so that it need not be reported again."""
    saves.pop(future, None)


def await_saves(path: Any, *shared: Any) -> Set[Any]:
    """Wait for saves to the same place, or with some of the same objects, without raising their
    errors: if one took longer, it would replace a later one. Return the place and the ids of the
    objects."""
    try:
        place = place_of(open_storage(path))
    except ReshardError:  # the save itself will say so, to all ranks
        place = str(path)
    uses = {place, *(id(one) for one in shared if one is not None)}
    for future in [future for future, (_, used) in list(saves.items()) if uses & used]:
        future.exception()
    return uses


def ended_for(max_in_flight: int) -> list[Future[Any]]:
    """Wait until one more save may start. Return the saves that have ended and whose result no
    caller knows."""
    known = [future for future, (place, _) in list(saves.items()) if place is not None]
    while len(running := [future for future in known if not future.done()]) >= max_in_flight:
        running[0].exception()
    return [future for future in known if future.done()]


def _await_all() -> None:
    for future in list(saves):
        error = future.exception()
        if error is not None:
            _log.error("a save in the background failed, and its result() was not called", exc_info=error)


# Joining a thread at exit is too late: the thread pools that a save needs accept no
# work then. So saves are awaited before, by the same private name as the pools' own
# closing.
threading._register_atexit(_await_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=saves.clear)  # the threads that save are the parent's
