"""Memory that states share with one another and with the model: kept, or named, and never written over in silence."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reshard.errors import KeyMismatchError, NormalizationError
from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from reshard.state_dict.model import Spans, all_apart, overlapping, spans_of
from tests import gloo
from tests.reshard.state_dict import zoo
from tests.reshard.state_dict.test_optimizers import LENIENT
from tests.same import assert_same


class Master(torch.optim.Optimizer):
    """A master copy that is the parameter where that is float32, and one step count for all."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        count = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"step": count, "master": p.data, "momentum": torch.ones_like(p)}
        next(iter(self.state.values()))["step"].add_(1)


def _pair(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    optimizer = Master(model.parameters())
    optimizer.step()
    return model, optimizer


def _tied(model, optimizer) -> bool:
    state = [optimizer.state[p] for p in model.parameters()]
    return state[0]["step"] is state[1]["step"] and all(
        values["master"].data_ptr() == p.data_ptr() for p, values in optimizer.state.items()
    )


def test_state_that_is_the_parameter_or_shared_by_all_is_so_again_in_another_model() -> None:
    model, optimizer = _pair()
    model_state, state = get_state_dict(model, optimizer)
    other = nn.Linear(2, 2)
    fresh = Master(other.parameters())
    report = set_state_dict(other, fresh, model_state_dict=model_state, optim_state_dict=state)
    assert report.optimizer.untied == ()
    assert _tied(other, fresh)
    assert other.weight.data_ptr() != model.weight.data_ptr()
    assert_same(get_state_dict(other, fresh), (model_state, state))


@pytest.mark.parametrize("running", [False, True])
def test_state_that_is_a_buffer_is_so_again_or_named(running: bool) -> None:
    models = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers):
        model.register_buffer("table", torch.rand(2, 3))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    optimizers[0].state[models[0].weight]["exp_avg"] = models[0].table
    if not running:
        optimizers[1].state.clear()
    model_state, state = get_state_dict(models[0], optimizers[0])
    report = set_state_dict(models[1], optimizers[1], model_state_dict=model_state, optim_state_dict=state)
    found = optimizers[1].state[models[1].weight]["exp_avg"]
    assert torch.equal(found, models[0].table)
    assert report.optimizer is not None
    assert (found.data_ptr() == models[1].table.data_ptr()) is not running
    assert report.optimizer.untied == (("weight.exp_avg",) if running else ())


def test_without_its_model_a_master_copy_is_one_of_its_own_and_the_model_is_left_alone() -> None:
    model, optimizer = _pair()
    other, running = _pair(1)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    before = copy.deepcopy(get_model_state_dict(other))
    report = set_optimizer_state_dict(other, running, state)
    assert set(report.untied) == {"weight.master", "bias.master"}  # the parameters have other values
    assert_same(get_model_state_dict(other), before)
    assert_same(get_optimizer_state_dict(other, running)["state"], state["state"])


def test_values_that_differ_are_not_written_over_one_another() -> None:
    model, optimizer = _pair()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    state["state"]["bias"]["step"] = torch.tensor(5.0)
    report = set_optimizer_state_dict(model, optimizer, state)
    assert report.untied == ("bias.step",)
    assert [float(values["step"]) for values in optimizer.state.values()] == [1.0, 5.0]


def test_state_and_weights_swapped_by_name_are_swapped() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    model_state, state = get_state_dict(model, optimizer)

    def swap(name: str) -> str:
        return f"{1 - int(name[0])}{name[1:]}"

    given = {swap(name): value for name, value in model_state.items()}
    groups = state["param_groups"]
    given_state = {"state": {swap(name): values for name, values in state["state"].items()}, "param_groups": groups}
    wanted = copy.deepcopy((given, given_state))
    set_state_dict(model, optimizer, model_state_dict=given, optim_state_dict=given_state)
    assert_same(dict(sorted(get_model_state_dict(model).items())), dict(sorted(wanted[0].items())))
    found = get_optimizer_state_dict(model, optimizer)["state"]
    assert_same(dict(sorted(found.items())), dict(sorted(wanted[1]["state"].items())))


def test_places_of_the_model_that_share_memory_take_no_two_values() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("row", model.weight.detach()[1])
    given = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    set_model_state_dict(model, given)
    given["row"] += 1
    before = copy.deepcopy(get_model_state_dict(model))
    for options in (None, LENIENT):
        with pytest.raises(KeyMismatchError, match="weight: shares memory with another entry"):
            set_model_state_dict(model, given, options=options)
    assert_same(get_model_state_dict(model), before)


@pytest.mark.not_simulated("it has no sparse tensors")
def test_only_what_overlaps_is_found() -> None:
    flat = torch.zeros(12)
    one, two, apart, across = flat[:4], flat[:4].view(2, 2), flat[4:8], flat[6:10]
    assert overlapping([flat[:4], flat[4:8], flat[8:]]) == []
    assert overlapping([apart, one, torch.zeros(4), two, across]) == [[1, 3], [0, 4]]
    assert overlapping([flat[:0], flat[:0], torch.empty(3, device="meta"), torch.empty(3, device="meta")]) == []
    assert overlapping([torch.eye(2).to_sparse()] * 2) == []


@pytest.mark.parametrize("agree", [False, True])
def test_several_storages_of_one_memory_overlap(agree: bool) -> None:
    memory = np.zeros(8, np.float32)
    module = nn.Module()
    for name, part in (("whole", memory), ("tail", memory[4:]), ("again", memory)):
        module.register_buffer(name, torch.from_numpy(part))
    given = {"whole": torch.arange(8.0), "tail": torch.arange(4.0, 8.0), "again": torch.arange(8.0)}
    if agree:
        set_model_state_dict(module, given)
        assert memory.tolist() == list(range(8))
    else:
        given["tail"] += 1
        with pytest.raises(KeyMismatchError, match="shares memory with another entry that gets another value"):
            set_model_state_dict(module, given)
        assert not memory.any()


