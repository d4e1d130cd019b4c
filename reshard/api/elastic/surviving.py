"""A generation as one checkpoint that a load can read, though each host has only some of its files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from planners.geometry.byteruns import ByteRuns, Window
from planners.save.plan import SavePlan
from reshard.api.elastic.kept import Ranges, header_of
from reshard.errors import DamagedCheckpointError, StorageError
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import MANIFEST, Manifest
from reshard.storage import Storage, Writer
from reshard.storage.local import LocalStorage

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Survivors", "blocks_of"]


class Survivors(Storage):
    """What a host has of a generation. Files that are whole here are read where they are; all others in a folder of
    what was fetched, where each begins as a hole behind the header, which follows from the plan: so a load can be
    planned before anything is fetched, and then only what it needs.

    Args:
        here: the folder of the generation on this host.
        fetched: the folder of what is fetched.
        manifest_text: which this host may not have.
        whole: names of the files that are here and undamaged.
    """

    max_gap_bytes = LocalStorage.max_gap_bytes
    requests = 1

    def __init__(self, here: LocalStorage, fetched: Path, manifest_text: bytes, whole: Collection[str]) -> None:
        self.here, self.fetched, self.whole = here, LocalStorage(fetched), frozenset(whole)
        self.url = here.url
        self._manifest_text = manifest_text
        self._records: dict[str, tuple[int, FileRecord]] = {}
        self._plan: SavePlan | None = None

    def expect(self, manifest: Manifest, plan: SavePlan) -> None:
        """The files of which headers may be asked."""
        self._records = {record.name: (int(rank), record) for rank, record in manifest.files.items()}
        self._plan = plan

    def path_of(self, name: str) -> Path:
        """Where a file, or its checksums, lies or is to be put."""
        return (self.here if name.removesuffix(".sums") in self.whole else self.fetched).root / name

    def list(self, prefix: str = "") -> dict[str, int]:
        return {MANIFEST: len(self._manifest_text)} if MANIFEST.startswith(prefix) else {}

    def size(self, name: str) -> int:
        return len(self._manifest_text) if name == MANIFEST else self._with(name).size(name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if name == MANIFEST:
            buffer[:] = self._manifest_text[start : start + len(buffer)]
        else:
            self._with(name).read_into(name, start, buffer)

    def mapped(self, name: str) -> memoryview | None:
        return memoryview(self._manifest_text) if name == MANIFEST else self._with(name).mapped(name)

    def create(self, name: str) -> Writer:
        raise StorageError(f"{self.url} is what survives of a generation: nothing is written there")

    def publish(self, name: str, data: Buffer) -> None:
        self.create(name)

    def delete(self, name: str) -> None:
        self.create(name)

    def _with(self, name: str) -> Storage:
        if name.removesuffix(".sums") in self.whole:
            return self.here
        if name in self._records:
            self.prepare(name)
        return self.fetched

    def prepare(self, name: str) -> None:
        """Make the file, with its header and nothing else, unless it is there: any rank of the host may come first."""
        path = self.fetched.root / name
        if path.exists() or self._plan is None:
            return
        rank, record = self._records[name]
        header = header_of(self._plan, rank)
        if len(header) != record.header_bytes:
            raise DamagedCheckpointError(
                f"{self.url}: {name} must begin with a header of {record.header_bytes} bytes, but by the manifest's "
                f"layout it has {len(header)}"
            )
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(beside, "xb") as out:
                out.write(header)
                out.truncate(record.nbytes)
            with suppress(FileExistsError):
                os.link(beside, path)
            beside.unlink()
        except OSError as error:
            raise StorageError(f"cannot make {path}: {error.strerror or error}") from error


def blocks_of(window: Window, block_bytes: int, nbytes: int) -> Ranges:
    """The blocks of a file of `nbytes` that have bytes of a window, as ranges that may touch or overlap."""
    runs = window.runs()
    if not runs.count:
        return []
    length, counts, strides = runs.run_bytes, list(runs.counts), list(runs.strides)
    while counts and strides[-1] - length <= block_bytes:  # gaps that leave no block out
        length += (counts.pop() - 1) * strides.pop()
    return [
        (start // block_bytes * block_bytes, min(-(-(start + size) // block_bytes) * block_bytes, nbytes))
        for start, size in ByteRuns(runs.offset, length, tuple(counts), tuple(strides))
    ]
