"""The memory that numpy and Python allocate in a block, by `tracemalloc`, even if it was already tracing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Peak", "peak"]


@dataclass
class Peak:
    """The peak beyond the memory at the start. Known when the block has ended."""

    nbytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Count from here to the end of the block. Afterwards, tracing is as before, however the block ends."""
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
