"""Folders of runs against a dictionary: whatever is saved, converted, pruned, damaged, killed, copied, or moved, all
verbs agree on what is there, and no wrong element is read in silence."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reshard
from property_tests.budget import examples
from reshard.cli.app import run as command
from reshard.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FormatError, StorageError
from reshard.native import commit
from tests.faulty import Crash, SystemCalls
from tests.same import same

Values = dict[str, torch.Tensor]

NAMES = ("step-1", "step-2", "step-3", "2", "checkpoint-10", "best")
STEPS = {f"step-{n}": n for n in range(1, 8)} | {"2": 2, "checkpoint-10": 10, "epoch=0-step=4.ckpt": 4}
RUNS = ("a", "b")


def state_of(seed: int) -> Values:
    """What is saved: most of it stays the same from one save to the next, so that incremental saves reuse it."""
    one = torch.randint(-99, 99, (3, 5), generator=torch.manual_seed(seed))
    return {"frozen": torch.arange(9000.0), "w": one.float(), "deep.b": one.to(torch.bfloat16), "n": torch.tensor(seed)}


@dataclass(frozen=True)
class Saved:
    """What the dictionary knows of a checkpoint."""

    seed: int
    format: str
    began: float
    opens: bool = True
    """False: damaged such that it cannot be opened."""
    sound: bool = True
    """False: some bits were changed. Reads give what was saved, or raise."""


class RunFolders(RuleBasedStateMachine):
    """`there` is the whole model: run -> name -> what was saved. And of a manager, the steps that a run does not
    continue from: `aside`."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.there: dict[str, dict[str, Saved]] = {run: {} for run in RUNS}
        self.aside: dict[str, set[int]] = {run: set() for run in RUNS}
        self.skipped: dict[str, set[int]] = {run: set() for run in RUNS}
        """Those of `aside` that could not be read when the run went on."""
        self.seed, self.now = 0, 1.7e9
        clock = SimpleNamespace(time=lambda: self.now, monotonic=time.monotonic)
        self.clock = mock.patch.multiple(commit, time=clock, _begun=[0.0])
        self.clock.start()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.clock.stop()
            shutil.rmtree(self.folder)

    # What is done.

    @rule(seconds=st.sampled_from([-5000, 0, 1, 100]), is_new=st.booleans())
    def time_passes(self, seconds: int, is_new: bool) -> None:
        """Also backwards, and in another process, which does not know how late it was in the one before."""
        self.now += seconds
        if is_new:
            commit._begun[0] = 0.0

    @rule(run=st.sampled_from(RUNS), name=st.sampled_from(NAMES), kind=st.sampled_from(["native", "native", "dcp"]),
          base=st.booleans(), background=st.booleans(), overwrite=st.booleans(), cut=st.none() | st.integers(1, 60),
          fails=st.booleans())  # fmt: skip
    def save(self, run: str, name: str, kind: str, base: bool, background: bool, overwrite: bool, cut: int | None,
             fails: bool) -> None:  # fmt: skip
        self.seed += 1
        state, path, old = state_of(self.seed), self.folder / run / name, self.there[run].get(name)
        if kind == "dcp":
            if old is None:
                reshard.dcp.save({**state}, checkpoint_id=path)
                self.there[run][name] = Saved(self.seed, "dcp", self.now)
            return
        began = max(self.now, commit._begun[0] + 1e-6)
        new = Saved(self.seed, "native", began, sound=not (base and self.has_unsound(run)))

        def act() -> None:
            options: Any = {"overwrite": overwrite, "base": "auto" if base else None}
            if background:
                reshard.async_save(state, path, **options).result()
            else:
                reshard.save(state, path, **options)

        if old is not None and old.format == "safetensors":
            return  # both would be there
        if old is not None and old.format != "native":
            with pytest.raises(StorageError, match="not part of a native checkpoint"):
                act()
        elif old is not None and not overwrite and (path / "manifest.json").exists():
            with pytest.raises(FormatError, match="already contains"):
                act()
        else:
            if not (path / "manifest.json").exists() and old is None:
                self.there[run].pop(name, None)
            self.done(run, name, new, act, None if background else cut, fails)

    @rule(run=st.sampled_from(RUNS), to=st.sampled_from(RUNS), name=st.sampled_from([*NAMES, "epoch=0-step=4.ckpt"]),
          format=st.sampled_from(["native", "dcp", "safetensors"]), cut=st.none() | st.integers(1, 60),
          fails=st.booleans(), data=st.data())  # fmt: skip
    def convert(self, run: str, to: str, name: str, format: str, cut: int | None, fails: bool, data: Any) -> None:
        usable = sorted(name for name, its in self.there[run].items() if its.sound and its.opens)
        if not usable or name in self.there[to]:
            return
        format = "torch_save" if name.endswith(".ckpt") else format
        source = data.draw(st.sampled_from(usable))
        began = max(self.now, commit._begun[0] + 1e-6)
        new = replace(self.there[run][source], format=format, began=began)

        def act() -> None:
            reshard.convert(self.folder / run / source, self.folder / to / name, format=format)

        if format in ("dcp", "safetensors") and any((self.folder / to / name).glob("data-*")):
            with pytest.raises(FormatError, match="No reader could distinguish it"):  # of a save that was killed
                act()
            return
        self.done(to, name, new, act, cut, fails)
        if name not in self.there[to]:
            path = self.folder / to / name
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None

    def has_unsound(self, run: str) -> bool:
        return any(not its.sound or not its.opens for its in self.there[run].values())

    def done(self, run: str, name: str, new: Saved, act: Callable[[], None], cut: int | None, fails: bool) -> None:
        """Of what is cut short, the old or the new is there."""
        if cut is None:
            act()
            self.there[run][name] = new
            return
        calls, raised = SystemCalls(), False
        try:
            with calls.failing(cut) if fails else calls.crashing(cut):
                act()
        except (Crash, OSError, CheckpointError):
            raised = True
        found = self.read(self.folder / run / name)
        old = self.there[run].get(name)
        if same(found, state_of(new.seed)) and not (raised and old is not None and old.seed == new.seed):
            self.there[run][name] = new
            return
        assert raised, "it ended well, and is not there"
        if old is not None and old.opens and old.sound:
            assert same(found, state_of(old.seed)), f"neither the old nor the new: {found}"
        elif old is None:
            assert isinstance(found, str)

    @rule(run=st.sampled_from(RUNS), keep_last=st.integers(1, 3), cut=st.none() | st.integers(1, 12))
    def prune(self, run: str, keep_last: int, cut: int | None) -> None:
        stay = self.kept(run, keep_last)
        its = self.there[run]
        if not (self.folder / run).exists():
            return
        if cut is not None:
            try:
                with SystemCalls().crashing(cut):
                    reshard.prune(self.folder / run, keep_last=keep_last)
            except Crash:
                stay |= {name for name in its if isinstance(self.read(self.folder / run / name), dict)}
            else:
                self.there[run] = {name: one for name, one in its.items() if name in stay}
                return
        else:
            gone = reshard.prune(self.folder / run, keep_last=keep_last)
            assert sorted(gone) == sorted(str(self.folder / run / name) for name in its if name not in stay)
        self.there[run] = {name: one for name, one in its.items() if name in stay}

    def kept(self, run: str, keep_last: int) -> set[str]:
        """What pruning must leave."""
        its = self.there[run]
        ours = [name for name, one in its.items() if one.opens and one.format == "native"]
        ours.sort(key=lambda name: (its[name].began, name))
        is_run = any(name in STEPS for name in its)
        counted = sorted((n for n in ours if n in STEPS), key=lambda n: (STEPS[n], n)) if is_run else ours
        late = [name for name in ours if name in counted][-keep_last:]
        return set(its) - {*counted} | {*counted[-keep_last:], *late}

    @rule(run=st.sampled_from(RUNS), how=st.sampled_from(["flip", "cut", "lose", "manifest"]), data=st.data())
    def damage(self, run: str, how: str, data: Any) -> None:
        its = {name: one for name, one in self.there[run].items() if one.format == "native" and one.opens}
        if not its:
            return
        name = data.draw(st.sampled_from(sorted(its)))
        path = self.folder / run / name
        file = data.draw(st.sampled_from(sorted(path.glob("data-*/*.safetensors"))))
        if how == "flip":
            content = bytearray(file.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            self.each(file, lambda one: replace(one, sound=False))
            with file.open("r+b") as opened:
                opened.write(content)
        elif how == "cut":
            self.each(file, lambda one: replace(one, opens=False))
            os.truncate(file, file.stat().st_size - 1)
        else:
            self.there[run][name] = replace(self.there[run][name], opens=False)
            (path / "manifest.json").write_text("{") if how == "manifest" else file.unlink()

    def each(self, file: Path, change: Callable[[Saved], Saved]) -> None:
        """Change what is known of all checkpoints that have this file, or a link to it."""
        inode = file.stat().st_ino
        for run, its in self.there.items():
            for name in its:
                if any(one.stat().st_ino == inode for one in (self.folder / run / name).rglob("*.safetensors")):
                    its[name] = change(its[name])

    @rule(run=st.sampled_from(RUNS), data=st.data())
    def remove(self, run: str, data: Any) -> None:
        """As `rm -rf` does."""
        if self.there[run]:
            name = data.draw(st.sampled_from(sorted(self.there[run])))
            path = self.folder / run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            del self.there[run][name]

    @rule(how=st.sampled_from(["swap", "copy", "links", "one"]), data=st.data())
    def move(self, how: str, data: Any) -> None:
        """Rename runs, copy one over the other, or move a checkpoint to the other run."""
        a, b = self.folder / "a", self.folder / "b"
        if how == "swap":
            for old, new in ((a, "c"), (b, "a"), (self.folder / "c", "b")):
                if old.exists():
                    old.rename(self.folder / new)
            self.there = {"a": self.there["b"], "b": self.there["a"]}
            self.aside = {"a": self.aside["b"], "b": self.aside["a"]}
            self.skipped = {"a": self.skipped["b"], "b": self.skipped["a"]}
        elif how == "one":
            names = sorted(self.there["a"].keys() - self.there["b"].keys())
            if names and b.exists():
                name = data.draw(st.sampled_from(names))
                (a / name).rename(b / name)
                self.there["b"][name] = self.there["a"].pop(name)
        elif a.exists():
            shutil.rmtree(b, ignore_errors=True)
            shutil.copytree(a, b, copy_function=os.link if how == "links" else shutil.copy2)
            self.there["b"], self.aside["b"] = {**self.there["a"]}, {*self.aside["a"]}
            self.skipped["b"] = {*self.skipped["a"]}

    @rule(run=st.sampled_from(RUNS), last=st.integers(1, 3), background=st.booleans(), back=st.booleans(),
          saves=st.booleans(), data=st.data())  # fmt: skip
    def manage(self, run: str, last: int, background: bool, back: bool, saves: bool, data: Any) -> None:
        """A job that goes on from the newest step, or from an earlier one, and saves the next one."""
        options: Any = {"every": reshard.Every(steps=1), "keep": reshard.Keep(last=last), "background": background}
        its, aside, skipped = self.there[run], self.aside[run], self.skipped[run]
        not_read: set[int] = set()
        own = {STEPS[name]: one for name, one in its.items() if name.startswith("step-") and one.format == "native"}
        counts = {step: one for step, one in own.items() if step not in aside}
        wanted = data.draw(st.sampled_from(sorted(counts))) if back and counts else None
        state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
        with reshard.CheckpointManager(self.folder / run, **options) as manager:
            assert manager.all_steps() == sorted(step for step, one in counts.items() if one.opens)
            report, error = None, None
            try:
                report = manager.restore(state, wanted, discard_newer=wanted is not None)
            except (CheckpointNotFoundError, CorruptCheckpointError) as caught:
                error = caught
            if error is not None:
                others = [name for name, one in its.items() if one.opens and name in STEPS and one.format != "native"]
                others += [name for name, one in its.items() if one.opens and name in ("2", "checkpoint-10")]
                tried = counts if wanted is None else {wanted: counts[wanted]}
                assert not any(one.opens and one.sound for one in tried.values()), error
                assert tried or others or skipped, error
                return
            if report is None:
                assert not counts
                assert same(state, {key: torch.zeros_like(value) for key, value in state_of(0).items()})
            else:
                assert same(state, state_of(counts[report.step].seed))
                newer = [one for step, one in counts.items() if step > report.step]
                assert wanted == report.step or not any(one.opens and one.sound for one in newer)
                assert wanted == report.step or len(report.skipped) >= len(newer)
                passed = {step for step in counts if step > report.step}
                if wanted is None:
                    not_read = passed
                else:
                    aside |= passed
                    skipped -= passed
            step = 1 if report is None else report.step + 1
            if saves and f"step-{step}" in STEPS and its.get(f"step-{step}", Saved(0, "native", 0)).format == "native":
                self.seed += 1
                aside |= not_read
                skipped |= not_read
                for known in (aside, skipped):
                    known -= {step}
                its[f"step-{step}"] = Saved(self.seed, "native", max(self.now, commit._begun[0] + 1e-6))
                manager.save(step, state_of(self.seed))
                manager.wait()
                own[step] = its[f"step-{step}"]
                stay = sorted(step for step, one in own.items() if one.opens and step not in aside)
                kept = {*stay[-last:]}
                kept |= {one for one in skipped & own.keys() if len(stay) <= last or one > stay[-1]}
                for gone in {step for step, one in own.items() if one.opens} - kept:
                    del its[f"step-{gone}"]
                aside &= {step for step, one in own.items() if not one.opens} | kept
                skipped &= aside

    # What must hold.

    def read(self, path: Path) -> Values | str:
        """All elements, or why they cannot be had."""
        try:
            checkpoint = reshard.open(path)
            return {name: checkpoint[name][...] for name in state_of(0)}
        except CheckpointError as error:
            return str(error)

    @invariant()
    def every_checkpoint_is_what_was_saved(self) -> None:
        for run, its in getattr(self, "there", {}).items():
            for name, one in its.items():
                found = self.read(self.folder / run / name)
                if one.opens and one.sound:
                    assert same(found, state_of(one.seed)), f"{run}/{name}: {found}"
                else:
                    assert isinstance(found, str) or same(found, state_of(one.seed)), f"{run}/{name} in silence"
                    assert isinstance(found, str) or one.opens, f"{run}/{name} opened"

    @invariant()
    def all_verbs_agree(self) -> None:
        for run, its in getattr(self, "there", {}).items():
            path = self.folder / run
            rows = sorted((STEPS[name], name, one) for name, one in its.items() if name in STEPS)
            if not rows:  # names without numbers are listed, and not chosen from
                continue
            discarded = self.discarded(run)
            listed = reshard.steps(path) if path.exists() else []
            seen = [(one.step, one.path, one.problem is None) for one in listed if Path(one.path).name in its]
            wanted = [(step, str(path / name), one.opens and name not in discarded) for step, name, one in rows]
            assert seen == wanted, listed
            rows = [row for row in rows if row[1] not in discarded]
            whole = [(name, one) for _, name, one in rows if one.opens]
            if whole:
                opened = reshard.open(path)
                assert opened.url == reshard.latest_complete(path) == str(path / whole[-1][0])
                later = {name for _, name, one in rows[rows.index((STEPS[whole[-1][0]], *whole[-1])) + 1 :]}
                assert all(any(name in warning for warning in opened.warnings) for name in later)
            elif wanted:
                assert reshard.latest_complete(path) is None
                with pytest.raises((CheckpointNotFoundError, CorruptCheckpointError), match=r"can be opened|to open"):
                    reshard.open(path)

    def discarded(self, run: str) -> set[str]:
        """The names of the steps that a manager went back from: they can be opened only by their own paths."""
        return {f"step-{step}" for step in self.aside[run]}

    @rule(run=st.sampled_from(RUNS))
    def look(self, run: str) -> None:
        """By loading, by verification, and from the command line."""
        its = {name: one for name, one in self.there[run].items() if name not in self.discarded(run)}
        rows = sorted((STEPS[name], name) for name, one in its.items() if name in STEPS and one.opens)
        if not rows:
            return
        name = rows[-1][1]
        one, path = its[name], self.folder / run
        target = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
        try:
            report = reshard.load(target, path)
        except CorruptCheckpointError:
            assert not one.sound
            assert same(target, {key: torch.zeros_like(value) for key, value in state_of(0).items()})
        else:
            assert report.ok
            assert same(target, state_of(one.seed))
        verified = reshard.verify(path)
        newer = [its[n] for n in its if n in STEPS and (STEPS[n], n) > (STEPS[name], name)]
        assert verified.ok or not one.sound or not all(step.opens for step in newer)
        code, said = self.say("verify", str(path))
        assert (code == 0) == verified.ok, said
        code, said = self.say("inspect", str(path), "--json")
        assert code == 0 or not all(step.opens for step in newer)
        assert (code == 0) == verified.ok or not one.sound
        assert json.loads(said)["newest"]["path"] == str(path / name)
        for other, two in its.items():
            if one.sound and one.opens and two.sound and two.opens:
                assert reshard.compare(path / name, path / other).ok == (one.seed == two.seed)

    def say(self, *words: str) -> tuple[int, str]:
        out = StringIO()
        with pytest.raises(SystemExit) as end, redirect_stdout(out), redirect_stderr(StringIO()):
            command(list(words))
        return int(end.value.code or 0), out.getvalue()


TestRunFolders = RunFolders.TestCase
TestRunFolders.settings = settings(
    max_examples=examples(40, most=2000), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
