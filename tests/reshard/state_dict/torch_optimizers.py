"""Every optimizer of torch, with every option that adds state or changes its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

CLASSES = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)

OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ASGD": {"maximize": (True,), "foreach": (True, False)},
    "Adadelta": {"maximize": (True,), "foreach": (True, False)},
    "Adafactor": {"maximize": (True,), "foreach": (True, False)},
    "Adagrad": {"maximize": (True,), "foreach": (True, False), "fused": (True,)},
    "Adam": {"amsgrad": (True,), "maximize": (True,), "foreach": (True, False), "fused": (True,), "tensors": (True,)},
    "AdamW": {"amsgrad": (True,), "maximize": (True,), "foreach": (True, False), "fused": (True,), "tensors": (True,)},
    "Adamax": {"maximize": (True,), "foreach": (True, False)},
    "LBFGS": {"history_size": (2,), "line_search_fn": ("strong_wolfe",)},
    "Muon": {"nesterov": (True, False)},
    "NAdam": {"decoupled_weight_decay": (True,), "maximize": (True,), "foreach": (True, False)},
    "RAdam": {"decoupled_weight_decay": (True,), "maximize": (True,), "foreach": (True, False)},
    "RMSprop": {"momentum": (0.9,), "centered": (True,), "maximize": (True,), "foreach": (True, False)},
    "Rprop": {"maximize": (True,), "foreach": (True, False)},
    "SGD": {"momentum": (0.9,), "nesterov": (True,), "maximize": (True,), "foreach": (True, False), "fused": (True,)},
    "SparseAdam": {"maximize": (True,)},
}
"""By class: the options that matter, with values to try beside their default. `tensors`: lr and betas as tensors."""


def fitting(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the class takes them together: some need others, some exclude each other."""
    out = dict(options)
    if out.get("fused") or out.pop("tensors", False):
        out.pop("foreach", None)
        if "tensors" in options and not out.get("fused"):
            out |= {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}
    out.pop("tensors", None)
    if out.get("nesterov") and name == "SGD":
        out["momentum"] = 0.9
    return out


def make(name: str, parameters: Any, options: Mapping[str, Any] = {}) -> torch.optim.Optimizer:
    """An optimizer of this class; SGD has no lr by default."""
    cls: Any = getattr(torch.optim, name)
    return cls(parameters, **{"lr": 0.1, **fitting(name, options)})


def takes(name: str, parameter: torch.Tensor) -> bool:
    """Whether the optimizer can train such a parameter."""
    return name != "Muon" or parameter.dim() == 2


def step(optimizer: torch.optim.Optimizer, without: tuple[nn.Parameter, ...] = ()) -> None:
    """One step with gradients that come from the parameters; those `without` get none."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)

    def closure() -> float:
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = (p.detach() * 0.5 + 1).to(p.dtype)
                p.grad = None if any(p is one for one in without) else grad.to_sparse() if sparse else grad
        return 1.0

    closure()
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        optimizer.step()
