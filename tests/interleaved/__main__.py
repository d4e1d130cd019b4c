"""`python -m tests.interleaved N SEED [CALL ...]`: N trials of calls by simulated processes, at random."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.interleaved.trials import FAULTS, VERBS, Outcome, scratch, trial

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
    """Of the table in docs/faults.md."""
    struck = [one for one in outcomes if one.is_struck or fault == "none"]
    ends = Counter(one.tried for one in struck)
    seen = ", ".join(f"{words} {count}" for words, count in ends.most_common())
    waited = max((one.waited_s for one in struck), default=0.0)
    bad = sum(bool(one.violations) for one in outcomes)
    return f"| `{verb}` | {fault} | {len(struck)} of {len(outcomes)} | {seen} | {waited:.0f} s | {bad} |"


def main() -> int:
    """0 if nothing was seen that may not be."""
    trials, seed = int(sys.argv[1]), sys.argv[2]
    verbs = sys.argv[3:] or list(VERBS)
    logging.getLogger("reshard").setLevel(logging.CRITICAL)
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
