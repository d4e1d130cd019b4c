"""`load`: fills a state dict in place from a checkpoint. The plan is proved before anything is written."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from planners.findings import in_groups
from planners.geometry.layout import ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Replicate
from planners.plans.load import ReadItem, plan_reads
from planners.units import format_bytes, format_count
from reshard.api.load_matching import KeyMatch, gather_mismatches, match_keys
from reshard.api.options import DtypePolicy, LoadOptions, Mode, ReadOnce
from reshard.api.overlapping_targets import filled_once, refuse_overlaps
from reshard.api.reports import CheckedReport, FilledReport
from reshard.arguments import check_arguments, renamed
from reshard.checkpoint import (
    Checkpoint,
    CheckpointSource,
    all_names,
    log_skipped,
    open_among,
    refuse_replaced,
    stored_layout,
)  # fmt: skip
from reshard.errors import CorruptCheckpointError, KeyMismatchError, OptionError, format_names
from reshard.execute.fetch import Fetch
from reshard.execute.reading import Copy, Staged, Workspace, find_copies
from reshard.live.copy_streams import Uploads
from reshard.live.dtypes import DROPS, as_array, dtype_from_name, is_resolved
from reshard.live.garbage_collection import gc_paused
from reshard.live.optimizer_state import Saved, materialize
from reshard.live.state import PerRank, Targets
from reshard.live.tensors import UNSHARDED, world_size
from reshard.live.tree import needs_class, restore_types, unresolved_class
from reshard.native.reader import NativeFacts
from reshard.ranks.group import DEADLINE_S, Group
from reshard.ranks.progress import Progress, current, phase
from reshard.stored.checksums import Checking, CheckTime
from reshard.stored.contents import LazyMapping
from reshard.stored.source import Source
from reshard.stored.tensor import StoredTensor, read_value

if TYPE_CHECKING:
    from reshard.api.stateful_objects import LiveObjects
    from reshard.execute.exchange import SharedReading
    from reshard.mapping import Mapping as StateMapping

_log = logging.getLogger("reshard")


@renamed(deadline_s="timeout")
def load(
    state_dict: dict[str, Any],
    path: CheckpointSource,
    *,
    strict: bool | Mode | Mapping[str, Mode] = LoadOptions.strict,
    dtype_policy: DtypePolicy = LoadOptions.dtype_policy,
    mapping: Mapping[str, str] | StateMapping | None = LoadOptions.mapping,
    dry_run: bool = LoadOptions.dry_run,
    check: bool | CheckTime = LoadOptions.check,
    read_once: bool | ReadOnce | None = LoadOptions.read_once,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    threads: int | None = LoadOptions.threads,
    memory_budget_bytes: int | None = LoadOptions.memory_budget_bytes,
    progress: bool = LoadOptions.progress,
    timeout: float | timedelta = DEADLINE_S,
) -> LoadReport:
    """Fill `state_dict` in place from the checkpoint at `path`. Layouts and formats may differ.

        state = {"model": model, "optim": optimizer, "step": 0}
        report = reshard.load(state, "run/step-1000")

    Fills tensors and dicts in place, replaces meta tensors and other values, and calls `load_state_dict` of objects
    last. To load into a new optimizer's dict, pass the one that `get_state_dict` returned. Before the first write,
    reshard proves the plan and verifies the blocks that a rank reads for itself. Others are verified on arrival.

    Args:
        state_dict: nested dicts and lists of tensors, sharded in any way, plain values, models, optimizers (together
            with their models), and other objects that have `load_state_dict`.
        path: a folder, file, URL, `Storage`, or `Checkpoint`. Ranks that hold shards of one tensor pass the same one.
        strict: True or "strict": missing and unexpected keys are errors. "subset": unexpected keys are allowed. False
            or "partial": both are allowed. {glob: mode}: by key; the first match decides, and other keys are strict.
            A tensor never matches a plain value, except that a 0-d tensor matches a number.
        dtype_policy: "error": a different dtype is an error, except between a number and a 0-d tensor: see `cast`.
            "cast": values are converted, but no float to an integer: see `overflowed`. "saved": tensors in dicts are
            replaced by tensors of the saved dtype; model parameters keep theirs, and values are cast.
        mapping: {your key: key in the checkpoint}, or a `reshard.mapping.Mapping` from the checkpoint's names to yours.
        dry_run: only report what a load would do, including missing, unexpected, and mismatched keys.
        check: True or "before": compare with checksums before writing. "during": compare each block after writing it.
            This is faster, but damage leaves targets undefined. The error names them. False: do not compare.
        read_once: True or "job": one rank reads each byte for the job. Not with dtype_policy "saved". None or "host":
            ranks on one host share reads if this saves I/O: see docs/reading.md. False or "rank": no sharing.
        process_group: the ranks that load together. A key is unexpected if no rank's target has it.
        alone: only this process loads, even in a running job. It fills its own shards of sharded tensors.
        threads: maximum number of copy threads. Default: this process's share of the host's cores, at most 8.
        memory_budget_bytes: limit for buffers, at least 128 KiB. Default: 32 MiB per thread.
        progress: show progress bars on the first rank if stderr is a terminal. Each phase logs a line at INFO.
        timeout: limit for the call, in seconds or as a `timedelta`.

    Raises (nothing was written, unless the error says so; other ranks raise the same error or `RankFailedError`):
        KeyMismatchError: keys are missing, unexpected, or mismatched on any rank, or `mapping` matches no key.
        LayoutError: a target cannot be filled in place, or ranks pass different options. Only mapping, check, threads,
            memory_budget_bytes, and progress may differ.
        OptionError: an option has an invalid value. For errors while opening the checkpoint, see `reshard.open`."""
    group = Group(process_group, alone=alone, deadline_s=timeout)
    with phase("load", path=path), group.together("load"):
        options = LoadOptions(
            strict, dtype_policy, mapping, dry_run, check, read_once, threads, memory_budget_bytes, progress
        )
        return load_with(group, state_dict, path, options)


@gc_paused()
def load_with(
    group: Group,
    state_dict: dict[str, Any],
    path: CheckpointSource,
    options: LoadOptions,
    prefetch: Callable[[ReadPlan], None] | None = None,
) -> LoadReport:
    """Load among the ranks of `group`, within one of its phases, which is recorded as that of the
    caller.

    Args:
        prefetch: collective; called when everything is planned and proved, to fetch what will be
        read.
    """
    if check_arguments("load", state_dict, path, Checkpoint):
        from reshard.api.stateful_objects import LiveObjects

        live = LiveObjects(state_dict, to_fill=True, strict=options.strict)
        if group.world_size == 1:
            live.refuse_sharded()
        report = load_with(group, live.state, path, options, prefetch)
        return report if options.dry_run else set_objects(live, report)
    group.same_options("load", options.shared())
    with phase("open"):
        if isinstance(path, Checkpoint):
            checkpoint = path
        else:
            checkpoint = open_among(path, group.rank, group.world_size, check=bool(options.check))
            if group.rank == 0:
                log_skipped(checkpoint)
        before = replace(checkpoint.contents.checking)
        names = {} if options.mapping is None else options.mapping
        if not isinstance(names, Mapping):
            checkpoint, names = _mapped(checkpoint, names), {}
    try:
        kinds, tensors = checkpoint.contents.containers, (*checkpoint, *checkpoint.aliases)
        saved, keep = saved_in(checkpoint), not options.dry_run
        with materialize(state_dict, saved, containers=kinds, names=names, tensors=tensors, keep=keep):
            with phase("match"):
                paths = map(checkpoint.contents.path_of, tensors)
                targets = Targets.of(
                    state_dict, saved=checkpoint.objects, tensors=paths, entry_by_entry=options.entry_by_entry
                )
                allowed = DROPS * options.entry_by_entry  # torch.distributed.checkpoint converts these, too
                match = match_keys(
                    targets, checkpoint, dtype_policy=options.dtype_policy, mapping=names, allowed=allowed
                )
            report = _Load(group, options, match, before, prefetch).run()
        if not options.dry_run and (report.dropped or report.changed_classes or report.overflowed):
            odd = [*report._first_of_each("dropped", "changed_classes"), *report._overflows]
            _log.warning("%s was loaded, but the report is not ok: %s", report.path, "; ".join(odd))
        return report
    except CorruptCheckpointError as error:
        refuse_replaced("load", checkpoint)
        native = checkpoint.contents.details(NativeFacts)
        if native is not None:
            native.naming_tensors(error)
        raise


def set_objects(live: LiveObjects, report: LoadReport) -> LoadReport:
    """Set models, optimizers, and other objects to what was loaded. Return the report with their findings."""
    live.put_back(report.aliases)
    missing, unexpected = report.missing + live.missing, report.unexpected + live.unexpected
    if live.uninitialized:
        _log.warning("still on the meta device, without values: %s", format_names(live.uninitialized))
    return replace(report, missing=missing, unexpected=unexpected, uninitialized=live.uninitialized)


def _mapped(checkpoint: Checkpoint, mapping: StateMapping) -> Checkpoint:
    """Apply a mapping that is more than renames."""
    mapping.check_taken(checkpoint)
    mapped = mapping.apply(checkpoint)
    mapped.run = checkpoint.run
    return mapped


def saved_in(checkpoint: Checkpoint) -> Iterator[Saved]:
    """Yield what a checkpoint has: tensors, other names of tensors, and objects."""
    path_of = checkpoint.contents.path_of
    tensors = all_names(checkpoint)
    stored = {key: tensor.stored for key, tensor in tensors.items()}
    meshes = {key: one.layout.mesh if one.layout is not None else None for key, one in stored.items()}
    on_mesh = {key: mesh is not None and mesh.names != UNSHARDED for key, mesh in meshes.items()}
    is_known = any(on_mesh.values())  # else no rank had DTensors
    for key, one in stored.items():
        first, read = checkpoint.aliases.get(key, ""), partial(tensors[key].__getitem__, ...)
        was = on_mesh[key] if is_known else None
        in_parts = on_mesh[key] and not _is_replicated(one)
        yield Saved(key, path_of(key), one.spec.shape, one.spec.dtype, first, None, read, was, in_parts)
    for key in checkpoint.objects:
        yield Saved(key, path_of(key), None, read=partial(checkpoint.objects.__getitem__, key))


def _is_replicated(stored: StoredTensor) -> bool:
    form = stored.layout.form if stored.layout is not None else None
    return isinstance(form, ProductForm) and all(isinstance(placement, Replicate) for placement in form.placements)


@dataclass(frozen=True)
class _Load:
    """A load whose keys are matched: plans, proves, and then reads."""

    group: Group
    options: LoadOptions
    match: KeyMatch
    before: Checking
    """What was checked before this load."""
    prefetch: Callable[[ReadPlan], None] | None

    def run(self) -> LoadReport:
        """Load. Collective. Nothing is written before all checks that are possible without writing."""
        match, options = self.match, self.options
        targets, checkpoint = match.targets, match.checkpoint
        with phase("plan"):
            mismatches = gather_mismatches(match, self.group)
            truth = mismatches.raise_on_mismatch(match, options, self.group)
            among = options.read_once if self.group.world_size > 1 and not options.dry_run else "rank"
            shared = self._share() if among == "job" else None
            space = Workspace.of(options.memory_budget_bytes, options.threads, mismatches.sharers)
            # two pieces per thread: one is read while the other is copied to a device
            uploads = Uploads(2 * space.threads, space.piece_bytes // 2)
            plan = plan_rank(match, self.group.job_rank, dry_run=options.dry_run, uploads=uploads, shared=shared)
            uploads.begin()
        if self.prefetch:
            self.prefetch(plan)
        checking, budget = checkpoint.contents.checking, options.memory_budget_bytes
        is_checked = bool(options.check) and checking.enabled
        in_place = options.check == "during"
        with Fetch(plan.copies, self.group, space, is_checked, among == "host", budget, in_place) as fetch:
            with uploads:
                per_rank = self._read(fetch, plan)
            if not options.dry_run:
                if shared is not None:
                    with phase("pass on"):
                        fetch.done.received += shared.pass_on(targets.writable, self.group)
                with phase("assign"):
                    targets.assign({**match.objects, **per_rank}, written=match.tensors)
        bytes_unchecked = fetch.done.unchecked + checking.bytes_unchecked - self.before.bytes_unchecked
        unchecked = checking.words(bytes_unchecked, plan.bytes_needed) if is_checked else "unchecked: check=False"
        if self.prefetch:  # which has checked all
            bytes_unchecked, unchecked = 0, ""
        elif unchecked and not options.dry_run:
            _log.info("%s was loaded, %s", checkpoint.url, unchecked)
        return LoadReport(
            path=checkpoint.url,
            format=checkpoint.format,
            loaded=(*match.tensors, *match.objects, *per_rank),
            **truth._asdict(),
            mismatched=tuple(match.mismatched),
            dropped=tuple(match.dropped),
            cast=match.cast,
            overflowed=plan.overflowed(shared and self.group) if match.cast or checkpoint.derivation or shared else {},
            replaced=match.replaced,
            aliases={k: checkpoint.aliases[name] for k, name in match.tensors.items() if name in checkpoint.aliases},
            bytes_needed=plan.bytes_needed,
            bytes_read=fetch.done.read,
            bytes_read_to_check=fetch.done.extra,
            bytes_checked=checking.bytes_compared - self.before.bytes_compared,
            bytes_unchecked=bytes_unchecked,
            unchecked=unchecked,
            bytes_received=fetch.done.received,
            dry_run=options.dry_run,
            not_requested=tuple(name for name in truth.unexpected if options.mode_of(name) == "subset"),
            resized=tuple(targets.resized),
            changed_classes=match.changed_classes,
            skipped=checkpoint.contents.skipped,
            omitted=checkpoint.contents.left_out,
            phases=current.get(),
        )

    def _share(self) -> SharedReading:
        """Collective: agree on who reads elements that several ranks want."""
        targets = self.match.targets
        if set(targets.replaced) - set(targets.resized):
            raise OptionError("read_once does not support dtype_policy='saved': use 'cast', or read_once='rank'")
        from reshard.execute.exchange import SharedReading

        tensors = {key: targets.tensors[key] for key in self.match.tensors if key not in targets.resized}
        return SharedReading.agree(tensors, self.group)

    def _read(self, fetch: Fetch, plan: ReadPlan) -> dict[str, Any]:
        """Check, and only then write into targets. Return this rank's own values."""
        group, match = self.group, self.match
        bar = Progress(show=group.rank == 0, bars=self.options.progress, check=group.check)
        if not self.options.dry_run:
            with bar.phase("check", plan.bytes_needed) as step:
                fetch.check(step.advance)
        per_rank: dict[str, Any] = {}
        if match.per_rank:
            per_rank |= own_values(match.targets.per_rank, match.per_rank, match.checkpoint, group)
        checking = match.checkpoint.contents.checking
        checking.confirm()
        fetch.settle()
        if not self.options.dry_run:
            with bar.phase("read", plan.bytes_needed) as step:
                fetch.read(step.advance)
            checking.confirm()
        return per_rank


