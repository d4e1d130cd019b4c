"""`load` and `load_state_dict` with torch's signatures, on our engine where nothing else is asked for."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from reshard.api.load.loading import LoadOptions, load_with, saved_in
from reshard.control.group import Group
from reshard.dcp.errors import also_as_torch_raises
from reshard.dcp.load_planners import DefaultLoadPlanner
from reshard.dcp.places import reader_for, storage_by_position
from reshard.dcp.protocol import refuse_lost_state, run_load
from reshard.dcp.reader import FileSystemReader
from reshard.dcp.state import put_state_back, unwrapped
from reshard.state.deferred_optimizer import places

__all__ = ["load", "load_state_dict"]


@storage_by_position
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fill `state_dict` in place, as `torch.distributed.checkpoint.load` does.

    Keys that only the checkpoint has are not read, tensors of another dtype are converted, and values with a
    `load_state_dict` method are given what was loaded.

    Without a planner or reader of the caller's own, the engine of `reshard.load` does it: any format, byte ranges,
    a proved plan, checksums. Otherwise torch's protocol between planner and reader is followed.

    Raises as `reshard.load` does, on every rank; what is raised is a `CheckpointException` of torch's as well, whose
    `failures` has the rank that failed.
    """
    with also_as_torch_raises():
        reader = reader_for(checkpoint_id, storage_reader)
        _load(state_dict, reader, planner, Group.alone() if no_dist else Group(process_group), 0)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """The older name of `load`; deprecated upstream, and here."""
    warnings.warn("load_state_dict is deprecated: use load", FutureWarning, stacklevel=2)
    with also_as_torch_raises():
        storage_reader.reset()
        _load(state_dict, storage_reader, planner, Group.alone() if no_dist else Group(process_group), coordinator_rank)


def _load(
    state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner | None, group: Group, coordinator: int
) -> None:
    state = unwrapped(state_dict)
    plain_planner = planner is None or type(planner) is DefaultLoadPlanner
    if type(reader) is FileSystemReader and plain_planner:
        partial = isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load
        with group.together("load"):
            strict = {"*": "partial" if partial else "subset"}
            options = LoadOptions(strict=strict, dtype_policy="cast", entry_by_entry=True)
            if not partial:
                with places(state, saved_in(reader.checkpoint), keep=False):
                    refuse_lost_state(state, saved_in(reader.checkpoint))
            load_with(group, state, reader.checkpoint, options)
    else:
        with group.together("load"):
            run_load(state, reader, planner or DefaultLoadPlanner(), group, coordinator)
    put_state_back(state_dict, state)
