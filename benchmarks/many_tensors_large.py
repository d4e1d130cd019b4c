"""200,000 tensors of a mixture of experts with Adam: `python -m benchmarks.many_tensors_large [N]`.

The parameters, moments and step counts of a model, N tensors in all, taken out of it, put back, saved and loaded by one
process, and looked at by the command. It takes many minutes, most of them torch's, so it is measured on request: by
`python -m benchmarks --write many_tensors_large`. What ends is told at once on stderr. The floor is ten times the time
of a tenth as many tensors: what comes to it is linear. Commands have none, since of a few tensors they mostly start.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as theirs

import reshard
from benchmarks.many_tensors import FIRST_LINE, measure, scratch, seconds
from benchmarks.page import Row, arguments, report
from benchmarks.state_dict import build

PER_EXPERT, PER_TENSOR_OF_MODEL = 6, 4
LAYERS = 64
OF_COMMANDS = ("inspect", FIRST_LINE, "diff")


def built(count: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer with about so many tensors in all: each parameter, its two moments, its step."""
    layers = min(LAYERS, max(1, count // 1000))
    return build(layers, max(1, (count // PER_TENSOR_OF_MODEL // layers - 10) // PER_EXPERT))


def get_and_set(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], api: Any
) -> dict[str, float]:
    """Processor time of taking the state out, and of putting `state` in."""
    given = {"model_state_dict": dict(state["model"]), "optim_state_dict": copy.deepcopy(state["optimizer"])}
    return {
        "get": seconds(f"{api.__name__} get", lambda: api.get_state_dict(model, optimizer)),
        "set": seconds(f"{api.__name__} set", lambda: api.set_state_dict(model, optimizer, **given)),
    }


def figures(count: int, folder: Path, *, peers: bool) -> tuple[int, dict[str, float], dict[str, float]]:
    """How many tensors, our figure and torch's of every call."""
    model, optimizer = built(count)
    live = dict(zip(("model", "optimizer"), reshard.get_state_dict(model, optimizer), strict=True))
    state = copy.deepcopy(live)
    mine = get_and_set(model, optimizer, state, reshard)
    with torch.no_grad():
        torch._foreach_zero_([*live["model"].values()])
    more, other = measure(state, live, folder, peers=peers)
    if peers:
        other = get_and_set(model, optimizer, state, theirs) | other
    return len(state["model"]) * PER_TENSOR_OF_MODEL, mine | more, other


def rows(count: int) -> Iterator[Row]:
    """A row for each call."""
    with scratch() as folder:
        figures(1000, Path(folder, "first"), peers=True)  # first calls import much
        fewer, small, _ = figures(count // 10, Path(folder, "small"), peers=False)
        tensors, found, other = figures(count, Path(folder, "large"), peers=True)
    for name, mine in found.items():
        peers = {"torch": (other[name],)} if name in other else {}
        floor = () if name in OF_COMMANDS else (small[name] * tensors / fewer,)
        unit = "s" if name == FIRST_LINE else "processor s"
        yield Row("many_tensors_large", f"{name}, {tensors:,} tensors", unit, (mine,), peers, floor)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200_000, help="number of tensors, about")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # as many with --quick: fewer are in the table of many_tensors
    return report(rows(options.count), options.rows)


if __name__ == "__main__":
    sys.exit(main())
