"""Hundreds of thousands of tensors of a mixture of experts with Adam: `python -m benchmarks.many_tensors_large`.

One process gets the parameters, moments, and step counts of a model (about 200,000 tensors in total, and a million),
sets them, saves, and loads them. The command-line tool inspects them. Measures the CPU time in one round, and by how
much the peak of the process's memory exceeds its start. Results are printed at once on stderr. The floor is ten or
five times the cost for a tenth (of 200,000) or a fifth (of a million) of the tensors: everything above it is more
than linear. Commands have no floor, because for few tensors they mostly start up. Each number of tensors has its own
process, two of them at a time.

It takes many minutes, most of them in torch, so it only runs by name: `python -m benchmarks --write
many_tensors_large`. With more than `ALL_OF_TORCH_UP_TO` tensors, torch only runs `TORCH_AT_ANY_SIZE`, and every call
is stopped after `LIMIT_S` seconds of CPU time. With `--full`, torch runs everything.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as theirs

import reshard
from benchmarks.many_tensors import FIRST_LINE, command, scratch
from benchmarks.page import Row, arguments, report
from benchmarks.state_dict import build

COUNTS = (20_000, 200_000, 1_000_000)
"""The smallest has no rows: it is the floor of the next one, which is the floor of the largest."""
PER_EXPERT, PER_TENSOR_OF_MODEL = 6, 4
LAYERS = 64
TORCH_AT_ANY_SIZE = ("get",)
ALL_OF_TORCH_UP_TO = 200_000
LIMIT_S = 600


@dataclass(frozen=True)
class Taken:
    """The cost of one call."""

    seconds: float
    """CPU seconds of all threads of the process."""
    megabytes: float
    """Peak minus the resident memory before."""
    ended: bool = True


class _Stopped(BaseException):
    """A call exceeded its time limit."""


def _memory(which: str) -> float:
    """Return an entry of this process's memory in /proc, in MB."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10) / 1e6 for line in status if line.startswith(which))


def taken(what: str, call: Callable[[], object]) -> Taken:
    """Measure a call once, because it takes long. Stops it after `LIMIT_S`. Prints when it has ended."""

    def stop(*_: object) -> None:
        raise _Stopped

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that this call cannot reuse memory that earlier ones freed
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _memory("VmRSS")
    earlier = signal.signal(signal.SIGPROF, stop)
    start, ended = time.process_time(), True
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        call()
    except BaseException:  # torch replaces the error by another
        if time.process_time() - start < LIMIT_S:
            raise
        ended = False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)
    found = Taken(time.process_time() - start, _memory("VmHWM") - before, ended)
    print(
        f"    {what}: {found.seconds:.3g} CPU s, {found.megabytes:.0f} MB{'' if ended else ', stopped'}",
        file=sys.stderr,
        flush=True,
    )
    return found


