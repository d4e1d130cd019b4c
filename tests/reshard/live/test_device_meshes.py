"""What a rank holds of a DTensor on a mesh made in any way that torch has, also where its ranks do not ascend.

torch cuts and gathers a tensor along a mesh axis in the order of that axis's process group, which is mostly ascending
whatever the mesh says: FSDP2, `distribute_tensor` and `full_tensor` all do. The oracle asks torch's groups.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import reshard
from planners.testing.replay import element_ids
from reshard.errors import FormatError, LayoutError
from reshard.live.tensors import LiveTensor
from reshard.live.wrappers import forget_meshes
from reshard.ranks.global_layout import describe, join_layouts
from tests import gloo
from tests.torch_releases import distribute_own

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def root(ranks, sizes, names="abc"):
    return DeviceMesh("cpu", np.reshape(ranks, sizes), mesh_dim_names=tuple(names[: len(sizes)]))


def from_groups(ranks, sizes, kept):
    """As `root`, out of process groups of our own, with the ranks of each in the order of the mesh where `kept`."""
    grid, here, groups = np.reshape(ranks, sizes), dist.get_rank(), []
    for axis in range(grid.ndim):
        for line in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]):
            group = dist.new_group(line.tolist(), **({"sort_ranks": not kept} if KEEPS_ORDER else {}))
            if here in line:
                groups.append(group)
    if grid.ndim == 1 and (kept or list(grid) == sorted(grid)):
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=("a",))
    return DeviceMesh.from_group(groups, "cpu", mesh=torch.from_numpy(grid), mesh_dim_names=tuple("abc"[: grid.ndim]))


def concatenated(ranks, sizes):
    """The mesh with its axes in reverse order, as FSDP2 over tensor parallelism puts two meshes together."""
    whole = root(ranks, sizes)
    return DeviceMesh._concatenate([whole[name] for name in reversed(whole.mesh_dim_names)])


def sliced(ranks, sizes, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slicing at a flattened axis is an old way
        return root(ranks, sizes)[names]


def unflattened(ranks, sizes):
    return root(ranks, (len(ranks),))._unflatten(0, sizes, tuple("xyz"[: len(sizes)]))


def flat_of_part(ranks, sizes):
    return root(ranks, sizes)["a", "b"]._flatten("ab")


def unnamed(ranks, sizes):
    return DeviceMesh("cpu", np.reshape(ranks, sizes))


def one_of_all(ranks, sizes):
    (found,) = (m for m in root(ranks, sizes)._get_all_submeshes("b") if dist.get_rank() in m.mesh.flatten().tolist())
    return found


KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Groups in any order; those of torch 2.6 all ascend."""
NEEDS = {"unflattened": "_unflatten", "flattened and unflattened": "_unflatten", "concatenated": "_concatenate"}
NEEDS |= {"one of all": "_get_all_submeshes"}
"""Methods of meshes that torch 2.6 has not."""
WAYS = {
    "root": root,
    "unnamed": unnamed,
    "slice a": lambda ranks, sizes: sliced(ranks, sizes, "a"),
    "slice of the last two": lambda ranks, sizes: sliced(ranks, sizes, tuple("abc"[: len(sizes)])[-2:]),
    "flattened": lambda ranks, sizes: root(ranks, sizes)._flatten("all"),
    "flattened part": flat_of_part,
    "unflattened": unflattened,
    "flattened and unflattened": lambda ranks, sizes: (
        root(ranks, sizes)._flatten("all")._unflatten(0, sizes[::-1], tuple("xyz"[: len(sizes)]))
    ),
    "concatenated": concatenated,
    "groups that ascend": lambda ranks, sizes: from_groups(ranks, sizes, kept=False),
    "groups in the mesh's order": lambda ranks, sizes: from_groups(ranks, sizes, kept=True),
    "one of all": one_of_all,
}
WAYS = {way: make for way, make in WAYS.items() if hasattr(DeviceMesh, NEEDS.get(way, "get_group"))}
if not KEEPS_ORDER:
    del WAYS["groups in the mesh's order"]
