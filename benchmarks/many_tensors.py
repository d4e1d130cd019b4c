"""Many tensors beside torch.distributed.checkpoint: `python -m benchmarks.many_tensors [N] [--quick]`.

A state of N tensors of four elements (200,000 by default, 20,000 with `--quick`), so that what is measured is the work
per tensor: saved, opened and loaded by one process, each side in its own format and we in theirs, too. Prints
processor time, which what else the machine does cannot change much, its ratio, and our growth from half as many tensors
(2.0 is linear).
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import reshard

Row = tuple[float, float | None]
"""Our seconds of processor time, and theirs, where they have such a call."""


def state_of(count: int, fill: float | None = None) -> dict[str, Any]:
    """Expert weights by number, each of its own value unless `fill` is given."""
    return {
        "model": {
            f"layers.{i // 256}.experts.{i % 256}.weight": torch.full((4,), float(i) if fill is None else fill)
            for i in range(count)
        }
    }


def seconds(call: Callable[[], object]) -> float:
    """Processor time of all threads of this process; once, since a call takes long."""
    start = time.process_time()
    call()
    return time.process_time() - start


def rows(count: int, folder: Path, *, peers: bool) -> dict[str, Row]:
    """Every call, in an order in which each finds what it reads."""
    state, target = state_of(count), state_of(count, 0.0)
    ours, theirs = folder / f"ours-{count}", folder / f"theirs-{count}"

    def timed(mine: Callable[[], object], other: Callable[[], object] | None) -> Row:
        return seconds(mine), seconds(other) if other is not None and peers else None

    found = {"save": timed(lambda: reshard.save(state, ours), None), "open": timed(lambda: reshard.open(ours), None)}
    found["load"] = timed(lambda: reshard.load(target, ours), None)
    assert all(torch.equal(a, b) for a, b in zip(target["model"].values(), state["model"].values(), strict=True))
    other_save = seconds(lambda: dcp.save(state, checkpoint_id=theirs, no_dist=True))
    found["open DCP"] = timed(lambda: reshard.open(theirs), lambda: pickle.loads((theirs / ".metadata").read_bytes()))
    found["load DCP"] = timed(
        lambda: reshard.load(target, theirs), lambda: dcp.load(target, checkpoint_id=theirs, no_dist=True)
    )
    if peers:
        found["save"] = found["save"][0], other_save
        found["load"] = found["load"][0], found["load DCP"][1]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200_000, help="number of tensors")
    parser.add_argument("--quick", action="store_true", help="20,000 tensors")
    args = parser.parse_args(arguments)
    count = 20_000 if args.quick else args.count
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        rows(min(count, 100), Path(folder), peers=True)  # first calls import much
        half = rows(count // 2, Path(folder), peers=False)
        print(f"{count} tensors, torch {torch.__version__}; seconds of processor time")
        print(f"{'':10}{'torch':>10}{'reshard':>10}{'ratio':>8}{'growth':>8}")
        for name, (mine, other) in rows(count, Path(folder), peers=True).items():
            peer = (
                f"{other:10.2f}{mine:10.2f}{other / mine:8.1f}" if other is not None else f"{'':10}{mine:10.2f}{'':8}"
            )
            print(f"{name:10}{peer}{mine / half[name][0]:8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
