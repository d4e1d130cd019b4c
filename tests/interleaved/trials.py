"""Trials: jobs in a folder, what happens to one of them, and what must hold at every moment and in the end.

A trial is four jobs, one after another or beside one another:

    first    saves what is there before, and nothing happens to it
    tried    the call that is tried: one of its processes is killed, paused, or refused by its disk
    beside   in some trials, another call at the same time
    next     the same call again, or a save into the same folder, as soon as each process of those has ended, died, or
             is paused
    last     days later, when all is over, one more: it leaves nothing but itself
"""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import reshard
from planners import Mesh, Replicate, Shard, TensorLayout, TensorSpec
from reshard.checkpoint import Checkpoint
from reshard.elastic import Tier, gather
from reshard.errors import (
    CheckpointNotFoundError,
    DeadlineError,
    FormatError,
    RankFailedError,
    ReshardError,
    UndefinedTargetsError,
)
from reshard.native.manifest import MANIFEST
from reshard.native.reader import NativeFacts
from reshard.ranks import liveness
from reshard.storage.memory import MemoryStorage
from tests.interleaved.simulation import Fault, Hang, Job, Simulation, chooser, simulated
from tests.simulated_hosts import cut
from tests.simulated_ranks import Died

__all__ = ["FAULTS", "VERBS", "Outcome", "every_fault", "every_switch", "run", "scratch", "trial"]

DEADLINE_S = 60.0
SLACK_S = 20.0
DAYS_S = 200_000.0
SELDOM = 10
"""Changes in folders that do not count are looked at once in so many."""

FAULTS = ("none", "kill", "kill all", "pause", "fail", "full")


