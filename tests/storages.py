"""A folder as an object store would give it. A storage that fails on command is in `tests/faulty.py`."""

from __future__ import annotations

import os
import threading

from reshard.storage import LocalStorage, Storage

__all__ = ["Remote"]


class Remote(LocalStorage):
    """A folder whose files are read by ranges alone, with no view of their bytes; remembers the ranges."""

    def __init__(self, root: str | os.PathLike[str], *, max_gap_bytes: int = 1 << 20, requests: int = 8) -> None:
        super().__init__(root)
        self.max_gap_bytes = max_gap_bytes
        self.requests = requests
        self.ranges: list[tuple[str, int, int]] = []
        """Name, start and length of all that was read, in bytes."""
        self._counting = threading.Lock()

    def mapped(self, name: str) -> None:
        return None

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return Storage.read(self, name, start, length)  # by `read_into`, so that it is counted

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        with self._counting:
            self.ranges.append((name, start, buffer.nbytes))
        super().read_into(name, start, buffer)

    @property
    def nbytes_read(self) -> int:
        """The lengths of all ranges together."""
        return sum(nbytes for _, _, nbytes in self.ranges)

    def nbytes_of(self, suffix: str) -> int:
        """Those of the files whose names end so."""
        return sum(nbytes for name, _, nbytes in self.ranges if name.endswith(suffix))

    @property
    def largest(self) -> int:
        """The length of the longest range."""
        return max((nbytes for _, _, nbytes in self.ranges), default=0)
