"""Loses power at all moments of a scenario, and looks at what is found."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.power.disk import Disk
from tests.power.scenarios import Scenario, Violation, started_anew

__all__ = ["Seen", "recorded", "scratch", "tried"]


@dataclass
class Seen:
    """What trials have shown."""

    states: int = 0
    different: int = 0
    exhaustive: int = 0
    """Moments of which all states were tried."""
    moments: int = 0
    found: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for trials."""
    with tempfile.TemporaryDirectory(prefix="power-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


def recorded(scenario: Scenario, folder: Path) -> Disk:
    """The operations of a scenario."""
    folder.mkdir()
    scenario.begin(folder)
    disk = Disk(folder)
    with disk.recording():
        scenario.run(folder)
    shutil.rmtree(folder)
    return disk


def tried(
    scenario: Scenario,
    disk: Disk,
    rng: random.Random,
    *,
    most: int,
    without: frozenset[str] = frozenset(),
    stop_at: int = 1 << 30,
    limit: int = 1 << 30,
) -> Seen:
    """Lose power at each moment, in at most so many ways; `without`: syncs there do nothing."""
    seen, known = Seen(), set[str]()
    end, *others = disk.crashes(without)
    for crash in (end, *rng.sample(others, len(others))):
        done = crash.at == len(disk.ops)
        seen.moments += 1
        seen.exhaustive += crash.count() <= most
        for choices in crash.choices(rng, most):
            seen.states += 1
            key = f"{done} {crash.digest(choices)}"
            if key in known:
                continue
            known.add(key)
            seen.different += 1
            place = disk.root
            crash.write(choices, place)
            try:
                with started_anew(), mock.patch("os.fsync"):
                    seen.found[scenario.check(place, done, rng.random() < 0.3)] += 1
            except Violation as error:
                seen.violations.append(f"{error}\n{crash.told(choices)}")
            except Exception as error:
                seen.violations.append(f"an error that nobody foresaw: {error!r}\n{crash.told(choices)}")
            finally:
                shutil.rmtree(place, ignore_errors=True)
            if len(seen.violations) >= stop_at or seen.different >= limit:
                return seen
    return seen
