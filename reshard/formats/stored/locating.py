"""Locates many chunks before they are read: one small request each, several at a time where requests take long."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from reshard.formats.stored.contents import StoredChunk

__all__ = ["locate_all"]


def locate_all(chunks: Iterable[StoredChunk], *, threads: int = 32) -> None:
    """Find the places of all chunks that are not located yet and hold an element.

    One after the other where the files are mapped into memory, and `threads` at a time where each is a request.

    Raises what `StoredChunk.place` raises, for the first chunk in order that cannot be located.
    """
    pending = [chunk for chunk in chunks if not chunk.is_located and not chunk.box.is_empty]
    if not pending:
        return
    if pending[0].source.view() is not None or len(pending) == 1:
        for chunk in pending:
            _ = chunk.place
        return
    with ThreadPoolExecutor(min(threads, len(pending)), thread_name_prefix="reshard-locate") as pool:
        for _ in pool.map(lambda chunk: chunk.place, pending[1:]):
            pass
