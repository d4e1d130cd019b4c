"""Makes a generation count: all files are seen, the manifest takes the place of the old one, leftovers go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from planners.reports.codec import to_json
from planners.save.plan import SavePlan
from reshard.control.global_state import Census
from reshard.errors import ReshardError, StorageError
from reshard.formats.native import generations
from reshard.formats.native.file_table import FEW_FILES, FileRecord, LinkedRecord, TableRecord, encode_table
from reshard.formats.native.hf_index import publish_index
from reshard.formats.native.manifest import MANIFEST, Manifest, PartsRecord, encode_manifest
from reshard.state.fingerprints import Partial
from reshard.state.garbage import uncollected
from reshard.storage import Storage

__all__ = ["Generation", "Written"]

_log = logging.getLogger("reshard")


class Written(msgspec.Struct, frozen=True):
    """What one rank has done for a generation."""

    record: FileRecord | None = None
    """Of its data file, if it has one."""
    parts: PartsRecord | None = None
    """Of its table of parts, if files of earlier saves have some of its elements."""
    linked: tuple[LinkedRecord, ...] = ()
    """Those files, and how much of each is this rank's."""
    ranks: tuple[int, ...] = ()
    """Whose arrays its data file has, if several ranks wrote it; those others have no record of it."""

    @property
    def files(self) -> list[FileRecord | PartsRecord]:
        """All that must be there."""
        return [one for one in (self.record, self.parts, *self.linked) if one is not None]


@dataclass(frozen=True)
class Generation:
    """One save: what it holds, who writes what, and where to."""

    storage: Storage
    save_id: str
    started_unix_s: float
    census: Census
    plan: SavePlan
    subset: tuple[str, ...] | None

    @property
    def folder(self) -> str:
        """Of this generation, within the checkpoint's."""
        return generations.folder_of(self.save_id)

    @uncollected()
    def publish(self, written: Mapping[int, Written], parts: Sequence[Mapping[str, Partial]] = ()) -> None:
        """Make the generation count. For the first rank, when all ranks have written.

        Args:
            written: by each rank.
            parts: of the fingerprints of all tensors, by name.

        Raises StorageError if a file is not there with its whole length.
        """
        seen = self.storage.list(f"{self.folder}/")
        for rank, one in written.items():
            for record in one.files:
                if seen.get(record.name) != record.nbytes:
                    raise StorageError(
                        f"rank {rank} wrote {record.name} ({record.nbytes} bytes), but the first rank does not see it "
                        f"in {self.storage.url}: the folder must be the same, shared one for all ranks"
                    )
        table = self._table(written)
        manifest = self.manifest(written, parts, table)
        self.storage.publish(MANIFEST, encode_manifest(manifest))
        names = {int(rank): record.name for rank, record in manifest.files.items()}
        publish_index(self.storage, self.save_id, self.plan, None if manifest.tables else names)

    def tidy(self) -> None:
        """Remove the claim, and what older saves have left.

        A failure is logged and no more: the checkpoint counts already, and the next save tries again.
        """
        try:
            generations.release(self.storage, self.save_id)
            generations.remove_dead(self.storage)
        except ReshardError as error:
            _log.warning("%s is saved, but what is no longer needed could not be removed: %s", self.storage.url, error)

    def _table(self, written: Mapping[int, Written]) -> TableRecord | None:
        """Of many data files a table, which is stored."""
        records = {rank: one.record for rank, one in sorted(written.items()) if one.record is not None}
        if len(records) <= FEW_FILES:
            return None
        table, data = encode_table(f"{self.folder}/files", records)
        self.storage.publish(table.name, data)
        return table

    def manifest(
        self,
        written: Mapping[int, Written],
        parts: Sequence[Mapping[str, Partial]] = (),
        table: TableRecord | None = None,
    ) -> Manifest:
        """What makes the generation count; arguments are those of `publish`.

        Args:
            table: of the data files, which are listed in the manifest without one.
        """
        records = {rank: one.record for rank, one in sorted(written.items()) if one.record is not None}
        files = {} if table is not None else records
        census = self.census
        tables = {str(rank): one.parts for rank, one in sorted(written.items()) if one.parts is not None}
        linked = _together(written.values())
        layout = {key: value for key, value in to_json(census.layout).items() if key not in ("reshard", "version")}
        # what older readers do not know: the class of a mapping or of a tensor
        classes = [kind for _, kind in census.containers if kind.startswith(("dict:", "tensor:"))]
        return Manifest(
            version=_version(linked, has_more=bool(tables or table is not None or classes)),
            save_id=self.save_id,
            created_unix_s=self.started_unix_s,
            divide_above_bytes=self.plan.divide_above_bytes,
            files={str(r): record for rank, record in files.items() for r in written[rank].ranks or (rank,)},
            layout=layout,
            paths={key: path for key, path in census.paths.items() if path != [key]},
            containers=census.containers,
            objects=census.objects,
            per_rank={key: {str(r): row for r, row in rows.items()} for key, rows in census.per_rank.items()},
            aliases=census.aliases,
            fingerprints=self.fingerprints(parts),
            subset=None if self.subset is None else list(self.subset),
            parts=tables or UNSET,
            linked=linked or UNSET,
            table=UNSET if table is None else table,
        )

    def fingerprints(self, parts: Sequence[Mapping[str, Partial]]) -> dict[str, str]:
        """Of every tensor, out of parts by name; {} if nobody took any; of no elements there is no part."""
        specs = self.census.layout.specs
        totals = dict.fromkeys(specs, Partial()) if parts else {}
        for some in parts:
            for fqn, part in some.items():
                totals[fqn] = totals[fqn] + part
        return {fqn: total.digest(specs[fqn].dtype, specs[fqn].shape) for fqn, total in totals.items()}


def _version(linked: Sequence[LinkedRecord], *, has_more: bool) -> int:
    """The oldest version that says everything."""
    if any(record.block_bytes is not UNSET for record in linked):
        return 3
    return 2 if has_more else 1


def _together(written: Iterable[Written]) -> list[LinkedRecord]:
    """The files of earlier saves, each with what all ranks have of it."""
    found: dict[str, LinkedRecord] = {}
    for one in written:
        for record in one.linked:
            before = found.get(record.name)
            live = record.live_bytes + (before.live_bytes if before is not None else 0)
            found[record.name] = msgspec.structs.replace(record, live_bytes=live)
    return list(found.values())
