"""A folder that behaves like an object store. A storage that fails on command is in `tests/faulty.py`."""

from __future__ import annotations

import os
import threading

from reshard.storage import LocalStorage, Storage

__all__ = ["Remote"]


class Remote(LocalStorage):
    """A folder whose files can only be read by ranges, without views of their bytes. It records the ranges."""

    def __init__(self, root: str | os.PathLike[str], *, max_gap_bytes: int = 1 << 20, requests: int = 8) -> None:
        super().__init__(root)
        self.max_gap_bytes = max_gap_bytes
        self.requests = requests
        self.ranges: list[tuple[str, int, int]] = []
        """Name, start, and length in bytes of all reads."""
        self._counting = threading.Lock()

    def mapped(self, name: str) -> None:
        return None

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return Storage.read(self, name, start, length)  # calls `read_into`, so that it is counted

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        with self._counting:
            self.ranges.append((name, start, buffer.nbytes))
        super().read_into(name, start, buffer)

    @property
    def nbytes_read(self) -> int:
        """Return the total length of all ranges."""
        return sum(nbytes for _, _, nbytes in self.ranges)

    def nbytes_of(self, suffix: str) -> int:
        """Return the total length of the ranges in files with this suffix."""
        return sum(nbytes for name, _, nbytes in self.ranges if name.endswith(suffix))

    @property
    def largest(self) -> int:
        """Return the length of the longest range."""
        return max((nbytes for _, _, nbytes in self.ranges), default=0)
