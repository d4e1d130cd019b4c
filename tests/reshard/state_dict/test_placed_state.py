"""State that is no shard of its parameter, beside parameters that are DTensors: a fresh optimizer gets it as it was
saved, as an unsharded tensor or as a DTensor, since its next step works with one of them only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.live.tree import leaves_of
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytestmark = [pytest.mark.gloo, requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")]


class OneGroup(torch.optim.Optimizer):
    """Has a learning rate and nothing else."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


class Whole(OneGroup):
    """Keeps unsharded tensors, as heavyball's SOAP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            rows = (grad.full_tensor() if isinstance(grad, DTensor) else grad).reshape(len(grad), -1)
            state["gram"] = state.get("gram", torch.zeros(2, len(grad), len(grad))) * 0.9 + rows @ rows.T
            state["seen"] = state.get("seen", torch.zeros(())) + 1
            parameter.sub_(grad / float(1 + state["gram"].sum().abs()))


class Beside(OneGroup):
    """Keeps an unsharded tensor of the parameter's shape beside a DTensor, as heavyball's MSAMLaProp does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
            state["exp_avg"] = state.get("exp_avg", torch.zeros_like(parameter)) * 0.9 + grad
            state["z"] = state.get("z", torch.zeros(full.shape)) * 0.9 + full
            parameter.sub_(state["exp_avg"] / float(1 + state["z"].abs().sum()))


class Alone(OneGroup):
    """Keeps an unsharded tensor of the parameter's shape, and nothing that is sharded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
            state["z"] = state.get("z", torch.zeros(full.shape)) * 0.9 + full
            parameter.sub_(grad / float(1 + state["z"].abs().sum()))


class OnMesh(OneGroup):
    """Keeps DTensors without dims, as Adam-mini does, of rows, and of the parameter's shape, of which each rank has
    all, beside one that is sharded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            found = {"mean": grad.square().mean(), "rows": grad.square().sum(-1, keepdim=True), "all": grad.abs()}
            for key, value in found.items():
                if isinstance(value, DTensor):
                    value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
                    assert state.get(key, value).placements == value.placements
                state[key] = value if key not in state else state[key] * 0.9 + value
            state["sum"] = state.get("sum", torch.zeros_like(parameter)) + grad
            parameter.sub_(grad / (1 + state["mean"]) * 0.1)


def job(kind: Callable[[Any], Any], seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if dist.is_initialized():
        fully_shard(model)
    return model, kind(model.parameters())


def train(model: nn.Module, optimizer: Any, *steps: int) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: Any) -> Any:
    state = reshard.get_state_dict(model, optimizer)
    return whole({"model": state[0], "state": state[1]["state"]})