# Which bytes of a checkpoint go where in this rank's memory: planned, proved, and only
# then listed.


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ReadPlan:
    """The copies of one rank's load."""

    copies: list[Copy]
    """None in a dry run."""
    bytes_needed: int
    casts: Mapping[str, list[int]] = field(default_factory=dict)
    """Key -> what `overflowing` counts in each piece that is cast."""
    computed: Iterable[tuple[str, Source]] = ()
    """Keys and their sources, if mappings may cast there. Earlier reads count in `casts`, below 0."""

    def overflowed(self, group: Any) -> dict[str, int]:
        """Return how many elements casts put out of range, by key. With a `Group`, whose ranks
        exchanged cast elements, this is collective, and covers all its ranks."""
        lost = Counter({key: sum(counts) for key, counts in self.casts.items()})
        for key, source in self.computed:
            lost[key] += source.overflowed
        own = dict(+lost)
        return own if group is None else group.merge(own, _added, "the exchange of casts", kind=dict[str, int])


def _added(parts: list[dict[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, parts), Counter[str]()))


def plan_rank(match: KeyMatch, rank: int, *, dry_run: bool, uploads: Uploads, shared: SharedReading | None) -> ReadPlan:
    """Plan this rank's reads of the matching tensors, prove the plan, and find the bytes of every
    item.

    Args:
        uploads: copies to devices.
        shared: which rank reads what, if ranks read for one another.

    Raises CorruptCheckpointError if the checkpoint does not hold every wanted element exactly once,
    or lacks some of its bytes; FormatError, LayoutError, or KeyMismatchError for targets that
    cannot be filled.
    """
    targets, checkpoint = match.targets, match.checkpoint
    targets.check_places([*match.objects, *match.per_rank])
    left_out = {*targets.replaced, *targets.tied_in_place}
    numbers = [key for key in match.objects if key in targets.tensors]
    refuse_overlaps(targets.tensors[key] for key in (*match.tensors, *numbers) if key not in left_out)
    once = filled_once(match, rank)
    # ranks without elements of a tensor do not see that it is tied: to share the reading, all must
    # plan the same
    names = once if shared is None else match.tensors
    saved: dict[str, TensorLayout] = {}
    wanted: dict[str, TensorLayout] = {}
    for key in names:
        tensor, target = match.stored[key], targets.tensors[key]
        layout = stored_layout(tensor)
        spec = tensor.spec if tensor.spec.fqn == key else TensorSpec(key, tensor.spec.shape, tensor.spec.dtype)
        saved[key] = layout if layout.spec == spec else TensorLayout.of(spec, layout.form)
        form = (shared.form(key) if shared is not None else None) or target.form
        shape = targets.resized.get(key, target.spec.shape)
        if shape != spec.shape:
            spec = TensorSpec(key, shape, spec.dtype)
        is_alike = spec is saved[key].spec and form is layout.form
        wanted[key] = saved[key] if is_alike else TensorLayout.of(spec, form)
    world = max([rank + 1, *(layout.form.world_size for layout in wanted.values())])
    plan = plan_reads(StateLayout(saved), StateLayout(wanted, world))
    if any(plan.findings()):
        raise CorruptCheckpointError(
            f"{checkpoint.url} lacks elements that the target needs, or has some of them twice: "
            f"{'; '.join(in_groups(plan.findings()))}"
        )
    items = plan.items(rank)
    if dry_run:
        return ReadPlan([], items.nbytes)
    native = checkpoint.contents.details(NativeFacts)
    if native is not None and native.storage.requests > 1:
        writers = {chunk.owner for item in items for chunk, _ in match.stored[item.fqn].meeting(item.box)}
        native.prefetch(owner for owner in writers if isinstance(owner, int))
    casts: dict[str, list[int]] = {key: [] for key in match.cast}
    landings = _landings(items, targets, wanted, shared, uploads, casts)
    copies = find_copies(items, match.stored, lambda item: landings[item.fqn][item.part])
    computed = dict.fromkeys((one.fqn, one.place.source) for one in copies if checkpoint.derivation)
    for key, source in computed:
        casts.setdefault(key, []).append(-source.overflowed)
    return ReadPlan(copies, items.nbytes, casts, computed)


