"""`save` and `async_save`: every rank derives the same plan, writes its part once, and one manifest makes it count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from planners.save_plan import DIVIDE_ABOVE_BYTES, SavePlan, plan_writes
from reshard import generations
from reshard.census import Census, Holdings, holdings_of, per_rank_name, take_census
from reshard.errors import CheckpointError, LayoutError, StorageError
from reshard.execute.writing import Entry, sum_up, write_file
from reshard.fingerprints import Partial
from reshard.formats.native import MANIFEST, FileRecord, Manifest
from reshard.group import Group
from reshard.storage import Storage, open_storage
from reshard.tensors import form_of, is_sharded, is_tensor, local_tensors, spec_of

__all__ = ["PendingSave", "SaveReport", "async_save", "save"]

_WRITER = "reshard 0.1"
_HF_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SaveReport:
    """What a save did. Equal on all ranks but for `bytes_written` and `seconds`."""

    path: str
    save_id: str
    tensors: int
    objects: int
    total_bytes: int
    """Bytes of all tensors, each distinct element once."""
    bytes_written: int
    """Bytes of tensors that this rank wrote."""
    aliases: Mapping[str, str]
    """Tied tensors that were stored once: key -> the key that holds them."""
    per_rank: tuple[str, ...]
    """Keys of which each rank's own value was kept."""
    seconds: Mapping[str, float] = field(compare=False)
    """Time of this rank, by phase."""


def save(
    state_dict: Mapping[str, Any],
    path: Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    check_replicas: bool = True,
    fingerprints: bool = True,
    divide_above_bytes: int = DIVIDE_ABOVE_BYTES,
    deadline_s: float = 1800.0,
) -> SaveReport:
    """Save a state dict: nested dicts, lists and tuples of tensors, DTensors, ShardedTensors and plain data.

    Collective over `process_group` (default: the default group if torch.distributed is initialized, else this process
    alone). Every distinct element is written once, by one of the ranks that hold it. A checkpoint that is at `path`
    already stays whole until the new one is, and is then removed.

    Args:
        path: a local folder, a URL or a `Storage`, the same for all ranks and visible to all.
        check_replicas: compare what several ranks hold, plain tensors, replicas of shards and objects; values that
            differ under one key are an error.
        fingerprints: store a digest of each tensor that no layout changes, for `verify`, `compare` and later loads.
        divide_above_bytes: chunks of at least this size may be divided among the ranks that hold them.
        deadline_s: how long the whole may take.

    Raises (on every rank; the failing rank's own error there, `RankFailedError` elsewhere):
        KeyMismatchError: values that differ between ranks and are not `PerRank`; keys that collide.
        LayoutError: ranks that disagree about a tensor's shape, dtype or placement.
        FormatError: a value that is no plain data.
        StorageError: the storage failed, or is not the same folder for all ranks.
    """
    group = Group(process_group, deadline_s=deadline_s)
    with group.together("save"):
        job = _prepare(state_dict, path, group, check_replicas, fingerprints, divide_above_bytes)
        return _finish(job, _entries(job))


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, future: Future[SaveReport]) -> None:
        self._future = future

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait for the end; raises what went wrong, as `save` does, or TimeoutError after `timeout_s` seconds."""
        return self._future.result(timeout_s)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


_in_flight: list[Future[SaveReport]] = []


def async_save(
    state_dict: Mapping[str, Any],
    path: Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    check_replicas: bool = True,
    fingerprints: bool = True,
    divide_above_bytes: int = DIVIDE_ABOVE_BYTES,
    deadline_s: float = 1800.0,
    max_in_flight: int = 1,
) -> PendingSave:
    """Like `save`, but returns as soon as this rank's part is copied; the state saved is that of the call.

    At most `max_in_flight` saves of this process go on at once: a further call first waits for the oldest, and
    raises what went wrong with it.
    """
    if max_in_flight < 1:
        raise CheckpointError(f"max_in_flight must be >= 1, got {max_in_flight}")
    _in_flight[:] = [future for future in _in_flight if not (future.done() and future.exception() is None)]
    while len(_in_flight) >= max_in_flight:
        _in_flight.pop(0).result()
    group = Group(process_group, deadline_s=deadline_s)
    with group.together("stage"):
        job = _prepare(state_dict, path, group, check_replicas, fingerprints, divide_above_bytes)
        entries = [_staged(entry) for entry in _entries(job)]
    future: Future[SaveReport] = Future()

    def work() -> None:
        try:
            with group.together("save"):
                report = _finish(job, entries)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(report)

    # not a daemon: the interpreter waits for it at exit, so that a save that was begun is not cut off
    threading.Thread(target=work, name=f"reshard-save-{job.save_id}").start()
    _in_flight.append(future)
    return PendingSave(future)


def _staged(entry: Entry) -> Entry:
    copied = entry.tensor.to("cpu", copy=True) if entry.tensor.device.type != "cpu" else entry.tensor.clone()
    return Entry(entry.spec, entry.box, copied)


@dataclass(frozen=True)
class _Job:
    """One rank's view of a save: what there is, who writes what, where to."""

    group: Group
    storage: Storage
    path: str
    holdings: Holdings
    census: Census
    plan: SavePlan
    save_id: str
    fingerprints: bool
    started_unix_s: float
    seconds: dict[str, float]

    @property
    def folder(self) -> str:
        """Of this generation, within the checkpoint's."""
        return generations.folder_of(self.save_id)

    @property
    def rank(self) -> int:
        """Of the default group, by which plans are numbered."""
        return self.group.ranks[self.group.rank]


