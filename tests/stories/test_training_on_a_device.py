"""One process trains, saves, and resumes with the same losses: on the CPU, or with RESHARD_TEST_DEVICE=cuda."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import reshard
from tests import gloo
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

DEVICE = os.environ.get("RESHARD_TEST_DEVICE", "cpu")
ON_GPU = pytest.mark.skipif(DEVICE in ("cpu", "sim"), reason="needs an accelerator: make gpu")

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.host_only("says itself what lies where"),
    pytest.mark.skipif(DEVICE == "sim", reason="the simulated device trains no model"),
]

Made = tuple[nn.Module, torch.optim.Optimizer]


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(DEVICE)


def _sharded(**options: Any) -> nn.Module:
    mesh, model = init_device_mesh(DEVICE, (1, 1), mesh_dim_names=("replica", "fsdp")), _net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _adamw(model: nn.Module, **options: Any) -> Made:
    return model, torch.optim.AdamW(model.parameters(), 1e-3, **options)


MADE: dict[str, Callable[[], Made]] = {
    "plain": lambda: _adamw(_net()),
    "fused": lambda: _adamw(_net(), fused=True),
    "foreach": lambda: _adamw(_net(), foreach=True, amsgrad=True),
    "ddp": lambda: _adamw(DistributedDataParallel(_net())),
    "fsdp2": lambda: _adamw(_sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), fused=True),
    "capturable": lambda: _adamw(_net(), capturable=True),
    "compiled": lambda: _adamw(torch.compile(_net())),  # type: ignore[arg-type]
    "fsdp2, offloaded": lambda: _adamw(_sharded(offload_policy=CPUOffloadPolicy())),
    "fsdp1": lambda: _adamw(FullyShardedDataParallel(_net(), device_id=0, use_orig_params=True)),
}
FOR_GPUS = ("capturable", "compiled", "fsdp2, offloaded", "fsdp1")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    loss = (model(batch).float() - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _resumed(name: str, folder: str) -> tuple[list[float], list[float]]:
    """The losses of a run that goes on, and of a fresh model and optimizer that load what it saved."""
    _join()
    model, optimizer = MADE[name]()
    for number in range(3):
        _step(model, optimizer, number)
    weights, moments = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": weights, "optim": moments}, folder)
    wanted = [_step(model, optimizer, number) for number in range(3, 6)]

    model, optimizer = MADE[name]()
    weights, moments = reshard.get_state_dict(model, optimizer)
    assert reshard.load({"model": weights, "optim": moments}, folder).ok
    reshard.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return wanted, [_step(model, optimizer, number) for number in range(3, 6)]


def _join() -> None:
    """The device's own backend beside gloo: one rank has a device for itself."""
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).set_device(0)
        own = dist.get_default_backend_for_device(DEVICE)
        store = dist.HashStore()
        dist.destroy_process_group()
        dist.init_process_group(f"cpu:gloo,{DEVICE}:{own}", store=store, rank=0, world_size=1)


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU if name in FOR_GPUS else ()) for name in MADE])
@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    ((wanted, found),) = gloo.run(_resumed, 1, name, str(tmp_path / "c"))
    assert found == wanted


def _saved_while_it_trains(stage: str, folder: str) -> None:
    _join()
    model, optimizer = MADE["fused"]()
    _step(model, optimizer, 0)
    weights, _ = reshard.get_state_dict(model, optimizer)
    for round_ in range(2):  # the second one has the memory of the first
        wanted = {name: value.detach().clone() for name, value in weights.items()}
        pending = reshard.async_save({"model": weights}, folder, stage=stage)  # type: ignore[arg-type]
        for number in range(5):
            _step(model, optimizer, 10 * round_ + number)
        pending.result()
        loaded = {name: torch.zeros_like(value) for name, value in weights.items()}
        reshard.load({"model": loaded}, folder)
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
        assert not any(torch.equal(loaded[name], weights[name]) for name in wanted)


@pytest.mark.parametrize("stage", ["host", "device"])
def test_a_save_in_the_background_has_the_values_of_its_call(stage: str, tmp_path: Path) -> None:
    gloo.run(_saved_while_it_trains, 1, stage, str(tmp_path / "c"))


def _on_a_busy_stream(folder: str) -> None:
    _join()
    module = torch.get_device_module(DEVICE)
    value, target = torch.zeros(1 << 24, device=DEVICE), torch.zeros(1 << 24, device=DEVICE)
    module.synchronize()
    with module.stream(module.Stream()):
        module._sleep(1_000_000_000)
        value.fill_(7)
        reshard.save({"t": value}, folder)
        module._sleep(1_000_000_000)
        target.fill_(3)
        reshard.load({"t": target}, folder)
    assert bool((target == 7).all())


@ON_GPU
def test_saves_and_loads_come_after_what_the_callers_stream_was_asked(tmp_path: Path) -> None:
    gloo.run(_on_a_busy_stream, 1, str(tmp_path / "c"))
