"""Publishes saves: each writes a folder of its own (a generation), then the manifest, and then
removes leftovers."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET

from planners.geometry.layout import state_to_json
from planners.plans.save import SavePlan
from planners.units import format_bytes
from reshard.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, ReshardError, StorageError
from reshard.live.fingerprints import digests_of
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import array_bytes
from reshard.native.manifest import (
    BLOCK_BYTES,
    CLAIM,
    FEW_FILES,
    HF_INDEX,
    MANIFEST,
    FileRecord,
    LinkedRecord,
    Manifest,
    PartsRecord,
    TableRecord,
    encode_sealed,
    encode_table,
    is_generation,
    published,
    refuse_newer,
    without_claim,
)
from reshard.native.reader import NativeFacts, detect
from reshard.ranks import liveness
from reshard.ranks.global_state import GlobalState
from reshard.state import path_to_json
from reshard.storage.base import NOTHING, Storage, is_temporary
from reshard.stored.contents import has_dcp

__all__ = [
    "CLAIM", "LINKED", "Generation", "Written", "begin", "check_claimed", "claim", "counting", "folder_of",
    "generations_in", "has_claim", "index_problem", "is_alive", "new_save_id", "published", "refuse_foreign", "remove",
    "remove_dead", "remove_empty", "replaced_by_save", "save_id_of", "unpublish",
]  # fmt: skip


_log = logging.getLogger("reshard")
_MANY_ARRAY_BYTES = 4 << 20


class Written(msgspec.Struct, frozen=True):
    """What one rank wrote for a generation."""

    record: FileRecord | None = None
    """Its data file, if it has one."""
    parts: PartsRecord | None = None
    """Its table of parts, if files of earlier saves contain some of its elements."""
    linked: tuple[LinkedRecord, ...] = ()
    """Files of earlier saves, each with the number of bytes that belong to this rank."""
    ranks: tuple[int, ...] = ()
    """If several ranks wrote the data file: the ranks with arrays in it. Only the first has the `record`."""


@dataclass(frozen=True)
class Generation:
    """One save: its contents, its location, and which rank writes what."""

    storage: Storage
    save_id: str
    started_unix_s: float
    census: GlobalState
    plan: SavePlan
    subset: tuple[str, ...] | None
    replaces: str | None = None
    """Id of the save that was current when this one began."""

    @property
    def folder(self) -> str:
        """The folder of this generation within the checkpoint."""
        return folder_of(self.save_id)

    @gc_paused()
    def publish(
        self,
        written: Mapping[int, Written],
        tally: bytes | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Make this the current generation. The first rank calls it after all ranks have written.

        Args:
            written: by rank.
            tally: the packed sum of all contributions to fingerprints. None: no fingerprints.
            check: raises if this process may no longer publish.

        Raises StorageError if a file is missing or has another size than its record.
        """
        seen = self.storage.list(f"{self.folder}/")
        for rank, one in written.items():
            for record in (one.record, one.parts, *one.linked):
                if record is not None and seen.get(record.name) != record.nbytes:
                    raise StorageError(
                        f"rank {rank} wrote {record.name} ({record.nbytes} bytes), but the first rank does not "
                        f"see it in {self.storage.url}: all ranks must share the same folder"
                    )
        if linked := [name for name in seen if name.startswith(f"{self.folder}/{LINKED}")]:
            self._remove_unused(linked, written)
        records = {rank: one.record for rank, one in sorted(written.items()) if one.record is not None}
        table: TableRecord | None = None
        if len(records) > FEW_FILES:
            table, data = encode_table(f"{self.folder}/files", records)
            self.storage.publish(table.name, data)
        manifest = self.manifest(written, tally, table)
        look = partial(self._check_current, check)
        look()
        with suppress(StorageError):  # until then, it leads to the same save as the manifest, and later it is replaced
            self.storage.delete(HF_INDEX)
        if (arrays := array_bytes(self.census.objects)) > _MANY_ARRAY_BYTES:
            _log.warning(
                "%s: its manifest contains %s of numpy arrays, and every open reads all of it. "
                "To save them as tensors, pass torch.from_numpy(array)",
                self.storage.url,
                format_bytes(arrays),
            )
        self.storage.publish_while(MANIFEST, encode_sealed(manifest), look)
        # Hugging Face tools initialize what they do not find, so names must be those of a model
        is_model = not (manifest.paths or manifest.per_rank or any(path for path, _ in manifest.containers))
        names = {record.name for record in manifest.files.values()}
        weight_map = _weight_map(self.plan, names) if is_model and not manifest.tables else None
        if weight_map is None:
            self.storage.delete(HF_INDEX)  # that of an older save
        else:
            self._publish_index(weight_map)

    def _publish_index(self, weight_map: dict[str, str]) -> None:
        """Write the index, which maps each tensor to its file.

        If two saves race, only the current one leaves an index. If the other publishes in between,
        no index remains: better than one that names deleted files.
        """
        if counting(self.storage) == self.save_id:
            index = _Index(weight_map, {"total_size": self.census.tensors.nbytes})
            self.storage.publish(HF_INDEX, msgspec.json.encode(index))
            if counting(self.storage) != self.save_id:
                self.storage.delete(HF_INDEX)

    def _remove_unused(self, names: Iterable[str], written: Mapping[int, Written]) -> None:
        """Delete links to files of earlier saves that no rank uses in the end."""
        used = {f"{record.name}{end}" for one in written.values() for record in one.linked for end in LINKED_ENDS}
        for name in names:
            if name not in used:
                with suppress(StorageError):  # otherwise, it is deleted with the generation
                    self.storage.delete(name)

    def _check_current(self, check: Callable[[], None] | None) -> None:
        """Raise StorageError if another save was published while this process was paused, or what
        `check` raises."""
        if check is not None:
            check()
        found, where = counting(self.storage), self.storage.url
        if found not in (None, self.replaces, self.save_id):
            raise StorageError(
                f"another save, {found}, was published in {where} since this one, {self.save_id}, began: the later "
                "one is kept, and this one is discarded. Give each job its own folder"
            )
        if not has_claim(self.storage, self.save_id):
            raise StorageError(
                f"{where}: another process considered this save dead and deleted its files: nothing was published"
            )
        liveness.check_fences(where)

    def remove_replaced(self, rank: int) -> None:
        """Remove the files of the replaced save that `rank` wrote, without listing the folder.

        Failures are only logged, because `tidy` removes the rest.
        """
        try:
            for end in _OF_RANK:
                self.storage.delete(f"{folder_of(self.replaces or '')}/{rank:05d}{end}")
        except ReshardError as error:
            _log.warning("files of the previous save could not be deleted: %s", error)

    def tidy(self) -> None:
        """Remove the claim and leftovers of older saves. Failures are only logged: the checkpoint
        is already published, and the next save tries again."""
        try:
            self.storage.delete(f"{self.folder}/{CLAIM}")  # from now on, only a manifest keeps the folder
            remove_dead(self.storage)
        except ReshardError as error:
            _log.warning(
                "%s was saved, but files that are no longer needed could not be deleted: %s", self.storage.url, error
            )

    def manifest(
        self,
        written: Mapping[int, Written],
        tally: bytes | None = None,
        table: TableRecord | None = None,
    ) -> Manifest:
        """Return the manifest. `written` and `tally` are those of `publish`.

        Args:
            table: the record of the table of data files. None: the manifest lists the files.
        """
        records = {rank: one.record for rank, one in sorted(written.items()) if one.record is not None}
        files = {} if table is not None else records
        census = self.census
        tables = {str(rank): one.parts for rank, one in sorted(written.items()) if one.parts is not None}
        shared: dict[str, LinkedRecord] = {}  # by name, with the live bytes of all ranks
        for record in (record for one in written.values() for record in one.linked):
            live = record.live_bytes + (shared[record.name].live_bytes if record.name in shared else 0)
            shared[record.name] = msgspec.structs.replace(record, live_bytes=live)
        linked = list(shared.values())
        # older readers do not know the class of a mapping or of a tensor
        classes = [kind for kind in census.containers.values() if kind.startswith(("dict:", "tensor:"))]
        has_own_blocks = any(record.block_bytes is not UNSET for record in linked)
        return Manifest(  # with the oldest version that can express everything
            version=3 if has_own_blocks else 2 if tables or table is not None or classes else 1,
            save_id=self.save_id,
            created_unix_s=self.started_unix_s,
            block_bytes=BLOCK_BYTES,
            divide_above_bytes=self.plan.divide_above_bytes,
            files={str(r): record for rank, record in files.items() for r in written[rank].ranks or (rank,)},
            layout=state_to_json(census.tensors),
            paths={key: path_to_json(path) for key, path in census.paths.items() if path != (key,)},
            containers=[(path_to_json(path), kind) for path, kind in census.containers.items()],
            objects=dict(census.objects),
            per_rank={key: {str(r): row for r, row in rows.items()} for key, rows in census.per_rank.items()},
            aliases=dict(census.aliases),
            fingerprints={} if tally is None else digests_of(tally, census.tensors),
            subset=None if self.subset is None else list(self.subset),
            parts=tables or UNSET,
            linked=linked or UNSET,
            table=UNSET if table is None else table,
        )


