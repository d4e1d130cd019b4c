"""One save or load of the drop-in API: its ranks, errors, storages, and protocol."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from reshard.arguments import renamed
from reshard.dcp.engine.states import StateDict, refuse_lost_state
from reshard.dcp.filesystem import FileSystemReader, FileSystemWriter
from reshard.errors import CheckpointError, DeadlineError, RankFailedError, ReshardError, StorageError, option_error
from reshard.live.dtypes import dtype_name
from reshard.live.optimizer_state import Saved, materialize
from reshard.ranks.group import Group
from reshard.ranks.progress import phase
from reshard.storage.opening import is_known, open_storage

__all__ = [
    "Call", "Write", "pickled", "reader_for", "run_load", "run_save", "storage_by_position", "write_here", "writer_for",
]  # fmt: skip


# Errors here are those of the failed operation and also `CheckpointException`s. On every rank,
# `failures` has the error of each rank that failed, or of the first ones if many did.


_TELL_S = 5.0
"""How many seconds a rank that failed waits for the errors of other ranks."""

_WHOLE = 16
"""The largest number of ranks whose errors are sent to all ranks in full. Of further ranks, only
their numbers are sent.
"""

_Heard = tuple[dict[int, bytes], list[tuple[int, int]]]
"""Errors by place in the group, and the first and last places of other ranks that failed."""

Failures = dict[int, tuple[BaseException, StackSummary]]


class Call:
    """The ranks of a save or a load. All ranks create one, in the same order as their other groups."""

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        with _converted(lambda error: {0: _told(error)}):
            self.group = Group(None if no_dist else process_group, alone=bool(no_dist))
            # created now: when a call fails, another thread may be creating groups
            self._aftermath = Group(None if no_dist else process_group, alone=bool(no_dist), deadline_s=_TELL_S)

    @contextmanager
    def as_torch_raises(self) -> Iterator[Group]:
        """Turn every error inside the block into one that is also a `CheckpointException`."""
        with _converted(self._failures):
            yield self.group

    def _failures(self, error: Exception) -> Failures:
        """Collective, after a phase failed. Return the errors of the ranks that failed themselves,
        by place in the group.
        """
        here, group = _told(error), self.group
        known = group.ranks.index(error.rank) if isinstance(error, RankFailedError) and error.rank >= 0 else group.rank
        if group.raised_alike(error):
            return dict.fromkeys(range(group.world_size), here)
        if not group.failed or isinstance(error, DeadlineError):
            return {known: here}
        mine: dict[int, bytes] = {} if isinstance(error, RankFailedError) else {group.rank: pickled(*here)}
        try:
            told: _Heard = mine, []
            errors, others = self._aftermath.merge(told, _first_ones, "the errors of all", kind=_Heard)
        except ReshardError:  # a rank is gone or delayed
            return {known: here}
        found = {place: pickle.loads(data) for place, data in errors.items()}
        for place in (place for first, last in others for place in range(first, last + 1)):
            only = f"only the errors of the first {_WHOLE} ranks are sent"
            found[place] = _told(CheckpointError(f"rank {group.ranks[place]} failed, too: {only}"))
        return {**found, **(dict.fromkeys(mine, here))} or {known: here}


def _first_ones(parts: list[_Heard]) -> _Heard:
    """Return the errors of the first ranks that failed, and the places of the others. This bounds
    what each rank receives.
    """
    errors: dict[int, bytes] = {}
    others: list[tuple[int, int]] = []
    for some, spans in parts:
        more = list(spans)
        for place, data in some.items():
            if len(errors) < _WHOLE:
                errors[place] = data
            else:
                more.append((place, place))
        for first, last in sorted(more):
            if others and others[-1][1] + 1 == first:
                first = others.pop()[0]
            others.append((first, last))
    return errors, others


@contextmanager
def _converted(failures: Any) -> Iterator[None]:
    try:
        yield
    except CheckpointException:
        raise
    except Exception as error:
        raise _both(error, failures(error)) from error


def _told(error: Exception) -> tuple[BaseException, StackSummary]:
    """Return an error and its traceback without the parts that cannot be sent."""
    frames = traceback.extract_tb(error.__traceback__)
    return error, StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in frames])


def pickled(error: BaseException, beside: Any = None) -> bytes:
    """Pickle an error and its details for another process of this job. If the error cannot be
    pickled, send its text.
    """
    try:
        data = pickle.dumps((error, beside))
        pickle.loads(data)
    except Exception:  # pickling may run any code of the error's class
        data = pickle.dumps((StorageError(f"{type(error).__name__}: {error}"), beside))
    return data


def _both(error: Exception, failures: Failures) -> Any:
    """Return `error` as an instance of a class that derives from both its own class and torch's."""
    kind = _class_of(type(error))  # type: ignore[arg-type]  # classes are hashable, whatever their instances are
    # for an OSError, another base's `__new__`, such as ValueError's, would refuse
    made = (OSError if isinstance(error, OSError) else kind).__new__(kind, *error.args)
    made.args = error.args
    if isinstance(error, OSError):  # neither args nor the dict has them
        made.filename, made.filename2 = error.filename, error.filename2
    vars(made).update(vars(error), _original=error, _failures=failures)
    return made


