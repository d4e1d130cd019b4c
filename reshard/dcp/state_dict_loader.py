"""`load` and `load_state_dict` with torch's signatures, on our engine where possible."""

from __future__ import annotations

import functools
import os
import warnings

import torch.distributed as dist
from torch.distributed.checkpoint import default_planner as _torch_planner, state_dict_loader as _torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from reshard.api.load import load_with, saved_in
from reshard.api.options import LoadOptions, Mode
from reshard.dcp.default_planner import DefaultLoadPlanner
from reshard.dcp.engine.calls import Call, reader_for, run_load, storage_by_position
from reshard.dcp.engine.states import (
    ENGINE_WORDING,
    StateDict,
    holds_checkpointable,
    put_state_back,
    refuse_lost_state,
    unwrapped,
)
from reshard.dcp.filesystem import FileSystemReader
from reshard.live.optimizer_state import materialize
from reshard.ranks.group import Group
from reshard.ranks.progress import phase

__all__ = ["load", "load_state_dict"]


__getattr__ = functools.partial(getattr, _torch)


@storage_by_position
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fill `state_dict` in place, as `torch.distributed.checkpoint.load` does.

    Keys that only the checkpoint has are skipped, tensors of another dtype are cast, and values
    with a `load_state_dict` method receive what was loaded.

    If you pass no planner and no reader of your own, `reshard.load` does the work: it reads every
    format, only the byte ranges that this rank needs, by a proved plan, and it verifies checksums.
    A plain `DefaultLoadPlanner`, torch's or ours, counts as no planner. Otherwise, torch's protocol
    between planner and reader is followed.

    Raises the errors of `reshard.load`, on every rank. Each is also a `CheckpointException`, whose
    `failures` has the error of each rank that failed.
    """
    with Call(process_group, no_dist).as_torch_raises() as group:
        with group.together("open"):
            reader, state = reader_for(checkpoint_id, storage_reader), unwrapped(state_dict)
        _load(state, reader, planner, group, 0)
        put_state_back(state_dict, state)


def load_state_dict(
    state_dict: StateDict,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Older name of `load`. Deprecated here as in torch."""
    warnings.warn("`load_state_dict` is deprecated. Please use `load` instead.", FutureWarning, stacklevel=2)
    with Call(process_group, no_dist).as_torch_raises() as group:
        with group.together("open"):
            storage_reader.reset()
            state = unwrapped(state_dict)
        _load(state, storage_reader, planner, group, coordinator_rank)
        put_state_back(state_dict, state)


def _load(state: StateDict, reader: StorageReader, planner: LoadPlanner | None, group: Group, coordinator: int) -> None:
    defaults = DefaultLoadPlanner, _torch_planner.DefaultLoadPlanner
    is_default = planner is None or type(planner) in defaults
    flat, partial = getattr(planner, "flatten_state_dict", True), getattr(planner, "allow_partial_load", False)
    if type(reader) is FileSystemReader and is_default and flat and not holds_checkpointable(state):
        with phase("load", path=reader.checkpoint_id), group.together("load"):
            if planner is not None:  # callers read its attributes afterwards
                planner.set_up_planner(state, reader.read_metadata(), group.rank == coordinator)
            strict: Mode = "partial" if partial else "subset"
            options = LoadOptions(strict=strict, dtype_policy="cast", entry_by_entry=True, wording=ENGINE_WORDING)
            if not partial:
                with materialize(state, saved_in(reader.checkpoint), keep=False):
                    refuse_lost_state(state, saved_in(reader.checkpoint))
            load_with(group, state, reader.checkpoint, options)
    else:
        if planner is None or (is_default and isinstance(reader, FileSystemReader)):
            planner = DefaultLoadPlanner(flat, allow_partial_load=partial)  # torch's loses objects of a flat dict
        with phase("load"), group.together("load"):
            run_load(state, reader, planner, group, coordinator)
