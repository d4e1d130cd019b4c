"""Ranks that hold different things: pipeline stages, experts, gradients that only some ranks have."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from reshard.errors import ReshardError
from reshard.state_dict import (
    Stage,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    iter_full,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests import gloo
from tests.reshard.state_dict import zoo
from tests.same import assert_same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
ON_ONE = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
DEPTH = 4


def stage_of(seed: int, rank: int, local_numbers: bool, virtual: bool = False) -> Any:
    """What a rank of two has of a model of four layers: one half, or every second layer as two virtual stages."""
    whole = zoo.make(seed, depth=DEPTH)
    if virtual:
        layers = [
            Stage(nn.ModuleDict({"layers": nn.ModuleList([whole.layers[i]])}), {"layers": i}) for i in (rank, rank + 2)
        ]
        return [*layers, nn.ModuleDict({"embed": whole.embed} if rank == 0 else {"head": whole.head})]
    parts: dict[str, nn.Module] = {"embed": whole.embed} if rank == 0 else {"head": whole.head}
    numbers = range(2 * rank, 2 * rank + 2)
    if local_numbers:
        parts["layers"] = nn.ModuleList([whole.layers[i] for i in numbers])
        return Stage(nn.ModuleDict(parts), {"layers": 2 * rank} if rank else {})
    parts["layers"] = nn.ModuleDict({str(i): whole.layers[i] for i in numbers})
    return nn.ModuleDict(parts)


def modules(stages: Any) -> list[nn.Module]:
    given = stages if isinstance(stages, list) else [stages]
    return [one.module if isinstance(one, Stage) else one for one in given]


def optimizer_of(stages: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for m in modules(stages) for p in m.parameters()], lr=lr)


def grouped(model: nn.Module, of_stage: list[set[str]]) -> torch.optim.Optimizer:
    """An optimizer of a plain model with one group per stage."""
    return torch.optim.AdamW([{"params": [p for n, p in model.named_parameters() if n in own]} for own in of_stage])


def step(stages: Any, optimizer: torch.optim.Optimizer) -> None:
    for module in modules(stages):
        for parameter in module.parameters():
            parameter.grad = torch.sin(parameter.detach() * 3)
    optimizer.step()


def pipeline(local_numbers: bool, virtual: bool) -> None:
    rank = dist.get_rank()
    stages = stage_of(0, rank, local_numbers, virtual)
    optimizer = optimizer_of(stages, lr=0.1 * (rank + 1))
    step(stages, optimizer)
    model_state, flat = get_state_dict(stages, optimizer, options=FLAT)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, copy.deepcopy((model_state, flat)))

    # the stages together are the plain model and its optimizer with one group per stage, trained alike
    plain = zoo.make(0, depth=DEPTH)
    of_stage = [set(everyone[i][0]) for i in range(2)]
    assert not of_stage[0] & of_stage[1]
    groups = [
        {"params": [p for n, p in plain.named_parameters() if n in of_stage[i]], "lr": 0.1 * (i + 1)} for i in range(2)
    ]
    plain_optimizer = torch.optim.AdamW(groups)
    step(plain, plain_optimizer)
    wanted = get_state_dict(plain, plain_optimizer, options=FLAT)
    merged = [{k: v for i in range(2) for k, v in everyone[i][part].items()} for part in range(2)]
    assert len(merged[1]) == len(everyone[0][1]) + len(everyone[1][1])
    assert_same(merged[0], {name: wanted[0][name] for name in merged[0]})
    assert_same(dict(sorted(merged[1].items())), dict(sorted(wanted[1].items())))

    # two stages into one, and one into two with nothing but its own
    single = zoo.make(1, depth=DEPTH)
    single_optimizer = grouped(single, of_stage)
    set_state_dict(single, single_optimizer, model_state_dict=merged[0], optim_state_dict=merged[1])
    assert [group["lr"] for group in single_optimizer.param_groups] == [0.1, 0.2]
    assert_same(get_model_state_dict(single), wanted[0])
    again = stage_of(2, rank, local_numbers, virtual)
    again_optimizer = optimizer_of(again, lr=9.0)
    lenient = StateDictOptions(strict=False)
    set_state_dict(again, again_optimizer, model_state_dict=merged[0], optim_state_dict=merged[1], options=lenient)
    assert_same(get_state_dict(again, again_optimizer, options=FLAT), (model_state, flat))
    assert again_optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)

    # rank 0 alone has everything and sends each stage its own
    third = stage_of(3, rank, local_numbers, virtual)
    third_optimizer = optimizer_of(third, lr=9.0)
    given = merged if rank == 0 else ({}, {})
    set_state_dict(third, third_optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
    assert_same(get_state_dict(third, third_optimizer, options=FLAT), (model_state, flat))

    # whole and on one rank: every name is on one rank, none is lost
    kept = get_state_dict(stages, optimizer, options=ON_ONE)
    assert set(kept[0]) == of_stage[rank]
    assert {n for n, _ in iter_full(stages, to_rank=0)} == of_stage[rank]
    names = {name for group in kept[1]["param_groups"] for name in group["params"]}
    assert names == set(kept[1]["state"])


def run_pipeline() -> None:
    for local_numbers, virtual in ((False, False), (True, False), (True, True)):
        pipeline(local_numbers, virtual)


@pytest.mark.gloo
def test_pipeline_stages_with_their_own_lr() -> None:
    gloo.run(run_pipeline, 2)


class Moe(nn.Module):
    """A dense part and experts under global numbers or in one stacked tensor."""

    def __init__(self, experts: range, stacked: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(3, 4)
        self.experts = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in experts})
        self.stacked = nn.Parameter(torch.randn(stacked, 3, 3))


def run_experts() -> None:
    """Experts that live on one rank each, a stack of them sharded over experts, a router under FSDP2."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        whole = Moe(range(4))
        model = Moe(range(rank * 4 // world, (rank + 1) * 4 // world))
        for name, expert in model.experts.items():
            expert.load_state_dict(whole.experts[name].state_dict())
        model.router.load_state_dict(whole.router.state_dict())
        model.stacked = nn.Parameter(distribute_tensor(whole.stacked.detach(), mesh, [Shard(0)]))
        fully_shard(model.router, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for name, parameter in model.named_parameters():
            # half of the experts see no token: their ranks have no gradient and no state
            if "experts.1" not in name and "experts.2" not in name:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    model, optimizer = build(0)
    state = get_state_dict(model, optimizer)
    assert {n.split(".")[1] for n in state[0] if "experts" in n} == set(model.experts)
    cold = {n for n in state[0] if n not in state[1]["state"]}
    assert cold == {f"experts.{i}.{w}" for i in ("1", "2") if i in model.experts for w in ("weight", "bias")}
    kept = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    torch.manual_seed(0)
    assert_same(kept[0]["stacked"], (Moe(range(4)).stacked.detach() * (1 - 0.1 * 0.01) - 0.1), close=True)
    other, other_optimizer = build(1)
    set_state_dict(other, other_optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    assert_same(get_state_dict(other, other_optimizer, options=FULL), kept)
    on_one = get_state_dict(model, optimizer, options=ON_ONE)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, list(on_one[0]))
    names = [name for own in everyone for name in own]
    assert len(names) == len(set(names))
    assert set(names) == set(Moe(range(4)).state_dict())


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 4])
def test_experts_and_ranks_without_their_gradients(world: int) -> None:
    gloo.run(run_experts, world)


def run_meta() -> None:
    """A meta model under FSDP2 and TP, filled by broadcast; and a context-parallel mesh, which shards no parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    wanted, wanted_optim = zoo.truth("adamw", hidden=9)
    for layout in (zoo.plain, zoo.fsdp2, zoo.tp):
        with torch.device("meta"):
            model = layout(zoo.Net(hidden=9))
        report = set_model_state_dict(model, wanted if dist.get_rank() == 0 else {}, options=BROADCAST)
        assert report.uninitialized == ("layers.0.scratch", "layers.1.scratch")
        for block in model.layers:
            block.scratch = torch.ones(6)
        assert_same(get_model_state_dict(model, options=FULL), wanted)
        if layout is zoo.fsdp2:
            zoo.train(model, zoo.OPTIMIZERS["sgd"](model.parameters()), 1)  # FSDP2 has taken notice

    replicated = distribute_module(zoo.make(1, hidden=9), mesh)
    assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in replicated.parameters())
    optimizer = zoo.OPTIMIZERS["adamw"](replicated.parameters())
    set_state_dict(replicated, optimizer, model_state_dict=wanted, optim_state_dict=wanted_optim, options=FULL)
    assert_same(get_state_dict(replicated, optimizer, options=FULL), (wanted, wanted_optim))


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_meta_models_and_replicating_meshes() -> None:
    gloo.run(run_meta, 2)


class Factored(torch.optim.Optimizer):
    """A moment per row: on sharded parameters a sharded tensor of another shape than theirs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            rows = p.grad.square().mean(dim=-1) if p.dim() == 2 else p.grad.square()
            moment = self.state[p].setdefault("rows", torch.zeros_like(rows))
            moment.mul_(0.9).add_(rows)
            p.sub_(p.grad * 0.01)


def run_shapes() -> None:
    model = zoo.fsdp2(zoo.make(0, hidden=9))
    optimizer = Factored(model.parameters())
    zoo.train(model, optimizer)
    sharded = get_optimizer_state_dict(model, optimizer)
    assert sharded["state"]["layers.0.up.weight"]["rows"].placements == (Shard(0),)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    for seed, given, options in [(1, state, FULL), (2, sharded, None), (3, state, FULL), (4, sharded, None)]:
        other = zoo.fsdp2(zoo.make(seed, hidden=9))
        other_optimizer = Factored(other.parameters())
        if seed > 2:
            zoo.train(other, other_optimizer)
        set_optimizer_state_dict(other, other_optimizer, given, options=options)
        assert_same(get_optimizer_state_dict(other, other_optimizer, options=FULL), state)
        set_model_state_dict(other, get_model_state_dict(model))
        zoo.train(other, other_optimizer, 1)
    zoo.train(model, optimizer, 1)
    assert_same(get_state_dict(other, other_optimizer, options=FULL), get_state_dict(model, optimizer, options=FULL))


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_factored_state_of_sharded_parameters() -> None:
    gloo.run(run_shapes, 2)


def run_fsdp1_without_gradients() -> None:
    """A parameter that had no gradient has no state; in a flat parameter it gets zeros, and the report says so."""
    model = zoo.ddp(zoo.make(0, hidden=9))
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    zoo.train(model, optimizer, 1)
    state = get_optimizer_state_dict(model, optimizer)
    cold = "layers.0.up.weight"
    del state["state"][cold]
    for use_orig_params in (False, True):
        other = zoo.fsdp1("FULL_SHARD", use_orig_params)(zoo.make(1, hidden=9))
        other_optimizer = zoo.OPTIMIZERS["adamw"](other.parameters())
        report = set_optimizer_state_dict(other, other_optimizer, state, options=FULL)
        assert cold in report.without_state
        assert report.filled == (() if use_orig_params else (cold,))
        found = get_optimizer_state_dict(other, other_optimizer, options=FULL)
        assert (cold in found["state"]) is not use_orig_params
        assert cold not in found["state"] or not found["state"][cold]["exp_avg"].any()


@pytest.mark.not_simulated("DDP takes its memory for the host's")
@pytest.mark.gloo
def test_parameters_that_gain_state_in_a_flat_parameter_are_reported() -> None:
    gloo.run(run_fsdp1_without_gradients, 2)


def run_alone() -> None:
    """What stays sharded needs no other rank: rank 0 calls alone, in the middle of a training step."""
    for layout in (zoo.fsdp1("SHARD_GRAD_OP", False), zoo.fsdp1("SHARD_GRAD_OP", True), zoo.fsdp2, zoo.ddp):
        model, twin = (layout(zoo.make(0, hidden=9)) for _ in range(2))
        optimizer, twin_optimizer = (zoo.OPTIMIZERS["adamw"](m.parameters()) for m in (model, twin))
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            zoo.train(m, o, 1)
        wanted = get_state_dict(model, optimizer, options=FULL)
        wanted = copy.deepcopy(wanted)
        loss, twin_loss = (m(torch.arange(4)).square().mean() for m in (model, twin))
        if dist.get_rank() == 0:
            get_state_dict(model, optimizer)
            get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
        dist.barrier()
        if layout is not zoo.fsdp2:  # FSDP2 counts a reshard between forward and backward, on all ranks or none
            loss.backward()
            twin_loss.backward()
            optimizer.step()
            twin_optimizer.step()
        else:
            twin_loss.backward()
            assert_same(get_state_dict(model, optimizer, options=FULL), wanted)
            continue
        if dist.get_rank() == 0:
            given = get_state_dict(model, optimizer)
            set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1])
        found = get_state_dict(model, optimizer, options=FULL)
        assert_same(found, get_state_dict(twin, twin_optimizer, options=FULL))
        assert not torch.equal(found[0]["head.weight"], wanted[0]["head.weight"])


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
@pytest.mark.not_simulated("DDP takes its memory for the host's")
def test_sharded_state_is_read_and_set_without_any_other_rank() -> None:
    gloo.run(run_alone, 2)