def _landings(
    items: Iterable[ReadItem],
    targets: Targets,
    wanted: Mapping[str, TensorLayout],
    shared: SharedReading | None,
    uploads: Uploads,
    casts: Mapping[str, list[int]],
) -> dict[str, list[Array | Staged]]:
    """Return where the parts of each target go: into its own memory if it can be written directly."""
    # tensors of which this rank holds no element may need a new dtype or memory, too
    changed = {key: None for key in wanted if targets.tensors[key].is_meta or key in targets.replaced}
    found: dict[str, list[Array | Staged]] = {}
    for key in dict.fromkeys((*changed, *(item.fqn for item in items))):
        saved = dtype_from_name(wanted[key].spec.dtype)
        whole = targets.writable(key) if key in changed else targets.tensors[key].local
        read = whole if shared is None or shared.form(key) is None else shared.parts(key, whole)
        found[key] = [
            as_array(local)
            if local.dtype == saved and local.is_cpu and is_resolved(local)
            else Staged(local, saved, uploads if uploads.take_in(local.device) else None, casts.get(key))
            for local in read
        ]
    return found


# Each rank's own value out of those that all ranks saved.


def own_values(
    targets: Mapping[str, PerRank], names: Mapping[str, str], checkpoint: Checkpoint, group: Group
) -> dict[str, PerRank]:
    """Return the new value of each key of `names` on this rank, by the rule of its target. `names`
    has those in the checkpoint.

    Raises KeyMismatchError if a different number of ranks saved, and the target has no rule for
    that, or if the target has no value of the saved class.
    """
    saved = checkpoint.contents.per_rank
    job_size = world_size()
    native = checkpoint.contents.details(NativeFacts)
    saved_size = int(native.manifest.layout["world_size"]) if native is not None else 0
    out = {}
    for key, name in names.items():
        # mostly one is asked for
        values, wrapper = LazyMapping({of: partial(_value, saved[name], of) for of in saved[name]}), targets[key]
        # a rank that loads alone, in a job of the same number of ranks as saved, keeps its own values
        is_same = group.world_size == 1 and job_size in (len(values), saved_size)
        world = job_size if is_same else group.world_size
        value = restore_types(wrapper.choose(key, values, group.job_rank, world, saved_size), wrapper.value)
        if (unknown := unresolved_class(value)) is not None:
            raise KeyMismatchError(f"each rank's own {key!r} was {needs_class(unknown)}")
        out[key] = replace(wrapper, value=value)
    return out


