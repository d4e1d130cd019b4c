"""`save`, `async_save` and `save_state_dict` with torch's signatures."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from reshard.dcp.protocol import run_save
from reshard.dcp.save_planner import DefaultSavePlanner
from reshard.dcp.state import unwrapped
from reshard.dcp.writer import FileSystemWriter
from reshard.errors import CheckpointError
from reshard.group import Group

__all__ = ["async_save", "save", "save_state_dict"]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save in DCP's format, as `torch.distributed.checkpoint.save` does.

    Ranks talk over the control plane and not by collectives, whatever `use_collectives` says: a whole `.metadata`
    is written in any case. Values with a `state_dict` method are asked for it.

    Raises as `reshard.save` does; on every rank.
    """
    del use_collectives
    writer = _writer(checkpoint_id, storage_writer)
    group = Group.alone() if no_dist else Group(process_group)
    with group.together("save"):
        return run_save(unwrapped(state_dict), writer, planner or DefaultSavePlanner(), group, 0)


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """The older name of `save`; deprecated upstream, and here."""
    warnings.warn("save_state_dict is deprecated: use save", FutureWarning, stacklevel=2)
    storage_writer.reset()
    group = Group.alone() if no_dist else Group(process_group)
    with group.together("save"):
        return run_save(unwrapped(state_dict), storage_writer, planner or DefaultSavePlanner(), group, coordinator_rank)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata]:
    """Like `save`, but only copies the state before it returns; the future gives the metadata, or raises.

    Any process group will do: the background thread talks over the store, not over the group's backend.
    """
    del use_collectives
    writer = _writer(checkpoint_id, storage_writer)
    group = Group.alone() if no_dist else Group(process_group)
    copied = _copied(unwrapped(state_dict))
    future: Future[Metadata] = Future()

    def work() -> None:
        try:
            with group.together("save"):
                metadata = run_save(copied, writer, planner or DefaultSavePlanner(), group, 0)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(metadata)

    threading.Thread(target=work, name="reshard-dcp-save").start()
    return future


def _writer(checkpoint_id: str | os.PathLike[str] | None, writer: StorageWriter | None) -> StorageWriter:
    if writer is None:
        if checkpoint_id is None:
            raise CheckpointError("say where to save: give checkpoint_id or storage_writer")
        return FileSystemWriter(checkpoint_id)
    writer.reset(checkpoint_id)
    return writer


def _copied(value: Any) -> Any:
    """The state with every tensor copied to the CPU."""
    if isinstance(value, DTensor):
        copied = value.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            copied, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
