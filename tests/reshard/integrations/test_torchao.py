"""torchao's optimizers on 2, 4, 3 and 2 ranks under FSDP2. `tests/reshard/live/test_quantized_states.py` has the same
shape without torchao."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from tests import gloo

pytest.importorskip("torchao", reason="torchao is not installed")


def job(name):
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its steps are compiled otherwise, which takes a minute
    from torchao import optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 100), nn.Linear(100, 768))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(optim, name)(model.parameters(), lr=1e-2)


def step(model, optimizer):
    torch.manual_seed(1)
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(name, source, path):
    """A step, or what was saved; what the next step makes of it."""
    model, optimizer = job(name)
    if source is None:
        step(model, optimizer)
    else:
        state = {
            "model": reshard.get_model_state_dict(model),
            "optim": reshard.optimizer_destinations(model, optimizer, source),
        }
        assert reshard.load(state, source).ok
        reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    weights, states = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": weights, "optim": states}, path)
    kind = type(optimizer.state[model[0].weight]["exp_avg"]._local_tensor).__name__
    step(model, optimizer)
    return kind, model[0].weight.full_tensor()


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_codes_and_scales_stay_as_they_are(tmp_path, name):
    steps = []
    for number, ranks in enumerate((2, 4, 3, 2)):
        source = str(tmp_path / str(number - 1)) if number else None
        steps.append(gloo.run(run, ranks, name, source, str(tmp_path / str(number)))[0])
        assert steps[-1][0].startswith("OptimState")
        if number:
            assert reshard.compare(tmp_path / "0", tmp_path / str(number)).ok
    assert torch.equal(steps[0][1], steps[3][1])  # as if nothing had happened between