def _prepare(
    state_dict: Mapping[str, Any],
    path: Any,
    group: Group,
    check_replicas: bool,
    fingerprints: bool,
    divide_above_bytes: int,
) -> _Job:
    """Agree on what there is and who writes what. Writes nothing."""
    clock = time.perf_counter()
    storage = open_storage(path)
    holdings = holdings_of(state_dict)
    census = take_census(holdings, group, check_replicas=check_replicas)
    plan = plan_writes(census.layout, divide_above_bytes=divide_above_bytes)
    planned = time.perf_counter()
    save_id = group.share(generations.new_save_id().encode() if group.rank == 0 else None).decode()
    seconds = {"plan": planned - clock}
    return _Job(group, storage, str(path), holdings, census, plan, save_id, fingerprints, time.time(), seconds)


def _entries(job: _Job) -> list[Entry]:
    """The arrays that this rank writes."""
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    own = {per_rank_name(key, job.rank): value for key, value in job.holdings.per_rank.items() if is_tensor(value)}
    out = []
    for item in job.plan.items(job.rank):
        layout = job.census.layout[item.fqn]
        if item.fqn not in views:
            tensor = own[item.fqn] if item.fqn in own else job.holdings.tensors[item.fqn]
            views[item.fqn] = _parts(tensor, item.fqn, len(layout.parts(job.rank)), job.rank)
        part = views[item.fqn][item.part]
        piece = part[item.source.slices] if part.ndim else part
        out.append(Entry(layout.spec, item.box, piece))
    return out


