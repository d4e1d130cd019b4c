"""What DeepSpeed leaves of a model and its optimizers, by stand-ins that carry the same attributes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from reshard.errors import NormalizationError
from reshard.state_dict import (
    StateDictOptions,
    fqn_map,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    iter_full,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.reshard.state_dict import zoo
from tests.same import assert_same

FULL = StateDictOptions(full_state_dict=True)
ON_ONE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class GatheredParameters:
    """As DeepSpeed's: parameters are whole inside, and empty again behind it."""

    entered = 0

    def __init__(self, parameters: Any, modifier_rank: int | None = None) -> None:
        self.parameters = [p for p in parameters if p.numel() != p.ds_numel]

    def __enter__(self) -> None:
        type(self).entered += 1
        for p in self.parameters:
            p.data = p.ds_tensor.view(p.ds_shape).clone()

    def __exit__(self, *error: Any) -> None:
        for p in self.parameters:
            p.ds_tensor.copy_(p.data.flatten())
            p.data.fill_(-1)  # whoever kept this memory sees it
            p.data = torch.empty(0)


def partition(model: nn.Module) -> None:
    for i, p in enumerate(dict.fromkeys(model.parameters())):
        cut: Any = p
        cut.ds_id, cut.ds_shape, cut.ds_numel = i, p.shape, p.numel()
        cut.ds_tensor = p.detach().flatten().clone()
        p.data = torch.empty(0)


class DeepSpeedEngine(nn.Module):
    """As DeepSpeed's: the model is its child `module`."""

    def __init__(self, module: nn.Module, optimizer: Any = None) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the engine is asked for nothing")


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("deepspeed")
    module.zero = types.SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", module)


def test_the_engine_leaves_no_segment_in_names() -> None:
    model = zoo.make(0)
    wanted = get_model_state_dict(model)
    engine = DeepSpeedEngine(model, torch.optim.AdamW(model.parameters()))
    assert_same(get_model_state_dict(engine), wanted)
    state, optim = get_state_dict(engine, engine.optimizer)
    other = zoo.make(1)
    set_state_dict(
        DeepSpeedEngine(other), torch.optim.AdamW(other.parameters()), model_state_dict=state, optim_state_dict=optim
    )
    assert_same(get_model_state_dict(other), wanted)


@pytest.mark.parametrize("wrap", [lambda m: m, DeepSpeedEngine])
def test_partitioned_parameters_are_gathered_or_refused(wrap: Any, deepspeed: None) -> None:
    model = zoo.make(0)
    wanted = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    partition(model)
    live = wrap(model)
    with pytest.raises(NormalizationError, match=r"ZeRO-3 has sharded embed.weight, .*full_state_dict=True"):
        get_model_state_dict(live)
    before = GatheredParameters.entered
    assert_same(get_model_state_dict(live, options=FULL), wanted)
    assert_same(get_model_state_dict(live, options=ON_ONE), wanted)
    assert_same(dict(iter_full(live)), dict(sorted(wanted.items())))
    assert GatheredParameters.entered > before
    assert all(not p.numel() for p in model.parameters())
    assert fqn_map(live)["embed.weight"].shape == tuple(wanted["embed.weight"].shape)
    with GatheredParameters(list(model.parameters())):
        assert_same(get_model_state_dict(live), wanted)


def test_partitioned_parameters_are_not_set_into(deepspeed: None) -> None:
    model, optimizer = zoo.make(0), None
    wanted = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    optimizer = torch.optim.AdamW(model.parameters())
    optim = get_optimizer_state_dict(model, optimizer)
    partition(model)
    calls = [
        lambda: set_model_state_dict(model, wanted),
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, optim),
    ]
    for call in calls:
        with pytest.raises(NormalizationError, match=r"ZeRO-3 has sharded .* load_checkpoint|reshard opens"):
            call()
    for p in model.parameters():
        p.ds_tensor.fill_(7)
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        set_model_state_dict(model, wanted)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


def test_modules_that_read_themselves_are_gathered_too(deepspeed: None) -> None:
    model = zoo.make(0)
    wanted = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    model.layers[0].register_state_dict_post_hook(lambda *args: None)
    partition(model)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


def test_without_deepspeed_gathering_says_what_is_missing() -> None:
    model = zoo.make(0)
    partition(model)
    with pytest.raises(NormalizationError, match="cannot be imported"):
        get_model_state_dict(model, options=FULL)


def test_optimizers_of_flat_partitions_are_refused_by_name() -> None:
    """A client's optimizer, whose groups hold flat partitions now, and what the engine has around it."""
    model = zoo.make(0)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in dict.fromkeys(model.parameters())]))
    client = torch.optim.AdamW([flat])

    class DeepSpeedZeroOptimizer:
        def __init__(self) -> None:
            self.optimizer = client
            self.single_partition_of_fp32_groups = [flat]

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

        @property
        def state(self) -> Any:
            return self.optimizer.state

        def state_dict(self) -> Any:
            return {"loss_scaler": None, "base_optimizer_state": client.state_dict(), "zero_stage": 1}

    around: Any = DeepSpeedZeroOptimizer()
    for optimizer in (client, around):
        for call in (
            lambda: get_optimizer_state_dict(model, optimizer),  # noqa: B023
            lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),  # noqa: B023
        ):
            with pytest.raises(NormalizationError, match=r"has no parameter of the model.*save_checkpoint"):
                call()
    client.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(NormalizationError, match=r"DeepSpeedZeroOptimizer\) has 'loss_scaler', .*'param_groups'"):
        get_optimizer_state_dict(model, around)


@pytest.mark.parametrize(
    "layers",
    [[nn.Linear(3, 2)], [nn.Embedding(4, 2)], [nn.Conv2d(1, 2, 3)], [nn.BatchNorm1d(3)], [nn.Linear(3, 2, bias=False)]],
)
def test_a_model_of_empty_parameters_is_refused_where_its_modules_say_otherwise(layers: list[nn.Module]) -> None:
    model = nn.Sequential(*layers)
    state = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    shapes = [p.shape for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.empty(0)
    for call in (lambda: get_model_state_dict(model), lambda: set_model_state_dict(model, state)):
        with pytest.raises(NormalizationError, match=r"every parameter of the model is empty, but '0.weight' belongs"):
            call()
    for p, shape in zip(model.parameters(), shapes, strict=True):
        p.data = torch.zeros(shape)
    set_model_state_dict(model, state)


def test_a_model_that_is_meant_to_be_empty_is_taken() -> None:
    model = nn.Sequential(nn.Linear(1, 5, bias=False))
    model[0].in_features, model[0].weight = 0, nn.Parameter(torch.empty(5, 0))
    assert get_model_state_dict(model)["0.weight"].shape == (5, 0)
    assert list(get_model_state_dict(nn.Sequential())) == []