def built(count: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer with about `count` tensors: each parameter, its two moments, and its step."""
    layers = min(LAYERS, max(1, count // 1000))
    return build(layers, max(1, (count // PER_TENSOR_OF_MODEL // layers - 10) // PER_EXPERT))


def get_and_set(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], api: Any, names: tuple[str, ...]
) -> dict[str, Taken]:
    """Get the state, and set `state`, if they are among `names`."""
    given = {"model_state_dict": dict(state["model"]), "optim_state_dict": copy.deepcopy(state["optimizer"])}
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: api.get_state_dict(model, optimizer),
        "set": lambda: api.set_state_dict(model, optimizer, **given),
    }
    return {name: taken(f"{api.__name__} {name}", call) for name, call in calls.items() if name in names}


@dataclass(frozen=True)
class Measured:
    """All calls for one number of tensors."""

    tensors: int
    ours: dict[str, Taken]
    torch: dict[str, Taken]
    commands: dict[str, float]
    """CPU seconds, except for `FIRST_LINE`."""


def measure(count: int, folder: Path, *, with_torch: bool) -> Measured:
    """Measure all calls, in an order in which each finds what it reads. Without torch, it only runs
    `TORCH_AT_ANY_SIZE`."""
    both, its_own = ("get", "set"), ("get", "set") if with_torch else TORCH_AT_ANY_SIZE
    folder.mkdir()
    mine, its = folder / "ours", folder / "torch's"
    model, optimizer = built(count)
    live = dict(zip(("model", "optimizer"), reshard.get_state_dict(model, optimizer), strict=True))
    state = copy.deepcopy(live)
    other: dict[str, Taken] = {}
    commands: dict[str, float] = {}
    ours = get_and_set(model, optimizer, state, reshard, both)
    with torch.no_grad():
        torch._foreach_zero_([*live["model"].values()])
    ours["save"] = taken("save", lambda: reshard.save(state, mine))
    ours["open"] = taken("open", lambda: reshard.open(mine))
    ours["load"] = taken("load", lambda: reshard.load(live, mine))
    assert all(torch.equal(live["model"][name], value) for name, value in state["model"].items())
    commands["inspect"], commands[FIRST_LINE] = command("inspect", mine)
    commands["diff"], _ = command("diff", mine, mine)
    if with_torch:
        other["save"] = taken("torch save", lambda: dcp.save(state, checkpoint_id=its, no_dist=True))
        if other["save"].ended:
            metadata = its / ".metadata"
            ours["open DCP"] = taken("open DCP", lambda: reshard.open(its))
            other["open DCP"] = taken("torch unpickling", lambda: pickle.loads(metadata.read_bytes()))
            ours["load DCP"] = taken("load DCP", lambda: reshard.load(live, its))
            load = taken("torch load", lambda: dcp.load(live, checkpoint_id=its, no_dist=True))
            other |= {"load": load, "load DCP": load}
    other |= get_and_set(model, optimizer, state, theirs, its_own)
    shutil.rmtree(folder)
    return Measured(len(state["model"]) * PER_TENSOR_OF_MODEL, ours, other, commands)


def rows_of(found: Measured, fewer: Measured) -> Iterator[Row]:
    """Yield the time and memory of each call, then the commands."""
    times = found.tensors / fewer.tensors
    for name, one in found.ours.items():
        what, few, other = f"{name}, {found.tensors:,} tensors", fewer.ours.get(name), found.torch.get(name)
        who = "torch" if other is None or other.ended else "torch, stopped"
        for unit, figure in (("CPU s", "seconds"), ("MB of memory", "megabytes")):
            peers = {} if other is None else {who: (getattr(other, figure),)}
            floor = () if few is None else (getattr(few, figure) * times,)
            yield Row("many_tensors_large", what, unit, (getattr(one, figure),), peers, floor)
    for name, seconds in found.commands.items():
        unit = "s" if name == FIRST_LINE else "CPU s"
        yield Row("many_tensors_large", f"{name}, {found.tensors:,} tensors", unit, (seconds,))


def measured(count: int, folder: str, with_torch: bool) -> Measured:
    """Measure in a new process. Its first calls, which import much, use few tensors."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measure(1000, Path(folder, f"before {count}"), with_torch=True)
    return measure(count, Path(folder, str(count)), with_torch=with_torch)


def rows(counts: Sequence[int], *, full: bool) -> Iterator[Row]:
    """Yield the rows of all counts but the first. The largest starts first, because it takes longest."""
    with scratch() as folder, ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        begun = {
            count: pool.submit(measured, count, folder, full or count <= ALL_OF_TORCH_UP_TO)
            for count in sorted(counts, reverse=True)
        }
        for fewer, count in pairwise(sorted(counts)):
            yield from rows_of(begun[count].result(), begun[fewer].result())


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("counts", type=int, nargs="*", default=COUNTS, help="numbers of tensors, about")
    parser.add_argument("--full", action="store_true", help="torch saves and loads any number")
    options = parser.parse_args(argv)
    # the same number with --quick: the table of many_tensors has fewer
    return report(rows(options.counts, full=options.full), options.rows)


if __name__ == "__main__":
    sys.exit(main())
