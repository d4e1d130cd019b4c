"""Object stores as tests use them: in the smallest parts that stores take, so that few bytes make several."""

from __future__ import annotations

from reshard.storage.object_store import ObjectStorage, open_objects

__all__ = ["open_in_small_parts"]


def open_in_small_parts(url: str, *, parallel: int | None = None) -> ObjectStorage:
    """As `open_objects`, which has a store's own retries, but in parts of 5 MiB."""
    storage = open_objects(url)
    return ObjectStorage(
        storage._store, url, part_bytes=5 << 20, parallel=storage.parallel if parallel is None else parallel
    )
