"""Layouts traced from a job's own parallelization code, against what each of its ranks really makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import planners
from reshard.api.trace_layout import trace_layout
from reshard.errors import LayoutError
from reshard.live.wrappers import forget_meshes
from tests.torch_releases import RANDOM_WARNING, UNEVEN_STRIDES

pytestmark = pytest.mark.filterwarnings(RANDOM_WARNING)
EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def assert_every_rank_holds_what_it_makes(layout, build, world_size):
    """Runs `build` as each rank and compares names and local shapes with the layout."""
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            with torch.device("meta"):
                made = build()
            made = made if isinstance(made, dict) else made.state_dict()
            shapes = {fqn: tuple((t.to_local() if isinstance(t, DTensor) else t).shape) for fqn, t in made.items()}
        finally:
            dist.destroy_process_group()
            forget_meshes()
        held = {fqn: parts[0].sizes for fqn in layout if (parts := layout.parts(fqn, rank))}
        assert held == shapes, rank


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 3, 1), (1, 1, 2), (1, 3, 2), (2, 3, 2), (4, 2, 1)])
def test_a_llama_with_fsdp_tensor_and_pipeline_parallelism(pp, dp, tp):
    llama = example("llama_fsdp_tp_pp")
    sizes = {"dim": 16, "hidden": 22, "vocab": 37} if UNEVEN_STRIDES else {"dim": 24, "hidden": 24, "vocab": 36}
    config = llama.Config(layers=5, heads=4, kv_heads=2, **sizes)

    def build():
        return llama.build(config, pp, dp, tp)

    layout = trace_layout(build, world_size=pp * dp * tp)

    assert_every_rank_holds_what_it_makes(layout, build, pp * dp * tp)
    assert planners.verify(layout).ok
    assert layout.world_size == pp * dp * tp
    whole = trace_layout(lambda: llama.Llama(config), world_size=1)
    assert layout.specs == {fqn: layout.specs[fqn] for fqn in whole} == whole.specs
    preset = planners.pipelined(planners.fsdp_tp(dp, tp), pp, 5).layout(layout.specs)
    for fqn in layout:
        for rank in range(layout.world_size):
            assert layout.parts(fqn, rank) == preset.parts(fqn, rank), (fqn, rank)


@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (1, 4), (3, 2)])
def test_a_mixture_of_experts_with_expert_parallelism(dp, ep):
    moe = example("moe_expert_parallel")
    config = moe.Config(dim=8, hidden=6, layers=2, experts=12)

    def build():
        return moe.build(config, dp, ep)

    layout = trace_layout(build, world_size=dp * ep)

    assert_every_rank_holds_what_it_makes(layout, build, dp * ep)
    assert planners.verify(layout).ok
    preset = planners.expert_parallel(dp, ep).layout(layout.specs)
    for fqn in layout:
        for rank in range(layout.world_size):
            assert layout.parts(fqn, rank) == preset.parts(fqn, rank), (fqn, rank)


def own_experts():
    """Every rank of ep has modules of its own, and the router is cut over all."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "ep"))
    mine = {f"experts.{mesh.get_local_rank('ep')}": torch.empty(4, 2)}
    return {"router": distribute_tensor(torch.empty(7, 3), mesh["dp"], [Shard(0)]), **mine}


def test_what_differs_along_a_mesh_axis_is_found():
    layout = trace_layout(own_experts, world_size=6)

    assert sorted(layout) == ["experts.0", "experts.1", "experts.2", "router"]
    assert_every_rank_holds_what_it_makes(layout, own_experts, 6)
    assert [rank for rank in range(6) if layout.parts("experts.1", rank)] == [1, 4]


def test_tied_weights_of_two_stages_are_replicas_of_one_another():
    def build():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        weight = distribute_tensor(torch.empty(5, 3), mesh["dp"], [Shard(0)])
        return {"embed": weight, f"only.{mesh.get_local_rank('pp')}": weight}

    layout = trace_layout(build, world_size=4)

    assert_every_rank_holds_what_it_makes(layout, build, 4)
    assert layout["embed"].boxes(0) == layout["embed"].boxes(2) == (planners.Box((0, 0), (3, 3)),)
    assert planners.verify(layout).ok


def test_a_plain_model_is_whole_on_every_rank():
    def build():
        return nn.Linear(3, 2)

    assert trace_layout(build, world_size=3) == trace_layout(build, world_size=3, ranks=[1])
    layout = trace_layout(build, world_size=3)
    assert layout["weight"].boxes(2) == (planners.Box((0, 0), (2, 3)),)


def test_a_large_job_is_read_by_running_a_few_ranks():
    runs = []

    def build():
        runs.append(dist.get_rank())
        mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("dp", "tp"))
        return {"w": distribute_tensor(torch.empty(1000, 64), mesh, [Shard(0), Shard(1)])}

    layout = trace_layout(build, world_size=4096)

    assert len(runs) == 3
    assert layout["w"].placements == (planners.Shard(0), planners.Shard(1))


def test_tracing_leaves_no_process_group_and_draws_no_random_numbers():
    torch.manual_seed(0)
    state = torch.get_rng_state()

    trace_layout(lambda: {"w": torch.rand(3, device="cpu")}, world_size=2)

    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_goes_wrong_is_said():
    def fails():
        raise ZeroDivisionError("boom")

    def differs():
        return {"w": torch.empty(2 + dist.get_rank())}

    with pytest.raises(ZeroDivisionError) as raised:
        trace_layout(fails, world_size=2)
    assert raised.value.__notes__ == ["while tracing as rank 0 of 2"]
    assert not dist.is_initialized()
    with pytest.raises(LayoutError, match=r"'w' has shape .* on rank 0, but .* on rank 1"):
        trace_layout(differs, world_size=2)
    with pytest.raises(LayoutError, match="world_size must be an integer >= 1"):
        trace_layout(differs, world_size=0)
    with pytest.raises(LayoutError, match="between 0 and 1"):
        trace_layout(differs, world_size=2, ranks=[2])
    with pytest.raises(LayoutError, match="ranks is empty"):
        trace_layout(differs, world_size=2, ranks=[])
    with pytest.raises(LayoutError, match="a module, a list of modules or a state dict, got int"):
        trace_layout(lambda: 3, world_size=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(LayoutError, match="a process group is initialized"):
            trace_layout(differs, world_size=2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
