"""Save plans: who writes what. The deals here are golden, since the native format depends on them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from planners import Box, PlanError, StateLayout, TensorLayout, TensorSpec, plan_writes, verify
from planners.plans.save import _level


def copies(count, shape, mesh, placements, dtype="float32"):
    specs = [TensorSpec(f"w{i}", shape, dtype) for i in range(count)]
    return StateLayout({spec.fqn: TensorLayout(spec, mesh, placements) for spec in specs})


def written(plan):
    return [[(item.fqn, item.box.offsets, item.box.sizes) for item in plan.items(r)] for r in range(plan.world_size)]


def test_replicas_share_whole_tensors():
    plan = plan_writes(copies(4, (2,), "dp=2", "R"))

    whole = ((0,), (2,))
    assert written(plan) == [[("w0", *whole), ("w1", *whole)], [("w2", *whole), ("w3", *whole)]]
    assert plan.rank_bytes().tolist() == [16, 16]
    assert plan.writers("w2", Box((0,), (2,))) == ((1, Box((0,), (2,))),)


def test_large_chunks_are_divided_along_their_longest_dim():
    plan = plan_writes(copies(3, (2, 6), "dp=2", "R"), divide_above_bytes=48)

    assert written(plan) == [
        [("w0", (0, 0), (2, 6)), ("w1", (0, 0), (2, 3))],
        [("w1", (0, 3), (2, 3)), ("w2", (0, 0), (2, 6))],
    ]
    assert plan.writers("w1", Box((0, 0), (2, 6))) == ((0, Box((0, 0), (2, 3))), (1, Box((0, 3), (2, 3))))
    assert plan.items(1)[0].source == Box((0, 3), (2, 3))


def test_what_leaves_no_choice_is_dealt_first_and_the_rest_levels_it_out():
    """Rank 0 must write 8 elements of its own, so that most of what both hold goes to rank 1."""
    forced = TensorLayout.from_boxes(TensorSpec("a", (8,), "float32"), {0: [Box((0,), (8,))]}, world_size=2)
    shared = TensorLayout(TensorSpec("b", (10,), "float32"), "dp=2", "R")

    plan = plan_writes(StateLayout({"a": forced, "b": shared}), divide_above_bytes=1)

    assert plan.rank_bytes().tolist() == [36, 36]
    assert plan.writers("b", Box((0,), (10,))) == ((1, Box((0,), (9,))), (0, Box((9,), (1,))))


def test_chunks_of_several_intervals_are_written_as_boxes_of_the_whole():
    plan = plan_writes(copies(1, (8,), "tp=2,dp=2", "B(0, 4+4),R"), divide_above_bytes=1)

    assert sorted(item for items in written(plan) for item in items) == [("w0", (at,), (2,)) for at in (0, 2, 4, 6)]
    assert len(plan.writers("w0", Box((0,), (2,)))) == 1


def test_each_chunk_begins_with_another_of_its_holders():
    """One small tensor on 4 shards of 2 replicas: neither replica writes all of it."""
    plan = plan_writes(copies(1, (8,), "rep=2,dp=4", "R,S(0)"))

    assert plan.rank_bytes().reshape(2, 4).sum(axis=1).tolist() == [16, 16]


def test_hosts_are_kept_even_if_asked():
    """Ranks 0 and 1 are one host, and rank 0 has much of its own: with hosts in mind rank 1 gets less."""
    own = TensorLayout.from_boxes(TensorSpec("a", (60,), "float32"), {0: [Box((0,), (60,))]}, world_size=4)
    rest = TensorLayout(TensorSpec("b", (90,), "float32"), "dp=4", "R")
    state = StateLayout({"a": own, "b": rest})

    alone = plan_writes(state, divide_above_bytes=1).rank_bytes()
    hosts = plan_writes(state, divide_above_bytes=1, ranks_per_host=2).rank_bytes()

    assert alone.tolist() == [240, 120, 120, 120]
    assert hosts.reshape(2, 2).sum(axis=1).max() < alone.reshape(2, 2).sum(axis=1).max()
    assert hosts.sum() == alone.sum()


def test_empty_and_scalar_tensors():
    plan = plan_writes(
        StateLayout(
            {
                "e": TensorLayout(TensorSpec("e", (0, 3), "float32"), "dp=2", "S(0)"),
                "s": TensorLayout(TensorSpec("s", (), "float32"), "dp=2", "R"),
            }
        ),
        divide_above_bytes=1,
    )

    assert plan.total_bytes == 4
    assert plan.writers("s", Box.full(())) in [((0, Box.full(())),), ((1, Box.full(())),)]
    assert verify(plan).ok


@pytest.mark.parametrize(
    ("loads", "unit_bytes", "units", "shares"),
    [
        ([0, 0], 10, 4, [2, 2]),
        ([0, 20], 10, 4, [3, 1]),
        ([0, 100], 10, 4, [4, 0]),  # too high to get any
        ([0, 0, 0], 1, 7, [2, 2, 3]),
        ([5], 3, 4, [4]),
        ([0, 1000, 1000], 10, 3, [3, 0, 0]),
        ([0] * 5, 1, 14, [2, 3, 3, 3, 3]),  # what does not go round is spread, not left to the last
    ],
)
def test_water_runs_to_the_lowest_place(loads, unit_bytes, units, shares):
    ends = _level(np.array([loads]), np.array([unit_bytes]), np.array([units]))

    assert np.diff(ends[0], prepend=0).tolist() == shares


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan.items(2), "only ranks 0 to 1"),
        (lambda plan: plan.bytes(-1), "only ranks 0 to 1"),
        (lambda plan: plan.writers("nobody", Box((0,), (1,))), "no such tensor"),
        (lambda plan: plan.writers("w0", Box((7,), (1,))), "no rank holds this chunk"),
        (lambda plan: plan_writes(plan.layout, divide_above_bytes=0), "must be >= 1"),
        (lambda plan: plan_writes(plan.layout, ranks_per_host=0), "must be >= 1"),
    ],
)
def test_what_cannot_be_asked(ask, message):
    plan = plan_writes(copies(1, (2,), "dp=2", "R"))

    with pytest.raises(PlanError, match=message):
        ask(plan)


def test_regions_that_overlap_without_being_equal_are_refused():
    spec = TensorSpec("w", (4,), "float32")
    layout = TensorLayout.from_boxes(spec, {0: [Box((0,), (3,))], 1: [Box((2,), (2,))]})

    with pytest.raises(PlanError, match=r"ranks 0 and 1 hold .* which overlap but are not equal \(tensor 'w'"):
        plan_writes(StateLayout({"w": layout}))


def test_a_hole_in_what_is_held_does_not_prove():
    spec = TensorSpec("w", (4,), "float32")
    layout = TensorLayout.from_boxes(spec, {0: [Box((0,), (1,))], 1: [Box((2,), (2,))]})

    report = verify(plan_writes(StateLayout({"w": layout})))

    assert [finding.element for finding in report.findings] == [(1,)]


def test_thousands_of_ranks_are_planned_and_proved_at_once():
    layout = copies(2000, (16384, 4096), "dp=2048,tp=8", "S(0),S(1)", "bfloat16")
    plan_writes(layout)  # geometry is computed once for all

    started = time.perf_counter()
    plan = plan_writes(layout)
    assert verify(plan).ok
    items = plan.items(9000)
    chunk = Box(items[0].box.offsets, items[0].box.sizes)
    assert plan.writers("w1234", chunk)[0][0] == 9000
    assert time.perf_counter() - started < 2.0  # measured 0.05 s; loose, since other work may share the machine
    assert (plan.world_size, len(items)) == (16384, 2000)
