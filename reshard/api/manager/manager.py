"""`CheckpointManager`: manages the checkpoints of a training run. It decides when; `save` and `load` do the work."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, Unpack

import torch.distributed as dist

from planners.notebooks import Tabled
from reshard.api.background_saves import start_in_background
from reshard.api.elastic import Tier
from reshard.api.elastic.tier import check_bytes_per_s
from reshard.api.load import LoadReport, load, set_objects
from reshard.api.manager.ledger import Ledger, RootClaim, step_path
from reshard.api.manager.save_policies import Due, Every, Preemption, Signals, Vote, checked_metrics
from reshard.api.options import DtypePolicy, LoadOptions, Mode, SaveKeywords, SaveOptions
from reshard.api.retention import Keep
from reshard.api.save import PendingSave, SaveReport, async_save, save
from reshard.api.stateful_objects import LiveObjects
from reshard.api.task_shares import absolute
from reshard.arguments import check_options, checked_step, no_attribute, options_of, renamed, with_options
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    OptionError,
    ReshardError,
    format_names,
    format_value,
)
from reshard.mapping import Mapping as StateMapping
from reshard.ranks.group import DEADLINE_S, Group
from reshard.storage.opening import path_text

_log = logging.getLogger("reshard")
_KEEP_ALL, _ON_SIGTERM = Keep(), Preemption()
_OWN = {
    "base": "full_every=k lets all but one of k saves reuse data",
    "overwrite": "each step is saved once, in a folder of its own",
}
"""Options of saves that the manager decides itself, with an explanation."""

_OF_ORBAX = {
    "wait_until_finished": "wait() waits for saves in the background",
    "load": "restore(state) fills a state",
    "should_save": "save() decides by every=, and its report is true if the step is saved",
}
"""Orbax's names for options that have another name here."""


@dataclass(frozen=True, repr=False)
class StepReport(Tabled):
    """What `CheckpointManager.save` did at a step. The same on all ranks. Truthy if the call
    saves the step to storage or memory."""

    step: int
    storage: str
    """Why the step is saved to storage. Empty if it is not."""
    memory: str
    """Why the step is saved to memory. Empty if it is not."""
    preempted_by: str
    """What requested that the job end. Empty if there is no request."""
    is_saved: bool = False
    """True if an earlier call saved the step to storage, so this call did not."""
    unranked: str = ""
    """The metric of `Keep` if the step was saved to storage without it, or with NaN. The step is
    then never the best."""

    def __bool__(self) -> bool:
        return bool(self.storage or self.memory)

    @property
    def preempted(self) -> bool:
        """Whether something requested that the job end. The step is complete in storage, and your
        loop should end now."""
        return bool(self.preempted_by)

    def __repr__(self) -> str:
        """One line."""
        saves = "saved" if self.preempted else "saving"
        did = {f"{saves} to storage": self.storage, "saving to memory": self.memory, "preempted": self.preempted_by}
        did["without a metric"] = self.unranked
        words = ", ".join(f"{what} ({why})" for what, why in did.items() if why)
        return f"StepReport(step {self.step}, {words or ('saved by an earlier call' if self.is_saved else 'not due')})"


@renamed(passed_over="skipped")
@dataclass(frozen=True, repr=False)
class RestoreReport(Tabled):
    """What `CheckpointManager.restore` did. Only `load` differs between ranks."""

    step: int
    path: str
    """Where the state came from: the folder of the memory tier, or the checkpoint in storage."""
    from_memory: bool
    skipped: tuple[str, ...]
    """Newer steps that could not be loaded, and why."""
    load: LoadReport

    def __repr__(self) -> str:
        """One line."""
        where = "memory" if self.from_memory else "storage"
        words = [f"step {self.step} from {where}", repr(self.path)]
        if self.skipped:
            words.append(f"{len(self.skipped)} skipped")
        if not self.load.ok:
            words.append(repr(self.load))
        else:
            words += self.load._first_of_each("excluded")
            words += filter(None, [self.load.unchecked])
        return f"RestoreReport({', '.join(words)})"


