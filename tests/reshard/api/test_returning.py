"""`CheckpointManager.restore` into optimizers that have trained meanwhile: they end as they were saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from tests import gloo
from tests.same import differences
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def made(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return {"model": model, "optim": OPTIMIZERS[kind](model.parameters()), "step": 0}


def train(state: dict[str, Any], steps: int) -> None:
    model, optimizer = state["model"], state["optim"]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.sin(torch.arange(6.0).reshape(2, 3) + state["step"])).square().sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)
        state["step"] += 1


def now(state: dict[str, Any]) -> list[Any]:
    """The keys of one state may come in another order, and LBFGS's first `H_diag`, a number, as a tensor."""
    states = copy.copy(state["optim"].state_dict()["state"])
    for number, its in states.items():
        states[number] = its | {key: torch.tensor(float(its[key])) for key in ("H_diag",) if key in its}
    return [state["step"], state["model"].state_dict(), {n: dict(sorted(its.items())) for n, its in states.items()}]


@pytest.mark.parametrize("saved_after", [0, 1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_returns_to_a_step_and_goes_on_as_it_did(kind: str, saved_after: int, tmp_path: Path) -> None:
    straight, state = made(kind), made(kind)
    train(straight, saved_after)
    at_save = copy.deepcopy(now(straight))
    train(straight, 3)
    with reshard.CheckpointManager(tmp_path, every=reshard.Every(steps=1)) as manager:
        train(state, saved_after)
        manager.save(saved_after, state, force=True)
        train(state, 5)
        manager.save(state["step"], state)
        report = manager.restore(state, step=saved_after, discard_newer=True)
        assert report is not None
        assert report.load.ok
        assert [*differences(now(state), at_save)] == []
        train(state, 3)
    assert [*differences(now(state), now(straight))] == []


def test_state_of_a_parameter_that_was_frozen_when_saved_is_gone(tmp_path: Path) -> None:
    state = made("AdamW")
    frozen = state["model"][1].weight.requires_grad_(False)
    train(state, 2)
    with reshard.CheckpointManager(tmp_path, every=reshard.Every(steps=1)) as manager:
        manager.save(2, state)
        frozen.requires_grad_(True)
        train(state, 2)
        memory = state["optim"].state[state["model"][0].weight]["exp_avg"].data_ptr()
        assert frozen in state["optim"].state
        kept = manager.restore(state, step=2, strict=False)
        assert kept is not None
        assert "optim.state.1.weight.exp_avg" in kept.load.missing
        assert frozen in state["optim"].state  # as a key that may be missing
        manager.restore(state, step=2)
    assert frozen not in state["optim"].state
    assert state["optim"].state[state["model"][0].weight]["exp_avg"].data_ptr() == memory


def returns(folder: str) -> list[Any]:
    state = made("AdamW")
    for layer in state["model"]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state["optim"] = OPTIMIZERS["AdamW"](state["model"].parameters())
    with reshard.CheckpointManager(folder, every=reshard.Every(steps=1)) as manager:
        manager.save(0, state, force=True)
        train(state, 2)
        manager.save(2, state)
        found = []
        for step in (0, 2, 0):
            manager.restore(state, step=step)
            found.append((state["step"], len(state["optim"].state)))
    return found


@pytest.mark.gloo
@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_ranks_return_together(tmp_path: Path) -> None:
    assert gloo.run(returns, 2, str(tmp_path)) == [[(0, 0), (2, 4), (0, 0)]] * 2
