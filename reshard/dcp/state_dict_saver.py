"""`save`, `async_save`, and `save_state_dict` with torch's signatures."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import default_planner as _torch_planner, state_dict_saver as _torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from reshard.api.background_saves import await_saves, start_in_background
from reshard.dcp.default_planner import DefaultSavePlanner
from reshard.dcp.engine.calls import Call, Write, run_save, storage_by_position, write_here, writer_for
from reshard.dcp.engine.states import StateDict, on_the_cpu, unwrapped
from reshard.ranks.group import Group
from reshard.ranks.progress import phase

__all__ = ["async_save", "save", "save_state_dict"]


__all__ += _torch.__all__

__getattr__ = functools.partial(getattr, _torch)


@storage_by_position
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save in DCP's format, as `torch.distributed.checkpoint.save` does.

    Ranks communicate over the store instead of collectives, regardless of `use_collectives`. The
    save always writes one global `.metadata`. Values with a `state_dict` method are saved as what
    it returns.

    Raises the errors of `reshard.save`, on every rank. Each is also a `CheckpointException`, whose
    `failures` has the error of each rank that failed.
    """
    del use_collectives
    _await_earlier(checkpoint_id, storage_writer, planner)
    with Call(process_group, no_dist).as_torch_raises() as group, group.together("save"):
        writer = writer_for(checkpoint_id, storage_writer)
        return _save(unwrapped(state_dict), writer, planner, group, 0)


def save_state_dict(
    state_dict: StateDict,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Older name of `save`. Deprecated here as in torch."""
    warnings.warn("`save_state_dict` is deprecated. Please use `save` instead.", FutureWarning, stacklevel=2)
    _await_earlier(None, storage_writer, planner)
    with Call(process_group, no_dist).as_torch_raises() as group, group.together("save"):
        storage_writer.reset()
        return _save(unwrapped(state_dict), storage_writer, planner, group, coordinator_rank)


def _save(
    state: StateDict,
    writer: StorageWriter,
    planner: SavePlanner | None,
    group: Group,
    coordinator: int,
    write: Write = write_here,
) -> Metadata:
    """Save. torch's own planner without changes counts as none, because ours is faster. Its
    attributes are filled in for callers that read them.
    """
    used = planner
    if used is None or type(used) is _torch_planner.DefaultSavePlanner:
        choices = ("flatten_state_dict", "dedup_save_to_lowest_rank")
        used = DefaultSavePlanner(**{name: getattr(planner, name) for name in choices if planner is not None})
    if isinstance(used, DefaultSavePlanner):
        used.ranks = group.ranks
    with phase("save", path=getattr(writer, "checkpoint_id", None)):
        metadata = run_save(state, writer, used, group, coordinator, write)
    if planner not in (None, used):
        known = {**vars(used), "metadata": metadata}
        vars(planner).update({name: value for name, value in known.items() if not name.startswith("_")})
    return metadata


@storage_by_position
def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = "thread",
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Like `save`, but return as soon as the state is copied. The future returns the metadata or
    raises.

    Any process group works: the background thread communicates over the store, not over the group's
    backend.

    Args:
        async_checkpointer_type: with `AsyncCheckpointerType.PROCESS` or "process", a separate
            process writes the files. It serves all saves, ends with this process, and takes memory
            for what this rank writes.
        async_stager: copies the state, instead of our own copy to the CPU. Default:
            `storage_writer`, if it is an `AsyncStager`. You close it.

    Returns:
        A `Future` of the metadata. If the stager returns a future and torch has
            `AsyncSaveResponse`, an `AsyncSaveResponse` of two futures.
    """
    del use_collectives
    uses = _await_earlier(checkpoint_id, storage_writer, planner)
    call = Call(process_group, no_dist)
    with call.as_torch_raises() as group, group.together("stage", meet=False):
        writer = writer_for(checkpoint_id, storage_writer)
        stager = async_stager if async_stager is not None else writer if isinstance(writer, AsyncStager) else None
        state = unwrapped(state_dict)
        staged = on_the_cpu(state) if stager is None else stager.stage(state)
    write = write_here
    if getattr(async_checkpointer_type, "value", async_checkpointer_type) == "process":
        from reshard.dcp.engine.saving_process import write_in_process as write  # rarely needed
    done = _in_background(lambda: _save(_now(staged), writer, planner, group, 0, write), call, uses)
    if isinstance(staged, Future):
        if not hasattr(_torch, "AsyncSaveResponse"):  # torch 2.6 lacks it
            return done
        return _torch.AsyncSaveResponse(staging_completion=_without_value(staged), upload_completion=done)  # type: ignore[arg-type]  # it is of the metadata
    if stager is not None and stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return done


def _await_earlier(path: Any, writer: Any, planner: Any) -> Set[Any]:
    """Wait for saves in the background to the same place, or with the same writer or planner."""
    return await_saves(path or getattr(writer, "checkpoint_id", writer), writer, planner)


def _in_background(save: Callable[[], Metadata], call: Call, uses: Set[Any]) -> Future[Metadata]:
    def work() -> Metadata:
        with call.as_torch_raises() as group, group.together("save"):
            return save()

    try:
        return start_in_background(work, "reshard-dcp-save", uses=uses)
    except RuntimeError:  # no thread can be started: the other ranks must know
        with call.group.together("save"):
            raise


def _now(staged: Any) -> StateDict:
    """Return the state, once it is available."""
    state: StateDict = staged.result() if isinstance(staged, Future) else staged
    return state


def _without_value(staged: Future[Any]) -> Future[None]:
    done: Future[None] = Future()

    def pass_on(ended: Future[Any]) -> None:
        error = ended.exception()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    staged.add_done_callback(pass_on)
    return done
