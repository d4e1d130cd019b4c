"""The functions that get and set state, compared with torch's: `python -m benchmarks.state_dict [--quick]`.

One process, with a mixture-of-experts model of about 13,000 parameters and AdamW, on the CPU and with tiny tensors,
so that this measures the CPU time per parameter. The floor is twice the time for half the model: everything above it
is more than linear.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs

import reshard as ours
from benchmarks.page import Row, arguments, report

ROUNDS, REPEATS = 3, 3


class Expert(nn.Module):
    """A gated MLP with biases: six parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(dim, dim) for _ in range(3))


class Layer(nn.Module):
    """Attention projections, norms, a router, and experts."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in ("q", "k", "v", "o")})
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(experts)])


def build(layers: int, experts: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, and an optimizer after one step."""
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([Layer(4, experts) for _ in range(layers)]), "head": nn.Linear(4, 8)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def cases(model: nn.Module, optimizer: torch.optim.Optimizer, api: Any) -> dict[str, Callable[[], object]]:
    """Return the calls to time. They set copies, because setting the live state would be no work."""
    flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
    model_state = {name: value.clone() for name, value in api.get_model_state_dict(model).items()}
    nested = copy.deepcopy(api.get_optimizer_state_dict(model, optimizer))
    flattened = copy.deepcopy(api.get_optimizer_state_dict(model, optimizer, options=flat))
    return {
        "get model": lambda: api.get_model_state_dict(model),
        "get optimizer": lambda: api.get_optimizer_state_dict(model, optimizer),
        "get flat": lambda: api.get_optimizer_state_dict(model, optimizer, options=flat),
        "set model": lambda: api.set_model_state_dict(model, dict(model_state)),
        "set optimizer": lambda: api.set_optimizer_state_dict(model, optimizer, nested),
        "set flat": lambda: api.set_optimizer_state_dict(model, optimizer, flattened, options=flat),
    }


def shortest(run: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of the shortest of some runs, on one thread: other load can only add to it."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def rows(layers: int, experts: int) -> Iterator[Row]:
    """Yield a row for each call."""
    whole, half = build(layers, experts), build(layers // 2, experts)
    mine, other, smaller = cases(*whole, ours), cases(*whole, theirs), cases(*half, ours)
    for name, run in mine.items():
        run()
        smaller[name]()
        rounds = [
            (shortest(run, REPEATS), shortest(other[name], 1), 2 * shortest(smaller[name], REPEATS))
            for _ in range(ROUNDS)
        ]
        found, peer, floor = zip(*rounds, strict=True)
        yield Row("state_dict", name, "CPU s", found, {"torch": peer}, floor)


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # the same number of parameters with --quick: torch takes more time per parameter if there are more
    return report(rows(64, 32), options.rows)


if __name__ == "__main__":
    sys.exit(main())
