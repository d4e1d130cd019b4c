"""Generations: every save writes into a folder of its own, and only the manifest says which one counts.

    manifest.json  ─────────►  data-0192f3c1a8-5d2e.../      the checkpoint
                               data-0192f3c199-77ab.../      of a save that was killed, or is still running

A folder that no manifest names belongs to a save that is running or dead: its claim tells.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection

from reshard.control import claims
from reshard.errors import CheckpointError, CheckpointNotFoundError, StorageError
from reshard.formats.dcp.names import has_dcp
from reshard.formats.native.manifest import HF_INDEX, MANIFEST, is_generation, read_save_id, refuse_newer
from reshard.formats.native.reader import detect
from reshard.storage import Storage, is_temporary

__all__ = [
    "CLAIM",
    "begin",
    "check_claimed",
    "claim",
    "counts",
    "ended",
    "folder_of",
    "generations_in",
    "is_alive",
    "new_save_id",
    "published",
    "refuse_foreign",
    "release",
    "remove",
    "remove_dead",
    "remove_empty",
    "save_id_of",
]

_CLAIMING_S = 60.0
"""So long a save is taken to be about to make its claim."""
CLAIM = "claim.json"
"""The file in the folder of a save that says who writes there."""
_VISIBLE_S = 2.0
"""So long a network file system may take to show on one machine what was written on another."""


def new_save_id() -> str:
    """A name that sorts by time and that no other save has."""
    return f"{int(time.time() * 1000):012x}-{secrets.token_hex(6)}"


def save_id_of(job_id: str) -> str:
    """The save id for a job that knows itself by 24 digits."""
    return f"{job_id[:12]}-{job_id[12:24]}"


_begun: list[float] = [0.0]


def begin() -> float:
    """When a save begins, in seconds since 1970: later than all others of this process, though clocks are set back."""
    _begun[0] = max(time.time(), _begun[0] + 1e-6)
    return _begun[0]


def folder_of(save_id: str) -> str:
    """The generation's folder, within the checkpoint's."""
    return f"data-{save_id}"


def refuse_foreign(storage: Storage) -> None:
    """Make sure that a save here would neither replace somebody else's files nor be lost among them.

    Raises StorageError if the folder holds an index or manifest that we did not write, or a DCP checkpoint, beside
    which ours could not be told apart; FormatError for a checkpoint of a newer version.
    """
    names = storage.list()
    ours = detect(storage, names)
    if ours and MANIFEST in names:
        _refuse_newer(storage)
    foreign = [name for name in (MANIFEST, HF_INDEX) if name in names and not ours]
    foreign += [".metadata"] if has_dcp(names) else []
    if foreign:
        raise StorageError(
            f"{storage.url} holds {foreign[0]}, which is of something else than our checkpoints: nothing was saved. "
            "Save into a folder of its own"
        )


def _refuse_newer(storage: Storage) -> None:
    refuse_newer(storage.read(MANIFEST), f"{storage.url.rstrip('/')}/{MANIFEST}")


def claim(storage: Storage, save_id: str) -> None:
    """Say that this process is writing the generation, until `ended`."""
    claims.claim(storage, f"{folder_of(save_id)}/{CLAIM}", save_id)


def check_claimed(storage: Storage, save_id: str, claimer: int) -> None:
    """Make sure that what the first rank claims is what this rank writes to, before it writes anything.

    Raises StorageError if the claim of the rank `claimer` cannot be seen from here.
    """
    until = time.monotonic() + _VISIBLE_S
    while True:
        try:
            storage.size(f"{folder_of(save_id)}/{CLAIM}")
        except FileNotFoundError:
            if time.monotonic() > until:
                raise StorageError(
                    f"what rank {claimer} wrote is not to be seen in {storage.url} from {socket.gethostname()}: the "
                    "folder must be the same, shared one for all ranks, not one of each machine"
                ) from None
            time.sleep(0.1)
        else:
            return


def ended(save_id: str) -> None:
    """Say that this process writes the generation no more, even if its claim could not be removed."""
    claims.release(save_id)


def release(storage: Storage, save_id: str) -> None:
    """Say that the generation is published, or given up: from now on it stays only while a manifest names it."""
    storage.delete(f"{folder_of(save_id)}/{CLAIM}")


def published(storage: Storage) -> str | None:
    """The save id that counts, or None."""
    try:
        return read_save_id(storage)
    except CheckpointNotFoundError:
        return None


def counts(storage: Storage, save_id: str) -> bool:
    """Whether the manifest names this generation; one that cannot be read, or is of a newer version, does not."""
    try:
        return published(storage) == save_id
    except CheckpointError:
        return False


def remove_dead(storage: Storage) -> list[str]:
    """Remove generations that neither count nor are being written. Returns their save ids.

    A save publishes its manifest before it releases its claim. So where a claim is gone, the manifest that is read
    *after* seeing that names this generation, or one that came later.
    """
    by_id = generations_in(storage)
    remove_empty(storage)
    removed, running = [], False
    for save_id, names in by_id.items():
        if is_alive(storage, save_id, names):
            running = True
        elif published(storage) != save_id:
            remove(storage, save_id, names)
            removed.append(save_id)
    if not running:  # of several saves it is not known whose an unfinished manifest is: the last to end cleans up
        for published_name in (MANIFEST, HF_INDEX):
            for name in storage.list(f"{published_name}."):
                if is_temporary(name):
                    storage.delete(name)
    return removed


def generations_in(storage: Storage) -> dict[str, list[str]]:
    """Save id -> names of the files of its generation; what else is called so is somebody's own."""
    by_id: dict[str, list[str]] = {}
    for name in storage.list("data-"):
        folder, slash, _ = name.partition("/")
        if slash and is_generation(folder):
            by_id.setdefault(folder.removeprefix("data-"), []).append(name)
    return by_id


def remove_empty(storage: Storage, others: Collection[str] = ()) -> None:
    """Remove generations that hold nothing: folders of saves that were killed before they made their claim.

    A save that is just making its claim makes its folder again.

    Args:
        others: folders that may go, too, if they are empty.
    """
    for folder in storage.empty_folders():
        if is_generation(folder) or folder in others:
            storage.delete(f"{folder}/{CLAIM}")


def remove(storage: Storage, save_id: str, names: list[str] | None = None) -> None:
    """Remove a generation, its claim last, so that a removal cut short is taken up again."""
    folder = folder_of(save_id)
    names = list(storage.list(f"{folder}/")) if names is None else names
    for name in sorted(names, key=lambda name: name.endswith(f"/{CLAIM}")):
        storage.delete(name)


def is_alive(storage: Storage, save_id: str, names: list[str]) -> bool:
    """Whether somebody may still be writing the generation, whose files are `names`."""
    name = f"{folder_of(save_id)}/{CLAIM}"
    if name not in names:  # a claim is made before anything else and removed last
        return all(map(is_temporary, names)) and time.time() - _began(save_id) < _CLAIMING_S
    return claims.may_be_alive(claims.read_claim(storage, name), save_id)


def _began(save_id: str) -> float:
    """Seconds since 1970 when the save began; 0 if that is no save id."""
    try:
        return int(save_id.partition("-")[0], 16) / 1000
    except ValueError:
        return 0.0
