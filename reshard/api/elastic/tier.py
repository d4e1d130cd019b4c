"""`Tier`: keeps a job's last states in the memory of its hosts, or on their local disks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from planners.errors import PlanError
from planners.plans.copy_peers import CopyPlan, plan_copies
from planners.plans.plan import verify
from planners.units import format_bytes
from reshard.api.background_saves import start_in_background
from reshard.api.elastic.generation import (
    LINEAGE,
    GenerationFolder,
    Hosts,
    Incarnation,
    Moves,
    Settings,
    TierRestoreReport,
    TierSaveReport,
    free_bytes,
    good_ranges,
    meet,
    move,
    remove,
)
from reshard.api.elastic.lineage import FoundGenerations
from reshard.api.elastic.recover import recover
from reshard.api.options import DtypePolicy, LoadOptions, Mode, SaveOptions
from reshard.api.save import PendingSave, agreed_plan
from reshard.api.save_job import Choice, SaveJob, entries_of, write
from reshard.api.staging import ToWrite, staged
from reshard.arguments import check_arguments, checked_step, renamed
from reshard.errors import CorruptCheckpointError, LayoutError, OptionError, ReshardError, StorageError, option_error
from reshard.execute.exchange import new_group
from reshard.live.fingerprints import add_tallies, pack_tally
from reshard.native import commit
from reshard.native.commit import Generation, Written
from reshard.native.data_file import Entry
from reshard.native.manifest import BLOCK_BYTES, MANIFEST, FileRecord, encode_sealed
from reshard.ranks.group import DEADLINE_S, Group
from reshard.ranks.progress import current, phase
from reshard.storage.base import AnyPath, check_name
from reshard.storage.local import LocalStorage
from reshard.stored.source import OnBytes

if TYPE_CHECKING:
    from reshard.mapping import Mapping as StateMapping

_PACED_BYTES = 4 << 20
"""Bytes in flight under a rate limit. Short bursts let the job's messages through."""


