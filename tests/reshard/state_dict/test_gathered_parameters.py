"""FSDP keeps the parameters that a forward pass gathered until a backward pass. What is written into the shards in
between must count in the next forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import reshard
from tests import gloo

pytestmark = pytest.mark.gloo

DATA = torch.arange(8.0).view(2, 4)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def fsdp1(seed: int, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(plain(seed), device_id=torch.device("cpu"), **options)


def fsdp2(seed: int, inner: bool) -> nn.Module:
    model, mesh = plain(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model if inner else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


MODELS = {
    "FSDP1": lambda seed: fsdp1(seed, use_orig_params=False),
    "FSDP1, original parameters": lambda seed: fsdp1(seed, use_orig_params=True),
    "FSDP1, gathered once": lambda seed: fsdp1(
        seed, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "FSDP2": lambda seed: fsdp2(seed, False),
    "FSDP2, of layers": lambda seed: fsdp2(seed, True),
}


def loaded(kind: str, folder: str) -> None:
    reshard.save(dict(plain(3).state_dict()), folder)
    model = MODELS[kind](4)
    state = reshard.get_model_state_dict(model)
    for wanted in (plain(3), plain(3)):
        model(DATA)
        reshard.load(state, folder)
        assert torch.equal(model(DATA), wanted(DATA))


def moved(kind: str, folder: str) -> None:
    source, target = plain(3), MODELS[kind](4)
    prepared = reshard.prepare(dict(source.state_dict()), reshard.get_model_state_dict(target))
    for factor in (1.0, 2.0):
        target(DATA)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(factor)
        prepared.run()
        assert torch.equal(target(DATA), source(DATA))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("job", [loaded, moved])
def test_what_was_written_into_shards_counts_in_the_next_forward_pass(job: Any, kind: str, tmp_path: Path) -> None:
    gloo.run(job, 2, kind, str(tmp_path / "c"))