def full(step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a step, as one process would have it."""
    return {
        "w": torch.arange(24.0).reshape(6, 4) + 1000 * step,
        "frozen": torch.arange(40.0).reshape(8, 5),
        "r": torch.full((5,), float(step)),
        "b": torch.arange(3.0) + step,
    }


def state(step: int, rank: int, size: int, shard: int = 0) -> dict[str, Any]:
    """What a rank holds of it: two tensors in rows (or columns, with `shard` 1), one in each rank, one whole on all."""
    mesh = Mesh({"dp": size})
    cuts = {"w": Shard(shard), "frozen": Shard(shard), "b": Replicate()}
    out: dict[str, Any] = {}
    for name, whole in full(step).items():
        if name in cuts:
            spec = TensorSpec(name, tuple(whole.shape), "float32")
            layout = TensorLayout(spec, mesh, [cuts[name]])
            local = cut(whole, layout, rank)
            out[name] = local if local.numel() else whole.narrow(shard, 0, 0)
            out[name].cut_by = layout
        else:
            out[name] = whole
    return {**out, "step": step}


def check_whole(found: Checkpoint, step: int, name: str) -> None:
    """Raises AssertionError unless it is all of that step, to the last bit."""
    whole = full(step)
    assert found.keys() == whole.keys(), f"{name} has {sorted(found)}"
    for key, tensor in whole.items():
        assert torch.equal(found[key][...], tensor), f"{name} has a mixture: {key} is not of {step}"


class Watch:
    """A checkpoint that an observer opens after each operation that may change it.

    Attributes:
        seen: the steps that it had, one after another; None where there was none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[int | None] = [None]
        self.save_id: str | None = None
        self._known: tuple[Any, ...] = ()
        self._seen_shapes: set[frozenset[str]] = set()

    def look(self, replaces: dict[str, str | None], *, may_go: bool) -> None:
        """Raises AssertionError for what may not be. `replaces`: save id -> that of the save that it may replace."""
        before, before_id, name = self.seen[-1], self.save_id, self.path.name
        shape = self._shape()
        if shape in self._seen_shapes and self.is_same():
            return
        now = self._step()
        self._seen_shapes.add(shape)
        if now == before:
            return
        self._seen_shapes = {shape}
        meant = replaces.get(self.save_id or "", before_id)
        assert meant == before_id or now is None, f"{name}: step {now} took the place of {before}, published meanwhile"
        self.seen.append(now)
        assert now is not None or may_go, f"{name} had step {before}, and now has none"
        assert now is None or now not in self.seen[:-1], f"{name} went back: {self.seen}"

    def is_same(self) -> bool:
        """Whether the files that it was made of when it was last opened are as they were; a look at their lengths and
        times alone."""
        return self._known == self._files([name for name, *_ in self._known])

    def take(self, other: Watch) -> None:
        """Its files are a copy of those of another one, which was opened."""
        self.seen, self.save_id, self._seen_shapes = [*other.seen], other.save_id, set(other._seen_shapes)
        self._known = self._files([name for name, *_ in other._known])

    def _shape(self) -> frozenset[str]:
        """What lies beside one another, without the numbers that no two saves have in common."""
        try:
            return frozenset(_NUMBERS.sub("#", entry.name) for entry in os.scandir(self.path))
        except FileNotFoundError:
            return frozenset()

    def _step(self) -> int | None:
        name = self.path.name
        try:
            found = reshard.open(self.path)
            step = int(found.objects["step"])
            native = found.contents.details(NativeFacts)
            self.save_id = native.manifest.save_id
            known = self._files([MANIFEST, *native.files])
            if known == self._known:
                return step
            check_whole(found, step, name)
            self._known = known
        except (CheckpointNotFoundError, FormatError):
            assert not (self.path / MANIFEST).exists(), f"{name} has a manifest that does not open"
            self.save_id, self._known = None, self._files([MANIFEST])
            return None
        except ReshardError as error:
            raise AssertionError(f"{name} does not open: {error}") from error
        return step

    def _files(self, names: list[str]) -> tuple[Any, ...]:
        return tuple((name, *_stamp(self.path / name)) for name in names)


_templates: dict[Path, Watch] = {}
"""Of what is there before a trial, as it was made once."""
_NUMBERS = re.compile(r"[0-9a-f]{8,}")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        its = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return its.st_ino, its.st_size, its.st_mtime_ns


Body = Callable[[int, int], Any]
"""What rank of how many does, and what it returns."""


@dataclass(frozen=True)
class Verb:
    """A call that is tried.

    Attributes:
        before: the steps that are there, each by the name of its folder.
        tried, beside: bodies, given the folder; `beside` may be None.
        is_alone: whether one process makes the call.
        is_kept: whether it is of a `Tier`. The bodies are then given the number of hosts that may be lost, too.
    """

    tried: Callable[..., Body]
    before: tuple[tuple[str, int], ...] = ()
    beside: Callable[..., Body] | None = None
    into: str = "c"
    """The folder that the next save goes into."""
    is_alone: bool = False
    again: Callable[[int], Callable[..., Body]] | None = None
    """The call again, of a step; default: a save."""
    is_kept: bool = False


def saving(name: str, step: int, **options: Any) -> Callable[[Path], Body]:
    """`save` a step."""
    return lambda folder: (
        lambda rank, size: reshard.save(state(step, rank, size), str(folder / name), timeout=DEADLINE_S, **options)
    )


def saving_in_background(name: str, *steps: int) -> Callable[[Path], Body]:
    """`async_save` steps, one after another."""

    def body(folder: Path) -> Body:
        def run(rank: int, size: int) -> Any:
            pending = None
            for step in steps:
                mine = state(step, rank, size)
                pending = reshard.async_save(mine, str(folder / name), timeout=DEADLINE_S)
                mine["w"].fill_(-1.0)
            assert pending is not None
            return pending.result()

        return run

    return body


def in_turn(*bodies: Callable[[Path], Body]) -> Callable[[Path], Body]:
    """One after another."""

    def body(folder: Path) -> Body:
        calls = [make(folder) for make in bodies]
        return lambda rank, size: [call(rank, size) for call in calls][-1]

    return body


def converting(source: str, target: str) -> Callable[[Path], Body]:
    """`convert`, over what is there."""
    return lambda folder: (
        lambda rank, size: reshard.convert(
            str(folder / source), str(folder / target), overwrite=True, timeout=DEADLINE_S
        )
    )


def converting_anew(step: int) -> Callable[[Path], Body]:
    """`convert` what has just been saved."""
    return in_turn(saving("c", step), converting("c", "out"))


def keeping(*steps: int, restores: bool = True, in_background: bool = False) -> Callable[..., Body]:
    """`Tier.restore`, if something is there, and `Tier.save` of steps in turn; the step that was restored.

    `in_background`: by `Tier.async_save`, each of which waits for the one before.
    """

    def body(folder: Path, copies: int) -> Body:
        def run(rank: int, size: int) -> int | None:
            tier = Tier(folder / "disks", host=liveness.machine(), copies=copies, timeout=DEADLINE_S)
            mine, found = state(0, rank, size), None
            if restores:
                try:
                    tier.restore(mine)
                    found = mine["step"]
                except CheckpointNotFoundError:
                    pass
                else:
                    check_part(mine, rank, size)
            for number, least in enumerate(steps, 1):  # who goes on from a later step keeps later ones
                step = max(least, (found or 0) + number)
                mine = state(step, rank, size)
                if in_background:
                    pending = tier.async_save(mine, step)
                    mine["w"].fill_(-1.0)
                    if number < len(steps):
                        continue
                    pending.result()
                else:
                    tier.save(mine, step)
                reported[folder] = max(reported.get(folder, 0), step)
            return found

        return run

    return body


reported: dict[Path, int] = {}
"""The newest step of which a rank knows that it is kept, by folder."""


def check_part(mine: dict[str, Any], rank: int, size: int, shard: int = 0) -> None:
    """Raises AssertionError unless all that a rank holds is of one step."""
    wanted = state(mine["step"], rank, size, shard)
    for key in full(0):
        assert torch.equal(mine[key], wanted[key]), f"rank {rank} has a mixture: {key} is not of {mine['step']}"


def moving(*steps: int, from_first: bool = False) -> Callable[[Path], Body]:
    """Transfers from rows to columns, one after another by one plan: each is complete, did nothing, or says that its
    targets are undefined. `from_first`: the first rank has all."""

    def body(folder: Path) -> Body:
        def run(rank: int, size: int) -> None:
            source, target = state(0, rank, size), state(0, rank, size, 1)
            if from_first:
                source = full(0) if rank == 0 else {}
            mine = {key: source[key] for key in full(0) if key in source}
            wanted = {key: target[key] for key in full(0)}
            step = 0
            try:
                prepared = reshard.prepare(mine, wanted, timeout=DEADLINE_S)
                for now in steps:
                    new = full(now) if from_first else state(now, rank, size)
                    for key, tensor in mine.items():
                        tensor.copy_(new[key])
                    prepared.run()
                    step = now
                    check_part({**wanted, "step": step}, rank, size, 1)
            except UndefinedTargetsError:
                raise
            except ReshardError:
                check_part({**wanted, "step": step}, rank, size, 1)
                raise

        return run

    return body


def loading(name: str, *allowed: int, read_once: bool = False) -> Callable[[Path], Body]:
    """`load`, and whether it is all of one step."""

    def body(folder: Path) -> Body:
        def run(rank: int, size: int) -> Any:
            mine = state(0, rank, size)
            reshard.load(mine, str(folder / name), read_once=read_once, timeout=DEADLINE_S)
            step = mine["step"]
            assert step in allowed, f"rank {rank} loaded step {step}"
            check_part(mine, rank, size)
            return step

        return run

    return body


def pruning(keep_last: int) -> Callable[[Path], Body]:
    """`prune`."""

    def body(folder: Path) -> Body:
        def run(rank: int, size: int) -> list[str]:
            try:
                return reshard.prune(str(folder), keep_last=keep_last)
            except CheckpointNotFoundError as error:  # which others may remove meanwhile
                raise AssertionError(f"a removal fails because of another: {error}") from error

        return run

    return body


ONE = (("c", 1),)
THREE = (("step-1", 1), ("step-2", 2), ("step-3", 3))

VERBS: dict[str, Verb] = {
    "save": Verb(saving("c", 2)),
    "save over another": Verb(saving("c", 2), ONE),
    "save over, overwrite=False": Verb(saving("c", 2, overwrite=False), ONE),
    "save, base beside": Verb(saving("step-2", 2, base="auto"), (("step-1", 1),), into="step-2"),
    "save, base replaced": Verb(saving("c", 2, base="auto"), ONE),
    "save, two jobs": Verb(saving("c", 2), ONE, saving("c", 3)),
    "async_save": Verb(saving_in_background("c", 2, 3), ONE),
    "load": Verb(loading("c", 1, 100), ONE),
    "load, save beside": Verb(loading("c", 1, 2, 100), ONE, saving("c", 2)),
    "load, read once": Verb(loading("c", 1, 100, read_once=True), ONE),
    "load, read once, save beside": Verb(loading("c", 1, 2, 100, read_once=True), ONE, saving("c", 2)),
    "save, load beside": Verb(saving("c", 2), ONE, loading("c", 1, 2, 100)),
    "prune": Verb(pruning(1), THREE, into="step-4", is_alone=True),
    "prune, save beside": Verb(
        pruning(1), THREE, saving("step-4", 4, base="auto"), into="step-5",
        is_alone=True,
    ),
    "save, prune beside": Verb(
        saving("step-4", 4, base="auto"), THREE, pruning(1), into="step-5"
    ),
    "prune, two": Verb(
        pruning(1), THREE, pruning(2), into="step-4", is_alone=True,
    ),
    "convert": Verb(converting("c", "out"), ONE, into="out", again=converting_anew),
    "convert over another": Verb(
        converting("c", "out"), (("c", 2), ("out", 1)), into="out", again=converting_anew
    ),
    "convert, save beside": Verb(
        converting("c", "out"), ONE, saving("c", 2), into="out", again=converting_anew
    ),
    "keep": Verb(keeping(2, 3), (("disks", 1),), into="disks", again=keeping, is_kept=True),
    "keep, the first": Verb(keeping(2, 3), into="disks", again=keeping, is_kept=True),
    "keep in the background": Verb(
        keeping(2, 3, in_background=True), (("disks", 1),), into="disks", again=keeping, is_kept=True
    ),
    "recover": Verb(keeping(), (("disks", 1),), into="disks", again=keeping, is_kept=True),
    "redistribute": Verb(moving(*range(1, 7))),
    "redistribute from one": Verb(moving(*range(1, 7), from_first=True)),
}  # fmt: skip


@dataclass
class Outcome:
    """What was seen in a trial."""

    verb: str
    fault: Fault | None
    size: int
    violations: list[str] = field(default_factory=list)
    ops: int = 0
    switches: int = 0
    digest: str = ""
    """Of all operations."""
    tried: str = ""
    """How the call ended on those that were left."""
    waited_s: float = 0.0
    """Until the last of them knew, by the simulated clock."""
    tried_ops: int = 0
    """Of the process that something happened to."""
    is_struck: bool = False
    log: list[str] | None = None


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one; no garbage is collected at moments that differ between runs."""
    gc.collect()
    gc.freeze()
    was_on = gc.isenabled()
    gc.disable()
    shared = Path("/dev/shm")
    try:
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            yield Path(folder)
    finally:
        if was_on:
            gc.enable()
        gc.unfreeze()


class _Trial:
    """One run: the folder, the jobs, and what is watched."""

    def __init__(
        self, folder: Path, name: str, size: int, fault: Fault | None, culprit: int, rng: random.Random,
        choose: Callable[[int], int], *, apart: bool, log: bool,
    ) -> None:  # fmt: skip
        self.verb, self.folder, self.size, self.rng = VERBS[name], folder, size, rng
        self.simulation = Simulation(folder, choose, self.look)
        self.simulation.log = [] if log else None
        self.outcome = Outcome(name, fault, size)
        self.culprit, self.fault = culprit, fault
        self.machines = [f"host-{rank if apart else 0}" for rank in range(size)]
        self.looks = 0
        self.ended_s: dict[tuple[str, int], float] = {}
        self.began_s: dict[tuple[str, int], float] = {}
        verb = self.verb
        names = {name for name, _ in verb.before} | {verb.into, "c", "step-4"}
        self.watches = {name: Watch(folder / name) for name in names - {"disks"}}

    def look(self, name: str) -> None:
        """The observer: only of a run, only where a later one is there, may a checkpoint go.

        It opens after each change of what lies beside a manifest or is a part of what counts, and after some others.
        """
        for path in name.split(" "):
            _, _, inner = path.partition("/")
            place, _, inside = inner.partition("/")
            if place in self.watches:
                watch = self.watches[place]
                self.looks += 1
                if inside.startswith("data-") and watch.is_same() and self.looks % SELDOM:
                    continue
                newest = max((other.seen[-1] or 0 for other in self.watches.values() if other is not watch), default=0)
                watch.look(self.simulation.replaces, may_go=is_run(place) and newest > (watch.seen[-1] or 0))

    def _timed(self, job: str, body: Body, size: int) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            self.began_s[job, rank] = self.simulation.now
            try:
                return body(rank, size)
            finally:
                self.ended_s[job, rank] = self.simulation.now

        return run

    def _start(self, name: str, size: int, body: Body, **more: Any) -> Job:
        return self.simulation.start(size, self._timed(name, body, size), name=name, **more)

    def body(self, make: Callable[..., Body]) -> Body:
        """What each rank does."""
        return make(self.folder)

    def again(self, step: int, **options: Any) -> Body:
        """The next call."""
        return self.body(saving(self.verb.into, step, **options) if self.verb.again is None else self.verb.again(step))

    def start_next(self, size: int, **options: Any) -> dict[str, Any]:
        """Of how many ranks on which machines, and what they do."""
        return {"size": size, "body": self.again(100, **options)}

    def run(self) -> Outcome:
        """All of it."""
        verb, simulation, outcome = self.verb, self.simulation, self.outcome
        self._begin()
        with simulated(simulation):
            size = 1 if verb.is_alone else self.size
            faults = {self.culprit % size: self.fault} if self.fault is not None else {}
            machines = self.machines[:size]
            tried = self._start("tried", size, self.body(verb.tried), faults=faults, machines=machines)
            jobs = [tried]
            if verb.beside is not None:
                jobs.append(self._start("beside", self.rng.choice((1, 2)), self.body(verb.beside)))
            after = self.rng.choice((1, 2, 3))
            its = self.start_next(after, base=self.rng.choice((None, "auto")))
            following = self._start("next", **its, after=lambda: all(job.settled for job in jobs))
            try:
                simulation.run()
                self._judge(tried, jobs[1:], following)
                self._last()
            except Hang as error:
                outcome.violations.append(str(error))
        outcome.violations += simulation.violations
        outcome.ops, outcome.switches, outcome.log = simulation.ops, simulation.switches, simulation.log
        outcome.digest = simulation.trace.hexdigest()
        return outcome

    def _begin(self) -> None:
        """What is there before: the same in each trial, so it is made once and copied."""
        template = self.folder.with_name("before " + " ".join(name for name, _ in self.verb.before))
        if not template.exists():
            template.mkdir()
            early = Simulation(template, lambda count: 0)
            with simulated(early):
                for name, step in self.verb.before:
                    body = saving(name, step, base="auto" if is_run(name) else None)(template)
                    early.start(1, lambda rank, body=body: body(rank, 1))
                    early.run()
        shutil.copytree(template, self.folder, dirs_exist_ok=True)
        self.simulation.now = 1000.0
        for name, _ in self.verb.before:
            first = _templates.setdefault(template / name, Watch(template / name))
            first.look({}, may_go=False)
            self.watches[name].take(first)

    def _last(self) -> None:
        """Days later: one more save, and what is left."""
        simulation, name = self.simulation, self.verb.into
        simulation.now += DAYS_S
        last = self._start("last", 1, self.again(101))
        simulation.run()
        for end in last.ends:
            if isinstance(end, BaseException):
                self._wrong(f"the last save failed: {end!r}")
        if is_run(name):
            pruned = self._start("last prune", 1, pruning(1)(self.folder))
            simulation.run()
            if isinstance(pruned.ends[0], BaseException):
                self._wrong(f"the last prune failed: {pruned.ends[0]!r}")
        for place in sorted(self.folder.iterdir()):
            files = sorted(str(p.relative_to(place)) for p in place.rglob("*"))
            folders = [f for f in files if f.startswith("data-") and "/" not in f]
            odd = [f for f in files if f.endswith((".tmp", "claim.json")) or ".~" in f or f.startswith("convert-")]
            if is_run(name) and place.name != name and not files:
                continue  # an empty folder stays where a removal was cut short, and grows no more
            if is_run(name) and place.name != name:
                self._wrong(f"{place.name} is left, with {files}")
            elif len(folders) != 1 or odd:
                self._wrong(f"in {place.name} are left: {files}")

    def _wrong(self, text: str) -> None:
        self.outcome.violations.append(text)

    def _judge(self, tried: Job, beside: list[Job], following: Job) -> None:
        outcome = self.outcome
        victims = {p.rank for p in tried.processes if p.is_dead}
        struck = {
            p.rank for p in tried.processes if p.fault is None or (p.fault.kind == "full" and p.ops >= p.fault.at)
        }
        culprit = tried.processes[self.culprit % len(tried.processes)]
        outcome.tried_ops = culprit.ops
        outcome.is_struck = self.fault is not None and culprit.rank in struck
        left = {rank: end for rank, end in enumerate(tried.ends) if rank not in victims}
        self._judge_ends("tried", left, victims, {culprit.rank} if outcome.is_struck else set())
        outcome.tried = "; ".join(sorted({_kind(end) for end in left.values()})) or "nobody left"
        paused = {culprit.rank} if outcome.is_struck and self.fault and self.fault.kind == "pause" else set()
        waits = [self.ended_s["tried", r] - self.began_s["tried", r] for r in left if r not in paused]
        outcome.waited_s = max(waits, default=0.0)
        if outcome.waited_s > DEADLINE_S + SLACK_S:
            self._wrong(f"a rank knew after {outcome.waited_s:.0f} s only")
        for job in (*beside, following):
            self._judge_ends(job.name, dict(enumerate(job.ends)), set(), set())
        if all(not isinstance(end, BaseException) for end in following.ends):
            self.judge_next(tried, following, may_be_replaced=bool(beside or paused))
        elif not (beside or paused):
            self._wrong(f"the next call failed: {following.ends!r}")

    def judge_next(self, tried: Job, following: Job, *, may_be_replaced: bool) -> None:
        """What is there after the next call, which has succeeded."""
        watch = self.watches[self.verb.into]
        if 100 not in watch.seen or (watch.seen[-1] != 100 and not may_be_replaced):
            self._wrong(f"the next call was done, but {watch.path.name} had {watch.seen}")

    def _judge_ends(self, job: str, left: dict[int, Any], victims: set[int], culprits: set[int]) -> None:
        """Each with success or an error that says who is gone, and all alike."""
        errors = {rank: end for rank, end in left.items() if isinstance(end, BaseException)}
        for rank, error in errors.items():
            if not isinstance(error, ReshardError):
                self._wrong(f"{job}: rank {rank} ended with {error!r}")
            elif victims and isinstance(error, _NAMING) and not self._may_fail(job, error):
                hosts = {f"[{self.machines[gone]}]" for gone in victims}  # as gloo gives the address
                ranks = {words for gone in victims for words in (f"rank {gone} ", f"rank {gone}'", f"ranks {gone}")}
                ranks |= {f"rank {done} (process" for done in left.keys() - errors.keys()}  # which has exited since
                if not any(words in f"{error} " for words in hosts | ranks):
                    self._wrong(f"{job}: rank {rank} does not name {victims}: {error}")
            elif not victims and not culprits and not self._may_fail(job, error):
                self._wrong(f"{job}: rank {rank} failed, though nothing happened: {error!r}")
        if errors and len(errors) < len(left) and not culprits:
            self._wrong(f"{job}: some ranks failed and others did not: {left!r}")

    def _may_fail(self, job: str, error: ReshardError) -> bool:
        """What may come of two calls at once."""
        text = str(error)
        allowed = ["was published in", "already contains a checkpoint"]
        if self.fault is not None and self.fault.kind == "pause":
            allowed += ["is in use by", "is already converting to", "no longer converts to", " has taken "]
        if self.verb.beside is not None or self.fault is not None:
            allowed += ["the ranks differ in what is to be converted", "there is no data-", "cannot look at the files"]
            allowed += ["considered this save dead", "while it was read", "Load again if it was just replaced"]
        return any(words in text for words in allowed)


class _KeptTrial(_Trial):
    """Of what a `Tier` keeps, on as many hosts as there are machines, of which all but one may be lost.

    An observer gathers what the disks of all hosts have.
    """

    @property
    def hosts(self) -> list[str]:
        """The names of the machines."""
        return sorted({*self.machines})

    def body(self, make: Callable[..., Body]) -> Body:
        return make(self.folder, len(self.hosts) - 1)

    def start_next(self, size: int, **options: Any) -> dict[str, Any]:
        return {"size": self.size, "body": self.again(100), "machines": self.machines}

    def look(self, name: str) -> None:
        self.looks += 1
        if any(path.endswith(f"/{MANIFEST}") for path in name.split(" ")) or self.looks % (5 * SELDOM) == 0:
            self.check_kept()

    def check_kept(self) -> int | None:
        """The step of what could be recovered, which is never an older one than was reported."""
        folders = [self.folder / "disks" / host for host in self.hosts]
        try:
            gather([folder for folder in folders if folder.is_dir()], out := MemoryStorage())
            found = reshard.open(out)
            step = int(found.objects["step"])
            check_whole(found, step, "what is kept")
        except CheckpointNotFoundError:
            step = None
        except ReshardError as error:
            raise AssertionError(f"what is kept cannot be gathered: {error}") from error
        known = reported.get(self.folder, 0)
        assert (step or 0) >= known, f"step {known} is kept, and {step} is what could be recovered"
        return step

    def _begin(self) -> None:
        """What is there before, made once for as many ranks and hosts."""
        reported.pop(self.folder, None)
        name = "before " + " ".join(self.machines)
        template = self.folder.with_name(name if self.verb.before else "before nothing")
        if not template.exists():
            template.mkdir()
            early = Simulation(template, lambda count: 0)
            with simulated(early):
                for _, step in self.verb.before:
                    body = keeping(step)(template, len(self.hosts) - 1)
                    early.start(self.size, lambda rank, body=body: body(rank, self.size), machines=self.machines)
                    early.run()
            reported.pop(template, None)
        shutil.copytree(template, self.folder, dirs_exist_ok=True)
        self.simulation.now = 1000.0
        reported[self.folder] = max((step for _, step in self.verb.before), default=0)

    def judge_next(self, tried: Job, following: Job, *, may_be_replaced: bool) -> None:
        if len({*following.ends}) > 1:
            self._wrong(f"ranks recovered different steps: {following.ends}")
        if reported[self.folder] < 100:
            self._wrong("the next call was done, and nobody knows of it")

    def _last(self) -> None:
        self.simulation.now += DAYS_S
        last = self._start("last", self.size, self.again(101), machines=self.machines)
        self.simulation.run()
        if len({*last.ends}) > 1:
            self._wrong(f"ranks recovered different steps: {last.ends}")
        for end in last.ends:
            if isinstance(end, BaseException):
                self._wrong(f"the last call failed: {end!r}")
        for host in self.hosts:
            left = sorted(entry.name for entry in (self.folder / "disks" / host).iterdir())
            if len(left) != 2 or f"-step-{reported[self.folder]}-" not in left[0] or left[1] != "owner.json":
                self._wrong(f"on {host} are left: {left}")


_NAMING = RankFailedError | DeadlineError | UndefinedTargetsError
"""Errors that say who is gone."""


def is_run(name: str) -> bool:
    """Whether the folder is a step of a run."""
    return name.startswith("step-")


def _kind(end: Any) -> str:
    if not isinstance(end, BaseException):
        return "done"
    if isinstance(end, Died):
        return "died"
    return type(end).__name__


def _fault(kind: str, at: int, length: int, error: int) -> Fault | None:
    return {
        "none": None,
        "kill": Fault("kill", at),
        "kill all": Fault("kill", at, with_all=True),
        "pause": Fault("pause", at, length=length),
        "fail": Fault("fail", at, error=error),
        "full": Fault("full", at, error=errno.ENOSPC),
    }[kind]


def trial(seed: str, verb: str, fault: str, *, root: Path, log: bool = False) -> Outcome:
    """One run. The seed says all that is random in it."""
    rng = random.Random(f"{seed} {verb} {fault}")
    size = rng.choice((1, 2, 2, 2, 3))
    culprit, apart = rng.randrange(size), rng.random() < (0.7 if VERBS[verb].is_kept else 0.3)
    at = 1 + rng.randrange(150 if rng.random() < 0.7 else 60)
    made = _fault(fault, at, rng.choice((20, 100, 300, 1 << 40)), rng.choice((errno.EIO, errno.ENOSPC)))
    stays = rng.choice((0.0, 0.5, 0.9))
    return run(verb, size, made, culprit, root=root, rng=rng, choose=chooser(rng, stays), apart=apart, log=log)


def run(
    verb: str,
    size: int,
    fault: Fault | None,
    culprit: int,
    *,
    root: Path,
    rng: random.Random,
    choose: Callable[[int], int],
    apart: bool = False,
    log: bool = False,
) -> Outcome:
    """One run, in which nothing is random but what `rng` and `choose` say."""
    folder = root / "t"
    folder.mkdir()
    kind = _KeptTrial if VERBS[verb].is_kept else _Trial
    try:
        return kind(folder, verb, size, fault, culprit, rng, choose, apart=apart, log=log).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Script:
    """Who goes on goes on, but for some choices, by their number; counts how many could be made."""

    def __init__(self, chosen: dict[int, int]) -> None:
        self.chosen, self.counts = chosen, list[int]()

    def __call__(self, count: int) -> int:
        self.counts.append(count)
        return min(self.chosen.get(len(self.counts) - 1, 0), count - 1)


def every_fault(verb: str, size: int, *, root: Path) -> Iterator[Outcome]:
    """Each kind of fault, at each operation of each rank, where whoever goes on goes on as long as it can."""
    for culprit in range(1 if VERBS[verb].is_alone else size):
        for kind in ("kill", "kill all", "pause", "fail", "full"):
            at, was_struck = 0, True
            while was_struck:
                at += 1
                fault = _fault(kind, at, 1 << 40, errno.EIO if kind == "fail" else errno.ENOSPC)
                outcome = run(verb, size, fault, culprit, root=root, rng=random.Random(0), choose=_Script({}))
                was_struck = outcome.tried_ops >= at
                yield outcome


def every_switch(verb: str, size: int, *, root: Path) -> Iterator[Outcome]:
    """Each order in which one rank gets in at one place before another, and nothing else happens."""
    first = _Script({})
    yield run(verb, size, None, 0, root=root, rng=random.Random(0), choose=first)
    for place, count in enumerate(first.counts):
        for choice in range(1, count):
            yield run(verb, size, None, 0, root=root, rng=random.Random(0), choose=_Script({place: choice}))
