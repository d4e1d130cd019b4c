"""Which of the checkpoints below a folder is the newest whole one, and the removal of all but the newest."""

from __future__ import annotations

import os
from contextlib import suppress
from urllib.parse import quote

from reshard.api.convert.journal import is_job, remove_dead_jobs
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.errors import CheckpointError, CheckpointNotFoundError
from reshard.formats.native.generations import generations_in, is_alive, remove_dead, remove_empty
from reshard.formats.native.manifest import HF_INDEX, MANIFEST, is_generation, read_manifest, refuse_newer
from reshard.formats.native.reader import detect
from reshard.storage import Storage, open_storage

__all__ = ["latest_complete", "prune"]


def latest_complete(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint at or directly below `folder`, by the time that its save was begun; else None.

    A folder without a whole manifest, or whose files are missing or short, does not count.

    Raises FormatError if one is of a newer version: it may be the latest.
    """
    found = _complete(folder)
    return found[-1][1] if found else None


def prune(folder: str | os.PathLike[str], *, keep_last: int) -> list[str]:
    """Remove all but the `keep_last` newest complete checkpoints directly below `folder`; returns their paths.

    Their manifests go first, so that nothing that looks complete is left by a removal cut short, which the next one
    takes up. What killed saves and conversions have left goes too. Broken checkpoints neither count nor go, nor do
    those that a save is replacing just now. Only what saves and conversions have written is removed: other files stay,
    and their folders with them.

    Raises CheckpointError for `keep_last` < 1; FormatError if a checkpoint is of a newer version.
    """
    if not isinstance(keep_last, int) or keep_last < 1:
        raise CheckpointError(
            f"keep_last must be a whole number >= 1, got {keep_last}: remove a folder yourself to keep nothing of it"
        )
    found = [path for _, path, is_below in _complete(folder) if is_below]
    storage = open_storage(folder)
    names = storage.list()
    remove_dead_jobs(storage, names)
    parts = [name.split("/", 2) for name in names]
    for place in {place for place, *inner in parts if len(inner) > 1 and is_job(inner[0])}:
        below = open_storage(_path_below(folder, place))
        remove_dead_jobs(below, below.list())
    places = {place for place, *inner in parts if len(inner) > 1 and is_generation(inner[0])}
    gone = []
    for path in found[:-keep_last]:
        inner = open_storage(path)
        by_id = generations_in(inner)
        if not any(is_alive(inner, save_id, names) for save_id, names in by_id.items()):
            inner.delete(HF_INDEX)
            inner.delete(MANIFEST)
            gone.append(path)
    for place in places:  # of those that are gone now, and of killed saves
        with suppress(CheckpointError):  # a broken one, whose manifest does not say what counts
            remove_dead(open_storage(_path_below(folder, place)))
    remove_empty(storage, places)
    return gone


def _path_below(folder: str | os.PathLike[str], place: str) -> str:
    base = os.fspath(folder)
    if "://" in base and not base.startswith("memory:"):
        for sign in "%#?":  # which mean something else in a URL
            place = place.replace(sign, quote(sign))
    return f"{base.rstrip('/')}/{place}" if place else base


def _complete(folder: str | os.PathLike[str]) -> list[tuple[float, str, bool]]:
    """(when its save was begun, path, whether below the folder) of each complete checkpoint, the oldest first."""
    if isinstance(folder, Storage):
        raise CheckpointError(f"a path or URL is wanted, got the storage {folder.url}: checkpoints are told by paths")
    storage = open_storage(folder)
    found = []
    for name in storage.list():
        place, _, last = name.rpartition("/")
        if last != MANIFEST or "/" in place:
            continue
        path = _path_below(folder, place)
        try:
            created = read_manifest(open_storage(path)).created_unix_s
            open_checkpoint(path)
        except CheckpointError:
            with suppress(CheckpointNotFoundError):  # removed meanwhile
                inner = open_storage(path)
                if detect(inner, {MANIFEST: inner.size(MANIFEST)}):
                    refuse_newer(inner.read(MANIFEST), f"{inner.url.rstrip('/')}/{MANIFEST}")
            continue
        found.append((created, path, bool(place)))
    return sorted(found)
