"""Tensors made of blocks and their scales are cut where blocks end, and are made again for fresh optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.errors import KeyMismatchError, LayoutError, OptionError
from reshard.live.tensors import holder
from tests import gloo

BLOCK = 8


class Blocks(torch.Tensor):
    """Integers, a scale for each run of 8 of them and a table, as torchao's optimizers keep their moments."""

    @staticmethod
    def __new__(cls, codes, scale, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, table):
        self.codes, self.scale, self.table = codes, scale, table

    @classmethod
    def of(cls, values):
        rows = values.reshape(-1, BLOCK)
        scale = rows.abs().amax(1).clip(1e-9)
        codes = (rows / scale[:, None] * 127).round().to(torch.int8).reshape(values.shape)
        return cls(codes, scale, torch.arange(5.0))

    def dequantize(self):
        return (self.codes.reshape(-1, BLOCK) * self.scale[:, None] / 127).reshape(self.codes.shape)

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Blocks(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return type(args[0])(args[0].codes, args[0].scale, args[0].table)
        raise NotImplementedError(f"{func} on Blocks")


reshard.register_tensor_class(Blocks, {"scale": "flat", "table": "whole"}, make=lambda cls, parts, like: cls(**parts))


class Coarse(torch.optim.Optimizer):
    """Keeps the gradient in blocks, where this rank's part of it is made of whole ones."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            old = self.state[parameter].get("moment")
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            before = 0 if old is None else (old._local_tensor if isinstance(old, DTensor) else old).dequantize()
            new = local + before
            made = Blocks.of(new) if new.numel() and not new.numel() % BLOCK else new
            if isinstance(parameter, DTensor):
                made = DTensor(made, parameter._spec, requires_grad=False)
            self.state[parameter]["moment"] = made


def job(shape, placements=None, mesh_shape=None):
    """A model with one weight that is cut, and its optimizer."""
    model = torch.nn.Linear(1, 1, bias=False)
    weight = torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32)).reshape(shape)
    if placements is not None:
        mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
        weight = distribute_tensor(weight, mesh, placements)
    model.weight = torch.nn.Parameter(weight)
    return model, Coarse(model.parameters())


def resumed(path, *how):
    model, optimizer = job(*how)
    state = {"optim": reshard.optimizer_destinations(model, optimizer, path)}
    report = reshard.load(state, path)
    assert report.ok, report
    reshard.set_optimizer_state_dict(model, optimizer, state["optim"])
    return model, optimizer


def save(path, model, optimizer):
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer)}, path)


def first(path, *how):
    model, optimizer = job(*how)
    optimizer.step()
    save(path, model, optimizer)


def again(path, out, *how):
    model, optimizer = resumed(path, *how)
    save(out, model, optimizer)
    moment = optimizer.state[model.weight]["moment"]
    optimizer.step()
    return type(moment._local_tensor).__name__


def elements(path):
    checkpoint = reshard.open(path)
    return {key: checkpoint[key][...] for key in checkpoint}


def assert_same(path, other):
    one, two = elements(path), elements(other)
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((24, 16), (24, 2)), ((24, 4), (12,)), ((16, 3, 2), (4, 3)), ((64,), (8,)), ((16, 12), (8, 3))],
)
def test_scales_are_seen_such_that_they_can_be_cut(tmp_path, shape, scales):
    first(tmp_path / "a", shape)

    assert reshard.open(tmp_path / "a")["optim.state.weight.moment.scale"].shape == scales
    model, optimizer = resumed(tmp_path / "a", shape)
    moment = optimizer.state[model.weight]["moment"]
    assert type(moment) is Blocks
    assert moment.scale.dim() == 1
    assert torch.equal(moment.dequantize(), Blocks.of(model.weight.detach()).dequantize())
    warm = {"optim": reshard.get_optimizer_state_dict(model, optimizer)}
    moment.scale.zero_()
    assert reshard.load(warm, tmp_path / "a").ok
    assert moment.scale.min() > 0


@pytest.mark.gloo
def test_blocks_stay_as_they_are_on_other_numbers_of_ranks(tmp_path):
    """By rows, evenly or not; by columns; by both; with copies."""
    ways = [
        (2, ((25, 16), [Shard(0)])),
        (4, ((25, 16), [Shard(0)])),
        (3, ((25, 16), [Shard(0)])),
        (4, ((25, 16), [Shard(0), Shard(1)], (2, 2))),
        (2, ((25, 16), [Replicate(), Shard(1)], (1, 2))),
    ]
    gloo.run(first, 2, str(tmp_path / "0"), *ways[0][1])
    for number, (ranks, how) in enumerate(ways[1:], 1):
        kinds = gloo.run(again, ranks, str(tmp_path / str(number - 1)), str(tmp_path / str(number)), *how)
        assert kinds == ["Blocks"] * ranks
        assert_same(tmp_path / "0", tmp_path / str(number))
    first(tmp_path / "alone", (25, 16))
    assert_same(tmp_path / "0", tmp_path / "alone")


def refusals(path, alone):
    with pytest.raises(LayoutError, match=r"blocks. It must shard dim 0 at multiples of 2 and no later"):
        first(path, (16, 4), [Shard(1)])
    with pytest.raises(LayoutError, match="sharding splits blocks"):
        resumed(alone, (12, 4), [Shard(1)])
    model, optimizer = job((11, 8), [Shard(0)])
    optimizer.step()
    moment = optimizer.state[model.weight]["moment"]
    if dist.get_rank():
        plain = moment._local_tensor.dequantize()
        optimizer.state[model.weight]["moment"] = DTensor(plain, moment._spec, requires_grad=False)
    state = {"optim": reshard.get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(KeyMismatchError, match=r"quantized on some ranks only: .* reshard.dequantized\(state\)"):
        reshard.save(state, path)
    reshard.save(reshard.dequantized(state), path)


@pytest.mark.gloo
def test_a_cut_through_blocks_is_refused_unless_plain_values_are_asked_for(tmp_path):
    first(tmp_path / "alone", (12, 4))

    gloo.run(refusals, 2, str(tmp_path / "plain"), str(tmp_path / "alone"))

    saved = reshard.open(tmp_path / "plain")["optim.state.weight.moment"]
    whole, _ = job((11, 8))
    assert torch.equal(saved[...], Blocks.of(whole.weight.detach()).dequantize())


def test_a_class_is_registered_with_words_that_are_known():
    for kind in (OptionError, KeyMismatchError):
        with pytest.raises(kind, match="'scale' cannot be 'rows': it is one of flat, dims, whole"):
            reshard.register_tensor_class("app.Other", {"scale": "rows"})


class Others(Blocks):
    """Blocks of another kind."""


def test_a_weight_that_is_quantized_on_one_side_only_is_refused_before_anything_is_set():
    def made(kind):
        model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(8, 2, bias=False))
        values = torch.sin(torch.arange(16.0)).reshape(2, 8)
        model[1].weight = torch.nn.Parameter(kind(values), requires_grad=False)
        return model

    def others(values):
        return Others(*(getattr(Blocks.of(values), name) for name in ("codes", "scale", "table")))

    kinds = {"plain": torch.Tensor.clone, "Blocks": Blocks.of, "Others": others}
    for one, two in (("plain", "Blocks"), ("Blocks", "plain"), ("Blocks", "Others")):
        model = made(kinds[two])
        before = model[0].weight.clone()
        state = reshard.get_model_state_dict(made(kinds[one]))
        with pytest.raises(
            KeyMismatchError, match=r"Mismatched: 1.weight: is .* in the dict, and .* in the model. Quantize"
        ):
            reshard.set_model_state_dict(model, state)
        assert torch.equal(model[0].weight, before)
    model = made(kinds["plain"])
    reshard.set_model_state_dict(model, reshard.dequantized(reshard.get_model_state_dict(made(kinds["Blocks"]))))
    assert torch.equal(model[1].weight, made(kinds["Blocks"])[1].weight.dequantize())


def in_place_of_another(sharded):
    """Plain values for a state that is quantized, and quantized ones for an optimizer of torch's."""
    how = ([Shard(0)],) if sharded else ()
    model, optimizer = job((24, 8), *how)
    optimizer.step()
    state = reshard.get_optimizer_state_dict(model, optimizer)
    plain = reshard.dequantized(state)
    wanted = plain["state"]["weight"]["moment"].clone()
    other, warm = job((24, 8), *how)
    warm.step()
    warm.step()
    reshard.set_optimizer_state_dict(other, warm, plain)
    found = warm.state[other.weight]["moment"]
    assert type(holder(found)) is torch.Tensor
    assert torch.equal(holder(found), holder(wanted))

    adam = torch.optim.AdamW(other.parameters())
    state["state"]["weight"] = {"step": torch.ones(()), "exp_avg": state["state"]["weight"]["moment"]}
    state["state"]["weight"]["exp_avg_sq"] = plain["state"]["weight"]["moment"]
    with pytest.raises(KeyMismatchError, match=r"weight: its 'exp_avg' is a .*Blocks, and AdamW keeps plain tensors"):
        reshard.set_optimizer_state_dict(other, adam, state)
    reshard.set_optimizer_state_dict(other, adam, reshard.dequantized(state))
    if sharded:
        with pytest.raises(LayoutError, match=r"a sharded .*Blocks of 'weight' cannot be gathered"):
            reshard.get_optimizer_state_dict(model, optimizer, options=reshard.StateDictOptions(full_state_dict=True))


@pytest.mark.gloo
def test_values_are_not_quantized_or_the_reverse_without_being_asked():
    in_place_of_another(False)
    gloo.run(in_place_of_another, 2, True)