def _value(saved: Mapping[int, Any], rank: int) -> Any:
    found = saved[rank]
    return read_value(found) if isinstance(found, StoredTensor) else copy.deepcopy(found)


# `LoadReport`: the truth about every key of a load.


@renamed(outside="excluded", retyped="changed_classes")
@dataclass(frozen=True, repr=False)
class LoadReport(FilledReport, CheckedReport):
    """What a load did on this rank, or what it would do in a dry run."""

    path: str
    loaded: tuple[str, ...]
    """Keys of the tensors and objects that were filled."""
    excluded: tuple[str, ...]
    """Keys of the target that the checkpoint does not have because the `select` of its save
    excludes them. They keep their values. `ok` allows them."""
    mismatched: tuple[str, ...]
    """Keys whose shapes differ, with both shapes. With dtype_policy "error", also keys whose
    dtypes differ."""
    dropped: tuple[str, ...]
    """Values of the target that were lost: a saved dict or list without tensors replaced the
    target's, and does not have them. An object whose `load_state_dict` receives the saved dict may
    keep its own values, as an optimizer keeps fields of its param groups."""
    replaced: Mapping[str, tuple[str, str]]
    """key -> (saved dtype, dtype of the target) of targets that dtype_policy "saved" replaced."""
    aliases: Mapping[str, str]
    """Keys that were filled from the tensor of another key because the two were tied when saved."""
    bytes_needed: int
    """Stored size of the elements that this rank needs or, with `read_once`, of those that it reads."""
    bytes_read: int
    """Bytes of elements that this rank read from data files, for itself or for other ranks on its
    host."""
    bytes_read_to_check: int
    """Additional bytes that were read only to compare complete blocks with their checksums. The
    block with a file's header, which is read when the file is opened, is not counted."""
    bytes_checked: int
    """Bytes that this rank compared with saved checksums, including headers. A rank that reads a
    byte for others also checks it."""
    dry_run: bool
    not_requested: tuple[str, ...] = ()
    """With strict="subset", the keys in `unexpected`. `ok` allows them."""
    resized: tuple[str, ...] = ()
    """Extra state of modules whose shape or dtype differed from the saved one. The saved one
    replaced it."""
    changed_classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """key -> (saved class, class in the target) of values whose classes differ, such as a plain
    dict for an OrderedDict, a dict of inner tensors for a quantized tensor, or a text for a
    number. Numbers of different classes and None are not listed."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Folder names of newer steps of the run, and why each of them was not loaded."""
    omitted: tuple[str, ...] = ()
    """Keys that are stored at `path` but are not in the `Checkpoint` that you passed, such as an
    epoch that has no canonical name."""
    bytes_received: int = 0
    """Bytes of elements that other ranks read for this one: ranks on its host or, with `read_once`, in
    the job."""
    uninitialized: tuple[str, ...] = ()
    """Keys of models that are still on the meta device, without values, such as non-persistent
    buffers. `ok` allows them."""

    @property
    def ok(self) -> bool:
        """True if both sides have the same keys, shapes, and types, and if `dropped` and
        `overflowed` are empty. Unexpected keys make it False, unless strict="subset" allows
        them. Keys that the `select` of the save excludes are allowed. They were not loaded, and
        `excluded` lists them: to require all keys, also check that it is empty. A saved plain value
        replaces the target's even if the classes differ. Then `changed_classes` lists it, and `ok` is
        False. Numbers other than bools count as one class, and None fits every class."""
        extra = set(self.unexpected).difference(self.not_requested)
        return not (self.missing or extra or self.mismatched or self.dropped or self.changed_classes or self.overflowed)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raise KeyMismatchError, with the first names, unless `ok`."""
        if not self.ok:
            raise KeyMismatchError(repr(self))

    def __repr__(self) -> str:
        """One line: what was loaded and read, and the first names of all that did not go as it should."""
        did = "would load" if self.dry_run else "loaded"
        verdict = ", ".join(filter(None, ("ok" if self.ok else "not ok", "" if self.dry_run else self.unchecked)))
        head = f"{verdict}, {did} {format_count(len(self.loaded), 'key')} of {self.path!r} ({self.format})"
        extra = [name for name in self.unexpected if name not in self.not_requested]
        odd = self._first_of_each("missing")
        odd += [f"unexpected {format_names(extra)}"] if extra else []
        odd += self._first_of_each("not_requested", "excluded", "uninitialized", "mismatched", "dropped", "cast")
        odd += [*self._overflows, *self._first_of_each("replaced", "resized", "skipped", "omitted")]
        if self.changed_classes:
            names = [f"{key}: saved {saved}, not {other}" for key, (saved, other) in self.changed_classes.items()]
            odd.append(f"changed_classes {format_names(names)}")
        read = f"{format_bytes(self.bytes_read)} read for {format_bytes(self.bytes_needed)} needed"
        read += (
            f", {format_bytes(self.bytes_read_to_check)} more read for checksums" if self.bytes_read_to_check else ""
        )
        return f"LoadReport({', '.join([head, *odd, read])})"
