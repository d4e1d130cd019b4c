"""`load`: a saved state into a live one, in place, by a proved plan, with the truth about every key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from planners.errors import CoverageError
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.load.plan import ReadItem, plan_reads
from planners.load.proof import verify_load
from reshard.api.load.matching import Match, Truth, match_keys, refuse, used_by_all
from reshard.api.load.per_rank import own_values
from reshard.api.load.shared_memory import filled_once, refuse_overlaps
from reshard.checkpoint.checkpoint import Checkpoint, stored_layout
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.control.group import Group
from reshard.control.progress import Progress
from reshard.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, KeyMismatchError
from reshard.execute.load_bytes import Fetch
from reshard.execute.reading import Copy, Staged, Workspace, find_copies
from reshard.formats.native.reader import NativeFacts, is_replaced
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.arrays import as_array
from reshard.state.deferred_optimizer import Saved, places
from reshard.state.devices import settle_streams
from reshard.state.dtypes import dtype_from_name
from reshard.state.targets import Targets
from reshard.state.tensors import device_of, form_of, spec_of

if TYPE_CHECKING:  # imported by loads that map or share: they are a third of what there is to import
    from reshard.execute.messages.read_once import SharedReading
    from reshard.mapping import Mapping as StateMapping

__all__ = ["LoadReport", "load"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LoadReport:
    """What a load did, or in a dry run would do, on this rank."""

    path: str
    format: str
    loaded: tuple[str, ...]
    """Keys that were filled, tensors and objects."""
    missing: tuple[str, ...]
    """Keys of the target that the checkpoint does not have; they keep the values they had."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint that no rank's target has; they were not read."""
    outside: tuple[str, ...]
    """Keys of the target that the checkpoint, declared a subset when it was saved, does not claim to have."""
    mismatched: tuple[str, ...]
    """Keys whose shape (or, under dtype_policy "error", dtype) differs, with both."""
    cast: Mapping[str, tuple[str, str]]
    """key -> (dtype saved, dtype of the target) of what was converted."""
    aliases: Mapping[str, str]
    """Keys that were filled from another key's tensor, to which they were tied when saved."""
    bytes_needed: int
    """Bytes of this rank's own elements, as saved; under `read_once`, of those that it reads."""
    bytes_read: int
    """Bytes that this rank read of the data files for their elements, its own or those of others of its machine."""
    bytes_read_to_check: int
    """Bytes that were read beside, for nothing but to check those: headers, the rest of a block."""
    bytes_checked: int
    """Bytes that this rank checked against saved checksums, headers included. Of what ranks of a machine read for one
    another, who reads a byte checks it."""
    dry_run: bool
    seconds: Mapping[str, float] = field(compare=False)
    """Time by phase."""
    resized: tuple[str, ...] = ()
    """Extra state of modules that had another shape or dtype than was saved, and was replaced by what was saved."""
    bytes_received: int = 0
    """Bytes of elements that other ranks read for this one: of its machine, or under `read_once` of the whole job."""

    @property
    def ok(self) -> bool:
        """Whether both sides had the same keys and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)


def load(
    state_dict: dict[str, Any],
    path: Any,
    *,
    strict: bool | Mapping[str, str] = True,
    dtype_policy: str = "error",
    mapping: Mapping[str, str] | StateMapping | None = None,
    dry_run: bool = False,
    check: bool = True,
    read_once: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    threads: int | None = None,
    memory_budget_bytes: int | None = None,
    progress: bool = False,
    deadline_s: float = 1800.0,
) -> LoadReport:
    """Fill `state_dict`, in place, from the checkpoint at `path`, whatever layout and format it was saved in.

    Tensors, DTensors and ShardedTensors are written into; meta tensors are replaced by real ones; everything else is
    replaced in its container. Nothing is written before the plan is proved, every byte range is known to exist, and all
    blocks that a rank reads whole for itself have the right checksum; what is read for several ranks at once, or from
    an object store, is checked as it comes, and the error says if targets were overwritten by then.

    Args:
        path: a folder, file, URL, `Storage`, or an open `Checkpoint`.
        strict: True: missing and unexpected keys are errors. False: they are reported only. A mapping of globs to
            "strict", "subset" (missing keys are errors, unexpected ones are not) or "partial" (neither are) decides by
            key, the first glob that fits; keys that none fits are strict.
        dtype_policy: "error": a target of another dtype is an error; "cast": elements are converted and reported;
            "saved": the target is replaced by a tensor of the saved dtype.
        mapping: key in `state_dict` -> key in the checkpoint, for those that differ; or a `reshard.mapping.Mapping`
            from the checkpoint's naming and shaping to that of `state_dict`.
        dry_run: only report; the target is not touched.
        check: compare checksums of all blocks that are read whole, where the format has them.
        read_once: True: ranks that want the same elements share the reading of them, and pass them on to one another
            through the process group, so that no byte is read twice in the whole job; not with dtype_policy "saved".
            None: the ranks of one machine read for one another through memory that they share, where together they
            would touch bytes twice, and touching costs more than copying (see docs/reading.md). False: each rank reads
            for itself. All ranks say the same.
        process_group: with torch.distributed initialized, the ranks that load together: all end alike. A key of the
            checkpoint is unexpected only if none of them wants it.
        alone: this process loads by itself, in a running job too, and waits for nobody; of sharded tensors it reads its
            own shards.
        threads: at most so many copy at once; default: this process's share of the machine's processors, up to 8.
        memory_budget_bytes: for what is staged on its way to another dtype or device, or read where the storage has no
            view of its bytes, of which 2 MiB are read at once however small the budget; default: 32 MiB a thread.
        progress: the first rank shows bars where somebody looks on. Each phase logs one line in any case.
        deadline_s: how long the whole may take.

    Raises (nothing was written then; `RankFailedError` on the other ranks):
        KeyMismatchError: lists all missing, unexpected and mismatched keys at once.
        DamagedCheckpointError: bytes are missing or were changed.
        CheckpointNotFoundError, FormatError: see `reshard.open`.
    """
    wish = LoadOptions(strict, dtype_policy, mapping, dry_run, check, read_once, threads, memory_budget_bytes, progress)
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("load"):
        return load_with(group, state_dict, path, wish, process_group)


@dataclass(frozen=True)
class LoadOptions:
    """What the caller of `load` chose; see there for what each means."""

    strict: bool | Mapping[str, str] = True
    dtype_policy: str = "error"
    mapping: Mapping[str, str] | StateMapping | None = None
    dry_run: bool = False
    check: bool = True
    read_once: bool | None = None
    threads: int | None = None
    memory_budget_bytes: int | None = None
    progress: bool = False
    entry_by_entry: bool = False
    """Match every entry of a dict for itself, as torch.distributed.checkpoint does; else a dict without tensors is
    replaced whole."""


def load_with(
    group: Group,
    state_dict: dict[str, Any],
    path: Any,
    options: LoadOptions,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """`load` among the ranks of `group`, within a phase of theirs."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    checkpoint = _mapped(checkpoint, options.mapping)
    try:
        with places(state_dict, saved_in(checkpoint), keep=not options.dry_run):
            return _load_into(group, state_dict, checkpoint, options, process_group)
    except (CheckpointNotFoundError, DamagedCheckpointError) as error:
        native = checkpoint.contents.facts_of(NativeFacts)
        if native is None or not is_replaced(native):
            raise
        raise CheckpointError(
            f"{checkpoint.url} was replaced by a later save, or removed, while it was read: load again ({error})"
        ) from error