SIZES = [(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (1, 3), (4, 2), (2, 2, 2), (2, 1, 3)]


def become(rank, world_size):
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@pytest.fixture(autouse=True)
def _no_job_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def places_in_groups(mesh):
    """Where this rank is in the process group of each axis: that is what torch's collectives go by."""
    return [dist.get_rank(mesh.get_group(axis)) for axis in range(mesh.ndim)]


def cut(ids, mesh, placements):
    """What torch's own splits leave to this rank of `ids`, axis by axis in the order of the process groups."""
    for placement, size, at in zip(placements, mesh.shape, places_in_groups(mesh), strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(ids, size, with_padding=False, contiguous=False)
            ids = pieces[at]
    return ids.clone()  # a view with an offset is a DTensor that torch cannot pickle


def ids_of(form, shape, rank):
    """The ids that the form says are in the local tensor of `rank`."""
    (part,) = form.parts(shape, rank)
    out = np.full(part.sizes, -1, dtype=np.int64)
    for box, local in part.boxes():
        out[local.slices] = element_ids(shape, box)
    return torch.from_numpy(out)


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(SIZES))
    count = int(np.prod(sizes))
    world = draw(st.integers(count, max(count, 8)))
    ranks = draw(st.permutations(range(world)))[:count]
    way = draw(st.sampled_from(sorted(WAYS)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
    kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    return world, ranks, sizes, way, shape, [draw(st.sampled_from(kinds)) for _ in range(3)]


def made(world, ranks, sizes, way, rank):
    """The mesh on `rank`; None where this way has none of such sizes, or torch refuses."""
    become(rank, world)
    try:
        return WAYS[way](ranks, sizes)
    except (KeyError, ValueError, RuntimeError, AssertionError):
        return None


def held_by_all(case):
    """Per rank of the mesh: its DTensor and ids, made as that rank; and whether the process groups of the axes that
    cut put two ranks of one replica at one place."""
    world, ranks, sizes, way, shape, placements = case
    ids, out, places = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape), {}, set()
    for rank in ranks:
        mesh = made(world, ranks, sizes, way, rank)
        if mesh is None:
            return None, False
        on_mesh = placements[: mesh.ndim]
        local = cut(ids, mesh, on_mesh)
        tensor = DTensor.from_local(local, mesh, on_mesh, run_check=False, shape=ids.shape, stride=ids.stride())
        at = [
            here if placement.is_replicate() else place
            for here, place, placement in zip(mesh.get_coordinate(), places_in_groups(mesh), on_mesh)
        ]
        places.add((tuple(mesh.mesh.flatten().tolist()), *at))
        try:
            form = LiveTensor("w", tensor).form
        except LayoutError as error:
            form = error
        out[rank] = form, local, describe({"w": LiveTensor("w", tensor)}) if not isinstance(form, LayoutError) else None
    return out, len(places) < len(ranks)


@given(cases())
@settings(QUIET, max_examples=100)
def test_every_rank_holds_what_the_order_of_its_process_groups_gave_it(case):
    shape = case[4]
    held, torn = held_by_all(case)
    if held is None:
        return
    forms = {form for form, _, _ in held.values()}
    refused = [form for form in forms if isinstance(form, LayoutError)]
    if torn:
        assert refused, case
        return
    if case[3] == "groups in the mesh's order" and (refused or len(forms) > 1):
        return  # a group that ascends does not tell its ranks that the others do not: that is refused, if rarely needed
    assert not refused, (case, refused)
    layout = join_layouts((described, [rank]) for rank, (_, _, described) in sorted(held.items()))["w"]
    for rank, (form, local, _) in held.items():
        assert torch.equal(ids_of(form, shape, rank).reshape(local.shape), local), (case, rank)
    for rank, (_, local, _) in held.items():
        assert torch.equal(ids_of(layout.form, shape, rank).reshape(local.shape), local), (case, rank)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_fsdp2_is_read_as_it_cuts_on_any_order_of_ranks(sizes):
    """On one axis, and as HSDP on the rows of a square; FSDP2 itself is the oracle."""
    for ranks, rows, rank in itertools.product(itertools.permutations(range(4)), (1, 5, 8), range(4)):
        become(rank, 4)
        model = torch.nn.Linear(3, rows, bias=False)
        ids = torch.arange(rows * 3.0).reshape(rows, 3)
        model.weight.data.copy_(ids)
        fully_shard(model, mesh=root(ranks, sizes))
        local = model.weight.to_local()

        assert torch.equal(
            ids_of(LiveTensor("", model.weight).form, (rows, 3), rank).reshape(local.shape), local.long()
        )


def test_a_mesh_whose_groups_leave_elements_to_nobody_is_refused_with_the_reason():
    become(0, 4)
    mesh = root((0, 3, 2, 1), (2, 2))
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)

    with pytest.raises(LayoutError, match=r"(?s)tensor 'w'.*ascend.*a=2,b=2@0,3,2,1"):
        _ = LiveTensor("w", tensor).form


def test_a_tensor_that_torch_cut_in_the_order_of_the_mesh_is_refused_where_its_shape_shows_it():
    """`distribute_tensor` without a source rank goes by coordinates; torch itself gathers such a tensor wrongly."""
    become(0, 2)
    tensor = distribute_own(torch.arange(3), root((1, 0), (2,)), [Shard(0)])

    with pytest.raises(LayoutError, match=r"tensor 'w'.*rank 0 has shape \(1,\).*process groups"):
        _ = LiveTensor("w", tensor).form


# Really, with all that reads and writes such tensors.

MESHES = {
    "ascending": lambda: root(range(4), (4,)),
    "reversed": lambda: root((3, 2, 1, 0), (4,)),
    "transposed and flattened": lambda: root((0, 2, 1, 3), (2, 2))._flatten("ab"),
    "hsdp": lambda: root((3, 1, 2, 0), (2, 2)),
    "square": lambda: root((0, 1, 3, 2), (2, 2)),
    "slices": lambda: root((2, 0, 3, 1), (2, 2))["b"],
    "groups in the mesh's order": lambda: from_groups((2, 0, 3, 1), (4,), kept=True),
}
if not KEEPS_ORDER:
    del MESHES["groups in the mesh's order"]
ROWS = 8


def _whole():
    return torch.arange(ROWS * 4.0).reshape(ROWS, 4)


def _tensors(name, full):
    mesh = MESHES[name]()
    cuts = {"square": [Shard(0), Shard(1)], "hsdp": [Replicate(), Shard(0)]}.get(name, [Shard(0)])
    model = torch.nn.Linear(4, ROWS, bias=False)
    model.weight.data.copy_(full)
    if name != "square":
        fully_shard(model, mesh=mesh)
    return {"cut": distribute_tensor(full, mesh, cuts), "column": distribute_tensor(full.t(), mesh, cuts)}, model


def save_on_one_mesh_load_on_another(paths):
    full, found = _whole(), {}
    for saved, path in paths.items():
        state, model = _tensors(saved, full)
        for tensor in (*state.values(), *model.parameters()):
            if isinstance(tensor, DTensor) and not torch.equal(
                tensor.full_tensor(), full if tensor.shape == full.shape else full.t()
            ):
                raise AssertionError(f"torch itself has another tensor on {saved}")
        got = reshard.get_model_state_dict(model, options=reshard.StateDictOptions(full_state_dict=True))
        found[saved, "full"] = torch.equal(got["weight"], full)
        reshard.save({**state, "model": reshard.get_model_state_dict(model)}, path)
        opened = reshard.open(path)
        found[saved, "open"] = torch.equal(opened["cut"][...], full) and torch.equal(opened["model.weight"][...], full)
        for wanted in MESHES:
            state, model = _tensors(wanted, torch.zeros_like(full))
            target = {**state, "model": reshard.get_model_state_dict(model)}
            reshard.load(target, path)
            back = [target["cut"], target["column"].t(), target["model"]["weight"]]
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in back]
            found[saved, wanted] = all(torch.equal(t, full) for t in whole)
            source, _ = _tensors(saved, full)
            target, model = _tensors(wanted, torch.zeros_like(full))
            reshard.redistribute(source, target)
            found[saved, wanted, "redistributed"] = torch.equal(target["cut"].full_tensor(), full)
            for rank0 in (False, True):
                options = reshard.StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0)
                new = {"weight": full + 1} if not rank0 or dist.get_rank() == 0 else {}
                reshard.set_model_state_dict(model, new, options=options)
                weight = model.weight.full_tensor() if isinstance(model.weight, DTensor) else model.weight
                found[saved, wanted, "set", rank0] = torch.equal(weight, full + 1)
    return {what for what, right in found.items() if not right}


