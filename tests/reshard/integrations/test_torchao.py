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
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.errors import LayoutError
from reshard.live.tensors import with_local
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


def test_every_class_that_is_known_is_there_under_its_name():
    from importlib import import_module

    from reshard.live.tensor_classes import registered_classes

    for name in registered_classes:
        module, _, attribute = name.rpartition(".")
        if module.startswith("torchao."):
            cls = getattr(import_module(module), attribute)
            assert f"{cls.__module__}.{cls.__qualname__}" == name


def quantized(kind, values):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

    if kind.startswith("mx"):
        return MXTensor.to_mx(values.bfloat16(), torch.float8_e4m3fn, 32, is_swizzled_scales=kind == "mx swizzled")
    if kind == "nvfp4":
        return NVFP4Tensor.to_nvfp4(values.bfloat16())
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data = values
    config = {"float8": Float8WeightOnlyConfig, "int8": Int8WeightOnlyConfig, "intx": IntxWeightOnlyConfig}[kind]
    quantize_(layer, config())
    return layer.weight.data


def weights(kind, source, target):
    """Rows of a quantized weight, or what was saved of it, as plain numbers; saves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = distribute_tensor(torch.randn(768, 256), mesh, [Shard(0)])
    values = whole.to_local() if source is None else torch.ones_like(whole.to_local())
    weight = with_local(whole, quantized(kind, values))
    if source is not None:
        assert reshard.load({"w": weight}, source).ok
    reshard.save({"w": weight}, target)
    return weight._local_tensor.dequantize().float()


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["float8", "int8", "intx", "mx", "nvfp4"])
def test_weights_keep_their_codes_on_other_numbers_of_ranks(kind, tmp_path):
    found = []
    for number, ranks in enumerate((2, 4, 3, 2)):
        source = str(tmp_path / str(number - 1)) if number else None
        found.append(torch.cat(gloo.run(weights, ranks, kind, source, str(tmp_path / str(number)))))
        assert torch.equal(found[-1], found[0])
        assert not number or reshard.compare(tmp_path / "0", tmp_path / str(number)).ok


@pytest.mark.gloo
def test_scales_in_the_order_of_a_kernel_are_refused(tmp_path):
    with pytest.raises(LayoutError, match=r"the part .scale. of .w., a MXTensor .* its sharding is unknown"):
        gloo.run(weights, 2, "mx swizzled", None, str(tmp_path / "0"))


def trained_in_float8(kind, seed):
    """FSDP2 with weights that are gathered in float8, or plain."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    if kind == "float8":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = convert_to_float8_training(model, config=config)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def float8_to(path, saver, kinds):
    """Saved after a step, and loaded; the classes of the weights there."""
    import torch.distributed.checkpoint as dcp
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    model, optimizer = trained_in_float8(kinds[0], 0)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    if kinds[0] == "float8":
        precompute_float8_dynamic_scale_for_fsdp(model)
    state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
    if saver == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        del state["optim"]
    else:
        reshard.save(state, path)
    other, fresh = trained_in_float8(kinds[1], 1)
    if kinds[1] == "float8":
        precompute_float8_dynamic_scale_for_fsdp(other)
    found = {key: value for key, value in zip(("model", "optim"), reshard.get_state_dict(other, fresh)) if key in state}
    assert reshard.load(found, path).ok
    reshard.set_model_state_dict(other, found["model"])
    if "optim" in found:
        reshard.set_optimizer_state_dict(other, fresh, found["optim"])
    now = dict(zip(("model", "optim"), reshard.get_state_dict(other, fresh)))
    assert reshard.fingerprint({key: now[key] for key in state}) == reshard.fingerprint(state)
    assert sum(key.endswith(".weight") for key in reshard.open(path) if key.startswith("model.")) == 2
    whole = reshard.get_model_state_dict(model, options=reshard.StateDictOptions(full_state_dict=True))["0.weight"]
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, reshard.open(path)["model.0.weight"][...])
    weight = other[0].weight._local_tensor
    return type(weight).__name__, getattr(weight, "_precomputed_scale", None)


@pytest.mark.gloo
@pytest.mark.parametrize("saver", ["reshard", "dcp"])
@pytest.mark.parametrize("kinds", [("float8", "float8"), ("float8", "plain"), ("plain", "float8")], ids="-".join)
def test_training_in_float8_begins_and_ends_with_plain_weights(tmp_path, saver, kinds):
    wanted = "WeightWithDynamicFloat8CastTensor" if kinds[1] == "float8" else "Tensor"
    assert gloo.run(float8_to, 2, str(tmp_path / "c"), saver, kinds) == [(wanted, None)] * 2
