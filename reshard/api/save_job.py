"""One rank's part of a save: what it writes, with which ranks, and what it can reuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch

from planners.geometry.layout import ProductForm, StateLayout, TensorLayout
from planners.plans.save import WriteItems
from reshard.api.options import SaveOptions
from reshard.api.staging import ToWrite
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    LayoutError,
    NewerVersionError,
    StorageError,
)
from reshard.formats.detect import Look, look_at, look_in, open_contents
from reshard.formats.run_folder import discarded_in, path_below
from reshard.live.fingerprints import Partial, add_tallies, digests_of, pack_tally
from reshard.live.garbage_collection import gc_paused
from reshard.live.state import LiveState, is_long, take_apart
from reshard.live.tensors import LiveTensor
from reshard.native.commit import Generation, Written
from reshard.native.data_file import Entry, FileGroup, write_common_file, write_file
from reshard.native.manifest import MANIFEST
from reshard.native.reader import ALL, NativeFacts, Share, write_parts
from reshard.native.reuse import Base, Reused, reuse
from reshard.ranks.global_state import LocalState, per_rank_name
from reshard.ranks.group import Group
from reshard.ranks.liveness import machine
from reshard.ranks.progress import Progress
from reshard.storage.base import AnyPath, Storage
from reshard.storage.opening import open_storage, path_text, place_of
from reshard.stored.source import OnBytes


@dataclass(frozen=True)
class SaveJob:
    """One rank's view of a save: the state, which rank writes what, and where. It keeps no user
    tensor alive."""

    group: Group
    storage: Storage
    path: str
    generation: Generation
    options: SaveOptions
    choice: Choice
    base: Base | None
    """The chosen base checkpoint, as far as this rank can open it."""
    begun_in: str = ""
    """The path at which the first rank saves."""


def holdings_of(state_dict: Any, options: SaveOptions, group: Group) -> LocalState:
    """Return what this rank contributes to a save among `group`. Raises as `reshard.save` does."""
    if not isinstance(state_dict, Mapping | list | tuple):
        raise FormatError(f"the state to save must be a dict (or a list) of values, got {type(state_dict).__name__}")
    return LocalState.of(take_apart(state_dict, whole_at=is_long, select=options.globs, ranks=group.ranks))


@gc_paused()
def entries_of(items: WriteItems, layout: StateLayout, state: LiveState, rank: int) -> list[Entry]:
    """Return the arrays that `rank`, which holds `state`, writes."""
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    own = {per_rank_name(key, rank): wrapper.value for key, wrapper in state.per_rank.items()}
    out = []
    for fqn, box, source, _, number in items:
        if fqn not in views:
            if fqn not in own and fqn not in state.tensors:
                raise LayoutError(
                    f"tensor {fqn!r} is sharded over ranks that include rank {rank}, which does not have it: pass it "
                    "on all ranks of its mesh, under the same key"
                )
            tensor = LiveTensor(fqn, own[fqn]) if fqn in own else state.tensors[fqn]
            views[fqn] = _parts(tensor, layout[fqn], rank)
        whole = views[fqn][number]
        part = whole if source.sizes == whole.shape else whole[source.slices]
        out.append(Entry(layout[fqn].spec, box, part))
    return out


def _parts(tensor: LiveTensor, layout: TensorLayout, rank: int) -> tuple[torch.Tensor, ...]:
    """Return the local tensors as the agreed layout counts them: those of the tensor, or one for
    each of its boxes."""
    local, fqn = tensor.local, tensor.key
    if tensor.is_meta:
        raise CheckpointError(f"tensor {fqn!r} is on the meta device and has no values to save: initialize it first")
    count = 1 if isinstance(layout.form, ProductForm) else len(layout.parts(rank))
    if len(local) == count:
        return local
    boxes = [place.slices for part in tensor.form.parts(tensor.spec.shape, rank) for _, place in part.boxes()]
    if len(local) != 1 or len(boxes) != count or not tensor.is_sharded:
        raise LayoutError(f"tensor {fqn!r} has {len(local)} local tensors on rank {rank}, but its layout says {count}")
    return tuple(local[0][slices] for slices in boxes)


def summed_up(job: SaveJob, data: ToWrite) -> tuple[ToWrite, list[str]]:
    """Return `data` with all fingerprints, and the tensors that are unchanged according to these.
    They are compared only if no rank alone can determine whether a tensor changed."""
    group, every, data = job.group, job.generation.census.tensors, data.summed_up()
    told = group.gather_and_sum(b"", pack_tally(data.prints, every), add_tallies)
    names: list[str] = []
    if told is not None and job.base is not None:
        now = digests_of(told[1], every)
        try:
            before = job.base.facts.manifest.fingerprints
            names = [fqn for fqn in doubtful(job.base, every, now) if now[fqn] == before[fqn]]
        except (CheckpointError, StorageError) as error:
            job.base.pass_over(error)
    return data, group.share(names if group.rank == 0 else None, kind=list[str])


def write(job: SaveJob, data: ToWrite, same: list[str]) -> tuple[Written, int, dict[str, Partial]]:
    """Write this rank's file, or its part of a common file. Meanwhile, another thread computes its
    part of the fingerprints. Also returns the number of bytes that are reused. Those of the tensors
    `same` are known to be unchanged."""
    many = job.options.ranks_per_file > 1 and job.group.world_size > 1
    if not data.entries and not many:
        return Written(), 0, {}
    bar = Progress(show=job.group.rank == 0, bars=job.options.progress, check=job.group.check)
    with (
        bar.phase("write", data.nbytes) as step,
        ThreadPoolExecutor(1, thread_name_prefix="reshard-fingerprint") as beside,
    ):
        prints = beside.submit(copy_context().run, data.sum_up) if job.options.fingerprints else None
        if many:
            written, reused = _write_together(job, data, step.advance)
        else:
            written, reused = _write_own(job, data, same, step.advance)
        return written, reused, {} if prints is None else prints.result()


def _write_own(job: SaveJob, data: ToWrite, same: list[str], on_bytes: OnBytes) -> tuple[Written, int]:
    stem, budget = f"{job.generation.folder}/{job.group.job_rank:05d}", job.options.memory_budget_bytes
    reused, reused_bytes = Reused(tuple(data.entries), {}, ()), 0
    if job.base is not None:
        folder = job.generation.folder
        reused = reuse(data.entries, job.base, folder, same=set(same), lanes=data.lanes, stage_bytes=budget)
        on_bytes(reused_bytes := reused.nbytes)
    record = None
    if reused.entries:
        record = write_file(
            job.storage,
            f"{stem}.safetensors",
            reused.entries,
            lanes=data.lanes,
            stage_bytes=budget,
            # also for "", which is no base: a later save may take this one as its base
            digests=job.options.base is not None,
            on_bytes=on_bytes,
        )
    parts = write_parts(job.storage, f"{stem}.parts", reused.arrays) if reused.arrays else None
    return Written(record, parts, reused.linked), reused_bytes


def _write_together(job: SaveJob, data: ToWrite, on_bytes: OnBytes) -> tuple[Written, int]:
    file_group = file_group_of(job.group, job.options.ranks_per_file)
    written = write_common_file(
        job.storage,
        f"{job.generation.folder}/{file_group.ranks[0]:05d}.safetensors",
        data.entries,
        file_group,
        lanes=data.lanes,
        stage_bytes=job.options.memory_budget_bytes,
        on_bytes=on_bytes,
    )
    return (Written() if written is None else Written(written.record, ranks=written.ranks)), 0


# Which earlier checkpoint a save is compared with, and what their fingerprints say before any block
# is looked at.


_log = logging.getLogger("reshard")
_HEAD_BYTES = 256


class Choice(NamedTuple):
    """What the first rank found in the folder."""

    folder: str = ""
    """Name of the earlier checkpoint's folder beside the new one. Empty for the one that the save replaces."""
    save_id: str | None = None
    """None if there is no base."""
    by_print: bool = False
    """Whether there are tensors that no rank can compare alone: see `doubtful`."""
    skipped: tuple[str, ...] = ()
    """Checkpoints that could not be the base, and why."""