def whole(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: whole(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [*map(whole, nest)]
    return (nest.full_tensor() if isinstance(nest, DTensor) else nest).clone()


def save(kind: Callable[[Any], Any], path: Path, job: Callable[..., Any] = job) -> tuple[Any, Any]:
    one = job(kind, 0)
    train(*one, 1, 2, 3)
    saved = values(*one)
    reshard.save(dict(zip(("model", "optim"), reshard.get_state_dict(*one))), path)
    train(*one, 4, 5)
    return saved, values(*one)


def resume(kind: Callable[[Any], Any], path: Path, job: Callable[..., Any] = job) -> tuple[Any, Any]:
    one = job(kind, 1)
    state = dict(zip(("model", "optim"), reshard.get_state_dict(*one)))
    assert reshard.load(state, path).ok
    reshard.set_state_dict(*one, model_state_dict=state["model"], optim_state_dict=state["optim"])
    loaded = values(*one)
    train(*one, 4, 5)
    return loaded, values(*one)


@pytest.mark.parametrize("kind", [Whole, Beside, OnMesh])
def test_a_fresh_optimizer_continues_with_state_placed_as_it_was(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    saved, later = gloo.run(save, 2, kind, tmp_path / "x")[0]
    loaded, continued = gloo.run(resume, 2, kind, tmp_path / "x")[0]
    assert same(loaded, saved)
    assert same(continued, later)
    assert same(gloo.run(resume, 3, kind, tmp_path / "x")[0][0], saved)
    assert same(resume(kind, tmp_path / "x")[0], saved)


def hand_over(kind: Callable[[Any], Any]) -> tuple[Any, Any]:
    one, other = job(kind, 0), job(kind, 1)
    train(*one, 1, 2, 3)
    model, optimizer = reshard.get_state_dict(*one)
    reshard.set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
    train(*other, 4, 5)
    flat = reshard.StateDictOptions(flatten_optimizer_state_dict=True)
    third = job(kind, 2)
    model, optimizer = reshard.get_state_dict(*one, options=flat)
    reshard.set_state_dict(*third, model_state_dict=model, optim_state_dict=optimizer)
    train(*one, 4, 5)
    train(*third, 4, 5)
    assert same(values(*third), values(*one))
    return values(*one), values(*other)


@pytest.mark.parametrize("kind", [Beside, OnMesh, Whole, Alone])
def test_state_that_is_handed_over_is_placed_as_it_was(kind: Callable[[Any], Any]) -> None:
    for one, other in gloo.run(hand_over, 2, kind):
        assert same(one, other)


def test_state_that_was_saved_without_sharding_becomes_dtensors_where_it_has_dims(tmp_path: Path) -> None:
    saved, _ = save(Rows, tmp_path / "x")
    loaded, _ = gloo.run(resume, 2, Rows, tmp_path / "x")[0]
    assert same(loaded, saved)


class Rows(OneGroup):
    """Keeps what arithmetic makes of the parameter, as torch's Adafactor does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            rows = grad.square().sum(-1, keepdim=True)
            state["rows"] = rows if "rows" not in state else state["rows"] * 0.9 + rows
            parameter.sub_(grad * 0.1)


class Divided(torch.optim.Optimizer):
    """Divides its state among the ranks, beside unsharded parameters, and loads it in place, as Shampoo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for parameter in self.param_groups[0]["params"]:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self.state[parameter] = {"sums": {"first": distribute_tensor(zeros, mesh, [Shard(0)])}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            sums = self.state[parameter]["sums"]["first"]
            sums += distribute_tensor(parameter.grad, sums.device_mesh, sums.placements)
            parameter.sub_(sums.full_tensor() * 0.1)

    def load_state_dict(self, state_dict: Any) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["sums"]["first"].copy_(state_dict["state"][number]["sums"]["first"])


def replicated(kind: Callable[[Any], Any], seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 6)
    return model, kind(model.parameters())


def test_an_optimizer_that_loads_itself_gets_dtensors_where_it_has_some_beside_plain_parameters(tmp_path: Path) -> None:
    saved, later = gloo.run(save, 2, Divided, tmp_path / "x", replicated)[0]
    loaded, continued = gloo.run(resume, 2, Divided, tmp_path / "x", replicated)[0]
    assert same(loaded, saved)
    assert same(continued, later)
    assert same(gloo.run(resume, 3, Divided, tmp_path / "x", replicated)[0][0], saved)


class Scaled(nn.Module):
    """With a parameter that is a DTensor without dims."""

    def __init__(self, *, on_mesh: bool = True) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        scale, bias = torch.tensor(2.0), torch.ones(3)
        if on_mesh:
            scale, bias = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (scale, bias))
        self.scale, self.bias = nn.Parameter(scale), nn.Parameter(bias)


def stepped(kind: Any, *, steps: int, on_mesh: bool = True) -> tuple[nn.Module, Any]:
    model = Scaled(on_mesh=on_mesh)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def without_dims(folder: str) -> None:
    whole = reshard.StateDictOptions(full_state_dict=True)
    for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD):
        model, optimizer = stepped(kind, steps=1)
        path = f"{folder}/{kind.__name__}"
        reshard.save({"o": reshard.get_optimizer_state_dict(model, optimizer)}, path)
        wanted = {key: type(value) for key, value in optimizer.state[model.scale].items()}
        for way in ("sharded", "whole", "plain", "load", "load into state"):
            other, its = stepped(kind, steps=int(way == "load into state"))
            if way.startswith("load"):
                state = {"o": reshard.get_optimizer_state_dict(other, its)}
                reshard.load(state, path)
                given = state["o"]
            elif way == "plain":
                given = reshard.get_optimizer_state_dict(*stepped(kind, steps=1, on_mesh=False))
            else:
                options = whole if way == "whole" else None
                given = reshard.get_optimizer_state_dict(model, optimizer, options=options)
            reshard.set_optimizer_state_dict(other, its, given)
            found = {key: type(value) for key, value in its.state[other.scale].items()}
            assert found == wanted, (kind, way, found)
            step(other, its)
        other, its = stepped(kind, steps=0, on_mesh=False)
        reshard.set_optimizer_state_dict(other, its, reshard.get_optimizer_state_dict(model, optimizer))
        assert {type(value) for value in its.state[other.scale].values()} == {torch.Tensor}


def test_state_of_a_dtensor_without_dims_is_a_dtensor(tmp_path: Path) -> None:
    gloo.run(without_dims, 2, str(tmp_path))


class Factors(OneGroup):
    """Keeps unsharded factors in a list and a dict beside a DTensor, as SOAP does, and a step of one element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            full = (grad.full_tensor() if isinstance(grad, DTensor) else grad).reshape(len(grad), -1)
            found = [full @ full.T, full.T @ full]
            moments, before = state.setdefault("moments", {}), state.get("factors", found)
            moments["exp_avg"] = moments.get("exp_avg", torch.zeros_like(parameter)) * 0.9 + grad
            state["factors"] = [one * 0.9 + other for one, other in zip(before, found)]
            state["step"] = state.get("step", torch.zeros(1)) + 1
            state["by_name"] = dict(zip(("left", "right"), state["factors"]))
            scale = sum(float(one.abs().sum()) for one in state["factors"]) + float(state["step"])
            parameter.sub_(moments["exp_avg"] / (1 + scale))


class Projected(OneGroup):
    """Keeps unsharded tensors of the parameter's shape of matrices, as a projection of full rank, and DTensors of the
    rest; or of all parameters DTensors of which each rank has all."""

    is_on_mesh = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            if isinstance(grad, DTensor) and (self.is_on_mesh or grad.dim() > 1):
                whole = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
                state["sum"] = state.get("sum", 0) + (whole if self.is_on_mesh else whole.to_local())
                assert state["sum"].shape == parameter.shape
            else:
                state["sum"] = state.get("sum", 0) + grad
            parameter.sub_(grad * 0.01)


class Replicated(Projected):
    is_on_mesh = True


def square(kind: Callable[[Any], Any], seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    if dist.is_initialized():
        fully_shard(model)
    return model, kind(model.parameters())


@pytest.mark.parametrize("kind", [Factors, Projected, Replicated])
def test_state_of_square_parameters_continues_as_it_was(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    saved, later = gloo.run(save, 2, kind, tmp_path / "x", square)[0]
    for loaded, continued, placed, wanted in gloo.run(resume_square, 2, kind, tmp_path / "x"):
        assert same(loaded, saved)
        assert same(continued, later)
        assert placed == wanted
    assert same(gloo.run(resume, 3, kind, tmp_path / "x", square)[0][0], saved)


def resume_square(kind: Callable[[Any], Any], path: Path) -> tuple[Any, ...]:
    made: list[Any] = []

    def kept(*how: Any) -> Any:
        made.append(square(*how))
        return made[0]

    found, other = resume(kind, path, kept), square(kind, 2)
    train(*other, 1)
    return *found, forms(*made[0]), forms(*other)


FULL = reshard.StateDictOptions(full_state_dict=True)


def forms(model: nn.Module, optimizer: Any) -> list[Any]:
    """What each state tensor is."""
    kept = [leaves_of(optimizer.state[one]) for one in model.parameters() if one in optimizer.state]
    return [
        {path: (value.placements if isinstance(value, DTensor) else None) for path, value in one.items()}
        for one in kept
    ]


def full_into_stepped(kind: Callable[[Any], Any]) -> None:
    for way in ("handed over", "broadcast"):
        one, other = square(kind, 0), square(kind, 1)
        train(*one, 1, 2, 3)
        train(*other, 7)
        state, options = reshard.get_state_dict(*one, options=FULL), FULL
        if way == "broadcast":
            options = reshard.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            state = state if dist.get_rank() == 0 else ({}, {})
        reshard.set_state_dict(*other, model_state_dict=state[0], optim_state_dict=state[1], options=options)
        assert forms(*other) == forms(*one), way
        train(*one, 4, 5)
        train(*other, 4, 5)
        assert same(values(*other), values(*one)), way


@pytest.mark.parametrize("kind", [Factors, Projected, Replicated])
def test_an_optimizer_that_has_stepped_keeps_the_form_of_its_state(kind: Callable[[Any], Any]) -> None:
    gloo.run(full_into_stepped, 2, kind)


def replicated_into_fresh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        for name, parameter in [*model.named_parameters()]:
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        return model, Factors(model.parameters())

    one, other = made(), made()
    for parameter in one[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    one[1].step()
    model, optimizer = reshard.get_state_dict(*one)
    reshard.set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
    assert forms(*other) == forms(*one)


def test_unsharded_state_of_replicated_parameters_stays_so_where_it_is_handed_over() -> None:
    gloo.run(replicated_into_fresh, 2)


def frozen_first(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def full_into_fresh(path: Path) -> None:
    one = frozen_first(0)
    train(*one, 1, 2, 3)
    model, optimizer = reshard.get_state_dict(*one, options=FULL)
    reshard.save({"model": model, "optim": optimizer}, path)
    for way in ("handed over", "loaded"):
        other = frozen_first(1)
        if way == "loaded":
            model, optimizer = reshard.get_state_dict(*other, options=FULL)
            reshard.load({"model": model, "optim": optimizer}, path)
        reshard.set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer, options=FULL)
        assert forms(*other) == forms(*one), way
        train(*other, 4, 5)


def test_a_full_dict_becomes_dtensors_where_parameters_without_state_are_in_it(tmp_path: Path) -> None:
    gloo.run(full_into_fresh, 2, tmp_path / "x")
