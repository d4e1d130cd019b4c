"""`verify`: each way in which a layout or plan can be wrong, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest

from planners import (
    Box,
    Finding,
    PlanError,
    ProofError,
    Report,
    TensorLayout,
    TensorSpec,
    View,
    format_plan,
    plan_reads,
    plan_transfers,
    plan_writes,
    verify,
)
from planners.geometry.overlap import Fault, tiling_fault
from planners.plans.load import LoadPlan
from tests.planners.states import state_of

W = TensorSpec("w", (4, 6), "float32")
ROWS, COLUMNS = TensorLayout(W, "dp=2", "S(0)"), TensorLayout(W, "tp=3", "S(1)")


def said(report):
    assert not report.ok
    assert not report
    return [str(finding) for finding in report.findings]


@pytest.mark.parametrize(
    ("region", "boxes", "fault"),
    [
        ([Box((0,), (4,))], [Box((0,), (2,)), Box((2,), (2,))], None),
        ([Box((0,), (4,))], [Box((0,), (3,)), Box((2,), (1,))], Fault((2,), 2)),  # gap and overlap of equal size
        ([Box((0,), (4,))], [Box((0,), (3,))], Fault((3,), 0)),
        ([Box((0,), (2,))], [Box((0,), (3,))], Fault((2,), 1, 0)),
        ([], [], None),
        ([Box((1, 1), (0, 3))], [], None),
        ([Box.full(())], [Box.full(())], None),
        ([Box.full(())], [], Fault((), 0)),
        ([Box.full(())], [Box.full(())] * 2, Fault((), 2)),
        ([Box((0, 0), (2, 2))], [Box((0, 0), (1, 2)), Box((1, 0), (1, 1))], Fault((1, 1), 0)),
    ],
)
def test_tilings_are_judged_exactly(region, boxes, fault):
    assert tiling_fault(region, boxes) == fault


def test_a_grid_too_large_to_count_is_halved():
    rows = [Box((i, 0), (1, 3000)) for i in range(3000)]
    cuts = [Box((3000, j), (1, 1)) for j in range(3000)]
    region = [Box((0, 0), (3001, 3000))]

    assert tiling_fault(region, rows + cuts) is None
    assert tiling_fault(region, rows + cuts[:1700] + cuts[1701:]) == Fault((3000, 1700), 0)


def test_layouts():
    assert verify(ROWS).ok
    assert str(verify(ROWS)).endswith(
        "1 tensor, ok: its boxes cover every tensor, each element once per group of replicas"
    )
    hole = TensorLayout.from_boxes(W, {0: [Box((0, 0), (4, 3))], 1: [Box((0, 4), (4, 2))]})
    assert said(verify(hole)) == ["'w', element (0, 3): element (0, 3) is in no box"]
    twice = TensorLayout.from_flat_ranges(W, {0: (0, 13), 1: (12, 24)})
    assert said(verify(state_of(twice))) == ["'w', element (2, 0): element (2, 0) is in 2 boxes"]


def test_every_name_of_a_geometry_is_told():
    boxes = {0: [Box((0,), (1,))]}
    holey = [TensorLayout.from_boxes(TensorSpec(name, (2,), "float32"), boxes) for name in ("a", "b")]

    assert [finding.fqn for finding in verify(state_of(*holey)).findings] == ["a", "b"]


@pytest.mark.parametrize("plan", [plan_reads, plan_transfers])
def test_dims_beyond_what_floats_count_exactly(plan):
    before, after = (TensorLayout(TensorSpec("w", (2**62 - 1,), "uint8"), f"dp={n}", "S(0)") for n in (3, 7))

    assert verify(plan(state_of(before), state_of(after))).ok


def test_load_plans_whose_sides_do_not_fit():
    other = TensorLayout(TensorSpec("w", (6, 4), "float32"), "dp=2", "S(0)")
    gone = TensorLayout(TensorSpec("gone", (1,), "float32"), "dp=2", "R")

    assert said(verify(LoadPlan(state_of(ROWS), state_of(other, gone)))) == [
        "'w': is saved with shape [4, 6], but the target layout has [6, 4]",
        "'gone': is not saved",
    ]
    view = View.of(gone.spec).rename("new")
    new = TensorLayout(view.spec, "dp=1", "R")
    assert said(verify(LoadPlan(state_of(ROWS), state_of(new), views={"new": view}))) == [
        "'new': takes from 'gone', which is not saved"
    ]


PLAN = plan_reads(state_of(ROWS), state_of(COLUMNS))
FIRST, SECOND = PLAN.items(1)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([FIRST], "'w', rank 1, element (2, 2): is written never, at (2, 0) of the local tensor"),
        ([FIRST, SECOND, SECOND], "'w', rank 1, element (2, 2): is written 2 times"),
        ([FIRST, SECOND._replace(target=FIRST.target)], "to Box[0:2, 2:4], which needs other elements"),
        ([FIRST, SECOND._replace(owner=0)], "reads Box[2:4, 0:6] from 0, which does not hold it"),
        ([FIRST, SECOND._replace(owner=7)], "reads Box[2:4, 0:6] from 7, which does not hold it"),
        ([FIRST, SECOND._replace(nbytes=15)], "says 15 bytes, but has 4 elements of float32"),
        ([FIRST, SECOND._replace(part=1)], "writes local tensor 1, but the rank has 1"),
        ([FIRST, SECOND._replace(source=Box((0, 5), (2, 2)))], "is outside its chunk of sizes (2, 6)"),
        ([FIRST, SECOND._replace(source=Box((0, 2), (1, 2)), nbytes=8)], "sizes (1, 2) into one of (2, 2)"),
        ([FIRST, SECOND._replace(target=Box((3, 0), (2, 2)))], "goes beyond a piece of the local tensor"),
        ([FIRST, SECOND._replace(fqn="v")], "'v', rank 1, element (2, 2): is read, but is not wanted"),
        ([FIRST, SECOND._replace(saved_as="v")], "reads 'v', which is not saved"),
        ([FIRST, SECOND._replace(dims=(1, 0))], "with dims (1, 0)"),
        ([FIRST, SECOND._replace(dims=(0,))], "leaves out dim 1"),
    ],
)
def test_items_that_are_wrong(items, message):
    assert any(message in line for line in said(verify(PLAN.with_items({1: items}))))


def test_items_that_are_right_may_be_cut_and_ordered_at_will():
    halves = [
        SECOND._replace(source=Box((i, 2), (1, 2)), target=Box((2 + i, 0), (1, 2)), nbytes=8, dims=(0, 1))
        for i in (1, 0)
    ]

    assert verify(PLAN.with_items({1: [*halves, FIRST]})).ok


def test_through_a_view_the_dims_and_the_source_count():
    square = TensorSpec("s", (4, 4), "float32")
    view = View.of(square).transpose().rename("t")
    plan = plan_reads(
        state_of(TensorLayout(square, "dp=1", "R")), state_of(TensorLayout(view.spec, "dp=1", "R")), views=[view]
    )
    (item,) = plan.items(0)

    assert verify(plan).ok
    for wrong in (item._replace(dims=None), item._replace(dims=(0, 1)), item._replace(saved_as=None)):
        assert not verify(plan.with_items({0: [wrong]})).ok


def test_save_plans():
    plan = plan_writes(state_of(ROWS))
    (item,) = plan.items(1)

    assert verify(plan).ok
    assert said(verify(plan.with_items({1: []}))) == ["'w', element (2, 0): no rank writes it"]
    wrong = plan.with_items({1: [item._replace(box=Box((0, 0), (2, 6)))]})
    assert "writes Box[0:2, 0:6], which it does not hold there" in said(verify(wrong))[0]


def test_a_plan_proves_itself_and_prints_what_each_rank_does():
    for plan, ranks in ((PLAN, "s 0-2 read "), (plan_writes(state_of(ROWS)), "s 0-1 write ")):
        assert plan.verify() == verify(plan)
        assert str(plan) == format_plan(plan, items=False)
        assert str(plan).startswith(f"{plan!r}\n  rank{ranks}")
        assert plan.verify().subject == repr(plan)
    assert not PLAN.with_items({1: []}).verify().ok


def test_a_report_can_be_raised():
    verify(PLAN).raise_if_failed()
    with pytest.raises(ProofError, match=": 1 problem:") as raised:
        verify(PLAN.with_items({1: [FIRST]})).raise_if_failed()
    assert (raised.value.fqn, raised.value.rank) == ("w", 1)
    report = Report("x", (Finding("odd", "w", 3, (1, 2)),), 1)
    assert str(report) == "x: 1 tensor, 1 problem\n  'w', rank 3, element (1, 2): odd"


def test_nothing_else_can_be_verified():
    with pytest.raises(PlanError, match="verify takes a layout, a plan, or a schedule, got array"):
        verify(np.zeros(3))