def test_states_go_from_any_mesh_to_any_mesh(tmp_path):
    paths = {name: str(tmp_path / str(i)) for i, name in enumerate(MESHES)}

    assert gloo.run(save_on_one_mesh_load_on_another, 4, paths) == [set()] * 4


# In files that every rank wrote with torch.save, the groups are gone; they are taken to ascend.


@given(cases().filter(lambda case: case[0] == len(case[1]) and case[3] != "groups in the mesh's order"))
@settings(QUIET, max_examples=50)
def test_dtensors_in_the_ranks_own_files_are_read_in_the_order_of_their_process_groups(case):
    world, ranks, sizes, way, shape, placements = case
    ids = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        places = set()
        for rank in ranks:
            mesh = made(world, ranks, sizes, way, rank)
            if mesh is None:
                return
            on_mesh = placements[: mesh.ndim]
            tensor = DTensor.from_local(
                cut(ids, mesh, on_mesh), mesh, on_mesh, run_check=False, shape=ids.shape, stride=ids.stride()
            )
            torch.save({"w": tensor}, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
            at = zip(mesh.get_coordinate(), places_in_groups(mesh), on_mesh, strict=True)
            places.add((tuple(mesh.mesh.flatten().tolist()), *(c if p.is_replicate() else g for c, g, p in at)))
        dist.destroy_process_group()
        if len(places) < len(ranks):
            with pytest.raises(FormatError, match=r"is sharded over several axes.*ascend"):
                reshard.open(folder)["model.w"]
        else:
            assert torch.equal(reshard.open(folder)["model.w"][...], ids), case