@functools.cache
def _class_of(kind: Any) -> Any:
    members: dict[str, Any] = {
        "__str__": _text,
        "__reduce__": lambda self: (_both, (self._original, self._failures)),  # pickled as its parts
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, CheckpointException), members)


def _text(error: Any) -> str:
    """Return the error's own message and a summary of the failures on other ranks."""
    known = str(error._original)
    others = [
        f"rank {place} failed, too: {type(other).__name__}: {other}"
        for place, (other, _) in error._failures.items()
        if other is not error._original and str(other) not in known
    ]
    return "\n".join([known, *others])


# torch's planner and storage protocol, over our control plane: one rank's error reaches all ranks.


Write = Callable[[StorageWriter, SavePlan, SavePlanner], list[Any]]
"""Writes the items of a rank, and returns what `StorageWriter.write_data` returns."""


def write_here(writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> list[Any]:
    """Write in this process."""
    written = writer.write_data(plan, planner)
    written.wait()
    return list(written.value())


def run_save(
    state_dict: StateDict,
    writer: StorageWriter,
    planner: SavePlanner,
    group: Group,
    coordinator: int,
    write: Write,
) -> Metadata:
    """Plan on every rank, merge the plans on the coordinator, write on every rank, and finish on
    the coordinator.

    Plans and results are pickled and sent only between the processes of this job.
    """
    is_coordinator = group.rank == coordinator
    _set_up_planner(planner, state_dict, writer.storage_meta(), is_coordinator)
    _set_up_storage(writer.set_up_storage_writer, is_coordinator, group)
    local = writer.prepare_local_plan(planner.create_local_plan())
    gathered = group.gather(pickle.dumps(local), coordinator)
    final, metadata, plans, known = local, Metadata({}), None, b""
    here = writer.storage.url if isinstance(writer, FileSystemWriter) else str(getattr(writer, "checkpoint_id", ""))
    with group.together("plan"):
        if gathered is not None:
            made, metadata = planner.create_global_plan(_with_own(local, gathered, coordinator))
            made = writer.prepare_global_plan(made)
            final, known = made[coordinator], pickle.dumps((metadata, here))
            plans = [b"" if rank == coordinator else pickle.dumps(plan) for rank, plan in enumerate(made)]
    mine, known = group.scatter(plans, coordinator, common=known)
    if not is_coordinator:
        final, (metadata, there) = pickle.loads(mine), pickle.loads(known)
        if os.path.realpath(there) != os.path.realpath(here):  # also normalizes URLs
            raise StorageError(
                f"rank {group.job_rank} saves to {here}, and rank {group.ranks[coordinator]} to {there}: pass the same "
                "path on all ranks"
            )
    final = planner.finish_plan(final)
    with group.together("write"), phase("write") as span:
        results = write(writer, final, planner)
        span.nbytes = sum(getattr(one, "size_in_bytes", 0) for one in results)
        told = group.gather(pickle.dumps(results), coordinator)
    with group.together("finish"):
        if told is not None:
            writer.finish(metadata, _with_own(results, told, coordinator))
    return metadata


def _with_own(own: Any, gathered: list[bytes], place: int) -> list[Any]:
    """Return what all ranks sent, with this rank's own value unpickled."""
    return [own if rank == place else pickle.loads(data) for rank, data in enumerate(gathered)]


def run_load(
    state_dict: StateDict, reader: StorageReader, planner: LoadPlanner, group: Group, coordinator: int
) -> None:
    """Plan on every rank, merge the plans on the coordinator, and read on every rank.

    If each rank has metadata of its own and there is no global metadata, every rank is its own
    coordinator.
    """
    is_coordinator = group.rank == coordinator
    metadata, for_all = _read_metadata(reader, group.rank)
    with materialize(state_dict, saved_in(metadata)):
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
    """Yield the names and kinds that torch's metadata lists."""
    paths = metadata.planner_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        form: Any = (None,)
        if isinstance(entry, TensorStorageMetadata):
            form = tuple(entry.size), dtype_name(entry.properties.dtype)
        yield Saved(key, paths.get(key, (key,)), *form)


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """Return the metadata, and True if it is global. If there is no global metadata, return this
    rank's own.

    If there is neither, raise the reader's error for the global metadata.
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


def _set_up_planner(planner: SavePlanner, state_dict: StateDict, meta: Any, is_coordinator: bool) -> None:
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state_dict, storage_meta=meta, is_coordinator=is_coordinator)
    else:  # planners from before `storage_meta`
        planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]


def _set_up_storage(set_up: Any, is_coordinator: bool, group: Group, use_collectives: bool = True) -> None:
    """Set up a storage. Recent torch versions pass the rank; older third-party storages accept no
    such argument.
    """
    try:
        set_up(is_coordinator, rank=group.rank, use_collectives=use_collectives)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        set_up(is_coordinator)


# Which writer and reader a call uses: the given one, ours, or torch's for URLs that only fsspec
# supports.


Id = str | os.PathLike[str]
Function = TypeVar("Function", bound=Callable[..., Any])


def storage_by_position(call: Function) -> Function:
    """Let `call` accept its storage as the second positional argument. That was its position before
    torch 2.2, and torch warns about it.

    Raises TypeError for a path by position.
    """
    name = next(name for name in inspect.signature(call).parameters if name.startswith("storage_"))
    checked = renamed()(call)

    @functools.wraps(call)
    def either_way(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and any(isinstance(one, str | os.PathLike) for one in args):
            raise TypeError(f"pass the path by its name: dcp.{call.__name__}(state_dict, checkpoint_id=path)")
        if len(args) == 2 and name not in kwargs:
            warnings.warn(f"{call.__name__} takes the storage as a keyword argument: {name}=...", stacklevel=2)
            kwargs[name] = args[1]
            args = args[:1]
        for what, verb in ((name, "reset"), ("planner", "set_up_planner")):
            if not hasattr(given := kwargs.get(what), verb) and given is not None:
                words = f"{what} must be one of DCP's or of reshard.dcp, got {given!r:.80}"
                raise option_error(words, AttributeError)
        return checked(*args, **kwargs)

    return cast("Function", either_way)


def _storage_for(checkpoint_id: Id | None, given: Any, *, kind: str, of_files: Any) -> Any:
    """Return the storage of a call. Raises OptionError if it names none."""
    if given is not None:
        if checkpoint_id is not None:
            given.reset(checkpoint_id)
        return given
    if not checkpoint_id:
        words = f"`checkpoint_id` must be specified if there is no storage_{kind.lower()}: pass a path"
        raise option_error(words, RuntimeError)
    return _of_fsspec(checkpoint_id, f"Fsspec{kind}") or of_files(checkpoint_id)


writer_for = functools.partial(_storage_for, kind="Writer", of_files=FileSystemWriter)
reader_for = functools.partial(_storage_for, kind="Reader", of_files=FileSystemReader)


def _of_fsspec(checkpoint_id: Id, name: str) -> Any:
    """Return torch's fsspec storage for a URL that only fsspec supports, or None for a URL that
    reshard supports.

    Raises StorageError, also a RuntimeError as in torch, if neither does.
    """
    if is_known(checkpoint_id):
        return None
    with contextlib.suppress(ImportError):
        from reshard.dcp import fsspec_filesystem  # fsspec is optional

        kind = getattr(fsspec_filesystem, name)
        if kind.validate_checkpoint_id(checkpoint_id):
            return kind(checkpoint_id)
    try:
        return open_storage(checkpoint_id) and None
    except StorageError as error:
        raise option_error(f"Cannot detect which storage to use: {error}", RuntimeError, StorageError) from error
