"""Incremental saves compared with full ones: `python -m benchmarks.incremental [--quick]`.

Three trainings: AdamW on all parameters, where nothing can be gained; LoRA on a frozen base; and experts with AdamW,
of which a third received no token. Each state is saved with `base="auto"` (ours) and without (the peer), one step
apart. The second saves are compared, in alternating order. One process, on tmpfs if there is one. What is read back
is checked.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import reshard
from benchmarks.page import Row, arguments, report

State = dict[str, torch.Tensor]


def adamw(mega: int) -> tuple[State, Callable[[State], None]]:
    """Return parameters and both moments, all of which change in every step."""
    names = [f"{kind}.{i}" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(8)]
    state = {name: torch.randn(mega << 15, 4) for name in names}

    def step(state: State) -> None:
        for tensor in state.values():
            tensor.mul_(0.9)

    return state, step


def lora(mega: int) -> tuple[State, Callable[[State], None]]:
    """Return a frozen base, adapters of a hundredth of its size, and their moments."""
    state = {f"base.{i}": torch.randn(mega << 17, 4).bfloat16() for i in range(12)}
    state |= {f"{kind}.{i}": torch.randn(mega << 10, 4) for kind in ("lora", "exp_avg", "exp_avg_sq") for i in range(4)}

    def step(state: State) -> None:
        for name, tensor in state.items():
            if not name.startswith("base"):
                tensor.mul_(0.9)

    return state, step


def experts(mega: int) -> tuple[State, Callable[[State], None]]:
    """Return stacked experts with both moments. Four of twelve do not change."""
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
    """Return the bytes written and CPU seconds of the second save, full and incremental. If `turned`, the incremental
    one is first."""
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


def rows(mega: int, repeats: int) -> Iterator[Row]:
    """Yield the rows. `mega`: size of the states."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for make, what in ((adamw, "AdamW over everything"), (lora, "LoRA"), (experts, "a third of experts idle")):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            found = [compare(make, mega, Path(folder), turned=i % 2 > 0) for i in range(repeats)]
        whole, whole_s, based, based_s = zip(*found, strict=True)
        megabytes = [tuple(n / 1e6 for n in column) for column in (based, whole)]
        yield Row("incremental", what, "MB written", megabytes[0], {"whole": megabytes[1]})
        yield Row("incremental", what, "CPU s", based_s, {"whole": whole_s})


def main() -> int:
    options = arguments(__doc__).parse_args()
    return report(rows(*((1, 3) if options.quick else (8, 7))), options.rows)


if __name__ == "__main__":
    sys.exit(main())
