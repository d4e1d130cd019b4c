"""A run that a manager keeps, killed at random moments and gone on with in other topologies, is the run that nobody
killed: by processes that kill themselves, and, started by hand, by torchrun whose processes are killed.

    python -m tests.stories.test_killed_runs 60 SEED       # so many kills, in runs of a few each
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from reshard.api.manager.ledger import published_steps
from tests import gloo
from tests.stories import trained_by_manager
from tests.stories.trained_by_manager import EVERY, KEEP
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

LAYOUTS = ["4x1", "2x2", "3x1", "2x1", "1x2", "1x1", "1x4"]
"""Data parallel (FSDP2) by tensor parallel."""
RELATIVE = 1e-4
"""By how much losses may differ where sums were made in another order, after some hundred steps of Adam."""
HOWS = ["kill one", "kill all", "ask"]
SCRIPT = trained_by_manager.__file__


class Run:
    """The folders of a run, and what must hold of them whenever its processes are gone."""

    def __init__(self, folder: Path) -> None:
        self.root, self.memory = folder / "run", folder / "memory"
        self.told, self.lives = folder / "told", list[list[tuple[int, float]]]()
        self.newest = self.stored = 0

    def arguments(self, layout: str, steps: int) -> tuple[str, str, str, int, str]:
        return str(self.root), str(self.memory), layout, steps, str(self.told)

    def look(self, *, was_asked: bool = False, has_ended: bool = False) -> None:
        """After a life: it went on from the newest save, and storage holds what the policy says: nothing else if it
        saved and ended by itself, and what a kill left beside its last save otherwise."""
        lines = [line.split() for line in self.told.read_text().splitlines()] if self.told.exists() else []
        rows = [(int(line[0]), float.fromhex(line[1])) for line in lines if len(line) == 2]
        self.told.unlink(missing_ok=True)
        steps = [step for step, _ in rows]
        assert steps == list(range(self.newest + 1, self.newest + 1 + len(steps))), "not from the newest save"
        self.lives.append(rows)
        found = published_steps(str(self.root), {}) if self.root.exists() else {}
        whole = [step for step, problem in found.items() if not problem]
        has_saved = max([*whole, 0]) > self.stored
        is_tidy = has_saved and (was_asked or has_ended)
        beyond = sorted(set(whole) - KEEP.kept({step: {} for step in whole}))
        assert len(beyond) <= (0 if is_tidy else 1), f"{whole} are more than {KEEP} wants"
        unfinished = {path.name for path in self.root.glob("step-*")} - {f"step-{step}" for step in whole}
        assert len(unfinished) <= (0 if is_tidy else 2), f"{unfinished} were never whole"
        assert has_saved or not has_ended, f"{whole}: the last life had a save to make"
        self.stored = max([*whole, 0])
        kept = [int(path.parent.name.split("-")[2]) for path in self.memory.glob("*/0*-step-*/manifest.json")]
        if was_asked and steps:
            assert max(whole) == steps[-1], f"asked to end at {steps[-1]}, but storage has {whole}"
        self.newest = max([*whole, *kept, 0])
        assert self.newest >= max([*steps, 0]) - 4, "more was lost than steps behind the newest save"

    def last(self) -> int:
        """Of the life that ends it: beyond what any has made, and saved."""
        return max([step for one in self.lives for step, _ in one], default=0) // EVERY * EVERY + EVERY

    def check(self, straight: list[tuple[int, float]], *, is_same_layout: bool) -> list[float]:
        """All lives together are the run that nobody killed; by which part of itself the loss of each step differs."""
        expected = dict(straight)
        rows = [row for life in self.lives for row in life]
        apart = [abs(loss - expected[step]) / expected[step] for step, loss in rows]
        assert max(apart) <= (0 if is_same_layout else RELATIVE), rows[apart.index(max(apart))]
        assert {step for step, _ in rows} == set(range(1, max(expected) + 1))
        return apart


def world_of(layout: str) -> int:
    dp, tp = layout.split("x")
    return int(dp) * int(tp)


# lives whose processes kill themselves


def life(root: str, memory: str, layout: str, steps: int, told: str, end: tuple[str, int, float]) -> None:
    """Train until the end comes: by what, after how many steps, and how much later, in seconds."""
    how, after, delay_s = end
    is_mine = how in ("kill all", "one by one") or dist.get_rank() == dist.get_world_size() - 1

    def killer() -> None:
        path = Path(told)
        while not path.exists() or len(path.read_text().splitlines()) < after:
            time.sleep(0.001)
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGTERM if how == "ask" else signal.SIGKILL)

    if how and is_mine:
        threading.Thread(target=killer, daemon=True).start()
    trained_by_manager.train(root, memory, layout, steps, told)


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
@pytest.mark.parametrize("is_same_layout", [True, False], ids=["one layout", "other layouts"])
def test_a_killed_run_is_the_run_that_nobody_killed(is_same_layout: bool, tmp_path: Path) -> None:
    rng, run = random.Random(int(is_same_layout)), Run(tmp_path)
    lives = [("2x2", "ask"), ("3x1", "kill all"), ("1x2", "")]
    for layout, how in [("2x1", "kill one"), ("2x1", "")] if is_same_layout else lives:
        steps = 1000 if how else run.last()
        end = (how, rng.randint(3, 12), rng.random() * 0.05)
        ends = gloo.outcomes(life, world_of(layout), *run.arguments(layout, steps), end, store="parent")
        assert how not in ("", "ask") or all(one.error is None and not one.exitcode for one in ends), ends
        run.look(was_asked=how == "ask", has_ended=not how)
    straight = Run(tmp_path / "straight")
    straight.told.parent.mkdir()
    last = run.lives[-1][-1][0]
    gloo.run(life, 2, *straight.arguments("2x1", last), ("", 0, 0.0))
    straight.look(has_ended=True)
    assert len(run.check(straight.lives[0], is_same_layout=is_same_layout)) >= last


# by torchrun, in the night


def workers_of(agent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(agent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def torchrun(run: Run, layout: str, steps: int, rng: random.Random, how: str) -> bool:
    """A life that is killed at a random moment; whether it was, and did not end before."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_of(layout)}", SCRIPT]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with open(run.told.with_name("output"), "w") as output:
        job = subprocess.Popen(
            [sys.executable, *command, *map(str, run.arguments(layout, steps))],
            env=environ, start_new_session=True, stdout=output, stderr=output,
        )  # fmt: skip
        after, delay_s = (0, rng.random() * 8) if rng.random() < 0.15 else (rng.randint(1, 40), rng.random() * 0.1)
        while how and job.poll() is None:
            if run.told.exists() and len(run.told.read_text().splitlines()) >= after:
                break
            if not after and delay_s < 0.01:
                break
            time.sleep(0.002)
            delay_s -= 0 if after else 0.002
        if how and after:
            time.sleep(delay_s)
        was_running, workers = job.poll() is None, workers_of(job.pid)
        if how == "kill all":
            kill([job.pid, *workers])
        elif how == "kill one":
            kill([rng.choice(workers or [job.pid])])
        elif how:
            job.send_signal(signal.SIGTERM)
        try:
            job.wait(60)
        finally:
            kill([job.pid, *workers, *workers_of(job.pid)])
    return was_running


