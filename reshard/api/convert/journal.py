"""What of an interrupted conversion is done: one small record a file, in a folder of the target that goes at the end.

convert-<digest>/claim               who writes here: what a dead process left is removed, by others or by `prune`
convert-<digest>/job                 the id of the job: equal jobs find each other by the digest
convert-<digest>/<file>.json         a file that is whole: its length and checksum
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
import xxhash

from reshard.control import claims
from reshard.control.claims import Claim
from reshard.errors import CheckpointNotFoundError, DamagedCheckpointError, FormatError, StorageError
from reshard.formats.native import generations
from reshard.formats.stored.writer import Done
from reshard.storage.base import Storage, temporary_name

__all__ = ["Journal", "is_job", "remove_dead_jobs"]

_HEAD = "job"
_CLAIM = "claim"
_FOLDER = re.compile(r"convert-[0-9a-f]{32}/")
_PIECE_BYTES = 16 << 20


class _Head(msgspec.Struct):
    job_id: str


class Journal:
    """The records of one job in its target."""

    def __init__(self, storage: Storage, digest: str) -> None:
        self.storage = storage
        self.folder = f"convert-{digest}"
        self._job_id = ""

    def begin(self, *, resume: bool, is_shared: bool = False) -> str:
        """Claim the target until `leave`, and remove what dead jobs left there.

        Returns the id of the job: that of the interrupted one, if there is one and `resume`, else a new one.

        Args:
            is_shared: several jobs may write into the target at once, each a file of its own.

        Raises StorageError if another job is seen to be running here.
        """
        names = self.storage.list()
        for folder, claim, job_id in _jobs(self.storage, names):
            is_mine = folder == self.folder
            if claim is not None and claim.is_running(job_id) and (is_mine or not is_shared):
                raise StorageError(
                    f"{claim} is converting to {self.storage.url} just now: wait until it has ended, or choose another "
                    "folder"
                )
            if is_mine and resume:
                self._job_id = job_id
        remove_dead_jobs(self.storage, names, spare=self.folder if self._job_id else "")
        if self._job_id:
            claims.claim(self.storage, f"{self.folder}/{_CLAIM}", self._job_id)
            return self._job_id
        _remove_records(self.storage, self.storage.list(f"{self.folder}/"), self.folder)
        self._job_id = generations.new_save_id().replace("-", "")
        claims.claim(self.storage, f"{self.folder}/{_CLAIM}", self._job_id)
        self.storage.publish(f"{self.folder}/{_HEAD}", msgspec.json.encode(_Head(self._job_id)))
        return self._job_id

    def leave(self) -> None:
        """Nobody writes any more: the job is done, or may be continued or removed by whoever comes."""
        claims.release(self._job_id)

    def tidy(self) -> None:
        """After a failure, when nobody writes any more: files that are whole stay for the next try, and nothing else.
        Of a job that has finished none nothing stays."""
        names = self.storage.list()
        records = [name for name in names if name.startswith(f"{self.folder}/") and name.endswith(".json")]
        whole = tuple(msgspec.json.decode(self.storage.read(name), type=Done).name for name in records)
        for name in _unpublished(self.storage, names, self._job_id):
            is_claim = name.endswith(f"/{generations.CLAIM}")
            if not (whole and is_claim) and not (whole and name.startswith(whole)):
                self.storage.delete(name)
        if not whole:
            _remove_records(self.storage, names, self.folder)

    def add(self, file: str, done: Done) -> None:
        """This file is whole and durable."""
        self.storage.publish(f"{self.folder}/{_flat(file)}.json", msgspec.json.encode(done))

    def finished(self, file: str) -> Done | None:
        """The record of a file, if it has one, and the file still has that length and checksum; else None."""
        try:
            done = msgspec.json.decode(self.storage.read(f"{self.folder}/{_flat(file)}.json"), type=Done)
            nbytes = self.storage.size(done.name)
        except CheckpointNotFoundError:
            return None
        if nbytes != done.nbytes or self._digest(done.name, nbytes) != done.digest:
            return None
        return done

    def records(self, files: Iterable[str]) -> dict[str, Done]:
        """The records of all files, not checked. Raises StorageError if one is missing."""
        out = {}
        for file in files:
            try:
                data = self.storage.read(f"{self.folder}/{_flat(file)}.json")
            except CheckpointNotFoundError:
                raise StorageError(
                    f"{file} was written by another process, but is not seen in {self.storage.url}: the folder must be "
                    "the same, shared one for all"
                ) from None
            out[file] = msgspec.json.decode(data, type=Done)
        return out

    def end(self) -> None:
        """All is published: the records go."""
        _remove_records(self.storage, self.storage.list(f"{self.folder}/"), self.folder)

    def _digest(self, name: str, nbytes: int) -> str:
        state = xxhash.xxh3_128()
        buffer = bytearray(min(nbytes, _PIECE_BYTES))
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memoryview(buffer)[: min(_PIECE_BYTES, nbytes - start)]
            self.storage.read_into(name, start, piece)
            state.update(piece)
        return str(state.hexdigest())


def _flat(file: str) -> str:
    return file.replace("/", "~")


def remove_dead_jobs(storage: Storage, names: Mapping[str, int], *, spare: str = "") -> list[str]:
    """Remove what conversions left whose processes are gone: records, and files that never became a checkpoint.

    A job that may still be running keeps all of it, and so does the one whose records are in the folder `spare`.
    `names` are those of the storage. Returns the ids of the jobs.
    """
    removed = []
    for folder, claim, job_id in _jobs(storage, names):
        if folder == spare or claims.may_be_alive(claim, job_id):
            continue
        if job_id:
            for name in _unpublished(storage, names, job_id):
                storage.delete(name)
        _remove_records(storage, names, folder)
        removed.append(job_id)
    return removed


def is_job(folder: str) -> bool:
    """Whether a folder, by its name, holds the records of a conversion."""
    return _FOLDER.fullmatch(f"{folder}/") is not None


def _jobs(storage: Storage, names: Iterable[str]) -> list[tuple[str, Claim | None, str]]:
    """Folder, claim and id of each job that has records; "" if its id is not known."""
    found = []
    for folder in {match[0] for name in names if (match := _FOLDER.match(name))}:
        try:
            job_id = msgspec.json.decode(storage.read(f"{folder}{_HEAD}"), type=_Head).job_id
        except (CheckpointNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            job_id = ""
        found.append((folder.rstrip("/"), claims.read_claim(storage, f"{folder}{_CLAIM}"), job_id))
    return found


def _unpublished(storage: Storage, names: Mapping[str, int], job_id: str) -> list[str]:
    """The files that are told by their names to be the job's, and that no checkpoint holds."""
    staged, items = temporary_name("", job_id), f"_{job_id}_"
    found = [name for name in names if name.endswith(staged)]
    distcp = [name for name in names if items in name and name.endswith(".distcp")]
    if distcp and (".metadata" not in names or job_id.encode() not in storage.read(".metadata")):
        found += distcp
    save_id = generations.save_id_of(job_id)
    data = [name for name in names if name.startswith(f"{generations.folder_of(save_id)}/")]
    if data:
        with suppress(DamagedCheckpointError, FormatError):  # a manifest that does not say what counts
            found += data if generations.published(storage) != save_id else []
    return found


def _remove_records(storage: Storage, names: Iterable[str], folder: str) -> None:
    """The claim and the id last, so that a removal cut short is taken up again."""
    mine = [name for name in names if name.startswith(f"{folder}/")]
    for name in sorted(mine, key=lambda name: (name.endswith(f"/{_HEAD}"), name.endswith(f"/{_CLAIM}"))):
        storage.delete(name)
