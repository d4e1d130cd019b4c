"""Opens a storage from a path or URL."""

from __future__ import annotations

import os
import re
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from reshard.errors import StorageError, did_you_mean, option_error
from reshard.storage.base import AnyPath, Storage
from reshard.storage.local import LocalStorage
from reshard.storage.memory import MemoryStorage

StoragePath: TypeAlias = AnyPath | Storage
"""A path, a URL, or an open storage."""
_OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")

_shared_memory = MemoryStorage()


def open_storage(path: StoragePath) -> Storage:
    """Return the storage for a path or URL. Returns a `Storage` unchanged. Does not access the
    storage yet.

    Args:
        path: a local folder, "file:///folder", "memory://folder" (in this process), or a bucket and
            folder: "s3://bucket/folder", "gs://...", "az://...", which require the package obstore.

    Raises:
        OptionError: `path` is not a path.
        StorageError: unknown scheme, or a URL without a folder.
    """
    if isinstance(path, Storage):
        return path
    text = path_text(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if re.match(rf"({'|'.join(_OBJECT_STORES)}|file|memory):/", text):  # pathlib removes a slash
            raise StorageError(f"{text} has one slash after its scheme: pass the URL as a string, with two")
        if text.startswith("~/") or os.path.expanduser(text) != text:
            raise StorageError(f"{text} begins with ~, which only shells expand: pass os.path.expanduser({text!r})")
        return LocalStorage(text)
    if scheme in ("file", *_OBJECT_STORES) and ("#" in rest or "?" in rest):
        raise StorageError(f"in the URL {text} a '#' or '?' ends the path: write %23 for '#' and %3F for '?'")
    if scheme == "file":
        url = urlsplit(text)
        if url.netloc not in ("", "localhost") or not url.path:
            raise StorageError(f"{text} names no local folder: write file:///folder, with three slashes")
        return LocalStorage(unquote(url.path, errors="surrogateescape"))
    if scheme == "memory":
        return MemoryStorage("/".join(filter(None, rest.split("/"))), within=_shared_memory)
    if scheme in _OBJECT_STORES:
        from reshard.storage.object_store import open_objects  # obstore is optional, and slow to import

        return open_objects(text)
    hub = ""
    if scheme == "hf":
        fix = f"open(huggingface_hub.snapshot_download({rest!r}))"
        hub = f". For a model on the Hugging Face hub, download it first and open its folder: {fix}"
    near = did_you_mean(scheme, _OBJECT_STORES) or "."
    raise StorageError(
        f"unknown scheme {scheme!r} of {text}{near} Use a local folder, file://, memory://, s3://, gs://, or az://{hub}"
    )


def path_text(path: object) -> str:
    """Return a path as text. Raises OptionError for values that are not paths, and StorageError for
    an empty path or one with a NUL."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise option_error(f"a path must be a folder, URL, or Storage, got {describe_wrong_path(text)}", StorageError)
    if not text:
        raise StorageError("the path is empty: pass a folder, file, or URL")
    if "\0" in text or (text.startswith("file:") and "%00" in text):
        raise StorageError(f"the path {text!r} has a NUL in it")
    return text


def describe_wrong_path(given: object) -> str:
    """Return, for an error, the type of a value and, if known, what to pass instead."""
    fix = getattr(given, "_INSTEAD", "")
    return f"{type(given).__name__}{fix and f': {fix}'}"


def is_known(path: StoragePath) -> bool:
    """Return True if `open_storage` supports this path or URL."""
    scheme, separator, _ = ("", "", "") if isinstance(path, Storage) else path_text(path).partition("://")
    return not separator or scheme in ("file", "memory", *_OBJECT_STORES)


def place_of(storage: Storage) -> str:
    """Return a text that is the same for all paths to one folder."""
    return storage.url.rstrip("/") if "://" in storage.url else os.path.realpath(storage.url)
