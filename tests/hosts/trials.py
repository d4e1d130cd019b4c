"""Two hosts of two ranks under torchrun, of which the second is cut off, muted, frozen or killed during a call."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import reshard
from tests.hosts.network import Hosts, why_not

__all__ = ["FAULTS", "VERBS", "tried"]

FAULTS = ["cut", "mute", "freeze", "kill"]
VERBS = ["save", "async_save", "load"]
DEADLINE_S = 3.0
PER_HOST = 2
_START_S, _END_S = 90.0, 40.0
LEFT: Counter[bool] = Counter()
"""Of hosts that live on without the store: whether their ranks ended, too, within the time below."""
_LEFT_S = 15.0
ROOT = Path(__file__).resolve().parents[2]


def tried(verb: str, fault: str, delay_s: float, folder: Path) -> tuple[str, float]:
    """What the ranks of the first host, which has the store, did: "named" and after how many seconds, or what is wrong.
    The folder is one that both hosts see; the second one is lost after so many seconds."""
    with Hosts(2) as hosts:
        environ = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts.count}"]
        command += [f"--nproc-per-node={PER_HOST}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29400"]
        for host in range(hosts.count):
            more = [f"--local-addr={hosts.address(host)}", f"--node-rank={host}"]
            job = [str(ROOT / "tests/hosts/job.py"), str(folder), verb, str(DEADLINE_S)]
            hosts.start(host, [*command, *more, *job], environ)
        ready = [folder / f"ready-{rank}" for rank in range(hosts.count * PER_HOST)]
        if not _await(ready, _START_S):
            return "the job did not begin", 0.0
        time.sleep(delay_s)
        begun = time.time()
        getattr(hosts, fault)(1)
        ends = [folder / f"end-{rank}" for rank in range(PER_HOST)]
        if not _await(ends, DEADLINE_S + _END_S):
            return f"ranks {[end.name for end in ends if not end.exists()]} did not end", 0.0
        told = [json.loads(end.read_text()) for end in ends]
        if fault in ("cut", "mute"):
            others = [folder / f"end-{rank}" for rank in range(PER_HOST, hosts.count * PER_HOST)]
            LEFT[_await(others, _LEFT_S)] += 1
    lost = range(PER_HOST, hosts.count * PER_HOST)
    for one in told:
        if not re.search(rf"\b({'|'.join(map(str, lost))})\b", one["said"]):
            return f"not named: {one['said']}", 0.0
    if not reshard.verify(folder / "c").ok:
        return "what is there is not whole", 0.0
    return "named", max(one["ended"] for one in told) - begun


def _await(paths: list[Path], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    """`python -m tests.hosts.trials N SEED`."""
    if why := why_not():
        print(f"skipped: {why}")
        return 0
    rng, seen, worst, wrong = random.Random(int(sys.argv[2])), Counter[tuple[str, str, str]](), {}, 0
    for n in range(int(sys.argv[1])):
        verb, fault, delay_s = rng.choice(VERBS), rng.choice(FAULTS), rng.random() * 0.5
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            said, took_s = tried(verb, fault, delay_s, Path(folder))
        seen[verb, fault, "named" if said == "named" else "wrong"] += 1
        worst[fault] = max(worst.get(fault, 0.0), took_s)
        if said != "named":
            wrong += 1
            print(f"{n}: {verb}, {fault} after {delay_s:.2f} s: {said}", flush=True)
    for (verb, fault, end), count in sorted(seen.items()):
        print(f"{verb}, {fault}: {count} {end}")
    longest = {fault: round(took_s, 1) for fault, took_s in worst.items()}
    print(f"seed {sys.argv[2]}: {wrong} wrong; the longest until all knew, in seconds: {longest}")
    print(f"ranks that were cut off ended within {_LEFT_S:g} s more: {LEFT[True]} of {LEFT.total()} runs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
