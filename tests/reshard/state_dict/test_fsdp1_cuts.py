"""FSDP1's flat parameters, which cut parameters across rows: what torch's own functions are given, and can take."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as their_dcp
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import reshard
import reshard.dcp.state_dict as ours
from reshard.errors import KeyMismatchError, LayoutError, NormalizationError
from reshard.live.fsdp1 import FlatCut
from tests import gloo
from tests.torch_releases import requires

WHOLE = theirs.StateDictOptions(full_state_dict=True)


def build(seed: int, mesh: str, original: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    world = dist.get_world_size()
    options: dict[str, Any] = {"use_orig_params": original, "device_id": torch.device("cpu")}
    if mesh == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    elif mesh == "first axis":
        options["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "other"))
    elif mesh:
        options["device_mesh"] = init_device_mesh("cpu", (world,))
    inner = FullyShardedDataParallel(nn.Linear(4, 6 * world, bias=False), **options)  # lies in chunks
    body = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), inner, nn.Linear(6 * world, 3), nn.LayerNorm(3))
    model = FullyShardedDataParallel(body, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(seed: int, mesh: str, original: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(seed, mesh, original)
    model(torch.arange(8.0).view(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(theirs: Any, ours: Any, at: str) -> None:
    if isinstance(theirs, dict):
        assert set(theirs) == set(ours), at
        for key, value in theirs.items():
            same(value, ours[key], f"{at}/{key}")
    elif isinstance(theirs, list):
        assert len(theirs) == len(ours), at
    elif isinstance(theirs, DTensor):
        assert type(ours) is DTensor, at
        assert (theirs.placements, theirs.device_mesh, theirs.shape) == (ours.placements, ours.device_mesh, ours.shape)
        assert torch.equal(theirs.to_local(), ours.to_local()), at
    elif hasattr(theirs, "local_shards"):
        assert type(ours) is type(theirs), at
        assert theirs.metadata() == ours.metadata(), at
        pairs = list(zip(theirs.local_shards(), ours.local_shards(), strict=True))
        assert all(a.metadata == b.metadata and torch.equal(a.tensor, b.tensor) for a, b in pairs), at
    else:
        assert torch.equal(theirs, ours) if isinstance(theirs, torch.Tensor) else theirs == ours, at


def run_like_torch(meshes: list[str]) -> None:
    warnings.simplefilter("ignore")
    for mesh, original in itertools.product(meshes, (False, True)):
        if mesh == "first axis" and not original:
            continue  # torch's own get_optimizer_state_dict fails
        model, optimizer = trained(0, mesh, original)
        both = theirs.get_state_dict(model, optimizer)
        got = ours.get_state_dict(model, optimizer)
        for a, b in zip(both, got):
            same(a.get("state", a), b.get("state", b), f"{mesh} {original}")

        again, fresh = build(1, mesh, original)
        theirs.set_state_dict(again, fresh, model_state_dict=got[0], optim_state_dict=copy.deepcopy(got[1]))
        same(theirs.get_model_state_dict(model, options=WHOLE), theirs.get_model_state_dict(again, options=WHOLE), "")
        third, fresh = build(2, mesh, original)
        with counted("all_gather", "all_to_all_single") as calls:
            ours.set_state_dict(third, fresh, model_state_dict=both[0], optim_state_dict=both[1])
        if mesh != "first axis":  # torch cuts along the last one, among other ranks
            assert calls == {"all_to_all_single": 2}, (mesh, original, calls)
        same(both[0], ours.get_model_state_dict(third), "set by ours")
        same(both[1]["state"], ours.get_optimizer_state_dict(third, fresh)["state"], "set by ours")
        same(both[0], _offloaded(model), "offloaded")


@contextmanager
def counted(*names: str) -> Iterator[Counter[str]]:
    """How often this rank calls each of torch.distributed's collectives of these names."""
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            do = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, name=name, do=do, **k: (calls.update([name]), do(*a, **k))[1])
        yield calls


def _offloaded(model: nn.Module) -> Any:
    return ours.get_model_state_dict(model, options=ours.StateDictOptions(cpu_offload=True))


ASKS_META = ".is_meta" in inspect.getsource(theirs._get_model_state_dict)
"""torch 2.6 does, of ShardedTensors too, which answer only where there is one shard."""


@pytest.mark.host_only("torch's chunks of tensors on a device name the CPU where ranks share the device by gloo")
@pytest.mark.gloo
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(["", "flat"], id="one group", marks=requires(not ASKS_META, "fails on ranks without a shard")),
        pytest.param(["hybrid", "first axis"], id="replicas"),
    ],
)
def test_what_the_face_gives_is_what_torch_gives(meshes: list[str]) -> None:
    gloo.run(run_like_torch, 4 if "hybrid" in meshes else 3, meshes)


