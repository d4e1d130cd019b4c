"""The get and set functions beside torch's own, in one process: `python -m benchmarks.state_dict [--quick]`.

A mixture-of-experts model of about 13,000 parameters and AdamW, on the CPU and with tiny tensors, so that what is
measured is the work per parameter. Prints both wall times, their ratio, and our growth from half the model to the
whole (2.0 is linear). Exits 1 if a ratio is below what is wanted, with --check.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs

import reshard as ours

WANTED_RATIO = {"get model": 5, "get optimizer": 5, "get flat": 5, "set model": 5, "set optimizer": 20, "set flat": 5}
"""Their wall time by ours, at least."""


class Expert(nn.Module):
    """A gated MLP with biases: six parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(dim, dim) for _ in range(3))


class Layer(nn.Module):
    """Attention projections, norms, a router and experts."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in ("q", "k", "v", "o")})
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(experts)])


def build(layers: int, experts: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and an optimizer that has stepped once."""
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
    """The calls to be timed; what is set are copies, since setting what is live already would be no work."""
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


def seconds(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """The shortest wall time of each, run in turn: what else the machine does can only add to it."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main(arguments: list[str] | None = None) -> int:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model of about 800 parameters")
    parser.add_argument("--check", action="store_true", help="exit 1 where a ratio is below what is wanted")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    layers, experts = (8, 16) if args.quick else (64, 32)
    model, optimizer = build(layers, experts)
    half = build(layers // 2, experts)
    print(f"{len(list(model.parameters()))} parameters, AdamW, torch {torch.__version__}")
    print(f"{'':14}{'torch s':>10}{'reshard s':>11}{'ratio':>8}{'wanted':>8}{'growth':>8}")
    mine, other, smaller = cases(model, optimizer, ours), cases(model, optimizer, theirs), cases(*half, ours)
    good = True
    for name, run in mine.items():
        run()
        upstream, *own = seconds([other[name], run, run, run], 3)
        (half_s,) = seconds([smaller[name]], 9)
        growth = min(own) / half_s
        ratio = upstream / min(own)
        good &= ratio >= WANTED_RATIO[name]
        print(f"{name:14}{upstream:10.3f}{min(own):11.4f}{ratio:8.1f}{WANTED_RATIO[name]:8}{growth:8.1f}", flush=True)
    return 0 if good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