_MOST_SKIPPED = 8
"""The number of them that messages list."""


def choose_base(path: Any, wanted: AnyPath, layout: StateLayout, *, by_print: bool) -> Choice:
    """Return the earlier checkpoint that `wanted` names or, for "auto", the newest complete one:
    the one at `path`, or one in a folder beside it. A damaged one does not stop the save: it is
    skipped.

    Raises CheckpointError if `wanted` is not beside `path`, does not exist, or is not a native
    checkpoint.
    """
    passed: list[str] = []
    for folder in _newest_first(path, passed) if wanted == "auto" else [_folder_beside(path, wanted)]:
        try:
            base = base_at(path, folder)
            manifest = base.facts.manifest
            unsure = by_print and bool(doubtful(base, layout, manifest.fingerprints))
        except (CheckpointError, StorageError) as error:
            is_other = isinstance(error, FormatError) and not isinstance(error, NewerVersionError)
            if not (is_other or isinstance(error, CheckpointNotFoundError)):
                _log.warning("%s cannot be the base of the save: %s", folder or path, error)
                passed.append(str(error))
            elif wanted != "auto":
                raise type(error)(f"base={os.fspath(wanted)!r}: {error}") from error
            continue
        return Choice(folder, manifest.save_id, unsure, tuple(passed[:_MOST_SKIPPED]))
    return Choice(skipped=tuple(passed[:_MOST_SKIPPED]))


def base_at(path: Any, folder: str, save_id: str | None = None, share: Share = ALL) -> Base:
    """Open the checkpoint in a folder beside `path`, or at `path` itself for "". This rank looks
    through its share of the files. Raises FormatError if it is not native, and
    CheckpointNotFoundError if it is not the save with this id."""
    if not folder:
        storage, there, here, place = open_storage(path), "", "", path
    else:
        parent, name = _parent(path)
        storage, there, here, place = open_storage(parent), f"{folder}/", f"{name}/", path_below(parent, folder)
    contents, where = open_contents(place, share=share)
    if not isinstance(contents.facts, NativeFacts):
        raise FormatError(f"{where} is {contents.format}: the base of a save must be in the native format")
    if save_id not in (None, contents.facts.manifest.save_id):
        raise CheckpointNotFoundError(f"{where} was replaced after the first rank opened it")
    return Base(storage, there, here, contents.facts)