def run_as_it_lies(folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    model, _ = trained(0, "", False)
    state = reshard.get_model_state_dict(model)
    kinds = {name: type(value).__name__ for name, value in state.items()}
    assert kinds["3.weight"] == "CutAcrossRows", kinds
    assert kinds["2.weight"] == "ShardedTensor", kinds
    whole = theirs.get_model_state_dict(model, options=WHOLE)

    # torch's planners read its metadata, and are right
    copies = [
        {name: value.detach().clone().to(torch.float32).cpu() for name, value in state.items()},
        copy.deepcopy(state),
    ]
    for number, copied in enumerate(copies):
        assert copied["3.weight"].flat_local.data_ptr() != state["3.weight"].flat_local.data_ptr()
        their_dcp.save(copied, checkpoint_id=f"{folder}/{number}")
        target = build(5, "", False)[0]
        reshard.load(reshard.get_model_state_dict(target), f"{folder}/{number}")
        same(whole, theirs.get_model_state_dict(target, options=WHOLE), "saved by torch, loaded in place by ours")
        target = build(6, "", False)[0]
        their_dcp.load(reshard.get_model_state_dict(target), checkpoint_id=f"{folder}/{number}")
        same(whole, theirs.get_model_state_dict(target, options=WHOLE), "loaded in place by torch")

    # everybody else is refused, on all ranks
    refused = []
    for wrong in (
        lambda: theirs.set_model_state_dict(build(7, "", False)[0], dict(state)),
        lambda: _gather_state_dict(dict(state)),
        lambda: state["3.weight"].local_tensor(),
        lambda: torch.save(state["3.weight"].local_shards(), io.BytesIO()),
    ):
        try:
            wrong()
            refused.append("silent")
        except (AssertionError, LayoutError, NotImplementedError) as error:
            refused.append(type(error).__name__)
    dist.barrier()
    return refused


@pytest.mark.host_only("torch's chunks of tensors on a device name the CPU where ranks share the device by gloo")
@pytest.mark.gloo
def test_what_lies_across_rows_is_for_those_who_read_where_it_lies(tmp_path: Any) -> None:
    for refused in gloo.run(run_as_it_lies, 2, str(tmp_path)):
        assert "silent" not in refused, refused
        assert refused == ["AssertionError", "LayoutError", "NotImplementedError", "LayoutError"]


def saves_replicas(folder: str) -> str:
    warnings.simplefilter("ignore")
    for original in (True, False):
        saved = trained(0, "hybrid", original)
        path = f"{folder}/{original}"
        reshard.save(dict(zip(("model", "optim"), reshard.get_state_dict(*saved))), path)
        for mesh in ("hybrid", ""):
            again, fresh = build(1, mesh, original)
            state = dict(zip(("model", "optim"), reshard.get_state_dict(again, fresh)))
            assert reshard.load(state, path).ok
            reshard.set_state_dict(again, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
            whole = reshard.StateDictOptions(full_state_dict=True)
            for one, other in zip(*(reshard.get_state_dict(*each, options=whole) for each in (saved, (again, fresh)))):
                same(one.get("state", one), other.get("state", other), f"{mesh} {original}")
    if dist.get_rank() == 3:
        next(p for p in saved[0].parameters() if p.numel()).data[0] += 1
    with pytest.raises(KeyMismatchError, match="rank 1 / rank 3") as told:
        reshard.save(reshard.get_model_state_dict(saved[0]), path)
    return str(told.value)


@pytest.mark.gloo
def test_replicas_of_what_lies_across_rows_are_saved_once_and_compared(tmp_path: Any) -> None:
    assert len(set(gloo.run(saves_replicas, 4, str(tmp_path)))) == 1


@pytest.mark.parametrize("shape", [(4,), (4, 3), (5, 2, 2), (1, 7), (0, 3)])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_chunks_are_those_of_torch(shape: tuple[int, ...], world: int) -> None:
    numel = torch.Size(shape).numel()
    cut = FlatCut(shape, ((0, numel), *[(numel, numel)] * (world - 1)), None).chunks()

    chunks = torch.arange(numel).view(shape).chunk(world)
    assert [high - low for low, high in cut.ranges] == [
        *(chunk.numel() for chunk in chunks),
        *[0] * (world - len(chunks)),
    ]
    assert cut.is_chunks


class Nested(torch.optim.SGD):
    """Keeps its moment in a dict, as bitsandbytes does in its state dicts."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["quantized"] = {"codes": torch.ones_like(p), "scales": torch.ones(2)}


def nested_state_under_fsdp1(saved: dict[str, Any]) -> None:
    for original in (True, False):
        model, _ = build(0, "", original)
        optimizer = Nested(model.parameters(), lr=0.1)
        with pytest.raises(NormalizationError, match=r"state 'quantized' of .* in a dict, .* sharding is unknown"):
            reshard.set_optimizer_state_dict(model, optimizer, saved)
        assert not optimizer.state


@pytest.mark.gloo
def test_tensors_in_dicts_of_which_nobody_knows_how_they_are_cut_are_refused() -> None:
    model = nn.Sequential(
        nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 12, bias=False), nn.Linear(12, 3), nn.LayerNorm(3)
    )
    optimizer = Nested(model.parameters(), lr=0.1)
    optimizer.step()
    gloo.run(nested_state_under_fsdp1, 2, reshard.get_optimizer_state_dict(model, optimizer))


def forward_after_a_set(folder: str) -> None:
    data = torch.arange(8.0).view(2, 4)
    full = dict(plain(3).state_dict())
    wanted = plain(3)(data)
    for number, (strategy, original, step) in enumerate(
        itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), (True, False), ("set", "load", "restore"))
    ):
        model = FullyShardedDataParallel(
            plain(number + 4),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        model(data)  # gathers, and only a backward pass would free that
        path = f"{folder}/{number}"
        if step == "set":
            reshard.set_model_state_dict(model, full)
        elif step == "load":
            reshard.save(full, path)
            state = reshard.get_model_state_dict(model)
            reshard.load(state, path)
            reshard.set_model_state_dict(model, state)
        else:
            with reshard.CheckpointManager(path, every=reshard.Every(steps=1)) as manager:
                manager.save(1, {"model": plain(3)})
                manager.restore({"model": model})
        assert torch.equal(model(data), wanted), (strategy, original, step)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_the_next_forward_pass_has_the_values_that_were_set(tmp_path: Any) -> None:
    gloo.run(forward_after_a_set, 2, str(tmp_path))


class Units(nn.Module):
    """Of two ranks, some hold nothing of the first and the last parameter; of four, of any."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = (nn.Linear(2, n, bias=False) for n in (4, 8, 4))
        self.d = nn.Linear(16, 1, bias=False)  # lies in one chunk, of one rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.cat([self.a(x), self.b(x), self.c(x)], 1)).square().sum()


def laid_out(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Units(len(kind))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind != "plain":
        policy = ModuleWrapPolicy({nn.Linear}) if kind == "each" else None
        options: dict[str, Any] = {"use_orig_params": kind != "flat", "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    return model, torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)


def into_other_layouts(sources: list[str]) -> None:
    whole = reshard.StateDictOptions(full_state_dict=True)
    for source in sources:
        model, optimizer = laid_out(source)
        model(torch.arange(4.0).view(2, 2)).backward()
        optimizer.step()
        wanted = reshard.get_optimizer_state_dict(model, optimizer, options=whole)
        for flat, target in itertools.product((False, True), ("plain", "fsdp2", "one unit", "each", "flat")):
            options = reshard.StateDictOptions(flatten_optimizer_state_dict=flat)
            given = reshard.get_optimizer_state_dict(model, optimizer, options=options)
            other, its = laid_out(target)
            report = reshard.set_optimizer_state_dict(other, its, copy.copy(given) if flat else given)
            assert not report.missing, (source, target, report)
            same(wanted, reshard.get_optimizer_state_dict(other, its, options=whole), f"{source}, {flat}, {target}")


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "sources"), [(2, ["one unit", "each", "flat"]), (4, ["one unit"])])
def test_state_of_which_a_rank_has_no_element_is_set_in_any_other_layout(world: int, sources: list[str]) -> None:
    gloo.run(into_other_layouts, world, sources)


def state_of_two_ranks_of_three(original: bool) -> dict[str, torch.Tensor]:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:  # which does something else, as an inference engine does
        return {}
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))
    options: dict[str, Any] = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(body, process_group=group, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(8.0).view(2, 4)).sum().backward()
    optimizer.step()
    before = reshard.get_optimizer_state_dict(model, optimizer, options=reshard.StateDictOptions(full_state_dict=True))
    reshard.set_optimizer_state_dict(model, optimizer, before)
    return {name: state["exp_avg"] for name, state in before["state"].items()}


@pytest.mark.parametrize("original", [False, True])
def test_ranks_outside_of_a_model_need_not_take_part_in_getting_its_state(original: bool) -> None:
    one, other, _ = gloo.run(state_of_two_ranks_of_three, 3, original, timeout_s=60.0)
    assert len(one) == 4
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def sets_without_warnings() -> list[str]:
    told = []
    for mesh, original in itertools.product(("", "flat"), (False, True)):
        model, optimizer = trained(0, mesh, original)
        state = reshard.get_optimizer_state_dict(model, optimizer)
        again, fresh = build(1, mesh, original)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reshard.set_optimizer_state_dict(again, fresh, state)
            reshard.get_optimizer_state_dict(again, fresh)
        told += [str(warning.message) for warning in caught]
    return told


def test_no_warning_of_torch_about_its_sharded_tensors_gets_out() -> None:
    assert not any("Please use DTensor" in text for rank in gloo.run(sets_without_warnings, 2) for text in rank)
