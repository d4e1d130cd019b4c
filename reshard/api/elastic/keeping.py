"""`keep`: each rank writes its part into the folder of its host, other hosts get copies, and then it counts."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from planners.errors import PlanError
from planners.save.copies import CopyPlan, plan_copies, verify_copies
from planners.units import format_bytes
from reshard.api.elastic.hosts import Hosts, Settings, free_bytes
from reshard.api.elastic.incarnation import LINEAGE, Incarnation
from reshard.api.elastic.kept import Kept, Recorded, good_ranges, kept_in, remove
from reshard.api.elastic.lineage import Found
from reshard.api.elastic.moving import move
from reshard.api.elastic.reports import KeepReport
from reshard.api.save.base import Choice
from reshard.api.save.job import Job, entries_of, holdings_of, own_items, planned_writes, tally, total, write
from reshard.api.save.options import SaveOptions
from reshard.api.save.staging import ToWrite
from reshard.control.global_state import with_objects
from reshard.control.group import Group
from reshard.errors import DamagedCheckpointError, LayoutError, ReshardError, StorageError
from reshard.formats.native import generations
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import BLOCK_BYTES, MANIFEST, encode_manifest
from reshard.formats.native.publish import Generation, Written
from reshard.state.fingerprints.tally import add_tallies
from reshard.storage.local import LocalStorage

__all__ = ["keep"]


def keep(
    settings: Settings,
    state: Any,
    step: int,
    options: SaveOptions,
    group: Group,
    hosts: Hosts,
    incarnation: Incarnation | None,
) -> tuple[KeepReport, Incarnation]:
    """Collective. Until all hosts have all that is theirs, the generation before counts; then it goes.

    Args:
        incarnation: of the job, which the first rank knows; None if it begins with this. The same is returned.
    """
    clock = time.perf_counter()
    holdings = holdings_of(state, options)
    census, plan = planned_writes(holdings, group, options, group.parties(holdings.said))
    census = with_objects(census, holdings, group, check_replicas=options.check_replicas)
    copies = _planned_copies(group, hosts, [plan.bytes(rank) for rank in group.ranks], settings.copies)
    kept, incarnation = _begin(step, group, hosts, copies, incarnation)
    storage = LocalStorage(hosts.folder / kept.folder)
    generation = Generation(storage, kept.save_id, generations.begin(), census, plan, None)
    job = Job(group, storage, storage.url, generation, options, Choice(), None, {})
    planned, may_count = time.perf_counter(), False
    try:
        with group.together("write"):
            entries = entries_of(own_items(census.layout, plan, job.rank), holdings.state, job.rank)
            written, _, prints = write(job, ToWrite.where_it_is(entries), [])
            wrote = time.perf_counter()
            received = _mirror(settings, written.record, storage, copies, group, hosts)
            may_count = True  # as soon as all ranks are known to be here, some host may publish
            mine = msgspec.msgpack.encode((job.rank, written))
            told = group.gather_and_sum(mine, tally(job, prints), add_tallies)
        texts = None
        if told is not None:
            rows = [msgspec.msgpack.decode(row, type=tuple[int, Written]) for row in told[0]]
            files = {rank: one for rank, one in rows if one.files}
            parts = [total(job, told[1])] if files and options.fingerprints else []
            text = encode_manifest(generation.manifest(files, parts))
            firsts = {places[0] for places in hosts.places.values()}
            texts = [text if place in firsts else b"" for place in range(group.world_size)]
        text, _ = group.scatter(texts)
        if hosts.leads:
            storage.publish(MANIFEST, text)
        group.barrier()
    except BaseException as error:
        if not may_count:
            _give_up(hosts.folder, kept, error)
        raise
    mirrored = time.perf_counter()
    if hosts.leads:
        remove(hosts.folder, [kept])
    seconds = {"plan": planned - clock, "write": wrote - planned, "copy": mirrored - wrote}
    nbytes = copies.bytes_by_host
    report = KeepReport(kept.number, kept.step, kept.save_id, plan.total_bytes, nbytes, received, seconds)
    return report, incarnation


def _planned_copies(group: Group, hosts: Hosts, nbytes: list[int], copies: int) -> CopyPlan:
    try:
        plan = plan_copies(hosts.names, nbytes, copies=copies)
    except PlanError as error:
        group.refuse(LayoutError(str(error)))
    verify_copies(plan).raise_if_failed()
    return plan


class _NextKept(NamedTuple):
    kept: Kept
    before: list[Kept]
    """What stays until the new one counts."""
    incarnation: Incarnation


def _begin(
    step: int, group: Group, hosts: Hosts, copies: CopyPlan, incarnation: Incarnation | None
) -> tuple[Kept, Incarnation]:
    """Collective: the next generation. What neither counts nor ever will is removed, and there must be room."""
    told = group.gather(msgspec.msgpack.encode(list(kept_in(hosts.folder).items()) if hosts.leads else []))
    begun = None
    if told is not None:
        rows = [dict(msgspec.msgpack.decode(row, type=list[tuple[Kept, Recorded]])) for row in told]
        begun = msgspec.msgpack.encode(_next(step, Found.of(zip(hosts.names, rows)), len(hosts.places), incarnation))
    kept, before, incarnation = msgspec.msgpack.decode(group.share(begun), type=_NextKept)
    need = copies.bytes_by_host[hosts.name] * (1 if before else 2)
    if hosts.leads:
        remove(hosts.folder, before)
        if (free := free_bytes(hosts.folder)) < need:
            two = "" if before else "two generations of "
            raise StorageError(
                f"host {hosts.name!r} must hold {two}{format_bytes(copies.bytes_by_host[hosts.name])}, its own part "
                f"and copies of others', but {hosts.folder} has {format_bytes(free)} left: make the file system "
                "larger, keep fewer copies, or run on more hosts"
            )
        LocalStorage(hosts.folder / kept.folder).publish(LINEAGE, incarnation.encode())
    group.barrier()
    return kept, incarnation


def _next(step: int, found: Found, hosts: int, incarnation: Incarnation | None) -> _NextKept:
    """The generation that begins. Of those before, the newest stays that all hosts have; all, if they have none."""
    incarnation = incarnation or found.begin(None)
    number = max(incarnation.first, 1 + max((kept.number for kept in found.incarnations), default=0))
    everywhere = [kept for kept, those in found.hosts.items() if len(those) == hosts]
    before = found.order(everywhere).newest if everywhere else list(found.hosts)
    return _NextKept(Kept(number, step, generations.new_save_id()), before, incarnation)


def _mirror(
    settings: Settings, record: FileRecord | None, storage: LocalStorage, copies: CopyPlan, group: Group, hosts: Hosts
) -> int:
    """Collective: copies of this rank's file go to other hosts, and copies of theirs come here and are checked."""
    rows = group.among(f"ring {copies.ring_of[hosts.name]}", msgspec.msgpack.encode(record))
    files = {place: msgspec.msgpack.decode(row, type=FileRecord | None) for place, row in rows.items()}
    held: dict[str, dict[int, list[tuple[int, int]]]] = {}
    wanted: dict[str, dict[int, list[tuple[int, int]]]] = {}
    sizes: dict[str, int] = {}
    mine: list[FileRecord] = []
    for place, its in files.items():
        if its is None or not copies.keepers[place]:
            continue
        for name, nbytes in ((its.name, its.nbytes), (f"{its.name}.sums", 8 * -(-its.nbytes // BLOCK_BYTES))):
            sizes[name], whole = nbytes, [(0, nbytes)]
            held[name] = {group.ranks[place]: whole}
            wanted[name] = {group.ranks[keeper]: whole for keeper in copies.keepers[place]}
        if group.rank in copies.keepers[place]:
            mine.append(its)
    where = storage.root.joinpath
    received = move(
        held, wanted, sizes, where, where, group, settings.process_group, max_inflight_bytes=settings.max_inflight_bytes
    )
    for its in mine:
        if good_ranges(storage, its, BLOCK_BYTES) != [(0, its.nbytes)]:
            raise DamagedCheckpointError(f"{storage.url}/{its.name} is not what was sent: its checksums differ")
    return received


def _give_up(folder: Path, kept: Kept, cause: BaseException) -> None:
    """Remove what this host has of a generation that will never count."""
    storage = LocalStorage(folder)
    try:
        for name in storage.list(f"{kept.folder}/"):
            with suppress(FileNotFoundError):
                storage.delete(name)
    except ReshardError as second:  # the first error is what the caller must see; the next generation removes the rest
        cause.add_note(f"removing the unfinished generation failed too: {second}")