@pytest.mark.not_simulated("it has no sparse tensors")
def test_tensors_are_apart_only_if_none_of_them_overlap() -> None:
    flat, memory = torch.zeros(12), np.zeros(12)
    one, strided = torch.zeros(6), flat.view(3, 4)[:, :2]
    apart = [flat[:2], flat[2:5], flat[5:9], flat[:0], flat[:0], torch.empty(3, device="meta"), one]
    assert all_apart(apart * 1 + [torch.empty(3, device="meta"), torch.eye(2).to_sparse()], Spans())
    assert all_apart([], Spans())
    for tensor in (flat[4:6], flat[8:], flat[1:2].expand(3), strided, strided.t(), flat, nn.Parameter(flat[3])):
        assert not all_apart([*apart, tensor], Spans())
        assert not all_apart([torch.eye(2).to_sparse(), *apart, tensor], Spans())
        spans = spans_of([tensor])
        assert spans is not None
        assert not all_apart(apart, spans)
    assert not all_apart([torch.from_numpy(memory[:5]), torch.from_numpy(memory[4:])], Spans()), "of two storages"
    assert spans_of([one, torch.eye(2).to_sparse()]) is None


def run_flat_parameters() -> None:
    """The pieces of a flat parameter have one step count; the parameters of another model each have their own."""
    model = zoo.fsdp1("FULL_SHARD", False)(zoo.make(0, hidden=9))
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    zoo.train(model, optimizer, 2)
    for options in (None, StateDictOptions(full_state_dict=True)):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        steps = [values["step"].data_ptr() for values in state["state"].values()]
        assert len(set(steps)) == len(steps)
    plain = zoo.make(1, hidden=9)
    fresh = zoo.OPTIMIZERS["adamw"](plain.parameters())
    set_optimizer_state_dict(plain, fresh, state)
    zoo.train(plain, fresh, 1)
    assert {float(values["step"]) for values in fresh.state.values()} == {3.0}


@pytest.mark.gloo
def test_a_step_count_of_a_flat_parameter_is_not_shared_by_the_parameters_of_another_model() -> None:
    gloo.run(run_flat_parameters, 2)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex32, torch.float8_e5m2, torch.bfloat16])
def test_copies_of_a_tied_tensor_may_have_nan(dtype: torch.dtype) -> None:
    """torch.equal knows neither NaN nor complex numbers of 32 bits."""
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    model.b = model.a
    value = torch.tensor([float("nan"), 1.0]).to(dtype)
    assert set_model_state_dict(model, {"a": value, "b": value.clone()}).missing == ()
    assert model.a[0].float().isnan() if not dtype.is_complex else model.a.real.isnan()[0]
    with pytest.raises(KeyMismatchError, match="different values"):
        set_model_state_dict(model, {"a": value, "b": torch.zeros_like(value)})


def test_a_view_of_a_tensor_may_have_nan() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 2))
    model.register_buffer("row", model.w.data[0])
    value = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    assert set_model_state_dict(model, {"w": value, "row": value[0].clone()}).missing == ()
    with pytest.raises(KeyMismatchError, match="shares memory"):
        set_model_state_dict(model, {"w": value, "row": value[1].clone()})


def test_conjugated_views_of_the_same_memory_differ() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    model.b = model.a
    value = torch.tensor([1 + 2j])
    with pytest.raises(KeyMismatchError, match="different values"):
        set_model_state_dict(model, {"a": value, "b": value.conj()})


def test_fields_of_groups_may_be_arrays() -> None:
    model = nn.Linear(2, 2)

    def made(other: float) -> torch.optim.Optimizer:
        groups = [{"params": [p], "x": np.array([1.0, x])} for p, x in zip(model.parameters(), (float("nan"), other))]
        return torch.optim.SGD(groups, lr=0.1)

    one = torch.optim.SGD(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, one, get_optimizer_state_dict(model, made(float("nan"))))
    assert one.param_groups[0]["x"][0] == 1
    with pytest.raises(NormalizationError, match="different values of 'x'"):
        set_optimizer_state_dict(model, one, get_optimizer_state_dict(model, made(2.0)))


class _Sharing(nn.Module):
    """Two names of one parameter, and a buffer that is its first row; or a module of the same names without ties."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(2, 2))
        self.other = self.one if shares else nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("row", self.one.detach()[0] if shares else torch.zeros(2))


def _differing_from_rank_0(name: str, shares: list[bool], cut: bool) -> tuple[str, Any]:
    given = {"one": torch.ones(2, 2), "other": torch.ones(2, 2), "row": torch.ones(2)}
    given[name] = given[name] * 2
    model = _Sharing(shares[dist.get_rank()])
    if cut:
        mesh = init_device_mesh("cpu", (2,))
        model.one = model.other = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(model, given if dist.get_rank() == 0 else {}, options=options)
    except KeyMismatchError as error:
        return str(error), [
            bool(tensor.to_local().any() if isinstance(tensor, DTensor) else tensor.any())
            for tensor in get_model_state_dict(model).values()
        ]
    return "no error", None


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "shares", "cut"),
    [
        ("other", [True, True], False),
        ("row", [True, True], False),
        ("other", [False, True], False),
        ("row", [False, True], False),
        ("other", [True, True], True),
    ],
)
def test_two_values_of_rank_0_for_one_memory_of_any_rank_are_refused_by_all(
    name: str, shares: list[bool], cut: bool
) -> None:
    for heard, written in gloo.run(_differing_from_rank_0, 2, name, shares, cut):
        assert "shares memory with another entry" in heard
        assert not any(written)
