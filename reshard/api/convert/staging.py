"""Files that are not to be seen before all are done: written beside their place, and moved there at the end.

A local folder has no files that appear whole, so they are written under a temporary name, which `reshard.open`
overlooks. In other storages an object appears only when it is complete, and has its own name at once.
"""

from __future__ import annotations

import os

from reshard.storage.base import Storage, temporary_name
from reshard.storage.local import LocalStorage

__all__ = ["move", "stage_name"]


def stage_name(storage: Storage, name: str, job_id: str) -> str:
    """Where to write `name` first."""
    return temporary_name(name, job_id) if isinstance(storage, LocalStorage) else name


def move(storage: Storage, staged: str, name: str) -> None:
    """Give a staged file its name, over an older file, durably. A second time does nothing."""
    if staged == name or not isinstance(storage, LocalStorage):
        return
    if (storage.root / staged).exists():
        os.replace(storage.root / staged, storage.root / name)
        folder = os.open((storage.root / name).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
