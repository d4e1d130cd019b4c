"""A writer that is paused, and wakes up when others have gone on, publishes nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import reshard
from reshard.errors import ReshardError
from reshard.ranks import liveness
from tests.faulty import SystemCalls
from tests.states import in_files_of, model_and_optimizer_of
from tests.stories.test_crashes import step_of

PUBLISHED, REFUSED, FAILED = 0, 7, 8


class Pausing(SystemCalls):
    """Stops this process at one of its calls that change files; the last one, if there are fewer."""

    @contextmanager
    def pausing(self, at: int) -> Iterator[None]:
        """At the call of this number."""

        def fault(n: int) -> None:
            if n == at:
                os.kill(os.getpid(), signal.SIGSTOP)

        with self._patched(fault):
            yield


def paused(call: Callable[[], object], at: int) -> int:
    """A process that makes the call, and is stopped at its `at`th system call; its number."""
    torch.set_num_threads(1)  # a forked process has no other threads, and must not wait for them
    child = os.fork()
    if child == 0:
        end = FAILED
        try:
            with Pausing().pausing(at):
                call()
            end = PUBLISHED
        except ReshardError:
            end = REFUSED
        finally:
            os._exit(end)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it ended before"
    return child


def woken(child: int) -> int:
    """How it ended."""
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@contextmanager
def elsewhere() -> Iterator[None]:
    """On another machine, when the claims of others are too old to count."""
    with (
        mock.patch.object(liveness, "machine", return_value="another"),
        mock.patch.multiple(liveness, _FOREIGN_AGE_S=0.0, WATCH_S=0.02, BEAT_S=0.02),
    ):
        yield


def save(path: Path, step: int) -> None:
    reshard.save(model_and_optimizer_of(step), path)


def save_in_background(path: Path, step: int) -> None:
    reshard.async_save(model_and_optimizer_of(step), path).result()


def convert(path: Path, step: int) -> None:
    source = path.with_name(f"source-{step}")
    reshard.convert(source, path, overwrite=True)


def counted(verb: Callable[[Path, int], None], folder: Path) -> tuple[int, int]:
    """How many system calls there are, and which one makes it count."""
    save(folder / "c", 1)
    count, named = steps(lambda: verb(folder / "c", 2))
    return count, named["manifest.json"]


def steps(call: Callable[[], object]) -> tuple[int, dict[str, int]]:
    """How many system calls there are, and which one gives each name to a file."""
    calls, named, real = SystemCalls(), dict[str, int](), os.replace

    def replace(*args: str) -> None:
        named[Path(args[1]).name] = calls.made
        real(*args)

    with mock.patch.object(os, "replace", replace), calls.counted():
        call()
    return calls.made, named


@pytest.mark.parametrize(
    ("verb", "taken_over"), [(save, False), (save, True), (save_in_background, True), (convert, True)]
)
def test_who_wakes_up_late_publishes_nothing(verb, taken_over, tmp_path):
    for folder in (tmp_path, tmp_path / "rehearsed"):
        save(folder / "source-2", 2)
    count, counts_at = counted(verb, tmp_path / "rehearsed")
    first = 25 if verb is convert else 1  # it goes by what is there when it has made its claims
    path, rng = tmp_path / "c", random.Random(0)
    before, after = rng.sample(range(first, counts_at), 2), rng.sample(range(counts_at + 1, count + 1), 1)
    for at in (*before, *after):
        save(path, 1)
        child = paused(lambda: verb(path, 2), at)
        try:
            if taken_over:
                with elsewhere():
                    save(path, 3)
            else:
                save(path, 3)
        finally:
            end = woken(child)
        assert step_of(path) == 3, f"call {at} of {count}"
        assert end == REFUSED or at > counts_at, f"call {at} of {count} ended with {end}"
        report = reshard.verify(path)
        assert report.ok, report
        with elsewhere():
            save(path, 4)
        assert len(list(path.glob("data-*"))) == 1


LAST = {
    "native": "manifest.json",
    "dcp": ".metadata",
    "safetensors": "model.safetensors.index.json",
    "torch_checkpointing": "metadata.pkl",
}
"""The file of each format that makes the others count."""


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {name: torch.arange(5.0) + step for name in ("w", "v", "b")}}


def converted(path: Path, step: int, format: str) -> None:
    options = in_files_of(20, format)
    reshard.convert(path.with_name(f"source-{step}"), path, format=format, overwrite=True, **options)


@pytest.mark.parametrize("format", LAST)
def test_a_conversion_that_was_taken_over_and_wakes_up_last_changes_nothing(format, tmp_path):
    """Another process finishes the same conversion, and converts something else to the same place."""
    for folder in (tmp_path, tmp_path / "rehearsed"):
        for step in (2, 3):
            reshard.save(tensors(step), folder / f"source-{step}")
    path = tmp_path / "c"
    count, named = steps(lambda: converted(tmp_path / "rehearsed" / "c", 2, format))
    counts_at = named[LAST[format]]
    for at in (counts_at - 2, counts_at - 1, *random.Random(0).sample(range(named["claim"] + 1, counts_at), 3)):
        child = paused(lambda: converted(path, 2, format), at)
        try:
            with elsewhere():
                converted(path, 2, format)
                converted(path, 3, format)
            before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.suffix != ".tmp"}
        finally:
            end = woken(child)
        assert end == REFUSED, f"call {at} of {count} ended with {end}"
        changed = [file for file, data in before.items() if not file.exists() or file.read_bytes() != data]
        assert not changed, f"call {at} of {count}"
        found = reshard.open(path)
        assert all(torch.equal(found[name][...], torch.arange(5.0) + 3) for name in found)
        shutil.rmtree(path)


@pytest.mark.parametrize("format", LAST)
def test_a_conversion_that_wakes_up_leaves_the_one_that_took_it_over_alone(format, tmp_path):
    for folder in (tmp_path, tmp_path / "rehearsed"):
        reshard.save(tensors(2), folder / "source-2")
    path = tmp_path / "c"
    _, named = steps(lambda: converted(tmp_path / "rehearsed" / "c", 2, format))
    claimed_at, counts_at = named["claim"], named[LAST[format]]
    for at in (claimed_at + 3, counts_at - 1):
        first = paused(lambda: converted(path, 2, format), at)
        try:
            with elsewhere():
                second = paused(lambda: converted(path, 2, format), claimed_at + 12)
        finally:
            assert woken(first) == REFUSED, f"call {at}"
        assert woken(second) == PUBLISHED, f"call {at}"
        found = reshard.open(path)
        assert all(torch.equal(found[name][...], torch.arange(5.0) + 2) for name in found)
        shutil.rmtree(path)


def test_a_manager_whose_root_was_taken_publishes_no_step(tmp_path):
    root = tmp_path / "run"

    def run(first: int, last: int) -> None:
        with reshard.CheckpointManager(root, every=reshard.Every(steps=1), background=False) as manager:
            state = model_and_optimizer_of(0)
            manager.restore(state)
            for step in range(first, last + 1):
                manager.save(step, model_and_optimizer_of(step))

    run(1, 1)
    child = paused(lambda: run(2, 2), 20)
    try:
        assert not (root / "step-2" / "manifest.json").exists()
        with elsewhere():
            run(3, 3)
    finally:
        end = woken(child)
    assert end == REFUSED
    assert Path(reshard.latest_complete(root)).name == "step-3"
    assert not (root / "step-2" / "manifest.json").exists()
