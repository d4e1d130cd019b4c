"""Strided shards over up to three axes, cut unevenly: what torch leaves each rank is what is read, or nothing is.

The oracle is torch itself: the elements that live `distribute_tensor` and live FSDP2 put in the local tensors of all
ranks, under a fake process group. Shapes do not always tell the two apart: then a rank refuses by itself, and all ranks
together find the one way that fits them all.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import reshard
from planners.testing.replay import element_ids
from reshard.errors import LayoutError
from reshard.live.tensors import LiveTensor
from reshard.ranks.global_layout import describe, join_layouts
from reshard.state_dict.gather import gather
from tests import gloo
from tests.torch_releases import UNEVEN_STRIDES, distribute_own, requires

pytestmark = requires(UNEVEN_STRIDES, "cuts strided shards evenly, or not at all")
SIZES = (1, 3, 5, 7, 10, 13, 27)


@pytest.fixture
def as_rank():
    """Makes this process a rank of a fake job; the last one is taken down at the end."""

    def become(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    assert not dist.is_initialized()
    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def held_by(layout, rank):
    """The ids that a layout says are in the one local tensor of `rank`."""
    (part,) = layout.parts(rank)
    return [i for box, _ in part.boxes() for i in element_ids(layout.spec.shape, box).reshape(-1).tolist()]


@dataclass
class Verdict:
    """Names of tensors."""

    read: list[str] = field(default_factory=list)
    """By all ranks together."""
    refused: list[str] = field(default_factory=list)
    """By a rank alone, once for each."""
    undecided: list[str] = field(default_factory=list)
    """Also by all together."""


def judge(made, world, as_rank):
    """`made()` gives DTensors of ids, by name. Each rank reads its own or refuses, and so do all ranks together."""
    described, truth, verdict = {}, {}, Verdict()
    for rank in range(world):
        as_rank(rank, world)
        for key, tensor in made().items():
            ids = truth.setdefault(key, {})[rank] = tensor.to_local().reshape(-1).tolist()
            described.setdefault(key, []).append((describe({key: LiveTensor(key, tensor)}), [rank]))
            layout = read(lambda tensor=tensor, key=key: reshard.layout_of(tensor, key), "what rank")
            if layout is None:
                verdict.refused.append(key)
            else:
                assert held_by(layout, rank) == ids, (key, rank)
    for key, held in truth.items():
        layout = read(lambda key=key: join_layouts(described[key])[key], "what all ranks hold")
        if layout is None:
            verdict.undecided.append(key)
        else:
            verdict.read.append(key)
            assert {rank: held_by(layout, rank) for rank in held} == held, key
    return verdict


def read(find, who):
    """What `find` gives; None if it refuses since several ways of cutting fit."""
    try:
        return find()
    except LayoutError as error:
        if f"ways that fit {who}" not in str(error):
            raise
        return None


def placements_of(sizes):
    """All placements of a 1-D tensor on a mesh of these sizes with at least one strided shard, of a split factor that
    later axes can explain; on one or two axes also of others."""
    for_axis = []
    for axis in range(len(sizes)):
        later = sizes[axis + 1 :]
        factors = {math.prod(some) for n in range(1, len(later) + 1) for some in itertools.combinations(later, n)} - {1}
        factors |= {2} if len(sizes) < 3 else set()
        for_axis.append([Shard(0), Replicate(), *(_StridedShard(0, split_factor=n) for n in sorted(factors))])
    for placements in itertools.product(*for_axis):
        if any(isinstance(p, _StridedShard) for p in placements):
            yield placements


MESHES = [(3,), (2, 2), (3, 2), (2, 3), (3, 4), (2, 2, 2), (1, 3, 2), (3, 2, 2)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_distribute_tensor_leaves_each_rank_is_read_or_refused(as_rank, sizes):
    def made():
        mesh = init_device_mesh("cpu", sizes)
        return {
            f"{n} {' '.join(map(str, cuts))}": distribute_own(torch.arange(n), mesh, cuts)
            for n in SIZES
            for cuts in placements_of(sizes)
        }

    verdict = judge(made, math.prod(sizes), as_rank)

    assert verdict.read
    if len(sizes) < 3:  # one strided shard and a plain one: all ranks together always know
        assert [key for key in verdict.undecided if key.count("_S") == 1] == []


TENSOR_PARALLEL = {
    (2,): ["S"],
    (4,): ["S"],
    (2, 2): ["S,S", "S,R", "R,S", "_S2,S"],
    (3, 2): ["S,S", "S,R", "_S2,S"],
}


def parsed(text):
    kinds = {"S": Shard(0), "R": Replicate()}
    return [kinds.get(p) or _StridedShard(0, split_factor=int(p[2:])) for p in text.split(",")]


@pytest.mark.parametrize(("dp", "tp"), [(3, (2,)), (3, (4,)), (2, (2, 2)), (2, (3, 2))], ids=str)
def test_what_fsdp2_leaves_each_rank_is_read_or_refused(as_rank, dp, tp):
    """Parameters that tensor parallelism cuts along one or two axes, and then FSDP2."""

    def made():
        names = ("dp", "ep", "tp")[: 1 + len(tp)]
        mesh, out = init_device_mesh("cpu", (dp, *tp), mesh_dim_names=names), {}
        inner = mesh[names[1:]] if len(tp) > 1 else mesh[names[1]]
        for text in TENSOR_PARALLEL[tp]:
            model = torch.nn.Module()
            for n in SIZES:
                whole = torch.arange(n, dtype=torch.float32)
                cut = distribute_own(whole, inner, parsed(text))
                setattr(model, f"n{n}", torch.nn.Parameter(cut))
            fully_shard(model, mesh=mesh["dp"])
            out |= {f"{text} {name}": parameter.detach() for name, parameter in model.named_parameters()}
        assert all(isinstance(tensor, DTensor) for tensor in out.values())
        return out

    verdict = judge(made, dp * math.prod(tp), as_rank)

    assert verdict.read
    assert [key for key in verdict.undecided if len(tp) == 1] == []


def together(n, path):
    """Cut so that ranks 2 and 6 alone cannot place what they hold."""
    placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]
    mesh = init_device_mesh("cpu", (2, 2, 2))
    tensor = distribute_own(torch.arange(n), mesh, placements)
    alone = read(lambda: reshard.layout_of(tensor, "w"), "what rank") is None
    whole = gather(LiveTensor("", tensor)).tolist()
    reshard.save({"w": tensor}, path)
    filled = []
    for options in ({}, {"read_once": True}, {"read_once": "host"}):
        target = {"w": distribute_own(torch.zeros(n, dtype=torch.int64), mesh, placements)}
        reshard.load(target, path, **options)
        filled.append(torch.equal(target["w"].to_local(), tensor.to_local()))
    return whole, alone, filled


@pytest.mark.gloo
def test_ranks_that_gather_save_or_load_compare_what_they_hold(tmp_path):
    found = gloo.run(together, 8, 6, str(tmp_path))

    assert found == [(list(range(6)), rank in (2, 6), [True] * 3) for rank in range(8)]
    assert reshard.open(tmp_path)["w"][...].tolist() == list(range(6))
