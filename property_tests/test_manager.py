"""A manager against a plain model of its policies: steps, metrics, a clock, restarts, steps that are taken back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import reshard
from property_tests.budget import examples
from reshard import Every, Keep, Preemption
from reshard.api.manager import ledger, manager as deciding
from reshard.errors import CheckpointError

counts = st.integers(1, 4)
keeps = st.one_of(
    st.builds(Keep),
    st.builds(Keep, last=counts, every=st.none() | counts, best=st.just(2), metric=st.just("loss"),
              mode=st.sampled_from(["min", "max"])),
    st.builds(Keep, last=counts, every=st.none() | counts),
)  # fmt: skip
everies = st.one_of(
    st.builds(Every, steps=counts),
    st.builds(Every, seconds=st.just(25)),
    st.builds(Every, steps=st.just(4), seconds=st.just(25)),
)  # fmt: skip


class Managed(RuleBasedStateMachine):
    """`there` is the whole model: step -> metrics of what is in storage."""

    @initialize(every=everies, keep=keeps, full_every=st.integers(1, 3), background=st.booleans())
    def begin(self, every: Every, keep: Keep, full_every: int, background: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.options: dict[str, Any] = {
            "every": every,
            "keep": keep,
            "full_every": full_every,
            "background": background,
        }
        self.there: dict[int, dict[str, float]] = {}
        self.now, self.saved_at, self.step, self.is_asked = 0.0, 0.0, 0, False
        self.clock = mock.patch.object(deciding, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.clock.start()
        self.make()

    def make(self) -> None:
        asks = Preemption(signals=(), poll=lambda: self.is_asked)
        self.manager: Any = reshard.CheckpointManager(self.folder / "run", preemption=asks, **self.options)
        self.restored(max(self.there, default=None), self.manager.restore(state := self.state(-1)), state)

    def state(self, step: int) -> dict[str, Any]:
        return {"w": torch.full((2, 3), float(step)), "frozen": torch.arange(4096.0), "step": step}

    def restored(self, wanted: int | None, report: Any, state: dict[str, Any]) -> None:
        assert (None if report is None else report.step) == wanted
        if wanted is not None:
            assert state["step"] == wanted
            assert (state["w"] == wanted).all()
        self.step, self.saved_at = wanted or 0, self.now
        self.is_fresh = report is None

    @rule(more=st.integers(1, 3), seconds=st.integers(0, 20), loss=st.none() | st.integers(0, 3), force=st.booleans(),
          is_asked=st.booleans())  # fmt: skip
    def save(self, more: int, seconds: int, loss: int | None, force: bool, is_asked: bool) -> None:
        self.now += seconds
        before = self.step if not self.is_fresh else self.step + more - 1
        self.step, self.is_fresh = self.step + more, False
        metrics = {} if loss is None else {"loss": float(loss)}
        force = force and seconds == 20
        self.is_asked = is_asked and seconds == 19
        every: Every = self.options["every"]
        is_due = every.steps is not None and any(n % every.steps == 0 for n in range(before + 1, self.step + 1))
        is_due |= every.seconds is not None and self.now - self.saved_at >= every.seconds
        report = self.manager.save(self.step, self.state(self.step), metrics, force=force)
        assert bool(report) == (is_due or force or self.is_asked)
        assert bool(report.preempted) == self.is_asked
        self.is_asked = False
        self.manager.save(self.step, self.state(self.step))  # it is answered, and saved at most once
        if report:
            self.saved_at = self.now
            self.there = self.kept({**self.there, self.step: metrics})

    def kept(self, steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
        keep: Keep = self.options["keep"]
        if keep.last is None:
            return steps
        stay = set(sorted(steps)[-keep.last :])
        stay |= {step for step in steps if keep.every and step % keep.every == 0}
        sign = 1 if keep.mode == "min" else -1
        known = sorted((sign * its["loss"], -step) for step, its in steps.items() if "loss" in its)
        stay |= {-step for _, step in known[: keep.best]}
        return {step: its for step, its in steps.items() if step in stay}

    @rule(back=st.integers(1, 5), bad=st.sampled_from(["step", "second"]))
    def misuse(self, back: int, bad: str) -> None:
        if bad == "second":
            with pytest.raises(CheckpointError, match="another CheckpointManager"):
                reshard.CheckpointManager(self.folder / "run", **self.options)
        elif not self.is_fresh or self.there:
            with pytest.raises(CheckpointError):
                self.manager.save(self.step - back, self.state(0))

    @rule(is_closed=st.booleans())
    def restart(self, is_closed: bool) -> None:
        self.manager.wait()
        if is_closed:
            self.manager.close()
        self.manager = None  # as good as killed
        self.make()

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(sorted(self.there)))
        state = self.state(-1)
        self.restored(wanted, self.manager.restore(state, wanted, discard_newer=True), state)
        self.there = {step: its for step, its in self.there.items() if step <= wanted}

    @invariant()
    def storage_holds_what_the_policy_says(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.wait()
        assert self.manager.all_steps() == sorted(self.there)
        assert self.manager.latest_step() == max(self.there, default=None)
        keep: Keep = self.options["keep"]
        if keep.metric:
            sign = 1 if keep.mode == "min" else -1
            best = min(((sign * its["loss"], -step) for step, its in self.there.items() if "loss" in its), default=None)
            assert self.manager.best_step() == (None if best is None else -best[1])
        found = ledger.published_steps(str(self.folder / "run"), {})
        extra = {step for step, why in found.items() if not why} - set(self.there)
        assert all(step > max(self.there, default=-1) for step in extra), "set aside, until the next save"

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
            self.clock.stop()
            shutil.rmtree(self.folder)


TestManaged = Managed.TestCase
TestManaged.settings = settings(
    max_examples=examples(5, most=300), stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
