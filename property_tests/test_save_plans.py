"""Laws of save plans: every element once, by a rank that holds it, evenly."""

from __future__ import annotations

import dataclasses
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from oracle import local_arrays

from planners import PlanError, StateLayout, TensorLayout, TensorSpec, dumps, loads, plan_writes, verify
from planners.geometry.layout import FlatForm
from planners.testing.strategies import layouts, meshes, placements, product_layouts, specs
from property_tests.budget import examples


@st.composite
def states(draw, make=layouts, max_tensors=3, copies=3):
    """Some tensors, each several times under other names, with a limit that divides some of their chunks."""
    out = {}
    for i in range(draw(st.integers(1, max_tensors))):
        layout = draw(make(draw(specs(f"w{i}"))))
        for j in range(draw(st.integers(1, copies))):
            name = f"w{i}.{j}"
            out[name] = TensorLayout.of(TensorSpec(name, layout.spec.shape, layout.spec.dtype), layout.form)
    return StateLayout(out)


def plan_of(data, make=layouts):
    layout = data.draw(states(make))
    hosts = data.draw(st.none() | st.integers(1, 4))
    try:
        return plan_writes(
            layout, divide_above_bytes=data.draw(st.sampled_from([1, 16, 1 << 20])), ranks_per_host=hosts
        )
    except PlanError:
        assume(False)  # several flat ranges or boxes of a tensor may overlap without being equal


def written(plan, rank, item):
    """The element numbers that an item writes, taken out of what its rank really holds."""
    layout = plan.layout[item.fqn]
    held = local_arrays(layout, rank)
    if isinstance(layout.form, FlatForm):
        part = layout.parts(rank)[item.part]
        flat = np.concatenate([a.reshape(-1) for a in held])
        return flat[part.flat_start : part.flat_start + part.numel].reshape(part.sizes)[item.source.slices]
    return held[item.part][item.source.slices]


@given(st.data())
@settings(max_examples=examples(600, most=20_000))
def test_each_element_is_written_once_by_a_rank_that_holds_it(data):
    plan = plan_of(data)

    assert verify(plan).ok
    assert loads(dumps(plan)) == plan
    seen = {fqn: Counter() for fqn in plan.layout}
    for rank in range(plan.world_size):
        items = plan.items(rank)
        assert items.nbytes == plan.bytes(rank)
        for item in items:
            ids = np.arange(plan.layout[item.fqn].spec.numel).reshape(plan.layout[item.fqn].spec.shape)
            np.testing.assert_array_equal(written(plan, rank, item), ids[item.box.slices])
            seen[item.fqn].update(ids[item.box.slices].reshape(-1).tolist())
    for fqn, counts in seen.items():
        assert counts == Counter(range(plan.layout[fqn].spec.numel))
    assert plan.total_bytes == plan.layout.nbytes


@given(st.data())
@settings(max_examples=examples(300, most=20_000))
def test_the_writers_of_every_chunk_are_those_whose_items_write_it(data):
    plan = plan_of(data)
    items = Counter((rank, i.fqn, i.box) for rank in range(plan.world_size) for i in plan.items(rank))

    found = Counter()
    for fqn, layout in plan.layout.items():
        for _, chunk in layout.chunks():
            for rank, box in plan.writers(fqn, chunk):
                assert chunk.contains(box)
                found[rank, fqn, box] += 1

    assert found == items


def best_level(plan):
    """The least possible bytes of the busiest rank if chunks could be cut anywhere: by flow, with bisection."""
    supply = Counter()
    for layout in plan.layout.values():
        holders = {}
        for rank in range(layout.world_size):
            for box in layout.boxes(rank):
                holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            supply[tuple(sorted(ranks))] += box.numel * layout.spec.itemsize
    total = sum(supply.values())
    low, high = 0, total
    while low < high:
        level = (low + high) // 2
        graph = nx.DiGraph()
        graph.add_nodes_from(["source", "sink"])
        for ranks, nbytes in supply.items():
            graph.add_edge("source", ranks, capacity=nbytes)
            for rank in ranks:
                graph.add_edge(ranks, rank, capacity=nbytes)
                graph.add_edge(rank, "sink", capacity=level)
        if nx.maximum_flow_value(graph, "source", "sink") >= total:
            high = level
        else:
            low = level + 1
    return low


@st.composite
def one_mesh(draw):
    """Tensors placed in different ways on the same mesh, as real models are."""
    mesh = draw(meshes(max_ranks=8))
    out = {}
    for i in range(draw(st.integers(1, 4))):
        spec = TensorSpec(f"w{i}", draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)), "float32")
        form = TensorLayout(spec, mesh, [draw(placements(len(spec.shape))) for _ in range(mesh.ndim)]).form
        for j in range(draw(st.integers(1, 5))):
            name = f"w{i}.{j}"
            out[name] = TensorLayout.of(TensorSpec(name, spec.shape, spec.dtype), form)
    return StateLayout(out)


