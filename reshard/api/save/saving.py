"""`save` and `async_save`: every rank derives the same plan, writes its part once, and one manifest makes it count."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist

from reshard.api.arguments import check_arguments, state_and_path
from reshard.api.save import background, repeated
from reshard.api.save.base import Choice, base_at, choose_base
from reshard.api.save.job import Job, entries_of, holdings_of, planned_writes, summed_up, tally, total, write
from reshard.api.save.options import SaveOptions
from reshard.api.save.report import SaveReport
from reshard.api.save.staging import Stage, ToWrite, check_stage, staged
from reshard.control.global_state import Census, Holdings, check_globs
from reshard.control.group import DEADLINE_S, Group
from reshard.errors import CheckpointError, FormatError, ReshardError, StorageError
from reshard.formats.native import generations
from reshard.formats.native.data_file import Entry
from reshard.formats.native.publish import Generation, Written
from reshard.formats.native.reader import Share
from reshard.formats.native.reuse import Base
from reshard.state.fingerprints.tally import add_tallies
from reshard.state.garbage import uncollected
from reshard.storage import open_storage
from reshard.storage.opening import place_of

__all__ = ["PendingSave", "async_save", "save"]

_log = logging.getLogger("reshard")


@state_and_path
def save(
    state_dict: Mapping[str, Any],
    path: Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    select: Iterable[str] | None = SaveOptions.select,
    check_replicas: bool = SaveOptions.check_replicas,
    fingerprints: bool = SaveOptions.fingerprints,
    divide_above_bytes: int = SaveOptions.divide_above_bytes,
    memory_budget_bytes: int = SaveOptions.memory_budget_bytes,
    overwrite: bool = SaveOptions.overwrite,
    base: str | os.PathLike[str] | None = SaveOptions.base,
    ranks_per_file: int = SaveOptions.ranks_per_file,
    progress: bool = SaveOptions.progress,
    deadline_s: float = DEADLINE_S,
) -> SaveReport:
    """Save a state dict: nested dicts, lists and tuples of tensors, DTensors, ShardedTensors and plain data.

    Collective over `process_group` (default: the default group, if there is one, else this process alone). Each
    element is written once, by a rank that holds it. A checkpoint that is there stays until the new one is whole.

        state = {"model": reshard.get_model_state_dict(model), "step": step}
        report = reshard.save(state, f"run/step-{step}")

    Args:
        path: a local folder, a URL or a `Storage`, the same for all ranks and visible to all.
        process_group: the ranks that save together; all of them, and no others, make the call.
        alone: this process saves by itself, in a running job too: for what it holds whole, to a path of its own.
        select: globs of the keys to save, such as `["model.*"]`; each must fit a key of some rank. The checkpoint is
            then declared a subset: a load is strict over what the globs fit, and reports the rest.
        check_replicas: compare what several ranks hold under one key; values that differ are an error.
        fingerprints: store a digest of each tensor that no layout changes, for `verify`, `compare` and later loads.
        divide_above_bytes: chunks of at least this size may be divided among the ranks that hold them.
        memory_budget_bytes: for copies of what is not row-major on the CPU. Fingerprints take 50 MiB of their own.
        overwrite: a checkpoint that is at `path` is replaced, once the new one is whole. False: it is an error, and
            nothing is written, as for `convert`, which asks to be told. Other files there are never replaced.
        base: an earlier checkpoint, at `path` or beside it, or "auto" for the newest: what it has already is not
            written again, and the new one is whole by itself nevertheless, see docs/incremental.md.
        ranks_per_file: so many ranks of a machine write one file together, see docs/scale.md; not with a base.
        progress: the first rank shows bars where somebody looks on. Each phase logs one line in any case.
        deadline_s: how long the whole may take.

    Raises (on every rank; the failing rank's own error there, `RankFailedError` elsewhere):
        KeyMismatchError: values that differ between ranks, not `PerRank`; keys that collide; a glob that fits nothing.
        LayoutError: ranks that disagree about a tensor's shape, dtype or placement, or were called with different
            options; they may choose memory_budget_bytes and progress for themselves.
        FormatError: a value that is no plain data; with `overwrite=False`, a checkpoint that is there already.
        StorageError: the storage failed, or is not the same folder for all ranks.
    """
    _await_saves_to(path)
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("save"):
        given = (select, check_replicas, fingerprints, divide_above_bytes, memory_budget_bytes)
        options = SaveOptions(*given, progress, overwrite, base, ranks_per_file)
        check_arguments("save", state_dict, path)
        return _finish(*_prepare(state_dict, path, group, options, ToWrite.where_it_is))


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, future: Future[SaveReport]) -> None:
        self._future = future
        self._pid = os.getpid()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait for the end; raises what went wrong, as `save` does, or TimeoutError after `timeout_s` seconds."""
        if self._pid != os.getpid() and not self.done():
            raise CheckpointError(f"process {self._pid} saves this, of which {os.getpid()} is a fork: ask there")
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():  # it is the save's own
                raise
            raise TimeoutError(f"the save is still going on after {timeout_s} s") from None
        finally:
            if self._future.done():
                background.forget(self._future)  # whoever asked knows: the next save need not tell it again

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


@state_and_path
def async_save(
    state_dict: Mapping[str, Any],
    path: Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    select: Iterable[str] | None = SaveOptions.select,
    check_replicas: bool = SaveOptions.check_replicas,
    fingerprints: bool = SaveOptions.fingerprints,
    divide_above_bytes: int = SaveOptions.divide_above_bytes,
    memory_budget_bytes: int = SaveOptions.memory_budget_bytes,
    overwrite: bool = SaveOptions.overwrite,
    base: str | os.PathLike[str] | None = SaveOptions.base,
    ranks_per_file: int = SaveOptions.ranks_per_file,
    progress: bool = SaveOptions.progress,
    deadline_s: float = DEADLINE_S,
    max_in_flight: int = 1,
    stage: Stage = "host",
) -> PendingSave:
    """Like `save`, but returns as soon as this rank's part is copied; the state saved is that of the call.

    What lies on a device is copied to pinned memory of the host beside the caller's stream, as soon as that stream has
    done what it was asked before, and the call waits for these copies; what lies on the host is copied there. The
    memory is kept for the next save. With `stage="device"` what lies on a device is copied on it, where that has room,
    and the call waits for nothing: each rank may choose for itself.

    At most `max_in_flight` saves of this process go on at once: a further call first waits for the oldest. It raises
    what went wrong with an earlier one, on all ranks, unless all have asked for that one's `result()`. Saves to one
    path go on one after another.
    """
    may_wait = type(max_in_flight) is int and max_in_flight > 0
    _await_saves_to(path)
    earlier = background.ended_for(max_in_flight if may_wait else 1)
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("stage", meet=False):  # `_prepare` ends with the ranks' meeting
        if not may_wait:
            raise CheckpointError(f"max_in_flight must be a number of saves >= 1, got {max_in_flight!r}")
        check_stage(stage)
        for save in earlier:  # told in the phase: a rank that has asked for the result itself must not go on alone
            save.result()
        given = (select, check_replicas, fingerprints, divide_above_bytes, memory_budget_bytes)
        options = SaveOptions(*given, progress, overwrite, base, ranks_per_file)
        to_memory = partial(staged, stage=stage, fingerprints=options.fingerprints)
        job, copies = _prepare(state_dict, path, group, options, to_memory)

    def work() -> SaveReport:
        try:
            with group.together("save"):
                return _finish(job, copies)
        finally:
            copies.release()

    try:
        name = f"reshard-save-{job.generation.save_id}"
        return PendingSave(background.start(work, name, place_of(job.storage)))
    except RuntimeError:  # no more threads are allowed: the other ranks must not wait for this one
        copies.release()
        with group.together("save"):
            raise


def _await_saves_to(path: Any) -> None:
    try:
        place = place_of(open_storage(path))
    except ReshardError:  # the save itself will say so, to all ranks
        return
    background.await_place(place)


_Staging = Callable[[Sequence[Entry]], ToWrite]


@uncollected()
def _prepare(state_dict: Any, path: Any, group: Group, options: SaveOptions, stage: _Staging) -> tuple[Job, ToWrite]:
    """Agree on what there is and who writes what, and stage what this rank writes. Writes nothing.

    The ranks meet for the last time when all of them have staged theirs: what fails on one by then fails on all.
    """
    clock = time.perf_counter()
    storage = open_storage(path)
    holdings = holdings_of(state_dict, options)
    kept = repeated.find(holdings, group, options)
    met, data, planned = _meet(holdings, path, group, options, kept, stage, None)
    if data is None or met.census is None:
        if kept is not None:  # nothing that was found by what is not so
            holdings = holdings_of(state_dict, options)
        answers = group.parties(holdings.said, met.pool)
        kept = repeated.keep(holdings, group, options, *planned_writes(holdings, group, options, answers))
        met, data, planned = _meet(holdings, path, group, options, kept, stage, met)
    assert kept is not None, "there is a plan"
    assert data is not None, "all ranks have planned the same"
    assert met.census is not None
    try:
        if options.ranks_per_file > 1 and not storage.has_places:
            raise StorageError(
                f"{storage.url} has no files that several ranks can write together: leave ranks_per_file out"
            )
        if options.globs is not None:
            check_globs(options.globs, met.census)
        save_id, choice = msgspec.msgpack.decode(met.first, type=tuple[str, Choice])
        generation = Generation(storage, save_id, generations.begin(), met.census, kept.plan, options.globs)
        base = None
        if choice.save_id is not None:
            base, choice = _opened(path, choice, Share(group.rank, group.world_size))
    except BaseException:
        data.release()
        raise
    return Job(group, storage, str(path), generation, options, choice, base, {"plan": planned - clock}), data


def _meet(
    holdings: Holdings,
    path: Any,
    group: Group,
    options: SaveOptions,
    kept: repeated.Kept | None,
    stage: _Staging,
    before: repeated.Met | None,
) -> tuple[repeated.Met, ToWrite | None, float]:
    """Collective: stage by the plan that this rank has, and see whether all have it. What is staged, if so, and when
    that began."""
    data, first, planned = None, b"", time.perf_counter()
    try:
        if kept is not None:
            if group.rank == 0:
                first = _first_word(path, options, kept.census)
            data = stage(entries_of(kept.items, holdings.state, group.ranks[group.rank]))
        met = repeated.meet(holdings, group, options, kept, first, before=before)
    except BaseException:
        if data is not None:
            data.release()
        raise
    if met.census is None and data is not None:
        data.release()
        data = None
    return met, data, planned


def _first_word(path: Any, options: SaveOptions, census: Census) -> bytes:
    """What the first rank has for all: the name of the save, and what it is based on. Raises where it must not go."""
    storage = open_storage(path)
    generations.refuse_foreign(storage)
    if not options.overwrite and generations.published(storage) is not None:
        raise FormatError(
            f"there is a checkpoint in {storage.url} already: choose another folder, or overwrite=True; nothing was "
            "saved"
        )
    chosen = Choice()
    if options.base:
        chosen = choose_base(path, options.base, census.layout, by_print=options.fingerprints)
    return msgspec.msgpack.encode((generations.new_save_id(), chosen))


def _opened(path: Any, choice: Choice, share: Share) -> tuple[Base | None, Choice]:
    """The base that was chosen, None where it is gone or cannot be read from here: this rank then writes all that is
    its, and the choice says why."""
    try:
        return base_at(path, choice.folder, choice.save_id, share), choice
    except (CheckpointError, StorageError) as error:
        _log.warning("all is written again: the checkpoint that the save is based on cannot be opened: %s", error)
        return None, choice._replace(passed_over=(*choice.passed_over, str(error)))


def _finish(job: Job, data: ToWrite) -> SaveReport:
    """Write this rank's file and, on the first rank, publish. Leaves nothing behind if any rank fails."""
    group, clock, generation = job.group, time.perf_counter(), job.generation
    try:
        if group.rank == 0:
            generations.claim(job.storage, generation.save_id)
        group.barrier()  # nobody writes before there is a claim
        if group.rank:
            generations.check_claimed(job.storage, generation.save_id, group.ranks[0])
        with group.together("write"):
            data, same = summed_up(job, data)
            written, reused, prints = write(job, data, same)
            ended = time.perf_counter()
            mine = msgspec.msgpack.encode((job.rank, written))
            told = group.gather_and_sum(mine, tally(job, prints), add_tallies)
            if told is not None:
                rows = [msgspec.msgpack.decode(row, type=tuple[int, Written]) for row in told[0]]
                files = {rank: one for rank, one in rows if one.files}
                generation.publish(files, [total(job, told[1])] if files and job.options.fingerprints else [])
    except BaseException as error:
        if group.rank == 0:
            _clear(job, error)
        raise
    finally:
        generations.ended(generation.save_id)
    if told is not None:
        generation.tidy()  # before the phase of the caller ends on any rank
    job.seconds.update(write=ended - clock, publish=time.perf_counter() - ended)
    census, plan = generation.census, generation.plan
    return SaveReport(
        path=job.path,
        save_id=generation.save_id,
        tensors=len(census.layout),
        objects=len(census.objects),
        total_bytes=plan.total_bytes,
        bytes_written=data.nbytes - reused,
        aliases=census.aliases,
        per_rank=tuple(census.per_rank),
        seconds=job.seconds,
        base=job.choice.save_id,
        bytes_reused=reused,
        passed_over=(*job.choice.passed_over, *(job.base.passed_over if job.base is not None else ())),
    )


def _clear(job: Job, cause: BaseException) -> None:
    """Remove what a failed save has written, unless it failed after it was published."""
    save_id = job.generation.save_id
    try:
        if not generations.counts(job.storage, save_id):
            generations.remove(job.storage, save_id)
    except ReshardError as second:  # the first error is what the caller must see; the next save removes the rest
        cause.add_note(f"removing the unfinished save failed too: {second}")
