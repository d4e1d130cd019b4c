"""Many small tensors, compared with DCP: `python -m benchmarks.many_tensors [N] [--quick]`.

A state of N tensors of four elements (200,000 by default, 20,000 with `--quick`), so that this measures the work per
tensor. One process saves, opens, and loads it, each side in its own format and ours also in DCP's, and the
command-line tool inspects and compares it. CPU time, which other load hardly changes, in one round, because a call
takes long. The floor is twice the time for half the tensors: everything above it is more than linear.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import reshard
from benchmarks.page import Row, arguments, report

FIRST_LINE = "inspect, until its first line"


def state_of(count: int, fill: float | None = None) -> dict[str, Any]:
    """Return expert weights by number, each with its own value unless `fill` is given."""
    return {
        "model": {
            f"layers.{i // 256}.experts.{i % 256}.weight": torch.full((4,), float(i) if fill is None else fill)
            for i in range(count)
        }
    }


def seconds(what: str, call: Callable[[], object]) -> float:
    """Measure the CPU time of all threads once, because a call takes long. Prints when it has ended."""
    gc.collect()
    start = time.process_time()
    call()
    found = time.process_time() - start
    print(f"    {what}: {found:.3g} CPU s", file=sys.stderr, flush=True)
    return found


def command(*words: str | os.PathLike[str]) -> tuple[float, float]:
    """Measure the CPU time of a command in a new process, and the seconds until it has written a line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "reshard", *words], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        first = time.perf_counter() - start
        child.stdout.read()
    assert child.returncode == 0, f"{words} ended with {child.returncode}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, first


def measure(
    state: dict[str, Any], target: dict[str, Any], folder: Path, *, peers: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return our figure and torch's for every call, in an order in which each finds what it reads. Loads
    make `target` equal to `state`."""
    folder.mkdir()
    ours, theirs = folder / "ours", folder / "theirs"
    mine = {
        "save": seconds("save", lambda: reshard.save(state, ours)),
        "open": seconds("open", lambda: reshard.open(ours)),
        "load": seconds("load", lambda: reshard.load(target, ours)),
    }
    assert reshard.compare(target, state).ok
    mine["inspect"], mine[FIRST_LINE] = command("inspect", ours)
    mine["diff"], _ = command("diff", ours, ours)
    save = seconds("torch save", lambda: dcp.save(state, checkpoint_id=theirs, no_dist=True))
    mine["open DCP"] = seconds("open DCP", lambda: reshard.open(theirs))
    mine["load DCP"] = seconds("load DCP", lambda: reshard.load(target, theirs))
    other: dict[str, float] = {}
    if peers:
        load = seconds("torch load", lambda: dcp.load(target, checkpoint_id=theirs, no_dist=True))
        other = {"save": save, "load": load, "load DCP": load}
        other["open DCP"] = seconds("torch unpickling", lambda: pickle.loads((theirs / ".metadata").read_bytes()))
    shutil.rmtree(folder)
    return mine, other


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory, if possible."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


def rows(count: int) -> Iterator[Row]:
    """Yield a row for each call."""

    def of(number: int, *, peers: bool) -> tuple[dict[str, float], dict[str, float]]:
        return measure(state_of(number), state_of(number, 0.0), Path(folder, str(number)), peers=peers)

    with scratch() as folder:
        of(min(count, 100), peers=True)  # the first calls import much
        half, _ = of(count // 2, peers=False)
        found, other = of(count, peers=True)
    for name, mine in found.items():
        peers = {"torch": (other[name],)} if name in other else {}
        unit, floor = ("s", ()) if name == FIRST_LINE else ("CPU s", (2 * half[name],))
        yield Row("many_tensors", f"{name}, {count:,} tensors", unit, (mine,), peers, floor)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200_000, help="number of tensors")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return report(rows(20_000 if options.quick else options.count), options.rows)


if __name__ == "__main__":
    sys.exit(main())