def _mapped(checkpoint: Checkpoint, mapping: Mapping[str, str] | StateMapping | None) -> Checkpoint:
    """As rules make it; names alone change nothing here."""
    if mapping is None or isinstance(mapping, Mapping):
        return checkpoint
    from reshard.mapping import Mapping as StateMapping

    if not isinstance(mapping, StateMapping):
        raise KeyMismatchError(f"mapping must be a dict or a reshard.mapping.Mapping, got {mapping!r}")
    return mapping.apply(checkpoint)


def saved_in(checkpoint: Checkpoint) -> Iterator[Saved]:
    """What a checkpoint has, tensor by tensor and object by object."""
    paths = checkpoint.contents.paths
    for key, tensor in checkpoint.items():
        spec = tensor.stored.spec
        yield Saved(paths.get(key, (key,)), spec.shape, spec.dtype)
    for key in checkpoint.objects:
        yield Saved(paths.get(key, (key,)), None)


def _load_into(
    group: Group,
    state_dict: dict[str, Any],
    checkpoint: Checkpoint,
    options: LoadOptions,
    process_group: dist.ProcessGroup | None,
) -> LoadReport:
    clock = time.perf_counter()
    keys = options.mapping if isinstance(options.mapping, Mapping) else {}
    targets = Targets.of(state_dict, saved=checkpoint.objects, entry_by_entry=options.entry_by_entry)
    match = match_keys(targets, checkpoint, dtype_policy=options.dtype_policy, mapping=keys)
    used, sharers = used_by_all(match, group, checkpoint)
    truth = refuse(match, used, options.strict, checkpoint, targets)
    targets.check_places([*match.objects, *match.per_rank])
    refuse_overlaps(
        {key: targets.tensors[key] for key in match.tensors if key not in targets.replaced}, targets.tied_in_place
    )
    space = Workspace.of(options.memory_budget_bytes, options.threads, sharers)
    shared = (
        _share(targets, match, group) if options.read_once and group.world_size > 1 and not options.dry_run else None
    )
    rank = group.ranks[group.rank]
    once = filled_once(match.tensors, targets.tensors, targets.tied_in_place, checkpoint, rank)
    # ranks without elements of a tensor do not see that it is tied: to share the reading, all must plan the same
    names = once if shared is None else match.tensors
    job = _plan(targets, checkpoint, names, rank, materialize=not options.dry_run, shared=shared)
    settle_streams(device_of(targets.tensors[key]) for key in names)
    planned = time.perf_counter()
    together = options.read_once is None and group.world_size > 1 and not options.dry_run
    native = checkpoint.contents.facts_of(NativeFacts) if options.check else None
    with (
        Fetch(job.copies, group, space, native, together, options.memory_budget_bytes) as fetch,
        Progress(show=group.rank == 0, bars=options.progress) as bar,
    ):
        if not options.dry_run:
            with bar.phase("check", job.bytes_needed) as step:
                fetch.check(_watched(group, step.advance))
        verified = time.perf_counter()
        per_rank = own_values(targets.per_rank, match.per_rank, checkpoint, group)
        fetch.settle()
        if not options.dry_run:
            with bar.phase("read", job.bytes_needed) as step:
                fetch.read(_watched(group, step.advance))
            if shared is not None:
                fetch.bytes_received += shared.pass_on(targets.writable, group, process_group)
            targets.put_new()
            targets.tell_autograd(match.tensors)
            targets.assign(match.objects)
            targets.assign(per_rank)
    seconds = {"plan": planned - clock, "check": verified - planned, "read": time.perf_counter() - verified}
    return LoadReport(
        **_findings(checkpoint, match, truth),
        loaded=(*match.tensors, *match.objects, *per_rank),
        **_counts(fetch),
        bytes_needed=job.bytes_needed,
        dry_run=options.dry_run,
        resized=tuple(targets.resized),
        seconds=seconds,
    )