@renamed(keep="save", async_keep="async_save", recover="restore")
class Tier:
    """An in-memory checkpoint: a folder on each host that holds the last states of a job. In shared
    memory, it survives the processes. On a local disk, it also survives a restart of the host.

        tier = reshard.elastic.Tier("/dev/shm/run1", copies=1)
        tier.save(state, step=100)    # on all ranks, every few steps
        report = tier.restore(state)  # on all ranks, after a loss; hosts, ranks, and layouts may differ

    Each host has its own folder below `folder`. It holds at most two generations: the last complete
    one, and the next one while it is written. If hosts come back with different generations, each
    keeps its own until the next one is complete.

    Args:
        folder: a local path, the same on all hosts. Each job needs its own.
        host: name of this rank's host. Default: the name of the machine. Ranks with the same name
            share the folder.
        copies: number of hosts that may be lost at once without losing data. Each rank's data is
            copied to this number of other hosts.
        process_group: the ranks that save and restore together. Default: the default group, or this
            process alone.
        max_inflight_bytes: limit for the memory of messages in flight, on each rank.
        timeout: limit for each call, in seconds or as a `timedelta`.

    Raises OptionError for invalid arguments.
    """

    @renamed(deadline_s="timeout")
    def __init__(
        self,
        folder: AnyPath,
        *,
        host: str | None = None,
        copies: int = 1,
        process_group: dist.ProcessGroup | None = None,
        max_inflight_bytes: int = 256 << 20,
        timeout: float | timedelta = DEADLINE_S,
    ) -> None:
        text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        if not text or "://" in text:
            raise OptionError(f"folder must be a path on each host, such as '/dev/shm/run1', got {folder!r:.80}")
        if not isinstance(copies, int) or copies < 0:
            raise OptionError(f"copies must be a number of hosts >= 0, got {copies!r:.80}")
        if not isinstance(max_inflight_bytes, int) or max_inflight_bytes < 1024:
            raise OptionError(f"max_inflight_bytes must be at least 1024, got {max_inflight_bytes!r:.80}")
        name = socket.gethostname() if host is None else host
        if "/" in check_name(name, text):
            raise OptionError(f"host must be the name of one folder, got {name!r:.80}")
        path = Path(os.path.abspath(text))
        self.settings = Settings(path, name, copies, process_group, max_inflight_bytes, timeout)
        self._known: tuple[Hosts, tuple[int, ...]] | None = None
        self._incarnation: Incarnation | None = None  # of the job, on the first rank
        self._pending: PendingSave[TierSaveReport] | None = None
        self._wire: dist.ProcessGroup | None = None

    @renamed()
    def save(
        self,
        state_dict: Mapping[str, Any],
        step: int,
        *,
        check_replicas: bool = SaveOptions.check_replicas,
        fingerprints: bool = SaveOptions.fingerprints,
    ) -> TierSaveReport:
        """Collective: save a state dict as the next generation. The previous generation is deleted
        once all hosts have the new one.

        Each rank writes the part that `reshard.save` would write, with checksums. Its copies are sent
        and checked before the generation counts. If a save fails or is killed at any point, the
        previous generation stays.

        Args:
            state_dict: as for `reshard.save`.
            step: your number for this state; `restore` reports it.
            check_replicas: as in `reshard.save`.
            fingerprints: store a fingerprint of each tensor. Without them, `restore` cannot fill
                lost tensors from a fallback.

        Raises the errors of `reshard.save`, and these. Nothing is saved then, and the previous
        generation stays:
            OptionError: there are fewer hosts than `copies + 1`.
            StorageError: a host does not have enough space, or its folder belongs to another job.
        """
        group = self._group()
        with phase("Tier.save", path=self.settings.folder), group.together("Tier.save"):
            options = SaveOptions(check_replicas=check_replicas, fingerprints=fingerprints)
            job = self._begun(group, "Tier.save", state_dict, step, options)
            return job.finish(ToWrite.in_place(job.entries), group.process_group)

    @renamed()
    def async_save(
        self,
        state_dict: Mapping[str, Any],
        step: int,
        *,
        bytes_per_s: float = 256 << 20,
        check_replicas: bool = SaveOptions.check_replicas,
        fingerprints: bool = SaveOptions.fingerprints,
    ) -> PendingSave[TierSaveReport]:
        """Like `save`, but return as soon as each rank has copied its part in memory.

        The generation has the values at the time of the call. While the job trains, files are written,
        and copies are sent over a separate gloo group. The previous generation counts until all copies
        have arrived.

        At most one save is in progress. The next call of any method first waits for it. If it failed,
        that call raises its error on all ranks, unless they have called its `result()`.

        Args:
            state_dict, step, check_replicas, fingerprints: as for `save`.
            bytes_per_s: limit for the average bandwidth that each rank uses to send and receive.
        """
        group = self._group()
        with phase("Tier.async_save", path=self.settings.folder, goes_on=True):
            with group.together("stage"):
                check_bytes_per_s(bytes_per_s)
                options = SaveOptions(check_replicas=check_replicas, fingerprints=fingerprints)
                job = self._begun(group, "Tier.async_save", state_dict, step, options, bytes_per_s=bytes_per_s)
                wire = self._own_wire(group)
                try:
                    data = staged(job.entries, "host", fingerprints=fingerprints)
                except BaseException as error:
                    job.give_up(error)
                    raise

            def work() -> TierSaveReport:
                try:
                    with group.together("Tier.async_save"):
                        return job.finish(data, wire, Pace(bytes_per_s, group.check))
                except BaseException:
                    self._wire = None  # it may have messages in flight
                    raise
                finally:
                    data.release()

            self._pending = PendingSave(start_in_background(work, f"reshard-keep-{step}"))
            return self._pending

    @renamed()
    def restore(
        self,
        state_dict: dict[str, Any],
        fallback: Any = None,
        *,
        step: int | None = None,
        strict: bool | Mode | Mapping[str, Mode] = LoadOptions.strict,
        dtype_policy: DtypePolicy = LoadOptions.dtype_policy,
        mapping: Mapping[str, str] | StateMapping | None = LoadOptions.mapping,
    ) -> TierRestoreReport:
        """Collective: fill `state_dict` in place from the newest generation that survives
        completely. Ranks, hosts, and layouts may differ.

        All ranks load the same generation, or none. A block whose checksum does not match counts as
        lost, and another host's copy is used. Each host receives the data that it lacks once, from
        hosts that have it. A host may bring back a generation from which the job did not continue.
        Such a generation never counts as newer, and `TierRestoreReport.skipped` lists it. Everything
        else, including errors, is as in `reshard.load`.

        Args:
            state_dict: as for `reshard.load`.
            fallback: the path, URL, or `Storage` of a checkpoint. Tensors that survive on no host are
                read from it if their saved fingerprints are equal. If they are not, an older
                generation or the complete fallback is loaded, whichever is newer.
            step: load a generation of this step, or none. Default: the newest.
            strict, dtype_policy, mapping: as in `reshard.load`.

        Raises (nothing was written; the same error on all ranks):
            CheckpointNotFoundError: no generation is complete. The message says what each one
                lacks, and which files are damaged.
            CheckpointError: there are two candidates for the last generation. To choose one, pass
                `step`.
        """
        group = self._group()
        with phase("Tier.restore", path=self.settings.folder), group.together("Tier.restore"):
            self._settle()
            if step is not None:
                step = checked_step(step, "restore(state_dict, step=step)")
            options = LoadOptions(strict=strict, dtype_policy=dtype_policy, mapping=mapping)
            chosen = {"fallback": str(fallback), "step": step}
            group.same_options("Tier.restore", {**self._shared(), **chosen, **options.shared()})
            if fallback is not None:
                check_arguments("Tier.restore", state_dict, fallback)
            hosts = self._meet(group)
            report, self._incarnation = recover(self.settings, state_dict, fallback, step, options, group, hosts)
            return report

    def _newest_step(self) -> int:
        """Collective: return the largest step of the generations that count on some host, or -1."""
        group = self._group()
        with group.together("Tier.restore"):
            self._settle()
            rows = self._meet(group).gather_kept(group)
            steps = [kept.step for row in rows or () for kept, record in row.items() if record.made]
            return group.share(max(steps, default=-1), kind=int)

    def clear(self) -> None:
        """Collective: delete all generations of the job, on all hosts. Call it when the job has
        succeeded."""
        group = self._group()
        with group.together("clear"):
            self._settle()
            self._leave(self._meet(group))

    def _leave(self, hosts: Hosts) -> None:
        """Remove everything from the folder of this host, and the claim to it."""
        self._known = None
        if hosts.leads:
            hosts.check_owner()
            remove(hosts.folder)
            LocalStorage(self.settings.folder).delete(f"{self.settings.host}/owner.json")
            with suppress(OSError):  # where another host has its folder there, too
                self.settings.folder.rmdir()

    def _begun(self, group: Group, verb: str, state: Any, step: int, options: SaveOptions, **more: object) -> _KeepJob:
        """Collective: return the next generation, before anything of it is written."""
        self._settle()
        step = checked_step(step, "save(state_dict, step)")
        group.same_options(verb, {**self._shared(), "step": step, **options.shared(), **more})
        if check_arguments(verb, state, self.settings.folder):
            from reshard.api.stateful_objects import LiveObjects

            state = LiveObjects(state).state
        is_new = not (self.settings.folder / self.settings.host).exists()
        hosts = self._meet(group)
        try:
            job, self._incarnation = _KeepJob.begin(
                self.settings, state, step, options, group, hosts, self._incarnation
            )
        except BaseException:
            if is_new:
                with suppress(ReshardError):  # the first error is what the caller must see
                    self._leave(hosts)
            raise
        return job

    def _settle(self) -> None:
        """Collective: wait for saves in the background."""
        if self._pending is not None and not self._pending._is_known:
            self._pending.result()
        self._pending = None  # not before: KeyboardInterrupt may end the wait

    def _own_wire(self, group: Group) -> dist.ProcessGroup | None:
        """Collective: return the group that sends copies while the job uses the process group for
        its own messages."""
        if self._wire is None and group.world_size > 1:
            self._wire = new_group(group)
        return self._wire

    def _group(self) -> Group:
        return Group(self.settings.process_group, deadline_s=self.settings.timeout)

    def _meet(self, group: Group) -> Hosts:
        """Collective: find out which rank is on which host. This is done once."""
        ranks = tuple(group.ranks)
        is_new = self._known is None or self._known[1] != ranks
        if group.merge(is_new, any, "the exchange of hosts") or not self._known:
            self._known = meet(self.settings.folder, self.settings.host, group), ranks
            self._incarnation = None
        return self._known[0]

    def _shared(self) -> dict[str, object]:
        names = ("folder", "copies", "max_inflight_bytes")
        return {name: getattr(self.settings, name) for name in names}

    def __repr__(self) -> str:
        its = self.settings
        return f"Tier({str(its.folder)!r}, host={its.host!r}, copies={its.copies})"