@given(one_mesh())
@settings(max_examples=examples(300, most=20_000))
def test_the_busiest_rank_is_near_the_optimum_by_flow(layout):
    plan = plan_writes(layout, divide_above_bytes=1)

    # each assignment levels loads up to one row of a chunk; assignments follow one another
    slack = sum(
        int(assigned.chunks.sizes.prod(axis=1).max() // assigned.units.min()) * assigned.itemsize
        for assigned in plan.assignments
    )
    assert int(plan.rank_bytes().max()) <= best_level(plan) + slack


@pytest.mark.parametrize("ranks_per_host", [None, 8])
def test_a_model_on_a_hybrid_mesh_is_written_evenly(ranks_per_host):
    shapes = {"wq": (4096, 4096), "wk": (1024, 4096), "w1": (14336, 4096), "norm": (4096,)}
    state = {"embed": TensorLayout(TensorSpec("embed", (128256, 4096), "bfloat16"), "rep=4,dp=16", "R,S(0)")}
    for layer in range(6):
        for name, shape in shapes.items():
            fqn = f"layers.{layer}.{name}"
            state[fqn] = TensorLayout(TensorSpec(fqn, shape, "bfloat16"), "rep=4,dp=16", "R,S(0)")

    loads_ = plan_writes(StateLayout(state), ranks_per_host=ranks_per_host).rank_bytes()

    assert loads_.max() / loads_.mean() < 1.03


@given(st.data())
@settings(max_examples=examples(200, most=20_000))
def test_verify_finds_any_one_spoiled_entry_of_a_deal(data):
    plan = plan_of(data)
    assignments = [i for i, assigned in enumerate(plan.assignments) if len(assigned.ranks)]
    if not assignments:
        return
    which = data.draw(st.sampled_from(assignments))
    assigned = plan.assignments[which]
    entry = data.draw(st.integers(0, len(assigned.ranks) - 1))
    spoiled = []
    for name, by in (("ranks", 1), ("ranks", -1), ("indices", 1)):
        column = getattr(assigned, name).copy()
        column[entry] += by
        rank, index = int(assigned.ranks[entry]), int(assigned.indices[entry])
        chunk = int(np.searchsorted(assigned.chunks.indptr, entry, side="right")) - 1
        boxes = [box for box, _ in assigned.chunks.part(chunk).boxes()]
        layout = plan.layout[assigned.names[0]]
        rank, index = (int(column[entry]), index) if name == "ranks" else (rank, int(column[entry]))
        parts = layout.parts(rank) if 0 <= rank < layout.world_size else ()
        if index < len(parts) and [box for box, _ in parts[index].boxes()] == boxes:
            continue  # a replica: it may write the chunk just as well
        spoiled.append(dataclasses.replace(assigned, **{name: column}))
    last = int(assigned.chunks.indptr[np.searchsorted(assigned.chunks.indptr, entry, side="right")]) - 1
    for by in (1, -1):
        ends = assigned.ends.copy()
        ends[last] += by
        spoiled.append(dataclasses.replace(assigned, ends=ends))
    spoiled.append(dataclasses.replace(assigned, names=assigned.names[1:]))
    spoiled.append(dataclasses.replace(assigned, names=(*assigned.names, assigned.names[0])))

    for instead in spoiled:
        broken = plan_writes(plan.layout)
        broken.assignments = (*plan.assignments[:which], instead, *plan.assignments[which + 1 :])
        assert not verify(broken).ok


@given(st.data())
@settings(max_examples=examples(200, most=20_000))
def test_verify_finds_any_one_spoiled_item(data):
    plan = plan_of(data, product_layouts)
    ranks = [rank for rank in range(plan.world_size) if plan.items(rank)]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    items = list(plan.items(rank))
    at = data.draw(st.integers(0, len(items) - 1))
    item = items[at]
    spoiled = [[], [item, item], [item._replace(fqn="nobody")], [item._replace(nbytes=item.nbytes + 1)]]
    for d in range(item.box.ndim):
        step = [int(i == d) for i in range(item.box.ndim)]
        spoiled += [[item._replace(box=item.box.shift(step))], [item._replace(source=item.source.shift(step))]]

    assert verify(plan.with_items({rank: items})).ok
    for instead in spoiled:
        assert not verify(plan.with_items({rank: [*items[:at], *instead, *items[at + 1 :]]})).ok, instead
