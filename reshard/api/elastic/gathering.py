"""`gather`: the folders of hosts, wherever they were brought to, become one ordinary checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.api.elastic.kept import Held, Kept, held_in, kept_in, lost_boxes
from reshard.api.elastic.lineage import Found
from reshard.api.elastic.recovering import missing_text
from reshard.api.elastic.reports import GatherReport
from reshard.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, FormatError
from reshard.execute.reading import Workspace
from reshard.formats.native import generations, reader
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import MANIFEST
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.source import Files
from reshard.storage import Storage, open_storage
from reshard.storage.local import LocalStorage

__all__ = ["gather"]

_PIECE_BYTES = 8 << 20


def gather(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    overwrite: bool = False,
) -> GatherReport:
    """Put one checkpoint together out of what the hosts of a job have kept. Needs no job and no model.

        report = reshard.elastic.gather(["node0", "node1", "node3"], "run/step-100")

    Every block is compared with its checksum; of several copies, and of several damaged ones, what is good is taken.

    Args:
        folders: of hosts, each the folder of a `Tier` and in it the name of the host.
        out: where the checkpoint goes.
        step: which generation; by default the newest, by the decision of `Tier.recover`. If that is not whole, an older
            one must be asked for.
        overwrite: a checkpoint that is there is replaced.

    Raises (nothing is written then):
        CheckpointNotFoundError: no folder has a generation that counts, or none of this step.
        DamagedCheckpointError: what is left is not whole: it names tensors and regions, and an older one that is whole.
        CheckpointError: it cannot be told which generation the job lived on last: `step` can say it.
        FormatError: a checkpoint is at `out` already.
    """
    storage = open_storage(out)
    places = [Path(folder) for folder in folders]
    found = Found.of((str(place), kept_in(place)) for place in places)
    order = found.order([kept for kept in found.made if step in (None, kept.step)])
    if not order.newest:
        steps = ", ".join(str(kept.step) for kept in sorted(found.made, reverse=True)) or "none at all"
        what = "no generation" if step is None else f"no generation of step {step}"
        raise CheckpointNotFoundError(
            f"{what} counts in {', '.join(map(str, places)) or 'no folders'}; they have {steps}: give the folders of "
            "the hosts, such as /dev/shm/run1/node3"
        )
    if not order.newest_first:
        raise CheckpointError(found.tied_text(order.tied))
    wanted, *older = order.newest_first
    look = _Look(wanted, places)
    if look.lost:
        others = [kept for kept in older if kept.step != wanted.step and not _Look(kept, places).lost]
        hint = f"step {others[0].step} is whole: ask for it by step={others[0].step}" if others else "none other is"
        raise DamagedCheckpointError(f"{wanted} is not whole: {missing_text(look.lost)}. {hint.capitalize()}")
    generations.refuse_foreign(storage)
    there = generations.published(storage)
    if there == wanted.save_id:
        raise FormatError(f"{storage.url} has {wanted} already: open it, or remove it first")
    if there is not None and not overwrite:
        raise FormatError(f"there is a checkpoint in {storage.url} already: choose another folder, or overwrite=True")
    nbytes = look.write(storage)
    left = tuple(found.left_behind(wanted, (), step))
    return GatherReport(storage.url, wanted.number, wanted.step, len(look.native.manifest.files), nbytes, left)


class _Look:
    """What some folders have of a generation."""

    def __init__(self, kept: Kept, places: Sequence[Path]) -> None:
        self.storages = [LocalStorage(place / kept.folder) for place in places]
        self.native = next(native for one in self.storages if (native := _opened(one)) is not None)
        threads, manifest = Workspace.of(None, None).threads, self.native.manifest
        self.held: list[Held] = [held_in(storage, manifest, threads=threads) for storage in self.storages]
        self.lost = lost_boxes(self.native, {str(number): [held] for number, held in enumerate(self.held)})

    def write(self, storage: Storage) -> int:
        """The checkpoint, which counts when all of it is there. Returns the bytes of its data files."""
        manifest, total = self.native.manifest, 0
        generations.claim(storage, manifest.save_id)
        try:
            for rank, record in manifest.files.items():
                for name in (record.name, f"{record.name}.sums"):
                    storage.delete(name)
                with storage.create(record.name) as file:
                    for piece in self._pieces(rank, record):
                        file.write(piece)
                with storage.create(f"{record.name}.sums") as file:
                    file.write(self._with(rank).read(f"{record.name}.sums"))
                total += record.nbytes
            storage.publish(MANIFEST, self.native.storage.read(MANIFEST))
            generations.release(storage, manifest.save_id)
        finally:
            generations.ended(manifest.save_id)
        generations.remove_dead(storage)
        return total

    def _with(self, rank: str) -> LocalStorage:
        return next(storage for storage, held in zip(self.storages, self.held) if rank in held)

    def _pieces(self, rank: str, record: FileRecord) -> Iterator[bytes]:
        """The bytes of a file from front to end, each piece from a host that has it."""
        at = 0
        while at < record.nbytes:
            storage, stop = next(
                (storage, stop)
                for storage, held in zip(self.storages, self.held)
                for start, stop in held.get(rank, ())
                if start <= at < stop
            )
            size = min(stop - at, _PIECE_BYTES)
            yield storage.read(record.name, at, size)
            at += size


def _opened(storage: LocalStorage) -> NativeFacts | None:
    """A generation, by the manifest that a host has."""
    try:
        return reader.open(Files(storage, {MANIFEST: 0})).facts_of(NativeFacts)
    except CheckpointError:
        return None