def many(kills: int, seed: int) -> None:
    """Runs of a few kills each, every other one in one layout only."""
    rng, done, counted = random.Random(seed), 0, Counter[str]()
    apart: dict[bool, list[float]] = {True: [], False: []}
    while done < kills:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            run, is_same = Run(Path(folder)), rng.random() < 0.5
            layout = rng.choice(LAYOUTS)
            for _ in range(min(rng.randint(4, 8), kills - done)):
                how = rng.choice(HOWS)
                counted.update({how: torchrun(run, layout, 1000, rng, how), layout: 1})
                run.look(was_asked=how == "ask")
                print(
                    f"{how} in {layout} at {[step for step, _ in run.lives[-1]][-1:]}, newest {run.newest}", flush=True
                )
                layout = layout if is_same else rng.choice(LAYOUTS)
                done += 1
            last = run.last()
            torchrun(run, layout, last, rng, "")
            run.look(has_ended=True)
            straight = Run(Path(folder, "straight"))
            straight.told.parent.mkdir()
            torchrun(straight, layout, last, rng, "")
            straight.look(has_ended=True)
            apart[is_same] += (its := run.check(straight.lives[0], is_same_layout=is_same))
            print(f"{last} steps, {len(its)} made, {'bit-equal' if is_same else f'within {max(its):.1e}'}", flush=True)
    print(f"seed {seed}, {kills} kills: {dict(counted)}; {len(apart[True])} steps in one layout, all bit-equal")
    print(f"{len(apart[False])} steps across layouts, at most {max(apart[False], default=0):.2g} of the loss apart")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))  # and to leave no process behind
    many(int(sys.argv[1]), int(sys.argv[2]))
