"""`save` and `async_save`: every rank derives the same plan, writes its part once, and one manifest makes it count."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from planners.save.plan import plan_writes
from planners.save.proof import verify_save
from reshard.api.arguments import check_arguments
from reshard.api.save import background
from reshard.api.save.options import SaveOptions
from reshard.api.save.report import SaveReport
from reshard.api.save.staging import Stage, ToWrite, check_stage, staged
from reshard.control.global_state import check_globs, per_rank_name, take_census
from reshard.control.group import DEADLINE_S, Group
from reshard.control.progress import Progress
from reshard.errors import CheckpointError, FormatError, LayoutError, ReshardError, format_ranks
from reshard.formats.native import generations
from reshard.formats.native.data_file import Entry, write_file
from reshard.formats.native.manifest import FileRecord
from reshard.formats.native.publish import Generation
from reshard.state.garbage import uncollected
from reshard.state.live_state import LiveState, LiveTensor, is_long, take_apart
from reshard.storage import Storage, open_storage
from reshard.storage.opening import place_of

__all__ = ["PendingSave", "async_save", "save"]


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
    progress: bool = SaveOptions.progress,
    deadline_s: float = DEADLINE_S,
) -> SaveReport:
    """Save a state dict: nested dicts, lists and tuples of tensors, DTensors, ShardedTensors and plain data.

    Collective over `process_group` (default: the default group if torch.distributed is initialized, else this process
    alone). Every distinct element is written once, by one of the ranks that hold it. A checkpoint that is at `path`
    already stays whole until the new one is, and is then removed.

        state = {"model": reshard.get_model_state_dict(model), "step": step}
        report = reshard.save(state, f"run/step-{step}")

    Args:
        path: a local folder, a URL or a `Storage`, the same for all ranks and visible to all.
        process_group: the ranks that save together; all of them, and no others, make the call.
        alone: this process saves by itself, in a running job too, and waits for nobody: for what it holds whole, to a
            path of its own.
        select: globs of the keys to save, such as `["model.*"]`; each must fit a key of some rank. The checkpoint is
            then declared a subset: a load is strict over what the globs fit, and reports the rest.
        check_replicas: compare what several ranks hold, plain tensors, replicas of shards and objects; values that
            differ under one key are an error.
        fingerprints: store a digest of each tensor that no layout changes, for `verify`, `compare` and later loads.
        divide_above_bytes: chunks of at least this size may be divided among the ranks that hold them.
        memory_budget_bytes: for what is copied on its way to the file, since it does not lie in row-major order in the
            memory of the CPU. Fingerprints take up to 50 MiB of their own.
        overwrite: a checkpoint that is at `path` is replaced, once the new one is whole. False: it is an error, and
            nothing is written, as for `convert`, which asks to be told. Other files there are never replaced.
        progress: the first rank shows bars where somebody looks on. Each phase logs one line in any case.
        deadline_s: how long the whole may take.

    Raises (on every rank; the failing rank's own error there, `RankFailedError` elsewhere):
        KeyMismatchError: values that differ between ranks and are not `PerRank`; keys that collide; a glob that fits
            nothing.
        LayoutError: ranks that disagree about a tensor's shape, dtype or placement, or were called with different
            options; they may choose memory_budget_bytes and progress for themselves.
        FormatError: a value that is no plain data; with `overwrite=False`, a checkpoint that is there already.
        StorageError: the storage failed, or is not the same folder for all ranks.
    """
    _await_saves_to(path)
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("save"):
        options = SaveOptions(
            select, check_replicas, fingerprints, divide_above_bytes, memory_budget_bytes, progress, overwrite
        )
        check_arguments("save", state_dict, path)
        job, state = _prepare(state_dict, path, group, options)
        return _finish(job, ToWrite.where_it_is(_entries(job, state)))


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
    progress: bool = SaveOptions.progress,
    deadline_s: float = DEADLINE_S,
    max_in_flight: int = 1,
    stage: Stage = "host",
) -> PendingSave:
    """Like `save`, but returns as soon as this rank's part is copied; the state saved is that of the call.

    What lies on a device is copied to pinned memory of the host beside the caller's stream, as soon as that stream has
    done what it was asked before, and the call waits for these copies. The memory is kept for the next save. With
    `stage="device"` it is copied on the device, where that has room, and the call waits for nothing: each rank may
    choose for itself. On the CPU both are the same.

    At most `max_in_flight` saves of this process go on at once: a further call first waits for the oldest. It raises
    what went wrong with an earlier one, on all ranks, unless all have asked for that one's `result()`. Saves to one
    path go on one after another.
    """
    if max_in_flight < 1:
        raise CheckpointError(f"max_in_flight must be >= 1, got {max_in_flight}")
    check_stage(stage)
    _await_saves_to(path)
    earlier = background.ended_for(max_in_flight)
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("stage"):
        for save in earlier:  # told in the phase: a rank that has asked for the result itself must not go on alone
            save.result()
        options = SaveOptions(
            select, check_replicas, fingerprints, divide_above_bytes, memory_budget_bytes, progress, overwrite
        )
        job, state = _prepare(state_dict, path, group, options)
        copies = staged(_entries(job, state), stage, fingerprints=options.fingerprints)

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


@dataclass(frozen=True)
class _Job:
    """One rank's view of a save: what there is, who writes what, where to. It keeps no tensor of the user's alive."""

    group: Group
    storage: Storage
    path: str
    generation: Generation
    options: SaveOptions
    seconds: dict[str, float]

    @property
    def rank(self) -> int:
        """Of the default group, by which plans are numbered."""
        return self.group.ranks[self.group.rank]


@uncollected()
def _prepare(state_dict: Mapping[str, Any], path: Any, group: Group, options: SaveOptions) -> tuple[_Job, LiveState]:
    """Agree on what there is and who writes what. Writes nothing."""
    clock = time.perf_counter()
    group.same_options("save", options.shared())
    storage = open_storage(path)
    if not isinstance(state_dict, Mapping | list | tuple):
        raise FormatError(f"what is saved must be a dict (or a list) of values, got {type(state_dict).__name__}")
    state = take_apart(state_dict, whole_at=is_long, select=options.globs)
    census = take_census(state, group, check_replicas=options.check_replicas)
    if options.globs is not None:
        check_globs(options.globs, census)
    plan = plan_writes(census.layout, divide_above_bytes=options.divide_above_bytes)
    report = verify_save(plan)
    if not report.ok:
        raise LayoutError(
            f"what {format_ranks(group.ranks)} have does not make up each tensor exactly once: {report}. "
            "All ranks that hold a part of a tensor must save together"
        )
    planned = time.perf_counter()
    if group.rank == 0:
        generations.refuse_foreign(storage)
        if not options.overwrite and generations.published(storage) is not None:
            raise FormatError(
                f"there is a checkpoint in {storage.url} already: choose another folder, or overwrite=True; nothing "
                "was saved"
            )
    save_id = group.share(generations.new_save_id().encode() if group.rank == 0 else None).decode()
    generation = Generation(storage, save_id, generations.begin(), census, plan, options.globs)
    return _Job(group, storage, str(path), generation, options, {"plan": planned - clock}), state


@uncollected()
def _entries(job: _Job, state: LiveState) -> list[Entry]:
    """The arrays that this rank writes."""
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    census, plan = job.generation.census, job.generation.plan
    own = {per_rank_name(key, job.rank): wrapper.value for key, wrapper in state.per_rank.items()}
    out = []
    for item in plan.items(job.rank):
        layout = census.layout[item.fqn]
        if item.fqn not in views:
            tensor = LiveTensor(item.fqn, own[item.fqn]) if item.fqn in own else state.tensors[item.fqn]
            views[item.fqn] = _parts(tensor, len(layout.parts(job.rank)), job.rank)
        part = views[item.fqn][item.part]
        piece = part[item.source.slices] if part.ndim else part
        out.append(Entry(layout.spec, item.box, piece))
    return out


def _parts(tensor: LiveTensor, count: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The local tensors as the agreed layout counts them: as many as the tensor has, or one for each of its boxes."""
    local, fqn = tensor.local, tensor.key
    if any(t.device.type == "meta" for t in local):
        raise CheckpointError(f"tensor {fqn!r} is on the meta device: it has no values to save")
    if any(type(t).__name__ == "FakeTensor" for t in local):
        raise CheckpointError(f"tensor {fqn!r} is a FakeTensor: it has no values to save")
    if len(local) == count:
        return local
    boxes = [place.slices for part in tensor.form.parts(tensor.spec.shape, rank) for _, place in part.boxes()]
    if len(local) != 1 or len(boxes) != count or not tensor.is_sharded:
        raise LayoutError(f"tensor {fqn!r} has {len(local)} local tensors on rank {rank}, but its layout says {count}")
    return tuple(local[0][slices] for slices in boxes)


def _finish(job: _Job, data: ToWrite) -> SaveReport:
    """Write this rank's file and, on the first rank, publish. Leaves nothing behind if any rank fails."""
    group, clock, generation = job.group, time.perf_counter(), job.generation
    try:
        if group.rank == 0:
            generations.claim(job.storage, generation.save_id)
        group.barrier()  # nobody writes before there is a claim
        if group.rank:
            generations.check_claimed(job.storage, generation.save_id, group.ranks[0])
        with group.together("write"):
            record = _write(job, data) if data.entries else None
            written = time.perf_counter()
            rows = group.gather(msgspec.msgpack.encode((job.rank, record)))
            if rows is not None:
                decoded = [msgspec.msgpack.decode(row, type=tuple[int, FileRecord | None]) for row in rows]
                litter = generation.publish({rank: row for rank, row in decoded if row is not None})
    except BaseException as error:
        if group.rank == 0:
            _clear(job, error)
        raise
    finally:
        generations.ended(generation.save_id)
    if rows is not None:
        generation.tidy(litter)  # before the phase of the caller ends on any rank
    job.seconds.update(write=written - clock, publish=time.perf_counter() - written)
    census, plan = generation.census, generation.plan
    return SaveReport(
        path=job.path,
        save_id=generation.save_id,
        tensors=len(census.layout),
        objects=len(census.objects),
        total_bytes=plan.total_bytes,
        bytes_written=plan.bytes(job.rank) if job.rank < plan.world_size else 0,
        aliases=census.aliases,
        per_rank=tuple(census.per_rank),
        seconds=job.seconds,
    )


def _clear(job: _Job, cause: BaseException) -> None:
    """Remove what a failed save has written, unless it failed after it was published."""
    save_id = job.generation.save_id
    try:
        if not generations.counts(job.storage, save_id):
            generations.remove(job.storage, save_id)
    except ReshardError as second:  # the first error is what the caller must see; the next save removes the rest
        cause.add_note(f"removing the unfinished save failed too: {second}")


def _write(job: _Job, data: ToWrite) -> FileRecord:
    """This rank's file and, made by another thread meanwhile, its part of the fingerprints."""
    name = f"{job.generation.folder}/{job.rank:05d}.safetensors"
    budget = job.options.memory_budget_bytes
    with (
        Progress(show=job.group.rank == 0, bars=job.options.progress) as bar,
        bar.phase("write", data.nbytes) as step,
        ThreadPoolExecutor(1, thread_name_prefix="reshard-fingerprint") as beside,
    ):

        def on_bytes(nbytes: int) -> None:
            job.group.check()
            step.advance(nbytes)

        parts = beside.submit(data.sum_up) if job.options.fingerprints else None
        record = write_file(job.storage, name, data.entries, lanes=data.lanes, stage_bytes=budget, on_bytes=on_bytes)
        if parts is not None:
            job.generation.leave_prints(job.rank, parts.result())
    return record