# Generations: every save writes into a folder of its own. The manifest names the current one.
#
#     manifest.json  ─────────►  data-0192f3c1a8-5d2e.../      the checkpoint
#                                data-0192f3c199-77ab.../      of a save that was killed, or is still running
#
# A folder that no manifest names belongs to a running or a dead save: its claim says which.


CLAIMING_S = 60.0
"""For this many seconds, a new save without a claim is assumed to be about to make it."""
LINKED, LINKED_ENDS = "from-", ("", ".sums", ".blocks")
"""Prefix of links to files of earlier saves, and the suffixes of a data file and of the files beside it."""
_OF_RANK = (".safetensors", ".safetensors.sums", ".safetensors.blocks", ".parts")
"""Suffixes of the files of a rank, after its number."""
_VISIBLE_S = 2.0
"""Longest time until a network file system shows one host what another has written, in seconds."""


def new_save_id() -> str:
    """Return a unique ID that sorts by time."""
    return f"{int(time.time() * 1000):012x}-{secrets.token_hex(6)}"


def save_id_of(job_id: str) -> str:
    """Return the save id for a job id of 24 digits."""
    return f"{job_id[:12]}-{job_id[12:24]}"


_begun: list[float] = [0.0]


def begin() -> float:
    """Return the start time of a save, in seconds since 1970. It is later than those of all earlier
    saves of this process, even if the clock is set back."""
    _begun[0] = max(time.time(), _begun[0] + 1e-6)
    return _begun[0]


