"""Laws of topologies and of the strategies for them and for views."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from oracle import elements

from planners import StateLayout, Topology, dumps, loads, plan_reads, replay, verify
from planners.geometry.layout import TensorSpec
from planners.testing.strategies import layouts, product_layouts, specs, topologies, views
from property_tests.budget import examples


@st.composite
def states(draw):
    return [draw(specs(f"layers.{i}.w")) for i in range(draw(st.integers(1, 3)))]


@given(states().flatmap(lambda its: st.tuples(st.just(its), topologies(its))))
@settings(max_examples=examples(400, most=20_000))
def test_a_topology_gives_every_tensor_a_whole_layout_and_survives_its_texts(made):
    tensors, topology = made

    layout = topology.layout(tensors)

    assert Topology.parse(str(topology)) == topology
    assert loads(dumps(topology)) == topology
    assert loads(dumps(topology)).layout(tensors) == layout
    assert layout.specs == {spec.fqn: spec for spec in tensors}
    assert verify(layout).ok
    for spec in tensors:
        held = {x for rank in range(layout[spec.fqn].world_size) for x in elements(layout[spec.fqn], rank)}
        assert held == set(range(spec.numel))
        assert set(layout[spec.fqn].mesh.ranks.tolist()) <= set(topology.mesh.ranks.tolist())


@given(st.data())
@settings(max_examples=examples(200, most=20_000))
def test_a_plan_between_two_topologies_verifies(data):
    tensors = data.draw(states())
    saved, wanted = (data.draw(topologies(tensors)).layout(tensors) for _ in range(2))

    plan = plan_reads(saved, wanted)

    assert verify(plan).ok
    assert sum(plan.items(rank).nbytes for rank in range(plan.world_size)) == plan.total_bytes


@given(st.data())
@settings(max_examples=examples(200, most=20_000))
def test_any_view_of_any_layouts_arrives_in_any_layout(data):
    first = data.draw(specs("a"))
    sources = [first, TensorSpec("b", first.shape, first.dtype)]
    view = data.draw(views(sources))
    saved = StateLayout({spec.fqn: data.draw(layouts(spec)) for spec in sources})
    wanted = StateLayout({"viewed": data.draw(product_layouts(view.spec))})

    plan = plan_reads(saved, wanted, views=[view])

    assert verify(plan).ok
    for rank in range(plan.world_size):
        for array in replay(plan, rank)["viewed"]:
            assert (array >= 0).all()  # -1 marks what nothing was written to