def check_bytes_per_s(bytes_per_s: object) -> None:
    """Raise OptionError if this is not a positive rate."""
    if not (isinstance(bytes_per_s, int | float) and bytes_per_s > 0):
        raise OptionError(f"bytes_per_s must be a positive number, got {bytes_per_s!r:.80}")


# `save`: each rank writes its part into the folder of its host, other hosts get copies, and then it
# counts.


class Pace:
    """Limits the number of bytes per second.

    Args:
        check: called while it waits; raises if waiting is useless.
    """

    def __init__(self, bytes_per_s: float, check: Callable[[], None]) -> None:
        self._bytes_per_s, self._check = bytes_per_s, check
        self._free_at = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        """Wait until these bytes may be sent."""
        while (left_s := self._free_at - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
            self._check()
        self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bytes_per_s


@dataclass(frozen=True)
class _KeepJob:
    """A generation in progress: what one rank writes, and the copies that it sends."""

    settings: Settings
    save: SaveJob
    hosts: Hosts
    kept: GenerationFolder
    copies: CopyPlan
    entries: Sequence[Entry]

    @classmethod
    def begin(
        cls,
        settings: Settings,
        state: Any,
        step: int,
        options: SaveOptions,
        group: Group,
        hosts: Hosts,
        incarnation: Incarnation | None,
    ) -> tuple[_KeepJob, Incarnation]:
        """Collective: begin.

        Args:
            incarnation: that of the job, which the first rank knows; None if it begins with this
                generation. It is also returned.
        """
        holdings, planned, census, *_ = agreed_plan(state, group, options)
        with phase("plan"):
            nbytes = [planned.plan.bytes(rank) for rank in group.ranks]
            copies = _planned_copies(group, hosts, nbytes, settings.copies)
            entries = entries_of(planned.items, planned.plan.layout, holdings.state, group.job_rank)
            kept, incarnation = _begin(step, group, hosts, copies, incarnation)
            storage = LocalStorage(hosts.folder / kept.folder)
            generation = Generation(storage, kept.save_id, commit.begin(), census, planned.plan, None)
            save = SaveJob(group, storage, storage.url, generation, options, Choice(), None)
        return cls(settings, save, hosts, kept, copies, entries), incarnation

    def finish(self, data: ToWrite, wire: dist.ProcessGroup | None, pace: OnBytes | None = None) -> TierSaveReport:
        """Collective: finish. The previous generation counts until all hosts have all of their
        files, and is then removed."""
        group, hosts = self.save.group, self.hosts
        may_count = False
        try:
            with group.together("write"):
                written, _, prints = write(self.save, data, [])
                with phase("copy"):
                    received = self._mirror(written.record, wire, pace)
                may_count = True  # as soon as all ranks are known to be here, some host may publish
                tally = pack_tally(prints, self.save.generation.census.tensors)
                told = group.gather_and_sum((group.job_rank, written), tally, add_tallies, kind=tuple[int, Written])
            with phase("publish"):
                text, _ = group.scatter(self._texts(told))
                if hosts.leads:
                    self.save.storage.publish_while(MANIFEST, text, hosts.check_owner)
                group.barrier()
        except BaseException as error:
            if not may_count:
                self.give_up(error)
            raise
        if hosts.leads:
            with phase("remove"):
                hosts.check_owner()
                remove(hosts.folder, [self.kept])
        total_bytes = self.save.generation.plan.total_bytes
        return TierSaveReport(current.get(), received, *self.kept, total_bytes, self.copies.bytes_by_host)

    def _mirror(self, record: FileRecord | None, wire: dist.ProcessGroup | None, pace: OnBytes | None) -> int:
        """Collective: send copies of this rank's file to other hosts, and receive and check copies of theirs."""
        group, copies = self.save.group, self.copies
        files = group.exchange_within(f"ring {copies.ring_of[self.hosts.name]}", record, kind=FileRecord | None)
        moves, mine = Moves({}, {}, {}), list[FileRecord]()
        for place, its in files.items():
            keepers = copies.keepers[place]
            if its is None or not keepers:
                continue
            whole = [(0, its.nbytes)]
            moves.add(its, BLOCK_BYTES, {group.ranks[place]: whole}, {group.ranks[keeper]: whole for keeper in keepers})
            if group.rank in keepers:
                mine.append(its)
        storage, budget = LocalStorage(self.hosts.folder / self.kept.folder), self.settings.max_inflight_bytes
        where, budget = storage.root.joinpath, budget if pace is None else min(budget, _PACED_BYTES)
        received = move(moves, where, where, group, wire, max_inflight_bytes=budget, pace=pace)
        for its in mine:
            if good_ranges(storage, its, BLOCK_BYTES) != [(0, its.nbytes)]:
                raise CorruptCheckpointError(f"{storage.url}/{its.name} is not what was sent: its checksums differ")
        return received

    def give_up(self, cause: BaseException) -> None:
        """Remove this rank's files of a failed generation. The first rank of a host removes those
        of the host. Other ranks may still use their own files. They must get the error that caused
        the failure, not one about missing files."""
        group, storage = self.save.group, LocalStorage(self.hosts.folder)
        places = [place for place, those in enumerate(self.copies.keepers) if group.rank in (place, *those)]
        own = {f"{group.ranks[place]:05d}" for place in places}
        try:
            for name in storage.list(f"{self.kept.folder}/"):
                stem = Path(name).name.partition(".")[0]
                if stem in own or (self.hosts.leads and not stem.isdecimal()):
                    storage.delete(name)
        except ReshardError as second:  # the first error is what the caller must see; the next save removes the rest
            cause.add_note(f"deleting the unfinished generation failed too: {second}")

    def _texts(self, told: tuple[list[tuple[int, Written]], bytes] | None) -> list[bytes] | None:
        """Return the manifest for the first rank of each host, by the place of that rank."""
        if told is None:
            return None
        tally = told[1] if self.save.options.fingerprints else None
        text = encode_sealed(self.save.generation.manifest(dict(told[0]), tally))
        firsts = {places[0] for places in self.hosts.places.values()}
        return [text if place in firsts else b"" for place in range(self.save.group.world_size)]


def _planned_copies(group: Group, hosts: Hosts, nbytes: list[int], copies: int) -> CopyPlan:
    try:
        plan = plan_copies(hosts.names, nbytes, copies=copies)
    except PlanError as error:
        group.refuse(option_error(str(error), LayoutError))
    verify(plan).raise_if_failed()
    return plan


class _NextKept(NamedTuple):
    kept: GenerationFolder
    before: list[GenerationFolder]
    """Generations that stay until the new one counts."""
    incarnation: Incarnation


def _begin(
    step: int, group: Group, hosts: Hosts, copies: CopyPlan, incarnation: Incarnation | None
) -> tuple[GenerationFolder, Incarnation]:
    """Collective: return the next generation. Removes unusable generations, and checks that there
    is space."""
    rows = hosts.gather_kept(group)
    begun = None
    if rows is not None:
        begun = _next(step, FoundGenerations.of(zip(hosts.names, rows)), len(hosts.places), incarnation)
    kept, before, incarnation = group.share(begun, kind=_NextKept)
    need = copies.bytes_by_host[hosts.name] * (1 if before else 2)
    if hosts.leads:
        hosts.check_owner()
        remove(hosts.folder, before)
        if (free := free_bytes(hosts.folder)) < need:
            two = "" if before else "two generations of "
            raise StorageError(
                f"host {hosts.name!r} must hold {two}{format_bytes(copies.bytes_by_host[hosts.name])}: its own part, "
                f"and copies of other hosts. But {hosts.folder} has only {format_bytes(free)} left. Make the file "
                "system larger, keep fewer copies, or run on more hosts"
            )
        LocalStorage(hosts.folder / kept.folder).publish(LINEAGE, encode_sealed(incarnation))
    group.barrier()
    return kept, incarnation


def _next(step: int, found: FoundGenerations, hosts: int, incarnation: Incarnation | None) -> _NextKept:
    """Return the next generation. Of the earlier ones, the newest that all hosts have stays; if
    there is none, all stay."""
    incarnation = incarnation or found.begin(None)
    number = max(incarnation.first, 1 + max((kept.number for kept in found.incarnations), default=0))
    everywhere = [kept for kept, those in found.hosts.items() if len(those) == hosts]
    before = found.order(everywhere).newest if everywhere else list(found.hosts)
    return _NextKept(GenerationFolder(number, step, commit.new_save_id()), before, incarnation)