def folder_of(save_id: str) -> str:
    """Return the name of a generation's folder within the checkpoint."""
    return f"data-{save_id}"


def refuse_foreign(storage: Storage) -> Mapping[str, int]:
    """Check that a save here neither replaces foreign files nor is confused with them.

    Returns the names and sizes of the files here.

    Raises StorageError if the folder contains an index or manifest that reshard did not write, a
    DCP checkpoint, or a `model.safetensors`, which other readers would take for this checkpoint.
    Raises FormatError for a checkpoint of a newer version.
    """
    names = storage.list()
    ours = detect(storage, names)
    if ours and MANIFEST in names:
        refuse_newer(storage)
    foreign = [name for name in (MANIFEST, HF_INDEX) if name in names and not ours]
    foreign += [".metadata"] if has_dcp(names) else []
    foreign += [name for name in names if name.endswith(".safetensors") and "/" not in name and not ours]
    if foreign:
        what = "a DCP checkpoint (.metadata)" if foreign[0] == ".metadata" else foreign[0]
        raise StorageError(
            f"{storage.url} contains {what}, which is not part of a native checkpoint. Nothing was saved: choose "
            "another folder"
        )
    return names


def claim(storage: Storage, save_id: str) -> None:
    """Publish that this process writes the generation, until `liveness.release_lease`."""
    liveness.take_lease(storage, f"{folder_of(save_id)}/{CLAIM}", save_id)


