"""torch's ZeroRedundancyOptimizer: every rank has the state of some parameters, and all together are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reshard
from reshard.errors import NormalizationError
from tests import gloo
from tests.same import same

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of torch: not ours to mend


def job(seed: int, steps: int, *, is_sharded: bool) -> tuple[nn.Module, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    parameters = [*model.parameters()]
    if is_sharded:
        optimizer: Any = ZeroRedundancyOptimizer(parameters[:3], torch.optim.AdamW, lr=0.01)
        optimizer.add_param_group({"params": parameters[3:], "weight_decay": 0.1})
    else:
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer), strict=True))


def goes_on(folder: Path, steps: int, *, is_sharded: bool) -> bool:
    """Whether what resumes after so many steps of its own does the step that a run without a break does."""
    model, optimizer = job(1, steps, is_sharded=is_sharded)
    state = state_of(model, optimizer)
    reshard.load(state, folder)
    reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    step(model, optimizer)
    wanted, _ = job(0, 3, is_sharded=False)
    return same(dict(reshard.get_model_state_dict(wanted)), dict(reshard.get_model_state_dict(model)))


def swap(text: str) -> list[Any]:
    folder = Path(text)
    model, optimizer = job(0, 2, is_sharded=True)
    reshard.save(state_of(model, optimizer), folder / "zero")
    plain = job(0, 2, is_sharded=False)
    reshard.save(state_of(*plain), folder / "plain")
    found = [
        goes_on(folder / name, steps, is_sharded=is_sharded)
        for name in ("zero", "plain")
        for steps, is_sharded in ((0, True), (1, True), (0, False))
    ]
    own = reshard.get_optimizer_state_dict(model, optimizer)["state"]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        whole = reshard.get_optimizer_state_dict(model, optimizer)["state"]
        found.append(same(dict(whole), dict(reshard.get_optimizer_state_dict(*plain)["state"])))
    return [len(own) < 4, *found]


def gathered(seed: int) -> list[Any]:
    """Whether each rank has what options of full state dicts promise: all of it, or on the first rank only."""
    job_of_all, plain = job(seed, 2, is_sharded=True), job(seed, 2, is_sharded=False)
    found = []
    for more in ({}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}):
        options = reshard.StateDictOptions(full_state_dict=True, **more)
        ours, theirs = (dict(reshard.get_optimizer_state_dict(*one, options=options)) for one in (job_of_all, plain))
        for state in (ours, theirs):
            state.pop("param_groups", None)
            assert list(state.get("state", {})) == list(theirs.get("state", {}))
        states = [{k: v for k, v in of.items() if not k.startswith("param_groups")} for of in (ours, theirs)]
        found.append(same(*states))
        found.append(len(ours.get("state", ours)))
    job_of_all[1].consolidate_state_dict(to=0)
    options = reshard.StateDictOptions(full_state_dict=True)
    return [*found, len(reshard.get_optimizer_state_dict(*job_of_all, options=options)["state"])]


def test_full_state_dicts_have_the_state_of_all_ranks() -> None:
    first, second = gloo.run(gathered, 2, 0)

    assert first[0::2] == [True, True, True, 4]
    assert second[0::2] == [True, True, True, 4]
    assert [first[1], first[3], second[1]] == [4, 4, 4]
    assert first[5] == second[5] > 12  # three tensors of each parameter, and fields


def through_a_manager(text: str) -> list[bool]:
    model, optimizer = job(0, 2, is_sharded=True)
    with reshard.CheckpointManager(text, every=reshard.Every(steps=1)) as manager:
        manager.save(1, {"model": model, "optim": optimizer})
    wanted, _ = job(0, 3, is_sharded=False)
    found = []
    for steps in (0, 1):
        other, its = job(1, steps, is_sharded=True)
        with reshard.CheckpointManager(text, every=reshard.Every(steps=1)) as manager:
            manager.restore({"model": other, "optim": its})
        step(other, its)
        found.append(same(dict(reshard.get_model_state_dict(wanted)), dict(reshard.get_model_state_dict(other))))
    return found


def test_a_manager_resumes_it(tmp_path: Path) -> None:
    assert gloo.run(through_a_manager, 2, str(tmp_path)) == [[True, True]] * 2


def test_state_is_saved_and_loaded_without_consolidation(tmp_path: Path) -> None:
    found = gloo.run(swap, 2, str(tmp_path))

    assert found == [[True] * 8, [True] * 7]
    assert goes_on(tmp_path / "zero", 0, is_sharded=False)


def into_a_plain_one(flat: bool) -> list[Any]:
    model, optimizer = job(0, 2, is_sharded=True)
    plain, its = job(1, 0, is_sharded=False)
    options = reshard.StateDictOptions(flatten_optimizer_state_dict=flat)
    own = reshard.get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(NormalizationError, match=r"only rank . has the state of '.*full_state_dict=True") as refused:
        reshard.set_optimizer_state_dict(plain, its, own)
    assert not its.state
    reshard.set_optimizer_state_dict(model, optimizer, own)
    whole = reshard.StateDictOptions(full_state_dict=True)
    reshard.set_optimizer_state_dict(plain, its, reshard.get_optimizer_state_dict(model, optimizer, options=whole))
    return [str(refused.value), len(its.state)]


@pytest.mark.parametrize("flat", [False, True])
def test_the_state_of_one_rank_is_refused_where_all_need_it(flat: bool) -> None:
    assert [count for _, count in gloo.run(into_a_plain_one, 2, flat)] == [4, 4]
