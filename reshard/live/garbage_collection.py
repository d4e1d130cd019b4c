"""No cyclic garbage collection while many small containers are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection. It would scan all containers repeatedly while more are created,
    which takes longer than everything else for 100,000 tensors. As a decorator, so that the
    function's own are freed when it continues.

    For what ends soon, or makes no circles: whatever runs beside it in the process is not collected
    either. Long work collects only what is young between its parts, by `gc.collect(1)`, as `run_tasks`
    does: what stays is not looked at again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
