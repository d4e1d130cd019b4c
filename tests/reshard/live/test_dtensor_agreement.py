"""Boxes and local order of a `TensorLayout` are DTensor's own, for every rank, over random meshes and placements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, _utils, placement_types
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import planners
from planners import TensorLayout, TensorSpec
from planners.testing.replay import element_ids
from planners.testing.strategies import meshes, placements, shapes
from reshard.live.tensors import LiveTensor
from reshard.live.wrappers import forget_meshes
from tests.torch_releases import RANDOM_WARNING, UNEVEN_STRIDES, distribute_own

pytestmark = pytest.mark.filterwarnings(RANDOM_WARNING)
QUIET = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def product_layouts(draw, strided=True, max_ranks=24):
    shape = draw(shapes(max_size=13))
    mesh = draw(meshes(max_ranks=max_ranks))
    kinds = placements(len(shape))
    if not strided:
        kinds = kinds.filter(lambda p: not isinstance(p, planners.StridedShard))
    spec = TensorSpec("w", shape, "int64")
    return TensorLayout(spec, planners.Mesh(mesh.axes), [draw(kinds) for _ in range(mesh.ndim)])


def torchs(placement):
    if isinstance(placement, planners.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim) if isinstance(placement, planners.Shard) else Replicate()


def split_by_dtensor(layout, rank):
    """What DTensor's placements, applied axis by axis as `distribute_tensor` does, leave to `rank` of the ids."""
    local = torch.arange(layout.spec.numel).reshape(layout.spec.shape)
    for placement, size, at in zip(layout.placements, layout.mesh.shape, layout.mesh.coordinate(rank)):
        if not isinstance(placement, planners.Replicate):
            pieces, _ = torchs(placement)._split_tensor(local, size, with_padding=False, contiguous=False)
            local = pieces[at]
    return local.numpy()


def ours(layout, rank):
    """The ids that the layout says are in the local tensor of `rank`, and the shape of that."""
    (part,) = layout.parts(rank)
    out = np.full(part.sizes, -1, dtype=np.int64)
    for box, local in part.boxes():
        out[local.slices] = element_ids(layout.spec.shape, box)
    return out


def same(a, b):
    """Equal elements in equal order; DTensor may drop the shape of what is empty."""
    return (a.size == b.size == 0) or (a.shape == b.shape and np.array_equal(a, b))


@given(product_layouts(strided=UNEVEN_STRIDES))
@settings(QUIET, max_examples=500)
def test_every_rank_holds_what_dtensors_own_splits_leave_it(layout):
    for rank in range(layout.world_size):
        assert same(ours(layout, rank), split_by_dtensor(layout, rank)), rank


one_box_of = getattr(_utils, "_compute_local_shape_and_global_offset", None)
TELLS_ONE_BOX = pytest.mark.skipif(one_box_of is None, reason="torch 2.6 asks for a live mesh")


@TELLS_ONE_BOX
@given(product_layouts())
@settings(QUIET, max_examples=500)
def test_dtensors_single_offset_is_ours_wherever_it_can_say_the_truth(layout):
    """torch's shape and offset describe one box. A strided shard may own several intervals of a dim, and then there is
    no such box: its shape is still right, and so is ours, which lists them all (compared with the splits above)."""
    for rank in range(layout.world_size):
        shape, offset = one_box_of(
            layout.spec.shape,
            layout.mesh.shape,
            list(layout.mesh.coordinate(rank)),
            tuple(map(torchs, layout.placements)),
        )
        (part,) = layout.parts(rank)
        if 0 in part.sizes:
            assert 0 in tuple(shape)
            continue
        assert tuple(shape) == part.sizes
        if all(len(dim) == 1 for dim in part.dims):
            assert tuple(offset) == tuple(dim[0][0] for dim in part.dims)


@TELLS_ONE_BOX
def test_a_strided_shard_owns_intervals_that_no_single_offset_can_name():
    layout = TensorLayout(TensorSpec("w", (8,), "int64"), "dp=2", "_S(0, 2)")
    shape, offset = one_box_of((8,), (2,), [0], (_StridedShard(0, split_factor=2),))

    assert (tuple(shape), tuple(offset)) == ((4,), (0,))  # says 0, 1, 2, 3
    assert split_by_dtensor(layout, 0).tolist() == [0, 1, 4, 5]
    assert layout.boxes(0) == (planners.Box((0,), (2,)), planners.Box((4,), (2,)))


