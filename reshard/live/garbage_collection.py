"""Pauses cyclic garbage collection while many small containers are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection. It would repeatedly scan all containers while more are created,
    which takes longer than everything else for 100,000 tensors. Use it as a decorator, so that the
    function's own containers are freed when collection continues.

    Use it only for work that ends soon, or creates no reference cycles, because nothing else in the
    process is collected meanwhile. Long work, such as `run_tasks`, calls `gc.collect(1)` between
    its parts, which does not scan older objects again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
