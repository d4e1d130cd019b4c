"""Context parallelism: the ranks of `cp` compute parts of one sequence, so FSDP cuts parameters over them, too, or they
hold replicas. Checkpoints do not depend on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from tests import gloo
from tests.same import assert_same

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
FOLDED = [(1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2), (1, 1, 3, 1)]
"""Sizes of the axes, where FSDP cuts over `dp_shard` and `cp` as one, as torchtitan has it."""
REPLICAS = [(1, 2, 2, 1), (1, 1, 3, 1)]
"""Where `cp` holds replicas: HSDP, or plain parameters if `dp_shard` has one rank."""
LAYOUTS = [*((sizes, True) for sizes in FOLDED), *((sizes, False) for sizes in REPLICAS)]


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 5))
    model.register_buffer("frequencies", torch.rand(8))
    return model


def sharded(model: nn.Module, sizes: tuple[int, ...], is_folded: bool) -> nn.Module:
    replicate, shard, cp, tp = sizes
    if not is_folded:
        if shard > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (cp, shard), mesh_dim_names=("cp", "dp_shard")))
        return model
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if replicate > 1:  # HSDP over the folded axis
        mesh = init_device_mesh("cpu", (replicate, shard * cp), mesh_dim_names=("dp_replicate", "dp_shard_cp"))
    fully_shard(model, mesh=mesh if replicate > 1 else folded(mesh))
    return model


def folded(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp_shard", "cp"]._flatten("dp_shard_cp")


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Two steps whose gradients are the parameters, so that the bits are the same in all layouts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer


def of_this_world() -> list[tuple[int, tuple[int, ...], bool]]:
    world = torch.distributed.get_world_size()
    return [(n, sizes, folded) for n, (sizes, folded) in enumerate(LAYOUTS) if torch.Size(sizes).numel() == world]


def save(folder: Path) -> None:
    for number, sizes, is_folded in of_this_world():
        model = sharded(plain(0), sizes, is_folded)
        state = dict(zip(("model", "optim"), reshard.get_state_dict(model, trained(model))))
        if number % 2:
            reshard.save(state, folder / str(number))
        else:
            reshard.dcp.save(state, checkpoint_id=folder / str(number))


def resume(folder: Path) -> list[Any]:
    """The state of a fresh model and optimizer in each layout, after each of the checkpoints was loaded."""
    found = []
    for _, sizes, is_folded in of_this_world():
        for checkpoint in sorted(folder.iterdir()):
            model = sharded(plain(1), sizes, is_folded)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
            state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
            assert reshard.load(state, checkpoint).ok
            reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            found.append(whole(model, optimizer))
    return found


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return reshard.get_state_dict(model, optimizer, options=reshard.StateDictOptions(full_state_dict=True))


def test_every_layout_resumes_every_other_with_the_same_bits(tmp_path: Path) -> None:
    model = plain(0)
    wanted = whole(model, trained(model))
    for world in (3, 4):
        gloo.run(save, world, tmp_path)
    first, *others = [reshard.open(path) for path in sorted(tmp_path.iterdir())]
    assert len(others) == len(LAYOUTS) - 1
    assert all(reshard.compare(first, other).ok for other in others)

    for world in (3, 4):
        layouts = sum(torch.Size(sizes).numel() == world for sizes, _ in LAYOUTS)
        for found in gloo.run(resume, world, tmp_path):
            assert len(found) == len(LAYOUTS) * layouts
            for one in found:
                assert_same(one, wanted)


def saved_within(folder: Path) -> str:
    """What a save says while torch's context has cut a buffer in place; afterwards the buffer is whole again."""
    context = pytest.importorskip("torch.distributed.tensor.experimental").context_parallel
    model, mesh = plain(0), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    said = "nothing"
    with context(mesh, buffers=[model.frequencies], buffer_seq_dims=[0]):
        assert model.frequencies.shape == (4,)
        try:
            reshard.save(reshard.get_model_state_dict(model), folder / "within")
        except reshard.ReshardError as error:
            said = str(error)
    reshard.save(reshard.get_model_state_dict(model), folder / "after")
    return said


def test_a_buffer_that_is_cut_for_cp_is_not_saved_as_if_it_were_whole(tmp_path: Path) -> None:
    for said in gloo.run(saved_within, 2, tmp_path):
        assert "frequencies" in said
    assert reshard.open(tmp_path / "after")["frequencies"][...].equal(plain(0).get_buffer("frequencies"))
    assert not (tmp_path / "within" / "manifest.json").exists()