def check_claimed(storage: Storage, save_id: str, claimer: str) -> None:
    """Before this rank writes, check that the first rank's claim is visible in this rank's storage.

    Args:
        claimer: the first rank and its folder, as text.

    Raises StorageError if the claim is not visible.
    """
    until = time.monotonic() + _VISIBLE_S
    while not has_claim(storage, save_id):
        if time.monotonic() > until:
            raise StorageError(
                f"the files of {claimer} are not visible in {storage.url} from {socket.gethostname()}: "
                "all ranks must pass the same path, to a folder that they share, not to one on each host"
            )
        time.sleep(0.1)


def has_claim(storage: Storage, save_id: str) -> bool:
    """Return True if the generation is claimed: neither finished nor given up."""
    with suppress(FileNotFoundError):
        storage.size(f"{folder_of(save_id)}/{CLAIM}")
        return True
    return False


def counting(storage: Storage) -> str | None:
    """Return the id of the current save, or None if there is no manifest, or it is unreadable or of
    a newer version."""
    try:
        return published(storage)
    except CheckpointError:
        return None


def replaced_by_save(storage: Storage, names: Collection[str], overwrite: bool) -> str | None:
    """Return the id of the save that a new one would replace: the current one, or else the newest
    whose manifest is damaged or lost. Raises CheckpointExistsError if there is one and `overwrite`
    is False."""
    found = counting(storage) or max(without_claim(names), default="").removeprefix("data-") or None
    if found is not None and not overwrite:
        raise CheckpointExistsError(
            f"{storage.url} already contains a checkpoint: choose another folder, or pass "
            "overwrite=True. Nothing was written"
        )
    return found


def unpublish(storage: Storage, save_ids: Collection[str], only: str | None) -> bool:
    """Remove the manifest, so that no generation is current and an interrupted removal does not
    look like a lost manifest. Returns False, and keeps the manifest, if a save other than `only` is
    current."""
    if not _may_retract(storage, only):
        return False
    for save_id in save_ids:
        with suppress(CheckpointNotFoundError):  # another process has removed the folder
            storage.publish(f"{folder_of(save_id)}/{CLAIM}", b"{}")  # a claim of no process
    if not _may_retract(storage, only):  # a save began and ended since `save_ids` were listed
        return False
    storage.delete(HF_INDEX)
    storage.retract(MANIFEST)  # makes both removals durable
    return True


def _may_retract(storage: Storage, only: str | None) -> bool:
    try:
        return only is None or published(storage) in (None, only)
    except CheckpointError:
        return False


def remove_dead(storage: Storage, *, dry_run: bool = False) -> list[str]:
    """Remove generations that are neither current nor being written, except data whose manifest was
    lost. Returns their save ids. With `dry_run`, only returns the ids.

    A save publishes its manifest before it releases its claim. So if a claim is gone, a manifest
    that is read *after* that names this generation or a later one.
    """
    names = storage.names()
    by_id = generations_in(names)
    if not dry_run:
        remove_empty(storage)
    removed, running = [], dry_run
    for save_id, its in by_id.items():
        if is_alive(storage, save_id, its):
            running = True
        elif (counts := published(storage)) != save_id and (counts in by_id or not without_claim(its)):
            if not dry_run:
                remove(storage, save_id, its)
            removed.append(save_id)
    if removed and not dry_run and published(storage) is None:
        _remove_index_of(storage, {folder_of(save_id) for save_id in removed})
    if not running:  # an unfinished manifest may belong to any running save, so the last save to end removes it
        for name in filter(is_temporary, names):
            if name.startswith((MANIFEST, HF_INDEX)):
                storage.delete(name)
    return removed


