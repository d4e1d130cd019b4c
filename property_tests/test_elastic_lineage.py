"""Hosts leave a job, come back with what they had, and lose their memory, in any order; the job goes on without them,
from whatever it finds. What is recovered is the last state that it kept, of those that survive whole."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import reshard
from planners import Mesh, Shard, TensorLayout, TensorSpec
from property_tests.budget import examples
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError
from reshard.native import commit as generations
from tests.simulated_hosts import Job, cut, global_of

HOSTS = "abcd"
ELEMENTS = 24


@dataclass
class Kept:
    """What the model knows of a generation."""

    order: int
    """Of all that were ever kept, in true time."""
    ranks: int
    ancestors: frozenset[int]
    """Steps of the generations of which it is a later state."""


@dataclass
class Model:
    """What was kept in true time, and by which lives of the job."""

    kept: dict[int, Kept] = field(default_factory=dict)
    """By step. Steps are as good as random, so neither they nor numbers of generations tell what is newer."""

    def newest_first(self, steps: set[int]) -> list[int]:
        return sorted(steps, key=lambda step: -self.kept[step].order)

    def left_behind(self, taken: int, there: set[int]) -> set[int]:
        """All of these but the older states of that which is taken."""
        return there - {taken} - self.kept[taken].ancestors


def told(skipped: tuple[str, ...]) -> set[int]:
    """The steps of the generations that a report says were passed over."""
    found = [
        re.match(r"generation \d+ \(step (\d+)\) (on hosts? '|is not complete)", text)
        for text in skipped
        if "has no data of a host" not in text  # said of hosts, not of generations
    ]
    assert all(found), skipped
    return {int(match[1]) for match in found if match}


class Lives(RuleBasedStateMachine):
    """Each rule is one life of the job, or what happens between two."""

    always: tuple[str, ...] = ()
    """Hosts that are part of each life, and lose nothing."""
    skew_s: float = 4.0
    """By how much a clock may be off. Lives are 10 seconds apart."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model = Model()
        self.now = time.time()

    def teardown(self) -> None:
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def there(self, hosts: list[str]) -> tuple[set[int], set[int]]:
        """Steps of the generations that count on some of these hosts, and of those among them that are whole there."""
        counts: set[int] = set()
        files: dict[int, set[str]] = {}
        for host in hosts:
            for path in (self.folder / "run" / host).glob("*-step-*"):
                step = int(path.name.split("-")[2])
                if (path / "manifest.json").exists():
                    counts.add(step)
                data = {found.name for found in path.rglob("*.safetensors")}
                files.setdefault(step, set()).update({name for name in data if list(path.rglob(f"{name}.sums"))})
        return counts, {step for step in counts if len(files.get(step, ())) == self.model.kept[step].ranks}

    @rule(
        hosts=st.lists(st.sampled_from(HOSTS), min_size=1, unique=True),
        begin=st.sampled_from(["newest", "newest", "newest", "chosen", "anew"]),
        keeps=st.integers(0, 2),
        copies=st.integers(0, 1),
        seed=st.integers(0, 1 << 20),
        dies=st.sampled_from([False, False, True]),
    )
    def live(self, hosts: list[str], begin: str, keeps: int, copies: int, seed: int, dies: bool) -> None:
        """The job starts on some hosts, recovers, keeps some generations, and ends, or is killed with all its hosts."""
        hosts = [*hosts, *sorted(set(self.always) - set(hosts))]
        if self.always:  # what they know of a life is what it kept
            keeps, dies = max(keeps, 1), False
        rng, copies = random.Random(seed), min(copies, len(hosts) - 1)
        counts, whole = self.there(hosts)
        step = rng.choice(sorted(whole)) if begin == "chosen" and whole else None
        labels = [rng.randrange(1 << 40) * 100 + len(self.model.kept) + i for i in range(keeps)]
        layout = TensorLayout(TensorSpec("w", (ELEMENTS,), "float64"), Mesh({"dp": len(hosts)}), [Shard(0)])
        loaded: dict[int, Any] = {}

        def recover(rank: int, tier: Any) -> Any:
            state = {"w": cut(torch.zeros(ELEMENTS, dtype=torch.float64), layout, rank), "step": -1}
            try:
                report = tier.restore(state, step=step)
            except CheckpointNotFoundError as error:
                return error
            loaded[rank] = state["w"]
            assert state["step"] == report.step
            return report

        def life(rank: int, tier: Any) -> Any:
            end = recover(rank, tier) if begin != "anew" else None
            base = end.step if end is not None and not isinstance(end, Exception) else None
            before = frozenset() if base is None else self.model.kept[base].ancestors | {base}
            for label in labels:
                self.model.kept.setdefault(label, Kept(len(self.model.kept), len(hosts), before))
                before |= {label}
                tier.save({"w": cut(torch.full((ELEMENTS,), label / 1.0).double(), layout, rank), "step": label}, label)
            return end

        if begin == "newest":
            self.gathered(hosts, counts, whole)
        ends = self.run(hosts, life, copies, rng.randint(1, 60 * len(hosts)) if dies else None, rng)
        if not dies and begin != "anew":
            self.check(ends, loaded, counts, whole, step)
        if not dies and keeps:
            for host in hosts:  # what others had brought back is gone
                assert [path.name.split("-")[2] for path in (self.folder / "run" / host).glob("*-step-*")] == [
                    str(labels[-1])
                ]

    def run(self, hosts: list[str], life: Any, copies: int, crash: int | None, rng: random.Random) -> list[Any]:
        """Ten seconds after the life before, by the clock of the first host."""
        self.now += 10
        now = self.now + rng.uniform(-self.skew_s, self.skew_s)
        clock = SimpleNamespace(time=lambda: now)
        with mock.patch.object(generations, "time", clock), mock.patch.object(generations, "_begun", [0.0]):
            job = Job(self.folder / "run", hosts, copies=copies, victims=frozenset(hosts), crash=crash)
            return job.run(life)

    def check(
        self, ends: list[Any], loaded: dict[int, Any], counts: set[int], whole: set[int], step: int | None
    ) -> None:
        if not whole:
            assert {type(end) for end in ends} == {CheckpointNotFoundError}
            return
        taken = self.model.newest_first(whole)[0] if step is None else step
        assert {end.step for end in ends} == {taken}
        expected = torch.full((ELEMENTS,), taken / 1.0).double()
        assert torch.equal(global_of(loaded, expected), expected)
        for end in ends:
            assert told(end.skipped) == self.model.left_behind(taken, counts)

    def gathered(self, hosts: list[str], counts: set[int], whole: set[int]) -> None:
        """Folders that are gathered give what a recovery gives, but that no older one is taken unasked."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        newest = self.model.newest_first(counts)[:1]
        try:
            report = reshard.elastic.gather([self.folder / "run" / host for host in hosts], out)
        except CheckpointNotFoundError:
            assert not newest
        except CorruptCheckpointError:
            assert not set(newest) & whole
        else:
            assert [report.step] == newest
            assert told(report.skipped) == self.model.left_behind(report.step, counts)

    @rule(host=st.sampled_from(HOSTS))
    def wipe(self, host: str) -> None:
        """Its memory is lost."""
        if host in self.always:
            return
        shutil.rmtree(self.folder / "run" / host, ignore_errors=True)


class LivesWithoutClocks(Lives):
    """Where a host is part of each life, each life knows of all before, and clocks may say what they like."""

    always = ("a",)
    skew_s = 1e6


Lives.TestCase.settings = settings(max_examples=examples(12, most=400), stateful_step_count=12, deadline=None)
LivesWithoutClocks.TestCase.settings = Lives.TestCase.settings
TestLives = Lives.TestCase
TestLivesWithoutClocks = LivesWithoutClocks.TestCase