class _Known(NamedTuple):
    """What a manager finds in storage when it restores."""

    ledger: Ledger | None
    """The record of the run. None on all ranks but the first."""
    steps: dict[int, str]
    """The steps of the run, in order. For a damaged step, why it cannot be opened; else empty."""
    foreign: dict[str, int]
    """Names and steps of checkpoints that no manager saved."""
    aside: list[int]
    """Steps that could not be read before."""


def _schedule(every: Every | int | None, read_only: bool) -> Every:
    if every is None and not read_only:
        raise TypeError(
            "CheckpointManager() needs every=, such as every=500 or every=reshard.Every(seconds=600). To only read, "
            "pass read_only=True"
        )
    every = 1 if every is None else every
    return Every(steps=every) if isinstance(every, int) else every


class CheckpointManager:
    """Save, delete, and restore the checkpoints of a training run below `root`.

    Saves run in the background when they are due. The newest checkpoint can be restored in any
    topology.

        state = {"model": model, "optim": optimizer, "step": 0}
        with reshard.CheckpointManager("run", every=reshard.Every(steps=500), keep=reshard.Keep(last=3)) as manager:
            manager.restore(state)
            while state["step"] < 10_000:
                train_step(model, optimizer)
                state["step"] += 1
                if manager.save(state["step"], state).preempted:
                    break

    Creating a manager is collective, as are `save`, `restore`, `wait`, and `close`: all ranks make the
    same calls. All use the clock and the metrics of rank 0. A signal that one rank receives counts for
    all. Without torch.distributed, the manager works for this process alone.

    Args:
        root: a local folder or URL that all ranks can access. Each step is a checkpoint in
            `step-<number>`.
        every: when to save a step to storage: an `Every`, or n for every n steps. Required unless
            `read_only`.
        keep: which steps to keep in storage.
        memory: also save steps to the memory of hosts: see docs/elastic.md.
        memory_every: when to save a step to memory, as for `every`. Required with `memory`.
        full_every: every k-th save is a full save. The others reuse unchanged data: see
            docs/incremental.md. 1: all saves are full.
        background: save while the job trains. At most one save to storage and one to memory are in
            progress. If one fails, the next call raises its error.
        bytes_per_s: with `memory`, the average bandwidth with which each rank sends and receives
            copies.
        preemption: what may request a save at the next step.
        sync_every: the ranks synchronize at every k-th step. Between these steps, requests to end and
            `Every(seconds=...)` have no effect. Each synchronization takes about one round trip to
            the store of the process group.
        read_only: only restore and list steps, for example while another manager saves.
        process_group: the ranks that save together. Default: the default group, or this process
            alone.
        timeout: limit for each save and each exchange between ranks: seconds or a `timedelta`.

    All other arguments are options of `reshard.save`, except `base` and `overwrite`. They apply to
    all saves to storage.

    Raises:
        OptionError: an option is invalid.
        CheckpointError: another manager saves in this root.
        StorageError: the root is not writable.
    """

    @renamed(deadline_s="timeout", whole_every="full_every", ask_every="sync_every")
    @with_options(SaveOptions, *_OWN)
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: Every | int | None = None,
        keep: Keep = _KEEP_ALL,
        memory: Tier | None = None,
        memory_every: Every | int | None = None,
        full_every: int = 1,
        background: bool = True,
        bytes_per_s: float = 256 << 20,
        preemption: Preemption = _ON_SIGTERM,
        sync_every: int = 1,
        read_only: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta = DEADLINE_S,
        **options: Unpack[SaveKeywords],
    ) -> None:
        self._process_group, self._timeout = process_group, timeout
        self.keep, self.preemption = keep, preemption
        self._full_every, self._background, self._sync_every = full_every, background, sync_every
        self._memory, self._bytes_per_s, self._options, self._claim = memory, bytes_per_s, options, None
        group = self._group()
        with group.together("CheckpointManager"):
            self.root, self.every = absolute(path_text(root)), _schedule(every, read_only)
            self._memory_every = None if memory_every is None else _schedule(memory_every, True)
            self._check_options(options)
            shared = {
                "root": path_text(root),
                "every": self.every,
                "keep": keep,
                "memory_every": self._memory_every,
                "full_every": full_every,
                "background": background,
                "sync_every": sync_every,
                "bytes_per_s": bytes_per_s,
                "read_only": read_only,
                **options,
            }
            group.same_options("CheckpointManager", shared)
            if group.rank == 0 and not read_only:
                self._claim = RootClaim(self.root)
            self._ledger = Ledger(self.root) if group.rank else Ledger.read(self.root)
            current = group.share(self._ledger.current() if group.rank == 0 else None, kind=list[int])
        self._is_open, self._may_save = True, not read_only
        self._newest = current[-1] if current else -1
        """The highest step of the run. Steps that are saved must be higher."""
        self._here = -1
        """The last step that this manager saved or restored."""
        self._skipped: list[int] = []  # by `restore`, until the next save begins
        self._before: int | None = None
        """The step of the previous call."""
        self._saved_at = self._kept_at = time.monotonic()
        self._is_tidy = self._has_warned = False
        """True if storage has only the steps that the policy keeps, as far as this process knows."""
        self._pending: dict[str, _Pending] = {}
        self._signals = Signals(preemption.signals if self._may_save else ())
        self._asked_for: dict[str, None] = {}
        """Requests that no save has answered yet."""
        self._answered: set[str] = set()

    def _check_options(self, options: SaveKeywords) -> None:
        for name in _OWN.keys() & options.keys():
            raise OptionError(f"CheckpointManager does not take {name}=: {_OWN[name]}")
        options_of("CheckpointManager", SaveOptions, options)
        wanted = {
            "every": (self.every, Every, "a number of steps, or reshard.Every(steps=..., seconds=...)"),
            "keep": (self.keep, Keep, "reshard.Keep(last=...)"),
            "memory": (self._memory, Tier | None, "a reshard.elastic.Tier"),
            "memory_every": (self._memory_every, Every | None, "a number of steps, or reshard.Every(...)"),
            "preemption": (self.preemption, Preemption, "reshard.Preemption(...)"),
        }
        for name, (its, kind, words) in wanted.items():
            if not isinstance(its, kind):
                raise OptionError(f"{name} must be {words}, got {format_value(its)}")
        if (self._memory is None) != (self._memory_every is None):
            raise OptionError("pass memory= and memory_every= together, or neither")
        check_options(full_every=self._full_every, sync_every=self._sync_every)
        check_bytes_per_s(self._bytes_per_s)

    @renamed()
    def save(
        self, step: int, state: Any, metrics: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> StepReport:
        """Collective: save this step if it is due, and report what was done. Call it at every step.

        Args:
            step: the number of the step. It must increase.
            state: a nested dict of models, optimizers, other objects with `state_dict` and
                `load_state_dict`, generators, tensors, and plain values. If a value differs between
                ranks, such as a data loader, wrap it in `reshard.PerRank`.
            metrics: metric values by name, for `Keep(best=...)`. Only those of rank 0 are used. At steps
                without the metric of `Keep`, omit `metrics`. A step whose metric is NaN is never the best.
            force: save to storage even if the step is not due.

        Raises the errors of `reshard.save`, those of an earlier save in the background, and:
            OptionError: the step is not a whole number, or `metrics` lacks the metric of `Keep`.
            CheckpointError: the step is smaller than an earlier one, or the manager is closed.
                Nothing was saved, and earlier steps are unchanged.
        """
        group = self._group()
        with group.together("CheckpointManager.save", meet=False):  # ends with a meeting, or no rank fails alone
            its_metrics, step = checked_metrics(metrics, self.keep.metric), self._checked(step)
            is_saved = step == self._newest
            due = self._due(group, step, force)
        if due.has_ended:
            # only the first rank removes older steps, and may fail
            with group.together("CheckpointManager.save"):
                self._settle()
        unranked = ""
        if due.storage:
            unranked = self._save(step, state, its_metrics)
            self._newest = self._here = step
            self._saved_at = time.monotonic()
        if due.memory:
            self._keep(step, state)
            self._kept_at = time.monotonic()
        if due.preempted:
            self.wait()
            self._answered.update(self._asked_for)
            self._asked_for.clear()
            if self._claim is not None:
                _log.warning("step %d was saved in %s, as requested by %s", step, self.root, due.preempted)
        self._before = step  # a failed save may be tried again
        return StepReport(step, *due[:3], is_saved, unranked)

    def _checked(self, step: int) -> int:
        if not self._is_open:
            raise CheckpointError(f"the manager of {self.root} is closed: create a new one")
        if not self._may_save:
            raise CheckpointError(
                f"the manager of {self.root} cannot save: it was created with read_only=True. Create one without it"
            )
        number = checked_step(step, "save(step, state)")
        if self._before is not None and number < self._before:
            raise CheckpointError(
                f"step {number} is not after the last step, {self._before}: nothing was saved. To "
                "continue from an earlier step, call restore(state, step=..., discard_newer=True)"
            )
        if number < self._newest or (number == self._newest != self._here):
            raise CheckpointError(
                f"step {number} cannot be saved, because {self.root} already has step {self._newest}. Call "
                "restore() to continue from it, or restore(state, step=..., discard_newer=True) to continue from "
                "an earlier step, or choose another root"
            )
        return number

    def _due(self, group: Group, step: int, force: bool) -> Due:
        """Decide what all ranks do at this step."""
        before = step - 1 if self._before is None else self._before
        every = (self.every, self._memory_every)
        if not (force or any(it and it.is_multiple(step, before) for it in every)) and step % self._sync_every:
            return Due()
        now = time.monotonic()
        mine = Vote(
            steps=((step, group.job_rank),) * 2,
            asked=self._asked(),
            has_ended=all(pending.done() for pending in self._pending.values()),
            force=force,
            waited_s=(now - self._saved_at, now - self._kept_at),
        )
        said = group.merge(mine, Vote.join, "the decision to save")
        (low, one), (high, other) = said.steps
        if low != high:
            words = f"{low} on rank {one} and {high} on rank {other}: nothing was saved"
            group.refuse(CheckpointError(f"ranks call save with different steps, {words}"))
        storage = ", ".join(said.asked) or ("forced" if said.force else "")
        storage = storage or self.every.reason(step, before, said.waited_s[0])
        memory = self._memory_every.reason(step, before, said.waited_s[1]) if self._memory_every else ""
        return Due(storage if step != self._newest else "", memory, ", ".join(said.asked), said.has_ended)

    def _asked(self) -> list[str]:
        """Return the requests that were not answered yet."""
        asked = self.preemption.requests()
        self._answered &= set(asked)
        self._asked_for |= dict.fromkeys([*self._signals.take(), *(one for one in asked if one not in self._answered)])
        return [*self._asked_for]

    def _save(self, step: int, state: Any, metrics: dict[str, float]) -> str:
        """Collective: save to storage. Returns the metric that the first rank lacks, or ""."""
        group = self._group()
        with group.together("CheckpointManager.save"):
            self._settle("storage")
            based, unranked = None, "" if self.keep.metric in metrics else self.keep.metric
            if self._claim is not None:
                self._claim.check()
                self._ledger.set_aside(self._skipped, is_skipped=True)
                self._skipped = []
                if not self._is_tidy:  # a job killed before it removed older steps has left them
                    self._tidy(but=self._ledger.aside())
                based = self._is_based()
                self._ledger.put(step, metrics, is_based=based)
                if unranked and not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "%s: step %d is saved without the metric %r, or with NaN, so it is not one of the best steps",
                        self.root, step, unranked,
                    )  # fmt: skip
            based, unranked = group.share((based, unranked), kind=tuple[bool | None, str])
            taken = LiveObjects(state).state
        path = step_path(self.root, step)
        base = "auto" if based else "" if self._full_every > 1 else None  # "": none, but digests for the next save
        options: Any = {**self._options, "overwrite": False, "base": base}
        options |= {"process_group": self._process_group, "timeout": self._timeout}
        if not self._background:
            save(taken, path, **options)
            with group.together("CheckpointManager.save"):
                self._tidy()
            return unranked
        pending = async_save(taken, path, **options)
        self._pending["storage"] = (
            pending
            if self._claim is None
            else start_in_background(partial(self._follow, pending), f"reshard-step-{step}")
        )
        return unranked

    def _is_based(self) -> bool:
        """On the first rank: return True if the next save reuses data of an earlier one."""
        if self._full_every == 1:
            return False
        return self._ledger.saves_since_whole() + 1 < self._full_every and bool(self._ledger.current())

    def _follow(self, pending: PendingSave[SaveReport]) -> None:
        """On the first rank: wait for the save, then remove older steps."""
        pending.result()
        self._tidy()

    def _tidy(self, but: Collection[int] = ()) -> None:
        """On the first rank: remove steps that the policy does not keep. An error here does not
        affect saved steps."""
        if self._claim is None:
            return
        try:
            self._ledger.tidy({*self.keep.kept(self._ledger.metrics()), *but})
            self._is_tidy = True
        except ReshardError as error:
            _log.warning("older steps in %s could not be deleted: %s", self.root, error)

    def _keep(self, step: int, state: Any) -> None:
        """Collective: save to memory."""
        assert self._memory is not None
        with self._group().together("CheckpointManager.save"):
            self._settle("memory")
            taken = LiveObjects(state).state
        if self._background:
            self._pending["memory"] = self._memory.async_save(taken, step, bytes_per_s=self._bytes_per_s)
        else:
            self._memory.save(taken, step)

    @renamed()
    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        discard_newer: bool = False,
        strict: bool | Mode | Mapping[str, Mode] = LoadOptions.strict,
        dtype_policy: DtypePolicy = LoadOptions.dtype_policy,
        mapping: Mapping[str, str] | StateMapping | None = LoadOptions.mapping,
    ) -> RestoreReport | None:
        """Collective: load the newest complete step, from memory or storage, into `state`. Ranks and layouts may
        differ from those of the save. Returns None if there is no complete step, as on the first start: `state` is
        unchanged then. With `strict=True`, optimizer state that is not in the checkpoint is removed. `skipped` lists
        steps that are damaged, or that this manager does not read. If the step was saved with `select`, a warning names
        keys that it excludes. Param groups may be split or joined: each gets what was saved for its parameters.

        Args:
            state: has the structure that you pass to `save`, and is filled in place.
            step: load only this step.
            discard_newer: with `step`: the run continues from it. After that, newer steps are used only if you pass
                their number. They are deleted when the next save is complete.
            strict, dtype_policy, mapping: as for `reshard.load`.

        Raises:
            CheckpointNotFoundError: `step` does not exist, or the root has checkpoints, but none of a manager.
            CorruptCheckpointError: all steps are damaged.
            NormalizationError: the optimizer is of another class, or parameters that are now in one group were saved
                with different values, such as learning rates. Only tensors in param groups may have changed.
            The errors of `reshard.load`. If `load_state_dict` of an object fails, the error says what changed."""
        self.wait()
        group = self._group()
        with group.together("CheckpointManager.restore"):
            if not self._is_open:
                raise CheckpointError(f"the manager of {self.root} is closed: create a new one")
            wanted = None if step is None else checked_step(step, "restore(state, step)")
            group.same_options("restore", {"step": step, "discard_newer": discard_newer})
            known = self._known(group)
            taken = self._to_fill(state, known, strict)
        options = {"strict": strict, "dtype_policy": dtype_policy, "mapping": mapping}
        report, found = self._newest_whole(known, wanted, taken.state, options)
        if report is None:
            with group.together("CheckpointManager.restore"):
                if known.ledger is not None:
                    known.ledger.refuse_discarded()
                    _log.info("%s has no step to restore: the state is unchanged", self.root)
            return None
        with group.together("CheckpointManager.restore"):
            report = replace(report, load=set_objects(taken, report.load))
            newer = [one for one in found if one > report.step]
            self._skipped = newer if wanted is None else []
            if discard_newer and self._claim is not None:
                self._ledger.set_aside(newer)
        if discard_newer and self._may_save and not report.from_memory and self._memory is not None:
            self._memory.clear()
        self._newest = max({*found}.difference(newer if discard_newer else self._skipped), default=-1)
        self._before = self._here = report.step
        self._saved_at = self._kept_at = time.monotonic()
        if known.ledger is not None:
            self._say_restored(report.step, report.load.excluded)
        return report

    def _to_fill(self, state: Any, known: _Known, strict: Any) -> LiveObjects:
        """Collective: take the state apart.

        If there is nothing to restore, no object is asked for its state, because that may step
        Adam.
        """
        is_new = not known.steps and (self._memory is None or self._memory._newest_step() < 0)
        if is_new and isinstance(state, Mapping):
            state = {}
        return LiveObjects(state, to_fill=True, strict=strict)

    def _say_restored(self, step: int, excluded: tuple[str, ...]) -> None:
        _log.info("%s: restored step %d", self.root, step)
        if excluded:
            _log.warning(
                "%s: step %d was saved with select=, so the state keeps its values of %s",
                self.root,
                step,
                format_names(excluded),
            )

    def _known(self, group: Group) -> _Known:
        """Collective: return what the first rank finds in storage."""
        ledger = self._read() if group.rank == 0 else None
        found = None if ledger is None else (ledger.published(), ledger.foreign(), ledger.skipped())
        kind = tuple[dict[int, str], dict[str, int], list[int]]
        return _Known(ledger, *group.share(found, kind=kind))

    def _known_since(self, known: _Known, step: int) -> _Known | None:
        """Collective: return what is in storage now, if a step that was listed was replaced or removed."""
        group = self._group()
        with group.together("CheckpointManager.restore"):
            changed = None if known.ledger is None else known.ledger.has_changed(step)
            return self._known(group) if group.share(changed, kind=bool) else None

    def _newest_whole(
        self,
        known: _Known,
        wanted: int | None,
        state: Any,
        options: dict[str, Any],
        tries: int = 10,
    ) -> tuple[RestoreReport | None, dict[int, str]]:
        """Collective: try candidates from the newest to the oldest. Also returns all steps.

        If one that was tried is gone, looks for steps again, at most `tries` times.
        """
        _, steps, foreign, aside = known
        chosen = [*reversed(steps)] if wanted is None else [wanted] if wanted in steps else []
        candidates: list[int | None] = [*chosen, None] if self._memory is not None else [*chosen]
        passed = [
            f"{path} was not saved by a manager" for path, step in foreign.items() if step > max(steps, default=-2)
        ]
        passed += [
            f"step {step}: it could not be read, so the run continued from an earlier step"
            for step in aside
            if step > max(steps, default=-1)
        ]
        for one in candidates:
            problem = "" if one is None else steps[one]
            found = problem or self._attempt(partial(self._load, one, wanted, state, options, tuple(passed)))
            if isinstance(found, RestoreReport):
                return found, steps
            if one is not None and not problem and tries:
                now = self._known_since(known, one)
                if now is not None:
                    return self._newest_whole(now, wanted, state, options, tries - 1)
            passed.append(found if one is None else f"step {one}: {found}")
            if self._group().rank == 0:
                level = logging.WARNING if steps else logging.INFO  # an empty root is the beginning of a run
                _log.log(level, "%s: skipped %s", self.root, passed[-1])
        if wanted is None and not steps and not foreign:
            return None, steps
        what = f"step {wanted} in {self.root} cannot" if wanted is not None else f"no step in {self.root} can"
        if not passed:
            whole = [str(one) for one, problem in steps.items() if not problem]
            raise CheckpointNotFoundError(
                f"{self.root} has no step {wanted}: its complete steps are {', '.join(whole) or 'none'}"
            )
        fix = "" if steps else ". To continue from it, choose another root, and reshard.load it in the first job"
        kind = CorruptCheckpointError if chosen else CheckpointNotFoundError
        raise kind(f"{what} be restored: {'; '.join(passed)}{fix * bool(foreign)}")

    def _load(
        self, one: int | None, wanted: int | None, state: Any, options: dict[str, Any], passed: tuple[str, ...]
    ) -> RestoreReport:
        """Collective: load a step from storage, or what memory has if that is newer. None: what
        memory has."""
        path = "" if one is None else step_path(self.root, one)
        # a `Tier` goes by the clocks, which may have been set back
        if one is not None and (self._memory is None or wanted is not None or one > self._memory._newest_step()):
            ranks: Any = {"process_group": self._process_group, "timeout": self._timeout}
            return RestoreReport(one, path, False, passed, load(state, path, **ranks, **options))
        assert self._memory is not None
        got = self._memory.restore(state, path or None, step=wanted, **options)
        passed += got.skipped
        if one is not None and got.step is None:
            return RestoreReport(one, path, False, passed, got.load)
        return RestoreReport(got.step or 0, str(self._memory.settings.folder), True, passed, got.load)

    def _attempt(self, load: Callable[[], RestoreReport]) -> RestoreReport | str:
        """Collective: return what was loaded, or why it could not be. All other errors are raised."""
        found, problem = None, ""
        error: Exception | None = None
        try:
            found = load()
        except (CheckpointNotFoundError, CheckpointReplacedError, CorruptCheckpointError) as caught:
            error, problem = caught, str(caught)
        except Exception as caught:  # the others wait for this rank's result
            error = caught
        said = self._group().merge(problem, lambda parts: next(filter(None, parts), ""), "the exchange of damage")
        try:
            if error is not None and not said:
                raise error
        finally:
            del error
        return found if found is not None and not said else said

    def all_steps(self) -> list[int]:
        """Return the complete steps in storage. Any rank may call it alone."""
        return self._read().current()

    def latest_step(self) -> int | None:
        """Return the newest complete step in storage, or None. A save in the background counts after `wait`."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Return the complete step with the best metric of `Keep`, or None if no step has it.

        Raises CheckpointError if `keep` has no metric.
        """
        if not self.keep.metric:
            raise CheckpointError("there is no best step: pass a metric, such as keep=Keep(metric='loss', mode='min')")
        return next(iter(self.keep.ranked(self._read().metrics())), None)

    def wait(self) -> None:
        """Collective: wait until saves in the background have ended and deleted older steps, and
        raise their errors."""
        with self._group().together("CheckpointManager.wait"):
            self._settle()

    def _settle(self, *names: str) -> None:
        for name in names or tuple(self._pending):
            if name in self._pending:
                try:
                    self._pending[name].result()
                except Exception:
                    del self._pending[name]
                    if name == "storage":
                        self._newest -= 1  # the step may be saved again
                    raise
                del self._pending[name]  # not before: KeyboardInterrupt may end the wait

    def close(self) -> None:
        """Collective: wait for saves in progress, release the root for other managers, and restore signal handlers."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._settle()
        finally:
            try:
                self._settle()  # the other save, if one has failed
            finally:
                self._signals.release()
                if self._claim is not None:
                    self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"closing the manager of {self.root} failed, too: {second}")

    def __repr__(self) -> str:
        return f"CheckpointManager({self.root!r}, every={self.every}, keep={self.keep})"

    if not TYPE_CHECKING:  # which would take any name for one of these

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _OF_ORBAX)

    def _read(self) -> Ledger:
        return Ledger.read(self.root)

    def _group(self) -> Group:
        return Group(self._process_group, deadline_s=self._timeout)


class _Pending(Protocol):
    """Work in the background."""

    def done(self) -> bool: ...

    def result(self) -> object: ...
