"""torch's planner and storage protocol, driven over our control plane: one rank's error reaches all."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from reshard.control.group import Group
from reshard.dcp.engine.misfits import refuse_lost_state
from reshard.state.deferred_optimizer import Saved, places
from reshard.state.dtypes import dtype_name

__all__ = ["Write", "run_load", "run_save", "write_here"]


Write = Callable[[StorageWriter, SavePlan, SavePlanner], list[Any]]
"""What writes the items of a rank: gives what `StorageWriter.write_data` gives."""


def write_here(writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> list[Any]:
    """In this process."""
    written = writer.write_data(plan, planner)
    written.wait()
    results: list[Any] = written.value()
    return results


def run_save(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    group: Group,
    coordinator: int,
    write: Write = write_here,
) -> Metadata:
    """Plan on every rank, put the plans together on the coordinator, write everywhere, finish on the coordinator.

    Plans and results travel pickled, between the processes of this job only.
    """
    is_coordinator = group.rank == coordinator
    _set_up_planner(planner, state_dict, writer.storage_meta(), is_coordinator)
    _set_up_storage(writer.set_up_storage_writer, is_coordinator, group)
    local = writer.prepare_local_plan(planner.create_local_plan())
    gathered = group.gather(pickle.dumps(local), coordinator)
    final, metadata, plans, known = local, Metadata({}), None, b""
    with group.together("plan"):
        if gathered is not None:
            made, metadata = planner.create_global_plan(_with_own(local, gathered, coordinator))
            made = writer.prepare_global_plan(made)
            final, known = made[coordinator], pickle.dumps(metadata)
            plans = [b"" if rank == coordinator else pickle.dumps(plan) for rank, plan in enumerate(made)]
    mine, known = group.scatter(plans, coordinator, common=known)
    if not is_coordinator:
        final, metadata = pickle.loads(mine), pickle.loads(known)
    final = planner.finish_plan(final)
    with group.together("write"):
        results = write(writer, final, planner)
        told = group.gather(pickle.dumps(results), coordinator)
    with group.together("finish"):
        if told is not None:
            writer.finish(metadata, _with_own(results, told, coordinator))
    return metadata


def _with_own(own: Any, gathered: list[bytes], place: int) -> list[Any]:
    """What all ranks sent; this one's own as it is."""
    return [own if rank == place else pickle.loads(data) for rank, data in enumerate(gathered)]


def run_load(
    state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner, group: Group, coordinator: int
) -> None:
    """Plan on every rank, put the plans together on the coordinator, read everywhere.

    Where each rank has metadata of its own and there is none for all, every rank is a coordinator for itself.
    """
    is_coordinator = group.rank == coordinator
    metadata, for_all = _read_metadata(reader, group.rank)
    with places(state_dict, saved_in(metadata)):
        if not getattr(planner, "allow_partial_load", False):
            refuse_lost_state(state_dict, saved_in(metadata))
        planner.set_up_planner(state_dict, metadata, is_coordinator)
        _set_up_storage(
            lambda first, **more: reader.set_up_storage_reader(metadata, first, **more), is_coordinator, group, for_all
        )
        final = planner.finish_plan(_central_plan(reader, planner, group, coordinator, for_all))
        with group.together("read"):
            reader.read_data(final, planner).wait()


def _central_plan(reader: StorageReader, planner: LoadPlanner, group: Group, coordinator: int, for_all: bool) -> Any:
    local = reader.prepare_local_plan(planner.create_local_plan())
    if for_all:
        gathered = group.gather(pickle.dumps(local), coordinator)
        plans = None
        with group.together("plan"):
            if gathered is not None:
                made = planner.create_global_plan([pickle.loads(data) for data in gathered])
                plans = [pickle.dumps(plan) for plan in reader.prepare_global_plan(made)]
        return pickle.loads(group.scatter(plans, coordinator)[0])
    return reader.prepare_global_plan(planner.create_global_plan([local]))[0]


def saved_in(metadata: Metadata) -> Iterator[Saved]:
    """What torch's metadata says that there is."""
    paths = metadata.planner_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield Saved(key, paths.get(key, (key,)), tuple(entry.size), dtype_name(entry.properties.dtype))
        else:
            yield Saved(key, paths.get(key, (key,)), None)


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The metadata, and whether it is that of all ranks; if there is none, this rank's own.

    Raises what the reader raised for the former, if it has neither.
    """
    try:
        return reader.read_metadata(), True
    except Exception as error:
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except Exception:
            raise error from None


def _set_up_planner(planner: SavePlanner, state_dict: dict[str, Any], meta: Any, is_coordinator: bool) -> None:
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state_dict, storage_meta=meta, is_coordinator=is_coordinator)
    else:  # planners made before storages had metadata
        planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]


def _set_up_storage(set_up: Any, is_coordinator: bool, group: Group, use_collectives: bool = True) -> None:
    """Storages of recent torch versions are told their rank; older third-party ones take no such argument."""
    try:
        set_up(is_coordinator, rank=group.rank, use_collectives=use_collectives)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        set_up(is_coordinator)