@pytest.mark.skipif(not hasattr(placement_types, "_StridedShardOffsetMode"), reason="torch before 2.13 has no modes")
def test_the_offsets_of_strided_shards_are_ours_in_every_mode():
    """All of a rank's elements, the first of them, or none: 2.15 asks for all where 2.13 did for the first alone."""
    modes = placement_types._StridedShardOffsetMode
    for size, axis, factor in itertools.product(range(14), (1, 2, 3, 5), (1, 2, 3, 4)):
        layout = TensorLayout(TensorSpec("w", (size,), "int64"), f"dp={axis}", f"_S(0, {factor})")
        for rank in range(axis):
            ids = ours(layout, rank).tolist()
            asked = {
                m.name: torchs(layout.placements[0])._local_shard_size_and_offset(size, axis, rank, m) for m in modes
            }
            firsts = ids[0] if ids else -1
            assert asked == {"ALL": (len(ids), ids), "FIRST": (len(ids), firsts), "NONE": (len(ids), None)}


@pytest.fixture
def as_rank():
    """Makes this process a rank of a fake job; the last one is taken down at the end."""

    def become(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    assert not dist.is_initialized()
    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


CASES = [
    ((7, 5), {"dp": 3}, "S(0)"),  # uneven
    ((2, 3), {"dp": 4}, "S(0)"),  # empty ranks
    ((6,), {"dp": 2, "tp": 3}, "S(0),S(0)"),  # two axes on one dim
    ((7,), {"dp": 2, "tp": 2}, "S(0),S(0)"),  # the same, unevenly
    ((5, 9), {"dp": 2, "tp": 2}, "S(1),S(0)"),
    ((4, 6), {"rep": 2, "dp": 2}, "R,S(1)"),
    ((), {"dp": 2}, "R"),
    ((0, 4), {"dp": 2}, "S(1)"),
    ((5, 7, 3), {"a": 2, "b": 2, "c": 2}, "S(2),R,S(0)"),
]


@pytest.mark.parametrize(("shape", "axes", "text"), CASES)
def test_distribute_tensor_puts_our_elements_in_the_local_tensor_of_every_rank(as_rank, shape, axes, text):
    layout = TensorLayout(TensorSpec("w", shape, "int64"), planners.Mesh(axes), text)
    for rank in range(layout.world_size):
        as_rank(rank, layout.world_size)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        ids = torch.arange(layout.spec.numel).reshape(shape)
        tensor = distribute_own(ids, mesh, [torchs(p) for p in layout.placements])

        assert same(ours(layout, rank), tensor.to_local().numpy())
        form = LiveTensor("w", tensor).form
        assert TensorLayout.of(layout.spec, form).parts(rank) == layout.parts(rank)


@pytest.mark.parametrize("rows", [0, 1, 5, 7, 8, 13])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3)])
def test_the_fsdp_over_tp_preset_holds_what_fsdp2_over_tp_holds(as_rank, rows, dp, tp):
    """FSDP2 cuts what tensor parallelism left, which DTensor's placements, read from left to right, do not say."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    spec = TensorSpec("wq.weight", (rows, 4), "float32")
    layout = planners.fsdp_tp(dp, tp).layout([spec])["wq.weight"]
    for rank in range(dp * tp):
        as_rank(rank, dp * tp)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        # what tensor parallelism leaves of the ids, then what FSDP2 leaves of that
        ids = torch.arange(rows * 4).reshape(rows, 4)
        left = list(torch.chunk(ids, tp)) if rows else []
        left += [ids[:0]] * (tp - len(left))
        mine = left[rank % tp]
        again = list(torch.chunk(mine, dp)) if len(mine) else []
        again += [ids[:0]] * (dp - len(again))
        assert same(ours(layout, rank), again[rank // tp].numpy())
        if not rows or (rows % (dp * tp) and not UNEVEN_STRIDES):
            continue  # a linear layer without rows is refused by torch
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(4, rows, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        local = tuple(model[0].weight.to_local().shape)
        assert local == layout.parts(rank)[0].sizes


def test_all_pairs_of_placements_on_one_dim_agree():
    """Exhaustively for a short dim: every pair of cuts on meshes of 2 x 2 and 3 x 2."""
    kinds = ["S(0)", "R", *(["_S(0, 2)", "_S(0, 3)"] if UNEVEN_STRIDES else [])]
    for n, axes, pair in itertools.product(
        range(8), ({"a": 2, "b": 2}, {"a": 3, "b": 2}), itertools.product(kinds, kinds)
    ):
        layout = TensorLayout(TensorSpec("w", (n,), "int64"), planners.Mesh(axes), ",".join(pair))
        for rank in range(layout.world_size):
            assert same(ours(layout, rank), split_by_dtensor(layout, rank)), (n, axes, pair, rank)
