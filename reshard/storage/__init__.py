"""Storages: byte ranges in, whole objects out, atomic publishing."""

from reshard.storage.base import AnyPath, Storage, Writer, is_temporary
from reshard.storage.local import LocalStorage
from reshard.storage.memory import MemoryStorage
from reshard.storage.opening import open_storage

__all__ = ["AnyPath", "LocalStorage", "MemoryStorage", "Storage", "Writer", "is_temporary", "open_storage"]
