"""Truth by construction: under every layout, the canonical state equals that of the plain model trained alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests import gloo
from tests.reshard.state_dict import zoo
from tests.same import assert_same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

FULL = StateDictOptions(full_state_dict=True)


def ordered(optim_state: dict) -> dict:
    """With names in one order: FSDP1 gives an optimizer its parameters unit by unit."""
    groups = [{**group, "params": sorted(group["params"])} for group in optim_state["param_groups"]]
    return {"state": dict(sorted(optim_state["state"].items())), "param_groups": groups}


def check_layout(layout: Any, optimizer: str, close: bool, **sizes: Any) -> None:
    """Get equals the truth and changes nothing; set after get is identity on a differently initialised model."""
    wanted_model, wanted_optim = zoo.truth(optimizer, **sizes)
    model = layout(zoo.make(0, **sizes))
    opt = zoo.OPTIMIZERS[optimizer](model.parameters())
    zoo.train(model, opt)
    before = zoo.snapshot(model, opt)
    model_state, optim_state = get_state_dict(model, opt, options=FULL)
    assert_same(zoo.snapshot(model, opt), before)
    assert_same(model_state, wanted_model, close)
    assert_same(ordered(optim_state), ordered(wanted_optim), close)
    flat = get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))

    other = layout(zoo.make(1, **sizes))
    other_opt = zoo.OPTIMIZERS[optimizer](other.parameters())
    set_model_state_dict(other, get_model_state_dict(model))  # sharded alike, local copies
    set_optimizer_state_dict(other, other_opt, flat)
    assert_same(get_state_dict(other, other_opt, options=FULL), (model_state, optim_state))

    third = layout(zoo.make(2, **sizes))
    third_opt = zoo.OPTIMIZERS[optimizer](third.parameters())
    zoo.train(third, third_opt, 1)
    report = set_state_dict(
        third, third_opt, model_state_dict=model_state, optim_state_dict=optim_state, options=FULL
    )  # whole tensors, cut locally
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())
    assert set(report.untouched) == {f"layers.{i}.scratch" for i in range(2)}
    assert_same(get_state_dict(third, third_opt, options=FULL), (model_state, optim_state))
    zoo.train(third, third_opt, 1)
    zoo.train(model, opt, 1)
    assert_same(get_model_state_dict(third, options=FULL), get_model_state_dict(model, options=FULL), close)


TWO = [
    (zoo.plain, False),
    (zoo.ddp, False),
    (zoo.fsdp2, False),
    (zoo.tp, True),
    (zoo.compiled, False),
    (zoo.compiled_parts, False),
    (zoo.checkpointed, False),
    (zoo.nested(zoo.checkpointed, zoo.compiled, zoo.ddp), False),
    (zoo.nested(zoo.checkpointed, zoo.fsdp2, zoo.compiled), False),
    (zoo.nested(zoo.compiled_parts, zoo.checkpointed, zoo.ddp, zoo.compiled), False),
    (zoo.nested(zoo.tp, zoo.checkpointed, zoo.compiled), True),
]
TWO = [(layout, close) for layout, close in TWO if FSDP2_TRAINS_ON_CPUS or "fsdp2" not in layout.__name__]
FOUR = [(zoo.fsdp2, False), (zoo.hsdp, False), (zoo.fsdp2_tp, True), (zoo.nested(zoo.fsdp2_tp, zoo.compiled), True)]


FSDP1_TWO = [
    (zoo.fsdp1(strategy, use_orig_params), False)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for use_orig_params in (False, True)
] + [(zoo.nested(zoo.checkpointed, zoo.fsdp1("FULL_SHARD", True), zoo.compiled), False)]
FSDP1_FOUR = [
    (zoo.fsdp1(strategy, use_orig_params), False)
    for strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for use_orig_params in (False, True)
]


def run_layouts(world: str) -> None:
    torch.manual_seed(5)
    for layout, close in {"two": TWO, "four": FOUR, "fsdp1 two": FSDP1_TWO, "fsdp1 four": FSDP1_FOUR}[world]:
        even, uneven = {"hidden": 8, "tied": not close}, {"hidden": 10 if close else 9}
        for optimizer, sizes in (("sgd", even), ("adamw", uneven)):
            try:
                check_layout(layout, optimizer, close, **sizes)
            except Exception as error:
                error.add_note(f"layout {layout.__name__}, {sizes}, rank {dist.get_rank()}")
                raise


@pytest.mark.not_simulated("some are compiled, which would trace its kernels")
@pytest.mark.gloo
def test_layouts_of_two_ranks_equal_the_plain_model() -> None:
    gloo.run(run_layouts, 2, "two")


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.not_simulated("some are compiled, which would trace its kernels")
@pytest.mark.gloo
def test_layouts_of_four_ranks_equal_the_plain_model() -> None:
    gloo.run(run_layouts, 4, "four")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.not_simulated("one is compiled, which would trace its kernels")), 4]
)
def test_fsdp1_equals_the_plain_model(world: int) -> None:
    gloo.run(run_layouts, world, "fsdp1 two" if world == 2 else "fsdp1 four")