def generations_in(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each generation's files by save id. Files outside of such folders are foreign."""
    by_id: dict[str, list[str]] = {}
    for name in names:
        folder, slash, _ = name.partition("/")
        if slash and is_generation(folder):
            by_id.setdefault(folder.removeprefix("data-"), []).append(name)
    return by_id


def remove_empty(storage: Storage, others: Collection[str] = ()) -> None:
    """Remove empty generations, left by saves that were killed before they made their claim.

    A save that is just making its claim creates its folder again.

    Args:
        others: folders to remove, too, if they are empty.
    """
    for folder in storage.empty_folders():
        if is_generation(folder) or folder in others:
            storage.delete(f"{folder}/{NOTHING}")


def remove(storage: Storage, save_id: str, names: list[str] | None = None) -> None:
    """Remove a generation. Its claim is removed last, after all other deletions are durable,
    because data without a claim looks like a save whose manifest was lost."""
    claim = f"{folder_of(save_id)}/{CLAIM}"
    names = storage.names(f"{folder_of(save_id)}/") if names is None else names
    *some, last = [name for name in names if name != claim] or [claim]
    for name in some:
        storage.delete(name)
    if claim in names:
        storage.retract(last)
        last = claim
    storage.delete(last)
    removed: list[str] = []
    while (late := storage.names(f"{folder_of(save_id)}/")) and late != removed:  # files of a rank that still wrote
        for name in late:
            storage.delete(name)
        removed = late


def is_alive(storage: Storage, save_id: str, names: list[str]) -> bool:
    """Return True if a process may still be writing the generation. `names` are its files."""
    name = f"{folder_of(save_id)}/{CLAIM}"
    if name not in names:  # the claim is made first and removed last
        return all(map(is_temporary, names)) and time.time() - _began(save_id) < CLAIMING_S
    return liveness.may_be_alive(liveness.read_lease(storage, name), save_id)


def _began(save_id: str) -> float:
    """Return the time at which the save began, in seconds since 1970. Returns 0 for an invalid save id."""
    try:
        return int(save_id.partition("-")[0], 16) / 1000
    except ValueError:
        return 0.0


# For Hugging Face tools, which read no manifest: an index beside a native checkpoint that has one
# file with a model's full tensors. Older releases also wrote it for nested states.
#
# {"metadata": {"total_size": 96}, "weight_map": {"w": "data-<save id>/00000.safetensors"}}


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    weight_map: dict[str, str]
    metadata: dict[str, int] = {}


def _remove_index_of(storage: Storage, folders: Collection[str]) -> None:
    """Remove the index of a checkpoint whose manifest was deleted, if it names only files in these folders."""
    with suppress(CheckpointNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):  # no index of ours
        index = msgspec.json.decode(storage.read(HF_INDEX), type=_Index)
        if index.weight_map and all(file.partition("/")[0] in folders for file in index.weight_map.values()):
            storage.delete(HF_INDEX)


def index_problem(native: NativeFacts) -> str | None:
    """Return how the index would make Hugging Face tools read other tensors than the manifest
    names, or None if it would not."""
    if HF_INDEX not in native.storage.names(HF_INDEX):
        return None
    where = f"{native.storage.url.rstrip('/')}/{HF_INDEX}"
    files = {record.name for record in native.manifest.files.values()}
    expected = None if native.manifest.tables else _weight_map(native.plan, files)
    if expected is None:
        return f"{where}: there must be no index, because tensors span several files: delete it"
    try:
        index = msgspec.json.decode(native.storage.read(HF_INDEX), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"{where}: it is not an index ({error}): delete it, or save again. Only Hugging Face tools read it"
    found, metadata = index.weight_map, {"total_size": native.plan.total_bytes}
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if not wrong and index.metadata != metadata:
        return f"{where}: its metadata is {index.metadata}, but by the manifest it is {metadata}: it was changed"
    if not wrong:
        return None
    says, is_in = (f"in {of[wrong[0]]}" if wrong[0] in of else "nowhere" for of in (found, expected))
    return (
        f"{where}: it says that {wrong[0]!r} is {says}, but by the manifest it is {is_in} ({len(wrong)} names differ). "
        "Hugging Face tools would read the wrong tensors. Delete the index, or save again"
    )


def _weight_map(plan: SavePlan, files: Collection[str]) -> dict[str, str] | None:
    """Return the file of each tensor, or None unless a single file contains all tensors, in full."""
    if len(files) != 1:
        return None
    for assigned in plan.assignments:
        shape = plan.layout[assigned.names[0]].spec.shape
        # each rank's part must end between two tensors
        if (assigned.chunks.sizes != shape).any() or (assigned.ends % assigned.units.max(initial=1)).any():
            return None
    return dict.fromkeys(plan.layout, *files)
