"""`save` and `async_save`: all ranks derive one plan, each writes its part once, and the manifest
is published last."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, Unpack

import msgspec
import torch.distributed as dist

from planners.plans.save import SavePlan, WriteItems
from planners.units import format_bytes, format_count, format_some
from reshard.api import background_saves, save_job
from reshard.api.options import SaveKeywords, SaveOptions
from reshard.api.reports import WrittenReport
from reshard.api.staging import ToWrite, check_stage, staged
from reshard.arguments import check_arguments, check_options, no_attribute, options_of, renamed, with_options
from reshard.errors import CheckpointError, LayoutError, OptionError, ReshardError, StorageError, format_ranks
from reshard.formats.detect import BECOMES_FOLDER, FILE_SUFFIXES, refuse_first_step, refuse_run
from reshard.live.fingerprints import add_tallies, pack_tally
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import array_bytes
from reshard.native import commit
from reshard.native.commit import Generation, Written
from reshard.native.data_file import Entry
from reshard.ranks.global_layout import resolve_layouts
from reshard.ranks.global_state import (
    DigestTable,
    GlobalState,
    LocalState,
    ValueDigests,
    check_globs,
    global_state_of,
    joined_objects,
)
from reshard.ranks.group import DEADLINE_S, DistinctValues, Group, digest_of
from reshard.ranks.liveness import release_lease
from reshard.ranks.progress import current, phase
from reshard.state import NUMBERED, count_objects
from reshard.storage.base import Storage
from reshard.storage.opening import StoragePath, open_storage, place_of

T = TypeVar("T")
A = TypeVar("A")

_log = logging.getLogger("reshard")


@renamed(deadline_s="timeout")
@with_options(SaveOptions)
def save(
    state_dict: Mapping[str, Any],
    path: StoragePath,
    *,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    timeout: float | timedelta = DEADLINE_S,
    **options: Unpack[SaveKeywords],
) -> SaveReport:
    """Save a dict of models, optimizers, and other objects with `state_dict`, or a state dict.

    Collective: all ranks of `process_group` call it. Each element is written once, by a rank that holds it. An existing
    checkpoint at `path` stays until the new one is complete.

        state = {"model": model, "optim": optimizer, "step": step}
        report = reshard.save(state, f"run/step-{step}")

    Args:
        state_dict: nested dicts and lists of tensors, DTensors and ShardedTensors with this rank's shards, plain
            values, models, optimizers (together with their models), and other objects that have `state_dict`.
        path: a local folder, URL, or `Storage` that all ranks can access. All ranks pass the same one.
        process_group: the ranks that save together. Default: the default group, or this process if there is none.
        alone: only this process saves, even in a running job. It needs full tensors and its own path.
        timeout: limit for the call, in seconds or as a `timedelta`.
        select: a glob such as `"model.*"`, or a list of globs. Only keys that match one of them are saved. A glob that
            begins with `!` excludes keys. Every other glob must match a key on at least one rank. The checkpoint
            records the globs: a later load requires only the keys that match them, and reports the others as
            `excluded`.
        check_replicas: compare replicas across ranks. Different values are an error.
        fingerprints: store a fingerprint of each tensor for `verify`, `compare`, and later loads.
        divide_above_bytes: divide chunks of at least this size among the ranks that hold them.
        memory_budget_bytes: limit for copies of tensors that are on a device or not in row-major order. Fingerprints
            take 50 MiB more.
        progress: show progress bars on the first rank if stderr is a terminal. Each phase is always logged at level INFO.
        overwrite: replace an existing checkpoint at `path` once the new one is complete. False: an existing checkpoint
            is an error, even if its manifest was lost, and nothing is written. Other files are never replaced.
        base: an earlier checkpoint whose unchanged data is not written again. It must be at `path`, or in the same
            folder as `path`. "auto": the one saved last. The new checkpoint does not depend on it: you can delete the
            earlier one. See docs/incremental.md.
        ranks_per_file: the number of ranks on a host that write one file: see docs/scale.md. Not with `base`.

    Raises (on all ranks: the failing rank raises its own error, the others `RankFailedError`):
        ReplicaDriftError: values differ between ranks without `PerRank`.
        KeyMismatchError: keys collide, or a glob matches nothing.
        LayoutError: ranks disagree about a tensor's shape, dtype, or placement, or about options other than
            memory_budget_bytes and progress.
        FormatError: a value is not plain data.
        CheckpointExistsError: `path` has a checkpoint, and `overwrite` is False.
        StorageError: the storage failed, or ranks see different folders.
    """
    with phase("save", path=path):
        with phase("wait for earlier saves"):
            if background_saves.saves:
                background_saves.await_saves(path)
        group = Group(process_group, alone=alone, deadline_s=timeout)
        with group.together("save"):
            return _finish(
                *_prepare(state_dict, path, group, options_of("save", SaveOptions, options), ToWrite.in_place)
            )


class PendingSave(Generic[T]):
    """A save that runs in the background.

    It has `result`, `exception`, `done`, and `add_done_callback` of a `concurrent.futures.Future`.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._pid = os.getpid()
        # whether the caller knows how it ended: the next save need not report it
        self._is_known = False

    @renamed(timeout_s="timeout")
    def result(self, timeout: float | None = None) -> T:
        """Wait for the save and return its report.

        Raises the errors of `save`, TimeoutError after `timeout` seconds, and OptionError if
        `timeout` is not a number.
        """
        return self._asked(self._future.result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save and return its error, or None. Raises TimeoutError after `timeout` seconds."""
        return self._asked(self._future.exception, timeout)

    def done(self) -> bool:
        """Return True if the save has ended, successfully or not."""
        return self._future.done()

    @renamed(call="fn")
    def add_done_callback(self, fn: Callable[[PendingSave[T]], object]) -> None:
        """Call `fn` with this object, on the thread of the save, when the save ends. Calls it at
        once if the save has already ended."""
        self._future.add_done_callback(lambda _: fn(self))

    def _asked(self, ask: Callable[[float | None], A], timeout: float | None) -> A:
        check_options(timeout=timeout)
        if self._pid != os.getpid() and not self.done():
            raise CheckpointError(
                f"this save runs in process {self._pid}, and its fork, process {os.getpid()}, cannot wait for it: "
                "call result() in the process that began the save"
            )
        try:
            return ask(timeout)
        except TimeoutError:
            if self.done():  # it is the save's own
                raise
            raise TimeoutError(f"the save is still in progress after {timeout} s") from None
        finally:
            if self.done():
                self._is_known = True
                background_saves.forget_background_save(self._future)

    def __repr__(self) -> str:
        """One line; a failure is raised by `result`."""
        ended = self._future.exception() or repr(self._future.result()) if self.done() else "in progress"
        return f"PendingSave({ended})"

    if not TYPE_CHECKING:  # which would take any name for one of these

        def __getattr__(self, name: str) -> Any:
            meant = dict.fromkeys(("wait", "wait_until_finished", "upload_completion"), "result() waits for the save")
            staged = "async_save returns once the values are copied, so there is nothing to wait for"
            raise no_attribute(self, name, {**meant, "staging_completion": staged})


@renamed(deadline_s="timeout")
@with_options(SaveOptions)
def async_save(
    state_dict: Mapping[str, Any],
    path: StoragePath,
    *,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    timeout: float | timedelta = DEADLINE_S,
    max_in_flight: int = 1,
    stage: Literal["host", "device"] = "host",
    **options: Unpack[SaveKeywords],
) -> PendingSave[SaveReport]:
    """Save in the background: like `save`, but return as soon as this rank's part is copied.

    The checkpoint has the values at the time of the call. If an earlier save failed, the call raises its error on
    all ranks, unless all ranks have called its `result()` or `exception()`. Saves to the same path run one after
    another. All other arguments, and the errors, are those of `save`.

    Args:
        max_in_flight: limit for the saves of this process that run at once. Another call first waits for the oldest.
        stage: where this rank copies tensors that are on a device. "host": to pinned host memory, on a separate stream,
            after the pending work of the current stream. The call waits for these copies, and the next save reuses
            the memory. "device": on the device, without waiting, if it has enough memory.

    Returns:
        a `PendingSave`, whose `result()` waits for the save, and returns its report or raises its error.
    """
    with phase("async_save", path=path, goes_on=True):
        may_wait = type(max_in_flight) is int and max_in_flight > 0
        with phase("wait for earlier saves"):
            uses = background_saves.await_saves(path)
            earlier = background_saves.ended_for(max_in_flight if may_wait else 1)
        group = Group(process_group, alone=alone, deadline_s=timeout)
        with group.together("stage", meet=False):  # `_prepare` ends with the ranks' meeting
            if not may_wait:
                raise OptionError(f"max_in_flight must be a number of saves >= 1, got {max_in_flight!r:.80}")
            check_stage(stage)
            for save in earlier:  # raised in the phase: a rank that asked for the result must not continue alone
                background_saves.forget_background_save(save)
                save.result()
            chosen = options_of("async_save", SaveOptions, options)
            to_memory = partial(staged, stage=stage, fingerprints=chosen.fingerprints)
            job, copies = _prepare(state_dict, path, group, chosen, to_memory)

        def work() -> SaveReport:
            try:
                with group.together("save"):
                    return _finish(job, copies)
            finally:
                copies.release()

        try:
            name = f"reshard-save-{job.generation.save_id}"
            return PendingSave(background_saves.start_in_background(work, name, place_of(job.storage), uses))
        except RuntimeError:  # no more threads are allowed: the other ranks must not wait for this one
            copies.release()
            with group.together("save"):
                raise


_Staging = Callable[[Sequence[Entry]], ToWrite]


@gc_paused()
def _prepare(
    state_dict: Any, path: Any, group: Group, options: SaveOptions, stage: _Staging
) -> tuple[save_job.SaveJob, ToWrite]:
    """Agree on the state and on which rank writes what, and stage what this rank writes. Writes
    nothing.

    The ranks meet for the last time when all have staged. If one rank failed before, all fail.
    """
    if check_arguments("save", state_dict, path):
        from reshard.api.stateful_objects import LiveObjects

        state_dict = LiveObjects(state_dict).state
    storage = open_storage(path)
    decide = partial(_decide_on_first_rank, storage, path, options)
    _, kept, census, first, data = agreed_plan(state_dict, group, options, stage=stage, decide=decide)
    assert data is not None, "all ranks have staged"
    assert first is not None
    try:
        if options.ranks_per_file > 1 and not storage.supports_shared_write:
            raise StorageError(f"{storage.url} does not support files that several ranks write: omit ranks_per_file")
        if options.globs is not None:
            check_globs(options.globs, census, state_dict)
        (save_id, choice, replaces, begun_in), base = first, None
        generation = Generation(storage, save_id, commit.begin(), census, kept.plan, options.globs, replaces)
        if choice.save_id is not None:
            base, choice = save_job.open_base(path, choice, group)
    except BaseException:
        data.release()
        raise
    own = storage.without_new_folders()
    return save_job.SaveJob(group, own, str(path), generation, options, choice, base, begun_in), data


def _decide_on_first_rank(storage: Storage, path: Any, options: SaveOptions, census: GlobalState) -> SaveDecision:
    """Decide the save id and the base on the first rank. Raises an error if the save must not
    replace what is there."""
    if there := commit.refuse_foreign(storage):
        refuse_run(storage.url, there)
    refuse_first_step(path)
    if storage.url.endswith(FILE_SUFFIXES):
        _log.warning(BECOMES_FOLDER, storage.url)
    replaces = commit.replaced_by_save(storage, there, options.overwrite)
    chosen = save_job.Choice()
    if options.base:
        chosen = save_job.choose_base(path, options.base, census.tensors, by_print=options.fingerprints)
    return commit.new_save_id(), chosen, replaces, storage.url


def _finish(job: save_job.SaveJob, data: ToWrite) -> SaveReport:
    """Write this rank's file and, on the first rank, publish. Leaves nothing behind if any rank fails."""
    group, generation = job.group, job.generation
    is_new = group.rank == 0 and not os.path.exists(generation.storage.url)
    try:
        with phase("begin"):
            if group.rank == 0:
                commit.claim(generation.storage, generation.save_id)
            group.barrier()  # no rank writes before there is a claim
            if group.rank:
                commit.check_claimed(job.storage, generation.save_id, f"rank {group.ranks[0]} in {job.begun_in}")
        with group.together("write"):
            data, same = save_job.summed_up(job, data) if job.choice.by_print else (data, [])
            written, reused, prints = save_job.write(job, data, same)
            tally = pack_tally(prints, generation.census.tensors)
            told = group.gather_and_sum((group.job_rank, written), tally, add_tallies, kind=tuple[int, Written])
            if told is not None:
                with phase("publish"):
                    generation.publish(dict(told[0]), told[1] if job.options.fingerprints else None)
    except BaseException as error:
        _clear(job, error)
        if is_new:
            with suppress(OSError):  # another save may have written there
                os.rmdir(generation.storage.url)
        raise
    finally:
        release_lease(generation.save_id)
    if group.world_size > REMOVES_ALONE and generation.replaces is not None:
        _remove_together(group, generation)
    if told is not None:
        with phase("clean up"):
            generation.tidy()  # before the phase of the caller ends on any rank
    census = generation.census
    return SaveReport(
        path=job.path,
        save_id=generation.save_id,
        tensors=len(census.tensors),
        objects=count_objects(replace(census, objects=dict.fromkeys(census.objects))),
        total_bytes=census.tensors.nbytes + array_bytes(census.objects),
        bytes_written=data.nbytes - reused,
        aliases=census.aliases,
        per_rank=tuple(census.per_rank),
        phases=current.get(),
        base=job.choice.save_id,
        bytes_reused=reused,
        skipped=(*job.choice.skipped, *(job.base.skipped if job.base is not None else ())),
        select=job.options.globs or (),
        replaced=generation.replaces is not None,
    )


REMOVES_ALONE = 32
"""Up to this number of ranks, the first rank removes what a save has replaced. Beyond, each
removes its own files."""


def _remove_together(group: Group, generation: Generation) -> None:
    """Collective: each rank removes its own files of what the published save has replaced."""
    try:
        group.barrier()  # the manifest names the files that replace it
        generation.remove_replaced(group.job_rank)
        group.barrier()
    except BaseException:
        if group.rank == 0:
            generation.tidy()
        raise


def _clear(job: save_job.SaveJob, cause: BaseException) -> None:
    """Remove what a failed save has written, unless it failed after publishing. The first rank
    removes everything. On storage whose folders are only parts of names, the other ranks then
    remove what they wrote later. In real folders, they must not try: a network file system may
    still show them a state before the publication."""
    save_id, has_folders = job.generation.save_id, job.storage is not job.generation.storage
    try:
        if job.group.rank and (has_folders or commit.has_claim(job.storage, save_id)):
            return
        if commit.counting(job.storage) != save_id:
            commit.remove(job.storage, save_id)
    except ReshardError as second:  # the first error is what the caller must see; the next save removes the rest
        cause.add_note(f"deleting the unfinished save failed too: {second}")


# Where ranks meet before a save: they confirm a plan that all of them have, kept from a save like
# this one, or new.
#
#     rank 0   has a plan for what it holds  A ─┐
#     rank 1   has a plan for what it holds  A ─┼─► all have the same: it is obeyed;  any has none, or another: all plan
#     rank 2   has a plan for what it holds  A ─┘   from all descriptions, and meet once more
#
# A plan depends only on each rank's description of what it holds (names, types, shapes, and placements)
# and on a few options. A rank uses the plan that it kept only if its own description is the same. It then
# sends the others a digest of the descriptions of all ranks. If all ranks send the same digest, all hold
# what they held when the plan was made. Values are compared each time.


KEPT = 4
"""The number of plans that a process keeps, for states that a job saves alternately."""
_lock = threading.Lock()
_kept: OrderedDict[bytes, CachedPlan] = OrderedDict()
"""Kept plans, the latest last."""


@dataclass(frozen=True)
class CachedPlan:
    """The plan of an earlier save. It contains no tensor and no value."""

    told: bytes
    """A digest of the descriptions of all ranks. If it is the same, so are all other fields."""

    census: GlobalState
    """What all ranks hold, without objects."""
    plan: SavePlan
    """The plan, already proved."""
    items: WriteItems
    """What this rank writes."""


SaveDecision = tuple[str, save_job.Choice, str | None, str]
"""What the first rank decides for all: the id of the save, its base, the id of the save that it
replaces, and the path."""


class Agreement(NamedTuple):
    """What all ranks know after they have exchanged their votes."""

    census: GlobalState | None
    """What all ranks hold, if each of them kept the plan for it. None if any rank did not."""
    first: SaveDecision | None
    pool: DistinctValues
    """Digests of each rank's description of what it holds: see `Group.distinct_answers`."""


class _SaveVote(msgspec.Struct, frozen=True, array_like=True):
    """What one rank or several ranks report when they agree on a save."""

    call: bytes
    """A digest of the options. Empty if ranks were called with different ones."""
    kept: bytes
    """The digest of all descriptions for which the kept plan was made. Empty if any rank kept no
    plan, or if the digests differ."""
    pool: DistinctValues
    """Digests of the ranks' descriptions. Empty if the kept plan has them."""
    values: ValueDigests | None
    """Digests of values that other ranks may hold, too. None if any rank kept no plan, which would
    list these values."""
    first: SaveDecision | None
    """The decision of the first rank, if it kept a plan."""

    @staticmethod
    def join(votes: list[_SaveVote]) -> _SaveVote:
        """Combine several votes."""
        calls, kept = {vote.call for vote in votes}, {vote.kept for vote in votes}
        values = [vote.values for vote in votes if vote.values is not None] if len(kept) == 1 else []
        return _SaveVote(
            calls.pop() if len(calls) == 1 else b"",
            kept.pop() if len(kept) == 1 else b"",
            DistinctValues.join([vote.pool for vote in votes]),
            ValueDigests.join(values) if len(values) == len(votes) else None,
            votes[0].first,
        )


def find_plan(key: bytes, holdings: LocalState, group: Group) -> CachedPlan | None:
    """Return the plan that this rank kept for the same description. It counts only when all ranks
    have met."""
    with _lock:
        found = _kept.get(key)
        if found is None:
            return None
        _kept.move_to_end(key)
    resolve_layouts(holdings.state.tensors, found.census.tensors, group.job_rank)
    return found


def new_plan(key: bytes, holdings: LocalState, group: Group, options: SaveOptions, said: DistinctValues) -> CachedPlan:
    """Collective: return a proved plan of what all ranks hold, which this rank keeps. With per-rank
    values, it is used only for this save, because these are gathered for each save.

    Args:
        said: digests of the descriptions of all ranks.
    """
    census = global_state_of(holdings, group, group.distinct_answers(holdings.description, known=said))
    plan = SavePlan(census.tensors, options.divide_above_bytes)
    if findings := [*plan.findings()]:
        more = f" (the first of {len(findings)} problems)" if len(findings) > 1 else ""
        raise LayoutError(
            "all ranks that hold a part of a tensor must save together: leave out alone=True, or pass a process_group "
            f"with all of them. The tensors on {format_ranks(group.ranks)} do not cover each full tensor exactly once: "
            f"{findings[0]}{more}"
        )
    numbered = next(filter(NUMBERED.fullmatch, census.tensors), None) if group.rank == 0 else None
    if numbered is not None:
        _log.warning(
            "reshard.save: the optimizer state is saved by parameter number (%r): only a model with the "
            "same parameters in the same order can load it. Save reshard.get_optimizer_state_dict(model, "
            "optimizer) instead, which has names. If a framework saves for you, see its section of "
            "docs/integrations.md",
            numbered,
        )
    made = CachedPlan(digest_of(msgspec.msgpack.encode(said)), census, plan, plan.items(group.job_rank))
    if not census.per_rank:
        with _lock:
            _kept[key] = made
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
    return made


@gc_paused()
def agreed_plan(
    state_dict: Any,
    group: Group,
    options: SaveOptions,
    *,
    stage: _Staging | None = None,
    decide: Callable[[GlobalState], SaveDecision] | None = None,
) -> tuple[LocalState, CachedPlan, GlobalState, SaveDecision | None, ToWrite | None]:
    """Collective: return what this rank holds, with the plan of an earlier save of the same state,
    or a new one.

    Also return what all ranks hold, with objects, and the results of `decide` and `stage`.

    The ranks meet for the last time when all have staged. Earlier failures of one rank are raised
    on all.

    Args:
        stage: stages what this rank writes, while messages are on their way to the others.
        decide: decides about the save, on the first rank.
    """
    with phase("plan"):
        holdings = save_job.holdings_of(state_dict, options, group)
        # everything that a plan depends on, as far as this rank knows
        chosen = (options.globs, options.divide_above_bytes)
        depends = (holdings.description, group.rank, list(group.ranks), chosen)
        key = hashlib.sha256(msgspec.msgpack.encode(depends)).digest()
        kept = None if holdings.state.per_rank else find_plan(key, holdings, group)
    met: Agreement | None = None
    while True:
        data, first = None, None
        try:
            if kept is not None and decide is not None and group.rank == 0:
                with phase("check existing"):
                    first = decide(kept.census)
            if kept is not None and stage is not None:
                with phase("stage"):
                    data = stage(save_job.entries_of(kept.items, kept.plan.layout, holdings.state, group.job_rank))
            before, met = met, agree_before_save(holdings, group, options, kept, first, before=met)
        except BaseException:
            if data is not None:
                data.release()
            raise
        if kept is not None and met.census is not None:
            return holdings, kept, met.census, met.first, data
        if data is not None:
            data.release()
        assert before is None, "all ranks have planned the same"
        with phase("plan"):
            if kept is not None:  # nothing that was found by what is not so
                holdings = save_job.holdings_of(state_dict, options, group)
            kept = new_plan(key, holdings, group, options, met.pool)


def agree_before_save(
    holdings: LocalState,
    group: Group,
    options: SaveOptions,
    kept: CachedPlan | None,
    first: SaveDecision | None,
    *,
    before: Agreement | None = None,
) -> Agreement:
    """Collective: whether all ranks have the plan of what they hold, and, if so, what else
    must be known.

    Args:
        kept: what this rank has found, or planned.
        first: on the first rank, where it has a plan.
        before: of the meeting before, after which all have planned again: its content is not repeated.

    Raises, on every rank, LayoutError for options that differ; ReplicaDriftError for values that
    differ.
    """
    table: DigestTable | None = None
    if kept is not None and group.world_size > 1:
        table = DigestTable.of(
            holdings.state.tensors,
            holdings.objects,
            group,
            kept.census.tensors,
            check_replicas=options.check_replicas,
            on_device=kept.census.on_device,
        )
    mine = _SaveVote(
        digest_of(repr(sorted(options.shared().items())).encode()) if before is None else b"",
        b"" if kept is None else kept.told,
        DistinctValues([digest_of(holdings.description) if before is None else b""]),
        None if table is None else table.told,
        first,
    )
    said = group.merge(mine, _SaveVote.join, "the agreement on what to save")
    if not said.call and before is None:
        group.same_options("save", options.shared())
    if kept is None or not said.kept:
        return Agreement(None, said.first, said.pool)
    alike = table is None or said.values is None or table.raise_on_mismatch(said.values, group)
    of_all = holdings.objects if alike else joined_objects(holdings.objects, group)
    return Agreement(replace(kept.census, objects=of_all), said.first, said.pool)


# `SaveReport`: what a save did.


@renamed(passed_over="skipped")
@dataclass(frozen=True, repr=False)
class SaveReport(WrittenReport):
    """What a save did. Only `bytes_written`, `bytes_reused`, `phases`, and `skipped` differ
    between ranks."""

    path: str
    save_id: str
    bytes_written: int
    """Bytes of tensors that this rank wrote."""
    per_rank: tuple[str, ...]
    """Keys for which the value of every rank was saved."""
    base: str | None = None
    """The save id of the base. None if the save had no base."""
    bytes_reused: int = 0
    """Bytes of tensors that this rank did not write because a file of an earlier save has them."""
    skipped: tuple[str, ...] = ()
    """Parts of earlier checkpoints that this rank could not reuse, and why. It wrote the data
    again."""
    select: tuple[str, ...] = ()
    """The globs of the keys that were saved. Empty if all keys were saved."""
    replaced: bool = False
    """True if the save replaced an earlier one at the path, even one whose manifest was lost or
    damaged. Always False with `overwrite=False`."""

    def __repr__(self) -> str:
        """One line, with the first names of what is tied or each rank's own."""
        counts = f"{format_count(self.tensors, 'tensor')}, {format_count(self.objects, 'object')}"
        head = f"{counts}, {format_bytes(self.total_bytes)} in {self.path!r}"
        odd = ["replaced an earlier save"] if self.replaced else []
        odd += self._first_of_each("aliases", "per_rank")
        odd += [f"select={list(self.select)}"] if self.select else []
        odd += [f"{format_bytes(self.bytes_reused)} reused"] if self.base is not None else []
        if self.skipped:
            odd.append(f"skipped: {format_some(self.skipped, 1)}")
        return f"SaveReport({', '.join([head, *odd])}, {format_bytes(self.bytes_written)} by this rank)"