def open_base(path: Any, choice: Choice, group: Group) -> tuple[Base | None, Choice]:
    """Open the chosen base. None if it was deleted or cannot be read. This rank then writes all of
    its data, and the choice says why."""
    try:
        return base_at(path, choice.folder, choice.save_id, Share(group.rank, group.world_size)), choice
    except (CheckpointError, StorageError) as error:
        _log.warning("all data is written again, because the base of the save cannot be opened: %s", error)
        return None, choice._replace(skipped=(*choice.skipped, str(error)))


def doubtful(base: Base, layout: StateLayout, fingerprints: Mapping[str, str]) -> list[str]:
    """Return tensors whose sharding changed, or whose blocks have no digests: fingerprints can show
    whether a complete tensor is unchanged."""
    old = base.facts.plan.layout
    return [
        fqn
        for fqn in layout
        if fqn in fingerprints
        and fqn in old
        and layout[fqn].spec == old[fqn].spec
        and (not base.has_digests or layout[fqn] != old[fqn])
    ]


def _parent(path: Any) -> tuple[str, str]:
    """Return the folder that a path is in, and its name there; ("", "") if there is none."""
    if isinstance(path, Storage):
        return "", ""
    text = path_text(path)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return os.path.split(os.path.abspath(unquote(text.removeprefix("file://")) if separator else text))
    parent, _, name = rest.rstrip("/").rpartition("/")
    return (f"{scheme}://{parent}", name) if parent else ("", "")


def _folder_beside(path: Any, wanted: AnyPath) -> str:
    if place_of(open_storage(wanted)) == place_of(open_storage(path)):
        return ""
    (parent, _), (other, name) = _parent(path), _parent(wanted)
    if not parent or not other or place_of(open_storage(parent)) != place_of(open_storage(other)):
        raise CheckpointError(
            f"base must be the checkpoint at {path} itself or one beside it, got {os.fspath(wanted)}: its "
            "files are linked into the new folder. Save beside it, or omit base"
        )
    return name


def _newest_first(path: Any, passed: list[str]) -> list[str]:
    """Return folders of checkpoints to look at: "" is `path` itself, the others are beside it. Adds
    to `passed` why one cannot be looked at."""
    parent, own = _parent(path)
    if not parent:
        return [""]
    storage = open_storage(parent)
    try:
        look: Look = partial(look_in, storage.list()) if "://" in parent else partial(look_at, parent)
        skipped = {own, *discarded_in(storage)}  # a discarded step may be damaged
    except (CheckpointError, StorageError) as error:
        passed.append(str(error))
        return [""]
    found = []
    for folder in look("")[0]:
        name = f"{folder}/{MANIFEST}"
        if folder in skipped or MANIFEST not in look(f"{folder}/")[1]:
            continue
        try:
            text = storage.read(name, 0, min(storage.size(name), _HEAD_BYTES))
        except CheckpointNotFoundError:  # it was removed meanwhile
            continue
        except StorageError as error:
            passed.append(str(error))
            continue
        found.append((_save_id(text), folder))
    return ["", *(folder for _, folder in sorted(found, reverse=True))]


def _save_id(head: bytes) -> str:
    """Return the save id in the first bytes of a manifest. Ids sort by time."""
    _, _, rest = head.partition(b'"save_id":"')
    return rest.partition(b'"')[0].decode("ascii", "replace")


# Which ranks write one file together: `ranks_per_file` of one machine, next to one another in the
# order of ranks.


def file_groups(places: Iterable[int], per_file: int) -> Iterator[list[int]]:
    """Yield runs of at most `per_file` consecutive places, from the ascending ones of a machine."""
    run: list[int] = []
    for place in places:
        if run and (place != run[-1] + 1 or len(run) == per_file):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def file_group_of(group: Group, ranks_per_file: int) -> FileGroup:
    """Return the ranks with which this one writes a file. Collective, as is the exchange between them."""
    here = machine() or f"rank {group.job_rank}"
    ordered = sorted(group.ranks)
    place_of = {rank: place for place, rank in enumerate(ordered)}
    together = group.exchange_within(f"files of {here}", b"")
    neighbors = sorted(place_of[group.ranks[place]] for place in together)
    own = place_of[group.job_rank]
    places = next(run for run in file_groups(neighbors, ranks_per_file) if own in run)
    ranks = tuple(ordered[place] for place in places)

    def tell(data: bytes) -> list[bytes]:
        found = group.exchange_within(f"file of rank {ranks[0]}", data)
        said = {group.ranks[place]: one for place, one in found.items()}
        return [said[rank] for rank in ranks]

    return FileGroup(ranks, places.index(own), tell)


# What the caller of a save may choose: the one owner of the defaults.