def _parts(tensor: Any, fqn: str, count: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The local tensors as the agreed layout counts them: as many as the tensor has, or one for each of its boxes."""
    local = local_tensors(tensor)
    if any(t.device.type == "meta" for t in local):
        raise CheckpointError(f"tensor {fqn!r} is on the meta device: it has no values to save")
    if len(local) == count:
        return local
    spec = spec_of(fqn, tensor)
    boxes = [place.slices for part in form_of(tensor).parts(spec.shape, rank) for _, place in part.boxes()]
    if len(local) != 1 or len(boxes) != count or not is_sharded(tensor):
        raise LayoutError(f"tensor {fqn!r} has {len(local)} local tensors on rank {rank}, but its layout says {count}")
    return tuple(local[0][slices] for slices in boxes)


class _Written(msgspec.Struct):
    rank: int
    record: FileRecord | None


def _finish(job: _Job, entries: list[Entry]) -> SaveReport:
    """Write this rank's file and, on the first rank, publish. Leaves nothing behind if any rank fails."""
    group, clock = job.group, time.perf_counter()
    try:
        if group.rank == 0:
            generations.claim(job.storage, job.save_id)
        group.barrier()  # nobody writes before there is a claim
        with group.together("write"):
            record = None
            if entries:
                name = f"{job.folder}/{job.rank:05d}.safetensors"
                record = write_file(job.storage, name, entries, on_bytes=lambda _: group.check())
                if job.fingerprints:
                    _leave_prints(job, entries)
            written = time.perf_counter()
            rows = group.exchange(msgspec.msgpack.encode(_Written(job.rank, record)))
            if group.rank == 0:
                _publish(job, [msgspec.msgpack.decode(row, type=_Written) for row in rows])
    except BaseException:
        if group.rank == 0 and not _is_published(job):
            generations.remove(job.storage, job.save_id)
        raise
    if group.rank == 0:
        generations.remove_dead(job.storage)
    group.barrier()
    job.seconds.update(write=written - clock, publish=time.perf_counter() - written)
    return SaveReport(
        path=job.path,
        save_id=job.save_id,
        tensors=len(job.census.layout),
        objects=len(job.census.objects),
        total_bytes=job.plan.total_bytes,
        bytes_written=job.plan.bytes(job.rank) if job.rank < job.plan.world_size else 0,
        aliases=job.census.aliases,
        per_rank=tuple(job.census.per_rank),
        seconds=job.seconds,
    )


def _leave_prints(job: _Job, entries: list[Entry]) -> None:
    """This rank's part of the fingerprints, as a small file: so much need not go through the control plane."""
    parts = {fqn: part.to_bytes() for fqn, part in sum_up(entries).items()}
    job.storage.publish(f"{job.folder}/{job.rank:05d}.prints", msgspec.msgpack.encode(parts))


def _collect_prints(job: _Job, names: list[str]) -> dict[str, str]:
    """The fingerprint of every tensor, out of what all ranks left; a tensor without elements is in no file."""
    totals = {fqn: Partial() for fqn in job.census.layout}
    for name in names:
        for fqn, part in msgspec.msgpack.decode(job.storage.read(name), type=dict[str, bytes]).items():
            totals[fqn] = totals[fqn] + Partial.from_bytes(part)
    specs = job.census.layout.specs
    return {fqn: total.digest(specs[fqn].dtype, specs[fqn].shape) for fqn, total in totals.items()}


def _publish(job: _Job, rows: list[_Written]) -> None:
    """Make the generation count: all its files are there, then the manifest is put in place of the old one."""
    records = {row.rank: row.record for row in rows if row.record is not None}
    seen = job.storage.list(f"{job.folder}/")
    for rank, record in records.items():
        if seen.get(record.name) != record.nbytes:
            raise StorageError(
                f"rank {rank} wrote {record.name} ({record.nbytes} bytes), but rank {job.group.ranks[0]} does not see "
                f"it in {job.storage.url}: the folder must be the same, shared one for all ranks"
            )
    census = job.census
    prints = [name for name in seen if name.endswith(".prints")]
    manifest = Manifest(
        save_id=job.save_id,
        created_unix_s=job.started_unix_s,
        writer=_WRITER,
        divide_above_bytes=job.plan.divide_above_bytes,
        files={str(rank): record for rank, record in sorted(records.items())},
        layout=_layout_json(job),
        paths={key: path for key, path in census.paths.items() if path != [key]},
        containers=census.containers,
        objects=census.objects,
        per_rank={key: {str(r): row for r, row in rows.items()} for key, rows in census.per_rank.items()},
        aliases=census.aliases,
        fingerprints=_collect_prints(job, prints) if job.fingerprints else {},
    )
    job.storage.publish(MANIFEST, msgspec.json.encode(manifest))
    for name in prints:
        job.storage.delete(name)
    generations.release(job.storage, job.save_id)
    _publish_hf_index(job, records)


def _layout_json(job: _Job) -> dict[str, Any]:
    from planners.codec import to_json

    data = to_json(job.census.layout)
    return {key: value for key, value in data.items() if key not in ("reshard", "version")}


def _is_published(job: _Job) -> bool:
    return bool(generations.published(job.storage) == job.save_id)


def _publish_hf_index(job: _Job, records: Mapping[int, FileRecord]) -> None:
    """Where one rank holds every tensor whole, say so as Hugging Face tools expect; else remove an older index."""
    whole = len(records) == 1 and all(i.box.sizes == job.census.layout[i.fqn].spec.shape for i in _all_items(job))
    if not whole:
        job.storage.delete(_HF_INDEX)
        return
    (record,) = records.values()
    index = {
        "metadata": {"total_size": job.plan.total_bytes},
        "weight_map": dict.fromkeys(job.census.layout, record.name),
    }
    job.storage.publish(_HF_INDEX, msgspec.json.encode(index))


def _all_items(job: _Job) -> Iterator[Any]:
    return (item for rank in range(job.plan.world_size) for item in job.plan.items(rank))
