"""Saves that write what changed, beside whole ones: `python -m benchmarks.incremental [--quick]`.

Three trainings: AdamW over everything, where nothing can be gained; LoRA on a frozen base; experts with AdamW, of which
a third got no token. Each state is saved with `base="auto"` and without, one step apart: the second saves are compared,
now the one first and now the other. One process, tmpfs where there is one. What is read back must be right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import reshard

State = dict[str, torch.Tensor]


def adamw(mega: int) -> tuple[State, Callable[[State], None]]:
    """Parameters and both moments, all of which every step changes."""
    names = [f"{kind}.{i}" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(8)]
    state = {name: torch.randn(mega << 15, 4) for name in names}

    def step(state: State) -> None:
        for tensor in state.values():
            tensor.mul_(0.9)

    return state, step


def lora(mega: int) -> tuple[State, Callable[[State], None]]:
    """A frozen base and adapters of a hundredth of it, with their moments."""
    state = {f"base.{i}": torch.randn(mega << 17, 4).bfloat16() for i in range(12)}
    state |= {f"{kind}.{i}": torch.randn(mega << 10, 4) for kind in ("lora", "exp_avg", "exp_avg_sq") for i in range(4)}

    def step(state: State) -> None:
        for name, tensor in state.items():
            if not name.startswith("base"):
                tensor.mul_(0.9)

    return state, step


def experts(mega: int) -> tuple[State, Callable[[State], None]]:
    """Stacked experts with both moments; of twelve, four are as they were."""
    state = {
        f"{kind}.{i}": torch.randn(12, mega << 12, 16) for kind in ("w", "exp_avg", "exp_avg_sq") for i in range(4)
    }

    def step(state: State) -> None:
        for tensor in state.values():
            tensor[4:].mul_(0.9)

    return state, step


def compare(
    make: Callable[[int], tuple[State, Callable[[State], None]]], mega: int, folder: Path, *, turned: bool
) -> tuple[float, ...]:
    """Bytes written and processor seconds of the second save, whole and on a base, which is first if `turned`."""
    state, step = make(mega)
    whole, based = folder / "whole", folder / "based"
    reshard.save(state, whole / "step-1")
    reshard.save(state, based / "step-1", base="auto")
    step(state)
    found: list[tuple[float, ...]] = []
    for path, base in ((whole / "step-2", None), (based / "step-2", "auto"))[:: -1 if turned else 1]:
        begin = time.process_time()
        written = reshard.save(state, path, base=base).bytes_written
        found.append((written, time.process_time() - begin))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    reshard.load(target, based / "step-2")
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    for path in (whole, based):
        shutil.rmtree(path)
    return sum(found[::-1] if turned else found, ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller states, fewer repeats")
    options = parser.parse_args()
    mega, repeats = (1, 3) if options.quick else (8, 7)
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    print(f"{'':10}{'whole':>10}{'on a base':>12}{'fewer':>8}   processor s: whole   on a base   ratio (range)")
    for make in (adamw, lora, experts):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            rows = [compare(make, mega, Path(folder), turned=i % 2 > 0) for i in range(repeats)]
        (bytes_whole, _, bytes_based, _) = rows[0]
        ratios = sorted(based / whole for _, whole, _, based in rows)
        print(
            f"{make.__name__:10}{bytes_whole / 1e6:8.1f} MB{bytes_based / 1e6:9.1f} MB{bytes_whole / bytes_based:7.1f}x"
            f"{statistics.median(row[1] for row in rows):19.3f}{statistics.median(row[3] for row in rows):12.3f}"
            f"{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
