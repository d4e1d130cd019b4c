"""Killed anywhere: the old or the new checkpoint is there, whole and never mixed, and no garbage grows."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import reshard
from reshard.errors import CheckpointNotFoundError, KeyMismatchError, ReshardError
from reshard.native import commit as generations
from tests.faulty import Crash, SystemCalls
from tests.golden import make
from tests.states import model_and_optimizer_of

KILLS = 80


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A save that died before it made its claim is left alone for a minute: here it is taken for dead at once."""
    monkeypatch.setattr(generations, "CLAIMING_S", 0.0)


def step_of(path) -> int:
    """The one save that all of a checkpoint is of."""
    target = model_and_optimizer_of(-1)
    reshard.load(target, path)
    step = target["optim"]["step"]
    for name, tensor in (*target["model"].items(), ("m", target["optim"]["m"])):
        assert (tensor == step).all(), f"{name} is not of save {step}"
    return step


def files(path) -> list[str]:
    """Names without what differs between saves; of folders only the empty ones."""
    found = (file.relative_to(path) for file in Path(path).rglob("*") if file.is_file() or not any(file.iterdir()))
    return sorted("/".join("data" if part.startswith("data-") else part for part in file.parts) for file in found)


def clean(tmp_path) -> list[str]:
    reshard.save(model_and_optimizer_of(0), tmp_path / "clean")
    return files(tmp_path / "clean")


@pytest.mark.parametrize("start", ["nothing", "one process's", "four ranks'"])
@pytest.mark.parametrize("how", ["failing", "crashing"])
def test_every_write_fsync_rename_and_removal_fails_in_turn(start, how, tmp_path):
    calls, path = SystemCalls(), tmp_path / "c"
    tidy = clean(tmp_path)

    def begin() -> None:
        shutil.rmtree(path, ignore_errors=True)
        if start == "one process's":
            reshard.save(model_and_optimizer_of(1), path)
        elif start == "four ranks'":
            shutil.copytree(make.HERE / "v1" / "sharded", path)

    def found() -> object:
        try:
            return step_of(path)
        except CheckpointNotFoundError:
            return "nothing"
        except KeyMismatchError:
            report = reshard.verify(path)
            assert report.ok, report
            return "four ranks'"

    old = 1 if start == "one process's" else start
    begin()
    with calls.counted():
        reshard.save(model_and_optimizer_of(2), path)
    total, ends = calls.made, []
    assert total > 15
    for at in range(1, total + 1):
        begin()
        with getattr(calls, how)(at):
            try:
                reshard.save(model_and_optimizer_of(2), path)
                ended = "saved"
            except Crash:
                ended = "crashed"
            except ReshardError:
                ended = "failed"
        ends.append(found())
        assert ends[-1] in (old, 2), f"call {at} of {total}"
        assert ended != "saved" or ends[-1] == 2
        reshard.save(model_and_optimizer_of(3), path)
        assert step_of(path) == 3
        assert files(path) == tidy, f"call {at} of {total} left something for ever"
    assert set(ends) == {old, 2}


def saves_for_ever(path: Path, first: int, pipe: int) -> None:
    """In a forked process: save after save, saying when each begins and ends."""
    for step in range(first, first + 1000):
        os.write(pipe, struct.pack("<q", step))
        reshard.save(model_and_optimizer_of(step), path)
        os.write(pipe, struct.pack("<q", -step))


def test_killed_at_random_moments(tmp_path):
    path, random_ = tmp_path / "c", random.Random(0)
    tidy = clean(tmp_path)
    begun, ended, torn, survived = 0, 0, 0, set()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no other threads, and must not wait for them
    begin = time.monotonic()
    for _ in range(3):
        clean(tmp_path)
    window_s = 2 * (time.monotonic() - begin)  # some six saves, however busy the machine is
    try:
        for kill in range(KILLS):
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    saves_for_ever(path, begun + 1, into)
                finally:
                    os._exit(1)
            os.close(into)
            time.sleep(random_.uniform(0.0, window_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(out, "rb") as told:
                for (step,) in struct.iter_unpack("<q", told.read()):
                    begun, ended = max(begun, step), max(ended, -step)
            try:
                found = step_of(path)
            except CheckpointNotFoundError:
                found = 0
            assert found in (ended, begun), f"kill {kill}"
            ended = found  # it may have been published, and the process killed before it could say so
            torn += found != begun
            survived.add(found)
            if kill % 20 == 19:
                begun = ended = begun + 1
                reshard.save(model_and_optimizer_of(begun), path)
                assert files(path) == tidy
    finally:
        torch.set_num_threads(threads)
    assert torn > KILLS // 20, "hardly any kill hit a save"
    assert len(survived) > KILLS // 20


PLACES = ("step-1", "step-2", "step-3")


class Folder(RuleBasedStateMachine):
    """A folder of checkpoints under saves, kills, pruning and moves; the model is a dict of arrays each."""

    @initialize()
    def start(self) -> None:
        self.base = Path(os.environ.get("TMPDIR", "/tmp")) / f"reshard-folder-{os.getpid()}-{id(self)}"
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir()
        self.calls = SystemCalls()
        generations.CLAIMING_S, self.grace = 0.0, generations.CLAIMING_S
        self.saved: dict[str, int] = {}
        self.step = 0

    def teardown(self) -> None:
        generations.CLAIMING_S = getattr(self, "grace", generations.CLAIMING_S)
        shutil.rmtree(getattr(self, "base", "/nonexistent"), ignore_errors=True)

    @rule(place=st.sampled_from(PLACES))
    def save(self, place: str) -> None:
        self.step += 1
        reshard.save(model_and_optimizer_of(self.step), self.base / place)
        self.saved.pop(place, None)
        self.saved[place] = self.step  # the newest comes last
        assert len(list((self.base / place).glob("data-*"))) == 1

    @rule(place=st.sampled_from(PLACES), at=st.integers(1, 40))
    def kill(self, place: str, at: int) -> None:
        self.step += 1
        try:
            with self.calls.crashing(at):
                reshard.save(model_and_optimizer_of(self.step), self.base / place)
        except Crash:
            pass
        try:
            found = step_of(self.base / place)
        except CheckpointNotFoundError:
            assert place not in self.saved
            return
        assert found in (self.saved.get(place), self.step)
        if found == self.step:
            self.saved.pop(place, None)
            self.saved[place] = found

    @precondition(lambda self: self.saved)
    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        gone = reshard.prune(self.base, keep_last=keep)
        assert all(any(folder.iterdir()) for folder in self.base.glob("*/data-*"))
        expected = [place for place in sorted(self.saved)[:-keep] if place not in list(self.saved)[-keep:]]
        assert sorted(Path(path).name for path in gone) == sorted(expected)
        for place in expected:
            del self.saved[place]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load_elsewhere(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.saved)))
        shutil.copytree(self.base / place, self.base.with_suffix(".moved"), dirs_exist_ok=False)
        try:
            assert step_of(self.base.with_suffix(".moved")) == self.saved[place]
            column = reshard.open(self.base.with_suffix(".moved"))["model.w"][3:20, 1]
            assert (column == self.saved[place]).all()
        finally:
            shutil.rmtree(self.base.with_suffix(".moved"))

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "saved"):
            return
        for place, step in self.saved.items():
            assert step_of(self.base / place) == step
        newest = reshard.latest_complete(self.base)
        assert (Path(newest).name if newest else None) == max(self.saved, default=None)


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
