"""`recover` loads the newest complete generation; `gather` makes an ordinary checkpoint of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from planners.geometry.box import Box, Range
from planners.geometry.byte_ranges import merge_ranges
from planners.units import format_count, format_some
from reshard.api.elastic.generation import (
    GatherReport,
    GenerationFolder,
    Held,
    Hosts,
    Incarnation,
    ManifestStamp,
    Moves,
    Settings,
    Survivors,
    TierRestoreReport,
    blocks_of,
    fetched_folder,
    good_ranges,
    held_in,
    kept_in,
    lost_boxes,
    move,
    remove,
)
from reshard.api.elastic.lineage import FoundGenerations
from reshard.api.load import LoadReport, ReadPlan, load_with
from reshard.api.options import LoadOptions
from reshard.api.task_shares import absolute
from reshard.api.tasks import check_executor, run_tasks
from reshard.arguments import check_options
from reshard.checkpoint import Checkpoint, open as open_checkpoint, open_among
from reshard.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    RankFailedError,
    ReshardError,
    StorageError,
    format_ranks,
)
from reshard.execute.reading import Workspace
from reshard.formats.detect import refuse_first_step, refuse_run
from reshard.native import commit, reader
from reshard.native.manifest import HF_INDEX, MANIFEST, FileRecord, read_manifest
from reshard.native.reader import NativeFacts, compare_ranges
from reshard.ranks.group import Group
from reshard.ranks.liveness import release_lease
from reshard.ranks.progress import current, phase
from reshard.storage.base import AnyPath, Storage
from reshard.storage.local import LocalStorage
from reshard.storage.opening import open_storage
from reshard.stored.checksums import Checking
from reshard.stored.contents import LazyMapping
from reshard.stored.source import Files, FileSource


class _Candidate(NamedTuple):
    """A generation or checkpoint that could be loaded."""

    kept: GenerationFolder | None
    """The generation. None: the fallback, a checkpoint in storage."""
    place: int
    """The index of a rank whose host has the manifest."""
    left: list[str]
    """Why each newer generation is not used if this one is."""


class _Candidates(NamedTuple):
    newest_first: list[_Candidate]
    tied: str
    """Why the order of the remaining generations is unknown. Empty if none remain."""
    steps: list[int]
    """The steps of all generations that are complete on some host."""
    unusable: list[str]
    """Why the fallback cannot be opened. Empty if it can."""


class _Verdict(NamedTuple):
    refused: str
    """Why the candidate cannot be loaded. Empty if it can."""
    lost: tuple[str, ...]
    """Tensors that the fallback has instead."""


def recover(
    settings: Settings, state: Any, fallback: Any, step: int | None, options: LoadOptions, group: Group, hosts: Hosts
) -> tuple[TierRestoreReport, Incarnation | None]:
    """Collective: load the newest complete generation. Generations that were not loaded, and
    fetched files, are removed once all ranks have loaded.

    Returns the incarnation of the job that begins with this, too, on the first rank.
    """
    with phase("find"):
        found, candidates = _candidates(settings, fallback, step, group, hosts)
    passed = candidates.unusable
    try:
        taken = _first_whole(settings, state, fallback, candidates.newest_first, options, group, hosts, passed)
    except BaseException:
        if hosts.leads:
            with suppress(ReshardError):  # the next recovery, or generation, removes what was fetched
                remove(hosts.folder, list(kept_in(hosts.folder)))
        raise
    if taken is None and candidates.tied:
        group.refuse(CheckpointError("; ".join([*passed, candidates.tied])))
    if taken is None:
        group.refuse(CheckpointNotFoundError(_none_text(settings, fallback, step, candidates, passed, hosts)))
    report, kept = taken
    return report, found.begin(kept) if found is not None else None


def _none_text(
    settings: Settings, fallback: Any, step: int | None, candidates: _Candidates, passed: list[str], hosts: Hosts
) -> str:
    """Return the error for a recovery in which nothing can be loaded, with the reasons."""
    if step is not None:
        steps = ", ".join(map(str, candidates.steps)) or "none at all"
        why = "; ".join(passed) or f"found on {format_count(len(hosts.places), 'host')}: {steps}"
        return f"no generation of step {step} in {settings.folder} is complete: {why}"
    none = "; ".join(passed) or f"none is usable on {format_count(len(hosts.places), 'host')}"
    advice = "" if fallback is not None else ". Pass a checkpoint as fallback=, or start from scratch"
    return f"no generation in {settings.folder} is complete: {none}{advice}"


def _first_whole(
    settings: Settings,
    state: Any,
    fallback: Any,
    newest_first: list[_Candidate],
    options: LoadOptions,
    group: Group,
    hosts: Hosts,
    passed: list[str],
) -> tuple[TierRestoreReport, GenerationFolder | None] | None:
    """Collective: load the newest candidate that can be loaded. `passed` gets the reasons why newer
    ones cannot be."""
    refused: list[GenerationFolder] = []
    for candidate in newest_first:
        if candidate.kept is None:
            with phase("load"):
                is_last = candidate is newest_first[-1]
                load = _load_fallback(state, fallback, options, group, is_last=is_last)
            if isinstance(load, str):
                passed.append(load)
                continue
            passed += candidate.left
            keep = [kept for kept in kept_in(hosts.folder) if kept not in refused] if hosts.leads else []
            return _report(None, (), passed, load, group, hosts, keep), None
        with phase("check"):
            found = _CheckedGeneration.look(settings, candidate, group, hosts)
            verdict = found.judge(fallback)
        if verdict.refused:
            passed.append(verdict.refused)
            refused.append(candidate.kept)
            continue
        with phase("load"):
            load = found.load(state, fallback, verdict.lost, options)
        passed += candidate.left
        return _report(found, verdict.lost, passed, load, group, hosts, [candidate.kept]), candidate.kept
    return None


class _FallbackEnd(NamedTuple):
    why: str
    """Why the fallback cannot be used. Empty if it can, or on a rank that does not know."""
    is_final: bool
    """True if there is another error, or if the state was already written to."""

    @staticmethod
    def join(ends: list[_FallbackEnd]) -> _FallbackEnd:
        why = max(end.why for end in ends)
        return _FallbackEnd(why, any(end.is_final for end in ends))


def _load_fallback(state: Any, fallback: Any, options: LoadOptions, group: Group, *, is_last: bool) -> LoadReport | str:
    """Collective: load the complete fallback.

    If it is damaged, nothing was written, and it is not the last candidate, return the reason.
    """
    if is_last:
        return load_with(group, state, fallback, options)
    own = Group(group.process_group, deadline_s=group.allowed_s)  # `group` serves on if this fails
    error, load = None, None
    try:
        with own.together("fallback"):
            load = load_with(own, state, fallback, options)
    except ReshardError as refused:
        error = refused
    is_damaged = isinstance(error, CheckpointError)
    is_other = error is not None and not is_damaged and not isinstance(error, RankFailedError)
    mine = _FallbackEnd(str(error) * is_damaged, is_other or own.writes)
    end = group.merge(mine, _FallbackEnd.join, "the fallback")
    if end.why and not end.is_final:
        return f"the fallback was not used: {end.why}"
    if load is None:
        group.refuse(error or CheckpointError(end.why))
    return load


def _report(
    found: _CheckedGeneration | None,
    lost: tuple[str, ...],
    passed: list[str],
    load: LoadReport,
    group: Group,
    hosts: Hosts,
    keep: list[GenerationFolder],
) -> TierRestoreReport:
    group.barrier()  # no rank still needs what it requested from others
    if hosts.leads:
        hosts.check_owner()
        remove(hosts.folder, keep)
    report = TierRestoreReport(
        number=None,
        step=None,
        from_fallback=lost,
        skipped=tuple(passed),
        bytes_received=0,
        bytes_checked=load.bytes_checked,
        load=load,
        phases=current.get(),
    )
    if found is None:
        return report
    number, step, _ = found.kept
    return replace(report, number=number, step=step, bytes_received=found.received, bytes_checked=found.checked)


def _candidates(
    settings: Settings, fallback: Any, step: int | None, group: Group, hosts: Hosts
) -> tuple[FoundGenerations | None, _Candidates]:
    """Collective: return the generations that count on some host, the newest first, with the
    fallback at its place in time. With a step, only those of that step. The first rank also gets
    what the hosts have."""
    if hosts.leads:
        remove(hosts.folder, list(kept_in(hosts.folder)))  # files that an earlier recovery fetched
    rows = hosts.gather_kept(group)
    found, chosen, why = None, None, ""
    if rows is not None:
        found = FoundGenerations.of(zip(hosts.names, rows))
        order = found.order(step=step)
        ranked = [
            _Candidate(kept, hosts.names.index(found.hosts[kept][0]), found.left_behind(kept, newer, step))
            for number, kept in enumerate(order.newest_first)
            for newer in [order.newest_first[:number]]
        ]
        tied = f"in {settings.folder}, {found.tied_text(order.tied)}" if order.tied else ""
        if fallback is not None and step is None:
            known = [*order.newest_first, *order.tied]
            rank, why = _rank_of(fallback, [found.made[kept] for kept in known])
            if rank <= len(ranked):
                ranked.insert(rank, _Candidate(None, 0, found.behind_fallback(known[rank:])))
        steps = sorted({kept.step for kept in found.made}, reverse=True)
        chosen = _Candidates(ranked, tied, steps, [f"the fallback was not used: {why}"] if why else [])
    return found, group.share(chosen, kind=_Candidates)


def _rank_of(fallback: Any, newest_first: list[ManifestStamp]) -> tuple[int, str]:
    """Return the position of a fallback among the generations, newest first: right after one with
    the same state, or by its time. Last if the time is unknown, or if there is no fallback yet.
    Also return why it cannot be opened."""
    native, why = None, ""
    try:
        native = open_checkpoint(fallback).contents.details(NativeFacts)
    except CheckpointError as error:  # raised again if no generation can be loaded
        why = str(error) * (not isinstance(error, CheckpointNotFoundError))
    if native is None:
        return len(newest_first), why
    its = ManifestStamp.of(native.manifest)
    same = [place for place, made in enumerate(newest_first) if its.state and made.state == its.state]
    return same[0] + 1 if same else sum(made.unix_s >= its.unix_s for made in newest_first), ""


def _manifest_of(kept: GenerationFolder, place: int, group: Group, hosts: Hosts) -> bytes:
    """Collective: return the text of a manifest, which the rank at `place` has. It is sent once to
    each host that lacks it."""
    here, fetched = LocalStorage(hosts.folder / kept.folder), LocalStorage(hosts.folder / fetched_folder(kept))
    record = kept_in(hosts.folder).get(kept)
    has_it = record is not None and record.made is not None
    lacking = group.gather(hosts.leads and not has_it, place)
    text = here.read(MANIFEST) if has_it else b""
    sent, _ = group.scatter([text if lacks else b"" for lacks in lacking] if lacking is not None else None, place)
    if sent:
        fetched.publish(MANIFEST, sent)
    group.barrier()
    return text if has_it else fetched.read(MANIFEST)


@dataclass
class _CheckedGeneration:
    """A generation as this rank sees it, while it is checked and loaded."""

    settings: Settings
    kept: GenerationFolder
    group: Group
    hosts: Hosts
    checkpoint: Checkpoint
    storage: Survivors
    native: NativeFacts
    by_host: dict[str, list[Held]] = field(default_factory=dict)
    """On the first rank, what the ranks of each host found. Empty on other ranks."""
    received: int = 0
    checked: int = 0

    @classmethod
    def look(cls, settings: Settings, candidate: _Candidate, group: Group, hosts: Hosts) -> _CheckedGeneration:
        """Collective: share the manifest, and check all remaining files that it names."""
        kept = candidate.kept
        assert kept is not None
        here = LocalStorage(hosts.folder / kept.folder)
        text = _manifest_of(kept, candidate.place, group, hosts)
        looking = Survivors(here, hosts.folder / fetched_folder(kept), text, ())
        manifest = read_manifest(looking)
        mates = hosts.mine
        threads = Workspace.of(None, None, len(mates)).threads
        mine = held_in(here, manifest, mates.index(group.rank), len(mates), threads)
        found = group.exchange_within(f"host {hosts.name}", mine, kind=Held).values()
        records = manifest.files
        whole = [
            records[rank].name for one in found for rank, ranges in one.items() if ranges == [(0, records[rank].nbytes)]
        ]
        storage = Survivors(here, hosts.folder / fetched_folder(kept), text, whole)
        # blocks are compared when they arrive: until then, files are sparse behind
        # their headers
        contents = reader.open(Files(storage, storage.list(), Checking(enabled=False)))
        native = contents.details(NativeFacts)
        assert native is not None
        storage.expect(native)
        self = cls(settings, kept, group, hosts, Checkpoint(contents, storage.url), storage, native)
        self.checked = sum(stop - start for ranges in mine.values() for start, stop in ranges)
        for name, its in zip(hosts.names, group.gather(mine, kind=Held) or ()):
            self.by_host.setdefault(name, []).append(its)
        return self

    def judge(self, fallback: Any) -> _Verdict:
        """Collective: return whether it is complete, or becomes complete by the same tensors of the fallback."""
        return self.group.share(self._judged(fallback) if self.group.rank == 0 else None, kind=_Verdict)

    def _judged(self, fallback: Any) -> _Verdict:
        lost = lost_boxes(self.native, self.by_host)
        if not lost:
            return _Verdict("", ())
        damaged = list[Path]()
        for host, rows in self.by_host.items():
            folder = self.settings.folder / host / self.kept.folder
            damaged += damaged_files(self.native, folder, rows)
        text = f"{self.kept} is not complete: {missing_text(lost, damaged)}"
        if fallback is None:
            return _Verdict(text, ())
        try:
            others = open_checkpoint(fallback)
        except CheckpointError as error:
            return _Verdict(f"{text}; the fallback cannot be opened: {error}", ())
        mine, theirs = self.native.manifest.fingerprints, others.fingerprints or {}
        other = [fqn for fqn in lost if fqn not in self.checkpoint or mine.get(fqn, "") != theirs.get(fqn)]
        if other:
            why = "by fingerprint" if mine and theirs else "which cannot be checked if one side has no fingerprints"
            return _Verdict(f"{text}; the fallback does not have the same {other[0]!r}, {why}", ())
        return _Verdict("", tuple(lost))

    def load(self, state: Any, fallback: Any, lost: tuple[str, ...], options: LoadOptions) -> LoadReport:
        """Collective: fill the state. Each rank reads by its own plan from the files of its host,
        to which `_prefetch` has brought what they need."""
        others, checkpoint = None, self.checkpoint
        if lost:
            others = open_among(fallback, self.group.rank, self.group.world_size)
            theirs, mine = others.contents, checkpoint.contents
            tensors = {fqn: partial((theirs if fqn in lost else mine).find, fqn) for fqn in mine.tensors}
            checkpoint = Checkpoint(replace(mine, tensors=LazyMapping(tensors)), checkpoint.url)  # type: ignore[arg-type]
        prefetch = partial(self._prefetch, others)
        own = replace(options, read_once="rank", check=False)  # all that is read was checked when it was found
        return load_with(self.group, state, checkpoint, own, prefetch)

    def _prefetch(self, others: Checkpoint | None, plan: ReadPlan) -> None:
        """Collective: bring what the plans of a host's ranks read, and the host lacks, to the host once."""
        if others is not None and (native := others.contents.details(NativeFacts)) is not None:
            read = _blocks_read(plan, native.manifest.block_bytes)
            theirs = {source: ranges for source, ranges in read.items() if source.storage is not self.storage}
            self.checked += compare_ranges(native, theirs)
        with phase("agree on copies"):
            told = self.group.gather(self._wants(plan), kind=Held)
            moves = self.group.share(self._moves(told) if told is not None else None, kind=Moves)
        if moves.wanted:
            mine = self.group.job_rank
            got = {name: by[mine] for name, by in moves.wanted.items() if mine in by and not name.endswith(".sums")}
            for name in got:
                self.storage.prepare(name)
            here = self.storage.here.root.joinpath
            with phase("copy"):
                self.received = move(
                    moves, here, self.storage.path_of, self.group, self.group.process_group,
                    max_inflight_bytes=self.settings.max_inflight_bytes,
                )  # fmt: skip
            spans = {FileSource(self.storage, name): ranges for name, ranges in got.items()}
            self.checked += compare_ranges(self.native, spans)
            self.group.barrier()

    def _wants(self, plan: ReadPlan) -> Held:
        """Return the blocks that this rank reads of files that are not complete on its host, by the
        rank that wrote them."""
        block, wants = self.native.manifest.block_bytes, Held()
        ranks = {record.name: (rank, record) for rank, record in self.native.manifest.files.items()}
        for source, ranges in _blocks_read(plan, block).items():
            if source.storage is self.storage and source.name not in self.storage.whole:
                rank, record = ranks[source.name]
                header = (0, min(-(-record.header_bytes // block) * block, record.nbytes))
                wants[rank] = merge_ranges([header, *ranges])
        return wants

    def _moves(self, rows: list[Held]) -> Moves:
        """Return what each rank receives for its host, and which ranks could send it."""
        moves, manifest, ranks = Moves({}, {}, {}), self.native.manifest, self.group.ranks
        needs: dict[str, dict[str, list[Range]]] = {}
        for host, row in zip(self.hosts.names, rows):
            for rank, ranges in row.items():
                needs.setdefault(rank, {}).setdefault(host, []).extend(ranges)
        for number, (rank, needed) in enumerate(needs.items()):
            acts = {host: ranks[places[number % len(places)]] for host, places in self.hosts.places.items()}
            there = {acts[host]: merge_ranges(piece for one in found for piece in one.get(rank, ()))
                     for host, found in self.by_host.items()}  # fmt: skip
            held = {rank: ranges for rank, ranges in there.items() if ranges}
            wanted = {acts[host]: merge_ranges(ranges) for host, ranges in needed.items()}
            moves.add(manifest.files[rank], manifest.block_bytes, held, wanted)
        return moves


def _blocks_read(plan: ReadPlan, block_bytes: int) -> dict[FileSource, list[Range]]:
    """Return the blocks of each file that a plan reads."""
    found: dict[FileSource, list[Range]] = {}
    for copy in plan.copies:
        if isinstance(source := copy.place.source, FileSource):
            found.setdefault(source, []).extend(blocks_of(copy.place.window, block_bytes, source.nbytes))
    return {source: merge_ranges(ranges) for source, ranges in found.items()}


def damaged_files(native: NativeFacts, folder: Path, rows: Iterable[Held]) -> Iterator[Path]:
    """Yield the incomplete files in the folder of a generation.

    Args:
        rows: what was found in them.
    """
    for held in rows:
        for rank, ranges in held.items():
            record = native.manifest.files[rank]
            whole = [(0, record.nbytes)]
            if ranges != whole:
                yield folder / record.name


def missing_text(lost: Mapping[str, list[tuple[int, Box]]], damaged: Sequence[Path]) -> str:
    """Describe what is missing: tensors with the first few regions, and damaged files."""
    shown = [
        f"{fqn!r} lacks {', '.join(str(box) for _, box in boxes[:3])}{', ...' if len(boxes) > 3 else ''}, written by "
        f"{format_ranks({rank for rank, _ in boxes})}"
        for fqn, boxes in list(lost.items())[:5]
    ]
    more = f", and {len(lost) - 5} more tensors" if len(lost) > 5 else ""
    which = f". Damaged: {format_some(damaged)}" if damaged else ""
    return "; ".join(shown) + more + which


# `gather`: the folders of hosts, wherever they were brought to, become one ordinary checkpoint.


_PIECE_BYTES = 8 << 20


def _shown(places: Sequence[Path]) -> str:
    """Format folders for an error."""
    return ", ".join(f"{place}{_no_host(place)}" for place in places) or "no folders"


def _no_host(place: Path) -> str:
    """Return why a folder is not that of a host. "" if it may be."""
    if not place.exists():
        return " (no such folder)"
    inner = [path.name for path in sorted(place.iterdir()) if path.is_dir() and kept_in(path)]
    return f" (the hosts' folders are in it: {format_some(inner)})" if inner else ""


def gather(
    folders: Sequence[AnyPath],
    out: AnyPath | Storage,
    *,
    step: int | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
) -> GatherReport:
    """Build one checkpoint from the folders of a job's hosts. Needs no running job and no model.

        report = reshard.elastic.gather(["node0", "node1", "node3"], "run/step-100")

    Every block is compared with its checksum. If a block of one copy is damaged, another copy is used for it.

    Args:
        folders: one folder per host: `<folder of the Tier>/<name of the host>`.
        out: path of the new checkpoint.
        step: the step of the generation. Default: the newest, as `Tier.restore` decides. If the newest is not complete,
            pass the step of an older one.
        overwrite: replace an existing checkpoint.
        executor: compares and writes in tasks. All workers need access to all folders.

    Raises (nothing is written then):
        CheckpointNotFoundError: no folder has a complete generation, or none of this step.
        CorruptCheckpointError: the remaining data is not complete. The message names the missing boxes of each tensor,
            damaged files, and an older generation that is complete.
        CheckpointError: there are two candidates for the last generation. To choose one, pass `step`.
        CheckpointExistsError: there is already a checkpoint at `out`.
    """
    check_executor(executor, 1, out)
    check_options(overwrite=overwrite)
    if isinstance(folders, str | os.PathLike):
        raise OptionError(f"folders must be a list of the folders of hosts, such as [{os.fspath(folders)!r}]")
    storage, places = open_storage(out), [Path(absolute(folder) if executor else folder) for folder in folders]
    found = FoundGenerations.of((str(place), kept_in(place)) for place in places)
    if not (order := found.order(step=step)).newest:
        steps = ", ".join(f"step {kept.step}" for kept in sorted(found.made, reverse=True))
        what = f"no complete in-memory checkpoint{'' if step is None else f' of step {step}'}"
        where = f"{_shown(places)}; found there: {steps}" if steps else _shown(places)
        raise CheckpointNotFoundError(f"{what} in {where}. Pass the folder of each host, such as /dev/shm/run1/node3")
    if not order.newest_first:
        raise CheckpointError(found.tied_text(order.tied))
    wanted, *older = order.newest_first
    look = _Look(wanted, places, executor)
    if look.lost:
        others = [kept for kept in older if kept.step != wanted.step and not _Look(kept, places).lost]
        hint = (
            f"step {others[0].step} is complete: pass step={others[0].step}" if others else "no other step is complete"
        )
        raise CorruptCheckpointError(f"{wanted} is not complete: {look.lost_text()}. {hint.capitalize()}")
    names = commit.refuse_foreign(storage)
    refuse_run(storage.url, names)
    refuse_first_step(out)
    if commit.counting(storage) == wanted.save_id:
        raise CheckpointExistsError(f"{storage.url} has {wanted} already: open it, or delete it first")
    commit.replaced_by_save(storage, names, overwrite)
    files, nbytes = look.write(storage, absolute(out), executor)
    empty = (f"{place} has no data of a host{_no_host(place)}" for place in places if not kept_in(place))
    left = found.left_behind(wanted, (), step)
    return GatherReport(storage.url, wanted.number, wanted.step, files, nbytes, (*empty, *left))


class _CompareFile(NamedTuple):
    """A task: find the good blocks of a rank's file at one place."""

    place: int
    rank: str


class _WriteFile(NamedTuple):
    """A task: write a rank's file, each piece from a place that has it, and its checksums."""

    rank: str
    pieces: tuple[tuple[int, int, int], ...]
    """Place, first byte, and one past the last."""


@dataclass(frozen=True)
class GatherWork:
    """The files that hosts kept of a generation, one task each."""

    folders: tuple[str, ...]
    seen: tuple[int, ...]
    """The number of files in each folder."""
    out: Any = None

    def begin(self) -> Callable[[_CompareFile | _WriteFile], Any]:
        """Raise StorageError if a folder has changed."""
        storages = [LocalStorage(folder) for folder in self.folders]
        for storage, count in zip(storages, self.seen):
            if (found := len(storage.list())) != count:
                raise StorageError(
                    f"{storage.url} has {found} files here, but {count} at the driver: all workers "
                    "must see the same files"
                )
        hosts = _HostFiles(storages, self.out, threads=1)
        claim = f"{commit.folder_of(hosts.native.manifest.save_id)}/{commit.CLAIM}"
        if self.out is not None and claim not in hosts.out.list():
            raise StorageError(
                f"{hosts.out.url} is not the folder of the driver, which wrote a claim to it: all "
                "workers must share the folder"
            )
        return hosts


class _HostFiles:
    """Runs the tasks."""

    def __init__(self, storages: list[LocalStorage], out: Any, threads: int) -> None:
        self.storages, self._threads = storages, threads
        self.out = open_storage(out) if out is not None else storages[0]
        self.native = next(native for one in storages if (native := _opened(one)) is not None)

    def __call__(self, task: _CompareFile | _WriteFile) -> Any:
        manifest = self.native.manifest
        record = manifest.files[task.rank]
        if isinstance(task, _CompareFile):
            return good_ranges(self.storages[task.place], record, manifest.block_bytes, self._threads)
        for name in (record.name, f"{record.name}.sums"):
            self.out.delete(name)
        with self.out.create(record.name) as file:
            for place, start, stop in task.pieces:
                for at in range(start, stop, _PIECE_BYTES):
                    file.write(self.storages[place].read(record.name, at, min(stop - at, _PIECE_BYTES)))
        with self.out.create(f"{record.name}.sums") as file:
            file.write(self.storages[task.pieces[0][0]].read(f"{record.name}.sums"))
        return record.nbytes


class _Look:
    """The part of a generation in some folders."""

    def __init__(self, kept: GenerationFolder, places: Sequence[Path], executor: Executor | None = None) -> None:
        storages = [LocalStorage(place / kept.folder) for place in places]
        self._hosts = _HostFiles(storages, None, threads=Workspace.of(None, None).threads)
        self.native = self._hosts.native
        self.held: list[Held] = [{} for _ in storages]
        files = self.native.manifest.files
        names = [storage.list() for storage in storages]
        self._work = GatherWork(tuple(storage.url for storage in storages), tuple(map(len, names)))

        def on_done(task: Any, ranges: Any) -> None:
            self.held[task.place][task.rank] = ranges

        asked = []
        for place, sizes in enumerate(names):
            for rank, record in sorted(files.items(), key=lambda row: int(row[0])):
                if record.name in sizes:
                    self.held[place][rank] = []
                    if sizes[record.name] == record.nbytes:
                        asked.append(_CompareFile(place, rank))
        run_tasks(self._work, asked, executor, on_done, here=self._hosts)
        self.lost = lost_boxes(self.native, {str(number): [held] for number, held in enumerate(self.held)})

    def lost_text(self) -> str:
        """Say what is missing or damaged."""
        damaged = list[Path]()
        for storage, held in zip(self._hosts.storages, self.held):
            damaged += damaged_files(self.native, storage.root, [held])
        return missing_text(self.lost, damaged)

    def write(self, storage: Storage, out: Any, executor: Executor | None) -> tuple[int, int]:
        """Write the checkpoint, which counts when it is complete. Return the number of data files
        and of their bytes."""
        manifest = self.native.manifest
        commit.claim(storage, manifest.save_id)
        try:
            asked = [_WriteFile(rank, tuple(self._pieces(rank, record))) for rank, record in manifest.files.items()]
            here = _HostFiles(self._hosts.storages, storage, threads=1)
            run_tasks(replace(self._work, out=out), asked, executor, lambda task, nbytes: None, here=here)
            storage.delete(HF_INDEX)  # of what is replaced, and again if its save was still publishing it
            storage.publish(MANIFEST, self.native.storage.read(MANIFEST))
            storage.delete(HF_INDEX)
            storage.delete(f"{commit.folder_of(manifest.save_id)}/{commit.CLAIM}")
        finally:
            release_lease(manifest.save_id)
        commit.remove_dead(storage)
        return len(manifest.files), sum(record.nbytes for record in manifest.files.values())

    def _pieces(self, rank: str, record: FileRecord) -> Iterator[tuple[int, int, int]]:
        """Yield the bytes of a file in order, each piece with the place of a host that has it."""
        at = 0
        while at < record.nbytes:
            place, stop = next(
                (place, stop)
                for place, held in enumerate(self.held)
                for start, stop in held.get(rank, ())
                if start <= at < stop
            )
            yield place, at, stop
            at = stop


def _opened(storage: LocalStorage) -> NativeFacts | None:
    """Open a generation by the manifest that a host has."""
    try:
        return reader.open(Files(storage, {MANIFEST: 0})).details(NativeFacts)
    except CheckpointError:
        return None
