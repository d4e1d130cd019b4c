"""A rank that is frozen at a random moment of a call: the others end soon after the deadline, and name it."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.errors import ReshardError
from tests import gloo

RANKS, DEADLINE_S = 3, 2.0
AFTER_S = 12.0
"""So long after the deadline the others may take to find out who it is."""


def call(verb: str, path: str, state: dict[str, object], deadline_s: float) -> None:
    """One collective call."""
    if verb == "save":
        reshard.save(state, path, deadline_s=deadline_s)
    elif verb == "async_save":
        reshard.async_save(state, path, deadline_s=deadline_s).result()
    else:
        reshard.load(state, path, deadline_s=deadline_s)


def frozen(verb: str, path: str, victim: int, when: float, how: int) -> tuple[str, float]:
    """The call, in which one rank gets a signal after so much of the time that it takes; the error, and how soon."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.full((12, 6), 1.0), mesh, [Shard(0)]), "n": 1}
    reshard.save(state, path)
    call(verb, path, state, 60.0)
    dist.barrier()
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    begin = time.monotonic()
    call(verb, path, state, 60.0)
    took_s = time.monotonic() - begin
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(when * took_s, os.kill, (os.getpid(), how)).start()
    begin = time.monotonic()
    said, ended = "", begin
    try:
        call(verb, path, state, DEADLINE_S)
    except ReshardError as error:
        said = str(error)
    finally:
        ended = time.monotonic()
        if dist.get_rank() == victim:
            time.sleep(30.0)
        elif dist.get_rank() == int(victim == 0):  # whoever is frozen is nobody's to wait for when all have ended
            threading.Timer(4.0, os.kill, (pids[victim], signal.SIGKILL)).start()
            time.sleep(4.5)
    return said, ended - begin


def tried(verb: str, victim: int, when: float, folder: Path, how: int = signal.SIGSTOP, store: str = "parent") -> str:
    """What the others said: "named", "done", or what is wrong."""
    path = folder / "c"
    ends = gloo.outcomes(
        frozen, RANKS, verb, str(path), victim, when, how, store=store, linger_s=AFTER_S, timeout_s=DEADLINE_S + 25.0
    )
    others = [end for end in ends if end.rank != victim]
    for end in others:
        if not isinstance(end.value, tuple):
            return f"rank {end.rank} ended otherwise: {end}"
        said, took_s = end.value
        if took_s > DEADLINE_S + AFTER_S:
            return f"rank {end.rank} took {took_s:.1f} s: {said}"
        if said and not re.search(rf"\brank {victim}\b", said):
            return f"rank {end.rank}: not named: {said}"
    assert reshard.verify(path).ok
    return "done" if not any(end.value[0] for end in others) else "named"


def main() -> int:
    """`python -m tests.hosts.frozen N SEED`."""
    rng, seen, worst = random.Random(int(sys.argv[2])), Counter[str](), 0.0
    for n in range(int(sys.argv[1])):
        verb, victim, when = rng.choice(["save", "async_save", "load"]), rng.randrange(RANKS), rng.random() * 1.1
        how = rng.choice([signal.SIGSTOP, signal.SIGKILL])
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            found = tried(verb, victim, when, Path(folder), how)
            worst = max(worst, time.monotonic() - begin)
        seen[found if found in ("named", "done") else "wrong"] += 1
        if found not in ("named", "done"):
            print(f"{n}: {verb}, rank {victim}, {when:.2f}, {how.name}: {found}", flush=True)
    print(f"seed {sys.argv[2]}: {dict(seen)}, the slowest run took {worst:.1f} s")
    return bool(seen["wrong"])


if __name__ == "__main__":
    sys.exit(main())
