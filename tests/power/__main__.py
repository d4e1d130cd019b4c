"""`python -m tests.power N SEED`: N states of folders after power was lost, most of them at random."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

from tests.power.scenarios import SCENARIOS
from tests.power.trials import recorded, scratch, tried


def main() -> int:
    """0 if whatever was found is the old or the new."""
    states, seed = int(sys.argv[1]), int(sys.argv[2])
    names = sys.argv[3:] or list(SCENARIOS)
    bad = 0
    for name in names:
        rng, begun = random.Random(f"{seed} {name}"), time.monotonic()
        with scratch() as folder:
            disk = recorded(SCENARIOS[name], folder / "recorded")
            moments = sum(1 for _ in disk.crashes())
            seen = tried(SCENARIOS[name], disk, rng, most=max(1, states // len(names) // moments))
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
    print(f"seed {seed}: {bad} violations")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
