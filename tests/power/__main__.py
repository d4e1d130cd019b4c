"""`python -m tests.power N SEED [NAME ...]`: N states of folders after power was lost.

All of moments that have few of them, and equally many at random of each other moment.
"""

from __future__ import annotations

import random
import sys
import time
from bisect import bisect_right
from collections import Counter

from tests.power.scenarios import SCENARIOS
from tests.power.trials import recorded, scratch, tried


def states_a_moment(names: list[str], states: int) -> int:
    """How many to try at most of each moment, so that there are this many in all."""
    counts = []
    for name in names:
        with scratch() as folder:
            counts += [crash.count() for crash in recorded(SCENARIOS[name], folder / "recorded").crashes()]
    return max(1, bisect_right(range(states), states, key=lambda most: sum(min(count, most) for count in counts)) - 1)


def main() -> int:
    """0 if whatever was found is the old or the new."""
    states, seed = int(sys.argv[1]), int(sys.argv[2])
    names = sys.argv[3:] or list(SCENARIOS)
    bad = total = 0
    most = states_a_moment(names, states)
    for name in names:
        rng, begun = random.Random(f"{seed} {name}"), time.monotonic()
        with scratch() as folder:
            disk = recorded(SCENARIOS[name], folder / "recorded")
            seen = tried(SCENARIOS[name], disk, rng, most=most)
        print(
            f"{name}: {len(disk.ops)} operations, {seen.moments} moments ({seen.exhaustive} exhausted), {seen.states} "
            f"states, {seen.different} different, {dict(seen.found)}, {len(seen.violations)} violations, "
            f"{time.monotonic() - begun:.0f} s",
            flush=True,
        )
        kinds = Counter(text.partition("\n")[0].replace(str(folder), "") for text in seen.violations)
        for text in seen.violations[:2]:
            print("\n".join(text.splitlines()[:25]))
        for kind, count in kinds.most_common(8):
            print(f"  {count} x {kind}")
        bad += len(seen.violations)
        total += seen.states
    print(f"seed {seed}: {total} states, at most {most} of a moment, {bad} violations")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
