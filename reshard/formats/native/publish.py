"""Makes a generation count: all files are seen, the manifest takes the place of the old one, leftovers go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from planners.reports.codec import to_json
from planners.save.plan import SavePlan
from reshard.control.global_state import Census
from reshard.errors import ReshardError, StorageError
from reshard.formats.native import generations
from reshard.formats.native.hf_index import publish_index
from reshard.formats.native.manifest import MANIFEST, FileRecord, Manifest, encode_manifest
from reshard.state.fingerprints import Partial
from reshard.state.garbage import uncollected
from reshard.storage import Storage

__all__ = ["Generation"]

_PRINTS = ".prints"
_log = logging.getLogger("reshard")


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

    def leave_prints(self, rank: int, parts: Mapping[str, Partial]) -> None:
        """A rank's part of the fingerprints, as a small file: so much need not go through the control plane."""
        packed = msgspec.msgpack.encode({fqn: part.to_bytes() for fqn, part in parts.items()})
        self.storage.publish(f"{self.folder}/{rank:05d}{_PRINTS}", packed)

    @uncollected()
    def publish(self, records: Mapping[int, FileRecord], parts: Iterable[Mapping[str, Partial]] = ()) -> list[str]:
        """Make the generation count; returns what is no longer needed. For the first rank, when all ranks have written.

        Args:
            records: what each rank that writes has written.
            parts: of the fingerprints, beside those that ranks have left as files.

        Raises StorageError if a file is not there with its whole length.
        """
        seen = self.storage.list(f"{self.folder}/")
        for rank, record in records.items():
            if seen.get(record.name) != record.nbytes:
                raise StorageError(
                    f"rank {rank} wrote {record.name} ({record.nbytes} bytes), but the first rank does not see it in "
                    f"{self.storage.url}: the folder must be the same, shared one for all ranks"
                )
        prints = [name for name in seen if name.endswith(_PRINTS)]
        manifest = self._manifest(records, self._fingerprints([*parts, *map(self._left_prints, prints)]))
        self.storage.publish(MANIFEST, encode_manifest(manifest))
        publish_index(self.storage, self.save_id, self.plan, {rank: record.name for rank, record in records.items()})
        return prints

    def tidy(self, names: Iterable[str]) -> None:
        """Remove these files, the claim, and what older saves have left.

        A failure is logged and no more: the checkpoint counts already, and the next save tries again.
        """
        try:
            for name in names:
                self.storage.delete(name)
            generations.release(self.storage, self.save_id)
            generations.remove_dead(self.storage)
        except ReshardError as error:
            _log.warning("%s is saved, but what is no longer needed could not be removed: %s", self.storage.url, error)

    def _manifest(self, records: Mapping[int, FileRecord], fingerprints: dict[str, str]) -> Manifest:
        census = self.census
        layout = {key: value for key, value in to_json(census.layout).items() if key not in ("reshard", "version")}
        return Manifest(
            save_id=self.save_id,
            created_unix_s=self.started_unix_s,
            divide_above_bytes=self.plan.divide_above_bytes,
            files={str(rank): record for rank, record in sorted(records.items())},
            layout=layout,
            paths={key: path for key, path in census.paths.items() if path != [key]},
            containers=census.containers,
            objects=census.objects,
            per_rank={key: {str(r): row for r, row in rows.items()} for key, rows in census.per_rank.items()},
            aliases=census.aliases,
            fingerprints=fingerprints,
            subset=None if self.subset is None else list(self.subset),
        )

    def _left_prints(self, name: str) -> dict[str, Partial]:
        """What a rank left by `leave_prints`."""
        packed = msgspec.msgpack.decode(self.storage.read(name), type=dict[str, bytes])
        return {fqn: Partial.from_bytes(part) for fqn, part in packed.items()}

    def _fingerprints(self, parts: Sequence[Mapping[str, Partial]]) -> dict[str, str]:
        """Of every tensor, {} if nobody took any; a tensor without elements has a part in no file."""
        specs = self.census.layout.specs
        totals = dict.fromkeys(specs, Partial()) if parts else {}
        for of_file in parts:
            for fqn, part in of_file.items():
                totals[fqn] = totals[fqn] + part
        return {fqn: total.digest(specs[fqn].dtype, specs[fqn].shape) for fqn, total in totals.items()}
