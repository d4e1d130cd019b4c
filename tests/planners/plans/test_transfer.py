"""Transfers between running ranks, at sizes that can be checked by eye; the laws are in property_tests."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from planners import (
    Box,
    CoverageError,
    LayoutMismatchError,
    Mesh,
    PlanError,
    StateLayout,
    TensorLayout,
    TensorSpec,
    TransferPlan,
    fsdp,
    plan_transfers,
    verify,
)
from tests.planners.states import alike

state = alike((8, 12))


def crossing(plan):
    return [(i.sender, i.receiver, i.box, i.nbytes) for i in plan.items() if not i.is_local]


def test_the_same_layout_moves_nothing():
    plan = plan_transfers(state("S(0),S(1)", "dp=2,tp=2"), state("S(0),S(1)", "dp=2,tp=2"))

    assert plan.bytes_moved == 0
    assert plan.local_bytes().tolist() == [96] * 4
    assert all(item.is_local for item in plan.items())
    assert len(plan.traffic().sender) == 0


def test_a_job_grows_from_two_to_three_ranks():
    plan = plan_transfers(state("S(0)", "dp=2", (6,)), state("S(0)", "dp=3", (6,)))

    assert crossing(plan) == [(0, 1, Box((2,), (1,)), 4), (1, 2, Box((4,), (2,)), 8)]
    assert plan.sent_bytes().tolist() == [4, 8, 0]
    assert plan.received_bytes().tolist() == [0, 4, 8]
    assert plan.local_bytes().tolist() == [8, 4, 0]


def test_disjoint_ranks_share_one_numbering():
    plan = plan_transfers(state("S(0)", "dp=2@0,1", (4,)), state("S(0)", "dp=2@2,3", (4,)))

    assert plan.world_size == 4
    assert [(i.sender, i.receiver) for i in plan.items()] == [(0, 2), (1, 3)]
    assert plan.local_bytes().sum() == 0


def test_copies_serve_newcomers_evenly():
    names = [f"w{i}" for i in range(12)]
    plan = plan_transfers(state("R", "dp=4", (6,), names), state("R", "dp=7", (6,), names))

    assert plan.bytes_moved == 3 * 12 * 24
    assert plan.sent_bytes().tolist() == [9 * 24] * 4 + [0] * 3


def test_one_large_tensor_among_small_ones_is_sent_by_the_least_loaded():
    before = StateLayout({**state("R", "dp=2", (100,), ["big"]), **state("R", "dp=2", (60,), ["small"])})
    after = StateLayout({**state("R", "dp=3", (100,), ["big"]), **state("R", "dp=3", (60,), ["small"])})

    plan = plan_transfers(before, after)

    assert sorted(plan.sent_bytes().tolist()) == [0, 240, 400]


def test_holders_on_the_same_host_come_first():
    before, after = state("R", "dp=2@0,4", (6,)), state("R", "dp=4@1,2,5,7", (6,))

    near = plan_transfers(before, after, ranks_per_host=4)

    assert {(i.sender, i.receiver) for i in near.items()} == {(0, 1), (0, 2), (4, 5), (4, 7)}


def test_pipeline_stages_move_to_fsdp():
    before = StateLayout(
        {f"layers.{i}": TensorLayout(TensorSpec(f"layers.{i}", (4, 2), "float32"), f"dp=2@{2 * i},{2 * i + 1}", "S(0)")
         for i in range(2)}
    )  # fmt: skip
    after = StateLayout({n: TensorLayout(layout.spec, "dp=4", "S(0)") for n, layout in before.items()})

    plan = plan_transfers(before, after)

    assert verify(plan).ok
    assert plan.received_bytes().tolist() == [8, 16, 16, 8]


def test_what_it_holds_itself_is_copied_though_others_hold_it_too():
    """Overlapping boxes: rank 1 has [2:6), of which rank 0 has a part as well."""
    spec = TensorSpec("w", (8,), "float32")
    before = TensorLayout.from_boxes(spec, {0: [Box((0,), (4,))], 1: [Box((2,), (4,))], 2: [Box((6,), (2,))]})
    after = TensorLayout.from_boxes(spec, {1: [Box((1,), (6,))]})

    plan = plan_transfers(StateLayout({"w": before}), StateLayout({"w": after}))

    assert plan.local_bytes()[1] == 16
    assert {(i.sender, i.box) for i in plan.items()} == {
        (1, Box((2,), (4,))),
        (0, Box((1,), (1,))),
        (2, Box((6,), (1,))),
    }


def test_the_graph_has_an_edge_per_pair_and_name():
    plan = plan_transfers(state("S(0)", "dp=2", names=["a", "b"]), state("S(1)", "dp=3", names=["a", "b"]))

    graph = plan.graph()

    assert isinstance(graph, nx.MultiDiGraph)
    assert set(graph.edges(keys=True)) == {(s, r, n) for s, r in [(0, 1), (0, 2), (1, 0), (1, 2)] for n in "ab"}
    assert graph.size("nbytes") == plan.bytes_moved


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("receivers", [3, 8])
def test_the_busiest_sender_is_within_one_piece_of_the_optimum(shards, copies, receivers):
    """The optimum divides pieces at will: the least limit L for which a flow from holders to receivers exists."""
    before = state("R,S(0)", f"copy={copies},shard={shards}", (120,))
    after = StateLayout(
        {"w": TensorLayout(before["w"].spec, Mesh({"dp": receivers}, range(40, 40 + receivers)), "S(0)")}
    )

    plan = plan_transfers(before, after)

    pieces = {(i.box, i.receiver): i.nbytes for i in plan.items()}
    limit = optimum(before["w"], pieces)
    assert plan.sent_bytes().max() <= limit + max(pieces.values())


def optimum(layout: TensorLayout, pieces) -> int:
    for limit in range(1, sum(pieces.values()) + 1):
        graph = nx.DiGraph()
        for (box, receiver), nbytes in pieces.items():
            graph.add_edge((box, receiver), "end", capacity=nbytes)
            for rank in range(layout.world_size):
                if any(held.contains(box) for held in layout.boxes(rank)):
                    graph.add_edge("start", rank, capacity=limit)
                    graph.add_edge(rank, (box, receiver), capacity=nbytes)
        if nx.maximum_flow_value(graph, "start", "end") == sum(pieces.values()):
            return limit
    raise AssertionError("no limit is enough")


def test_sharded_to_copied_at_scale_is_not_enumerated():
    """16,384 x 12,288 deliveries would not fit in memory; their sums take no time."""
    plan = plan_transfers(state("S(0)", "dp=16384", (32768, 8)), state("R", "dp=12288", (32768, 8)))

    assert plan.sent_bytes()[0] == 64 * 12287
    assert plan.sent_bytes()[-1] == 64 * 12288
    assert plan.received_bytes()[5] == 32768 * 32 - 64
    assert verify(plan).ok


def test_tensors_on_one_side_only():
    before, after = state("S(0)", "dp=2", names=["a", "b"]), state("S(0)", "dp=3", names=["b", "c"])

    with pytest.raises(LayoutMismatchError, match="no rank holds 'c' before"):
        plan_transfers(before, after)
    plan = plan_transfers(before, after, allow_missing=True)

    assert (plan.names, plan.dropped, plan.missing) == (("b",), ("a",), ("c",))
    assert {item.fqn for item in plan.items()} == {"b"}
    assert verify(plan).verdict.endswith("from a rank that holds it; not filled: 'c'")


def test_other_shapes_and_dtypes_are_all_named():
    before = StateLayout({**state("R", "dp=1", (4,), ["a"]), **state("R", "dp=1", (4,), ["b"])})
    after = StateLayout({**state("R", "dp=2", (5,), ["a"]), **state("R", "dp=2", (4,), ["b"], "bfloat16")})

    with pytest.raises(LayoutMismatchError, match=r"'a' has shape \[4\].*'b' is float32 before, but bfloat16"):
        plan_transfers(before, after)


def test_a_cast_crosses_as_before():
    plan = plan_transfers(state("R", "dp=1", (4,)), state("R", "dp=2", (4,), dtype="bfloat16"), allow_cast=True)

    assert plan.bytes_moved == 16


def test_a_hole_before_is_named():
    spec = TensorSpec("w", (8,), "float32")
    before = StateLayout({"w": TensorLayout.from_boxes(spec, {0: [Box((0,), (5,))]})})
    plan = plan_transfers(before, state("S(0)", "dp=2", (8,)))

    with pytest.raises(CoverageError, match=r"no rank holds it.*'w'.*rank 1"):
        plan.items_to(1)
    report = verify(plan)
    assert [(f.fqn, f.rank, f.element) for f in report.findings] == [("w", 1, (5,))]


def test_ranks_and_items_outside_the_job_are_refused():
    plan = plan_transfers(state("S(0)", "dp=2"), state("S(0)", "dp=3"))

    with pytest.raises(PlanError, match="only ranks 0 to 2"):
        plan.items_to(3)
    with pytest.raises(PlanError, match="only ranks 0 to 2"):
        plan.items_from(-1)
    with pytest.raises(PlanError, match="goes to rank 1"):
        plan.with_items({0: plan.items_to(1)})
    with pytest.raises(PlanError, match="only ranks 0 to 2"):
        plan.with_items({0: [plan.items_to(0)[0]._replace(sender=7)]})
    with pytest.raises(PlanError, match="ranks_per_host must be >= 1"):
        plan_transfers(state("S(0)", "dp=2"), state("S(0)", "dp=3"), ranks_per_host=0)


def test_no_tensors_and_scalars():
    empty = plan_transfers(StateLayout({}), StateLayout({}))
    scalar = plan_transfers(state("R", "dp=1", ()), state("R", "dp=3", ()))
    hollow = plan_transfers(state("S(0)", "dp=2", (0, 4)), state("S(1)", "dp=3", (0, 4)))

    assert (empty.bytes_moved, hollow.bytes_moved, scalar.bytes_moved) == (0, 0, 8)
    assert all(verify(plan).ok for plan in (empty, scalar, hollow))
    assert np.array_equal(scalar.sent_bytes(), [8, 0, 0])


def test_a_name_that_one_side_lacks_is_refused():
    plan = plan_transfers(state("S(0)", "dp=2"), state("S(0)", "dp=3"))

    with pytest.raises(PlanError, match=r"must be in both layouts .*'v'"):
        type(plan)(plan.before, plan.after, ["w", "v"])


@pytest.mark.parametrize(("shape", "names"), [((8, 4), ["w", "w"]), ((4, 8), ["w"]), ((32,), ["w"])])
def test_what_cannot_be_moved_is_refused_before_the_proof(shape, names):
    """As many elements in another shape were proved, and so was a tensor that is sent twice."""
    before, after = (fsdp(2).layout([TensorSpec("w", its, "float32")]) for its in ((8, 4), shape))

    with pytest.raises(PlanError, match=r"the same shape in both layouts|list a tensor twice"):
        TransferPlan(before, after, names)
