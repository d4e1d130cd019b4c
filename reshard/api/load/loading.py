"""`load`: a saved state into a live one, in place, by a proved plan, with the truth about every key."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from reshard.api.arguments import check_arguments, state_and_path
from reshard.api.load.matching import Match, match_keys
from reshard.api.load.mismatches import hear_all
from reshard.api.load.options import DtypePolicy, LoadOptions, Mode, ReadOnce
from reshard.api.load.per_rank import own_values
from reshard.api.load.read_plan import ReadPlan, plan_rank
from reshard.api.load.report import LoadReport
from reshard.api.load.shared_memory import filled_once, refuse_overlaps
from reshard.checkpoint.checkpoint import Checkpoint, open_among
from reshard.control.group import DEADLINE_S, Group
from reshard.control.progress import Progress
from reshard.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, KeyMismatchError
from reshard.execute.load_bytes import Fetch
from reshard.execute.reading import Workspace
from reshard.formats.native.reader import NativeFacts, is_replaced
from reshard.formats.stored.checksums import Checking
from reshard.state.deferred_optimizer import Saved, places
from reshard.state.garbage import uncollected
from reshard.state.memory.uploads import Uploads
from reshard.state.targets import Targets

if TYPE_CHECKING:  # imported by loads that map or share: they are a third of what there is to import
    from reshard.execute.messages.read_once import SharedReading
    from reshard.mapping import Mapping as StateMapping

__all__ = ["load", "load_with", "saved_in"]

_log = logging.getLogger("reshard")


@state_and_path
def load(
    state_dict: dict[str, Any],
    path: Any,
    *,
    strict: bool | Mode | Mapping[str, Mode] = LoadOptions.strict,
    dtype_policy: DtypePolicy = LoadOptions.dtype_policy,
    mapping: Mapping[str, str] | StateMapping | None = LoadOptions.mapping,
    dry_run: bool = LoadOptions.dry_run,
    check: bool = LoadOptions.check,
    read_once: bool | ReadOnce | None = LoadOptions.read_once,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    threads: int | None = LoadOptions.threads,
    memory_budget_bytes: int | None = LoadOptions.memory_budget_bytes,
    progress: bool = LoadOptions.progress,
    deadline_s: float = DEADLINE_S,
) -> LoadReport:
    """Fill `state_dict`, in place, from the checkpoint at `path`, whatever layout and format it was saved in.

        report = reshard.load(state, "run/step-1000")  # as {"model": reshard.get_model_state_dict(model), "step": 0}

    Tensors, DTensors and ShardedTensors are written into; meta tensors are replaced by real ones; everything else is
    replaced in its container. Nothing is written before the plan is proved, every byte range is known to exist, and all
    blocks that a rank reads for itself have the right checksum; what is read for several ranks at once, or from
    an object store, is checked as it comes, and the error says if targets were overwritten by then.

    Args:
        path: a folder, file, URL, `Storage`, or an open `Checkpoint`.
        strict: True, or "strict": missing and unexpected keys are errors. "subset": unexpected ones are not. False, or
            "partial": neither are, they are reported only. A mapping of globs to these three words decides by key, the
            first glob that fits; keys that none fits are strict.
        dtype_policy: "error": a target of another dtype is an error; "cast": elements are converted and reported;
            "saved": the target is replaced by a tensor of the saved dtype.
        mapping: key in `state_dict` -> key in the checkpoint, for those that differ; or a `reshard.mapping.Mapping`
            from the checkpoint's naming and shaping to that of `state_dict`.
        dry_run: only report; the target is not touched.
        check: compare what is read with checksums, where the format has them; `.bytes_unchecked` says how much was not.
        read_once: True, or "job": ranks that want the same elements pass them on to one another through the process
            group, so that no byte is read twice in the whole job; not with dtype_policy "saved". None, or "host": ranks
            of one machine read for one another where that touches less, see docs/reading.md. False, or "rank": none do.
        process_group: with torch.distributed initialized, the ranks that load together: all end alike. A key of the
            checkpoint is unexpected only if none of them wants it.
        alone: this process loads by itself, in a running job too; of sharded tensors it reads its own shards.
        threads: at most so many copy at once; default: this process's share of the machine's processors, up to 8.
        memory_budget_bytes: for what is staged on its way to another dtype or device, or has no view of its bytes; at
            least 128 KiB; default: 32 MiB a thread.
        progress: the first rank shows bars where somebody looks on. Each phase logs one line in any case.
        deadline_s: how long the whole may take.

    Raises (nothing was written then; `RankFailedError` on the other ranks, where they do not raise the same):
        KeyMismatchError: lists all missing, unexpected and mismatched keys of all ranks at once.
        LayoutError: ranks differ in options other than mapping, check, threads, memory, progress; a target is no array.
        DamagedCheckpointError, CheckpointNotFoundError, FormatError: see `reshard.open`.
    """
    group = Group.of(process_group, alone=alone, deadline_s=deadline_s)
    with group.together("load"):
        options = LoadOptions(
            strict, dtype_policy, mapping, dry_run, check, read_once, threads, memory_budget_bytes, progress
        )
        return load_with(group, state_dict, path, options, process_group)


@uncollected()
def load_with(
    group: Group,
    state_dict: dict[str, Any],
    path: Any,
    options: LoadOptions,
    process_group: dist.ProcessGroup | None = None,
    bring: Callable[[ReadPlan], None] | None = None,
) -> LoadReport:
    """`load` among the ranks of `group`, within a phase of theirs.

    Args:
        bring: collective; called when all is planned and proved, to bring what will be read to where it is read.
    """
    check_arguments("load", state_dict, path, Checkpoint)
    group.same_options("load", options.shared())
    if isinstance(path, Checkpoint):
        checkpoint = path
    else:
        checkpoint = open_among(path, group.rank, group.world_size, check=options.check)
    before = replace(checkpoint.contents.checking)
    checkpoint = _mapped(checkpoint, options.mapping)
    names = options.mapping if isinstance(options.mapping, Mapping) else {}
    try:
        kinds = checkpoint.contents.containers
        with places(state_dict, saved_in(checkpoint), containers=kinds, names=names, keep=not options.dry_run):
            started = time.perf_counter()
            targets = Targets.of(state_dict, saved=checkpoint.objects, entry_by_entry=options.entry_by_entry)
            match = match_keys(targets, checkpoint, dtype_policy=options.dtype_policy, mapping=names)
            return _Load(group, process_group, checkpoint, options, targets, match, before, bring).run(started)
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
    mapped = mapping.apply(checkpoint)
    mapped.run = checkpoint.run
    return mapped


def saved_in(checkpoint: Checkpoint) -> Iterator[Saved]:
    """What a checkpoint has, tensor by tensor, further names of tensors, and object by object."""
    paths = checkpoint.contents.paths
    for key in dict.fromkeys((*checkpoint, *checkpoint.aliases)):
        spec = checkpoint[key].stored.spec
        yield Saved(key, paths.get(key, (key,)), spec.shape, spec.dtype, checkpoint.aliases.get(key, ""))
    for key in checkpoint.objects:
        yield Saved(key, paths.get(key, (key,)), None)


@dataclass(frozen=True)
class _Load:
    """A load whose keys are matched: it plans, proves, and only then reads."""

    group: Group
    process_group: dist.ProcessGroup | None
    checkpoint: Checkpoint
    options: LoadOptions
    targets: Targets
    match: Match
    before: Checking
    """What was checked before this load."""
    bring: Callable[[ReadPlan], None] | None = None

    @property
    def rank(self) -> int:
        """Of the default group, by which plans are numbered."""
        return self.group.ranks[self.group.rank]

    @property
    def many(self) -> bool:
        """Whether several ranks read."""
        return self.group.world_size > 1 and not self.options.dry_run

    def run(self, started: float) -> LoadReport:
        """Collective. Nothing is written before all that can be checked before is."""
        targets, match, options = self.targets, self.match, self.options
        mismatches = hear_all(match, self.group, self.checkpoint, targets)
        truth = mismatches.judge(match, options, self.checkpoint, targets, self.group)
        space = Workspace.of(options.memory_budget_bytes, options.threads, mismatches.sharers)
        uploads = space.uploads()
        shared, plan = self._plan(uploads)
        planned = time.perf_counter()
        if self.bring is not None:
            self.bring(plan)
        checking = self.checkpoint.contents.checking
        is_checked = options.check and checking.enabled
        together = self.many and options.once_among == "host"
        with Fetch(plan.copies, self.group, space, is_checked, together, options.memory_budget_bytes) as fetch:
            with uploads:
                per_rank, checked = self._read(fetch, plan)
            if not options.dry_run:
                if shared is not None:
                    fetch.bytes_received += shared.pass_on(targets.writable, self.group, self.process_group)
                targets.put_new()
                targets.tell_autograd(match.tensors)
                targets.assign(match.objects)
                targets.assign(per_rank)
        names = self.checkpoint.aliases
        bytes_unchecked = fetch.bytes_unchecked + checking.bytes_unchecked - self.before.bytes_unchecked
        unchecked = checking.words(bytes_unchecked, plan.bytes_needed) if is_checked else "unchecked: check=False"
        if unchecked and not options.dry_run and self.bring is None:
            _log.info("%s was loaded, %s", self.checkpoint.url, unchecked)
        return LoadReport(
            path=self.checkpoint.url,
            format=self.checkpoint.format,
            loaded=(*match.tensors, *match.objects, *per_rank),
            **truth._asdict(),
            mismatched=match.mismatched,
            dropped=match.dropped,
            cast=match.cast,
            replaced=match.replaced,
            aliases={key: names[name] for key, name in match.tensors.items() if name in names},
            bytes_needed=plan.bytes_needed,
            bytes_read=fetch.bytes_read,
            bytes_read_to_check=fetch.bytes_read_to_check,
            bytes_checked=checking.bytes_compared - self.before.bytes_compared,
            bytes_unchecked=bytes_unchecked,
            unchecked=unchecked,
            bytes_received=fetch.bytes_received,
            dry_run=options.dry_run,
            resized=tuple(targets.resized),
            retyped=match.retyped,
            seconds={"plan": planned - started, "check": checked - planned, "read": time.perf_counter() - checked},
        )

    def _plan(self, uploads: Uploads) -> tuple[SharedReading | None, ReadPlan]:
        """Who reads what for whom, and what this rank reads where."""
        targets, match = self.targets, self.match
        targets.check_places([*match.objects, *match.per_rank])
        refuse_overlaps(
            {key: targets.tensors[key] for key in match.tensors if key not in targets.replaced}, targets.tied_in_place
        )
        shared = self._share() if self.many and self.options.once_among == "job" else None
        once = filled_once(match.tensors, targets.tensors, targets.tied_in_place, self.checkpoint, self.rank)
        # ranks without elements of a tensor do not see that it is tied: to share the reading, all must plan the same
        names = once if shared is None else match.tensors
        dry_run = self.options.dry_run
        plan = plan_rank(
            targets,
            self.checkpoint,
            names,
            self.rank,
            dry_run=dry_run,
            uploads=uploads,
            shared=shared,
        )
        uploads.begin()
        return shared, plan

    def _share(self) -> SharedReading:
        """Collective: ranks that want the same elements agree on who reads them."""
        if set(self.targets.replaced) - set(self.targets.resized):
            raise KeyMismatchError('read_once does not go with dtype_policy="saved": use "cast", or read everything')
        from reshard.execute.messages.read_once import SharedReading

        tensors = {key: self.targets.tensors[key] for key in self.match.tensors if key not in self.targets.resized}
        return SharedReading.agree(tensors, self.group)

    def _read(self, fetch: Fetch, plan: ReadPlan) -> tuple[dict[str, Any], float]:
        """Check, and only then write into targets. Returns each rank's own values, and when the check was over."""
        with Progress(show=self.group.rank == 0, bars=self.options.progress) as bar:
            if not self.options.dry_run:
                with bar.phase("check", plan.bytes_needed) as step:
                    fetch.check(_watched(self.group, step.advance))
            checked = time.perf_counter()
            per_rank = own_values(self.targets.per_rank, self.match.per_rank, self.checkpoint, self.group)
            fetch.settle()
            if not self.options.dry_run:
                with bar.phase("read", plan.bytes_needed) as step:
                    fetch.read(_watched(self.group, step.advance))
        return per_rank, checked


def _watched(group: Group, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Counts bytes, and raises as soon as another rank has failed."""

    def on_bytes(nbytes: int) -> None:
        group.check()
        advance(nbytes)

    return on_bytes