def run_stream() -> None:
    model = zoo.fsdp2(zoo.make(0, hidden=9))
    seen: list[weakref.ref[torch.Tensor]] = []
    gathered = 0
    for _, value in iter_full(model):
        assert [ref for ref in seen if ref() is not None] == []
        if not any(value is live for live in model.buffers()):
            seen.append(weakref.ref(value))
            gathered += 1
        del value
    assert gathered >= 12


@pytest.mark.gloo
def test_the_stream_keeps_no_tensor() -> None:
    gloo.run(run_stream, 2)


def run_beside_plain() -> Any:
    """Ranks 0 and 1 hold a sharded model, and rank 2 a plain one; then rank 1 has a name too many, and no state."""
    pair = DeviceMesh("cpu", [0, 1])
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.full((2, 2), 3.0))
    if dist.get_rank() < 2:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), pair, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = copy.deepcopy(get_model_state_dict(model, options=FULL))
    set_model_state_dict(model, state, options=FULL)
    assert_same(dict(iter_full(model)), state)
    heard = ""
    try:
        set_model_state_dict(model, {**state, **({"x": state["weight"]} if dist.get_rank() == 1 else {})}, options=FULL)
    except ReshardError as error:
        heard = str(error)
    if dist.get_rank() != 1:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    try:
        get_optimizer_state_dict(model, optimizer, options=FULL)
    except ReshardError as error:
        heard += str(error)
    return state["weight"], heard


@pytest.mark.gloo
def test_ranks_beside_those_of_a_sharded_model_keep_none_of_them_waiting() -> None:
    found = gloo.run(run_beside_plain, 3, timeout_s=60.0)

    for weight, heard in found[:2]:
        assert_same(weight, torch.full((2, 2), 3.0))
        assert "Unexpected key: x" in heard
        assert "ranks [1] do not have it" in heard
    assert_same(found[2][0], torch.full((2, 2), 3.0))
    assert found[2][1] == ""
