"""The memory that numpy and Python take in a block, as `tracemalloc` counts it, whatever traced before."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Peak", "peak"]


@dataclass
class Peak:
    """The most that there was at once, beyond what there was at the start; known when the block has ended."""

    nbytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Count from here to the end of the block. Tracing is as it was afterwards, however the block ends."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, found = tracemalloc.get_traced_memory()[0], Peak()
    try:
        yield found
    finally:
        found.nbytes = tracemalloc.get_traced_memory()[1] - before
        if not was_tracing:
            tracemalloc.stop()
