"""Trials of calls by simulated processes.

python -m tests.interleaved N SEED [CALL ...]     N of them, at random
python -m tests.interleaved every [CALL ...]      of two ranks, every order with one place at which another one goes
                                                  on first, and every fault at every operation
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.interleaved.trials import FAULTS, VERBS, Outcome, every_fault, every_switch, scratch, trial

_COLLECT = 50


def tried(root: Path, verb: str, count: int, seed: str) -> tuple[dict[str, list[Outcome]], float]:
    """Trials of a call with each fault in turn, by fault, and the processor time that they took."""
    found: dict[str, list[Outcome]] = {fault: [] for fault in FAULTS}
    begun = time.process_time()
    for i in range(count):
        fault = FAULTS[i % len(FAULTS)]
        found[fault].append(trial(f"{seed}.{i}", verb, fault, root=root))
        if i % _COLLECT == 0:
            gc.collect()
    return found, time.process_time() - begun


def row(verb: str, fault: str, outcomes: list[Outcome]) -> str:
    """Of the table in tests/faults.md."""
    struck = [one for one in outcomes if one.is_struck or fault == "none"]
    ends = Counter(one.tried for one in struck)
    seen = ", ".join(f"{words} {count}" for words, count in ends.most_common())
    waited = max((one.waited_s for one in struck), default=0.0)
    bad = sum(bool(one.violations) for one in outcomes)
    return f"| `{verb}` | {fault} | {len(struck)} of {len(outcomes)} | {seen} | {waited:.0f} s | {bad} |"


def every(root: Path, verb: str) -> int:
    """All that there are of a call; the number of violations."""
    bad, begun = 0, time.process_time()
    for what, outcomes in (("orders", every_switch(verb, 2, root=root)), ("faults", every_fault(verb, 2, root=root))):
        ends: Counter[str] = Counter()
        digests, waited = set(), 0.0
        for i, one in enumerate(outcomes):
            if i % _COLLECT == 0:
                gc.collect()
            digests.add(one.digest)
            ends[one.tried] += 1
            waited = max(waited, one.waited_s)
            if one.violations:
                bad += 1
                print(f"  {verb}, {what} {i}, {one.fault}: {one.violations[0][:1000]}", flush=True)
        seen = ", ".join(f"{words} {count}" for words, count in ends.most_common())
        print(
            f"| `{verb}` | {what} | {sum(ends.values())}, {len(digests)} different | {seen} | {waited:.0f} s |",
            flush=True,
        )
    print(f"{verb}: {time.process_time() - begun:.0f} s of processor time")
    return bad


def main() -> int:
    """0 if nothing was seen that may not be."""
    logging.getLogger("reshard").setLevel(logging.CRITICAL)
    if sys.argv[1] == "every":
        with scratch() as root:
            return bool(sum(every(root, verb) for verb in sys.argv[2:] or VERBS))
    trials, seed = int(sys.argv[1]), sys.argv[2]
    verbs = sys.argv[3:] or list(VERBS)
    bad, spent = 0, 0.0
    with scratch() as root:
        for verb in verbs:
            found, took = tried(root, verb, -(-trials // len(verbs)), seed)
            spent += took
            for fault, outcomes in found.items():
                print(row(verb, fault, outcomes), flush=True)
                wrong = [(i, text) for i, one in enumerate(outcomes) for text in one.violations[:1]]
                bad += len(wrong)
                for i, text in wrong[:2]:
                    number = i * len(FAULTS) + FAULTS.index(fault)
                    print(f"  seed {seed}.{number}: {text[:1000]}", flush=True)
    print(f"seed {seed}: {bad} violations; {trials / spent * 60:.0f} trials a minute of processor time")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
