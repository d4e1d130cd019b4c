"""Buffers that each rank updates by itself, such as the running means of batch norm: DistributedDataParallel gives all
ranks those of the first one before the next forward pass, so a save takes these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reshard
from reshard import dcp
from reshard.errors import KeyMismatchError
from tests import gloo
from tests.same import same

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of torch: not ours to mend


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def job(seed: int, **options: Any) -> dict[str, Any]:
    model = DistributedDataParallel(net(seed), **options)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(state: dict[str, Any], *steps: int) -> None:
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        state["model"](torch.randn(5, 4)).square().sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def resume(root: Path) -> None:
    state = job(0)
    train(state, 1, 2, 3)
    mean = state["model"].module[1].running_mean
    means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean)
    assert not torch.equal(means[0], means[1])
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        manager.save(3, state)
        manager.wait()
    found = reshard.open(root)
    assert torch.equal(found["model.1.running_mean"][...], means[0])
    train(state, 4, 5)
    fresh = job(1)
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        report = manager.restore(fresh)
    assert report is not None
    assert report.step == 3
    assert torch.equal(fresh["model"].module[1].running_mean, means[0])
    train(fresh, 4, 5)
    assert same(values(fresh["model"]), values(state["model"]))


def test_a_run_resumes_with_equal_steps_from_the_buffers_of_the_first_rank(tmp_path: Path) -> None:
    gloo.run(resume, 2, tmp_path)


def save(path: Path) -> dict[str, torch.Tensor]:
    state = job(0)
    train(state, 1, 2)
    model = reshard.get_model_state_dict(state["model"])
    one = model["1.running_var"]
    assert one.data_ptr() == state["model"].module[1].running_var.data_ptr()  # reading copies nothing
    assert not hasattr(state["model"].module[1].running_var, "_reshard_overwritten_by")  # and edits nothing
    reshard.save({"model": model, "again": {"var": one}}, path)
    reshard.async_save({"model": model}, path.with_name("async")).result()
    reshard.save({"model": model}, path.with_name(f"alone{dist.get_rank()}"), alone=True)
    return values(state["model"].module)


def test_a_state_dict_has_the_buffers_of_the_first_rank_and_one_rank_alone_saves_its_own(tmp_path: Path) -> None:
    first, second = gloo.run(save, 2, tmp_path / "all")
    assert reshard.verify(tmp_path / "all").ok
    assert not same(first, second)
    for name, want in (("all", first), ("async", first), ("alone0", first), ("alone1", second)):
        model = net(7)
        state = {"model": reshard.get_model_state_dict(model)}
        assert reshard.load(state, tmp_path / name, strict={"*": "subset"} if name == "all" else True).ok
        reshard.set_model_state_dict(model, state["model"])
        assert same(values(model), want), name
    assert torch.equal(reshard.open(tmp_path / "all")["again.var"][...], first["1.running_var"])


def of_stages(path: Path) -> dict[str, torch.Tensor]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    state = job(stage, process_group=pairs[stage])
    train(state, 1, 2)
    reshard.save({f"stage{stage}": reshard.get_model_state_dict(state["model"])}, path)
    return values(state["model"].module)


def test_the_first_rank_is_that_of_the_models_own_process_group(tmp_path: Path) -> None:
    by_rank = gloo.run(of_stages, 4, tmp_path / "x")
    found = reshard.open(tmp_path / "x")
    for stage in (0, 1):
        for name, value in by_rank[2 * stage].items():
            assert torch.equal(found[f"stage{stage}.{name}"][...], value)
    assert not same(by_rank[2], by_rank[3])


def without_the_first(path: Path) -> None:
    others = dist.new_group([1, 2])
    state = job(0)
    train(state, 1)
    if dist.get_rank():
        with pytest.raises(KeyMismatchError, match=r"model\.1\.running_mean"):
            reshard.save({"model": reshard.get_model_state_dict(state["model"])}, path, process_group=others)
    dist.barrier()


def test_buffers_are_compared_where_the_first_rank_takes_no_part(tmp_path: Path) -> None:
    gloo.run(without_the_first, 3, tmp_path / "x")


def own_buffers(path: Path) -> None:
    state = job(0, broadcast_buffers=False)
    train(state, 1)
    with pytest.raises(KeyMismatchError, match=r"broadcast\(buffer, 0\) for each of model\.buffers\(\)"):
        reshard.save({"model": reshard.get_model_state_dict(state["model"])}, path)
    for buffer in state["model"].buffers():
        dist.broadcast(buffer, 0)
    reshard.save({"model": reshard.get_model_state_dict(state["model"])}, path)


def test_buffers_that_no_rank_overwrites_are_refused_and_the_error_says_how_to_give_them_one_value(
    tmp_path: Path,
) -> None:
    gloo.run(own_buffers, 2, tmp_path / "x")


def transfers(path: Path) -> None:
    state = job(0)
    train(state, 1, 2)
    model = reshard.get_model_state_dict(state["model"])
    kept = {name: value.detach().clone() for name, value in model.items()}
    assert not same(kept["1.running_mean"], on_first(kept["1.running_mean"])) or not dist.get_rank()
    first = {name: on_first(value) for name, value in kept.items()}
    reshard.save({"model": model}, path)

    assert reshard.fingerprint({"model": model}) == reshard.open(path).fingerprints
    for wanted in ({"model": model}, model["1.running_mean"]):  # and where nothing else is in the container
        held = {"source": wanted, "weight": model["0.weight"]}
        target = nest(held, torch.zeros_like)
        assert not reshard.verify_live(held, target).ok
        reshard.redistribute(held, target, check=True)
        assert same(target["source"], {"model": first} if isinstance(wanted, dict) else first["1.running_mean"])
    prepared = reshard.prepare({"model": model}, target := {"model": nest(kept, torch.zeros_like)})
    prepared.run()
    train(state, 3)
    prepared.run()
    assert same(target["model"], {name: on_first(value) for name, value in model.items()})
    weights = dict(reshard.WeightSource(model, all_ranks=True).iter_full())
    assert same(weights, {name: on_first(value) for name, value in model.items()})
    assert not same(dict(model), weights) or not dist.get_rank()
    reshard.redistribute({"model": kept} if not dist.get_rank() else {}, {"model": model})  # as a target, it is filled
    assert same(dict(model), first)


def on_first(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.broadcast(value, 0)
    return value


def nest(value: Any, make: Any) -> Any:
    return {key: nest(inner, make) for key, inner in value.items()} if isinstance(value, dict) else make(value)


def test_fingerprints_and_transfers_take_the_buffers_of_the_first_rank(tmp_path: Path) -> None:
    gloo.run(transfers, 2, tmp_path / "x")


def save_as_dcp(root: Path) -> None:
    state = job(0)
    train(state, 1)
    with torch.no_grad():
        for buffer in state["model"].module[1].buffers():
            buffer.fill_(10 + dist.get_rank())
    given = {"model": reshard.get_model_state_dict(state["model"])}
    dcp.save(given, checkpoint_id=root / "now")
    dcp.async_save(given, checkpoint_id=root / "later").result()
    for folder in ("now", "later"):
        found = reshard.open(root / folder)
        assert {float(found[f"model.1.{name}"][...].flatten()[0]) for name in ("running_mean", "running_var")} == {10.0}


def test_the_drop_in_api_takes_those_of_the_first_rank_too(tmp_path: Path) -> None:
    gloo.run(save_as_dcp, 2, tmp_path)
