"""All optimizers of four libraries: each resumes a fresh one with equal next steps, or is refused by name.

`tests/reshard/state_dict/test_odd_optimizers.py` has the kinds of state without these libraries.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.errors import ReshardError
from tests.same import same

LIBRARIES = {name: pytest.importorskip(name, reason=f"{name} is not installed") for name in ("pytorch_optimizer",)}
REFUSED = {
    "aggmo": "tensors in a dict with numbers for keys",
    "conda": "an object of a class of its own",
    "scalableshampoo": "an object of a class of its own",
    "magma": "a state dict of two optimizers",
}
"""By name: what their state has that cannot be saved or loaded into a fresh one."""
UNTRIED = {
    "adalomo": "steps within the backward pass",
    "lomo": "steps within the backward pass",
    "alig": "its closure is that of another loss",
    "bsam": "needs the size of the data set",
    "demo": "needs einops",
    "distributedmuon": "takes groups of its own",
    "spectralsphere": "takes matrices only",
    "LATHER": "another number of its own, from its own state dict too",
    "lorarite": "its rounding depends on the order of elements in memory",
}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    image = nn.Unflatten(1, (2, 2, 2))
    return nn.Sequential(
        nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), image, nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 4)
    )


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean() + model(x).sum() * 0.1
        loss.backward(create_graph=type(optimizer).__name__ in ("AdaHessian", "SophiaH"))
        return loss

    if type(optimizer).__name__ == "LBFGS" or type(optimizer).__name__.endswith("Closure"):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def of_pytorch_optimizer(name: str) -> Callable[[nn.Module], Any]:
    cls = LIBRARIES["pytorch_optimizer"].load_optimizer(name)
    asked = inspect.signature(cls.__init__).parameters
    options = {key: value for key, value in (("lr", 0.01), ("num_iterations", 10)) if key in asked}

    def made(model: nn.Module) -> Any:
        try:
            return cls(model.parameters(), **options)
        except (
            AttributeError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # of groups that say which parameters are matrices
            pass
        try:
            parameters = list(model.parameters())
            matrices = {"params": [p for p in parameters if p.dim() > 1], "use_muon": True}
            others = {"params": [p for p in parameters if p.dim() < 2], "use_muon": False}
            return cls([matrices, others], **options)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return cls(model, **options)

    return made


def of_module(name: str) -> Iterator[Any]:
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    own = sorted((key, cls) for key, cls in vars(module).items() if isinstance(cls, type))
    for key, cls in own:
        base = key.endswith("Base") or key in ("SAMWrapper", "SplitOpt", *UNTRIED)
        if issubclass(cls, torch.optim.Optimizer) and not base:
            yield pytest.param(lambda model, cls=cls: cls(model.parameters(), lr=0.01), id=f"{name}.{key}")


def every() -> list[Any]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # heavyball compiles its steps otherwise
    names = [name for name in LIBRARIES["pytorch_optimizer"].get_supported_optimizers() if name not in UNTRIED]
    own = [pytest.param(of_pytorch_optimizer(name), id=f"pytorch_optimizer.{name}") for name in names]
    return [*own, *of_module("heavyball"), *of_module("schedulefree"), *of_module("prodigyopt")]


def resumed(source: Any, target: Any, path: Path) -> None:
    reshard.save(dict(zip(("model", "optim"), reshard.get_state_dict(*source))), path)
    state = dict(zip(("model", "optim"), reshard.get_state_dict(*target)))
    assert reshard.load(state, path).ok
    reshard.set_state_dict(*target, model_state_dict=state["model"], optim_state_dict=state["optim"])


@pytest.mark.parametrize("make", every())
@pytest.mark.filterwarnings("ignore")
def test_the_next_steps_are_equal_or_the_state_is_refused(
    make: Callable[[nn.Module], Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.rpartition(".")[2]
    models = build(0), build(1)
    optimizers = [make(model) for model in models]
    for optimizer in optimizers:
        if hasattr(optimizer, "train") and not list(inspect.signature(optimizer.train).parameters):
            optimizer.train()
    for seed in range(3):
        step(models[0], optimizers[0], seed)
    pairs = list(zip(models, optimizers))
    if name in REFUSED:
        with pytest.raises(ReshardError):
            resumed(*pairs, tmp_path / "x")
        return
    resumed(*pairs, tmp_path / "x")
    for model, optimizer in pairs:
        for seed in (3, 4):
            step(model, optimizer, seed)
    assert same(models[1].state_dict(), models[0].state_dict())