def _findings(checkpoint: Checkpoint, match: Match, truth: Truth) -> dict[str, Any]:
    """What a report says of keys, whether or not anything was read."""
    return {
        "path": checkpoint.url,
        "format": checkpoint.format,
        "missing": truth.missing,
        "unexpected": truth.unexpected,
        "outside": truth.outside,
        "mismatched": match.mismatched,
        "cast": match.cast,
        "aliases": {k: checkpoint.aliases[name] for k, name in match.tensors.items() if name in checkpoint.aliases},
    }


def _counts(fetch: Fetch) -> dict[str, Any]:
    """What a report says of bytes that were read."""
    return {
        "bytes_read": fetch.bytes_read,
        "bytes_read_to_check": fetch.bytes_read_to_check,
        "bytes_checked": fetch.bytes_checked,
        "bytes_received": fetch.bytes_received,
    }


def _share(targets: Targets, match: Match, group: Group) -> SharedReading:
    if set(targets.replaced) - set(targets.resized):
        raise KeyMismatchError('read_once does not go with dtype_policy="saved": use "cast", or read everything')
    from reshard.execute.messages.read_once import SharedReading

    return SharedReading.agree(
        {key: targets.tensors[key] for key in match.tensors if key not in targets.resized}, group
    )


def _watched(group: Group, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Counts bytes, and raises as soon as another rank has failed."""

    def on_bytes(nbytes: int) -> None:
        group.check()
        advance(nbytes)

    return on_bytes


@dataclass
class _Job:
    """The copies of a load."""

    copies: list[Copy]
    bytes_needed: int


def _plan(
    targets: Targets,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    rank: int,
    *,
    materialize: bool,
    shared: SharedReading | None = None,
) -> _Job:
    """Plan this rank's reads of the stored tensors `names`, prove the plan, and find the bytes of every item."""
    stored: dict[str, StoredTensor] = {}
    saved: dict[str, TensorLayout] = {}
    wanted: dict[str, TensorLayout] = {}
    for key, name in names.items():
        tensor = checkpoint[name].stored
        stored[key] = tensor
        spec = TensorSpec(key, tensor.spec.shape, tensor.spec.dtype)
        saved[key] = TensorLayout.of(spec, stored_layout(tensor).form)
        target = targets.tensors[key]
        form = (shared.form(key) if shared is not None else None) or form_of(target, key)
        shape = targets.resized.get(key, spec_of(key, target).shape)
        wanted[key] = TensorLayout.of(TensorSpec(key, shape, spec.dtype), form)
    world = max([rank + 1, *(layout.world_size for layout in wanted.values())])
    plan = plan_reads(StateLayout(saved), StateLayout(wanted, world))
    try:
        items = plan.items(rank)
    except CoverageError as error:
        raise DamagedCheckpointError(f"{checkpoint.url}: {error}") from None
    verify_load(plan).raise_if_failed()
    if not materialize:
        return _Job([], items.nbytes)
    return _Job(find_copies(items, lambda key: stored[key], _landings(targets, wanted, shared)), items.nbytes)


def _landings(
    targets: Targets, wanted: Mapping[str, TensorLayout], shared: SharedReading | None
) -> Callable[[ReadItem], Array | Staged]:
    """A function from an item to what it goes into: the target's own memory, where that can be written to at once."""
    made: dict[str, list[Array | Staged]] = {}

    def target(item: ReadItem) -> Array | Staged:
        if item.fqn not in made:
            made[item.fqn] = land(item.fqn)
        return made[item.fqn][item.part]

    def land(key: str) -> list[Array | Staged]:
        saved = dtype_from_name(wanted[key].spec.dtype)
        whole = targets.writable(key)
        read = whole if shared is None or shared.form(key) is None else shared.parts(key, whole)
        return [
            as_array(local)
            if local.dtype == saved and local.device.type == "cpu" and not local.is_conj() and not local.is_neg()
            else Staged(local, saved)
            for local in read
        ]

    for key in wanted:  # tensors of which this rank holds no element may need a new dtype or memory, too
        if targets.tensors[key].device.type == "meta" or key in targets.replaced:
            made[key] = land(key)
    return target
