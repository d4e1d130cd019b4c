"""What of an interrupted conversion is done: one small record a file, in a folder of the target that goes at the end.

convert-<digest>/job.json            the job that writes here: equal jobs find each other by the digest
convert-<digest>/<file>.json         a file that is whole: its length and checksum
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import xxhash

from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.formats.native import generations
from reshard.formats.stored.writer import Done
from reshard.storage.base import Storage, is_temporary

__all__ = ["Journal"]

_FOLDER = re.compile(r"convert-[0-9a-f]{32}/")
_PIECE_BYTES = 16 << 20


class _Head(msgspec.Struct):
    job_id: str


class Journal:
    """The records of one job in its target."""

    def __init__(self, storage: Storage, digest: str) -> None:
        self.storage = storage
        self.folder = f"convert-{digest}"

    def begin(self, *, resume: bool) -> str:
        """The id of the job: that of the interrupted one, if there is one and `resume`; what others left is removed."""
        head = f"{self.folder}/job.json"
        names = self.storage.list()
        if resume and head in names:
            return msgspec.json.decode(self.storage.read(head), type=_Head).job_id
        stale = {match[0] for name in names if (match := _FOLDER.match(name))}
        for folder in stale:
            self._remove(folder, names)
        job_id = generations.new_save_id().replace("-", "")
        self.storage.publish(head, msgspec.json.encode(_Head(job_id)))
        return job_id

    def _remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove the records in `folder`, and the temporary files that they tell of."""
        mine = [name for name in names if name.startswith(folder)]
        for name in mine:
            if name.endswith("/job.json"):
                job_id = msgspec.json.decode(self.storage.read(name), type=_Head).job_id
                for other in names:
                    if is_temporary(other) and job_id in other:
                        self.storage.delete(other)
        for name in sorted(mine, key=lambda name: name.endswith("/job.json")):
            self.storage.delete(name)

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
        self._remove(f"{self.folder}/", list(self.storage.list(f"{self.folder}/")))

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
